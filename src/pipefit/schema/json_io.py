"""Documents as versioned JSON files: `save(plan, "plan.json")`, `load("plan.json", Plan)`.

A document is one object: its kind, its version, and the fields of the dataclass.

    {"pipefit": "plan", "version": 2, "profile": {...}, "cluster": {...}, ...}

Loading checks everything: a file that loads is a valid document, and any other file fails with one sentence
that says what is wrong and where. Files have at most `LARGEST_BYTES`. Nothing in a file names code. Saving
replaces a file atomically. Clusters may also be TOML, a name, or emulated: `load_cluster`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NotRequired, TypeVar, overload

from typing_extensions import TypedDict

from pipefit.errors import FileError, UsageError
from pipefit.schema import file_access
from pipefit.schema.cluster import Cluster, parse_emulated
from pipefit.schema.file_access import obstacle, replace_file
from pipefit.schema.json_text import adapter, checked, json_object, utf8_text
from pipefit.schema.plan import LoopPlan, Plan
from pipefit.schema.post_mortem import PostMortem
from pipefit.schema.presets import is_preset
from pipefit.schema.profile import ModelProfile
from pipefit.schema.program import Program, parse_program
from pipefit.schema.trace import Trace
from pipefit.schema.validation import instance
from pipefit.texts import kind_of, printable, shortened
from pipefit.units import parse_rate

# ---- JSON answers: the fields that commands print with `--json` if the answer is not a document.
#
# `docs/schemas` has the JSON Schemas of answers and of documents. Sizes end in `bytes`, times in `seconds`;
# None means unknown or absent.


class Tried(TypedDict):
    """One value that was tried; `fits` says whether its plan does.

    If `certified`, the bytes are those of a dry run. `over_bytes` is negative if the value fits.
    """

    value: int
    fits: bool
    certified: bool
    parameters: int
    peak_bytes: list[int]
    device: int
    stage: int
    blocks: list[str]
    budget_bytes: int
    over_bytes: int


class Rate(TypedDict):
    """The fastest plan that was found."""

    microbatch_size: int
    samples_per_second: float


class OnDevices(TypedDict):
    """The capacity of a number of devices: the largest microbatch for `kept`, `recomputed` and `moved`.

    Sizes are 0 if no plan that fits was found.
    """

    devices: int
    one_sample: Tried
    largest_microbatch: dict[str, int]
    fastest: Rate | None


class OfPrecision(TypedDict):
    """The memory of one sample on one device, in one precision."""

    precision: str
    state_bytes: int
    need_bytes: int
    fewest_devices: int | None


class OfReplicas(TypedDict):
    """The memory of the fullest device if each device has the whole model and computes one sample.

    If `is_bound`, `need_bytes` is a lower bound. Samples per second are None if the plan does not fit.
    """

    way: str
    recompute: bool
    need_bytes: int
    is_bound: bool
    samples_per_second: float | None


class OfRanks(TypedDict):
    """A plan whose layers are divided between tensor-parallel ranks, with `sequences` along positions too."""

    ranks: int
    sequences: bool
    need_bytes: int
    fits: bool


class FitAnswer(TypedDict):
    """`pipefit fit`."""

    model: str
    parameters: int
    cluster: str
    fits: bool
    schedule: str
    microbatches_for_each_device: float
    microbatch_sizes: list[int]
    devices: list[OnDevices]
    precisions: list[OfPrecision]
    replicated: list[OfReplicas]
    divided: OfRanks | None
    impossible: str
    filled: dict[str, int]


class GrowthAnswer(TypedDict):
    """`pipefit fit --grow`; `refused` has the reason for each value that the model refuses.

    `impossible` has the proofs that values do not fit. For other values beyond `value`, no plan was found
    among those that `searched` names.
    """

    model: str
    cluster: str
    grow: str
    sense: Literal["largest", "smallest"]
    value: int
    parameters: int
    microbatches: int
    microbatch_size: int
    best: Tried
    beyond: Tried | None
    tried: list[Tried]
    refused: dict[str, str]
    impossible: dict[str, str]
    searched: str


class StepTime(TypedDict):
    """The step time of one document; `step_seconds` is None for a dry run."""

    source: str
    step_seconds: float | None
    estimated: bool


class ComparedDevice(TypedDict):
    """The peaks of a device; `difference` is relative to the measured peak."""

    device: int
    predicted_bytes: int
    measured_bytes: int
    difference_bytes: int
    difference: float | None


class CompareAnswer(TypedDict):
    """`pipefit compare`."""

    predicted: StepTime
    measured: StepTime
    devices: list[ComparedDevice]


class DifferentDevice(TypedDict):
    """The peaks of a device in both documents, and the difference in bytes by category.

    None if one document lacks the device.
    """

    device: int
    before_bytes: int | None
    after_bytes: int | None
    by_category: dict[str, int]


class ChangedLayers(TypedDict):
    """A changed run of layers: its first and last layer, the technique before and after.

    `tensors` lists saved tensors that move.
    """

    layers: list[str]
    before: str
    after: str
    why: str
    tensors: NotRequired[list[str]]


class DiffAnswer(TypedDict):
    """`pipefit diff`: pairs belong to the first and the second document."""

    asked: list[str]
    changes: list[ChangedLayers]
    devices: list[DifferentDevice]
    step_seconds: list[float | None]
    samples_per_second: list[float | None]
    busiest_device_computes: list[float | None]


class ErrorAnswer(TypedDict):
    """A failed command: its message and exit code; `result` has the partial result, if any."""

    error: str
    exit_code: int
    result: NotRequired[dict[str, object]]
    post_mortem: NotRequired[str]


ANSWERS = {
    "fit": FitAnswer,
    "fit-grow": GrowthAnswer,
    "compare": CompareAnswer,
    "diff": DiffAnswer,
    "error": ErrorAnswer,
}


__all__ = [
    "Document",
    "check_target",
    "dumps",
    "is_cluster",
    "load",
    "load_cluster",
    "save",
    "save_text",
    "schema",
]

Document = Cluster | LoopPlan | ModelProfile | Plan | PostMortem | Program | Trace
Loaded = TypeVar("Loaded", Cluster, LoopPlan, ModelProfile, Plan, PostMortem, Program, Trace)

LARGEST_BYTES = 256 << 20
LARGEST_TOML_BYTES = (
    128 << 10
)  # users write TOML; its parser needs a hundred times the size of a malicious text
MOST_ACTIONS = 1 << 18  # of a program in a file; reading them takes half a second
_OPEN = ("/dev/std", "/dev/fd/", "/proc/")  # files that a process has open, and may be writing to
_WORD = re.compile(r"\S+")
_MACHINES = re.compile(r"([0-9]{1,9})x([^@]+)@([^@]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramText:
    """A program in a file: the lines of its text form."""

    placement: tuple[tuple[int, ...], ...]
    microbatches: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of document: its type, the stored type, and the command that makes one."""

    document: Any  # a dataclass
    stored: Any  # a dataclass; pydantic reads and writes it
    maker: str
    version: int = 2


