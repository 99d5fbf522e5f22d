"""Effects of actions on one microbatch in one stage, on stages small enough to count by hand."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.memory.microbatch import Flights
from pipefit.memory.model_state import StageRest
from pipefit.memory.storages import Effect, Residency, StageStorages
from pipefit.schema.actions import parse_action
from pipefit.schema.layer_costs import Origin, SharedParameter, Span
from pipefit.schema.profile import Measurement
from pipefit.simulator import Simulation
from support.synthetic_models import (
    any_plan,
    any_runs,
    any_training,
    brief,
    hostile,
    layer,
    measurement,
    value,
)

OWN, INPUT = Origin(kind="own", index=0), Origin(kind="input", index=0)
RECEIVED, SENT, ANSWERED = "0RECV_F0 0WAIT_RECV_F0", "0SEND_F0 0WAIT_SEND_F0", "0RECV_B0 0WAIT_RECV_B0"


def chain() -> Measurement:
    """Build values of 10, 20 and 40 bytes; the second layer saves its input, the loss 4 bytes; a target of 3
    bytes.
    """
    first = layer(
        (value(10, requires_grad=False),), (value(20),), saved=(), parameter_bytes=7, scratch_bytes=5
    )
    second = layer(
        (value(20),), (value(40),), saved=(INPUT,), parameter_bytes=9, state_bytes=2, update=(1, 4)
    )
    loss = layer((value(40), value(3, requires_grad=False)), (value(4),), saved=(INPUT,))
    return measurement([first, second], loss)


def effects(
    model: Measurement, start: int, stop: int, text: str, *, is_first: bool = False
) -> dict[str, Effect]:
    """Return the effects of the actions in `text`, by their text; actions without an effect are left out."""
    flights, found = Flights(StageStorages(model, start, stop)), {}
    residency = flights.start
    for word in text.split():
        residency, effect = flights.apply(residency, parse_action(word), is_first=is_first)
        if effect is not None:
            found[word] = effect
    return found


def changes(
    model: Measurement, start: int, stop: int, text: str, *, is_first: bool = False
) -> dict[str, int]:
    """Return the bytes that each of these actions leaves or frees."""
    return {word: e.after_bytes for word, e in effects(model, start, stop, text, is_first=is_first).items()}


def test_a_forward_leaves_what_was_saved_and_the_outputs() -> None:
    """Layer 0 turns 10 bytes into 20 with 5 of scratch; the unsaved inputs are freed; the send
    frees the 20.
    """
    found = effects(chain(), 0, 1, f"0LOAD0 0F0 {SENT}")
    assert found["0LOAD0"].after_bytes == 10
    assert found["0F0"][:2] == (25, 20 - 10)
    assert found["0WAIT_SEND_F0"].after_bytes == -20


def test_an_activation_that_the_next_layer_saves_is_counted_once() -> None:
    """The 20 bytes between the layers are the first one's output and the second one's saved tensor."""
    found = changes(chain(), 0, 2, "0LOAD0 0F0")
    assert found["0LOAD0"] == 10 + 3
    assert found["0F0"] == 20 + 40 - 10 - 3


def test_a_received_input_that_is_saved_stays_and_one_that_is_not_goes() -> None:
    """Cut before layer 1, its 20 bytes are a receive buffer; it is retained because layer 1 saves it."""
    found = changes(chain(), 1, 2, f"{RECEIVED} 0LOAD0 0F0 0B0 0SEND_B0 0WAIT_SEND_B0")
    assert found["0RECV_F0"] == 20
    assert found["0F0"] == 40 - 3
    assert found["0WAIT_SEND_B0"] == -20


def test_gradients_are_born_in_the_first_backward_only() -> None:
    """The first backward leaves 7 bytes of parameter gradients; a later one leaves none."""
    text = f"0LOAD0 0F0 {SENT} {ANSWERED} 0B0"
    first, later = effects(chain(), 0, 1, text, is_first=True), effects(chain(), 0, 1, text)
    assert first["0RECV_B0"].after_bytes == 20
    assert first["0B0"].after_bytes == 7 - 20
    assert first["0B0"].after == (7, 0, 0, 0, -20, 0)
    assert later["0B0"].after_bytes == -20


@pytest.mark.parametrize(
    "text",
    ["0F0 0B0", "0N0 0R0 0B0", "0F0[0:1] 0F0[1:2] 0B0", "0N0[0:1] 0F0[1:2] 0B0[1:2] 0R0[0:1] 0B0[0:1]"],
)
def test_a_microbatch_leaves_nothing_behind(text: str) -> None:
    """A microbatch's tensors are all freed at its end, kept or recomputed, in one piece or in two."""
    assert sum(changes(chain(), 0, 2, f"0LOAD0 {text}").values()) == 0


