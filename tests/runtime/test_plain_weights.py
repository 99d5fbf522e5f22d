"""Checkpoints to plain PyTorch and back: traced models, tied weights, one file or Hugging Face's layout."""

from __future__ import annotations

import functools
import json
import multiprocessing as mp
import os
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.checkpoints import export, find, load_state_dict, plain
from pipefit.checkpoints.plain import load_weights
from pipefit.errors import FileError, UsageError
from pipefit.runtime import Trainer, train
from pipefit.runtime.launch import restarts
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.tensor_parallel.forms import DimSplit, TensorShard
from support.full_disk import full_disk
from support.known_profiles import profile
from support.pretrained_models import PRETRAINED
from support.resumed_tasks import ADAMW
from support.small_tasks import batch_of, plan_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Tied(nn.Module):
    """A small traced language model with a tied head and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        values = self.embedding(x) * self.scale
        for block in self.blocks:
            values = block(values)
        found: Tensor = self.head(values)
        return found


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (size, 5)), torch.randint(11, (size, 5))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


TASK = Task(Tied, batch=batch, loss=loss, optimizer=ADAMW, name="tied")


@pytest.fixture(scope="module")
def trained() -> Trainer:
    """Return a trainer of two stages that share the embedding, after two steps."""
    trainer = Trainer(TASK, split_in(2), numbers=False)
    for step in range(2):
        trainer.step(batch_of(TASK, trainer.plan, step))
    return trainer


@functools.cache
def profiled() -> ModelProfile:
    """Return the task's profile."""
    return profile(TASK, microbatch_size=2, threads=torch.get_num_threads())


def split_in(stages: int) -> Plan:
    """Return a plan of `stages` stages with about equally many layers."""
    layers = len(profiled().layers)
    sizes = [layers // stages + (n < layers % stages) for n in range(stages)]
    return plan_of(TASK, sizes, profiled=profiled())


@pytest.fixture
def saved(trained: Trainer, tmp_path: Path) -> Path:
    """Save a checkpoint and return its folder."""
    trained.save(tmp_path / "runs", background=False)
    return tmp_path / "runs"


def test_a_checkpoint_loads_strictly_into_the_original_module(trained: Trainer, saved: Path) -> None:
    """A checkpoint loads strictly into the original module: it has all names of the module's state dict, tied
    ones included.
    """
    module = Tied()
    module.load_state_dict(load_state_dict(saved), strict=True)
    theirs = trained.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in module.state_dict().items())
    assert module.head.weight is module.embedding.weight


def test_a_traced_model_goes_on_under_another_plan(trained: Trainer, saved: Path) -> None:
    """Three stages resume what two stages have trained; the tied weight is stored once and goes to both of
    its stages.
    """
    keys = [tensor.key for tensor in find(saved).manifest.tensors]
    assert sum(key in ("embedding.weight", "head.weight") for key in keys) == 1
    other = Trainer(TASK, split_in(3), seed=9, numbers=False)
    other.load(saved)
    theirs = trained.state_dict(optimizer=True)
    mine = other.state_dict(optimizer=True)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_an_exported_file_is_plain_safetensors(trained: Trainer, saved: Path, tmp_path: Path) -> None:
    """An exported file is plain safetensors: the package reads it, a tied weight is stored once as by
    `save_model`, and a training can start from it.
    """
    export(saved, tmp_path / "model.safetensors")
    module = Tied()
    missing, unexpected = safetensors.torch.load_model(module, tmp_path / "model.safetensors")
    assert not missing
    assert not unexpected
    theirs = trained.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in module.state_dict().items())
    other = Trainer(TASK, split_in(3), seed=9, numbers=False)
    other.load_weights(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in other.state_dict().items())


def test_an_exported_pt_file_is_a_state_dict(saved: Path, tmp_path: Path) -> None:
    """An exported .pt file is a state dict that torch loads with weights_only."""
    export(saved, tmp_path / "model.pt")
    Tied().load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)


def sharded(folder: Path, tensors: dict[str, Tensor], files: int = 2) -> None:
    """Write a model in Hugging Face's layout."""
    folder.mkdir()
    names, places = list(tensors), {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        mine = {name: tensors[name].clone() for name in names[number::files]}
        safetensors.torch.save_file(mine, folder / file)
        places |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_weights_come_from_hugging_faces_layout(tmp_path: Path) -> None:
    """Weights load from Hugging Face's sharded layout, with the tied weight under one name, and are cast from
    half precision.
    """
    torch.manual_seed(4)
    source = Tied()
    tensors = {
        name: tensor.bfloat16() for name, tensor in source.state_dict().items() if name != "head.weight"
    }
    sharded(tmp_path / "hub", tensors)
    trainer = Trainer(TASK, split_in(2), numbers=False)
    trainer.load_weights(tmp_path / "hub")
    found = trainer.state_dict()
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in tensors.items())
    assert torch.equal(found["head.weight"], tensors["embedding.weight"].float())