_KINDS = {
    "cluster": _Kind(Cluster, Cluster, "write a cluster file, or use a preset"),
    "profile": _Kind(ModelProfile, ModelProfile, "create one with pipefit profile"),
    "plan": _Kind(Plan, Plan, "create one with pipefit plan"),
    "program": _Kind(Program, ProgramText, "create one with pipefit.lower"),
    "trace": _Kind(Trace, Trace, "create one with pipefit simulate, certify or train"),
    "post-mortem": _Kind(PostMortem, PostMortem, "pipefit train and certify write one if memory runs out"),
    "loop-plan": _Kind(LoopPlan, LoopPlan, "make one with pipefit.apply"),
}


# ---------------------------------------------------------------- saving


def save(document: Document, path: str | os.PathLike[str]) -> None:
    """Write `document` to `path` as JSON, atomically: on any failure, an existing file is unchanged.

    Raises:
        FileError: the file cannot be written, or a number in the document is not finite.
    """
    save_text(dumps(document), path)


def save_text(text: str | bytes, path: str | os.PathLike[str]) -> None:
    """Write text or bytes to `path` atomically.

    Raises:
        FileError: the file cannot be written.
    """
    _check_place(path)
    try:
        replace_file(path, text.encode() if isinstance(text, str) else text)
    except OSError as error:
        raise FileError(f"{_named(path)} cannot be written: {_reason(error)}") from None