def test_a_forward_that_keeps_its_inputs_alone_holds_them() -> None:
    """N of layer 1 keeps its input of 20 and the target of 3, without saved tensors; R makes the 40, and
    saves them.
    """
    found = effects(chain(), 1, 2, f"{RECEIVED} 0LOAD0 0N0 0R0 0B0")
    assert found["0N0"][:2] == (40 + 4, 0)
    assert found["0R0"].after_bytes == 40 - 3
    assert found["0B0"].after[2:] == (-20 - 40, 0, 20, 0)  # activations go, the gradient of the input travels


def test_a_second_forward_works_on_copies_of_the_buffers() -> None:
    """R copies 11 bytes of buffers, and the piece's backward frees them."""
    model = chain()
    buffered = replace(model, kinds=(model.kinds[0], replace(model.kinds[1], buffer_bytes=11)))
    text = f"{RECEIVED} 0LOAD0 0N0 0R0 0B0"
    plain, copied = effects(model, 1, 2, text), effects(buffered, 1, 2, text)
    assert [copied[word].after_bytes - plain[word].after_bytes for word in ("0N0", "0R0", "0B0")] == [
        0,
        11,
        -11,
    ]
    assert copied["0R0"].peak_bytes - plain["0R0"].peak_bytes == 11


def test_buffers_that_feed_back_are_copied_by_the_first_forward() -> None:
    """7 of 11 bytes of buffers feed back: N copies these, R the other 4, and the backward
    frees all of them.
    """
    model = chain()
    feeding = replace(model.kinds[1], buffer_bytes=11, fed_back=("average",), fed_back_bytes=7)
    text = f"{RECEIVED} 0LOAD0 0N0 0R0 0B0"
    plain, copied = (
        effects(model, 1, 2, text),
        effects(replace(model, kinds=(model.kinds[0], feeding)), 1, 2, text),
    )
    words = "0N0", "0R0", "0B0"
    assert [copied[word].after_bytes - plain[word].after_bytes for word in words] == [7, 4, -11]
    assert [copied[word].peak_bytes - plain[word].peak_bytes for word in words] == [7, 4, 0]
    assert [copied[word].after[2] - plain[word].after[2] for word in words] == [
        7,
        4,
        -11,
    ]  # they are activations


def test_inputs_that_a_run_works_on_in_place_are_copied_first() -> None:
    """The first layer of the run overwrites its input of 20: N makes a copy, which is freed when it ends."""
    model = chain()
    inplace = replace(
        model.kinds[1], mutates_inputs=True, outputs=(value(20),), output_origins=(INPUT,), storages=(),
        forward_peak_bytes=0, checkpoint_peak_bytes=0,
    )  # fmt: skip
    loss = layer((value(20), value(3, requires_grad=False)), (value(4),), saved=(INPUT,))
    model = replace(model, kinds=(model.kinds[0], inplace), loss=loss)
    found = effects(model, 1, 2, f"{RECEIVED} 0LOAD0 0N0")
    assert found["0N0"][:2] == (20 + 4, 0)


def test_the_output_of_a_run_may_be_there_twice() -> None:
    """The layer after a run has the first output of 20; R makes it again and drops it, and the kept input
    with it.
    """
    found = effects(chain(), 0, 2, "0LOAD0 0N0[0:1] 0F0[1:2] 0R0[0:1] 0B0[1:2] 0B0[0:1]")
    assert found["0R0[0:1]"].peak_bytes == 25
    assert found["0R0[0:1]"].after_bytes == -10
    assert found["0B0[0:1]"].after[2] == 0  # layer 0 saves nothing


