"""Tolerance of a comparison, and the report of differences."""

from __future__ import annotations

from math import nan

import pytest
import torch
from torch import Tensor

from pipefit.capture.comparison import ALLOWED, Numbers, RunResult, compared
from pipefit.errors import UsageError

LIMITS = [(torch.float32, 1e-4), (torch.float64, 1e-9), (torch.bfloat16, 6e-2), (torch.float16, 2e-2)]


def run(
    loss: float = 1.0,
    gradients: dict[str, Tensor | None] | None = None,
    buffers: dict[str, Tensor] | None = None,
) -> RunResult:
    return RunResult([torch.tensor(loss, dtype=torch.float64)] * 2, gradients or {}, buffers or {})


def held(plain: RunResult, ours: RunResult, dtype: torch.dtype = torch.float32) -> Numbers:
    return compared(plain, ours, name="model", microbatch_size=4, untouched={}, precisions={dtype})


@pytest.mark.parametrize(("dtype", "limit"), LIMITS)
@pytest.mark.parametrize("share", [0.9, 1.1])
def test_the_limit_is_a_share_of_the_largest_value(dtype: torch.dtype, limit: float, share: float) -> None:
    """Numbers below the limit agree, and their distance is reported; numbers above it differ."""
    one = torch.tensor([0.5, -2.0], dtype=torch.float64)
    other = one + torch.tensor([2.0 * share * limit, 0.0], dtype=torch.float64)
    found = held(run(gradients={"weight": one}), run(gradients={"weight": other}), dtype)
    assert (not found.differences) == (share < 1)
    assert found.apart == pytest.approx(share * limit if share < 1 else 0.0)
    assert found.allowed == limit == ALLOWED[dtype]


def test_the_coarsest_precision_decides() -> None:
    """In a mixed-precision model the coarsest precision sets the limit."""
    empty = run()
    precisions = {torch.float32, torch.bfloat16, torch.int8}
    found = compared(empty, empty, name="model", microbatch_size=1, untouched={}, precisions=precisions)
    assert found.allowed == ALLOWED[torch.bfloat16]


def test_noise_is_measured_by_the_largest_gradient() -> None:
    """A gradient of pure rounding noise, as of a bias before a norm, may differ in rounding; a small gradient
    above the noise may not.
    """
    large, noise, small = torch.tensor([10.0]), torch.tensor([1e-7]), torch.tensor([1e-3])
    plain = run(gradients={"large": large, "noise": noise, "small": small})
    ours = run(gradients={"large": large, "noise": -noise, "small": -small})
    assert [difference.what for difference in held(plain, ours).differences] == ["the gradient of small"]


def test_integers_are_equal_or_not() -> None:
    """A count that is off by one differs, however large it is."""
    plain, ours = run(buffers={"count": torch.tensor(10**9)}), run(buffers={"count": torch.tensor(10**9 - 1)})
    assert [difference.what for difference in held(plain, ours).differences] == ["the buffer count"]


@pytest.mark.parametrize("value", [nan, float("inf")])
def test_a_value_that_is_not_finite_is_equal_to_itself_alone(value: float) -> None:
    """Non-finite values agree in the same place and do not widen the limit for other values; elsewhere they
    differ.
    """
    plain = run(gradients={"weight": torch.tensor([value, 1.0])})
    assert not held(plain, run(gradients={"weight": torch.tensor([value, 1.0])})).differences
    assert held(plain, run(gradients={"weight": torch.tensor([value, 1.1])})).differences
    assert held(plain, run(gradients={"weight": torch.tensor([0.0, 1.0])})).differences


def test_other_shapes_and_types_differ() -> None:
    """The report names both shapes, or both types."""
    plain = run(buffers={"a": torch.zeros(2), "b": torch.zeros(2)})
    ours = run(buffers={"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64)})
    assert [d.text for d in held(plain, ours).differences] == [
        "is torch.float32 (3,) instead of torch.float32 (2,)",
        "is torch.float64 (2,) instead of torch.float32 (2,)",
    ]


def test_many_differences_are_counted() -> None:
    """Three differences are listed and the rest counted, in one sentence with the limit, the cause and the
    remedy.
    """
    plain = run(gradients={f"layer{n}": torch.ones(1) for n in range(5)})
    found = held(plain, run(gradients=dict.fromkeys(plain.gradients)))
    with pytest.raises(UsageError) as refused:
        found.check()
    assert str(refused.value) == (
        "model computes different numbers as a chain than as a module: the gradient of layer0 is missing, the gradient "
        "of layer1 is missing, the gradient of layer2 is missing, and 2 more (1e-04 of the largest value is allowed). "
        "The forward is the same, so the chain lacks a backward. Change that, or give pipefit the parts with "
        "pipefit.chain([...]), in the order in which they run"
    )


def test_a_buffer_alone_is_told_as_such() -> None:
    """If only a buffer differs, the report says that an update was lost."""
    found = held(run(buffers={"mean": torch.ones(1)}), run(buffers={"mean": torch.zeros(1)}))
    assert "the chain lacks the update of a buffer" in str(found)


def test_losses_that_are_not_finite_tell_nothing() -> None:
    """Two non-finite losses are equal whatever the chain does: the report says so instead of claiming
    agreement.
    """
    assert str(held(run(nan), run(nan))).startswith(
        "the numbers of model cannot be compared: its losses are nan and"
    )
