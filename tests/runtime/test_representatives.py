"""Dry runs of representative devices for all devices that do the same, except for the layers they own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch

from pipefit.lowering import step_programs
from pipefit.memory.cuda_allocator import AllocatorSettings
from pipefit.processes import beside, forking
from pipefit.runtime import certify
from pipefit.runtime.dry_run import certify as dry_run
from pipefit.runtime.dry_run import reserved
from pipefit.runtime.dry_run.certify import Rehearsal
from pipefit.runtime.dry_run.devices import Ownership, kin, owned_layers
from pipefit.runtime.dry_run.lives import LifeEvent
from pipefit.schema.actions import Action
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import SHARDINGS, Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Trace
from pipefit.schema.training import Training
from support.gallery_samples import sampled, seeds
from support.known_profiles import profile
from support.local_batches import random_grids, sliced_plan
from support.offloaded_state import away
from support.replicated_models import precise, replicated
from support.shared_gradients import MIXES, entwined
from support.two_pool_model import on_gpus, wide

SIZES = (12, 6, 4, 3)


@pytest.fixture(scope="module")
def found() -> ModelProfile:
    """Profile the layers of `wide` for a GPU, at the sizes of microbatches and local batches."""
    return profile(wide(), microbatch_size=SIZES, target="cuda")


@pytest.fixture(scope="module")
def normed() -> ModelProfile:
    """Profile the layers of a model with batch norms."""
    return profile(replicated("normed"), microbatch_size=SIZES)


@pytest.fixture(scope="module")
def tied() -> ModelProfile:
    """Profile the layers of a model with a shared weight."""
    return profile(replicated("tied"), microbatch_size=SIZES)


def run_devices(task: Any, plan: Plan, **options: Any) -> tuple[Trace, int]:
    """Return a folded dry run, without fallback, and the number of devices that it has run."""
    with (
        mock.patch.object(dry_run.Rehearsal, "_whole", side_effect=AssertionError("made again")),
        mock.patch.object(dry_run, "assemble", wraps=dry_run.assemble) as assembled,
    ):
        trace = certify(task, plan, **options)
    return trace, assembled.call_count


def drawn(found: ModelProfile, seed: int, **training: Any) -> Plan:
    """Draw stages of any degree and ZeRO level, under any schedule, on randomly placed devices.

    Stages that share a parameter divide at most the optimizer's state, and always update together.
    """
    rng = Random(f"ownership {seed}")
    edges, degrees = random_grids(rng, [1, 2, 3])
    together = bool(found.measurements[0].shared) and len(degrees) > 1
    endless = not training and not together and rng.random() < 0.25
    shardings = SHARDINGS[: 2 if together else 3 if endless else 4]
    return sliced_plan(
        found,
        edges,
        degrees,
        microbatches=rng.choice([1, 2, 3, 4]),
        schedule="pipedream" if endless else rng.choice(["gpipe", "1f1b"]),
        shard=[rng.choice(shardings) for _ in degrees],
        buckets=[rng.choice([1, 2, 3]) for _ in degrees],
        rng=rng,
        **training,
    )


def assert_told_of_all(task: Any, plan: Plan, **options: Any) -> None:
    """Assert that a folded dry run equals one of all devices field by field, and runs at most two devices a
    stage.
    """
    told, count = run_devices(task, plan, **options)
    if len({stage.grid.data for stage in plan.stages}) == 1 and plan.stages[0].grid.data > 1:
        assert count <= 2 * len(plan.stages)
    assert told == certify(task, plan, fold=False, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(4, of=60))
def test_some_devices_tell_what_all_allocate_and_reserve(found: ModelProfile, seed: int) -> None:
    """Every sample by category, and the reserved bytes of every GPU, equal a run of all devices."""
    plan = on_gpus(drawn(found, seed, clip_norm=None if seed % 3 else 1.0))
    assert_told_of_all(wide(), plan, allocator=AllocatorSettings())


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_the_allocator_is_asked_once_for_each_kind(shard: Any) -> None:
    """The allocator is simulated once for each distinct case of eight replicas that divide six layers."""
    own = profile(wide(), microbatch_size=(8, 1), target="cuda")
    grid = Grid(devices=tuple(range(8)), data=8, shard=shard)
    training = Training(batch_size=16, microbatches=2)
    stages = (Stage(start=0, stop=6, grid=grid),)
    plan = on_gpus(
        Plan(profile=own, cluster=Cluster.emulated((8, 1 << 30)), training=training, stages=stages)
    )
    with mock.patch.object(reserved, "allocator_peaks", wraps=reserved.allocator_peaks) as asked:
        trace, count = run_devices(wide(), plan, allocator=AllocatorSettings())
    assert count == 2
    assert asked.call_count == len({device.allocator for device in trace.devices}) < 8
    with (
        forking(),
        mock.patch("os.sched_getaffinity", return_value={0, 1}),
        mock.patch.object(Rehearsal, "_beside_each_other", lambda dry, fake, run, every: run(every)),
        mock.patch.object(dry_run, "beside", wraps=beside) as forked,
    ):
        assert certify(wide(), plan, allocator=AllocatorSettings()) == trace
    assert [len(call.args) for call in forked.call_args_list] == [3]  # of eight, after the first


@pytest.mark.gallery
@pytest.mark.parametrize("seed", seeds(4, of=60))
def test_some_devices_tell_what_all_hold_on_the_cpu(normed: ModelProfile, seed: int) -> None:
    """Representatives give the bytes of all devices on the CPU, with kernel workspaces and with the versions
    of an asynchronous schedule.
    """
    assert_told_of_all(replicated("normed"), drawn(normed, seed, **({} if seed % 3 else {"clip_norm": 1.0})))


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", sampled(SHARDINGS[2:], often=["gradients"]))
@pytest.mark.parametrize("name", sampled(MIXES, often=["cat", "sum of views"]))
def test_gradients_that_are_copied_are_their_owners(name: str, shard: Any) -> None:
    """If only owners keep gradients, the other replicas copy each microbatch's gradients that are parts of
    larger storages.
    """
    task = entwined([name, name])
    plan = on_gpus(
        sliced_plan(profile(task, microbatch_size=(6, 2), target="cuda"), [0, 5], [3], shard=(shard,))
    )
    assert_told_of_all(task, plan, allocator=AllocatorSettings())


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(2, of=30))
def test_layers_that_share_a_weight_have_one_owner(tied: ModelProfile, seed: int) -> None:
    """Layers that share a weight, in one stage or in two, have one owner."""
    assert_told_of_all(replicated("tied"), drawn(tied, seed))


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", SHARDINGS[1:])
def test_master_weights_are_their_owners(shard: Any) -> None:
    """Owners hold the float32 copies, and the half-precision gradients that are cast for an update."""
    task = precise("master-float16")
    plan = sliced_plan(profile(task, microbatch_size=(6, 2)), [0, 5], [3], shard=(shard,), buckets=(2,))
    assert_told_of_all(task, plan)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("degrees", "count"), [([2, 2], 2), ([4, 4], 2), ([2, 1], 2), ([4, 2], 2), ([3, 4], 6)]
)
def test_devices_that_do_the_same_are_run_once(normed: ModelProfile, degrees: list[int], count: int) -> None:
    """Replicas that divide no state are equal if they exchange the same numbers of rows with equally many
    neighbours.
    """
    plan = sliced_plan(normed, [0, 3, 6], degrees)
    told, run = run_devices(replicated("normed"), plan)
    assert told == certify(replicated("normed"), plan, fold=False)
    assert run == count


def test_one_replica_reports_to_an_agreement(normed: ModelProfile) -> None:
    """The first replica, which computes the global gradient norm, is run, and one more for the others."""
    assert_told_of_all(replicated("normed"), plan := sliced_plan(normed, [0, 6], [3], clip_norm=1.0))
    assert kin(plan, step_programs(plan), ()) == [(0,), (1, 2)]


def test_the_shards_of_the_first_replica_are_run(normed: ModelProfile) -> None:
    """With two replicas of two shards each, devices that hold the same shard are equal."""
    grid = Grid(devices=(3, 0, 2, 1), data=2, tensor=2)
    plan = sliced_plan(normed, [0, 3, 6], [2, 2])
    shards = replace(
        normed, measurements=tuple(replace(one, tensor=t) for one in normed.measurements for t in (1, 2))
    )
    divided = replace(plan, profile=shards, stages=(Stage(start=0, stop=6, grid=grid),))
    assert set(map(frozenset, kin(divided, step_programs(divided), ()))) == {
        frozenset({3, 2}),
        frozenset({0, 1}),
    }


def test_two_of_replicas_that_move_what_they_own_are_run(normed: ModelProfile) -> None:
    """Three replicas that offload owned state follow from two, which take other slots than the plan's."""
    still = sliced_plan(normed, [0, 6], [3], shard=("gradients",), buckets=(2,))
    plan = replace(still, decisions=(away(0, 0, 6),))
    told, run = run_devices(replicated("normed"), plan)
    assert told == certify(replicated("normed"), plan, fold=False)
    assert (run, len(set(owned_layers(plan).values()))) == (2, 3)


