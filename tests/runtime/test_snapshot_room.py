"""Host memory of a checkpoint: known from the plan, to the byte, before any worker starts."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipefit.errors import OutOfMemory, PipefitWarning
from pipefit.lowering import whole_run
from pipefit.memory.arenas import arenas_of, room_needed, snapshot_bytes
from pipefit.runtime import Trainer, train
from pipefit.runtime.checkpoint.background_saver import SaveReport
from pipefit.runtime.options import Saving
from pipefit.schema.devices import Member
from pipefit.schema.plan import Plan
from support.local_batches import batches
from support.offloaded_state import SWAPPED, one_stage
from support.resumable_grids import ENDLESS, GRIDS, plan_of_grids
from support.resumed_tasks import (
    ADAMW,
    FEATURES,
    SEED,
    batches_of,
    mortal,
    named,
    plan_for,
    tied,
    trainer_for,
    undisturbed,
)
from support.sharded_stages import divided
from support.small_tasks import batch_of, plan_of, task_of

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = Member.host(0)


def saved_by(trainer: Trainer, folder: Path) -> int:
    """Return the bytes of tensors in a checkpoint, by the trainer and by the files without headers."""
    trainer.save(folder)
    trainer.finish()
    assert trainer.saved is not None
    (shard,) = folder.rglob("*.safetensors")
    with shard.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    assert shard.stat().st_size - 8 - header == trainer.saved.nbytes
    return trainer.saved.nbytes


OFTEN = ("held", "masters", "ZeRO 1 of shards", "pipedream-2bw", 1)  # the others are for the gallery


def often(*cases: str | int) -> list[Any]:
    """Return cases, some of them in the slow suite only."""
    return [case if case in OFTEN else pytest.param(case, marks=pytest.mark.gallery) for case in cases]


@pytest.mark.parametrize("name", often(*FEATURES))
def test_a_plan_knows_what_a_checkpoint_takes(name: str, tmp_path: Path) -> None:
    """A plan gives a checkpoint's bytes: parameters, non-persistent buffers, float32 copies and every kind of
    optimizer state.
    """
    plan = plan_for(name, "1f1b", (2, 2, 2))
    trainer = trainer_for(name, plan)
    for batch in batches_of(name)[: trainer.accumulate]:
        trainer.step(batch)
    assert snapshot_bytes(plan) == {HOST: saved_by(trainer, tmp_path)}


def test_a_tied_parameter_is_counted_once(tmp_path: Path) -> None:
    """A tied parameter counts once, though two stages have a copy."""
    task = task_of(tied, outputs=8, optimizer=ADAMW)
    trainer = Trainer(task, plan_of(task, [3, 3], microbatches=1))
    trainer.step(batch_of(task, trainer.plan))
    assert snapshot_bytes(trainer.plan) == {HOST: saved_by(trainer, tmp_path)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("grids", often(*GRIDS, *ENDLESS))
def test_what_replicas_and_shards_hold_is_counted_once(grids: str, tmp_path: Path) -> None:
    """State of replicas and shards counts once, for the device that stores it."""
    plan = plan_of_grids("normed", grids)
    trainer = Trainer(divided("normed"), plan, seed=5)
    trainer.step(batches(trainer.task, plan, 1)[0])
    assert snapshot_bytes(plan) == {HOST: saved_by(trainer, tmp_path)}


def on_a_host_of(memory_bytes: int) -> Plan:
    """Return a plan whose devices' host has this much memory."""
    plan = plan_for("dropout", "1f1b", (3, 3))
    host = replace(plan.cluster.hosts[0], memory_bytes=memory_bytes)
    return replace(plan, cluster=replace(plan.cluster, hosts=(host,)))


SAID = (
    "host0 has 8.89 KiB, but needs 0 B for offloaded tensors and 8.89 KiB for a copy of the saved state, 1 B "
)
SAID += "too much: "


