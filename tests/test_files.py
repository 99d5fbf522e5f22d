"""Documents on disk: a saved document loads equal; a wrong one is refused in one sentence that gives the
place.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.errors import FileError, UsageError
from pipefit.lowering import lower
from pipefit.schema import json_io
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.json_io import dumps, load, load_cluster, save
from pipefit.schema.layer_costs import Collective, Work
from pipefit.schema.plan import LoopDecision, LoopPlan, Objective, Plan, Prediction, Provenance
from pipefit.schema.post_mortem import PostMortem
from pipefit.schema.profile import ModelProfile, Shares, Whole
from pipefit.schema.program import Program, parse_program
from pipefit.schema.trace import AllocatorPeaks, DeviceTrace, Event, MemorySample, Stream, Trace
from support.pipelines import make_cluster, make_plan, random_profile

TRACE = Trace(
    source="simulated",
    steps=1,
    devices=(
        DeviceTrace(
            device=0,
            budget_bytes=100,
            events=(
                Event(step=0, action="0F0", stream=Stream.COMPUTE, start_seconds=0.1, end_seconds=1 / 3),
            ),
            memory=(MemorySample(step=0, action="0F0", seconds=0.1, bytes=(1, 2, 3, 4, 5, 6, 7, 8, 9)),),
        ),
    ),
    step_seconds=(1 / 3,),
)


DECISIONS = (
    Decision(
        stage=0,
        subject=Run(start=0, stop=1),
        what=What.RECOMPUTE,
        microbatches=Microbatches(taken=1, every=2, first=1),
        ahead=2,
        why="for this test",
    ),
)
MOVED = (
    Decision(
        stage=1,
        subject=SavedTensors(tensors=((2, 0), (3, 0))),
        what=What.OFFLOAD,
        place=parse_place("device0*2+host0*1"),
        behind=2,
    ),
    Decision(
        stage=0,
        subject=State(start=0, stop=2, kind="optimizer"),
        what=What.OFFLOAD,
        place=parse_place("host"),
    ),
)


def plan_of(
    *, layers: int = 6, seed: int = 0, split: tuple[int, ...] = (2, 4), schedule: str = "1f1b"
) -> Plan:
    """Return a plan with every optional part."""
    plan = make_plan(random_profile(layers, seed, shared=0), split, schedule=schedule, decisions=DECISIONS)
    made_by = Provenance(
        planner="hand",
        options={"a": 1, "b": 0.1, "c": True, "d": "x"},
        objective=Objective.PEAK,
        value=1.5,
        bound=None,
        evaluated=3,
        seconds=0.2,
    )
    return replace(plan, prediction=Prediction(peak_bytes=(1, 2), step_seconds=0.1), provenance=made_by)


PLAN = plan_of()
TOGETHER = Work(
    flops=1, moved_bytes=2, collectives=(Collective("all_reduce", 4), Collective("all_gather", 8))
)
ALONE = PLAN.profile.measurements[0]
WHOLE = Whole(
    layer="h.0", operator="linear", parameter_bytes=4, flops=8, reason="this operator is not supported"
)
SHARES = Shares(
    ranks=2, parameter_bytes=8, divided_bytes=4, rank_bytes=6, flops=16, divided_flops=8, whole=(WHOLE,)
)
DIVIDED = replace(ALONE, tensor=2, shares=SHARES, forms="0a", loss=replace(ALONE.loss, forward=TOGETHER))
DECIDED = replace(
    PLAN,
    profile=replace(PLAN.profile, measurements=(replace(ALONE, microbatch_size=2), ALONE, DIVIDED)),
    training=replace(PLAN.training, batch_size=2 * PLAN.training.microbatches),
    cluster=make_cluster(8),
    stages=(
        Stage(start=0, stop=2, grid=Grid(devices=(0, 1, 2, 3), data=2, tensor=2, shard="optimizer")),
        Stage(start=2, stop=6, grid=Grid.of(7)),
    ),
    decisions=(*DECISIONS, *MOVED),
    prediction=None,
)
BODY = parse_program(
    """
    device 0: 0LOAD0 0F0 0OFFLOAD0#0@device1*2+host0*1 0SEND_F0{0:2}@device1 0WAIT_SEND_F-1{0:2}@device1 0STEP-1
    device 1: 1RECV_F0{0:2} 1WAIT_RECV_F0{0:2} 1UNSHARD0 1WAIT_UNSHARD0 1I0 1W0
    device 2: 1LOAD0
    bundle 0: 0.1 2.0
    carried in 0: 0SEND_F-1{0:2}@device1
    carried in 1:
    carried in 2:
    carried out 0: 0OFFLOAD0#0@device1*2+host0*1 0SEND_F0{0:2}@device1
    carried out 1:
    carried out 2:
    """,
    placement=((0,), (1, 2)),
    microbatches=1,
)
DIED = PostMortem(
    plan=PLAN, trace=TRACE, device=0, moment=TRACE.devices[0].memory[0], asked_bytes=1, sentence="no room"
)
LOOP = LoopPlan(
    budget_bytes=9,
    peak_bytes=(7, 8),
    plain_bytes=(10, 11),
    decisions=(
        LoopDecision(name="h.0", technique="offload", moved=(0, 2), saved_bytes=3, seconds=0.5),
        LoopDecision(name="h.1", technique="recompute", buffers=("mean",)),
    ),
    step_seconds=1.0,
    refused=(("h.2", "it sets balance"),),
)
DOCUMENTS = [PLAN, PLAN.profile, PLAN.cluster, lower(PLAN), TRACE, DIED, LOOP]
IDS = ["plan", "profile", "cluster", "program", "trace", "post-mortem", "loop-plan"]
MAKERS = [
    "pipefit plan",
    "pipefit profile",
    "write a cluster file",
    "pipefit.lower",
    "pipefit simulate",
    "pipefit train",
    "pipefit.apply",
]


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, DECIDED, BODY], ids=[*IDS, "plan with decisions", "endless program"]
)
def test_what_is_saved_loads_equal(document: Any, tmp_path: Path) -> None:
    """Every kind of document comes back equal, with its type given or read from the file."""
    save(document, tmp_path / "it.json")
    assert load(tmp_path / "it.json") == document
    assert load(tmp_path / "it.json", type(document)) == document


@given(
    seed=st.integers(0, 10_000),
    layers=st.integers(2, 9),
    cut=st.integers(1, 8),
    schedule=st.sampled_from(["1f1b", "gpipe", "torchgpipe"]),
)
@settings(max_examples=40)
def test_any_plan_and_its_program_survive(
    tmp_path_factory: pytest.TempPathFactory, seed: int, layers: int, cut: int, schedule: str
) -> None:
    """Random plans, with pass-through values and shared storages, and their programs come back equal."""
    path = tmp_path_factory.mktemp("plans") / "it.json"
    first = min(cut, layers - 1)
    plan = plan_of(layers=layers, seed=seed, split=(first, layers - first), schedule=schedule)
    for document in (plan, lower(plan)):
        save(document, path)
        assert load(path) == document


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    """The first two keys are the kind and the version, and a program's lines are text."""
    save(lower(PLAN), tmp_path / "it.json")
    data = json.loads((tmp_path / "it.json").read_text())
    assert list(data)[:2] == ["pipefit", "version"]
    assert (data["pipefit"], data["version"]) == ("program", 2)
    assert data["lines"][0].split()[:4] == ["device", "0:", "0LOAD0", "0F0"]


