"""State offload on GPU streams, with updates on the host: the streams lag behind the host as far as events
allow (`lagging_gpu`).
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.runtime import Trainer
from pipefit.runtime.comm.agreement import Agreement, LossScale
from pipefit.runtime.hardware import Hardware
from pipefit.runtime.offload.lending import Lending, check_lending
from pipefit.runtime.optim.updates import Updates
from pipefit.runtime.state import StageState
from pipefit.schema.actions import Action, Kind
from pipefit.schema.decisions import Decision, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.program import Program
from support.asynchronous_decisions import mixed
from support.known_profiles import profile
from support.lagging_gpu import LaggingGpu, Machine
from support.offloaded_state import (
    EACH,
    KINDS,
    STEPS,
    UPDATED,
    assert_same,
    away,
    clipping,
    found,
    one_stage,
    task_named,
)
from support.random_offloads import make_chain, moving
from support.random_state_offloads import moving_states
from support.random_trainings import random_plan
from support.small_tasks import batch_of, plan_of, task_of


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Let trainers of plans with decisions copy as on GPUs, and assert that nothing ran too early."""
    made, plain = Machine(0), Lending.within

    def within(hardware: Hardware, program: Program) -> Lending:
        return (made.lending if hardware.plan.decisions else plain)(hardware, program)

    monkeypatch.setattr(Lending, "within", within)
    yield made
    made.check()


def assert_as_plain(machine: Machine, kind: str, seed: int) -> None:
    """Assert that a random plan with random state moves has the losses and state of one without moves."""
    rng, task = Random(f"{kind} {seed}"), task_named(kind)
    machine.rng.seed(seed)
    still = clipping(random_plan(found(kind), rng, microbatches=rng.randint(1, 4)), kind)
    plan = moving_states(moving(still, rng) if rng.random() < 0.5 else still, rng)
    one, other = Trainer(task, plan), Trainer(task, still)
    for step in range(STEPS):
        assert one.step(batch_of(task, plan, step)) == other.step(batch_of(task, plan, step))
        with machine.far_behind():
            state = one.state
        assert_same(state, other.state)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_streams_do_first_state_that_moves_is_that_of_plain_training(
    machine: Machine, kind: str
) -> None:
    """Losses, parameters, buffers and optimizer state of random plans equal plans without moves bit by bit,
    also if read while the device lags far behind.
    """
    for seed in range(2):
        assert_as_plain(machine, kind, seed)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(2, 40))
@pytest.mark.parametrize("kind", KINDS)
def test_more_plans_on_streams_are_plain_training(machine: Machine, kind: str, seed: int) -> None:
    """Many random plans on streams have the state of plain training."""
    assert_as_plain(machine, kind, seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_endless_schedules_on_streams_train_what_threads_do(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, schedule: str
) -> None:
    """Under asynchronous schedules, losses and state equal those of copies that the host waits for: state,
    versions and saved tensors move and the host updates layers while microbatches are in flight.
    """
    task, plan = make_chain(), mixed(schedule)
    one = Trainer(task, plan)
    monkeypatch.undo()
    other = Trainer(task, plan)
    for step in range(4):
        losses = [trainer.step(batch_of(task, plan, step)) for trainer in (one, other)]
        assert losses[0] == losses[1] or all(map(math.isnan, losses))  # where no microbatch has ended yet
    assert one.finish() == other.finish()
    assert_same(one.state, other.state)


@pytest.mark.sample(1)
@EACH
def test_a_state_that_is_loaded_replaces_what_is_under_way(
    machine: Machine, decisions: tuple[Decision, ...]
) -> None:
    """A state loaded after a step with unfinished copies replaces it, and training continues from it."""
    assert_loads(machine, "copies", decisions)


def test_a_state_is_loaded_behind_what_comes_back_from_an_update(machine: Machine) -> None:
    """A loaded state waits for copies that still read their homes, also if only updated parameters move."""
    assert_loads(machine, "adamw", UPDATED[:2])


def assert_loads(machine: Machine, kind: str, decisions: tuple[Decision, ...]) -> None:
    """Load the first state after two steps; training must continue as under a plan without moves."""
    task, plan = task_named(kind), one_stage(*decisions, kind=kind)
    one, other = Trainer(task, plan), Trainer(task, replace(plan, decisions=()))
    first = cloned(other.state)
    for step in range(4):
        assert one.step(batch_of(task, plan, step)) == other.step(batch_of(task, plan, step))
        if step == 1:
            with machine.far_behind():
                first.load_into(list(one.stages))
            first.load_into(list(other.stages))
        assert_same(one.state, other.state)


def cloned(state: StageState) -> StageState:
    """Return a copy of a state that training does not change."""
    kept = {name: {key: t.clone() for key, t in of.items()} for name, of in state.optimizer.items()}
    masters = {name: tensor.clone() for name, tensor in state.master_weights.items()}
    return StageState({name: tensor.clone() for name, tensor in state.tensors.items()}, kept, masters)


@pytest.mark.sample(3)
@EACH
@pytest.mark.parametrize("at", ["STEP", "RELOAD", "OFFLOAD", "WAIT"])
def test_a_failed_step_leaves_nothing_under_way(
    machine: Machine, decisions: tuple[Decision, ...], at: str
) -> None:
    """After a step that fails at its last action of a kind, a state can be loaded, and training continues
    from it.
    """
    task, plan = task_named("adamw"), one_stage(*decisions)
    machine.rng.seed(at)
    one, other = Trainer(task, plan), Trainer(task, replace(plan, decisions=()))
    assert one.step(batch_of(task, plan)) == other.step(batch_of(task, plan))
    kept, runner = cloned(one.state), one.runners[0]
    execute, last = runner._execute, Counter[str]()
    total = Counter(map(_word, lower(plan).actions[0]))

    def failing(action: Action) -> None:
        last[_word(action)] += 1
        if at == _word(action) and last[at] == total[at]:
            raise RuntimeError("it failed")
        execute(action)

    runner._execute = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="it failed"):
        one.step(batch_of(task, plan, 1))
    runner._execute = execute  # type: ignore[method-assign]
    kept.load_into(list(one.stages))
    for stage, fresh in zip(one.stages, other.stages, strict=True):
        stage.batch_number = fresh.batch_number
    for step in (2, 3):
        assert one.step(batch_of(task, plan, step)) == other.step(batch_of(task, plan, step))
    assert_same(one.state, other.state)


