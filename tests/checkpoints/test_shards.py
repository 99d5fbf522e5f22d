"""Shards: pipefit and the safetensors package read each other's files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from pipefit.checkpoints.manifest import DTYPES, StoredTensor
from pipefit.checkpoints.shards import read_shard, write_shard


def tensors() -> dict[str, Tensor]:
    """Return tensors of every dtype, with zero and many elements, some of them views."""
    torch.manual_seed(0)
    found = {name: (torch.randn(3, 5) * 20).to(getattr(torch, name)) for name in DTYPES}
    base = torch.randn(6, 7)
    return found | {
        "a number": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1, 4).expand(3, 4),
        'with "quotes" and \u00fc': torch.arange(4),
    }


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are equal bit by bit, NaNs included."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    """The safetensors package reads our names, dtypes, shapes and bits; size and hash are the file's."""
    written, progress = tensors(), list[int]()
    shard = write_shard(tmp_path / "worker-00000.safetensors", written, progress.append)
    found = safetensors.torch.load_file(tmp_path / "worker-00000.safetensors")
    assert found.keys() == written.keys()
    assert all(same(found[name], tensor) for name, tensor in written.items())
    content = (tmp_path / shard.file).read_bytes()
    assert (shard.nbytes, shard.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert sum(progress) == len(content)


def test_what_was_written_can_still_be_moved_away(tmp_path: Path) -> None:
    """A written tensor can still be offloaded, because no numpy array keeps its memory."""
    tensor = torch.randn(4)
    write_shard(tmp_path / "worker-00000.safetensors", {"a": tensor, "b": tensor[1:]})
    assert tensor.untyped_storage().resizable()


def test_a_shard_is_read_slice_by_slice(tmp_path: Path) -> None:
    """A shard is read slice by slice: only the requested tensors are returned, unchanged."""
    shard = write_shard(tmp_path / "worker-00000.safetensors", tensors())
    wanted = [
        StoredTensor(name=name, kind="model", shard=0, dtype=name, shape=(3, 5))
        for name in ("int8", "bfloat16")
    ]
    found = read_shard(tmp_path, shard, wanted)
    assert found.keys() == {"int8", "bfloat16"}
    assert all(same(found[name], tensors()[name]) for name in found)


@pytest.mark.parametrize("count", [0, 1])
def test_a_worker_without_tensors_has_a_shard_too(tmp_path: Path, count: int) -> None:
    """A worker without tensors saves an empty shard."""
    written = dict(list(tensors().items())[:count])
    write_shard(tmp_path / "worker-00000.safetensors", written)
    assert safetensors.torch.load_file(tmp_path / "worker-00000.safetensors").keys() == written.keys()
