"""Saves of a trainer: in the background, with copies in host memory, complete or absent; and refusals."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from pipefit.checkpoints import find, folders, load_state_dict
from pipefit.checkpoints.manifest import dumps
from pipefit.checkpoints.shards import write_shard
from pipefit.errors import FileError, OutOfMemory, PipefitWarning, UsageError
from pipefit.runtime import Trainer
from pipefit.runtime.checkpoint import background_saver, checkpointing
from pipefit.runtime.options import Supervision
from pipefit.texts import dtype_name
from support.full_disk import full_disk
from support.offloaded_state import SWAPPED, one_stage, task_named
from support.resumed_tasks import ADAMW, Remembered, plan_for, tied, trainer_for
from support.small_tasks import batch_of, plan_of, task_of

pytestmark = pytest.mark.usefixtures("one_thread")

SHARD = "worker-00000.safetensors"


def trained(steps: int = 1, **options: Any) -> Trainer:
    """Return a trainer of two stages after some steps."""
    task = task_of(lambda: [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)], optimizer=ADAMW)
    trainer = Trainer(task, plan_of(task, [2, 1]), **options)
    for step in range(steps):
        trainer.step(batch_of(task, trainer.plan, step))
    return trainer


def step(trainer: Trainer) -> None:
    trainer.step(batch_of(trainer.task, trainer.plan, 7))


class Gate:
    """A replacement for the writing of a shard, which waits until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened, self._write = threading.Event(), background_saver.write_shard
        patch.setattr(background_saver, "write_shard", self)

    def __call__(self, *arguments: Any) -> Any:
        assert self.opened.wait(60)
        return self._write(*arguments)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues while a checkpoint is written: two steps end before the writing begins, and the
    state from before them is written.
    """
    gate, trainer = Gate(monkeypatch), trained()
    before = {name: tensor.clone() for name, tensor in trainer.state_dict(optimizer=True).items()}
    trainer.save(tmp_path)
    step(trainer)
    step(trainer)
    assert folders.whole(tmp_path) == []
    gate.opened.set()
    trainer.finish()
    found = find(tmp_path)
    written = found.read(found.manifest.tensors)
    assert all(torch.equal(written[name], before[name]) for name in before)
    assert trainer.steps_done == 3
    assert found.manifest.step == 1


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save starts when the first checkpoint is whole, so that at most one snapshot exists."""
    gate, trainer = Gate(monkeypatch), trained()
    trainer.save(tmp_path)
    step(trainer)
    threading.Timer(0.2, gate.opened.set).start()
    trainer.save(tmp_path)
    assert [number for number, _ in folders.whole(tmp_path)][:1] == [1]
    trainer.finish()
    assert [number for number, _ in folders.whole(tmp_path)] == [1, 2]


def test_another_trainer_loads_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer of the same process loads the last save, not an older one."""
    gate, trainer, other = Gate(monkeypatch), trained(), trained()
    trainer.save(tmp_path)
    threading.Timer(0.2, gate.opened.set).start()
    assert other.load(tmp_path) == 1


def test_a_save_that_waits_gives_signs_of_life_while_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits for a slow disk sends signs of life as long as bytes are written, and none while
    the disk stalls.
    """
    signs, counted = list[int](), list[int]()
    trainer = trained(supervision=Supervision(on_save=lambda waits: signs.append(1)))
    opened, usual = threading.Event(), background_saver.write_shard

    def slow(path: Path, tensors: Any, progress: Any) -> Any:
        for _ in range(3):
            time.sleep(0.5)
            progress(1)
        assert opened.wait(60)
        counted.append(len(signs))
        return usual(path, tensors)

    monkeypatch.setattr(background_saver, "write_shard", slow)
    trainer.save(tmp_path)
    signs.clear()
    threading.Timer(3.5, opened.set).start()
    trainer.finish()
    assert 2 <= counted[0] <= 5  # one as it begins to wait, and fewer of the others on a busy machine


def test_the_bytes_of_a_snapshot_are_told(tmp_path: Path) -> None:
    """A snapshot's bytes are reported: parameters and AdamW's two moments at 4 bytes a number, and a counter
    for each parameter.
    """
    trainer = trained()
    trainer.save(tmp_path)
    numbers, parameters = 8 * 64 + 64 + 64 * 4 + 4, 4
    nbytes = 3 * 4 * numbers + 4 * parameters
    saved = trainer.saved
    assert saved is not None
    assert (saved.step, saved.nbytes, saved.snapshot_bytes) == (1, nbytes, nbytes)
    trainer.finish()


