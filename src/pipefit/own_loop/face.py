"""`apply`: plan a loop, certify the plan, and install it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.capture import NumberReads, Refusal, explained
from pipefit.errors import InfeasibleError, PipefitError, UsageError, in_one_line
from pipefit.fake_cuda.isolation import apart
from pipefit.fake_cuda.target import FakeTarget
from pipefit.measure import Kernels, Meter
from pipefit.own_loop.choice import Choices, Variable
from pipefit.own_loop.installing import PlannedForward, check_free, install
from pipefit.own_loop.loop import Loop
from pipefit.own_loop.offloading import HostTensors, StateOnHost, on_host
from pipefit.own_loop.recording import LoopRecording, record
from pipefit.own_loop.trainers import trainer_step
from pipefit.report.show import text
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import DeviceKind, Member
from pipefit.schema.fit import refusal
from pipefit.schema.plan import LoopDecision, LoopPlan
from pipefit.schema.presets import machine_names
from pipefit.schema.profile import Target
from pipefit.schema.validation import instance, number
from pipefit.texts import counted, kind_of
from pipefit.torch_internals.fake_tensors import DataDependentOutputException, DynamicOutputShapeException
from pipefit.units import format_bytes, parse_bytes

# ---- The peaks of a loop under decisions, by a dry run of exactly this loop


def peaks_of(
    loop: Loop, decisions: Sequence[LoopDecision], target: Target, kernels: Kernels | None
) -> tuple[int, int]:
    """Return the certified peaks of the first step and of later ones, in bytes."""
    fake = FakeTarget(target)
    meter = Meter(0, kernels=kernels, place=fake.device)
    peaks: list[int] = []
    with loop.over_fakes(fake, meter) as run:
        planned = install(loop.module, decisions, HostTensors.dry())
        try:
            meter.begin("the first step")
            for _ in run():
                peaks.append(meter.end(0, 0.0).total_bytes)
                meter.begin("a later step")
        finally:
            for forward in planned:
                forward.remove()
    return peaks[0], max(peaks[1:])


_MOST_TRIES = 8  # dry runs of one answer
_CPU = DeviceKind(name="cpu", flops={"float32": 1e11}, memory_bandwidth=2e10)
_GPU = DeviceKind(
    name="gpu",
    flops={"float32": 6e13, "bfloat16": 3e14, "float16": 3e14},
    memory_bandwidth=2e12,
)
_COPY_BYTES_PER_SECOND = {"cpu": 5e9, "cuda": 2e10}  # to the host, if no device is named


class Handle:
    """A plan that is installed on a module."""

    def __init__(
        self, plan: LoopPlan, planned: Sequence[PlannedForward], states: Sequence[StateOnHost] = ()
    ) -> None:
        self.plan = plan
        self._planned, self._states = list(planned), list(states)

    def remove(self) -> None:
        """Take the plan off the module, which is then as it was. A second call does nothing."""
        for forward in self._planned:
            forward.remove()
        for state in self._states:
            state.remove()
        self._planned.clear()
        self._states.clear()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __str__(self) -> str:
        return text(self.plan)

    def __repr__(self) -> str:
        return f"<Handle: {len(self._planned)} planned submodules>"


def apply(
    module: nn.Module,
    *,
    budget: int | str | None = None,
    batch: Any = None,
    optimizer: Optimizer | Sequence[Optimizer] | Callable[[Any], Optimizer] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    step: Callable[[Any], Any] | Any = None,
    state: Sequence[Any] = (),
    device: str | None = None,
    offload: bool = True,
    state_on_host: bool = False,
    plan: LoopPlan | None = None,
) -> Handle:
    """Make the user's own training loop keep a memory budget; return a handle that takes the plan off.

    Args:
        module: the model. Submodules get another `forward`; all else stays as it is.
        budget: bytes, or a size such as `"20 GiB"`, of one device: parameters, gradients, optimizer state,
            batch and everything else that the loop allocates there.
        batch: a batch as the loop gets it, or a function that makes one. `(inputs, targets)`: a tuple of
            inputs is the module's positional arguments, a dictionary its keyword arguments. A
            dictionary alone is inputs.
        optimizer: the loop's optimizer, or several, or a function of the parameters that makes it.
        loss: (outputs, targets) -> loss. None if the module returns the loss, or outputs with a `loss`.
        step: one step of the loop, as a function of a batch: for gradient accumulation, autocast, loss
            scaling or clipping. Or a Trainer of transformers, TRL or Lightning, whose step it is; batch and
            optimizer are then those that it makes, if none are passed. None is the plain loop: `zero_grad`,
            forward, loss, backward, `step`.
        state: other objects that `step` changes, such as a `GradScaler` or a copy of the model.
        device: a card such as `rtx-4090`, or a machine such as `dgx-a100`, whose kernels and rates count.
            None is the module's device.
        offload: whether saved tensors may move to the host.
        state_on_host: whether the optimizer's state is on the host between its steps; it returns for each
            step.
        plan: an earlier answer, installed as it is, without a dry run.

    Raises:
        InfeasibleError: no decisions keep the budget; says the least peak.
        UsageError: the request is wrong, or the loop cannot run over fake tensors.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"apply takes an nn.Module, not {kind_of(module)}")
    check_free(module)
    if plan is None:
        site = _site(module, device, offload=offload)
        loop = replace(
            _loop(module, batch, optimizer, loss, step, state, site.target), state_on_host=state_on_host
        )
        if budget is None or loop.batch is None:
            raise UsageError("apply needs a budget and a batch, or a plan of an earlier call")
        budget_bytes = parse_bytes(budget) if isinstance(budget, str) else _bytes(budget)
        plan = _agreed(loop, lambda: apart(site.target, lambda: planned(loop, budget_bytes, site)))
    optimizers = _optimizers(optimizer) if plan.state_on_host else ()
    if plan.state_on_host and not optimizers:
        raise UsageError(
            "the plan keeps optimizer state on the host: pass the optimizer itself as optimizer="
        )
    host = HostTensors.of(next((p.device for p in module.parameters()), torch.device("cpu")))
    planned_parts = install(module, plan.decisions, host)
    return Handle(plan, planned_parts, [on_host(one, host.pool) for one in optimizers])


