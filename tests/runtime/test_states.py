"""State that is moved away and back, and updates on the host: the numbers and bytes of plans that move nothing."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from moving_plans import make_chain, moving
from moving_states import moving_states
from oracle import measured_peaks
from pipefit.actions import Action
from pipefit.capture import Task
from pipefit.decisions import Decision, State, StateKind, What
from pipefit.devices import Host
from pipefit.errors import OutOfMemory, UsageError
from pipefit.places import Member, parse_place
from pipefit.plans import Plan
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile
from pipefit.runtime import Trainer, certify, train
from pipefit.runtime.lending import check_lending
from pipefit.runtime.state import StageState
from pipefit.schedule import lower
from pipefit.schedule.arenas import arenas_of, lent_bytes
from pipefit.simulator import simulate
from pipefit.trace import Trace
from random_cases import random_plan
from tiny import batch_of, plan_of, task_of

STEPS = 3
HOST = parse_place("host")


def layers() -> list[nn.Module]:
    """Layers with parameters of several kinds, and without."""
    norm = nn.BatchNorm1d(16), nn.Dropout(0.2), nn.LayerNorm(16)
    return [nn.Linear(8, 16), nn.Sigmoid(), *norm, nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4)]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}
KINDS = (*OPTIMIZERS, "clipped", "copies", "scaled", "scheduled")


def task_named(kind: str) -> Task:
    """The layers' task under that kind of update."""
    plain = task_of(layers, optimizer=OPTIMIZERS.get(kind, OPTIMIZERS["adamw"]))
    if kind == "copies":
        return replace(plain, precision="master-bfloat16", loss=squares)
    if kind == "scaled":
        return replace(plain, precision="master-float16", loss=small_squares)
    if kind == "overflowing":
        return replace(plain, precision="master-float16", loss=squares)
    return replace(plain, scheduler=partial(ExponentialLR, gamma=0.5)) if kind == "scheduled" else plain


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of squares in float32."""
    return nn.functional.mse_loss(outputs.float(), targets.float())


def small_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradients do not overflow float16."""
    return squares(outputs, targets) * 1e-3


@functools.cache
def found(kind: str) -> ModelProfile:
    """What its layers cost."""
    return profile(task_named(kind), microbatch_size=2, threads=torch.get_num_threads())


def clipping(plan: Plan, kind: str) -> Plan:
    """The plan with gradients clipped, if that is the kind."""
    clip_norm = 0.05 if kind in ("clipped", "copies") else None
    return replace(plan, training=replace(plan.training, clip_norm=clip_norm))


def trained(task: Task, plan: Plan, steps: int = STEPS) -> tuple[list[float], StageState, Trace]:
    """The losses of some steps, the state at the end, and the trace."""
    trainer = Trainer(task, plan)
    losses = [trainer.step(batch_of(task, plan, step)) for step in range(steps)]
    assert all(not runner.mover.borrowed.in_use for runner in trainer.runners)
    return losses, trainer.state, trainer.trace