class Together(torch.optim.SGD):
    """An optimizer whose step makes a tensor for all parameters."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in parameters])
        return super().step() if len(flat) else None


def test_an_optimizer_that_joins_layers_has_every_replica_run(normed: ModelProfile) -> None:
    """If an update's memory is not a sum over owned layers, the dry run notices and runs all replicas."""
    task = replicated("normed", optimizer=partial(Together, lr=0.1))
    found = profile(task, microbatch_size=SIZES)
    plan = sliced_plan(found, [0, 6], [3], shard=("optimizer",))
    assert certify(task, plan) == certify(task, plan, fold=False)


# ---------------------------------------------------------------- merged event streams


class Run:
    """A run with these events in its only action."""

    alike = True

    def __init__(self, *events: LifeEvent) -> None:
        self.told = list(events)

    def settled(self) -> list[LifeEvent]:
        return []

    def events(self, actions: Sequence[Action]) -> list[list[LifeEvent]]:
        return [[], self.told]

    def layer_of(self, name: Any) -> None:
        """Return None: no storage is state."""


def born(name: str, nbytes: int, layer: int | None = None) -> LifeEvent:
    """Return the birth of a storage, of a layer or of none."""
    return LifeEvent(("born", name, 1), layer, ((0, nbytes),))


def merged(ones: Sequence[LifeEvent], others: Sequence[LifeEvent]) -> Ownership:
    """Merge the events of two runs that have ended a step."""
    ownership = Ownership(Run(*ones), Run(*others))
    ownership.learn([(), ()])
    return ownership


