"""Checkpoints for plain PyTorch: a checkpoint's state dict, and weights from other safetensors files.

    module.load_state_dict(pipefit.checkpoints.load_state_dict("runs/step-00000800"))

Weights come from one safetensors file, or from a sharded model in Hugging Face's layout: a folder with
`model.safetensors.index.json`, or this index file. Only the requested tensors are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipefit.checkpoints.folders import Candidates
from pipefit.checkpoints.shards import write_tensors
from pipefit.errors import DamagedCheckpoint, FileError, UsageError
from pipefit.schema.file_access import content, path_of, temporary_of
from pipefit.texts import printable, shortened

# ---- Models in Hugging Face's layout
# A folder of safetensors files with an index of their tensors, for `from_pretrained` together with the
# model's `config.json`. A model that fits one file is written without an index.

INDEX = "model.safetensors.index.json"
LARGEST_SHARD_BYTES = 5 << 30  # of a file, unless one tensor is larger


def write_model(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """Write `tensors` to a new folder, flushed to the disk.

    Raises:
        OSError: the system refuses, as on a full disk.
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
    """Remove a file, or a folder that `write_model` has begun, as far as the system allows."""
    with suppress(OSError):
        if path.is_dir():
            for name in os.listdir(path):
                (path / name).unlink()
            path.rmdir()
        else:
            path.unlink()


def _parts(tensors: Mapping[str, Tensor], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in order, in parts of at most `shard_bytes`; a larger tensor is a separate part."""
    part, nbytes = dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if part and nbytes + tensor.nbytes > shard_bytes:
            yield part
            part, nbytes = {}, 0
        part[name] = tensor
        nbytes += tensor.nbytes
    yield part


# ---- Reading and writing

_LARGEST_INDEX = 64 << 20


def load_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return parameters and buffers of a checkpoint by original names.

    `path` is the checkpoint, or a folder whose newest checkpoint is meant. Tied parameters have all of their
    names, as in a module's state dict. All read shards are verified; in a folder of checkpoints, damaged ones
    are skipped with a warning.

    Raises:
        FileError: there is no whole checkpoint, or it is damaged.
    """
    candidates = Candidates(path)
    while True:
        manifest = candidates.take().manifest
        try:
            tensors = candidates.take().read(
                [tensor for tensor in manifest.tensors if tensor.kind == "model"]
            )
        except DamagedCheckpoint as error:
            candidates.pass_over(error)
        else:
            return tensors | {name: tensors[stored] for name, stored in manifest.aliases if stored in tensors}


def export(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, shard_bytes: int = LARGEST_SHARD_BYTES
) -> int:
    """Write the parameters and buffers of a checkpoint to files for other programs; return their bytes.

    `output` is a `.safetensors` file, a `.pt` file, or a new folder, which gets Hugging Face's layout, in
    files of at most `shard_bytes`. A tied parameter is written to safetensors files once, under its first
    name.

    Raises:
        FileError: the checkpoint cannot be read, or the output cannot be written.
        UsageError: the output is none of these.
    """
    target = Path(output)
    if target.suffix not in (".safetensors", ".pt", ""):
        raise UsageError(
            f"{printable(target)} is neither a .safetensors nor a .pt file, nor a folder: use one of these"
        )
    if not target.suffix and os.path.lexists(target):
        raise FileError(f"{printable(target)} already exists: name a new folder for the model")
    tensors = load_state_dict(path)
    once = dict(
        list({id(tensor): (name, tensor) for name, tensor in reversed(tensors.items())}.values())[::-1]
    )
    temporary = temporary_of(target)
    try:
        if target.suffix == ".pt":
            _write_pickle(temporary, {name: tensor.clone() for name, tensor in tensors.items()})
        elif target.suffix:
            write_tensors(temporary, once)
        else:
            write_model(temporary, once, shard_bytes)
        temporary.replace(target)
    except OSError as error:
        raise FileError(f"{printable(target)} cannot be written: {error.strerror}") from None
    finally:
        remove_model(temporary)
    return sum(tensor.nbytes for tensor in once.values())


def _write_pickle(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a new file with `torch.save`, flushed to the disk.

    Raises:
        OSError: the system refuses, as on a full disk; torch's error would only name a position in the file.
    """
    with path.open("xb") as file:
        try:
            torch.save(dict(tensors), file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def load_weights(path: str | os.PathLike[str], names: Iterable[str]) -> dict[str, Tensor]:
    """Return those of the tensors `names` that the safetensors file or sharded model in `path` holds.

    Raises:
        FileError: the file does not exist, or it is damaged.
    """
    wanted, result = set(names), dict[str, Tensor]()
    for file in _files(path_of(path), wanted):
        result |= _read(file, wanted)
    return result


def _files(path: Path, wanted: set[str]) -> Sequence[Path]:
    """Return the files that hold some of the tensors `wanted`."""
    if os.path.isdir(path):
        single = path / "model.safetensors"
        path = single if os.path.isfile(single) else path / INDEX
    if path.name.endswith(".index.json"):
        return [
            path.parent / file for file in dict.fromkeys(f for n, f in _index(path).items() if n in wanted)
        ]
    return [path]


def _index(path: Path) -> Mapping[str, str]:
    """Return the file of each tensor from an index in Hugging Face's format."""
    source = printable(path)
    try:
        result = json.loads(content(path, source, _LARGEST_INDEX, "an index of tensors has"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FileError(f"{source} is not an index of a sharded model: it lacks weight_map") from None
    if not isinstance(result, dict) or not all(_is_file_name(file) for file in result.values()):
        raise FileError(
            f"{source} is not an index of a sharded model: its weight_map must name files in the same folder"
        )
    return result


def _is_file_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and os.path.basename(name) == name
        and "\0" not in name
    )


def _read(path: Path, wanted: set[str]) -> dict[str, Tensor]:
    source = printable(path)
    if not os.path.isfile(path):
        raise FileError(
            f"file {source} does not exist: weights are a .safetensors file, or a folder with {INDEX}"
        )
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if name in wanted}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FileError(f"{source} is not a safetensors file: {printable(shortened(str(error)))}") from None