def tensors(state: StageState) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a state, with names."""
    yield from state.tensors.items()
    yield from ((f"copy of {name}", tensor) for name, tensor in state.master_weights.items())
    yield from ((f"{name} {key}", tensor) for name, of in state.optimizer.items() for key, tensor in of.items())


def assert_same(one: StageState, other: StageState) -> None:
    """The two states are bitwise equal."""
    mine, theirs = dict(tensors(one)), dict(tensors(other))
    assert mine.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(mine[name], tensor)] == []


def samples(trace: Trace) -> list[list[tuple[int, str, tuple[int, ...]]]]:
    """Step, action and bytes of every sample of every device, but for what stages exchange before an update: whether
    gradients overflow is a question that a dry run does not ask.
    """
    return [[(s.step, s.action, s.bytes) for s in device.memory if "AGREE" not in s.action] for device in trace.devices]


def step_peaks(trace: Trace) -> list[list[int]]:
    """The peak of every device in every step, without what the stages exchange before an update: few bytes, which the
    simulator leaves out.
    """
    return [
        [
            max((s.total_bytes for s in device.memory if s.step == step and "AGREE" not in s.action), default=0)
            for step in range(trace.steps)
        ]
        for device in trace.devices
    ]


def assert_as_foretold(kind: str, seed: int) -> None:
    """A random plan whose state is moved at random trains the numbers and takes the bytes that it should."""
    rng = Random(f"{kind} {seed}")
    task, still = task_named(kind), clipping(random_plan(found(kind), rng, microbatches=rng.randint(1, 4)), kind)
    plan = moving_states(moving(still, rng) if rng.random() < 0.5 else still, rng)
    losses, state, measured = trained(task, plan)
    expected, wanted, _ = trained(task, still)
    assert losses == expected
    assert_same(state, wanted)
    dry = certify(task, plan, steps=STEPS)
    assert samples(measured) == samples(dry) == samples(certify(task, plan, steps=STEPS, fold=False))
    assert step_peaks(dry) == step_peaks(simulate(plan, steps=STEPS))


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_state_is_moved_numbers_and_bytes_are_those_foretold(kind: str) -> None:
    """Losses, parameters, buffers and optimizer state are bitwise those of the plan that moves nothing; every sample
    that is measured is that of the dry run, folded or not; the peak of every step is the simulator's.
    """
    assert_as_foretold(kind, 0)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("kind", KINDS)
def test_more_plans_that_move_state_are_as_foretold(kind: str, seed: int) -> None:
    """The same of many plans."""
    assert_as_foretold(kind, seed)


def away(
    stage: int,
    start: int,
    stop: int,
    what: What = What.OFFLOAD,
    place: str = "host",
    kind: StateKind = "optimizer",
    **when: int,
) -> Decision:
    """A state of some layers is away, or the host updates them."""
    subject = State(start=start, stop=stop, kind=kind)
    return Decision(stage=stage, subject=subject, what=what, place=parse_place(place), **when)


def one_stage(*decisions: Decision, kind: str = "adamw", **settings: Any) -> Plan:
    """All layers on one device of two, with these decisions."""
    plan, costs = plan_of(task_named("adamw"), [9], profiled=found("adamw"), devices=2, **settings), found(kind)
    training = replace(plan.training, precision=costs.assumptions.precision)
    return replace(plan, profile=costs, training=training, decisions=decisions)


SWAPPED = away(0, 0, 3, ahead=1), away(0, 5, 6, place="device1", ahead=1, behind=0), away(0, 7, 9)
UPDATED = away(0, 0, 3, What.UPDATE), away(0, 5, 6, What.UPDATE), away(0, 7, 9)
PARAMETERS = tuple(away(0, n, n + 1, kind="parameters", ahead=1) for n in (0, 5, 7, 8))
GRADIENTS = tuple(away(0, n, n + 1, kind="gradients", ahead=1) for n in (0, 5, 7, 8))
EACH = pytest.mark.parametrize(
    "decisions",
    [SWAPPED, UPDATED, PARAMETERS, GRADIENTS, (*SWAPPED, *PARAMETERS, *GRADIENTS)],
    ids=["swapped", "updated", "parameters", "gradients", "all"],
)


@EACH
def test_a_step_that_is_skipped_leaves_everything_as_it_was(decisions: tuple[Decision, ...]) -> None:
    """Gradients overflow in the first steps: nothing is updated, what was moved is back in its place, and training goes
    on with the numbers of the plan that moves nothing.
    """
    task, plan = task_named("overflowing"), one_stage(*decisions, kind="overflowing")
    one, other = Trainer(task, plan), Trainer(task, replace(plan, decisions=()))
    skipped = []
    for step in range(4):
        assert one.step(batch_of(task, plan, step)) == other.step(batch_of(task, plan, step))
        (agreement,) = {stage.agreement for stage in one.stages}
        skipped.append(agreement is not None and agreement.overflow)
        assert_same(one.state, other.state)
    assert skipped[0] and not all(skipped)


@EACH
def test_smaller_batches_accumulation_and_evaluation_work_while_state_is_away(decisions: tuple[Decision, ...]) -> None:
    """A batch that is no multiple of the plan's microbatches, several batches to an update, and evaluation."""
    task, plan = task_named("adamw"), one_stage(*decisions, microbatches=3)
    one, other = Trainer(task, plan, accumulate=2), Trainer(task, replace(plan, decisions=()), accumulate=2)
    for size in (6, 4, 2, 6):
        torch.manual_seed(size)
        batch = task.batch(size)
        assert one.step(batch) == other.step(batch)
        assert one.evaluate(batch) == other.evaluate(batch)
        assert_same(one.state, other.state)