def _bytes(budget: Any) -> int:
    """Return a budget that is a number, of Python, NumPy or torch."""
    if not isinstance(budget, (bool, float)):
        with suppress(TypeError):
            budget = index(budget)
    return int(number("budget", budget, below=2**63))


def _agreed(loop: Loop, make: Callable[[], LoopPlan]) -> LoopPlan:
    """Return the plan that `make` returns; that of rank 0 if other ranks run the same loop.

    Ranks with different plans would gather parameters in different orders.
    """
    if not loop.is_distributed or dist.get_world_size() == 1:
        return make()
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [make()]
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            answer = [error if isinstance(error, PipefitError) else UsageError(in_one_line(error))]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]  # type: ignore[no-any-return]


def _loop(
    module: nn.Module,
    batch: Any,
    optimizer: Any,
    loss: Any,
    step: Any,
    state: Sequence[Any],
    target: Target,
) -> Loop:
    """Return the loop that a call of `apply` describes."""
    optimizers = _optimizers(optimizer)
    if step is not None and not callable(step):
        made = trainer_step(step, module, batch, optimizers, target)
        step, batch, optimizer, optimizers = made.step, made.batch, made.optimizers, made.optimizers
        state = (*state, *made.state)
    make = None if optimizers else optimizer
    if step is not None and make is not None:
        raise UsageError("a step uses an optimizer that exists: pass it as optimizer=, not its class")
    return Loop(
        module=module,
        batch=batch,
        optimizers=optimizers,
        make_optimizer=make,
        loss=loss,
        step=step,
        state=tuple(state),
    )


def _optimizers(optimizer: Any) -> tuple[Optimizer, ...]:
    """Return the optimizers among what a caller passes; none if it is a function that makes one.

    Raises:
        UsageError: it is something else.
    """
    if optimizer is None or callable(optimizer):
        return ()
    every = optimizer if isinstance(optimizer, (tuple, list)) else (optimizer,)
    hint = "pass optimizers, or a function of the parameters that makes one"
    return tuple(instance("optimizer", one, Optimizer, hint) for one in every)


