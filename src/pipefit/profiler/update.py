"""Measurement of a layer's updates: two steps of an optimizer for this layer alone, under a meter.

An optimizer may read numbers: its step count, the norm of a parameter. A profile has no values, so every read
returns one assumed number, and several numbers are tried in turn. If memory depends on the number, the read
is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.capture import NUMBERS, NumberReads, Refusal, explained, reading, torch_draws_alone, updating
from pipefit.errors import PipefitError, UsageError
from pipefit.measure import Kernels
from pipefit.profiler.pass_meter import PassMeter
from pipefit.runtime import Group, MasterWeights, Undivided, check_state_apart, copies_of, step_part
from pipefit.schema.layer_costs import Work
from pipefit.texts import dtype_name
from pipefit.torch_internals import without_dispatch_modes

# ---- Names of layers, the loss and the optimizer in errors

_ASSUMED = (
    ". Before that it read numbers, and a profile assumes that every condition on a tensor is true: "
    "remove a check that then fails, or make it torch._assert_async(condition)"
)


@contextmanager
def named(what: str, values: Sequence[Tensor]) -> Iterator[None]:
    """Convert an exception of the body into an error that names `what` raised it.

    Raises:
        UsageError: the body raised an exception.
    """
    numbers = NumberReads()
    try:
        with torch_draws_alone(), reading(numbers):
            yield
    except PipefitError:
        raise
    except Refusal as refusal:
        raise UsageError(f"{what} cannot be planned: {refusal}") from refusal
    except Exception as error:
        shapes = ", ".join(f"{dtype_name(value.dtype)} {tuple(value.shape)}" for value in values)
        assumed = _ASSUMED if numbers.count else ""
        raise UsageError(f"{what} cannot be run on {shapes}: {explained(error)}{assumed}") from error


# ---- Updates

_SIDE = 4  # side of the small parameters on which an optimizer is tried

LayerGroups = Sequence[Sequence[Group]]  # groups of every layer
MakeOptimizer = Callable[[LayerGroups], Optimizer | MasterWeights]


class Peak(NamedTuple):
    """The peak of a pass above its start, and the bytes of kernel workspace in it."""

    nbytes: int
    workspace: int

    @staticmethod
    def of(meter: PassMeter) -> Peak:
        """Return the peak of the pass so far."""
        return Peak(meter.peak_bytes, meter.workspace_bytes)


class UpdateCosts(NamedTuple):
    """Peaks of the first optimizer step and of a later one, and bytes of the optimizer's state.

    `state_bytes` counts the state after a step, `early_state_bytes` before any step.
    """

    first: Peak
    later: Peak
    state_bytes: int
    early_state_bytes: int
    work: Work
    undivided: str = ""  # why the optimizer cannot step layers separately
    left_bytes: int = 0  # bytes of temporaries left after the loop over its groups


class _Passed:
    """Largest number of bytes (`most`) at the end of a loop over an optimizer's groups.

    A step that is written as a loop holds in its variables the tensors of the last parameter, until the next
    one.
    """

    def __init__(self, meter: PassMeter) -> None:
        self.most, self._meter = 0, meter

    def of(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups as a list that records memory at the end of each loop."""
        passed = self

        class Groups(list[Group]):
            def __iter__(self) -> Iterator[Group]:
                yield from super().__iter__()
                passed.most = max(passed.most, passed._meter.total)

        return Groups(groups)


def updates_of(
    meter: PassMeter, optimizer: MakeOptimizer, groups: LayerGroups, follow: Callable[[], None]
) -> UpdateCosts:
    """Measure two optimizer steps for parameters with gradients; `follow` runs once after both.

    Raises:
        UsageError: the optimizer raised an exception.
    """
    if not groups:
        return UpdateCosts(Peak(0, 0), Peak(0, 0), 0, 0, Work(flops=0, moved_bytes=0))
    with named(
        "the optimizer", [parameter for layer in groups for group in layer for parameter in group["params"]]
    ):
        return _updates_of(meter, optimizer, groups, follow)


def _updates_of(
    meter: PassMeter, optimizer: MakeOptimizer, groups: LayerGroups, follow: Callable[[], None]
) -> UpdateCosts:
    def steps() -> UpdateCosts:
        meter.start()  # frees a number that the last operation of a backward used
        before = meter.total
        stepper = optimizer(groups)
        early, passed = meter.total - before, _Passed(meter)
        if isinstance(stepper, Optimizer):  # master weights are stepped layer by layer
            stepper.param_groups = passed.of(stepper.param_groups)
        meter.start()
        stepper.step()
        first, state = Peak.of(meter), meter.total - before
        passed.most = 0
        meter.start()
        stepper.step()
        later, left = Peak.of(meter), max(0, passed.most - meter.total)
        follow()
        return UpdateCosts(first, later, state, early, meter.work, undivided, left)

    undivided = _undivided(optimizer, next((group for of_layer in groups for group in of_layer), {}))
    with reading(NumberReads()) as numbers, updating():
        result = steps()
    for number in NUMBERS[1:] * bool(numbers.count):
        with updating(number), suppress(ArithmeticError):
            if steps() == result:
                continue
        return steps()  # outside of `updating`, so the read is reported
    return result


def _undivided(optimizer: MakeOptimizer, options: Group) -> str:
    """Return why an optimizer cannot be stepped for some layers alone, or "".

    It is tried on two small layers, with the first step in parts too. Returns "" if the optimizer fails
    without its model.
    """
    with without_dispatch_modes(), torch.random.fork_rng(devices=[]):
        tried = [nn.Parameter(torch.ones(_SIDE, _SIDE)) for _ in range(2)]
        try:
            whole = optimizer([[options | {"params": [parameter]}] for parameter in tried])
            for one, other in (tried, tried[::-1]) * 2:
                one.grad = torch.ones_like(one)
                step_part(whole, [one], [other])
            check_state_apart(whole, *([copies_of(whole).get(one, one)] for one in tried))
        except Undivided as result:
            return result.reason
        except Exception:  # noqa: BLE001 -- optimizers differ; training explains it better
            return ""
    return ""


def state_bytes(
    parameter: Tensor, options: Group, optimizer: MakeOptimizer, kernels: Kernels | None
) -> tuple[int, int]:
    """Return the bytes of the optimizer's state for one parameter: after a step, and before.

    Bytes that the optimizer has once, such as a learning rate that is a tensor, do not count.
    """

    def of(count: int) -> tuple[int, int]:
        meter = PassMeter(kernels, parameter.device)
        alike = [nn.Parameter(torch.empty_like(parameter, requires_grad=False)) for _ in range(count)]
        for one in alike:
            one.grad = torch.empty_like(one, requires_grad=False)
        with meter:
            stepper = optimizer([[options | {"params": [one]} for one in alike]])
            early = meter.total
            with updating():
                stepper.step()
        return meter.total, early

    (one, early_one), (two, early_two) = of(1), of(2)
    return two - one, early_two - early_one