def test_the_step_grows_by_optimizer_state_from_layer_to_layer() -> None:
    """The first step's peak includes the state of earlier layers; later steps hold the highest
    single update.
    """
    rest = StageRest(StageStorages(chain(), 0, 2), 2)
    first, later = (rest.update(0, 2, first=first) for first in (True, False))
    assert (first.peak_bytes, later.peak_bytes, rest.state_bytes) == (3, 4, 2)
    assert (first.after_bytes, later.after_bytes) == (2 - (7 + 9), -(7 + 9))


def test_what_rests_on_a_stage() -> None:
    """Parameters rest on a stage, shared ones once; on the last stage also a loss for each microbatch."""
    rest = StageRest(StageStorages(chain(), 0, 2), 2)
    assert (rest.parameter_bytes, rest.gradient_bytes, rest.loss_bytes) == (7 + 9, 7 + 9, 4 * 2)
    assert StageRest(StageStorages(chain(), 0, 1), 2).loss_bytes == 0
    shared = SharedParameter(name="w", users=(0, 1), nbytes=5, gradient_bytes=4, state_bytes=1)
    first, second = chain().kinds
    tied = replace(chain(), kinds=(replace(first, state_bytes=3), second), shared=(shared,))
    rest = StageRest(StageStorages(tied, 0, 2), 2)
    assert (rest.parameter_bytes, rest.gradient_bytes, rest.state_bytes) == (7 + 9 - 5, 7 + 9 - 4, 3 + 2 - 1)


@pytest.mark.parametrize(("released", "peak"), [((), 30), ((0,), 10)])
def test_an_input_is_released_only_by_the_layer_that_saved_it_first(
    released: tuple[int, ...], peak: int
) -> None:
    """The last span has 20 bytes less if the saved input was freed before it; the other spans are lower."""
    spans = (Span(peak_bytes=5), Span(peak_bytes=30, released=released))
    only = layer((value(20),), (value(1),), saved=(INPUT,), later=spans)
    model = measurement(
        [layer((value(1),), (value(20),), saved=()), only, only], layer((value(1),), (value(4),))
    )
    assert effects(model, 1, 2, f"{RECEIVED} 0F0 {SENT} {ANSWERED} 0B0")["0B0"].peak_bytes == peak
    both = measurement(
        [layer((value(1),), (value(20),), saved=(OWN,)), only], layer((value(1),), (value(4),))
    )
    assert effects(both, 0, 1, f"0LOAD0 0F0 {SENT} {ANSWERED} 0B0")["0B0"].peak_bytes == 1


def test_a_backward_is_never_below_where_it_begins() -> None:
    """The level at a backward's start counts as its peak, even if every kernel needs less: frozen layers have
    no spans.
    """
    frozen = layer((value(5, requires_grad=False),), (value(8, requires_grad=False),), saved=(OWN,), later=())
    model = measurement([frozen] * 2, layer((value(8),), (value(4),)))
    assert effects(model, 0, 1, f"0LOAD0 0F0 {SENT} {ANSWERED} 0B0")["0B0"].peak_bytes >= 0


@pytest.mark.parametrize("seed", range(30))
def test_segments_add_up_to_the_stage(seed: int) -> None:
    """Forward layer by layer leaves the bytes of the whole stage and never peaks above it; likewise backward,
    if no storage outlives its layer.
    """
    model = brief(hostile(Random(seed), 5, shared=0))
    whole = effects(model, 1, 4, f"{RECEIVED} 0F0 {SENT} {ANSWERED} 0B0")
    forwards, backwards = [f"0F0[{k}:{k + 1}]" for k in range(1, 4)], [f"0B0[{k}:{k + 1}]" for k in (3, 2, 1)]
    cut = effects(model, 1, 4, f"{RECEIVED} {' '.join(forwards)} {SENT} {ANSWERED} {' '.join(backwards)}")
    for name, pieces in (("0F0", forwards), ("0B0", backwards)):
        level, highest = 0, 0
        for piece in pieces:
            highest, level = max(highest, level + cut[piece].peak_bytes), level + cut[piece].after_bytes
        assert (highest, level) == (whole[name].peak_bytes, whole[name].after_bytes)