@EACH
def test_a_state_is_loaded_where_it_belongs(decisions: tuple[Decision, ...]) -> None:
    """A state that was trained under a plan that moves nothing goes on under one that does, and back."""
    task, plan = task_named("copies"), one_stage(*decisions, kind="copies")
    still = replace(plan, decisions=())
    whole, first, second, third = (Trainer(task, one) for one in (still, still, plan, still))
    batches = [batch_of(task, plan, step) for step in range(6)]
    expected = [whole.step(batch) for batch in batches]
    losses = [first.step(batch) for batch in batches[:2]]
    for before, trainer in ((first, second), (second, third)):
        before.state.load_into(list(trainer.stages))
        for stage, last in zip(trainer.stages, before.stages, strict=True):
            stage.batch_number = last.batch_number  # dropout depends on it
        at = 2 if trainer is second else 4
        losses += [trainer.step(batch) for batch in batches[at : at + 2]]
    assert losses == expected
    assert_same(third.state, whole.state)


@EACH
def test_training_goes_on_from_a_checkpoint_whatever_is_away(decisions: tuple[Decision, ...], tmp_path: Path) -> None:
    """What is away is saved and loaded as it is anywhere: training goes on under the same plan with the losses, the
    state and the bytes of one that never stopped, and under a plan that moves nothing with the same losses.
    """
    task, plan = task_named("scheduled"), one_stage(*decisions, kind="scheduled")
    whole, first = Trainer(task, plan), Trainer(task, plan)
    batches = [batch_of(task, plan, step) for step in range(4)]
    expected = [whole.step(batch) for batch in batches]
    assert [first.step(batch) for batch in batches[:2]] == expected[:2]
    first.save(tmp_path, background=False)
    assert [first.step(batch) for batch in batches[2:]] == expected[2:]
    for other in (plan, replace(plan, decisions=())):
        trainer = Trainer(task, other)
        trainer.load(tmp_path)
        assert [trainer.step(batch) for batch in batches[2:]] == expected[2:]
        assert_same(trainer.state, whole.state)
        if other is plan:
            assert step_peaks(trainer.trace)[0][-1] == step_peaks(whole.trace)[0][-1]


@EACH
def test_the_allocator_sees_what_state_leaves_and_comes_back(decisions: tuple[Decision, ...]) -> None:
    """The allocator's own events have the peaks of the dry run: what is away takes nothing on the device."""
    task, plan = task_named("adamw"), one_stage(*decisions)
    dry, still = certify(task, plan), certify(task, replace(plan, decisions=()))
    assert measured_peaks(task, plan) == [[dry.devices[0].step_peak_bytes(step) for step in range(2)]]
    assert dry.devices[0].step_peak_bytes(1) < still.devices[0].step_peak_bytes(1)