def _word(action: Action) -> str:
    """Return the kind of an action, and WAIT for the joins of copies."""
    return "WAIT" if action.wait else action.kind.value


def test_an_update_waits_for_its_gradients_and_nobody_for_the_update(
    monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    """Host updates wait for their gradients, which arrive when the device reaches the update's join; no
    launch waits for a host update.
    """
    task, plan = task_named("adamw"), one_stage(*UPDATED)
    trainer, arrived, waited = Trainer(task, plan), threading.Event(), list[bool]()
    settle, runner = LaggingGpu.settle, trainer.runners[0]
    execute = runner._execute

    def late(gpu: LaggingGpu, position: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            waited.append(arrived.wait(60))
        settle(gpu, position)

    def launching(action: Action) -> None:
        if action.kind is Kind.STEP and action.place is not None and action.wait:
            arrived.set()
        execute(action)

    monkeypatch.setattr(LaggingGpu, "settle", late)
    runner._execute = launching  # type: ignore[method-assign]
    trainer.step(batch_of(task, plan))
    assert waited == [True] * 2


# -------------------------------------------------------------------- state that stays on the host


def test_what_an_optimizer_keeps_on_the_host_stays_there() -> None:
    """State on another device than its parameter, as host counters of GPU parameters, is not moved."""
    task = task_of(lambda: [nn.Linear(8, 4)], optimizer=torch.optim.AdamW)
    (stage,) = Trainer(task, plan_of(task, [1])).stages
    updates = Updates(task, stage.layers, 0, None, {})
    assert updates.optimizer is not None
    moments: list[Tensor] = []
    for parameter in stage.parameters:
        state = {"step": torch.zeros((), device="meta"), "exp_avg": torch.zeros_like(parameter)}
        updates.optimizer.state[parameter] = state
        moments.append(state["exp_avg"])
    assert list(map(id, updates.state((0, 1), 4 * 36))) == list(map(id, moments))


@pytest.mark.parametrize("place", ["host", "device1"])
def test_a_plan_for_gpus_leaves_counters_where_they_are(place: str) -> None:
    """A plan for GPUs moves moments and not counters; emulated devices keep counters next to the moments."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 4)], optimizer=torch.optim.AdamW)
    plan = plan_of(task, [2], devices=2, profiled=profile(task, microbatch_size=2, target="cuda"))
    away = Decision(
        stage=0, subject=State(start=0, stop=2, kind="optimizer"), what=What.OFFLOAD, place=parse_place(place)
    )
    moved, kept = (Trainer(task, replace(plan, decisions=decisions)) for decisions in ((away,), ()))
    for step in range(2):
        assert moved.step(batch_of(task, plan, step)) == kept.step(batch_of(task, plan, step))


@pytest.mark.parametrize("option", ["fused", "capturable"])
def test_an_optimizer_for_gpus_alone_is_refused_where_the_host_updates(option: str) -> None:
    """A GPU-only optimizer is refused for host updates; the error names the fix."""

    class Made(torch.optim.SGD):
        def __init__(self, groups: Any) -> None:
            super().__init__([{**group, option: True} for group in groups], lr=0.1)

    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 4)], optimizer=Made)
    plan = replace(plan_of(task, [2], devices=2), decisions=(away(0, 1, 2, What.UPDATE),))
    with pytest.raises(
        UsageError, match=f"which does not work with {option}=True: create the optimizer without"
    ):
        Trainer(task, plan)


def test_gpus_may_move_state() -> None:
    """Plans for GPUs that move state, or update on the host, pass the checks before a launch."""
    plan = one_stage(away(0, 0, 1), away(0, 5, 6, What.UPDATE), away(0, 7, 8, kind="parameters"))
    check_lending(replace(plan, cluster=replace(plan.cluster, backend="cuda")), lower(plan))


def test_only_what_is_copied_has_slots() -> None:
    """Slots, pinned for GPUs, hold only gradients and parameters: a host update allocates its own state on
    the host.
    """
    plan = one_stage(away(0, 7, 9, What.UPDATE))
    lent = Lending.within(Hardware(plan), lower(plan)).arenas
    costs = plan.measurement.costs[7:9]
    assert sum(arena.nbytes for arena in lent) == sum(
        cost.gradient_bytes + cost.parameter_bytes for cost in costs
    )


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts reads of numbers from tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("master_weights", [False, True])
def test_the_host_reads_what_the_stages_agreed_on_once(
    monkeypatch: pytest.MonkeyPatch, master_weights: bool
) -> None:
    """The host reads overflow, norm and clipping factor as one tensor: each read waits for the GPU."""
    lists, tolist = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: lists.append(1) or tolist(tensor))
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 4.0)
    agreement = Agreement(["a"], {"a": (parameter, 0)}, [parameter], clip_norm=1.0, scale=LossScale(value=2.0),
                          master_weights=master_weights)  # fmt: skip
    with Reads() as reads:
        agreement.conclude(agreement.contribution(torch.device("cpu")))
    assert reads.count + len(lists) == 1
    norm = torch.linalg.vector_norm(torch.full((3,), 2.0)).item()
    assert agreement.norm == pytest.approx(norm) and not agreement.overflow
    factor = agreement.gradient_factor * 2.0 if master_weights else parameter.grad[0].item() / 2.0
    assert factor == pytest.approx(1.0 / norm)


# -------------------------------------------------------------------- kernels of an update


def one_update(device: str, dtype: torch.dtype, seed: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Return parameters before and after the eleventh update of AdamW, with state from float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.randn(4096, generator=generator))
    adamw = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1)
    scales = 10.0 ** torch.randint(-6, 3, (4096,), generator=generator)
    for _ in range(10):
        parameter.grad = torch.randn(4096, generator=generator) * scales
        adamw.step()
    gradient = torch.randn(4096, generator=generator) * scales
    here = nn.Parameter(parameter.detach().to(device, dtype, copy=True))
    there = torch.optim.AdamW([here], lr=1e-2, weight_decay=0.1, **options)
    state = adamw.state[parameter]
    there.state[here] = {
        key: value if key == "step" else value.to(device, dtype) for key, value in state.items()
    }
    here.grad = gradient.to(device, dtype)
    there.step()
    return parameter.detach().double(), here.detach().cpu().double()


def tolerance(before: Tensor) -> Tensor:
    """Return the largest difference of two such updates that docs/training.md allows."""
    longest = (1 - 0.9) / math.sqrt((1 - 0.999) * (1 - 0.9**2 / 0.999))
    return 2.0**-22 * before.abs() + 2.0**-19 * longest * 1e-2


@pytest.mark.parametrize("foreach", [False, True])
def test_an_update_on_the_cpu_is_within_half_the_tolerance_of_exact_numbers(foreach: bool) -> None:
    """An update on the CPU is within half the tolerance of float64, so that two kernels are within the
    tolerance, for gradients of many sizes.
    """
    for seed in range(5):
        before, exact = one_update("cpu", torch.float64, seed)
        _, found = one_update("cpu", torch.float32, seed, foreach=foreach)
        assert bool(((found - exact).abs() <= tolerance(before) / 2).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("foreach", [False, True])
def test_an_update_on_a_gpu_is_within_the_tolerance_of_that_on_the_cpu(foreach: bool) -> None:
    """Updates of the same parameters on GPU and CPU differ by at most the documented tolerance."""
    for seed in range(5):
        before, here = one_update("cpu", torch.float32, seed)
        _, there = one_update("cuda", torch.float32, seed, foreach=foreach)
        assert bool(((there - here).abs() <= tolerance(before)).all())