@pytest.mark.parametrize("through", ["torch", "safetensors"])
def test_a_state_dict_with_the_optimizers_goes_through_plain_files(
    through: str, trained: Trainer, tmp_path: Path
) -> None:
    """A state dict with AdamW's moments and counters passes through plain files, and training under another
    plan continues with the same numbers.
    """
    tensors, file = (
        {name: one.clone() for name, one in trained.state_dict(optimizer=True).items()},
        tmp_path / "state",
    )
    if through == "torch":
        torch.save(tensors, file)
        found = torch.load(file, weights_only=True)
    else:
        safetensors.torch.save_file(tensors, file)
        found = safetensors.torch.load_file(file)
    one, other = (Trainer(TASK, split_in(stages), seed=9, numbers=False) for stages in (2, 3))
    for trainer, given in ((one, tensors), (other, found)):
        trainer.load_state_dict(given)
        assert {
            name: torch.equal(one, tensors[name]) for name, one in trainer.state_dict(optimizer=True).items()
        } == (dict.fromkeys(tensors, True))
    assert one.step(batch_of(TASK, one.plan, 5)) == other.step(batch_of(TASK, one.plan, 5))
    after = other.state_dict(optimizer=True)
    assert all(torch.allclose(tensor, after[name]) for name, tensor in one.state_dict(optimizer=True).items())
    assert not torch.equal(after["embedding.weight"], tensors["embedding.weight"])


def watched(folder: str) -> Task:
    """Return the task, with a worker that logs the weight files that it reads."""
    read = plain._read

    def noted(path: Path, wanted: set[str]) -> dict[str, Tensor]:
        Path(folder, f"{mp.current_process().name} {path.name}").touch()
        return read(path, wanted)

    mock.patch.object(plain, "_read", noted).start()
    return TASK


def test_workers_read_the_files_that_have_their_layers(tmp_path: Path) -> None:
    """Workers read only the files with their layers; both read the file of the tied embedding."""
    tensors = {name: tensor for name, tensor in Tied().state_dict().items() if name != "head.weight"}
    sharded(tmp_path / "hub", tensors, files=len(tensors))
    (tmp_path / "read").mkdir()
    plan = split_in(2)
    train(partial(watched, str(tmp_path / "read")), plan, steps=1, numbers=False, weights=tmp_path / "hub")
    files = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())["weight_map"]
    trainer = Trainer(TASK, plan, numbers=False)
    stored = trainer._checkpoints.names.stored
    held = [
        {stored[name] for layer in stage.layers for name in layer.originals.values()}
        for stage in trainer.stages
    ]
    assert {path.name for path in (tmp_path / "read").iterdir()} == {
        f"pipefit-worker-{worker} {files[name]}"
        for worker, names in enumerate(held)
        for name in names & files.keys()
    }
    assert (
        held[0] & held[1] & files.keys()
        == {"embedding.weight"}
        != held[0] & files.keys()
        != held[1] & files.keys()
    )