def test_a_host_pays_for_state_gradients_parameters_and_the_update_itself() -> None:
    """What a host keeps of two updated layers is counted in bytes of AdamW: per number of theirs four for the gradient,
    four for the parameter and eight of state, the counters, and what the largest update takes. A byte less is refused.
    """
    task, plan = task_named("adamw"), one_stage(away(0, 7, 9, What.UPDATE))
    costs = plan.measurement.costs[7:9]
    numbers = [cost.parameter_bytes // 4 for cost in costs]
    counters = 4 * sum(len(cost.parameters) for cost in costs)
    first = numbers[0] * 8 + 2 * 4 + costs[1].update_first_peak_bytes, costs[0].update_first_peak_bytes
    later = sum(numbers) * 8 + counters + max(cost.update_peak_bytes for cost in costs)
    needed = sum(numbers) * 8 + max(*first, later)
    assert lent_bytes(arenas_of(plan, lower(plan)), Member.host(0)) == needed
    for run in (Trainer, certify):
        for room in (needed, needed - 1):
            host = Host(memory_bytes=room, memory_bandwidth=1e10)
            tight = replace(plan, cluster=replace(plan.cluster, hosts=(host,)))
            if room == needed:
                run(task, tight)
            else:
                with pytest.raises(OutOfMemory, match=r"host0 has .* would have to keep .* 1 B more"):
                    run(task, tight)


@pytest.mark.parametrize("place", ["host", "device1", "host*1+device1*2"])
def test_homes_are_as_large_as_the_state(place: str) -> None:
    """The optimizer state of layers 0 and 5 to 8 is kept in two homes of its size from the second step on."""
    plan = one_stage(away(0, 0, 1, place=place), away(0, 5, 9, place=place))
    costs = plan.measurement.costs
    lent = sum(arena.nbytes for arena in arenas_of(plan, lower(plan)))
    assert lent == costs[0].state_bytes + sum(cost.state_bytes for cost in costs[5:9])


@EACH
@pytest.mark.parametrize("at", ["STEP", "RELOAD", "OFFLOAD", "WAIT"])
def test_after_a_failed_step_everything_is_where_it_was(decisions: tuple[Decision, ...], at: str) -> None:
    """A step fails at its last action of a kind, when some layers have been updated and some not: no slot is in use,
    the device's memory is that from before, and the state can be read and loaded.
    """
    task, plan = task_named("adamw"), one_stage(*decisions)
    trainer, fresh = Trainer(task, plan), Trainer(task, plan)
    trainer.step(batch_of(task, plan))
    fresh.step(batch_of(task, plan))
    kept, runner = trainer.state, trainer.runners[0]
    kept = StageState({n: t.clone() for n, t in kept.tensors.items()},
                      {n: {k: t.clone() for k, t in of.items()} for n, of in kept.optimizer.items()})  # fmt: skip
    gc.collect()
    assert runner.meter is not None
    level, execute, last = runner.meter.total, runner._execute, Counter[str]()
    total = Counter(word for action in lower(plan).actions[0] for word in words_of(action))

    def failing(action: Action) -> None:
        last.update(words_of(action))
        if at in words_of(action) and last[at] == total[at]:
            raise RuntimeError("it failed")
        execute(action)

    runner._execute = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="it failed"):
        trainer.step(batch_of(task, plan, 1))
    runner._execute = execute  # type: ignore[method-assign]
    gc.collect()
    assert runner.meter.total == level
    assert not runner.mover.borrowed.in_use
    kept.load_into(list(trainer.stages))
    assert_same(trainer.state, fresh.state)
    for stage, other in zip(trainer.stages, fresh.stages, strict=True):
        other.batch_number = stage.batch_number
    for step in (2, 3):
        assert trainer.step(batch_of(task, plan, step)) == fresh.step(batch_of(task, plan, step))
    assert_same(trainer.state, fresh.state)


def words_of(action: Action) -> list[str]:
    """The kind of an action, and WAIT for the joins of copies of state."""
    return ["WAIT"] if action.wait else [action.kind.value]


def test_equal_layers_that_move_nothing_are_still_folded() -> None:
    """Around two of 24 equal layers whose optimizer state is away, others stand for each other."""
    task = task_of(lambda: [nn.Linear(8, 8) for _ in range(24)], outputs=8, optimizer=torch.optim.AdamW)
    still = plan_of(task, [12, 12], microbatches=3)
    decisions = away(1, 17, 19), away(1, 23, 24, What.UPDATE)
    plan = replace(still, decisions=decisions)
    assert certify(task, plan) == certify(task, plan, fold=False)


# -------------------------------------------------------------------- what is refused


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Hooked(torch.optim.SGD):
    """Has a hook on its steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_step_post_hook(lambda *_: None)


class Groupless(torch.optim.SGD):
    """Looks at a list of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.mine:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)