def test_equal_microbatches_pass_through_the_same_residencies() -> None:
    """A second microbatch reuses the first one's cached residencies."""
    flights = Flights(StageStorages(chain(), 0, 2))

    def path(microbatch: int) -> list[int]:
        residency, met = flights.start, []
        for word in ("0LOAD{}", "0F{}", "0B{}"):
            residency, _ = flights.apply(residency, parse_action(word.format(microbatch)))
            met.append(id(residency))
        return [*met, flights.is_over(residency)]

    assert path(0) == path(7)
    assert path(0)[-1]


def everything_held(storages: int) -> list[dict[int, int]]:
    """Return the levels after every action of a stage of `runs` runs of a layer, of twenty storages each."""
    own = tuple(Origin(kind="own", index=number) for number in range(20))
    one = layer((value(8),), (value(8),), origins=own[:1], storages=(8,) * 20, saved=(*own, INPUT))
    flights = Flights(
        StageStorages(measurement([one] * storages, layer((value(8),), (value(4),))), 0, storages - 1)
    )
    residency, found = flights.start, list[dict[int, int]]()
    runs = [f"[{n}:{n + 1}]" for n in range(storages - 1)]
    text = ["0LOAD0", *(f"0F0{run}" for run in runs), *SENT.split(), *ANSWERED.split()]
    for word in (*text, *(f"0B0{run}" for run in reversed(runs))):
        residency, _ = flights.apply(residency, parse_action(word))
        found.append(residency.held.mapping())
    return found


def test_what_is_held_is_known_after_every_action() -> None:
    """The level is the inputs plus the saved tensors of forwarded layers, minus those already backward."""
    held = everything_held(12)
    counts = [len(one) for one in held]
    forwards = [20 * n + 1 for n in range(1, 12)]
    assert counts == [1, *forwards, *[forwards[-1]] * 4, *reversed(forwards[:-1]), 0]
    assert all(holders for one in held for holders in one.values())


def test_the_memory_of_a_flight_is_that_of_its_changes() -> None:
    """Twice the runs of layers take about twice the memory, not four times, as full snapshots would."""

    def taken(runs: int) -> int:
        own = tuple(Origin(kind="own", index=number) for number in range(40))
        one = layer((value(8),), (value(8),), origins=own[:1], storages=(8,) * 40, saved=own)
        storages = StageStorages(measurement([one] * runs, layer((value(8),), (value(4),))), 0, runs - 1)
        flights = Flights(storages)
        residency = flights.start
        tracemalloc.start()
        for word in ("0LOAD0", *(f"0F0[{n}:{n + 1}]" for n in range(runs - 1))):
            residency, _ = flights.apply(residency, parse_action(word))
        try:
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert taken(160) < 3 * taken(80)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_follows_from_what_was_done(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same passes, messages and moves in any order leave the same instances."""
    rng, met = Random(seed), dict[object, dict[int, int]]()
    interned = Flights._interned

    def checked(flights: Flights, residency: Residency) -> Residency:
        held = residency.held.mapping()
        assert met.setdefault((id(flights), residency.key()), held) == held
        return interned(flights, residency)

    monkeypatch.setattr(Flights, "_interned", checked)
    plan = any_plan(rng, hostile(rng, 6), any_training(rng), recompute="never")
    simulation = Simulation(replace(plan, decisions=any_runs(rng, plan)))
    assert max(simulation.peak_bytes) > 0
    assert met


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0LOAD0 0F0 0I0",
            "0I0 is valid in a program, but neither the simulator nor the runtime supports it yet",
        ),
        ("0LOAD0 0F0{0:1}", "is valid in a program, but neither"),
        ("0LOAD0 0F0[0:1] 0N0[0:1]", "out of order: the next layer forward is 1"),
        ("0LOAD0 0N0 0B0", "0B0 needs 0R0 before it"),
        ("0RECV_F0 0RECV_F0", "0RECV_F0 happens twice"),
    ],
)
def test_what_cannot_be_applied_is_refused(text: str, message: str) -> None:
    """An inapplicable action is refused, with the action and the reason."""
    with pytest.raises(UsageError, match=message):
        effects(chain(), 0, 2, text)