def text_with(document: Any, **changes: Any) -> str:
    """Return a document's text with keys changed or added at the top."""
    return json.dumps(json.loads(dumps(document)) | changes)


def changed(document: Any, place: tuple[str | int, ...], value: Any) -> str:
    """Return a document's text with one value changed anywhere."""
    data = json.loads(dumps(document))
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return json.dumps(data)


NESTED: list[Any] = []
for _ in range(900):
    NESTED = [NESTED]
STAGE = {"start": 0, "stop": 6, "grid": {"devices": [0]}}
BAD: dict[str, tuple[str, type, list[str]]] = {
    "empty": ("", Plan, ["is empty"]),
    "blanks": (" \n ", Plan, ["is empty"]),
    "truncated": (dumps(PLAN)[:-20], Plan, ["is truncated"]),
    "cut off in a word": (dumps(PLAN)[: dumps(PLAN).index("false") + 3], Plan, ["is truncated"]),
    "cut off in a text": (dumps(PLAN)[: dumps(PLAN).index("synthetic") + 3], Plan, ["is truncated"]),
    "no JSON": ("layers: 3", Plan, ["not JSON", "line 1, column 1"]),
    "two documents": (dumps(PLAN) + dumps(PLAN), Plan, ["not JSON", "Extra data"]),
    "a list": ("[]", Plan, ["not a pipefit document"]),
    "another tool's": ('{"name": "x"}', Plan, ["not a pipefit document", '"pipefit"']),
    "unknown kind": (text_with(PLAN, pipefit="recipe"), Plan, ["recipe", "plan, program, trace"]),
    "long kind": (text_with(PLAN, pipefit="x" * 9000), Plan, ["'xxxxx", "...'; kinds are"]),
    "kind of wrong type": (text_with(PLAN, pipefit=["plan"]), Plan, ["not a pipefit document"]),
    "wrong kind": (dumps(PLAN.profile), Plan, ["is a profile", "a plan is needed", "pipefit plan"]),
    "newer version": (text_with(PLAN, version=3), Plan, ["version 3", "reads version 2", "newer pipefit"]),
    "version 0": (text_with(PLAN, version=0), Plan, ["version 0", "pipefit plan"]),
    **{
        f"{name} of version 1": (
            text_with(it, version=1),
            type(it),
            ["of version 1", "reads version 2", maker],
        )
        for it, name, maker in zip(DOCUMENTS, IDS, MAKERS, strict=True)
    },
    "version true": (text_with(PLAN, version=True), Plan, ["without a version"]),
    "no version": ('{"pipefit": "plan"}', Plan, ["without a version"]),
    "unknown key": (text_with(PLAN, colour="red"), Plan, ["colour", "unknown"]),
    "unknown key inside": (
        changed(PLAN, ("stages", 1, "colour"), 1),
        Plan,
        ["stages[1].colour", "unknown"],
    ),
    "key missing": ('{"pipefit": "plan", "version": 2}', Plan, ["profile: this is missing", "(and more)"]),
    "text for a number": (
        changed(PLAN, ("training", "batch_size"), "4"),
        Plan,
        ["training.batch_size", "integer", '"4"'],
    ),
    "true for a number": (
        changed(PLAN, ("training", "batch_size"), True),
        Plan,
        ["training.batch_size", "true"],
    ),
    "a number for a table": (text_with(PLAN, training=3), Plan, ["training", "keys and values", "not 3"]),
    "a stage twice": (text_with(PLAN, stages=[STAGE, STAGE]), Plan, ["layers 0 to 5 exactly once"]),
    "a stage without layers": (
        changed(PLAN, ("stages", 0, "stop"), 0),
        Plan,
        ["stages[0]", "at least one layer"],
    ),
    "a device twice": (changed(PLAN, ("stages", 1, "grid", "devices"), [0, 0]), Plan, ["grid", "not 2"]),
    "a device named twice": (
        changed(DECIDED, ("stages", 0, "grid", "devices"), [0, 1, 2, 2]),
        Plan,
        ["each", "once"],
    ),
    "grids that overlap": (
        changed(DECIDED, ("stages", 1, "grid", "devices"), [3]),
        Plan,
        ["devices or none"],
    ),
    "a device too many": (changed(PLAN, ("stages", 1, "grid", "devices"), [7]), Plan, ["is on device 7"]),
    "a decision elsewhere": (
        changed(DECIDED, ("decisions", 0, "stage"), 1),
        Plan,
        ["stage 1: recompute layer 0"],
    ),
    "a decision about no stage": (
        changed(DECIDED, ("decisions", 0, "stage"), 2),
        Plan,
        ["the plan has 2 stages"],
    ),
    "a place that is none": (
        changed(DECIDED, ("decisions", 1, "place"), "attic"),
        Plan,
        ["'attic' is not a place"],
    ),
    "a place that is not there": (
        changed(DECIDED, ("decisions", 1, "place"), "device9"),
        Plan,
        ["names device9"],
    ),
    "a disk that its host lacks": (
        changed(DECIDED, ("decisions", 1, "place"), "disk"),
        Plan,
        ["names disk0"],
    ),
    "a program with too many digits": (
        text_with(lower(PLAN), lines=[f"{'9' * 5000}F0", ""]),
        Program,
        ["no", "action"],
    ),
    "a run that moves": (
        changed(DECIDED, ("decisions", 0, "what"), "offload"),
        Plan,
        ["runs of layers can be recomputed"],
    ),
    "too many elements": (
        changed(DECIDED, ("decisions", 0, "microbatches"), [1, 2, 1, 4]),
        Plan,
        ["decisions[0].microbatches: 3 elements are expected, not 4"],
    ),
    "unknown key of a tuple": (
        changed(DECIDED, ("decisions", 0, "microbatches"), {"taken": 1, "every": 2, "colour": 1}),
        Plan,
        ["decisions[0].microbatches.colour: this key is unknown"],
    ),
    "NaN": (dumps(PLAN).replace("1.5", "NaN"), Plan, ["NaN", "finite"]),
    "infinite": (dumps(PLAN).replace("1.5", "1e999"), Plan, ["provenance.value", "finite"]),
    "enormous number": (dumps(PLAN).replace("1.5", "1" + "0" * 5000), Plan, ["4300 digits"]),
    "key twice": ('{"pipefit": "plan", "pipefit": "trace"}', Plan, ["'pipefit'", "twice"]),
    "nested deeply": ("[" * 200_000, Plan, ["nested too deeply"]),
    "nested deeply inside": (
        text_with(PLAN)[:-1] + ', "training":' + "[" * 200_000,
        Plan,
        ["nested too deeply"],
    ),
    "nested where nothing nests": (
        text_with(PLAN.cluster, name=NESTED),
        Cluster,
        ["nested too deeply"],
    ),
    "nested where all is passed over": ('{"note":' + "[" * 200_000, Plan, ["nested too deeply"]),
    "half a character": (text_with(PLAN.cluster, name="\ud800"), Cluster, ["Unicode"]),
    "unknown dtype of a source": (
        text_with(TRACE, source="guess"),
        Trace,
        ["source", "'dry run'", '"guess"'],
    ),
    "samples too short": (
        changed(TRACE, ("devices", 0, "memory", 0, "bytes"), [1]),
        Trace,
        ["memory[0].bytes"],
    ),
    "no device": (text_with(PLAN.cluster, devices=[]), Cluster, ["at least one device"]),
    "no such action": (
        text_with(lower(PLAN), lines=["0F0 0FLY0", ""]),
        Program,
        ["'0FLY0' is not an action"],
    ),
    "an action elsewhere": (text_with(lower(PLAN), lines=["1F0", ""]), Program, ["does not hold stage 1"]),
    "no measurement": (text_with(PLAN.profile, measurements=[]), ModelProfile, ["lacks measurements"]),
}


