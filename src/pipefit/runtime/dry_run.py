"""The dry run: the runtime itself over fake tensors, all devices in one process, no hardware and no data.

It executes every action of the program as workers would, on tensors that have shapes and storages but no bytes. The
peaks that it counts are, to the byte, those of real training, for any model that fake tensors support. So a plan can be
certified before anyone pays for a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import torch

from pipefit.actions import Action
from pipefit.allocator import AllocatorSettings
from pipefit.capture.as_found import left_as_found
from pipefit.capture.by_value import READINGS
from pipefit.capture.caller import recording
from pipefit.capture.chain import Chain
from pipefit.capture.sample import Sample, sample
from pipefit.capture.task import Task
from pipefit.cost.communicators import communicators
from pipefit.errors import PipefitWarning, UsageError
from pipefit.fake.apart import apart
from pipefit.fake.chain import chain_again
from pipefit.fake.sizes import Chains
from pipefit.fake.target import FakeTarget
from pipefit.kernels import KernelMemory
from pipefit.meter.kernels import Kernels
from pipefit.plans import Plan
from pipefit.profiles import Target
from pipefit.program import Program
from pipefit.runtime.assembly import assemble
from pipefit.runtime.company import Company, casts
from pipefit.runtime.elsewhere import CERTIFIED, warn_elsewhere
from pipefit.runtime.endless_folding import Effects, fewer, labels, turns
from pipefit.runtime.endless_lives import EndlessLives
from pipefit.runtime.folding import Folding, Unfolding, shortened
from pipefit.runtime.in_turn import run_in_turn
from pipefit.runtime.lending import Lending, lending_trace
from pipefit.runtime.lives import LivesMeter
from pipefit.runtime.no_peers import NoPeers
from pipefit.runtime.owning_meter import OwningMeter
from pipefit.runtime.plan_check import check_model
from pipefit.runtime.rank_shards import RankShards
from pipefit.runtime.repeated import Shortened
from pipefit.runtime.repeated_meter import RepeatedMeter
from pipefit.runtime.replicas import Source, Sources, Wanted, check_as_profiled
from pipefit.runtime.representatives import Kin, kin
from pipefit.runtime.reserved import LivesOf, allocator_peaks, form, lent_events, overheads
from pipefit.runtime.runner import DeviceRunner, Microbatch
from pipefit.runtime.site import Site
from pipefit.runtime.tensor_groups import without_peers
from pipefit.runtime.transport import InProcess
from pipefit.schedule import distinct_steps, is_endless, step_programs, whole_run
from pipefit.sharding.chain import ShardedChain, shard_chain
from pipefit.trace import MOST_STEPS, AllocatorPeaks, DeviceTrace, MemorySample, Trace
from pipefit.validation import instance, whole


def certify(
    task: Task,
    plan: Plan,
    *,
    steps: int | None = None,
    target: Target | None = None,
    fold: bool = True,
    allocator: AllocatorSettings | None = None,
    chains: Chains | None = None,
) -> Trace:
    """The peaks of `plan` on every device, over `steps` training steps, to the byte.

    Without `steps`, as many are run as differ (`pipefit.schedule.distinct_steps`): two, because optimizer state is born
    in the first. Times in the trace are positions in the program, not seconds. Budgets are not enforced: compare
    `trace.peak_bytes` with the cluster's. Of microbatches that do the same, one is run (`pipefit.runtime.folding`), of
    equal layers in a row, four (`pipefit.runtime.repeated`), of devices that do the same, the first
    (`pipefit.runtime.representatives`), and of replicas that divide state, two (`pipefit.runtime.ownership`), unless
    `fold` is False: the bytes are the same, and it takes many times longer. Under an endless schedule microbatches are
    folded (`pipefit.runtime.endless_folding`), and layers are not.

    With settings of CUDA's caching `allocator`, which only the target `cuda` has, the trace also says what a GPU
    allocates and reserves (`DeviceTrace.allocator`). All layers are run then, since what is reserved depends on where
    each block lies.

    With `chains` of the task, the model is not traced for numbers of samples that they have.

    For the target `cpu` the profile tells what kernels take, also on another machine; an operation that it did not meet
    is measured here. Warns (`PipefitWarning`) of another machine, and of operations that could not be measured.

    Raises:
        FileError: the plan was made for another task; says what differs.
        OutOfMemory: a host, or a device that only lends memory, has no room for what is moved there.
        UsageError: something is moved that cannot be, or an allocator is asked for that the target does not have.
    """
    return _traces(task, plan, [allocator], steps, target, fold, chains)[0]


def certify_each(
    task: Task, plan: Plan, allocators: Sequence[AllocatorSettings], *, steps: int | None = None
) -> list[Trace]:
    """What `certify` answers for the target `cuda` with each of these `allocators`. One dry run tells it for all: in
    which order tensors are born and die does not depend on where their blocks lie.
    """
    return _traces(task, plan, allocators, steps, "cuda", True, None)


def _traces(
    task: Task,
    plan: Plan,
    allocators: Sequence[AllocatorSettings | None],
    steps: int | None,
    target: Target | None,
    fold: bool,
    chains: Chains | None,
) -> list[Trace]:
    """The answers of a dry run, one for each allocator, or for none."""
    instance("task", task, Task, "a plan is the second argument")
    instance("plan", plan, Plan, "pipefit.load reads one")
    steps = distinct_steps(plan) if steps is None else steps
    whole("steps", steps, 1, MOST_STEPS)
    instance("fold", fold, bool)
    instance("chains", chains := chains or Chains(task), Chains)
    target = target or plan.profile.assumptions.target
    reserves = any(allocator is not None for allocator in allocators)
    if reserves and target != "cuda":
        raise UsageError(f"target {target} has no caching allocator: certify for the target cuda, or without allocator")
    warn_elsewhere(plan.profile.assumptions, CERTIFIED, callers=2)
    kernels = Kernels(plan.profile.assumptions.threads, plan.profile.kernels) if target == "cpu" else None
    programs = step_programs(plan)
    lending = Lending.dry(plan, whole_run(plan))
    with recording("certifying"):
        like = sample(task, plan.training.microbatch_size)
    dry = _DryRun(task, plan, programs, lending, like, steps, kernels, reserves, chains)

    def run() -> tuple[_Ran, KernelMemory]:
        with (
            recording("certifying"),
            torch.random.fork_rng(devices=[]),
            left_as_found(task.loss),
            FakeTarget(target) as fake,
        ):
            return dry.run(fake, fold=fold), fake.unknown

    ran, unknown = apart(target, run)
    if kernels is not None:
        kernels.keep()
        kernels.tell_unknown()
    assumed = (*unknown.kernels, *(kernel for kernel in plan.profile.kernels.unknown if kernel in READINGS))
    if gap := KernelMemory(kernels=tuple(dict.fromkeys(assumed))).gap:
        warnings.warn(gap, PipefitWarning, stacklevel=3)
    return [dry.trace(ran, allocator) for allocator in allocators]


class _Ran(NamedTuple):
    """What a dry run found of every device: its memory samples, and the lives of its storages if they are wanted.

    `alike` is False where layers or microbatches that stood for others turned out to differ from them.
    """

    samples: list[list[MemorySample]]
    alike: bool = True
    lives: Mapping[int, LivesOf | EndlessLives] = {}


@dataclass(frozen=True, slots=True)
class _DryRun:
    """A dry run of some steps of a plan."""

    task: Task
    plan: Plan
    programs: tuple[Program, ...]  # of the first steps; the last one repeats
    lending: Lending
    like: Sample
    steps: int
    kernels: Kernels | None
    reserves: bool  # whether lives of storages are wanted, from which an allocator's figures follow
    chains: Chains
    known: dict[object, AllocatorPeaks] = field(default_factory=dict)
    forms: dict[Hashable, bytes] = field(default_factory=dict)  # by lives, and what the device lends
    traced: dict[int, Chain] = field(default_factory=dict)  # by samples; no layer of these is run

    def run(self, fake: FakeTarget, *, fold: bool) -> _Ran:
        """All steps, with those layers and microbatches that stand for all if `fold`."""
        if not fold:
            return self._whole(fake)
        if is_endless(self.plan):
            return self._endless(fake)
        return self._all_layers(fake) if self.reserves else self._folded(fake)

    def trace(self, ran: _Ran, allocator: AllocatorSettings | None) -> Trace:
        """What all devices held, and what an allocator with such settings makes of it."""
        plan, samples, devices = self.plan, ran.samples, list[DeviceTrace]()
        for number in range(len(plan.cluster.devices)):
            found = lending_trace(plan, number, self.lending.arenas)
            if samples[number]:
                peaks = None if allocator is None else self._peaks(number, ran, allocator)
                found = replace(found, memory=tuple(samples[number]), allocator=peaks)
            devices.append(found)
        return Trace(source="dry run", steps=self.steps, devices=tuple(devices), step_seconds=(0.0,) * self.steps)

    def _peaks(self, device: int, ran: _Ran, allocator: AllocatorSettings) -> AllocatorPeaks:
        """What the allocator of a device holds at most; simulated once for equal devices."""
        lives, lent = ran.lives[device], lent_events(self.lending.arenas, device)
        events = [*lent, *lives.events]
        requested = max(sample.total_bytes for sample in ran.samples[device])
        program, memory = self.programs[-1], self.plan.cluster.devices[device].memory_bytes
        count = communicators(self.plan, program, device)
        own = lives, *lent
        if own not in self.forms:
            self.forms[own] = form(events)
        key = self.forms[own], requested, memory, overheads(self.plan, device), count, allocator
        if key not in self.known:
            self.known[key] = allocator_peaks(self.plan, program, device, events, allocator, requested)
        return self.known[key]

    def _whole(self, fake: FakeTarget) -> _Ran:
        return self._run(fake, self._everything(fake), Folding.none(self.programs), None)

    def _all_layers(self, fake: FakeTarget) -> _Ran:
        """All layers, and those microbatches and devices that stand for all."""
        ran = self._run(fake, self._everything(fake), Folding.of(self.programs[0]), self._kin)
        return ran if ran.alike else self._whole(fake)

    def _everything(self, fake: FakeTarget) -> Shortened:
        return Shortened.none(self.plan, self.programs[-1], self._chain(fake))

    def _endless(self, fake: FakeTarget) -> _Ran:
        """An endless schedule, with those microbatches that stand for all."""
        last = len(self.programs) - 1
        wanted = [self.programs[min(step, last)] for step in range(self.steps)]
        executed = fewer(self.plan, wanted, again=self.reserves)
        short = self._everything(fake)
        runners, company = self._company(fake, short, kin(self.plan, wanted, self.lending.arenas))
        effects = {account: Effects(account.rest) for account in company.devices_of}
        lives = {account: EndlessLives() for account in company.devices_of if self.reserves}
        for program, known in zip(executed, labels(self.plan, executed), strict=True):
            run_in_turn(runners, *self._data(fake, short, program.microbatches), program=program)
            company.learn()
            for account, devices in company.devices_of.items():
                effects[account].learn(known[devices[0]], account.changes)
                if self.reserves:
                    lives[account].learn(known[devices[0]], account.before, account.lives)
        samples: list[list[MemorySample]] = [[] for _ in self.plan.cluster.devices]
        of_steps = labels(self.plan, wanted)
        for step, (program, known) in enumerate(zip(wanted, of_steps, strict=True)):
            for account, (first, *others) in company.devices_of.items():
                found = list(effects[account].samples(step, program.actions[first], known[first]))
                samples[first] += found
                for other in others:
                    samples[other] += _named(found, program.actions[other])
        for account, own in lives.items():
            of_device = [known[company.devices_of[account][0]] for known in of_steps]
            own.unfold(of_device, turns(self.plan, of_device))
        alike = company.alike and all(own.consistent for own in lives.values())
        told = {n: own for account, own in lives.items() for n in company.devices_of[account]}
        return _Ran(samples, lives=told) if alike else self._whole(fake)

    def _folded(self, fake: FakeTarget) -> _Ran:
        """Those layers, microbatches and devices that stand for all."""
        (program,) = self.programs
        folding = Folding.of(program)
        short = Shortened.of(self.task, self.plan, program, self._chain(fake))
        ran = self._run(fake, short, folding, self._kin)
        # Layers that seemed to be equal may differ: then all of them are run, and not those that have been trained.
        return ran if ran.alike else self._run(fake, self._everything(fake), folding, [(n,) for n in self.plan.workers])

    @property
    def _kin(self) -> list[Kin]:
        return kin(self.plan, self.programs, self.lending.arenas)

    def _chain(self, fake: FakeTarget, samples: int | None = None) -> Chain:
        """A chain of the model for so many samples, by default those of the first stage, with tensors of its own. No
        model is traced twice.
        """
        samples = self._samples if samples is None else samples
        if samples not in self.traced:
            found = self.chains.of(samples, fake)
            check_model(self.plan, self.task, found, samples)
            if not found.traced:
                return found
            self.traced[samples] = found
        return chain_again(self.traced[samples], fake)

    @property
    def _samples(self) -> int:
        """The samples that the first stage computes of a microbatch."""
        return self.plan.measured(0).microbatch_size

    def _run(self, fake: FakeTarget, short: Shortened, folding: Folding, together: Sequence[Kin] | None) -> _Ran:
        """Every step of a shortened plan, in the microbatches of a folding, by some of those devices that are kin; by
        all devices, which exchange tensors, without any.
        """
        runners, company = self._company(fake, short, together)
        data, wanted = self._data(fake, short, self.plan.training.microbatches)
        unfoldings = {account: Unfolding(folding, account.rest) for account in company.devices_of}
        lives = {account: LivesOf(folding) for account in company.devices_of}
        samples: list[list[MemorySample]] = [[] for _ in self.plan.cluster.devices]
        for step in range(self.steps):
            few = folding.later if step else folding.first
            program = self.programs[min(step, len(self.programs) - 1)]
            executed = program if program.endless else short.program  # the steps of an endless schedule are whole
            run_in_turn(runners, data, wanted, program=shortened(executed, few))
            company.learn()
            for account, (first, *others) in company.devices_of.items():
                found = list(unfoldings[account].step(step, program.actions[first], account.changes))
                samples[first] += found
                for other in others:
                    samples[other] += _named(found, program.actions[other])
                if self.reserves:
                    lives[account].step(step, program.actions[first], (account.before, account.lives))
        alike = company.alike and all(of_devices.consistent for of_devices in lives.values())
        return _Ran(samples, alike, {n: lives[account] for account, of in company.devices_of.items() for n in of})

    def _data(self, fake: FakeTarget, short: Shortened, microbatches: int) -> tuple[list[Microbatch], list[Microbatch]]:
        """Inputs and targets of so many microbatches, without bytes."""
        inputs, targets = self.like
        given = [fake.fake(tensor) for tensor in short.chain.flatten(inputs)]
        wanted = [fake.fake(tensor) for tensor in short.chain.flatten_targets(targets)]
        return [given] * microbatches, [wanted] * microbatches

    def _company(
        self, fake: FakeTarget, short: Shortened, together: Sequence[Kin] | None
    ) -> tuple[list[DeviceRunner], Company]:
        """The runners of some of those devices that are kin, or of all devices without any, and what they tell of all.

        All devices exchange tensors; some are run as if the others were there.
        """
        every = list(casts(short, [(device,) for device in self.plan.workers] if together is None else together))
        site = Site(
            task=self.task,
            sources=self._sources(fake, short),
            plan=short.plan,
            program=short.program,
            transport=InProcess() if together is None else NoPeers(),
            clock=lambda: 0.0,
            seed=0,
            absent=short.absent,
            lending=self.lending,
            shares={place: share for cast in every for place, share in cast.shares(short)},
        )
        runners, meters = [], dict[int, RepeatedMeter]()
        for cast in every:
            for device in cast.run:
                meter = meters[device] = self._meter(fake, short, device, owning=cast.is_put_together)
                runner = assemble(site, device, device=fake.device, meter=meter)
                for stage in runner.stages.values():
                    meter.own_layers(stage, short.copies[stage.start : stage.stop])
                runners.append(runner)
        return runners, Company(every, meters)

    def _sources(self, fake: FakeTarget, short: Shortened) -> Sources:
        """The chains of the stages; the peers of a rank of a tensor group are not there.

        A model is traced once for each number of samples, and every replica has a copy.
        """

        @cache
        def divided(samples: int, ranks: int, sequences: bool) -> ShardedChain:
            chain, (inputs, targets) = self._chain(fake, samples), sample(self.task, samples)
            given, wanted = chain.flatten(inputs), chain.flatten_targets(targets)
            fakes = tuple(map(fake.fake, given)), tuple(map(fake.fake, wanted))
            return shard_chain(chain, ranks, *fakes, sequences=sequences)

        def make(wanted: Wanted) -> Source:
            if not wanted.group:
                return Source.of(short.shortened(self._chain(fake, wanted.samples)))
            alone = without_peers(wanted.group, wanted.rank)
            whole = divided(wanted.samples, len(wanted.group), wanted.sequences)
            check_as_profiled(self.plan, wanted, whole)
            chain = whole.rank(alone)
            return Source.of(short.shortened(chain), RankShards.of(whole, chain, alone))

        return Sources(short.plan, Source.of(short.chain), self._samples, make)

    def _meter(self, fake: FakeTarget, short: Shortened, device: int, *, owning: bool) -> RepeatedMeter:
        if not self.reserves and not owning:
            return RepeatedMeter(device, kernels=self.kernels, swept=short.swept, place=fake.device)
        workspace = overheads(self.plan, device).cublas_workspace_bytes if self.reserves else 0
        kind = OwningMeter if owning else LivesMeter
        return kind(device, kernels=self.kernels, swept=short.swept, place=fake.device, workspace_bytes=workspace)


def _named(samples: Sequence[MemorySample], actions: Sequence[Action]) -> list[MemorySample]:
    """The samples of a device that does the same, with the texts of its own actions."""
    named = zip(samples, actions, strict=True)
    return [
        MemorySample(step=one.step, action=str(action), seconds=one.seconds, bytes=one.bytes) for one, action in named
    ]
