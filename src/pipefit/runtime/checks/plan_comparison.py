"""Comparison of a whole plan with plain training.

It covers schedules, collectives, shards, updates and offloading.

All devices of the plan train two steps in turn in this process, on copies of the model, with real numbers and
the task's optimizer, clipping and precision. A plain loop trains a copy of the module on the same
microbatches (`capture.plain_training`). Parameters, buffers and the optimizer's tensors are compared on every
replica and shard. A second plain loop, from parameters that differ by a rounding error, shows how far
rounding alone changes the result.

Costs one training by the plan and two plain ones, for a few microbatches each, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture import (
    Chain,
    DrawingOptimizer,
    DrawRecording,
    Draws,
    MeanDraws,
    NotComparable,
    Replaying,
    Sample,
    Task,
    Trained,
    UnknownDraw,
    casting_for,
    copies_of,
    in_slices,
    joined,
    plain_forward,
    plainly,
    put_back,
    python_state,
    recording,
    same,
    seed_all,
    stored_entries,
    tensors_put_back,
    train_plainly,
)
from pipefit.errors import OutOfMemory, UsageError, in_one_line
from pipefit.lowering import Entered, is_endless, whole_run
from pipefit.runtime.comm.transport import InProcess
from pipefit.runtime.engine.assembly import assemble
from pipefit.runtime.engine.execution import Execution, Programs
from pipefit.runtime.engine.replicas import Held, trained_sources
from pipefit.runtime.engine.runner import DeviceRunner
from pipefit.runtime.engine.stage import Site, StageRunner
from pipefit.runtime.engine.tensor_groups import Together
from pipefit.runtime.hardware import Hardware
from pipefit.runtime.offload.lending import Lending
from pipefit.runtime.state import StageState
from pipefit.schema.actions import FORWARDS
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.tensor_parallel import ShardedChain
from pipefit.texts import counted, first_of
from pipefit.torch_internals import pytree
from pipefit.torch_internals.patches import without_gpus

STEPS = 2
_EXACT = 1e-4  # of an update: the tolerated difference between two ways to train
_ROUNDINGS = 10  # times the effect of a rounding error on plain training
_NOISE = 0.1  # of a gradient: with a larger share of rounding, its update is not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNumbers:
    """Result of a comparison of a plan with plain training.

    `differences` describe unequal tensors and by how much. `tensors` counts the compared tensors, and `noisy`
    those that rounding alone decides; `without_draws` says that means stood for random draws.
    """

    name: str
    microbatches: int
    tensors: int
    noisy: int
    without_draws: bool
    differences: tuple[str, ...]

    def __str__(self) -> str:
        if self.differences:
            return self._refusal
        noisy = f"; {counted(self.noisy, 'tensor')} dominated by rounding not compared" if self.noisy else ""
        draws = ", with means instead of random draws" if self.without_draws else ""
        return (
            f"{self.name} trains by the plan exactly like plain training: {STEPS} steps of "
            f"{counted(self.microbatches, 'microbatch')}{draws}, {counted(self.tensors, 'tensor')} of "
            f"parameters, buffers and optimizer on all devices{noisy}"
        )

    def check(self) -> None:
        """Check that nothing differs.

        Raises:
            UsageError: a tensor differs; names it, and by how much.
        """
        if self.differences:
            raise UsageError(self._refusal)

    @property
    def _refusal(self) -> str:
        return (
            f"{self.name} trains differently by this plan than plainly: after {STEPS} steps "
            f"{first_of(self.differences)}. "
            "Either a backward uses tensors that autograd does not track (an attribute of a context, a "
            "hook), which later microbatches overwrite: save them with ctx.save_for_backward. Or this is a "
            "defect of pipefit: please report it with the plan, and try another plan, or train by this one "
            "anyway with numbers=False (train --no-numbers)"
        )


def nothing_held(divided: ShardedChain, batch: Sample) -> None:
    """Compare nothing."""


def compare_plan(
    whole: Task,
    plan: Plan,
    chain: Chain,
    batches: Sequence[Sample],
    microbatches: int,
    *,
    held: Held = nothing_held,
) -> PlanNumbers:
    """Compare two steps of `plan` with plain training of the module of `whole`.

    Each step has `microbatches` microbatches. `chain` was made from this module; both train copies. The
    samples are those of the microbatches `batches`. Chains that ranks divide are first compared with whole
    ones by `held`.

    Raises:
        NotComparable: plain training cannot give the expected numbers; says why.
        UsageError: the plan cannot be executed.
    """
    if is_endless(plan):
        raise NotComparable(f"schedule {plan.training.schedule} uses older weights than a plain loop")
    steps = _steps(batches, plan.training.microbatch_size, microbatches)
    with put_back(), recording("comparing numbers"), casting_for(plan.cluster.target), without_gpus():
        net = _PlanComparison(whole, plan, chain, steps, held)
        try:
            with tensors_put_back(net.module):
                return net.compare()
        except UnknownDraw as error:
            raise NotComparable(str(error)) from error
        except OutOfMemory as error:
            raise NotComparable(f"this machine lacks the memory for it ({in_one_line(error)})") from error


def host_bytes(plan: Plan, microbatches: int) -> int:
    """Return host bytes of a comparison.

    It has the state of the plan's devices, three plain trainings, and activations.
    """
    measurement, kept = plan.measurement, 0
    for number, stage in enumerate(plan.stages):
        costs = plan.measured(number).costs[stage.start : stage.stop]
        kept += len(stage.devices) * sum(
            cost.static_bytes + cost.gradient_bytes + cost.state_bytes for cost in costs
        )
    whole = sum(cost.static_bytes + cost.gradient_bytes + cost.state_bytes for cost in measurement.costs)
    activations = sum(sum(cost.storages) for cost in (*measurement.costs, measurement.loss))
    return kept + 3 * whole + (microbatches + 1) * activations


def passes(microbatches: int) -> int:
    """Return the number of trained microbatches: by the plan, which may recompute them, and twice plainly."""
    return STEPS * microbatches * 4


def enough_microbatches(plan: Plan) -> int:
    """Return the number of microbatches that fill and drain every stage as in a whole step."""
    return min(plan.training.microbatches, 2 * len(plan.stages), len(plan.stages) + 2)


@dataclass(slots=True)
class _PlanComparison:
    """One comparison."""

    whole: Task
    plan: Plan
    chain: Chain
    steps: Sequence[Sequence[Sample]]
    held: Held

    def compare(self) -> PlanNumbers:
        drew, slices = self._probed()
        draws = Draws() if drew and not self._threads else None
        runners, start = self._as_planned(draws, means=drew and self._threads)
        around = partial(self._around, draws, slices, means=drew and self._threads)
        plain, perturbed = (self._plainly(slices, around, perturbed=perturbed) for perturbed in (False, True))
        if not all(map(isfinite, plain.losses)):
            raise NotComparable(f"the losses of {self.whole.name} are {plain.losses} before training")
        noisy = _noisy(plain, perturbed)
        result, count, left_out = list[str](), 0, set[str]()
        for runner in runners:
            for number, stage in runner.stages.items():
                for pair in _pairs(stage, start, plain, perturbed):
                    if pair.of_parameter in noisy:
                        left_out.add(pair.what)
                        continue
                    count += 1
                    if (apart := pair.apart) is not None:
                        result.append(f"{pair.what} on device {runner.number} (stage {number}) is {apart}")
        return PlanNumbers(
            name=self.whole.name,
            microbatches=len(self.steps[0]),
            tensors=count,
            noisy=len(left_out),
            without_draws=drew and self._threads,
            differences=tuple(result),
        )

    @property
    def _threads(self) -> bool:
        """True if devices compute on separate threads, whose draws are not recorded."""
        return any(stage.grid.tensor > 1 for stage in self.plan.stages)

    def _probed(self) -> tuple[bool, int]:
        """Return whether a forward draws random numbers, and the number of local batches for the plain loop.

        Raises:
            NotComparable: stages of different degrees compute samples that depend on each other.
        """
        degrees = {stage.grid.data for stage in self.plan.stages}
        (own,), loss_of = self._copies([self.module])
        forward = plain_forward(self.whole, own, loss_of, traced=self.chain.traced)
        batch = _copied(self.steps[0][0])
        seed_all(0)
        before, elsewhere, held = (
            torch.get_rng_state(),
            python_state(),
            [buffer.clone() for buffer in own.buffers()],
        )
        with plainly(self.whole, "training"), torch.no_grad():
            forward(*_copied(batch))
        drew = not torch.equal(before, torch.get_rng_state())
        if elsewhere != python_state():
            raise NotComparable(f"{self.whole.name} draws from the random generators of Python or numpy")
        counts = any(
            b.is_floating_point() and not same(b, old) for b, old in zip(own.buffers(), held, strict=True)
        )
        if len(degrees) == 1:
            return drew, max(degrees)
        data = max(degrees)
        with plainly(self.whole, "training"), torch.no_grad(), MeanDraws() if drew else nullcontext():
            together = forward(*_copied(batch)).item()
            apart = sum(forward(*_copied(part)).item() for part in in_slices(batch, data)) / data
        if counts or (abs(together - apart) > 1e-5 * abs(together) and not self._is_rough):
            raise NotComparable(
                "stages have different numbers of replicas, and samples depend on each other, as in batch "
                "norm, or have different weights in the loss"
            )
        return drew, 1

    @property
    def _is_rough(self) -> bool:
        """True if numbers are in half precision."""
        return self.whole.precision not in (None, "float32", "float64")

    @property
    def module(self) -> nn.Module:
        """The module of the task, which stays unchanged."""
        assert isinstance(self.whole.module, nn.Module)
        return self.whole.module

    def _copies(self, modules: Sequence[nn.Module]) -> tuple[list[nn.Module], Any]:
        """Return copies of modules, and of the loss.

        Raises:
            NotComparable: they cannot be copied.
        """
        try:
            return copies_of(modules, self.whole.loss)
        except Exception as error:
            raise NotComparable(f"{self.whole.name} cannot be copied ({in_one_line(error)})") from error

    def _plainly(self, slices: int, around: Any, *, perturbed: bool) -> Trained:
        """Train a copy of the module plainly, from parameters that are `perturbed` by a rounding error if
        set.
        """
        (own,), loss_of = self._copies([self.module])
        if perturbed:
            _perturb(own, self.whole)
        try:
            with plainly(self.whole, "training"):
                return train_plainly(
                    self.whole,
                    own,
                    plain_forward(self.whole, own, loss_of, traced=self.chain.traced),
                    [[_copied(batch) for batch in step] for step in self.steps],
                    clip_norm=self.plan.training.clip_norm,
                    slices=slices,
                    around=around,
                )
        except DrawingOptimizer:
            raise NotComparable("the optimizer draws random numbers, which depend on the plan") from None

    def _around(
        self, draws: Draws | None, slices: int, step: int, number: int, place: int, *, means: bool
    ) -> AbstractContextManager[object]:
        """Return the context of a plain forward, which replays the draws of the plan."""
        if means:
            return MeanDraws()
        if draws is None:
            return nullcontext()
        parts = [
            [
                (step, number, stage, replica)
                for replica in (range(one.grid.data) if slices == 1 else (place,))
            ]
            for stage, one in enumerate(self.plan.stages)
        ]
        return Replaying(draws.joined(parts))

    # ---------------------------------------------------------------- training by the plan

    def _as_planned(self, draws: Draws | None, *, means: bool) -> tuple[list[DeviceRunner], Trained]:
        """Return the devices after all steps, and the tensors before them."""
        own, loss_of = self._copies([self.module, *(layer.module for layer in self.chain.layers)])
        start = Trained(
            tensors={
                name: t.detach().clone()
                for name, t in stored_entries(own[0]).items()
                if isinstance(t, Tensor)
            }
        )
        task = replace(self.whole, module=own[0], loss=loss_of)
        layers = tuple(
            replace(chain_layer, module=copy)
            for chain_layer, copy in zip(self.chain.layers, own[1:], strict=True)
        )
        chain = replace(
            self.chain, layers=layers, criterion=loss_of if self.chain.criterion is not None else None
        )
        here = replace(self.plan, cluster=replace(self.plan.cluster, backend="emulated"))
        program = Programs(self.plan).training(len(self.steps[0]), Entered(), update=True)
        groups, run = Together(here), whole_run(self.plan)
        site = Site(
            task=task,
            sources=trained_sources(self.plan, task, chain, groups, copies=True, held=self.held),
            plan=self.plan,
            program=run,
            transport=InProcess(),
            clock=lambda: 0.0,
            seed=0,
            lending=replace(Lending.within(Hardware(here), run), copier=Lending.at_once),
        )
        runners = [assemble(site, n, device=torch.device("cpu"), meter=None) for n in self.plan.workers]
        execution = Execution(task, self.plan, chain, runners, groups=groups, distributed=False)
        for number, step in enumerate(self.steps):
            recorder = None if draws is None else _DrawRecorder(self.plan, program, draws, number)
            for runner in runners:
                runner.on_action = None if recorder is None else partial(recorder.begin, runner.number)
            execution.drop_gradients()
            try:
                execution.run(
                    execution.cut(joined(*step)),
                    program,
                    1,
                    training=True,
                    around=MeanDraws if means else None,
                )
            finally:
                if recorder is not None:
                    recorder.end()
        return runners, start


class _DrawRecorder:
    """Records the draws of first forwards in a step, by step, microbatch, stage and replica."""

    def __init__(self, plan: Plan, program: Program, draws: Draws, step: int) -> None:
        self._plan, self._program, self._draws, self._step = plan, program, draws, step
        self._running: DrawRecording | None = None

    def begin(self, device: int, number: int) -> None:
        """Note that a device begins an action; earlier actions have ended, or wait."""
        self.end()
        actions = self._program.actions[device]
        if number >= len(actions) or actions[number].kind not in FORWARDS:
            return
        action = actions[number]
        replica = self._plan.stages[action.stage].grid.replica_of(device)
        self._running = DrawRecording(self._draws, (self._step, action.microbatch, action.stage, replica))
        self._running.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop recording."""
        if self._running is not None:
            self._running.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._running = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A tensor by the plan, by plain training, by plain training after a rounding error, and before
    training.
    """

    what: str
    of_parameter: str
    ours: Tensor
    plain: Tensor
    perturbed: Tensor
    start: Tensor | None

    @property
    def apart(self) -> str | None:
        """Description of the difference; None if rounding explains it."""
        if self.ours.shape != self.plain.shape or self.ours.dtype != self.plain.dtype:
            return (
                f"{self.ours.dtype} {tuple(self.ours.shape)} instead of {self.plain.dtype} "
                f"{tuple(self.plain.shape)}"
            )
        if not (self.plain.is_floating_point() or self.plain.is_complex()):
            return None if torch.equal(self.ours, self.plain) else "not equal"
        start = torch.zeros_like(self.plain) if self.start is None else self.start.to(self.plain.dtype)
        update = _length(self.plain - start)
        far, rounding = _length(self.ours - self.plain), _length(self.perturbed - self.plain)
        allowed = (
            _EXACT * update + _ROUNDINGS * rounding + torch.finfo(self.plain.dtype).eps * _length(self.plain)
        )
        if far <= allowed:
            return None
        return f"{far / update:.1e} of its update apart" if update else "updated, and should not be"


def _length(tensor: Tensor) -> float:
    return float(
        torch.linalg.vector_norm(
            tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
        )
    )


def _pairs(stage: StageRunner, start: Trained, plain: Trained, perturbed: Trained) -> Iterator[_Pair]:
    """Yield a pair for every tensor of a stage that plain training has too."""
    state, shards, runs = StageState.of([stage]), stage.shards, (plain, perturbed, start)

    def pair(what: str, name: str, ours: Tensor, *values: Tensor) -> _Pair:
        result = [value if shards is None else shards.part(name, value) for value in values]
        return _Pair(
            what=what, of_parameter=name, ours=ours, plain=result[0], perturbed=result[1], start=result[2]
        )

    for name, tensor in state.tensors.items():
        yield pair(name, name, tensor, *(run.of_replica(name, stage.replica) for run in runs))
    for name, tensor in state.master_weights.items():
        copies = plain.masters[name], perturbed.masters[name], start.tensors[name]
        yield pair(f"the float32 copy of {name}", name, tensor, *copies)
    for name, kept in state.optimizer.items():
        known, again = plain.optimizer.get(name, {}), perturbed.optimizer.get(name, {})
        if shards is not None:
            known, again = shards.part_of_state(name, known), shards.part_of_state(name, again)
        for key in kept.keys() & known.keys():
            what = f"{key} of {name}"
            yield _Pair(
                what=what,
                of_parameter=name,
                ours=kept[key],
                plain=known[key],
                perturbed=again[key],
                start=None,
            )


def _noisy(plain: Trained, perturbed: Trained) -> set[str]:
    """Return the names of parameters whose gradients are rounding errors, as those of biases before a
    norm.
    """
    result = set[str]()
    for one, other in zip(plain.gradients, perturbed.gradients, strict=False):
        for name, gradient in one.items():
            if name in other and _length(gradient - other[name]) > _NOISE * _length(gradient):
                result.add(name)
    return result


def _perturb(module: nn.Module, task: Task) -> None:
    """Change every parameter by a rounding error of the precision that it computes in."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                rounding = torch.finfo(task.autocast or parameter.dtype).eps
                signs = torch.randint(0, 2, parameter.shape, generator=draws).mul_(2).sub_(1)
                parameter.mul_(
                    1 + rounding * signs.to(torch.float64)
                ) if parameter.dtype is torch.float64 else (
                    parameter.copy_(parameter.double().mul_(1 + rounding * signs))
                )


def _steps(batches: Sequence[Sample], size: int, microbatches: int) -> list[list[Sample]]:
    """Return distinct microbatches for all steps, with samples from `batches` in turn."""
    return [
        [_shifted(batches, step * microbatches + number, size) for number in range(microbatches)]
        for step in range(STEPS)
    ]


def _shifted(batches: Sequence[Sample], first: int, size: int) -> Sample:
    specs = [pytree.tree_flatten(batch) for batch in batches]
    leaves = []
    for tensors in zip(*(result for result, _ in specs), strict=True):
        if not isinstance(tensors[0], Tensor):
            leaves.append(tensors[0])
            continue
        pool = torch.cat([tensor.detach().cpu() for tensor in tensors])
        leaves.append(pool[torch.arange(first, first + size) % len(pool)])
    result: Sample = pytree.tree_unflatten(leaves, specs[0][1])
    return result


def _copied(batch: Sample) -> Sample:
    result: Sample = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), batch)
    return result