def test_what_is_away_is_in_the_hosts_memory_once_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offloaded state is in host memory once during a save: tensors read for the copy are freed before
    training continues.
    """
    gate, read = Gate(monkeypatch), list[weakref.ref[Tensor]]()
    plan = one_stage(*SWAPPED)
    trainer = Trainer(task_named("adamw"), plan, numbers=False)
    trainer.step(batch_of(trainer.task, plan))
    usual = background_saver.copied

    def copied(tensors: dict[str, Tensor], *more: Any) -> dict[str, Tensor]:
        read.extend(weakref.ref(tensor) for key, tensor in tensors.items() if key.startswith("optimizer/"))
        return usual(tensors, *more)

    monkeypatch.setattr(background_saver, "copied", copied)
    trainer.save(tmp_path)
    kept = [
        state
        for stage in trainer.stages
        if stage.optimizer is not None
        for state in stage.optimizer.state.values()
    ]
    here = {id(tensor) for state in kept for tensor in state.values()}
    left = [tensor for one in read if (tensor := one()) is not None]
    gate.opened.set()
    assert {id(tensor) for tensor in left} <= here and len(left) < len(read)
    trainer.finish()
    assert find(tmp_path).manifest.step == 1


def test_a_tensor_is_gone_when_the_next_one_is_copied() -> None:
    """A tensor that was read only for the copy is freed before the next one is copied."""
    tensors = {str(number): torch.ones(4) for number in range(4)}
    read, there = [weakref.ref(tensor) for tensor in tensors.values()], list[int]()
    found = background_saver.copied(tensors, lambda: there.append(sum(one() is not None for one in read)))
    assert there == [4, 3, 2, 1] and tensors == {}
    assert all(torch.equal(tensor, torch.ones(4)) for tensor in found.values()) and len(found) == 4


@pytest.mark.parametrize(
    ("workers", "room", "copies"), [(1, 1.0, True), (1, 0.99, False), (3, 3.0, True), (3, 2.9, False)]
)
def test_a_host_without_room_for_copies_is_written_from_directly(
    workers: int, room: float, copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a host lacks room for its workers' copies, training waits until the checkpoint is whole."""
    trainer = trained()
    nbytes = sum(tensor.nbytes for tensor in trainer.state_dict(optimizer=True).values())
    monkeypatch.setattr(checkpointing, "free_bytes", lambda: int(room * nbytes))
    trainer._checkpoints._beside = workers
    with warnings.catch_warnings(record=True) as told:
        trainer.save(tmp_path)
    assert [str(one.message).startswith("this host has ") for one in told] == [True] * (not copies)
    assert trainer.saved is not None
    assert trainer.saved.snapshot_bytes == copies * nbytes
    assert copies or find(tmp_path).manifest.step == 1
    trainer.finish()


def test_a_save_in_the_foreground_is_whole_when_it_returns(tmp_path: Path) -> None:
    """`background=False` waits for the disk: the checkpoint is whole when `save` returns."""
    trainer = trained()
    trainer.save(tmp_path, background=False)
    find(tmp_path).verify()


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    """`keep` removes the oldest checkpoint after the new one is whole, not before."""
    trainer = trained()
    for _ in range(4):
        trainer.save(tmp_path, keep=2)
        step(trainer)
    trainer.finish()
    assert [number for number, _ in folders.whole(tmp_path)] == [3, 4]


def test_a_folder_with_a_later_checkpoint_is_refused(tmp_path: Path) -> None:
    """A folder with a later checkpoint of an earlier training is refused: it would be loaded as the newest,
    and `keep` would remove the new one as the oldest.
    """
    before, trainer = trained(), trained()
    step(before)
    before.save(tmp_path, background=False)
    with pytest.raises(
        FileError, match="step-00000002 already exists and is of a later step than 1: resume from it"
    ):
        trainer.save(tmp_path, keep=1)
    trainer.load(tmp_path)
    step(trainer)
    trainer.save(tmp_path, keep=1)
    trainer.finish()
    assert [number for number, _ in folders.whole(tmp_path)] == [3]


def test_a_full_disk_costs_the_checkpoint_and_not_the_training(tmp_path: Path) -> None:
    """A full disk loses the checkpoint but not the training: the failure is reported once, at the end of the
    next step, with the last whole checkpoint, and the next save succeeds.
    """
    trainer = trained()
    trainer.save(tmp_path, background=False)
    step(trainer)
    with full_disk():
        trainer.save(tmp_path)
        with pytest.warns(
            PipefitWarning,
            match=r"checkpoint 2 cannot be saved .* File too large; the last complete checkpoint is 1",
        ):
            trainer.finish()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(trainer)
        trainer.save(tmp_path)
        trainer.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_without_a_thread_a_checkpoint_is_lost_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a thread (a user's or container's limit), a checkpoint is lost and reported as for a full disk,
    and the next one succeeds.
    """
    trainer = trained()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        trainer.save(tmp_path)
        with pytest.warns(
            PipefitWarning,
            match=r"checkpoint 1 cannot be saved .* new thread; there is no complete checkpoint",
        ):
            trainer.finish()
    step(trainer)
    trainer.save(tmp_path)
    trainer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_failed_save_may_stop_the_training(tmp_path: Path) -> None:
    """An exception of the failure callback ends the step; the callback's argument names the failure."""

    def stop(failure: FileError) -> None:
        raise failure

    trainer = trained(supervision=Supervision(on_failed_save=stop))
    with full_disk():
        trainer.save(tmp_path)
        with pytest.raises(FileError, match="there is no complete checkpoint yet"):
            trainer.finish()


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    """A folder that cannot be created because of a file is refused in the call of `save`, and training can
    continue.
    """
    (tmp_path / "file").touch()
    trainer = trained()
    with pytest.raises(FileError, match="cannot be created: Not a directory"):
        trainer.save(tmp_path / "file" / "runs")
    step(trainer)