def test_a_replica_has_the_events_of_owners_for_its_own_layers() -> None:
    """A replica's events are the owner's for its own layers and the other run's for the rest, in their common
    order.
    """
    ownership = merged(
        [born("a", 1), born("mine", 10, layer=3), born("b", 2), born("both", 5, layer=4)],
        [born("a", 1), born("b", 2), born("yours", 100, layer=3), born("both", 7, layer=4)],
    )
    ends = [ownership.effects(frozenset(owned))[1].change.after[0] for owned in ((), (3,), (4,), (3, 4, 5))]
    assert ownership.alike
    assert ends == [1 + 2 + 100 + 7, 1 + 10 + 2 + 7, 1 + 2 + 100 + 5, 1 + 10 + 2 + 5]


@pytest.mark.parametrize(
    ("ones", "others"),
    [
        ([born("a", 1), born("b", 1)], [born("b", 1), born("a", 1)]),
        ([born("a", 1)], []),
        ([], [born("a", 1)]),
        ([born("a", 1)], [born("a", 2)]),
        ([born("a", 1, layer=1)], [born("a", 2, layer=2)]),
    ],
)
def test_stories_that_are_not_alike_are_told_as_such(ones: list[LifeEvent], others: list[LifeEvent]) -> None:
    """Two event streams differ by order or size, or if one has events outside its own layers."""
    assert not merged(ones, others).alike