# ---- The device


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDevice:
    """The device of the loop: whose kernels run, at which rates, and how fast it copies to its host."""

    target: Target
    kind: DeviceKind
    copy_bytes_per_second: float  # 0 if nothing may be offloaded


def _site(module: nn.Module, device: str | None, *, offload: bool) -> LoopDevice:
    """Return the device's figures: of a named card, or of a usual one of the module's device type.

    Raises:
        UsageError: no card has this name.
    """
    if device is None:
        here = next((p.device.type for p in module.parameters()), "cpu")
        target: Target = "cuda" if here == "cuda" else "cpu"
        kind, rate = (_GPU if target == "cuda" else _CPU), _COPY_BYTES_PER_SECOND[target]
    else:
        cluster = Cluster.preset(device if device in machine_names() else f"1x-{device}")
        nbytes = 1 << 30
        target, kind = "cuda", cluster.devices[0].kind
        rate = nbytes / cluster.seconds([(Member.device(0), Member.host(0), nbytes)])
    return LoopDevice(target=target, kind=kind, copy_bytes_per_second=rate if offload else 0.0)


# ---- The plan


def planned(loop: Loop, budget_bytes: int, site: LoopDevice) -> LoopPlan:
    """Return the cheapest certified plan.

    Raises:
        InfeasibleError: no decisions keep the budget.
    """
    kernels = Kernels(torch.get_num_threads()) if site.target == "cpu" else None
    result = _BudgetSearch(budget_bytes, site, kernels, _recorded(loop, site, kernels)).plan()
    if kernels is not None:
        kernels.keep()
    return result


_BY_VALUE = (
    "the shape of a tensor depends on values, such as the lengths of packed sequences, so its bytes are "
    "unknown before it runs: pad it to a fixed length"
)
_FUNCTIONAL = (
    "torch.func saves tensors out of sight, so no plan recomputes or offloads them: use torch.autograd"
)
_UNKNOWN = (
    "if it trains without pipefit, it uses a number that a dry run does not know, such as an index that is "
    "read from a tensor, or objects with tensors besides module and optimizer: pass these objects as state="
)


def _is_by_value(error: Exception) -> bool:
    """Return whether values decide a shape; `shape_env` is of the lengths of a nested tensor."""
    by_value = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
    return by_value or "shape_env" in str(error)


def _recorded(loop: Loop, site: LoopDevice, kernels: Kernels | None) -> list[tuple[Loop, LoopRecording]]:
    """Return the recording of the loop, and perhaps that of the loop with all unknown conditions false.

    That is made if conditions on unknown values decide what runs. One of the two may fail.

    Raises:
        UsageError: the loop cannot run over fake tensors.
    """
    result: list[tuple[Loop, LoopRecording]] = []
    failures: list[Exception] = []
    for one in (loop, replace(loop, opposite=True)):
        if not result or result[0][1].has_conditions:
            try:
                result.append(_succeeding(one, site, kernels))
            except PipefitError:
                raise
            except Exception as error:  # noqa: BLE001 - raised below if no run succeeds
                failures.append(error)
    if not result:
        failed = next((one for one in failures if _is_by_value(one)), failures[0])
        if isinstance(failed, Refusal):
            raise UsageError(f"the loop cannot run over fake tensors: {explained(failed)}") from failed
        why = _UNKNOWN
        if _is_by_value(failed):
            why = _BY_VALUE
        elif "support saved tensor hooks" in str(failed):
            why = _FUNCTIONAL
        raise UsageError(f"the loop fails over fake tensors: {explained(failed)}; {why}") from failed
    return result


def _succeeding(loop: Loop, site: LoopDevice, kernels: Kernels | None) -> tuple[Loop, LoopRecording]:
    """Return a loop that does not raise an error, such as one about NaN, and its recording.

    If it does, the last condition on values before the error gets the other answer.
    """
    while True:
        numbers = NumberReads()
        try:
            recording = record(loop, site.target, kernels, site.kind, numbers)
            return replace(loop, steps=len(recording.ends)), recording
        except PipefitError:
            raise
        except Exception:
            if numbers.last in ("", *loop.contrary):
                raise
            loop = replace(loop, contrary=loop.contrary | {numbers.last})


