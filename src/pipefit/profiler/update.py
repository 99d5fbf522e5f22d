"""Measures what the updates of a layer cost: two steps of an optimizer that has this layer alone, under a meter.

An optimizer may read numbers: its count of steps, the norm of a parameter. A profile has none, so that it is given
others: the same wherever it reads one, and several in turn. If its memory depends on them, it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.by_value import NUMBERS, Reading, reading, updating
from pipefit.capture.random_state import torch_draws_alone
from pipefit.capture.refusals import Refusal
from pipefit.capture.refused import why
from pipefit.errors import PipefitError, UsageError
from pipefit.measure.kernels import Kernels
from pipefit.profiler.pass_meter import PassMeter
from pipefit.runtime.optim.half_precision import Group, MasterWeights, copies_of
from pipefit.runtime.optim.updates import Undivided, check_state_apart, step_part
from pipefit.schema.layer_costs import Work
from pipefit.texts import dtype_name

# ----------------------------------------------------------------------------------------------------
# Whose exception it is that a model raises while it is profiled: a layer's, the loss's or the optimizer's.

_ASSUMED = (
    ". Until then it has read numbers, and a profile assumes that every condition on a tensor holds: leave out a check "
    "that fails then, or make it torch._assert_async(condition)"
)


@contextmanager
def named(what: str, values: Sequence[Tensor]) -> Iterator[None]:
    """Inside, an exception becomes an error that says `what` it is.

    Raises:
        UsageError: something raised an exception.
    """
    numbers = Reading()
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
        raise UsageError(f"{what} cannot be run on {shapes}: {why(error)}{assumed}") from error


# ----------------------------------------------------------------------------------------------------

_SIDE = 4  # of the parameters that an optimizer is tried on

LayerGroups = Sequence[Sequence[Group]]  # the groups of every layer
MakeOptimizer = Callable[[LayerGroups], Optimizer | MasterWeights]


class Peak(NamedTuple):
    """The peak of a pass above its start, and how many of these bytes are the workspace of a kernel."""

    nbytes: int
    workspace: int

    @staticmethod
    def of(meter: PassMeter) -> Peak:
        """That of the pass so far."""
        return Peak(meter.peak_bytes, meter.workspace_bytes)


class Updates(NamedTuple):
    """The first optimizer step and a later one, and bytes of the optimizer's state: after and before any step."""

    first: Peak
    later: Peak
    state_bytes: int
    early_state_bytes: int
    work: Work
    undivided: str = ""  # why the optimizer updates all layers at once, in words
    left_bytes: int = 0  # of temporaries that are still there as it has gone through its groups


class _Passed:
    """The `most` bytes that there were as a loop over an optimizer's groups came to its end.

    A step that is written as a loop holds by its variables what it made for the last parameter, until the next one.
    """

    def __init__(self, meter: PassMeter) -> None:
        self.most, self._meter = 0, meter

    def of(self, groups: Sequence[Group]) -> list[Group]:
        """The groups as a list whose loops are watched."""
        passed = self

        class Groups(list[Group]):
            def __iter__(self) -> Iterator[Group]:
                yield from super().__iter__()
                passed.most = max(passed.most, passed._meter.total)

        return Groups(groups)


def updates_of(meter: PassMeter, optimizer: MakeOptimizer, groups: LayerGroups, follow: Callable[[], None]) -> Updates:
    """What two steps cost for parameters that have gradients; `follow` is called behind both, as once in an update.

    Raises:
        UsageError: the optimizer raised an exception.
    """
    if not groups:
        return Updates(Peak(0, 0), Peak(0, 0), 0, 0, Work(flops=0, moved_bytes=0))
    with named("the optimizer", [parameter for layer in groups for group in layer for parameter in group["params"]]):
        return _updates_of(meter, optimizer, groups, follow)


def _updates_of(meter: PassMeter, optimizer: MakeOptimizer, groups: LayerGroups, follow: Callable[[], None]) -> Updates:
    def steps() -> Updates:
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
        return Updates(first, later, state, early, meter.work, undivided, left)

    undivided = _undivided(optimizer, next((group for of_layer in groups for group in of_layer), {}))
    with reading(Reading()) as numbers, updating():
        found = steps()
    for number in NUMBERS[1:] * bool(numbers.count):
        with updating(number), suppress(ArithmeticError):
            if steps() == found:
                continue
        return steps()  # outside of `updating`, so that what it reads is named
    return found


def _undivided(optimizer: MakeOptimizer, options: Group) -> str:
    """Why an optimizer cannot be stepped for some layers alone, in words: it is tried on two small ones, whose first
    step is in parts too.

    Of one that fails without its model nothing is said.
    """
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        tried = [nn.Parameter(torch.ones(_SIDE, _SIDE)) for _ in range(2)]
        try:
            whole = optimizer([[options | {"params": [parameter]}] for parameter in tried])
            for one, other in (tried, tried[::-1]) * 2:
                one.grad = torch.ones_like(one)
                step_part(whole, [one], [other])
            check_state_apart(whole, *([copies_of(whole).get(one, one)] for one in tried))
        except Undivided as found:
            return found.reason
        except Exception:  # noqa: BLE001 -- what an optimizer asks of parameters is its own; training says it better
            return ""
    return ""


def state_bytes(
    parameter: Tensor, options: Group, optimizer: MakeOptimizer, kernels: Kernels | None
) -> tuple[int, int]:
    """Bytes of the optimizer's state for one parameter in a group of these options, and those of them that exist
    before the first step.
    """
    meter = PassMeter(kernels, parameter.device)
    alike = nn.Parameter(torch.empty_like(parameter, requires_grad=False))
    alike.grad = torch.empty_like(alike, requires_grad=False)
    with meter:
        stepper = optimizer([[options | {"params": [alike]}]])
        early = meter.total
        with updating():
            stepper.step()
    return meter.total, early