@pytest.mark.parametrize(("text", "kind", "words"), BAD.values(), ids=BAD.keys())
def test_a_wrong_file_is_refused_by_name(text: str, kind: type, words: list[str], tmp_path: Path) -> None:
    """The message is one line that names the file, the mistake and its place."""
    path = tmp_path / "given.json"
    path.write_text(text)
    with pytest.raises(FileError) as refused:
        load(path, kind)
    message = str(refused.value)
    assert "given.json" in message
    assert "\n" not in message
    assert len(message) < 600
    assert not [word for word in words if word not in message], message


def test_keys_in_another_order_are_the_same_document(tmp_path: Path) -> None:
    """Tools that sort keys put the kind and the version after the largest values."""
    data = json.loads(dumps(PLAN))
    for order in (sorted(data), sorted(data, reverse=True)):
        (tmp_path / "it.json").write_text(json.dumps({key: data[key] for key in order}, indent=3))
        assert load(tmp_path / "it.json") == PLAN


def hostile(folder: Path, *, size: float, every: int) -> list[dict[str, Any]]:
    """Return the cost of reading damaged documents, from a process with minimal imports."""
    for name, document in zip(IDS, DOCUMENTS, strict=True):
        save(document, folder / f"valid-{name}.json")
    script = Path(__file__).parent / "support" / "hostile_files.py"
    command = [sys.executable, str(script), str(folder), str(size), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_bounded(readings: list[dict[str, Any]]) -> None:
    """Assert at most 5 processor seconds and 600 MB, and a sentence or a document."""
    over = [one["damage"] for one in readings if one["memory"] > 600e6 or one["seconds"] > 5]
    assert over == []
    assert [one for one in readings if one["said"].startswith("raised")] == []


def test_reading_a_hostile_file_is_bounded(tmp_path: Path) -> None:
    """For any damage in a file of 1 MB, reading takes at most 5 s and 600 MB; the gallery reads files of 3 MB."""
    readings = hostile(tmp_path, size=1, every=1499)
    assert len(readings) > 25
    assert_bounded(readings)


@pytest.mark.gallery
@pytest.mark.timeout(3600)
def test_reading_is_bounded_for_damage_in_many_places(tmp_path: Path) -> None:
    """The limits hold for files damaged in more places."""
    assert_bounded(hostile(tmp_path, size=3, every=9))


def test_a_program_of_too_many_actions_is_neither_saved_nor_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages of both saving and loading give the limit of a file."""
    save(lower(PLAN), tmp_path / "it.json")
    monkeypatch.setattr(json_io, "MOST_ACTIONS", 30)
    with pytest.raises(FileError, match="more than 30 actions"):
        load(tmp_path / "it.json")
    with pytest.raises(FileError, match="more than 30 actions"):
        save(lower(PLAN), tmp_path / "it.json")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder, a missing file, a pipe, binary and enormous content: each has a specific message."""
    (tmp_path / "binary").write_bytes(b'{"pipefit": "\xff\xfe"}')
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "enormous").open("wb") as file:
        file.truncate(json_io.LARGEST_BYTES + 1)  # a hole: it takes no disk
    expected = {
        ".": "is a folder",
        "missing": "does not exist",
        "pipe": "not a regular file",
        "binary": "not UTF-8",
        "enormous": "256.00 MiB",
    }
    for name, words in expected.items():
        with pytest.raises(FileError, match=words):
            load(tmp_path / name)


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    """A key that would clear the screen is named without its escape."""
    path = tmp_path / "given.json"
    path.write_text(text_with(PLAN, **{"\x1b[2J": 1}))
    with pytest.raises(FileError) as refused:
        load(path, Plan)
    assert "\x1b" not in str(refused.value)