def mapped(file: Path) -> int:
    """Return the bytes of a file that this process has in memory."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(file))
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def test_a_file_is_read_by_the_slices_that_are_taken(tmp_path: Path) -> None:
    """Looking up a tensor reads nothing, and a tensor-parallel rank reads about its quarter."""
    weight = torch.arange(1 << 23, dtype=torch.float32).reshape(1 << 12, -1)
    safetensors.torch.save_file({"weight": weight, "other": weight + 1}, tmp_path / "model.safetensors")
    found = load_weights(tmp_path / "model.safetensors", ["weight"])["weight"]
    assert mapped(tmp_path / "model.safetensors") < weight.nbytes / 16
    shard = TensorShard.of("weight", weight.shape, DimSplit(dim=0), 1, 4)
    assert torch.equal(shard.local(found), weight[1 << 10 : 1 << 11])
    assert mapped(tmp_path / "model.safetensors") < weight.nbytes / 2


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    """Missing tensors, other shapes, integer tensors, invalid files and paths outside the folder are refused
    by name.
    """
    tensors = {name: tensor for name, tensor in Tied().state_dict().items() if name != "head.weight"}
    trainer = Trainer(TASK, split_in(2), numbers=False)
    for wrong, words in [
        ({"embedding.weight": None}, "it lacks embedding.weight of shape"),
        (
            {"blocks.0.inner.weight": torch.zeros(8, 9)},
            r"blocks.0.inner.weight has .* shape \(8, 9\), but .* \(8, 8\)",
        ),
        (
            {"blocks.0.inner.bias": torch.zeros(8, dtype=torch.int64)},
            "blocks.0.inner.bias has dtype torch.int64",
        ),
    ]:
        given = {name: tensor for name, tensor in {**tensors, **wrong}.items() if tensor is not None}
        safetensors.torch.save_file(given, tmp_path / "model.safetensors")
        with pytest.raises(FileError, match=words):
            trainer.load_weights(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(FileError, match="is not a safetensors file"):
        trainer.load_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    for places in ({"embedding.weight": "../x.safetensors"}, {"embedding.weight": 3}, [], None):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(FileError, match="is not an index of a sharded model"):
            trainer.load_weights(tmp_path)
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(FileError, match="is not a regular file"):
        trainer.load_weights(tmp_path)
    for name in ("nowhere.safetensors", "x" * 300):
        with pytest.raises(FileError, match="does not exist"):
            trainer.load_weights(tmp_path / name)


@pytest.mark.parametrize("name", ["nowhere", "empty", "none.safetensors"])
def test_weights_that_are_not_there_are_told_before_a_worker_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing file, a folder without a model and an invalid file are reported before a worker starts."""
    monkeypatch.setattr(restarts, "launch", lambda *_, **__: pytest.fail("workers start"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.safetensors").write_bytes(b"none")
    with pytest.raises(FileError, match=r"does not exist|cannot be read|is not a safetensors file"):
        train(partial(watched, ""), split_in(2), steps=1, weights=tmp_path / name)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model"])
def test_a_full_disk_is_told_in_the_systems_words(saved: Path, tmp_path: Path, name: str) -> None:
    """A full disk is reported in the system's words, and the partial file is removed. A process limit stands
    for the disk.
    """
    with full_disk(1024), pytest.raises(FileError, match=f"{name} cannot be written: File too large"):
        export(saved, tmp_path / name)
    assert os.listdir(tmp_path) == ["runs"]


@pytest.mark.parametrize("shard_bytes", [1 << 30, 600])
def test_a_folder_is_written_as_hugging_face_does(saved: Path, tmp_path: Path, shard_bytes: int) -> None:
    """A folder is exported in Hugging Face's layout, in one file or several with an index, none above the
    size limit, and training starts from it.
    """
    nbytes = export(saved, tmp_path / "model", shard_bytes=shard_bytes)
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    if shard_bytes == 600:
        index = json.loads((tmp_path / "model" / files.pop()).read_text())
        assert index["metadata"] == {"total_size": nbytes}
        assert sorted(set(index["weight_map"].values())) == files
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    else:
        assert files == ["model.safetensors"]
    found = [safetensors.torch.load_file(tmp_path / "model" / file) for file in files]
    assert all(sum(tensor.nbytes for tensor in own.values()) <= shard_bytes for own in found)
    assert sum(tensor.nbytes for own in found for tensor in own.values()) == nbytes
    other = Trainer(TASK, split_in(3), seed=9, numbers=False)
    other.load_weights(tmp_path / "model")
    assert dict.fromkeys(other.state_dict(), True) == {
        name: torch.equal(tensor, other.state_dict()[name]) for name, tensor in load_state_dict(saved).items()
    }
    with pytest.raises(FileError, match="already exists: name a new folder"):
        export(saved, tmp_path / "model")


@pytest.mark.gallery
def test_transformers_takes_up_an_exported_folder(tmp_path: Path) -> None:
    """`from_pretrained` loads an exported folder of a trained GPT-2 next to its configuration."""
    build = PRETRAINED["gpt2"].build
    task = Task(build, batch=lambda size: (PRETRAINED["gpt2"].inputs(size), None), loss=None, optimizer=ADAMW)
    costs = profile(task, microbatch_size=2, threads=torch.get_num_threads())
    plan = plan_of(task, [2, len(costs.layers) - 2], profiled=costs)
    trainer = Trainer(task, plan, numbers=False)
    trainer.step(batch_of(task, plan, 0))
    trainer.save(tmp_path / "runs", background=False)
    export(tmp_path / "runs", tmp_path / "model", shard_bytes=1 << 12)
    original: Any = build()
    original.config.save_pretrained(tmp_path / "model")
    found = type(original).from_pretrained(tmp_path / "model")
    assert all(torch.equal(tensor, trainer.state_dict()[name]) for name, tensor in found.state_dict().items())


def test_an_export_that_is_stopped_leaves_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export interrupted by Ctrl-C during the flush leaves no file."""

    def stop(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        export(saved, tmp_path / "model.safetensors")
    assert not list(tmp_path.glob("*model*"))


def test_what_another_process_of_our_number_has_left_is_no_obstacle(saved: Path, tmp_path: Path) -> None:
    """Leftovers of a killed process with the same pid, as in containers, do not prevent an export."""
    (tmp_path / f".model.safetensors.{os.getpid()}.tmp").touch()
    export(saved, tmp_path / "model.safetensors")
    assert len(list(tmp_path.glob(".model*"))) == 1


def test_an_export_to_another_kind_of_file_is_refused(saved: Path, tmp_path: Path) -> None:
    """An export with an unknown suffix is refused; the error names both kinds, and nothing is written."""
    with pytest.raises(UsageError, match=r"is neither a .safetensors nor a .pt file, nor a folder"):
        export(saved, tmp_path / "model.bin")
    assert not (tmp_path / "model.bin").exists()