def dumps(document: Document) -> str:
    """Return the JSON text of `document`, as `save` writes it.

    Raises:
        FileError: a number in the document is not finite, or a program has more than `MOST_ACTIONS` actions.
    """
    name = name_of_kind(type(document))
    stored = _program_text(document) if isinstance(document, Program) else document
    kind = _KINDS[name]
    body = adapter(kind.stored).dump_python(stored, mode="python", warnings="none")
    indent = None if name in ("trace", "post-mortem") else 1  # traces are large, and read by programs
    try:
        text = json.dumps({"pipefit": name, "version": kind.version, **body}, indent=indent, allow_nan=False)
    except ValueError:
        raise FileError(f"this {name} cannot be written: it contains a number that is not finite") from None
    return f"{text}\n"


def check_target(path: str | os.PathLike[str]) -> None:
    """Check that a file can be written to `path`, before its contents are computed.

    Raises:
        FileError: its folder does not exist or cannot be written to, or `path` is a folder or a device.
    """
    if reason := obstacle(_check_place(path).parent):
        raise FileError(
            f"{_named(path)} cannot be written: a file cannot be created in its folder ({reason}); choose "
            "another folder"
        )


def _check_place(path: str | os.PathLike[str]) -> Path:
    """Return the resolved path of a result file.

    Raises:
        FileError: its folder does not exist, or `path` is a folder or a device.
    """
    source, target = _named(path), Path(os.path.realpath(path))
    if os.fspath(path) in ("", "-") or os.path.abspath(path).startswith(
        _OPEN
    ):  # even if it is redirected to a file
        raise FileError(
            f"{source} cannot be written: a result needs a separate file; name one such as result.json"
        )
    try:
        taken = target.exists() and not target.is_file()
    except (OSError, ValueError) as error:  # such as a name that is too long
        raise FileError(f"{source} cannot be written: {_reason(error)}") from None
    if taken:
        kind = "a folder" if target.is_dir() else "not a replaceable file"
        raise FileError(f"{source} cannot be written: it is {kind}; name a file such as result.json")
    if not target.parent.is_dir():
        raise FileError(
            f"{source} cannot be written: its folder does not exist; create {_named(target.parent)}"
        )
    return target


def _program_text(program: Program) -> ProgramText:
    lines = tuple(str(program).splitlines())
    if _words(lines) > MOST_ACTIONS:
        raise FileError(
            f"this program has more than {MOST_ACTIONS} actions, the limit of a file: save its plan instead"
        )
    return ProgramText(placement=program.placement, microbatches=program.microbatches, lines=lines)


def _words(lines: Iterable[str]) -> int:
    """Count the words, at most `MOST_ACTIONS + 1`, as an upper bound of the number of actions."""
    words = (word for line in lines for word in _WORD.finditer(line))
    return sum(1 for _ in islice(words, MOST_ACTIONS + 1))


# ---------------------------------------------------------------- loading


@overload
def load(path: str | os.PathLike[str]) -> Document: ...
@overload
def load(path: str | os.PathLike[str], type_: type[Loaded]) -> Loaded: ...
def load(path: str | os.PathLike[str], type_: type[Any] | None = None) -> Any:
    """Load the document in `path`, of type `type_` or of any kind.

    Raises:
        FileError: missing, too large, not JSON, of another version or kind, or invalid; says what is wrong
            and where.
    """
    source = _named(path)
    expected = None if type_ is None else name_of_kind(type_)
    content = file_access.content(path, source, LARGEST_BYTES, "documents have")
    data = json_object(content, source)
    name = _check_header(data.pop("pipefit", None), data.pop("version", None), source, expected)
    stored: Any = checked(_KINDS[name].stored, data, source)
    return _program(stored, source) if isinstance(stored, ProgramText) else stored


def is_cluster(text: str) -> bool:
    """Return whether a text has the form of a cluster: a preset, emulated devices, several machines, or a
    TOML file.
    """
    known = is_preset(text) or text.startswith("emulated:") or _MACHINES.fullmatch(text)
    return bool(known) or Path(text).suffix.lower() == ".toml"


