"""Contradictory costs are refused at construction, with the numbers that contradict each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipefit.errors import UsageError
from pipefit.schema.layer_costs import (
    Alike,
    GradientOrigin,
    Origin,
    SharedBuffer,
    SharedParameter,
    Span,
    Value,
    Work,
)
from pipefit.schema.profile import Block
from support.pipelines import equal_profile, random_profile
from support.synthetic_models import layer, measurement, value

COST = layer((value(10),), (value(20),), saved=(Origin(kind="input"),))
MODEL = measurement(
    [COST, layer((value(20),), (value(40),), saved=())], layer((value(40),), (value(4),), saved=())
)
SHARED = SharedParameter(name="w", users=(0, 2), nbytes=1, gradient_bytes=1, state_bytes=0)
MASK = SharedBuffer(name="mask", users=(0, 2), nbytes=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"state_bytes": -3}, "has a negative number of bytes as state_bytes: -3"),
        ({"storages": (-4,)}, "has a negative number of bytes as storages: -4"),
        ({"inputs": (value(-5),)}, "has a negative number of bytes as values: -5"),
        ({"backward_later": (Span(peak_bytes=0, workspace_bytes=-6),)}, "as workspace: -6"),
        ({"fed_back_bytes": 7}, "as buffers that do not feed back: -7"),
        ({"output_origins": ()}, "has 1 output, but origins for 0"),
        ({"output_origins": (Origin(kind="own", index=7),)}, "names own storage 7, but has 1"),
        ({"output_origins": (Origin(kind="input", index=-1),)}, "names input storage -1, but has 1"),
        ({"input_gradients": ()}, "has 1 input, but gradients for 0"),
        (
            {"input_gradients": (GradientOrigin(kind="own", index=7),)},
            "names own gradient storage 7, but has ",
        ),
        (
            {"input_gradients": (GradientOrigin(kind="output", index=1),)},
            "names output gradient storage 1, but has 1",
        ),
        (
            {"backward_first": (Span(peak_bytes=0, released=(1,)),)},
            "releases input 1 in a backward, but has only 1 input",
        ),
    ],
)
def test_a_layer_that_contradicts_itself_is_refused(given: dict[str, Any], message: str) -> None:
    """The message names the class of the layer, the mistake, and the numbers."""
    with pytest.raises(UsageError, match=message) as refused:
        replace(COST, **given)
    assert str(refused.value).startswith(f"a layer of class {COST.module} ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"microbatch_size": 0}, "a microbatch must have at least one sample, not 0"),
        ({"layers": ()}, "a measurement must have at least one layer"),
        ({"layers": (0, 9)}, "layer 1 is of kind 9, but the measurement has layers of 2 kinds"),
        (
            {"kinds": (replace(COST, inputs=(), input_gradients=(), saved=()), COST)},
            "layer 0 must take at least one input",
        ),
        (
            {"loss": replace(MODEL.loss, inputs=(), input_gradients=())},
            "layer 1 returns 1 value, but the loss takes 0",
        ),
        ({"shared": (SHARED,)}, r"shared parameter 'w' names layers \[0, 2\], but there are 2"),
        ({"shared_buffers": (MASK,)}, r"shared buffer 'mask' names layers \[0, 2\], but there are 2"),
        (
            {"shared_buffers": (replace(MASK, users=(0, 1), nbytes=1 << 63),)},
            "shared buffer 'mask' has 9223372036854775808 bytes, more than any device has: profile again",
        ),
        *(
            (
                {"shared": (replace(SHARED, users=(0, 1), **{size: nbytes}),)},
                f"shared parameter 'w' has {nbytes} bytes",
            )
            for size in ("nbytes", "gradient_bytes", "state_bytes", "early_state_bytes", "copy_bytes")
            for nbytes in (-1, 1 << 46)
        ),
    ],
)
def test_a_measurement_that_contradicts_itself_is_refused(given: dict[str, Any], message: str) -> None:
    """The message names the layer or the parameter, and the numbers."""
    with pytest.raises(UsageError, match=message):
        replace(MODEL, **given)


@pytest.mark.parametrize(
    "damage", [{"dtype": "float64"}, {"dtype": "int32"}, {"shape": (2, 4)}, {"nbytes": 25}], ids=str
)
def test_a_value_has_the_size_of_its_shape_and_a_gradient_if_its_numbers_can(damage: dict[str, Any]) -> None:
    """Otherwise a dry run of a damaged profile would end in an error of torch."""
    whole = Value(shape=(2, 3), dtype="float32", nbytes=24, requires_grad=True)
    with pytest.raises(UsageError, match="no tensor of shape"):
        replace(whole, **damage)


def test_a_profile_names_each_layer_once_and_has_it_in_every_measurement() -> None:
    """The message names the duplicate layer, or the measurement with too many layers."""
    profile = equal_profile(3)
    first = profile.layers[0]
    with pytest.raises(UsageError, match=f"names layer {first!r} more than once"):
        replace(profile, layers=(first, "other", first))
    with pytest.raises(UsageError, match="names 2 layers, but its measurement at size 1 has 3"):
        replace(profile, layers=profile.layers[:2])


def test_a_profile_has_one_measurement_of_each_size_and_number_of_ranks() -> None:
    """Of two different measurements, planners would silently take the first."""
    profile = equal_profile(3)
    (one,) = profile.measurements
    with pytest.raises(
        UsageError, match="has 2 measurements of microbatches of 1 sample for 1 rank: keep one"
    ):
        replace(profile, measurements=(one, one))
    assert len(replace(profile, measurements=(one, replace(one, tensor=2))).measurements) == 2


@pytest.mark.parametrize(
    "what", ["nbytes", "gradient_bytes", "state_bytes", "early_state_bytes", "copy_bytes"]
)
def test_a_layer_shares_no_more_than_it_has(what: str) -> None:
    """Shared bytes are subtracted from the layers' bytes, so larger ones would make peaks too low or
    negative. Equal ones are valid.
    """
    profile = random_profile(6, shared=1)
    (measurement,) = profile.measurements
    ((one,), layer) = measurement.shared, measurement.costs[measurement.shared[0].users[-1]]
    own = {
        "nbytes": sum(parameter.nbytes for parameter in layer.parameters),
        "copy_bytes": sum(parameter.copy_bytes for parameter in layer.parameters),
    }
    has = own.get(what, getattr(layer, what, 0))
    one = replace(one, copying=one.users)
    with pytest.raises(UsageError, match=rf"shares {has + 1} bytes of its \w+ with other layers, but has"):
        replace(measurement, shared=(replace(one, **{what: has + 1}),))
    with pytest.raises(UsageError, match="has copies in layers that do not use it"):
        replace(measurement, shared=(replace(one, copying=(9,)),))


def test_impossible_work_and_users_of_a_parameter_are_refused() -> None:
    """Work is not negative and takes less than thirty years; a shared parameter has two layers or more."""
    with pytest.raises(UsageError, match="not -1, 0 and None"):
        Work(flops=-1, moved_bytes=0)
    with pytest.raises(UsageError, match=r"not 0, 0 and 1000000000\.0"):
        Work(flops=0, moved_bytes=0, seconds=1e9)
    with pytest.raises(UsageError, match="differs from the sums over its operations, 6 and 10"):
        Work(flops=6, moved_bytes=9, operations=(Alike(2, 3, 5),))
    for number, flops in ((0, 0), (1, -1)):
        with pytest.raises(UsageError, match="one or more"):
            Work(flops=0, moved_bytes=0, operations=(Alike(number, flops, 0),))
    with pytest.raises(UsageError, match=r"'w' needs two or more layers in rising order, not \[2, 0\]"):
        replace(SHARED, users=(2, 0))


def test_a_range_of_layers_is_named_by_its_blocks() -> None:
    """A range is named by its blocks if it holds whole ones; by its layers if it begins or ends within a
    block, or each layer is a block.
    """
    plain = equal_profile(4)
    blocks = tuple(Block(name=name, layers=layers) for name, layers in (("one", 2), ("two", 1), ("three", 1)))
    profile, names = replace(plain, blocks=blocks), plain.layers
    assert profile.named(0, 2) == "block one"
    assert profile.named(0, 4) == "blocks one to three"
    assert profile.named(1, 3) == f"layers {names[1]} to {names[2]}"
    assert plain.named(2, 3) == f"layer {names[2]}"