class _BudgetSearch:
    """Choices for a budget, each certified by a dry run of every recorded loop."""

    def __init__(
        self,
        budget_bytes: int,
        site: LoopDevice,
        kernels: Kernels | None,
        recorded: Sequence[tuple[Loop, LoopRecording]],
    ) -> None:
        self._budget, self._site, self._kernels = budget_bytes, site, kernels
        self._loops = [loop for loop, _ in recorded]
        recording = self._recording = max((one for _, one in recorded), key=lambda one: max(one.peaks))
        self._choices = Choices(recording, site.copy_bytes_per_second, overlaps=site.target == "cuda")
        self._certified: dict[frozenset[Variable], tuple[int, int]] = {}

    def plan(self) -> LoopPlan:
        """Return the cheapest plan that is certified to keep the budget.

        Raises:
            InfeasibleError: there is none.
        """
        self._approach()
        fitting = [c for c, peaks in self._certified.items() if max(peaks) <= self._budget]
        if not fitting:
            self._certify(self._choices.smallest())
            fitting = [c for c, peaks in self._certified.items() if max(peaks) <= self._budget]
        if not fitting:
            raise self._lacking()
        costs = self._choices.seconds
        best = min(fitting, key=lambda chosen: (sum(costs[v] for v in chosen), max(self._certified[chosen])))
        return self._plan_of(best)

    def _approach(self) -> None:
        """Certify the best choice for the budget, then for smaller or larger ones as its peak demands."""
        limit, low, high = self._budget, 0, 2 * self._budget
        for _ in range(_MOST_TRIES):
            chosen = self._choices.fitting(limit)
            if chosen is None:
                low = limit
            else:
                peak = max(self._certify(chosen))
                error = peak - self._choices.peak(chosen)
                if peak <= self._budget:
                    low = limit
                    if error >= 0 or limit >= high - 1:
                        return
                else:
                    high = min(high, limit)
            following = self._budget - error if chosen is not None else (low + high) // 2
            limit = following if low < following < high else (low + high) // 2
            if high - low <= max(self._budget >> 12, 1):
                return

    def _certify(self, chosen: frozenset[Variable]) -> tuple[int, int]:
        """Return the peaks of the loop under these decisions."""
        if chosen not in self._certified:
            decisions = self._choices.decisions(chosen)
            runs = [peaks_of(one, decisions, self._site.target, self._kernels) for one in self._loops]
            self._certified[chosen] = max(first for first, _ in runs), max(steady for _, steady in runs)
        return self._certified[chosen]

    def _plan_of(self, chosen: frozenset[Variable]) -> LoopPlan:
        return LoopPlan(
            budget_bytes=self._budget,
            peak_bytes=self._certified[chosen],
            plain_bytes=self._recording.peaks,
            decisions=self._choices.decisions(chosen),
            step_seconds=self._recording.later_seconds,
            state_on_host=self._loops[0].state_on_host,
            refused=tuple(sorted(self._choices.refused.items())),
            gap=self._recording.gap,
        )

    def _lacking(self) -> InfeasibleError:
        """Return the error that says what would be needed."""
        least = min(max(peaks) for peaks in self._certified.values())
        lasting = sum(s.nbytes for s in self._recording.storages if s.lasting)
        need = (
            f"the least peak found is {format_bytes(least)} ({least:,} bytes), "
            f"{format_bytes(least - self._budget)} more. Parameters, buffers and state take "
            f"{format_bytes(lasting)} before the first step; a smaller batch takes less of the rest"
        )
        refused = self._choices.refused
        for name, reason in [*refused.items()][:1]:
            others = f", nor {counted(len(refused) - 1, 'other submodule')}" if len(refused) > 1 else ""
            need += f". {name} is not recomputed{others}: {reason}"
        proof = need if lasting > self._budget else ""
        error = InfeasibleError(refusal(f"the loop in {format_bytes(self._budget)}", proof, need))
        error.found = {"least_bytes": least}
        return error