@pytest.mark.parametrize(("missing", "in_foreground"), [(0, False), (1, True)])
def test_training_stands_still_where_that_is_asked_for(
    missing: int, in_foreground: bool, tmp_path: Path
) -> None:
    """With saves in the foreground, a host needs no room for a copy; in the background, exactly enough room
    suffices.
    """
    needed = snapshot_bytes(on_a_host_of(1 << 30))[HOST]
    saves, saving = list[SaveReport](), Saving(directory=str(tmp_path), every=1, in_foreground=in_foreground)
    plan = on_a_host_of(needed - missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PipefitWarning)
        train(
            partial(named, "dropout"),
            plan,
            steps=2,
            seed=SEED,
            numbers=False,
            saving=saving,
            on_saved=saves.append,
        )
    assert sum(saved.nbytes for saved in saves if saved.step == 2) == needed
    assert {saved.snapshot_bytes > 0 for saved in saves} == {not in_foreground}


def test_a_host_without_room_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    """A host without room is refused before a worker starts, with the missing bytes and both ways out."""
    plan = on_a_host_of(snapshot_bytes(on_a_host_of(1 << 30))[HOST] - 1)
    with pytest.raises(OutOfMemory) as refused:
        train(partial(named, "dropout"), plan, steps=2, numbers=False, saving=Saving(directory=str(tmp_path)))
    ways_out = (
        "pause training while a checkpoint is written (--save-in-foreground), or offload less to the host"
    )
    assert str(refused.value) == SAID + ways_out
    train(partial(named, "dropout"), plan, steps=1, seed=SEED, numbers=False)  # who saves nothing needs none


def test_moved_tensors_leave_less_room_for_the_copy(tmp_path: Path) -> None:
    """Offloaded tensors reduce the room for the copy: a host may have room for either, but not for both."""
    plan = one_stage(*SWAPPED)
    moved = sum(room_needed(plan, arenas_of(plan, whole_run(plan)))[HOST].values())
    host = replace(plan.cluster.hosts[0], memory_bytes=moved + snapshot_bytes(plan)[HOST])
    plan = replace(plan, cluster=replace(plan.cluster, hosts=(host,)))
    Saving(directory=str(tmp_path)).check(plan)
    host = replace(host, memory_bytes=host.memory_bytes - 1)
    plan = replace(plan, cluster=replace(plan.cluster, hosts=(host,)))
    with pytest.raises(OutOfMemory, match=r"but needs \d\S* KiB for offloaded tensors and .* 1 B too much: "):
        Saving(directory=str(tmp_path)).check(plan)


def test_training_that_is_under_way_goes_on(tmp_path: Path) -> None:
    """A trainer on a host without room pauses for its checkpoints and warns once."""
    plan = on_a_host_of(snapshot_bytes(on_a_host_of(1 << 30))[HOST] - 1)
    trainer = Trainer(named("dropout"), plan, seed=SEED)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PipefitWarning)
        for _ in range(2):
            trainer.step(batch_of(trainer.task, plan))
            trainer.save(tmp_path)
            assert trainer.saved is not None and trainer.saved.snapshot_bytes == 0
    assert [str(one.message) for one in told] == [SAID + "training pauses while a checkpoint is written"]


def test_a_restart_on_a_host_without_room_goes_on(tmp_path: Path) -> None:
    """A restart on a host that has lost its room continues with foreground saves."""
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    (deaths / "1-2-1F0").touch()
    smaller = on_a_host_of(snapshot_bytes(on_a_host_of(1 << 30))[HOST] - 1)
    plans = iter([on_a_host_of(1 << 30), smaller])
    with pytest.warns(PipefitWarning) as told:
        losses, _ = train(
            partial(mortal, str(deaths)),
            on_a_host_of(1 << 30),
            steps=4,
            seed=SEED,
            numbers=False,
            saving=Saving(directory=str(tmp_path / "runs"), every=1),
            restarts=1,
            replan=lambda _: next(plans),
        )
    assert losses == undisturbed(4)
    assert [str(one.message).startswith(SAID) for one in told] == [False, True]