class DiskFull(OSError):
    """Error of a full disk."""


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file_alone(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any failure while saving, the old document still loads, without other files next to it."""
    path = tmp_path / "it.json"
    save(PLAN, path)

    def fail(*_: object) -> None:
        raise DiskFull(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if step == "fsync" else (Path, "replace")), fail)
    with pytest.raises(FileError, match="cannot be written: No space left"):
        save(TRACE, path)
    assert load(path) == PLAN
    assert os.listdir(tmp_path) == ["it.json"]


def test_saving_replaces_through_a_link_and_keeps_the_umask(tmp_path: Path) -> None:
    """A symbolic link stays one, its target is replaced, and permissions follow the umask."""
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    save(PLAN, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load(tmp_path / "real.json") == PLAN
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "real.json").stat().st_mode) == 0o666 & ~umask


def test_only_files_are_written_to(tmp_path: Path) -> None:
    """A folder, a device and a missing folder are refused before any write; a device is not replaced."""
    os.mkfifo(tmp_path / "pipe")
    named = {
        "": "a separate file",
        "-": "a separate file",
        "/dev/stdout": "a separate file",
        "/proc/self/fd/1": "a separate file",
        "/dev/null": "not a replaceable file",
    }
    for name, words in named.items():
        with pytest.raises(FileError, match=words):
            json_io.check_target(name)
    for name, words in {".": "a folder", "pipe": "not a replaceable file", "no/it.json": "create"}.items():
        with pytest.raises(FileError, match=words):
            save(PLAN, tmp_path / name)
    assert os.listdir(tmp_path) == ["pipe"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_what_is_not_finite_is_not_written(tmp_path: Path) -> None:
    """A prediction of infinite seconds is refused on saving, not on loading."""
    endless = replace(PLAN, prediction=Prediction(peak_bytes=(1, 1), step_seconds=float("inf")))
    with pytest.raises(FileError, match="not finite"):
        save(endless, tmp_path / "it.json")
    assert os.listdir(tmp_path) == []


def test_only_documents_are_loaded_and_saved(tmp_path: Path) -> None:
    """A non-document type is refused, with a list of the document types."""
    with pytest.raises(UsageError, match="Cluster, ModelProfile, Plan, Program, Trace"):
        load(tmp_path / "x", int)  # type: ignore[type-var]


def test_a_cluster_is_named_in_four_ways(tmp_path: Path) -> None:
    """A preset, an emulated cluster, a TOML and a JSON file all give the cluster."""
    save(PLAN.cluster, tmp_path / "saved.json")
    toml = Path(json_io.__file__).parent / "presets" / "hgx-h200.toml"
    (tmp_path / "mine.TOML").write_text(toml.read_text())
    assert load_cluster(str(tmp_path / "saved.json")) == PLAN.cluster
    assert load_cluster(str(tmp_path / "mine.TOML")) == Cluster.preset("hgx-h200")
    assert load_cluster("emulated:2x1MiB") == Cluster.emulated((2, 1 << 20))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda trace: trace.update(steps=2), "the seconds of each of its 2 steps, not 1"),
        (lambda trace: trace.update(step_seconds=[-1.0]), "seconds of a step"),
        (lambda trace: trace.update(step_seconds=[1e308]), "seconds of a step"),
        (lambda trace: trace.update(devices=trace["devices"] * 2), "each device once"),
        (lambda trace: trace["devices"][0].update(device=-1), "each device once"),
        (lambda trace: trace["devices"][0].update(budget_bytes=-1), "budget"),
        (lambda trace: trace["devices"][0]["events"][0].update(end_seconds=0.0), "end after they start"),
        (lambda trace: trace["devices"][0]["events"][0].update(end_seconds=1e308), "from 0.1 to 1e+308 s"),
        (lambda trace: trace["devices"][0]["events"][0].update(step=-1), "0F0 of step -1"),
        (lambda trace: trace["devices"][0]["memory"][0].update(step=-1), "0F0 of step -1"),
        (lambda trace: trace["devices"][0]["memory"][0].update(seconds=-1e308), "-1e+308 s"),
        (
            lambda trace: trace["devices"][0]["memory"][0].update(bytes=[0] * 8 + [-1]),
            "non-negative bytes",
        ),
        (lambda trace: trace["devices"][0]["memory"][0].update(seconds=1e101), "at most 1e+100 s away"),
        (lambda trace: trace["devices"][0]["events"][0].update(end_seconds=1e101), "at most 1e+100 s away"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(change: Callable[[Any], None], said: str, tmp_path: Path) -> None:
    """An impossible trace is refused in one sentence when the file is read, not by an error of the code that
    draws it.
    """
    data = json.loads(dumps(TRACE))
    change(data)
    (tmp_path / "trace.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match=re.escape(said)):
        load(tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda told: told["utilisation"].pop(),
            "2 peaks must have utilisation for each of these devices or for none, not for 1",
        ),
        (
            lambda told: told.update(processes=[None]),
            "2 peaks must have processes for each of these devices or for none",
        ),
        (
            lambda told: told.update(peak_bytes=[1, -5]),
            "peak_bytes of a prediction must be non-negative, not -5",
        ),
        (lambda told: told.update(step_seconds=-1.0), "step_seconds of a prediction must be non-negative"),
        (
            lambda told: told.update(utilisation=[0.5, -0.5]),
            "utilisation of a prediction must be non-negative",
        ),
        (
            lambda told: told["processes"][0].update(reserved_bytes=-1),
            "reserved_bytes of an allocator must be zero or more",
        ),
    ],
)
def test_a_prediction_that_cannot_be_is_refused(
    change: Callable[[Any], None], said: str, tmp_path: Path
) -> None:
    """The prediction is checked when the plan is read, because it is printed and drawn as a result."""
    peaks = AllocatorPeaks(settings="", requested_bytes=1, allocated_bytes=512, reserved_bytes=2 << 20)
    known = Prediction(peak_bytes=(1, 1), step_seconds=1.0, utilisation=(0.5, 0.5), processes=(peaks, None))
    data = json.loads(dumps(replace(PLAN, prediction=known)))
    change(data["prediction"])
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match=re.escape(said)):
        load(tmp_path / "plan.json")


SCHEMAS = json_io.schemas()


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_published_schemas_are_current(name: str) -> None:
    """`docs/schemas` matches the current types; `make schemas` writes it."""
    path = Path(__file__).parent.parent / "docs" / "schemas" / f"{name}.json"
    assert json.loads(path.read_text()) == SCHEMAS[name], "run make schemas"


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_a_document_has_the_keys_of_its_schema(document: Any) -> None:
    """The keys of a saved document are listed in its schema, and include all required ones."""
    data = json.loads(dumps(document))
    schema = json_io.schema(data["pipefit"])
    assert set(data) == set(schema["properties"])
    assert set(schema["required"]) <= set(data)
    assert schema["additionalProperties"] is False