def test_gradients_that_wait_for_an_update_are_not_saved(tmp_path: Path) -> None:
    """A save between the batches of one update is refused, with the steps at which it is possible."""
    trainer = trained(accumulate=3)
    with pytest.raises(UsageError, match=r"1 of the 3 batches .* a multiple of 3"):
        trainer.save(tmp_path)


def test_a_scheduler_that_json_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    """A scheduler that JSON cannot hold is refused before any file is written; the error names the class and
    the attribute.
    """
    task = replace(task_of(lambda: [nn.Linear(8, 4)]), scheduler=Remembered)
    with pytest.raises(
        UsageError, match="the scheduler Remembered's history is a set, which cannot be saved"
    ):
        Trainer(task, plan_of(task, [1])).save(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_state_of_an_optimizer_that_json_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    """Optimizer state in lists of tensors is refused by name; parameters and buffers can still be read."""

    class Listing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["past"] = [parameter.detach().clone()]

    task = task_of(lambda: [nn.Linear(8, 4)], optimizer=partial(Listing, lr=0.1))
    trainer = Trainer(task, plan_of(task, [1]))
    step(trainer)
    with pytest.raises(
        UsageError, match=r"the optimizer's past of 0.weight is a list, which cannot be saved"
    ):
        trainer.save(tmp_path)
    assert trainer.state_dict().keys() == {"0.weight", "0.bias"}


# -------------------------------------------------------------------- loading


def test_a_checkpoint_of_another_task_is_refused(tmp_path: Path) -> None:
    """A checkpoint of another task is refused with the difference, and nothing is loaded."""
    trained().save(tmp_path, background=False)
    task = task_of(lambda: [nn.Linear(8, 65), nn.Tanh(), nn.Linear(65, 4)], optimizer=ADAMW)
    with pytest.raises(
        FileError, match=r"does not belong to this task .* other parameters or buffers in layers 0, 2"
    ):
        Trainer(task, plan_of(task, [2, 1])).load(tmp_path)


def test_what_a_damaged_checkpoint_holds_is_not_taken_up(tmp_path: Path) -> None:
    """A damaged shard is refused before any tensor changes."""
    first = trained(steps=2)
    first.save(tmp_path, background=False)
    shard = find(tmp_path).folder / "worker-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    trainer = trained()
    before = {name: tensor.clone() for name, tensor in trainer.state_dict(optimizer=True).items()}
    with pytest.raises(FileError, match="SHA-256 differs"):
        trainer.load(tmp_path)
    after = trainer.state_dict(optimizer=True)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def forged(directory: Path, key: str, other: Tensor | None) -> None:
    """Replace or remove one tensor of a checkpoint, with matching sizes, shapes and hashes."""
    folder, manifest = find(directory).folder, find(directory).manifest
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(folder / SHARD).items()}
    tensors = {name: tensor if name != key else other for name, tensor in tensors.items()}
    left = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    (folder / SHARD).unlink()
    shard = write_shard(folder / SHARD, left)
    stored = tuple(
        replace(one, dtype=dtype_name(left[one.key].dtype), shape=tuple(left[one.key].shape))
        for one in manifest.tensors
        if one.key in left
    )
    (folder / folders.MANIFEST).write_text(dumps(replace(manifest, shards=(shard,), tensors=stored)))