class Joining(torch.optim.SGD):
    """Puts all parameters into one group."""

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__([p for group in groups for p in group["params"]], lr=0.1, **options)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (Counting, "Counting changes its attribute 'steps' in every step"),
        (Hooked, "Hooked has hooks on its steps"),
        (Groupless, "Groupless changes parameters that are not in the groups it is given"),
        (Joining, "Joining has put parameters of several layers into one group"),
    ],
)
@pytest.mark.parametrize("what", [What.OFFLOAD, What.UPDATE])
def test_an_optimizer_that_is_more_than_its_groups_is_refused(
    optimizer: Callable[..., torch.optim.Optimizer], words: str, what: What
) -> None:
    """Steps in parts would train something else: the first one says why not, and what to do."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)], optimizer=optimizer)
    plan = replace(plan_of(task, [3], devices=2), decisions=(away(0, 1, 2, what),))
    with pytest.raises(UsageError, match=f"optimizer {words}, so that it cannot update a stage in parts: leave"):
        Trainer(task, plan).step(batch_of(task, plan))


class Hoarding(torch.optim.SGD):
    """Keeps a copy of every gradient past its state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hoard: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["at"] = 1
                self.hoard[parameter] = parameter.grad.clone()
                parameter.sub_(parameter.grad)


def test_state_that_is_not_where_it_belongs_is_refused() -> None:
    """An optimizer that keeps tensors elsewhere would leave them on the device: the numbers of bytes tell."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)], optimizer=Hoarding)
    plan = replace(plan_of(task, [3], devices=2), decisions=(away(0, 1, 2),))
    words = r"0OFFLOAD\[1.optimizer\]@host: the optimizer state of layer 1 takes 0 bytes, but by the plan 288"
    with pytest.raises(UsageError, match=words):
        Trainer(task, plan).step(batch_of(task, plan))


def test_an_array_of_a_parameter_is_in_the_way_only_where_its_memory_is_freed() -> None:
    """A model whose weights are arrays of numpy: its parameters cannot be away, but the host may update them."""
    plain = task_named("adamw")

    def build() -> nn.Module:
        model = plain.build()
        for parameter in model.parameters():
            parameter.data = torch.from_numpy(parameter.detach().numpy().copy())
        return model

    task = replace(plain, module=build)
    with pytest.raises(UsageError, match="the plan moves the parameters of layer 0: its memory belongs to something"):
        Trainer(task, one_stage(away(0, 0, 1, kind="parameters")))
    one, other = (Trainer(task, one_stage(*decisions)) for decisions in ((away(0, 0, 1, What.UPDATE),), ()))
    for step in range(2):
        assert one.step(batch_of(task, one.plan, step)) == other.step(batch_of(task, one.plan, step))


def test_another_host_is_refused() -> None:
    """A device updates its layers on the host that it is in."""
    plan = one_stage()
    host = plan.cluster.hosts[0]
    plan = replace(plan, cluster=replace(plan.cluster, hosts=(host, host)))
    with pytest.raises(UsageError, match="to host1, which is on another host: only simulated yet"):
        Trainer(task_named("adamw"), replace(plan, decisions=(away(0, 0, 1, What.UPDATE, place="host1"),)))


def test_gpus_move_no_state_yet() -> None:
    """A plan for GPUs that does is refused before anything starts."""
    plan = one_stage(away(0, 0, 1))
    plan = replace(plan, cluster=replace(plan.cluster, backend="cuda"))
    with pytest.raises(UsageError, match="which GPUs cannot do yet: move saved tensors"):
        check_lending(plan, lower(plan))


def test_workers_move_state_and_update_on_the_host_as_one_process_does() -> None:
    """Two workers whose state goes to the host and to each other, and which the host updates: losses and every sample
    are those of one process.
    """
    task, still = make_chain(), plan_of(make_chain(), [3, 3], microbatches=2)
    decisions = (
        away(0, 0, 1, place="device1*1+host*1", ahead=1),
        away(0, 2, 3, What.UPDATE),
        away(0, 0, 1, kind="parameters"),
        away(1, 5, 6, What.UPDATE),
        away(1, 3, 5, kind="gradients", place="device0"),
    )
    plan = replace(still, decisions=decisions)
    losses, trace = train(make_chain, plan, steps=3)
    torch.manual_seed(0)
    alone = Trainer(task, plan)
    expected = []
    for step in range(3):
        torch.manual_seed(step)
        expected.append(alone.step(task.batch(plan.training.batch_size)))
    assert losses == expected
    assert samples(trace) == samples(alone.trace)
