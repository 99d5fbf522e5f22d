"""The dry run: the runtime over fake tensors, all devices in one process, without hardware and data.

It executes every action of the program as workers would, on tensors that have shapes and storages but no
bytes. Its peaks are, to the byte, those of real training, for any model that fake tensors support.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

import torch

from pipefit.capture import READINGS, Chain, Sample, Task, left_as_found, recording
from pipefit.capture.sample import sample
from pipefit.errors import PipefitWarning, UsageError
from pipefit.fake_cuda.chain import Chains, chain_again
from pipefit.fake_cuda.isolation import apart
from pipefit.fake_cuda.target import FakeTarget, run_a_backward
from pipefit.lowering import distinct_steps, is_endless, step_programs, whole_run
from pipefit.measure import Kernels
from pipefit.memory import AllocatorSettings
from pipefit.processes import beside, forks_left
from pipefit.runtime.checks.plan_check import CERTIFIED, check_model, warn_elsewhere
from pipefit.runtime.comm.transport import InProcess, Transport
from pipefit.runtime.dry_run.asynchronous import Effects, EndlessLives, fewer, labels, turns
from pipefit.runtime.dry_run.devices import Account, Company, Kin, casts, kin, unlike_layers
from pipefit.runtime.dry_run.layers import RepeatedMeter, Shortened
from pipefit.runtime.dry_run.lives import LivesMeter, OwningMeter
from pipefit.runtime.dry_run.microbatches import Folding, Seated, Seating, Unfolding, shortened
from pipefit.runtime.dry_run.reserved import Allocators, LivesOf, overheads
from pipefit.runtime.engine.assembly import assemble
from pipefit.runtime.engine.execution import run_in_turn
from pipefit.runtime.engine.replicas import RankShards, Source, StageSources, Wanted, check_as_profiled
from pipefit.runtime.engine.runner import DeviceRunner, Microbatch
from pipefit.runtime.engine.stage import Site
from pipefit.runtime.engine.tensor_groups import without_peers
from pipefit.runtime.offload.lending import Lending, lending_trace
from pipefit.schema.actions import Action
from pipefit.schema.layer_costs import Kernel, KernelMemory
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Target
from pipefit.schema.program import Program
from pipefit.schema.trace import MOST_STEPS, AllocatorPeaks, DeviceTrace, MemorySample, Trace
from pipefit.schema.validation import instance, whole
from pipefit.tensor_parallel import ShardedChain, shard_chain

_FIRST = 6  # groups of equal devices that run first without `each`


def certify(
    task: Task,
    plan: Plan,
    *,
    steps: int | None = None,
    target: Target | None = None,
    fold: bool = True,
    allocator: AllocatorSettings | None = None,
    chains: Chains | None = None,
    each: bool = True,
) -> Trace:
    """Return the peaks of `plan` on every device, over `steps` training steps, exact to the byte.

    Default of `steps`: the number of distinct steps (`lowering.distinct_steps`), two under a synchronous
    schedule, because optimizer state is created in the first. Times in the trace are positions in the
    program, not seconds. Budgets are not enforced: compare `trace.peak_bytes` with the cluster's. Unless
    `fold` is False, representatives stand for the rest: one of equal microbatches
    (`runtime.dry_run.microbatches`), four of equal layers in a row (`runtime.dry_run.layers`), the first of
    equal devices, and two of the replicas that shard state (`runtime.dry_run.devices`). The bytes are equal,
    and the complete run takes many times longer. Under an asynchronous schedule microbatches are folded
    (`runtime.dry_run.asynchronous`), and layers are not.

    With settings of CUDA's caching `allocator`, for the target `cuda` only, the trace also has the allocated
    and reserved bytes of a GPU (`DeviceTrace.allocator`). They depend on the position of each block, so the
    allocations of executed layers are repeated for all others (`runtime.dry_run.devices`).

    Processes that do not fit are simulated with just enough memory. Without `each`, the devices of which the
    plan predicts the fullest memory run first, and the others only if the processes of these fit. Then
    allocators of a stage's devices are simulated from the one with the most tensors on, until one does not
    fit. The trace has no allocator of the others.

    With `chains` of the task, the model is not traced for numbers of samples that they have.

    For the target `cpu` the profile gives the memory of kernels, also on another machine; an operation that
    is not in it is measured here. Warns (`PipefitWarning`) about another machine, and about operations that
    could not be measured.

    Raises:
        FileError: the plan was made for another task; says what differs.
        OutOfMemory: offloaded tensors exceed a host, or a device that only lends memory.
        UsageError: offloading is impossible for a tensor, or `allocator` is given for a target without one.
    """
    instance("task", task, Task, "a plan is the second argument")
    instance("plan", plan, Plan, "pipefit.load reads one")
    steps = distinct_steps(plan) if steps is None else steps
    whole("steps", steps, 1, MOST_STEPS)
    instance("fold", fold, bool)
    instance("chains", chains := chains or Chains(task), Chains)
    target = target or plan.profile.assumptions.target
    if allocator is not None and target != "cuda":
        raise UsageError(
            f"target {target} does not have a caching allocator: certify for the target cuda, or without an "
            "allocator"
        )
    warn_elsewhere(plan.profile.assumptions, CERTIFIED, callers=1)
    kernels = Kernels(plan.profile.assumptions.threads, plan.profile.kernels) if target == "cpu" else None
    programs = step_programs(plan)
    lending = Lending.dry(plan, whole_run(plan, programs))
    with recording("certifying"):
        like = sample(task, plan.training.microbatch_size)
    dry = Rehearsal(task, plan, programs, lending, like, steps, kernels, allocator, chains, each)

    def run() -> Rehearsed:
        with (
            recording("certifying"),
            torch.random.fork_rng(devices=[]),
            left_as_found(task.loss),
            FakeTarget(target) as fake,
        ):
            return dry.run(fake, fold=fold)

    ran = apart(target, run)
    if kernels is not None:
        kernels.keep()
        kernels.tell_unknown()
    assumed = (*ran.assumed, *(kernel for kernel in plan.profile.kernels.unknown if kernel in READINGS))
    if gap := KernelMemory(kernels=tuple(dict.fromkeys(assumed))).gap:
        warnings.warn(gap, PipefitWarning, stacklevel=2)
    return dry.trace(ran)


class Rehearsed(NamedTuple):
    """Results of a dry run for some devices: their memory samples, and the peaks of their allocators.

    `assumed` are operations with assumptions about their memory. The last field is False if representative
    layers or microbatches turned out to differ from the represented ones.
    """

    samples: dict[int, list[MemorySample]]
    peaks: dict[int, AllocatorPeaks]
    assumed: tuple[Kernel, ...] = ()
    alike: bool = True

    @staticmethod
    def together(parts: Sequence[Rehearsed]) -> Rehearsed:
        """Join the results of all devices, which are distributed over the parts."""
        samples = {device: result for part in parts for device, result in part.samples.items()}
        peaks = {device: result for part in parts for device, result in part.peaks.items()}
        assumed = dict.fromkeys(kernel for part in parts for kernel in part.assumed)
        return Rehearsed(samples, peaks, tuple(assumed), all(part.alike for part in parts))


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A dry run of some steps of a plan, optionally with bytes that this `allocator` reserves."""

    task: Task
    plan: Plan
    programs: tuple[Program, ...]  # of the first steps; the last one repeats
    lending: Lending
    like: Sample
    steps: int
    kernels: Kernels | None
    allocator: AllocatorSettings | None
    chains: Chains
    each: bool = True  # whether allocators are simulated after one of the stage that does not fit
    traced: dict[int, Chain] = field(default_factory=dict)  # by samples; their layers are only copied

    def run(self, fake: FakeTarget, *, fold: bool) -> Rehearsed:
        """Run all steps; with `fold`, only representative layers and microbatches."""
        if not fold:
            return self._whole(fake)
        every = kin(self.plan, self.programs, self.lending.arenas)
        if is_endless(self.plan):
            ran = self._beside_each_other(fake, partial(self._endless, fake, self._everything(fake)), every)
        else:
            folding = Folding.of(self.programs[0])
            short = self._shortened(fake, folding, every)
            ran = self._beside_each_other(fake, partial(self._run, fake, short, folding), every)
            if not ran.alike and short.repeats:
                # Layers that seemed equal may differ; the chain is made again because its layers were
                # trained.
                run = partial(self._run, fake, self._everything(fake), folding)
                ran = self._beside_each_other(fake, run, every)
        return ran if ran.alike else self._whole(fake)

    def trace(self, ran: Rehearsed) -> Trace:
        """Return the trace of all devices, with the peaks of their allocators if these are simulated."""
        devices = list[DeviceTrace]()
        for device in range(len(self.plan.cluster.devices)):
            result = lending_trace(self.plan, device, self.lending.arenas)
            if device in ran.samples:
                result = replace(result, memory=tuple(ran.samples[device]), allocator=ran.peaks.get(device))
            devices.append(result)
        return Trace(
            source="dry run", steps=self.steps, devices=tuple(devices), step_seconds=(0.0,) * self.steps
        )

    def _beside_each_other(
        self, fake: FakeTarget, run: Callable[[Sequence[Kin]], Rehearsed], every: Sequence[Kin]
    ) -> Rehearsed:
        """Apply `run` to all kin; without `each`, to the fullest by prediction, and others if these fit."""
        plan = self.plan
        if self.each or self.allocator is None or plan.prediction is None or len(every) <= _FIRST:
            return self._in_parallel(fake, run, every)
        peaks, budgets = plan.prediction.peak_bytes, plan.cluster.budgets
        every = sorted(every, key=lambda devices: -peaks[devices[0]] / budgets[devices[0]])
        first = self._in_parallel(fake, run, every[:_FIRST])
        if not first.alike or not all(own.fits for own in first.peaks.values()):
            return first
        return Rehearsed.together([first, self._in_parallel(fake, run, every[_FIRST:])])

    def _in_parallel(
        self, fake: FakeTarget, run: Callable[[Sequence[Kin]], Rehearsed], every: Sequence[Kin]
    ) -> Rehearsed:
        """Apply `run` to kin in parallel processes, one per free core.

        Representatives do not exchange tensors. Kin with the most layers are assigned first. If kernels are
        measured, this process runs all of them: a fork lacks the threads of the kernels.
        """
        processes = forks_left() if self.kernels is None else 0
        if processes < 2:
            return run(every)
        for samples in {self.plan.measured(stage).microbatch_size for stage in range(len(self.plan.stages))}:
            self._unrun(fake, samples)  # so that no other process traces the model
        parts: list[list[Kin]] = [[] for _ in range(min(processes, len(every)))]
        layers = dict.fromkeys(range(len(parts)), 0)
        for devices in sorted(every, key=self._layers_of, reverse=True):
            least = min(layers, key=lambda part: layers[part])
            parts[least].append(devices)
            layers[least] += self._layers_of(devices)
        begun = [beside(partial(run, part), check=run_a_backward) for part in parts]
        return Rehearsed.together([result() for (result,) in begun])

    def _layers_of(self, devices: Kin) -> int:
        """Return the number of layers on each of these kin."""
        stages = [self.plan.stages[number] for number in self.plan.stages_of(devices[0])]
        return sum(stage.stop - stage.start for stage in stages)

    def _whole(self, fake: FakeTarget) -> Rehearsed:
        return self._run(fake, self._everything(fake), Folding.none(self.programs), None)

    def _everything(self, fake: FakeTarget) -> Shortened:
        return Shortened.none(self.plan, self.programs[-1], self._chain(fake))

    def _endless(self, fake: FakeTarget, short: Shortened, together: Sequence[Kin]) -> Rehearsed:
        """Run representatives of these kin under an asynchronous schedule, with representative
        microbatches.
        """
        last = len(self.programs) - 1
        wanted = [self.programs[min(step, last)] for step in range(self.steps)]
        executed = fewer(self.plan, wanted, again=self.allocator is not None)
        runners, company = self._company(fake, short, together)
        effects = {account: Effects(account.rest) for account in company.devices_of}
        lives = {account: EndlessLives() for account in company.devices_of if self.allocator}
        for program, known in zip(executed, labels(self.plan, executed), strict=True):
            run_in_turn(runners, *self._data(fake, short, program.microbatches), program=program)
            company.learn(program)
            for account, devices in company.devices_of.items():
                effects[account].learn(known[devices[0]], account.changes)
                if self.allocator:
                    lives[account].learn(known[devices[0]], account.before, account.lives)
        samples = company.no_samples
        of_steps = labels(self.plan, wanted)
        for step, (program, known) in enumerate(zip(wanted, of_steps, strict=True)):
            for account, (first, *others) in company.devices_of.items():
                result = list(effects[account].samples(step, program.actions[first], known[first]))
                samples[first] += result
                for other in others:
                    samples[other] += _named(result, program.actions[other])
        for account, own in lives.items():
            of_device = [known[company.devices_of[account][0]] for known in of_steps]
            own.unfold(of_device, turns(self.plan, of_device))
        return self._told(fake, samples, company, lives)

    def _shortened(self, fake: FakeTarget, folding: Folding, every: Sequence[Kin]) -> Shortened:
        """Return the plan without layers that others stand for."""
        few = shortened(self.programs[0], folding.first)
        unlike = unlike_layers(self.plan, every)
        short = Shortened.of(self.task, self.plan, few, self._unrun(fake, self._samples), unlike)
        return replace(short, chain=chain_again(short.chain, fake))

    def _chain(self, fake: FakeTarget, samples: int | None = None) -> Chain:
        """Return a chain of the model for `samples`, with separate tensors.

        Default of `samples`: those of the first stage.
        """
        return chain_again(self._unrun(fake, self._samples if samples is None else samples), fake)

    def _unrun(self, fake: FakeTarget, samples: int) -> Chain:
        """Return the chain of the model for `samples`, traced only once, whose layers must not run."""
        if samples not in self.traced:
            result = self.chains.unrun(samples, fake)
            check_model(self.plan, self.task, result, samples)
            self.traced[samples] = result
        return self.traced[samples]

    @property
    def _samples(self) -> int:
        """Samples of a microbatch that the first stage computes."""
        return self.plan.measured(0).microbatch_size

    def _run(
        self, fake: FakeTarget, short: Shortened, folding: Folding, together: Sequence[Kin] | None
    ) -> Rehearsed:
        """Run every step of a shortened plan on representatives of these kin, with folded microbatches.

        Without kin, run all devices, which exchange tensors.
        """
        runners, company = self._company(fake, short, together)
        data, wanted = self._data(fake, short, self.plan.training.microbatches)
        seatings = {account.run: Seating(folding, account.stand) for account in company.devices_of}
        unfoldings = {account: Unfolding(account.rest) for account in company.devices_of}
        lives = {account: LivesOf() for account in company.devices_of if self.allocator}
        samples = company.no_samples
        for step in range(self.steps):
            few = folding.later if step else folding.first
            program = self.programs[min(step, len(self.programs) - 1)]
            executed = program if program.endless else short.program  # asynchronous steps are whole
            run_in_turn(runners, data, wanted, program=shortened(executed, few))
            company.learn(shortened(program, few))
            seated = dict[tuple[int, ...], Seated]()
            for account, (first, *others) in company.devices_of.items():
                if account.run not in seated:
                    seated[account.run] = seatings[account.run].step(step, program.actions[first])
                seats, actions = seated[account.run], program.actions[first]
                result = list(unfoldings[account].step(seats, actions, account.changes))
                samples[first] += result
                for other in others:
                    samples[other] += _named(result, program.actions[other])
                if self.allocator:
                    lives[account].step(seats, account.before, account.lives)
        alike = all(unfolding.alike for unfolding in unfoldings.values())
        ran = self._told(fake, samples, company, lives)
        return ran._replace(alike=ran.alike and alike)

    def _told(
        self,
        fake: FakeTarget,
        samples: dict[int, list[MemorySample]],
        company: Company,
        lives: Mapping[Account, LivesOf | EndlessLives],
    ) -> Rehearsed:
        """Return the results of a company's devices: their samples, and allocator peaks from their lives."""
        if self.allocator is None or not company.alike:
            return Rehearsed(samples, {}, fake.unknown.kernels, company.alike)
        held = Allocators(
            self.plan,
            self.programs[-1],
            self.lending.arenas,
            self.allocator,
            plans_addresses=self.each,
        )
        of_devices = {device: own for account, own in lives.items() for device in company.devices_of[account]}
        requested = {device: max(one.total_bytes for one in samples[device]) for device in of_devices}
        order = sorted(of_devices, key=lambda device: (-requested[device], device))
        works: dict[int, Callable[[], AllocatorPeaks | None]] = {
            device: partial(held.peaks, device, of_devices[device], requested[device]) for device in order
        }
        peaks, refused = dict[int, AllocatorPeaks](), set[Hashable]()
        for device in order:
            if self.each or self.plan.stages_of(device) not in refused:
                own = works[device]()
                if own is None:
                    return Rehearsed(samples, {}, fake.unknown.kernels, alike=False)
                peaks[device] = own
                if not own.fits:
                    refused.add(self.plan.stages_of(device))
            if device == order[0] and (self.each or not refused):  # mostly the one that needs the most
                half = order[1 + len(order) // 2 :]
                works |= zip(half, beside(*(works[one] for one in half), forks=bool(half)), strict=True)
        return Rehearsed(samples, peaks, fake.unknown.kernels)

    def _data(
        self, fake: FakeTarget, short: Shortened, microbatches: int
    ) -> tuple[list[Microbatch], list[Microbatch]]:
        """Return fake inputs and targets of this number of microbatches."""
        inputs, targets = self.like
        given = [fake.fake(tensor) for tensor in short.chain.flatten(inputs)]
        wanted = [fake.fake(tensor) for tensor in short.chain.flatten_targets(targets)]
        return [given] * microbatches, [wanted] * microbatches

    def _company(
        self, fake: FakeTarget, short: Shortened, together: Sequence[Kin] | None
    ) -> tuple[list[DeviceRunner], Company]:
        """Return the runners of representatives of these kin, or of all devices, and the accounts of all.

        All devices exchange tensors; representatives run without their peers.
        """
        every = list(
            casts(short, [(device,) for device in self.plan.workers] if together is None else together)
        )
        site = Site(
            task=self.task,
            sources=self._sources(fake, short),
            plan=short.plan,
            program=short.program,
            transport=InProcess() if together is None else Transport(),
            clock=lambda: 0.0,
            seed=0,
            absent=short.absent,
            lending=replace(
                self.lending, makes_slots=bool(short.repeats) or any(c.is_put_together for c in every)
            ),
            shares={place: share for cast in every for place, share in cast.shares(short)},
        )
        runners, meters = [], dict[int, RepeatedMeter]()
        for cast in every:
            for device in cast.run:
                owning = cast.is_put_together or bool(self.allocator and short.repeats)
                meter = meters[device] = self._meter(fake, short, device, owning=owning)
                runner = assemble(site, device, device=fake.device, meter=meter)
                for stage in runner.stages.values():
                    meter.own_layers(stage, short.copies[stage.start : stage.stop])
                runners.append(runner)
        return runners, Company(every, meters, short)

    def _sources(self, fake: FakeTarget, short: Shortened) -> StageSources:
        """Return the chains of the stages; peers of tensor-parallel ranks are absent.

        A model is traced once for each number of samples, and every replica has a copy.
        """

        @cache
        def divided(samples: int, ranks: int, sequences: bool) -> ShardedChain:
            chain = self._chain(fake, samples)
            return divided_without_peers(self.task, self.chains, fake, chain, samples, ranks, sequences)

        def make(wanted: Wanted) -> Source:
            if not wanted.group:
                return Source.of(short.shortened(self._chain(fake, wanted.samples)))
            whole = divided(wanted.samples, len(wanted.group), wanted.sequences)
            source = rank_without_peers(self.plan, wanted, whole)
            return source._replace(chain=short.shortened(source.chain))

        return StageSources(short.plan, Source.of(short.chain), self._samples, make)

    def _meter(self, fake: FakeTarget, short: Shortened, device: int, *, owning: bool) -> RepeatedMeter:
        if not self.allocator and not owning:
            return RepeatedMeter(device, kernels=self.kernels, passings=short.passings, place=fake.device)
        workspace = overheads(self.plan, device).cublas_workspace_bytes if self.allocator else 0
        kind = OwningMeter if owning else LivesMeter
        return kind(
            device,
            kernels=self.kernels,
            passings=short.passings,
            place=fake.device,
            workspace_bytes=workspace,
        )


def _named(samples: Sequence[MemorySample], actions: Sequence[Action]) -> list[MemorySample]:
    """Return the samples of an equal device with the texts of its own actions."""
    named = zip(samples, actions, strict=True)
    return [
        MemorySample(step=one.step, action=str(action), seconds=one.seconds, bytes=one.bytes)
        for one, action in named
    ]


# ---- Tensor-parallel ranks without their peers


def divided_without_peers(
    task: Task, chains: Chains, fake: FakeTarget, chain: Chain, samples: int, ranks: int, sequences: bool
) -> ShardedChain:
    """Return a chain for `samples` samples, divided among tensor-parallel ranks.

    A division that `chains` knows from the profile is copied.
    """
    known: ShardedChain | None = chains.divided.get((samples, ranks, sequences))
    if known is not None and (copy := known.of_copy(chain)) is not None:
        return copy
    inputs, targets = sample(task, samples)
    given, wanted = chain.flatten(inputs), chain.flatten_targets(targets)
    fakes = tuple(map(fake.fake, given)), tuple(map(fake.fake, wanted))
    return shard_chain(chain, ranks, *fakes, sequences=sequences)


def rank_without_peers(plan: Plan, wanted: Wanted, divided: ShardedChain) -> Source:
    """Return the part of a rank in a divided chain, with separate memory.

    Raises:
        UsageError: ranks divide the model otherwise than in its profile.
    """
    alone = without_peers(wanted.group, wanted.rank)
    check_as_profiled(plan, wanted, divided)
    chain = divided.rank(alone)
    return Source.of(chain, RankShards.of(divided, chain, alone))
