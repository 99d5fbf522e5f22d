"""The walk over one stage, on stages small enough to count by hand."""

from __future__ import annotations

from random import Random

import pytest
from pipefit.cost.memory import StageMemory

from chains import hostile, layer, measurement, value
from pipefit.profiles import Measurement, Origin, Span

OWN, INPUT = Origin(kind="own", index=0), Origin(kind="input", index=0)


def chain() -> Measurement:
    """Values of 10, 20 and 40 bytes; the second layer saves its input, the loss its own; a target of 3 bytes."""
    first = layer((value(10, grad=False),), (value(20),), saved=(), parameter_bytes=7, scratch_bytes=5)
    second = layer((value(20),), (value(40),), saved=(INPUT,), parameter_bytes=9, state_bytes=2, update=(1, 4))
    loss = layer((value(40), value(3, grad=False)), (value(4),), saved=(INPUT,))
    return measurement([first, second], loss)


def test_a_forward_leaves_what_was_saved_and_the_outputs() -> None:
    """Layer 0 turns 10 bytes into 20 with 5 of scratch; the inputs go, for nobody saved them."""
    memory = StageMemory(chain(), 0, 1)
    assert memory.forward() == (25, 20 - 10)
    assert memory.sent_bytes == 20


def test_an_activation_that_the_next_layer_saves_is_counted_once() -> None:
    """The 20 bytes between the layers are the first one's output and the second one's saved tensor."""
    memory = StageMemory(chain(), 0, 2, microbatches=2)
    assert (memory.input_bytes, memory.target_bytes) == (10, 3)
    assert memory.forward().after_bytes == 20 + 40 - 10 - 3
    assert memory.loss_bytes == 4 * 2


def test_a_received_input_that_is_saved_stays_and_one_that_is_not_goes() -> None:
    """Cut before layer 1, its 20 bytes are a receive buffer; it is retained because layer 1 saves it."""
    memory = StageMemory(chain(), 1, 2)
    assert memory.input_bytes == 20
    assert memory.forward().after_bytes == 40 - 3
    assert memory.input_gradient_bytes == 20


def test_gradients_are_born_in_the_first_backward_only() -> None:
    """It leaves 7 bytes of parameter gradients; a later one leaves none."""
    memory = StageMemory(chain(), 0, 1)
    assert memory.output_gradient_bytes == 20
    assert memory.backward(first_microbatch=True).after_bytes == 7 - 20
    assert memory.backward().after_bytes == -20


def test_the_step_grows_by_optimizer_state_from_layer_to_layer() -> None:
    """The first step's peak is above the state of the layers before; later ones hold the highest single update."""
    assert StageMemory(chain(), 0, 2).step == (3, 4, 2)


@pytest.mark.parametrize(("released", "peak"), [((), 30), ((0,), 10)])
def test_an_input_is_released_only_by_the_layer_that_saved_it_first(released: tuple[int, ...], peak: int) -> None:
    """Its last span has 20 bytes less where the saved input went before it; the other spans are lower."""
    spans = (Span(peak_bytes=5), Span(peak_bytes=30, released=released))
    only = layer((value(20),), (value(1),), saved=(INPUT,), later=spans)
    model = measurement([layer((value(1),), (value(20),), saved=()), only, only], layer((value(1),), (value(4),)))
    assert StageMemory(model, 1, 2).backward().peak_bytes == peak
    both = measurement([layer((value(1),), (value(20),), saved=(OWN,)), only], layer((value(1),), (value(4),)))
    assert StageMemory(both, 0, 1).backward().peak_bytes == 1


def test_a_backward_is_never_below_where_it_begins() -> None:
    """What exists when it begins counts as its peak, even if no kernel needs more: frozen layers have no spans."""
    frozen = layer((value(5, grad=False),), (value(8, grad=False),), saved=(OWN,), later=())
    assert StageMemory(measurement([frozen] * 2, layer((value(8),), (value(4),))), 0, 1).backward().peak_bytes >= 0


@pytest.mark.parametrize("seed", range(30))
def test_segments_add_up_to_the_stage(seed: int) -> None:
    """Forward layer by layer leaves what the whole stage leaves, and never peaks above it; backward likewise."""
    memory = StageMemory(hostile(Random(seed), 5), 1, 4)
    steps = [memory.forward(k, k + 1) for k in range(1, 4)]
    assert sum(step.after_bytes for step in steps) == memory.forward().after_bytes
    level, highest = 0, 0
    for step in steps:
        highest, level = max(highest, level + step.peak_bytes), level + step.after_bytes
    assert highest == memory.forward().peak_bytes
    level, highest = 0, 0
    for step in [memory.backward(k, k + 1) for k in reversed(range(1, 4))]:
        highest, level = max(highest, level + step.peak_bytes), level + step.after_bytes
    assert highest == memory.backward().peak_bytes
    assert level == memory.backward().after_bytes
