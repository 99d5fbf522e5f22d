"""The manifest of a checkpoint: what was trained how far, and which tensor lies in which shard.

A checkpoint is a folder of safetensors shards, one for each worker, and `manifest.json`:

    {"pipefit": "checkpoint", "version": 2, "sha256": "...", "step": 800, "owner": {...}, "shards": [...], ...}

The digest is that of all bytes behind it, so that a manifest that a disk has damaged is refused.
Each worker writes a `Part`: its own shard and what only its stages know. The first worker joins the parts into a
`Manifest`. Tensors, parameter groups and the scheduler's state go by the names of the original module, so that a
manifest does not depend on stages. It is data: it names no code, and no file outside its folder.
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
from pipefit.schema.json_text import JsonText, Refusal, adapter
from pipefit.schema.profile import Fingerprint
from pipefit.schema.validation import parsed, sentence

VERSION = 2
SHARD = re.compile(r"worker-\d{5}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEADER = frozenset({"pipefit", "version", "sha256"})
_END = '"\n}'  # of the header, behind the digest
_LARGEST = 1 << 60  # bytes; no tensor and no file has as many
_MOST_DIMENSIONS = 64  # as torch has it

Scalar = bool | int | float | str | None
Setting = Scalar | tuple[Scalar, ...]
Kind = Literal["model", "held", "master", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor: of which parameter or buffer it is what, and where it lies.

    `kind` says what it is: a parameter or buffer of the `model`; one `held` by a layer, which no state dict has; a
    `master` copy of a parameter; or the `optimizer`'s, by its name there, `state`.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    kind: Kind
    state: str = ""
    shard: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """The tensor's name in its shard."""
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

    __pydantic_config__ = {"extra": "forbid"}

    file: str
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not SHARD.fullmatch(self.file):
            raise UsageError(f"{self.file!r} is not the name of a shard, such as worker-00000.safetensors")
        if not _DIGEST.fullmatch(self.sha256) or not 0 < self.nbytes < _LARGEST:
            raise UsageError(f"{self.file} has no SHA-256 of 64 hexadecimal digits, or no size in bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStage:
    """A stage that was trained: its layers, its device, and how many batches it has taken, by which its draws go."""

    __pydantic_config__ = {"extra": "forbid"}

    start: int
    stop: int
    device: int
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleState:
    """The loss scale, and for how many steps nothing has overflowed."""

    __pydantic_config__ = {"extra": "forbid"}

    value: float
    quiet: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """The options of the parameter group that these parameters are in, and what the scheduler keeps for the group."""

    __pydantic_config__ = {"extra": "forbid"}

    parameters: tuple[str, ...]
    options: dict[str, Setting]
    scheduled: dict[str, Setting]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNumbers:
    """What the optimizer keeps for a parameter besides tensors."""

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    values: dict[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one worker contributes: its shard, and the settings of its stages.

    `scheduler` is what a scheduler keeps for all groups together; None where no stage has one.
    """

    __pydantic_config__ = {"extra": "forbid"}

    shard: Shard
    tensors: tuple[StoredTensor, ...]
    stages: tuple[TrainedStage, ...]
    groups: tuple[GroupSettings, ...]
    numbers: tuple[ParameterNumbers, ...]
    scheduler: dict[str, Setting] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. `step` is the number of batches taken so far: the place in the data. `owner` is the run
    that saved it, at `saved_seconds` since 1970.

    `aliases` are pairs of names of one tied tensor: another name, and the one under which it is stored. `plan` is a
    digest of the plan that was trained.

    Raises:
        UsageError: a tensor is there twice, in no shard, or of an impossible shape or dtype.
    """

    __pydantic_config__ = {"extra": "forbid"}

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
            raise UsageError(f"it has no step or seed that can be: {self.step}, {self.seed}")
        if not 0 <= self.saved_seconds < 1 << 40:
            raise UsageError(f"it was saved at a time, not at {self.saved_seconds}")
        _check_once("shard", [shard.file for shard in self.shards])
        _check_once("tensor", [tensor.key for tensor in self.tensors])
        _check_once("name", [name for name, _ in self.aliases])
        for tensor in self.tensors:
            _check_tensor(tensor, len(self.shards))

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of all tensors of a kind."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.kind == kind)


def tensor_key(kind: Kind, name: str, state: str = "") -> str:
    """The name of a tensor in a shard: a parameter's or buffer's own, or one such as `optimizer/fc.weight/exp_avg`."""
    if kind == "model":
        return name
    return f"{kind}/{name}/{state}" if kind == "optimizer" else f"{kind}/{name}"


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name, such as `float32`.

    Raises:
        UsageError: there is none, or none that a checkpoint holds.
    """
    if name not in DTYPES:
        raise UsageError(f"{name!r} is not a dtype that a checkpoint can hold: {', '.join(DTYPES)}")
    found: torch.dtype = getattr(torch, name)
    return found


DTYPES = {  # by torch's name, safetensors' own
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip


def dumps(document: Manifest | Part) -> str:
    """The JSON text of a manifest or a part.

    Raises:
        FileError: a number in it is not finite, or a text in it cannot be written.
    """
    kind: Any = type(document)
    body = adapter(kind).dump_python(document, mode="python", warnings="none")
    try:
        rest = json.dumps(body, indent=1, allow_nan=False).removeprefix("{")
    except ValueError as error:
        raise FileError(f"the checkpoint cannot be written: {error}") from None
    header = json.dumps({"pipefit": _kind(kind), "version": VERSION, "sha256": _digest(f'",{rest}'.encode())}, indent=1)
    return f'{header.removesuffix(_END)}",{rest}'


def loads(content: bytes, kind: type[Manifest] | type[Part], source: str) -> Manifest | Part:
    """The manifest or part that `content` holds.

    Raises:
        UnreadableCheckpoint: it holds one of another version.
        FileError: it holds none, or a damaged one: what, and where.
    """
    try:
        content.decode()  # and thrown away: the pieces that are read are bytes
        text = JsonText(content)
        header = text.header(*_HEADER)
    except UnicodeDecodeError as error:
        raise FileError(f"{source} is not text: byte {error.start} is not UTF-8") from None
    except Refusal as refusal:
        raise FileError(sentence(refusal, source)) from None
    if header.get("pipefit") != _kind(kind):
        raise FileError(f"{source} is not the manifest of a checkpoint; name a folder that pipefit has saved")
    if header.get("version") != VERSION or type(header["version"]) is not int:
        raise UnreadableCheckpoint(
            f"{source} is not of version {VERSION}, which this pipefit reads: load the checkpoint with the pipefit "
            "that has saved it"
        )
    digest = header.get("sha256")
    if (
        not isinstance(digest, str)
        or not _DIGEST.fullmatch(digest)
        or _digest(content.partition(digest.encode())[2]) != digest
    ):
        raise FileError(f"{source} is damaged: its bytes are not those that were saved (their SHA-256 differs)")
    return parsed(kind, text, source, ignored=_HEADER)


def joined_settings(known: Sequence[dict[str, Setting]]) -> dict[str, Setting] | None:
    """What the schedulers of several stages keep for all groups together, which is the same; None without any.

    Raises:
        UsageError: it differs between stages; names what.
    """
    for other in known[1:]:
        unlike = [name for name in dict.fromkeys(chain(known[0], other)) if known[0].get(name) != other.get(name)]
        if unlike:
            raise UsageError(
                f"the scheduler's {unlike[0]} differs between stages, so no other plan could go on with it: keep in it "
                "what does not depend on a stage, or save without a scheduler"
            )
    return known[0] if known else None


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def _kind(kind: type[Manifest] | type[Part]) -> str:
    return "checkpoint" if kind is Manifest else "checkpoint part"


def _check_once(what: str, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"the {what} {twice[0]!r} is there twice")


def _check_tensor(tensor: StoredTensor, shards: int) -> None:
    if not 0 <= tensor.shard < shards:
        raise UsageError(f"{tensor.key!r} is in shard {tensor.shard}, and there are {shards}")
    if any(length < 0 for length in tensor.shape) or len(tensor.shape) > _MOST_DIMENSIONS or tensor.nbytes >= _LARGEST:
        raise UsageError(f"{tensor.key!r} has a shape that no tensor has")
