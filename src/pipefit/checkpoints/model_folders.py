"""Weights as Hugging Face lays them out: a folder of safetensors files, with an index that says what is in which.

Good for `from_pretrained`, beside the model's own `config.json`. A model that fits one file is that file alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from pipefit.checkpoints.shards import write_tensors

INDEX = "model.safetensors.index.json"
LARGEST_SHARD_BYTES = 5 << 30  # of a file, unless one tensor is larger


def write_model(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """Write `tensors` to a new folder, flushed to the disk.

    Raises:
        OSError: the system does not let us, as on a full disk.
    """
    folder.mkdir()
    parts = list(_parts(tensors, shard_bytes))
    names = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = ["model.safetensors"]
    for name, part in zip(names, parts, strict=True):
        write_tensors(folder / name, part)
    if len(parts) > 1:
        places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = sum(tensor.nbytes for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
        with (folder / INDEX).open("x", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())


def remove_model(path: Path) -> None:
    """Remove a file, or a folder that `write_model` has begun, as far as the system lets us."""
    with suppress(OSError):
        if path.is_dir():
            for name in os.listdir(path):
                (path / name).unlink()
            path.rmdir()
        else:
            path.unlink()


def _parts(tensors: Mapping[str, Tensor], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in their order, in parts of at most so many bytes; a larger one is a part of its own."""
    part, nbytes = dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if part and nbytes + tensor.nbytes > shard_bytes:
            yield part
            part, nbytes = {}, 0
        part[name] = tensor
        nbytes += tensor.nbytes
    yield part