@pytest.mark.parametrize(
    ("key", "other", "words"),
    [
        ("2.bias", None, "2.bias is missing"),
        (
            "0.weight",
            torch.ones(8, 64),
            r"0.weight has dtype .* shape \(8, 64\), but the model needs .* \(64, 8\)",
        ),
        ("0.weight", torch.ones(64, 8).double(), "0.weight has dtype torch.float64"),
    ],
)
def test_what_a_checkpoint_of_another_kind_holds_is_not_taken_up(
    key: str, other: Tensor | None, words: str, tmp_path: Path
) -> None:
    """A forged checkpoint with correct hashes is refused by the tensor's name before any tensor changes."""
    trained(steps=2).save(tmp_path, background=False)
    forged(tmp_path, key, other)
    trainer = trained()
    before = {name: tensor.clone() for name, tensor in trainer.state_dict(optimizer=True).items()}
    with pytest.raises(FileError, match=words):
        trainer.load(tmp_path)
    after = trainer.state_dict(optimizer=True)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_tied_parameter_is_stored_once_and_has_all_of_its_names(tmp_path: Path) -> None:
    """A tied parameter is stored once, by one of its two stages; a state dict of the checkpoint fits the
    original module strictly.
    """
    task = task_of(tied, outputs=8, optimizer=ADAMW)
    trainer = Trainer(task, plan_of(task, [3, 3], microbatches=1))
    trainer.step(batch_of(task, trainer.plan))
    trainer.save(tmp_path, background=False)
    names = [tensor.key for tensor in find(tmp_path).manifest.tensors]
    assert [name for name in names if name.endswith(("0.weight", "5.weight"))] == ["0.weight"]
    module = nn.Sequential(*tied())
    module.load_state_dict(load_state_dict(tmp_path))
    assert torch.equal(module[5].weight, trainer.state_dict()["5.weight"])
    other = Trainer(task, plan_of(task, [2, 2, 2], microbatches=1), seed=5)
    other.load(tmp_path)
    theirs = trainer.state_dict(optimizer=True)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in other.state_dict(optimizer=True).items())


def test_loaded_state_is_counted_on_its_device(tmp_path: Path) -> None:
    """Loaded optimizer state counts on its device: the first step after a load peaks as a later step of an
    uninterrupted run.
    """
    whole, first = trained(steps=2), trained()
    first.save(tmp_path, background=False)
    second = trained(steps=0)
    second.load(tmp_path)
    step(second)
    assert [max(s.total_bytes for s in device.memory) for device in second.trace.devices] == [
        max(s.total_bytes for s in device.memory if s.step == 1) for device in whole.trace.devices
    ]


def test_optimizer_state_that_does_not_fit_is_out_of_memory(tmp_path: Path) -> None:
    """A device too small for the loaded state raises out of memory, instead of exceeding its cap."""
    first = trained()
    first.save(tmp_path, background=False)
    task = first.task
    tight = plan_of(task, [2, 1], memory_bytes=10 * (8 * 64 + 64))
    with pytest.raises(OutOfMemory, match="a checkpoint's optimizer state"):
        Trainer(task, tight).load(tmp_path)


def test_tensors_with_optimizer_state_load_under_another_plan() -> None:
    """`state_dict(optimizer=True)` of one trainer makes another one equal to it; without the option, only the
    weights are equal.
    """
    first, second = trained(steps=2), trained(steps=0, seed=5)
    tensors: dict[str, Tensor] = first.state_dict(optimizer=True)
    assert "optimizer/0.weight/exp_avg" in tensors
    second.load_state_dict(tensors)
    assert all(
        torch.equal(tensor, tensors[name]) for name, tensor in second.state_dict(optimizer=True).items()
    )
    third = trained(steps=0, seed=5)
    third.load_state_dict(first.state_dict())
    assert not any(name.startswith("optimizer") for name in third.state_dict(optimizer=True))


def test_reports_go_on_counting(tmp_path: Path) -> None:
    """Reports continue to count at the checkpoint's number of batches."""
    trained(steps=3).save(tmp_path, background=False)
    numbers: list[int] = []
    second = trained(steps=0, callbacks=[lambda report: numbers.append(report.step)])
    assert second.load(tmp_path) == 3
    step(second)
    assert numbers == [3]


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream-2bw"])
def test_a_trainer_that_has_trained_forgets_it(schedule: str, tmp_path: Path) -> None:
    """A load replaces all state of a trainer, also with microbatches and weight versions in flight."""
    plan = plan_for("cycle", schedule, (2, 2, 2))
    first, second = trainer_for("cycle", plan), trainer_for("cycle", plan, seed=8)
    batch = batch_of(first.task, plan)
    first.step(batch)
    first.save(tmp_path, background=False)
    for _ in range(4):
        second.step(batch)
    second.load(tmp_path)
    for trainer in (first, second):
        trainer.finish()
    found = [
        [trainer.step(batch) for _ in range(3)][trainer.late :] + trainer.finish()
        for trainer in (first, second)
    ]
    assert found[0] == found[1]


def test_state_that_an_optimizer_has_not_made_yet_is_not_there_after_a_load(tmp_path: Path) -> None:
    """A checkpoint from before the first step removes the optimizer's state on a load."""
    fresh, used = trained(steps=0), trained(steps=2)
    fresh.save(tmp_path, background=False)
    used.load(tmp_path)
    assert not any(name.startswith("optimizer") for name in used.state_dict(optimizer=True))
