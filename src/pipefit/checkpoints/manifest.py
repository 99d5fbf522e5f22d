"""Manifest of a checkpoint: the progress of the training, and the shard of each tensor.

A checkpoint is a folder of safetensors shards, one for each worker, and `manifest.json`:

    {"pipefit": "checkpoint", "version": 2, "sha256": "...", "step": 800, "shards": [...], ...}

The digest covers all bytes after it, so that a manifest damaged on the disk is rejected. Each worker writes a
`Part`: its shard and the settings of its stages. The first worker joins the parts into a `Manifest`. Tensors,
parameter groups and the scheduler's state have names of the original module, so a manifest does not depend on
stages. It is data: it names no code, and no file outside its folder.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Any, Literal

import torch

from pipefit.checkpoints.hold import Owner
from pipefit.errors import FileError, UnreadableCheckpoint, UsageError
from pipefit.schema.json_text import adapter, checked, json_object
from pipefit.schema.profile import Fingerprint

VERSION = 2
SHARD = re.compile(r"worker-\d{5}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_END = '"\n}'  # end of the header, after the digest
_LARGEST = 1 << 60  # bytes; above all sizes of tensors and files
_MOST_DIMENSIONS = 64  # torch's limit

Scalar = bool | int | float | str | None
Setting = Scalar | tuple[Scalar, ...]
Kind = Literal["model", "held", "master", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor: its name and kind, and its shard.

    `kind` is `model` for a parameter or buffer; `held` for a tensor of a layer that is in no state dict;
    `master` for a float32 copy of a parameter; or `optimizer` for an optimizer tensor, called `state` there.
    """

    name: str
    kind: Kind
    state: str = ""
    shard: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """Name of the tensor in its shard."""
        return tensor_key(self.kind, self.name, self.state)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        count = 1
        for length in self.shape:
            count *= length
        return count * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A file of a worker's tensors."""

    file: str
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not SHARD.fullmatch(self.file):
            raise UsageError(f"{self.file!r} is not the name of a shard, such as worker-00000.safetensors")
        if not _DIGEST.fullmatch(self.sha256) or not 0 < self.nbytes < _LARGEST:
            raise UsageError(f"{self.file} lacks a SHA-256 of 64 hexadecimal digits or a valid size in bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStage:
    """A trained stage: its layers, its device, and the number of batches trained, on which its draws
    depend.
    """

    start: int
    stop: int
    device: int
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleState:
    """The loss scale, and the number of steps since the last overflow or change."""

    value: float
    quiet: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Options of the parameter group with these parameters, and the scheduler's settings for the group."""

    parameters: tuple[str, ...]
    options: dict[str, Setting]
    scheduled: dict[str, Setting]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNumbers:
    """Non-tensor optimizer state of a parameter."""

    name: str
    values: dict[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One worker's part of a checkpoint: its shard, and the settings of its stages.

    `scheduler` has the scheduler's settings common to all groups; None without a scheduler.
    """

    shard: Shard
    tensors: tuple[StoredTensor, ...]
    stages: tuple[TrainedStage, ...]
    groups: tuple[GroupSettings, ...]
    numbers: tuple[ParameterNumbers, ...]
    scheduler: dict[str, Setting] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of a checkpoint. `step` is the number of batches trained: the position in the data.

    `owner` is the run that saved it, at `saved_seconds` since 1970. `aliases` are pairs of names of a tied
    tensor: another name, and the stored one. `plan` is a digest of the trained plan.

    Raises:
        UsageError: a tensor appears twice, is in no shard, or has an impossible shape or dtype.
    """

    pipefit_version: str
    torch_version: str
    owner: Owner
    saved_seconds: float
    step: int
    seed: int
    model: Fingerprint
    plan: str
    schedule: str
    stages: tuple[TrainedStage, ...]
    loss_scale: ScaleState | None
    shards: tuple[Shard, ...]
    tensors: tuple[StoredTensor, ...]
    aliases: tuple[tuple[str, str], ...]
    groups: tuple[GroupSettings, ...]
    numbers: tuple[ParameterNumbers, ...]
    scheduler: dict[str, Setting] | None

    def __post_init__(self) -> None:
        if not 0 <= self.step < _LARGEST or not -(1 << 63) <= self.seed < 1 << 63:
            raise UsageError(f"its step or seed is not valid: {self.step}, {self.seed}")
        if not 0 <= self.saved_seconds < 1 << 40:
            raise UsageError(f"its time of saving is not valid: {self.saved_seconds}")
        _check_once("shard", [shard.file for shard in self.shards])
        _check_once("tensor", [tensor.key for tensor in self.tensors])
        _check_once("name", [name for name, _ in self.aliases])
        for tensor in self.tensors:
            _check_tensor(tensor, len(self.shards))

    def bytes_of(self, kind: Kind) -> int:
        """Return the bytes of all tensors of a kind."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.kind == kind)


def tensor_key(kind: Kind, name: str, state: str = "") -> str:
    """Return a tensor's name in a shard.

    Parameters and buffers have their own names, other tensors names such as `optimizer/fc.weight/exp_avg`.
    """
    if kind == "model":
        return name
    return f"{kind}/{name}/{state}" if kind == "optimizer" else f"{kind}/{name}"


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name, such as `float32`.

    Raises:
        UsageError: there is none, or checkpoints cannot hold it.
    """
    if name not in DTYPES:
        raise UsageError(f"{name!r} is not a dtype that checkpoints support: {', '.join(DTYPES)}")
    result: torch.dtype = getattr(torch, name)
    return result


DTYPES = {  # torch's name: safetensors' name
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip


def dumps(document: Manifest | Part) -> str:
    """Return the JSON text of a manifest or a part.

    Raises:
        FileError: a number in it is not finite, or a text in it cannot be written.
    """
    kind: Any = type(document)
    body = adapter(kind).dump_python(document, mode="python", warnings="none")
    try:
        rest = json.dumps(body, indent=1, allow_nan=False).removeprefix("{")
    except ValueError as error:
        raise FileError(f"the checkpoint cannot be written: {error}") from None
    header = json.dumps(
        {"pipefit": _kind(kind), "version": VERSION, "sha256": _digest(f'",{rest}'.encode())}, indent=1
    )
    return f'{header.removesuffix(_END)}",{rest}'


def loads(content: bytes, kind: type[Manifest] | type[Part], source: str) -> Manifest | Part:
    """Return the manifest or part in `content`.

    Raises:
        UnreadableCheckpoint: it is of another version.
        FileError: `content` is something else, or damaged: the message has the reason and the place.
    """
    data = json_object(content, source)
    header = {name: data.pop(name, None) for name in ("pipefit", "version", "sha256")}
    if header["pipefit"] != _kind(kind):
        raise FileError(f"{source} is not the manifest of a checkpoint: name a folder saved by pipefit")
    if header["version"] != VERSION or type(header["version"]) is not int:
        raise UnreadableCheckpoint(
            f"{source} is not of version {VERSION}, which this pipefit reads: load the checkpoint with the "
            "pipefit that saved it"
        )
    digest = header["sha256"]
    if (
        not isinstance(digest, str)
        or not _DIGEST.fullmatch(digest)
        or _digest(content.partition(digest.encode())[2]) != digest
    ):
        raise FileError(f"{source} is damaged: its SHA-256 differs from the saved one")
    return checked(kind, data, source)


def joined_settings(known: Sequence[dict[str, Setting]]) -> dict[str, Setting] | None:
    """Return the settings common to the schedulers of several stages, which must be equal; None without any.

    Raises:
        UsageError: they differ between stages; names one.
    """
    for other in known[1:]:
        unlike = [
            name for name in dict.fromkeys(chain(known[0], other)) if known[0].get(name) != other.get(name)
        ]
        if unlike:
            raise UsageError(
                f"the scheduler's {unlike[0]} differs between stages, so no other plan could resume it: "
                "keep only values in it that do not depend on the stage, or save without a scheduler"
            )
    return known[0] if known else None


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def _kind(kind: type[Manifest] | type[Part]) -> str:
    return "checkpoint" if kind is Manifest else "checkpoint part"


def _check_once(what: str, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"the {what} {twice[0]!r} occurs twice")


def _check_tensor(tensor: StoredTensor, shards: int) -> None:
    if not 0 <= tensor.shard < shards:
        raise UsageError(f"{tensor.key!r} is in shard {tensor.shard}, but there are {shards}")
    if (
        any(length < 0 for length in tensor.shape)
        or len(tensor.shape) > _MOST_DIMENSIONS
        or tensor.nbytes >= _LARGEST
    ):
        raise UsageError(f"{tensor.key!r} has an impossible shape")