def load_cluster(name_or_path: str) -> Cluster:
    """Load a cluster from a preset's name, `emulated:4x256MiB`, or a .toml or .json file.

    `16xdgx-a100@25GB/s` means sixteen machines in a network of 25 GB/s per device.

    Raises:
        UsageError: no preset has this name, or not an emulated cluster.
        FileError: the file cannot be used.
    """
    instance("name_or_path", name_or_path, str, "such as 4x-titan-rtx, emulated:2x64MiB or cluster.toml")
    if name_or_path.startswith("emulated:"):
        return parse_emulated(name_or_path)
    if several := _MACHINES.fullmatch(name_or_path):
        return load_cluster(several[2]).machines(int(several[1]), parse_rate(several[3]))
    suffix = Path(name_or_path).suffix.lower()
    if suffix == ".toml":
        source = _named(name_or_path)
        what = "a cluster in TOML (JSON may be larger) has"
        content = file_access.content(name_or_path, source, LARGEST_TOML_BYTES, what)
        return Cluster.parse(utf8_text(content, source), source)
    if suffix == ".json" or os.sep in name_or_path:
        return load(name_or_path, Cluster)
    return Cluster.preset(name_or_path)


def _check_header(name: object, version: object, source: str, expected: str | None) -> str:
    """Check the kind and version of a document, and return its kind."""
    if not isinstance(name, str) or name not in _KINDS:
        said = (
            f"it claims to be a {shortened(name)!r}"
            if isinstance(name, str)
            else 'it lacks the key "pipefit" with its kind'
        )
        raise FileError(
            f"{source} is JSON, but not a pipefit document: {said}; kinds are {', '.join(_KINDS)}"
        )
    if expected is not None and name != expected:
        raise FileError(f"{source} is a {name}, but a {expected} is needed: {_KINDS[expected].maker}")
    supported = _KINDS[name].version
    if type(version) is not int or version != supported:
        said = f"of version {version}" if type(version) is int else "without a version number"
        raise FileError(
            f"{source} is a {name} {said}, but this pipefit reads version {supported}: "
            f"{'use a newer pipefit' if type(version) is int and version > supported else _KINDS[name].maker}"
        )
    return name


def _program(stored: ProgramText, source: str) -> Program:
    """Parse a stored program."""
    if _words(stored.lines) > MOST_ACTIONS:
        raise FileError(
            f"{source} is not valid: it has more than {MOST_ACTIONS} actions, the limit of a file"
        )
    try:
        text = "\n".join(stored.lines)
        return parse_program(text, placement=stored.placement, microbatches=stored.microbatches)
    except UsageError as error:
        raise FileError(f"{source} is not valid: {error}") from None


# ---------------------------------------------------------------- names and schemas


def name_of_kind(type_: type) -> str:
    """Return the name of a kind of document in files and messages, such as `plan` for `Plan`.

    Raises:
        UsageError: the type is not a document.
    """
    for name, kind in _KINDS.items():
        if kind.document is type_:
            return name
    known = ", ".join(kind.document.__name__ for kind in _KINDS.values())
    what = f"a {type_.__name__}" if isinstance(type_, type) else kind_of(type_)
    raise UsageError(f"{what} is not a document; the documents are {known}")


def _named(path: str | os.PathLike[str]) -> str:
    """Format a path for a message.

    Raises:
        UsageError: not a path.
    """
    file_access.path_of(path)
    return printable(path) or "''"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of document, such as `plan`; unknown keys are refused."""
    kind = _KINDS[name]
    body: dict[str, Any] = adapter(kind.stored).json_schema()
    for part in (body, *body.get("$defs", {}).values()):
        if "properties" in part:
            part["additionalProperties"] = False
    header = {"pipefit": {"const": name}, "version": {"const": kind.version}}
    body["properties"] = header | body["properties"]
    body["required"] = [*header, *body["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "title": f"pipefit {name}"}


def schemas() -> dict[str, dict[str, Any]]:
    """Return all JSON Schemas by name: of documents, and of answers, such as `answer-fit`."""
    documents = {name: schema(name) for name in _KINDS}
    of_answers = {name: adapter(answer).json_schema() for name, answer in ANSWERS.items()}
    draft = "https://json-schema.org/draft/2020-12/schema"
    return documents | {f"answer-{name}": {"$schema": draft, **result} for name, result in of_answers.items()}


def write_schemas(folder: Path) -> None:
    """Write every schema to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in schemas().items():
        (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/schemas"))
