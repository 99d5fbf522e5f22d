"""Mistakes on the command line: one sentence on stderr, a stable exit code, and no files."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.lowering import lower
from pipefit.schema.json_io import dumps, save
from pipefit.simulator import simulate
from support.pipelines import make_plan, random_profile
from support.synthetic_checkpoints import write

FACTORIES = """
import sys
import pipefit

def no_task(): return 3
def breaks(): raise ZeroDivisionError("division\\nby zero")
def leaves(): sys.exit(7)
def one(size): return size
def task(batch):
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    return pipefit.Task(model, batch=batch, loss=torch.nn.functional.mse_loss)
def pairs(size):
    import torch
    return torch.zeros(size, 2), torch.zeros(size, 2)
def no_data(size): raise KeyError("no data")
def works(): return task(pairs)
def ends():
    import torch
    class Ends(torch.nn.Linear):
        def forward(self, values): sys.exit(3)
    return pipefit.Task(torch.nn.Sequential(Ends(2, 2)), batch=pairs, loss=torch.nn.functional.mse_loss)
def ignores(): return task(lambda size: pairs(3))
def empty(): return task(no_data)
def late(*size): raise RuntimeError("too late")
def unmade(inputs=1): return pipefit.Task(late, batch=late, loss=late)
number = 3
"""
TALKER = """
import pipefit, torch
print("import speaks")

class Layer(torch.nn.Linear):
    def forward(self, values):
        print("layer speaks")
        return super().forward(values)

def make():
    print("factory speaks")
    batch = lambda size: (torch.zeros(size, 2), torch.zeros(size, 2))
    return pipefit.Task(torch.nn.Sequential(Layer(2, 2)), batch=batch, loss=torch.nn.functional.mse_loss)
"""

TABLE: list[tuple[str, int, list[str]]] = [
    # parser
    ("fly", 2, ["fly", "--help"]),
    ("--fly", 2, ["--fly"]),
    ("plan", 2, ["PROFILE", "pipefit plan --help"]),
    ("plan profile.json", 2, ["--cluster"]),
    ("plan profile.json --cluster", 2, ["--cluster"]),
    ("plan profile.json extra --cluster dgx1-v100", 2, ["extra"]),
    (
        "plan profile.json --cluster dgx1-v100 --batch-size 0",
        2,
        ["--batch-size", "must be greater than or equal to 1"],
    ),
    (
        "plan profile.json --cluster dgx1-v100 --batch-size many",
        2,
        ["--batch-size", "must be a valid integer; "],
    ),
    (
        "plan profile.json --cluster dgx1-v100 --batch-size 1.5",
        2,
        ["--batch-size", "must be a valid integer; "],
    ),
    ("plan profile.json --cluster dgx1-v100 --stages -1", 2, ["--stages"]),
    ("plan profile.json --cluster dgx1-v100 --recompute often", 2, ["--recompute", "except_last"]),
    ("plan profile.json --cluster dgx1-v100 --clip-norm 0", 2, ["positive norm"]),
    ("plan profile.json --cluster dgx1-v100 --clip-norm inf", 2, ["finite, positive norm", "not to inf"]),
    (f"plan profile.json --cluster dgx1-v100 --batch-size {10**30}", 2, ["batch_size", "4294967296"]),
    (f"plan profile.json --cluster dgx1-v100 --batch-size {2**32} --microbatches 4", 2, ["was profiled at"]),
    (f"plan profile.json --cluster emulated:2x{10**30}GiB", 2, ["is not a size"]),
    (f"plan profile.json --cluster dgx1-v100 --stages {10**30}", 2, ["too few"]),
    (f"profile zoo:mlp --microbatch-size {10**30}", 2, ["the batch function of mlp fails"]),
    (f"profile zoo:mlp --microbatch-size 1 --set inputs={10**30}", 2, ["the batch function of mlp fails"]),
    (f"profile zoo:mlp --microbatch-size 1 --threads {10**30}", 2, ["threads", "from 1 to 1024"]),
    (
        "profile zoo:mlp --microbatch-size 1 --threads 99999",
        2,
        ["threads", "from 1 to 1024"],
    ),  # OpenMP would crash
    (f"train train.json mine:works --seed {10**30}", 2, ["seed must be a whole number from"]),
    (
        "profile mine:ignores --microbatch-size 2",
        2,
        ["has shape (3, 2), but dimension 0 must be the 2 samples of the batch"],
    ),
    ("profile mine:empty --microbatch-size 2", 2, ["KeyError: 'no data'", "number of samples"]),
    ("profile zoo:mlp", 2, ["--microbatch-size"]),
    ("profile zoo:mlp --microbatch-size 0", 2, ["--microbatch-size"]),
    ("profile zoo:mlp --microbatch-size 1 --device tpu", 2, ["tpu", "fake"]),
    ("simulate plan.json --steps 0", 2, ["--steps"]),
    ("simulate plan.json --steps 1000001", 2, ["--steps"]),  # would take all memory
    ("plan profile.json --cluster dgx1-v100 --microbatches 99999999999", 2, ["65536"]),  # so would this
    ("train plan.json zoo:mlp --timeout nan", 2, ["--timeout"]),
    ("train plan.json zoo:mlp --seed -1", 2, ["--seed"]),
    ("train plan.json zoo:mlp --timeout 0", 2, ["--timeout"]),
    ("train plan.json zoo:mlp --save runs --every 0", 2, ["--every"]),
    ("train plan.json zoo:mlp --save runs --keep 0", 2, ["--keep"]),
    ("checkpoint", 2, ["DIR"]),
    ("certify plan.json", 2, ["MODEL"]),
    ("compare trace.json", 2, ["MEASURED"]),
    (
        "plan profile.json --cluster dgx1-v100 --planner jiont",
        2,
        ["did you mean joint? Choose one of joint, mpress"],
    ),
    ("plan profile.json --cluster dgx1-v100 --schedule 1fb1", 2, ["did you mean 1f1b? Choose one of gpipe"]),
    ("plan zoo:mlp --cluster dgx1-v100 --precision bf16", 2, ["cannot be 'bf16': did you mean bfloat16?"]),
    ("plan zoo:mlp --cluster dgx1-v100 --target GPU", 2, ["cannot be 'GPU': did you mean cuda?"]),
    (
        "plan zoo:mlp --cluster dgx1-v100 --objective peak --planner joint",
        2,
        ["joint planner minimises step time"],
    ),
    (
        "plan profile.json --cluster dgx1-v100 --shard zero3",
        2,
        ["cannot be 'zero3': choose one of none, optimizer"],
    ),
    (
        "plan profile.json --cluster dgx1-v100 --reserve 120%",
        2,
        ["less than the 31.75 GiB of its device, not 38.10 GiB"],
    ),
    ("certify zoo:mlp plan.json", 2, ["give the plan first, plan.json zoo:mlp"]),
    ("train zoo:mlp plan.json", 2, ["give the plan first, plan.json zoo:mlp"]),
    # model
    ("plan gpt2 --cluster dgx1-v100", 6, ["gpt2 does not exist", "such as hf:gpt2"]),
    (
        "plan train.py --cluster dgx1-v100",
        6,
        ["train.py is a script", "pipefit.Task, such as train:make_task"],
    ),
    ("plan zoo:gtp --cluster dgx1-v100", 2, ["did you mean gpt?"]),
    ("plan zoo:gpt --cluster dgx1-v100 --set layer=4", 2, ["did you mean layers? It has layers=12"]),
    ("profile mlp --microbatch-size 1", 2, ["'mlp' is not a model, but zoo:mlp is", "zoo:NAME"]),
    ("profile zoo: --microbatch-size 1", 2, ["not a model"]),
    ("plan gpt --cluster dgx1-v100", 6, ["gpt does not exist", "zoo:NAME"]),
    ("plan mine.py --cluster dgx1-v100", 6, ["mine.py is a script", "mine:make_task"]),
    ("profile zoo:dog --microbatch-size 1", 2, ["'dog'", "mlp"]),
    ("profile zoo:mlp --microbatch-size 1 --set widths", 2, ["--set name=value"]),
    ("profile zoo:mlp --microbatch-size 1 --set =3", 2, ["--set name=value"]),
    ("profile zoo:mlp --microbatch-size 1 --set lr=1 --set lr=2", 2, ["lr", "twice"]),
    ("profile zoo:mlp --microbatch-size 1 --set wings=2", 2, ["wings"]),
    ("profile zoo:mlp --microbatch-size 1 --set classes=few", 2, ["classes", "'few'"]),
    ("profile hf:gpt9 --microbatch-size 1", 2, ["hf:gpt9", "gpt2"]),
    ("profile nowhere:make --microbatch-size 1", 2, ["module 'nowhere' was not found"]),
    ("profile mine.inner:make --microbatch-size 1", 2, ["mine"]),
    ("profile mine.py:no_task --microbatch-size 1", 2, ["write mine:factory without .py\n"]),
    ("profile ./mine.py:no_task --microbatch-size 1", 2, ["write mine:factory without .py\n"]),
    ("profile part/mine.py:no_task --microbatch-size 1", 2, ["write part.mine:factory without .py\n"]),
    (
        "profile my-part/mine.py:no_task --microbatch-size 1",
        2,
        ["write mine:factory without .py, in the folder"],
    ),
    (
        "profile part/2-mine.py:no_task --microbatch-size 1",
        2,
        ["rename it to _2_mine.py"],
    ),
    (
        "profile /else/mine.py:no_task --microbatch-size 1",
        2,
        ["mine:factory without .py, in the folder /else\n"],
    ),
    ("profile a-b:make --microbatch-size 1", 2, ["'a-b' is not the name of a module"]),
    ("profile mine:no_tusk --microbatch-size 1", 2, ["no_tusk", "did you mean no_task"]),
    ("profile mine:number --microbatch-size 1", 2, ["int, not a function"]),
    ("profile mine:no_task --microbatch-size 1", 2, ["returned a int", "pipefit.Task"]),
    ("profile mine:breaks --microbatch-size 1", 2, ["raised ZeroDivisionError: division:"]),
    ("profile mine:leaves --microbatch-size 1", 2, ["raised SystemExit: 7"]),
    ("profile mine:one --microbatch-size 1", 2, ["raised TypeError", "size"]),
    ("profile broken:make --microbatch-size 1", 2, ["module broken raised SyntaxError"]),
    ("profile needy:make --microbatch-size 1", 2, ["needy cannot be imported", "no_such_package"]),
    # cluster
    ("plan profile.json --cluster dgx1", 2, ["'dgx1'", "did you mean dgx"]),
    ("plan profile.json --cluster emulated:4", 2, ["emulated:4x256MiB"]),
    ("plan profile.json --cluster emulated:4x24", 2, ["'24' lacks a unit: write 24GiB"]),
    ("plan profile.json --cluster 4x24GB", 2, ["did you mean emulated:4x24GB?"]),
    ("plan profile.json --cluster emulated:0x1MiB", 2, ["number of emulated devices", "from 1 to 4096"]),
    ("plan profile.json --cluster emulated:4x0MiB", 2, ["at least one byte"]),
    ("plan profile.json --cluster emulated:99999x1MiB", 2, ["4096"]),
    ("plan profile.json --cluster none.toml", 6, ["none.toml does not exist"]),
    ("plan profile.json --cluster bad.toml", 6, ["bad.toml is not TOML"]),
    ("plan profile.json --cluster trace.json", 6, ["is a trace", "a cluster is needed"]),
    ("show emulated:", 2, ["emulated:4x256MiB"]),
    # files
    ("plan none.json --cluster dgx1-v100", 6, ["none.json does not exist"]),
    ("plan plan.json --cluster dgx1-v100", 6, ["is a plan, but a profile is needed", "pipefit profile"]),
    ("simulate profile.json", 6, ["is a profile, but a plan is needed", "pipefit plan"]),
    ("simulate .", 6, ["is a folder"]),
    ("certify none.json zoo:mlp", 6, ["none.json does not exist"]),
    ("train cut.json zoo:mlp", 6, ["cut.json is truncated"]),
    ("compare plan.json trace.json", 6, ["is a plan, but a trace is needed"]),
    ("compare trace.json other.json", 2, ["different devices"]),
    ("show none.json", 6, ["none.json does not exist"]),
    (f"show {'a' * 300}", 6, ["cannot be read: File name too long"]),
    (f"plan {'a' * 300}:make --cluster dgx1-v100", 2, ["was not found"]),
    (f"certify x:{'a' * 300} zoo:mlp", 6, ["cannot be read"]),
    ("plan zoo:mlp --cluster dgx1-v100 --batch-size 9223372036854775807", 2, ["batch_size", "4294967296"]),
    (f"plan zoo:gpt --cluster dgx1-v100 --set layers={'x' * 99}", 2, [f"1 to 10,000, not '{'x' * 56}...\n"]),
    ("profile mine:ends --microbatch-size 1", 1, ["unexpected SystemExit: 3", "--debug"]),
    ("show dgx1v100", 2, ["dgx1v100 is neither a file nor a known cluster", "did you mean dgx1-v100?"]),
    ("export plan.json", 2, ["'--to'. Choose from: perfetto, memory-viz"]),
    ("show empty.json", 6, ["is empty"]),
    ("show deep.json", 6, ["it is nested too deeply"]),
    ("show /dev/null", 6, ["not a regular file"]),
    ("simulate plan.json -o plan.json", 2, ["plan.json is named twice", "another file"]),
    ("simulate plan.json -o ./plan.json", 2, ["is named twice"]),
    (
        "plan profile.json --cluster dgx1-v100 -o profile.json",
        2,
        ["profile.json is named twice"],
    ),
    ("plan profile.json --cluster bad.toml -o bad.toml", 2, ["bad.toml is named twice"]),
    (
        "train plan.json zoo:mlp -o new.json --metrics new.json",
        2,
        ["new.json is named twice"],
    ),
    (
        "train plan.json zoo:mlp --weights cut.json -o cut.json",
        2,
        ["cut.json is named twice"],
    ),
    (
        "train plan.json zoo:mlp --weights cut.json --metrics cut.json",
        2,
        ["cut.json is named twice"],
    ),
    ("train plan.json zoo:mlp --weights . -o other.json", 2, ["other.json is a file of /", "another file"]),
    ("checkpoint runs -o runs/step-00000004/worker-00000.safetensors", 2, ["would be inside a checkpoint"]),
    (
        "train plan.json zoo:mlp --resume runs -o runs/step-00000004/manifest.json",
        2,
        ["would be inside a checkpoint"],
    ),
    ("simulate plan.json -o none/trace.json", 6, ["create"]),
    ("simulate plan.json -o .", 6, ["it is a folder"]),
    (f"simulate plan.json -o {'a' * 300}", 6, ["name too long"]),
    ("profile zoo:mlp --microbatch-size 1 -o none/profile.json", 6, ["create"]),
    ("train plan.json zoo:mlp -o none/trace.json", 6, ["create"]),
    ("train plan.json zoo:mlp --metrics none/steps.jsonl", 6, ["create"]),
    ("train plan.json zoo:mlp --resume none", 6, ["none does not contain a complete checkpoint"]),
    ("checkpoint none", 6, ["none does not contain a complete checkpoint"]),
    ("checkpoint cut.json", 6, ["cut.json does not contain a complete checkpoint"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create documents of every kind, some of them broken, and modules with factories."""
    here = tmp_path_factory.mktemp("folder")
    plan = make_plan(random_profile(6), (2, 4))
    save(plan.profile, here / "profile.json")
    save(plan, here / "plan.json")
    save(lower(plan), here / "program.json")
    save(simulate(plan), here / "trace.json")
    save(simulate(make_plan(random_profile(6), (1, 1, 4))), here / "other.json")
    save(plan, here / "train.json")
    (here / "cut.json").write_text(dumps(plan)[:-100])
    (here / "empty.json").write_text("")
    (here / "deep.json").write_text(
        '{"pipefit": "plan", "version": 2, "a": ' + '{"a": ' * 900 + "1" + "}" * 901
    )
    (here / "bad.toml").write_text("name =")
    write(here / "runs", 4)
    (here / "mine.py").write_text(FACTORIES)
    (here / "talker.py").write_text(TALKER)
    (here / "broken.py").write_text("def make(:")
    (here / "needy.py").write_text("import no_such_package")
    return here


@pytest.mark.parametrize(("line", "code", "words"), TABLE, ids=[line for line, *_ in TABLE])
def test_a_mistake_has_its_sentence_and_its_code(
    line: str,
    code: int,
    words: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The line ends with its exit code and one sentence with the words; stdout stays empty, the folder is
    unchanged.
    """
    monkeypatch.chdir(folder)
    before = sorted(os.listdir(folder))
    assert main(shlex.split(line)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pipefit: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert not [word for word in words if word not in err], err
    assert sorted(set(os.listdir(folder)) - {"__pycache__"}) == sorted(set(before) - {"__pycache__"})


KNOWN_BEFORE = [  # of a model that cannot be built, on four devices
    ("plan --batch-size 64 --clip-norm nan", "not to nan"),
    ("plan --clip-norm -1", "not to -1.0"),
    ("plan --batch-size 64 --microbatches 4 --clip-norm inf", "not to inf"),
    ("plan --data 9", "needs 9 devices, but there are 4"),
    ("plan --batch-size 64 --data 3", "3 replicas cannot split microbatches"),
    ("plan --batch-size 64 --tensor 9", "needs 9 devices, but there are 4"),
    ("plan --batch-size 64 --data 4 --tensor 2", "needs 8 devices, but there are 4"),
    ("plan --batch-size 64 --stages 9", "too few for 9 stages"),
    ("plan --batch-size 64 --stages 4 --data 2 --planner uniform", "too few for 4 stages of 2 devices"),
    ("plan --batch-size 64 --microbatches 3", "use 63 samples, or 66"),
    ("plan --batch-size 64 --microbatch-size 7", "use 63 samples, or 70"),
    ("plan --batch-size 64 --schedule gpip", "did you mean gpipe?"),
    ("plan --batch-size 64 --schedule pipedream --clip-norm 1", "clip in the optimizer"),
    (
        "plan --batch-size 64 --schedule pipedream --shard parameters",
        "replicas cannot shard parameters",
    ),
    ("plan --batch-size 64 --schedule pipedream --precision mixed-float16", "use mixed-bfloat16"),
    ("plan --batch-size 64 --versions everything", "use pipedream or pipedream-2bw"),
    ("plan --batch-size 64 --shard gradients --data 1", "give 2 or more replicas"),
    ("plan --batch-size 64 --shard gradients --tensor 4", "give fewer shards"),
    ("plan --batch-size 64 --shard gradients --microbatch-size 1", "an even number of samples"),
    ("plan --batch-size 64 --sequences", "--tensor 2 --sequences"),
    ("plan --batch-size 64 --planner additive", "the additive planner needs measurements of training runs"),
    ("fit --schedule gpip", "did you mean gpipe?"),
    ("fit --microbatches 99999999", "exceed the limit of 65536"),
    ("fit --grow inputs --schedule gpip", "did you mean gpipe?"),
    ("fit --grow inputs --planner jiont", "did you mean joint?"),
    ("fit --grow inputs --batch-size 64 --microbatches 3", "use 63 samples, or 66"),
    ("fit --grow inputs --tensor 9", "needs 9 devices, but there are 4"),
    ("fit --grow batch --data 5", "needs 5 devices, but there are 4"),
    ("fit --grow memory --data 9", "needs 9 devices, but there are 4"),
    ("fit --grow devices --data 9 --to 5", "needs 9 devices, but there are 5"),
    ("profile -b 1 --runs trimmed --clip-norm nan", "not to nan"),
    ("profile -b 1 --runs trimmed --schedule 1f1b", "profile, plan and train under gpipe"),
]


@pytest.mark.parametrize(("line", "words"), KNOWN_BEFORE, ids=[line for line, _ in KNOWN_BEFORE])
def test_what_no_profile_can_change_is_refused_before_one_is_made(
    line: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question that is wrong for every model fails before a model is built or given data, which may take
    minutes.
    """
    monkeypatch.chdir(folder)
    command, *options = line.split()
    assert main([command, "mine:unmade", "--cluster", "emulated:4x1GiB", *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "too late" not in said


def test_incremental_runs_on_two_devices_are_refused_before_a_model_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Incremental runs need three devices, whatever the model."""
    monkeypatch.chdir(folder)
    line = "profile mine:unmade -b 1 --cluster emulated:2x1GiB --runs incremental"
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert "needs at least three devices, not 2" in said
    assert "too late" not in said


def test_a_name_of_several_lines_makes_no_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A document cannot print a separate line that looks like a command's output."""
    plan = make_plan(random_profile(6), (2, 4))
    named = replace(plan, profile=replace(plan.profile, model="a\npipefit: all is well\u2028\x85\x1b[2Jb"))
    save(named, tmp_path / "plan.json")
    assert main(["export", str(tmp_path / "plan.json"), "--to", "megatron"]) == 2
    said = capsys.readouterr().err
    assert said.splitlines() == [said.removesuffix("\n")]
    assert said.startswith("pipefit: a pipefit: all is well")
    assert "\x1b" not in said


def in_a_shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Return the output of a command line in a separate process, wrapped in shell syntax."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = ["/bin/sh", "-c", f"exec {sys.executable} -m pipefit {line}"]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_closed_streams_cost_no_result(folder: Path) -> None:
    """With stdin and stderr closed a command does its work and keeps its exit code."""
    assert in_a_shell("simulate plan.json -o closed.json <&- 2>&-", folder).returncode == 0
    (folder / "closed.json").unlink()
    assert in_a_shell("show none.json <&- 2>&-", folder).returncode == 6


@pytest.mark.parametrize("line", ["show plan.json >&-", "--version --json >&-", "--help 1</dev/null"])
def test_a_result_that_nobody_would_see_is_refused_at_once(line: str, folder: Path) -> None:
    """If stdout is closed or read-only, a command fails before any work whose result would be lost."""
    done = in_a_shell(line, folder)
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr == (
        "pipefit: stdout is closed, so the result cannot be printed: redirect it to a file, or to /dev/null\n"
    )


def test_a_version_that_cannot_be_printed_is_told(folder: Path) -> None:
    """On a full disk printing the version gives one sentence, as for every result."""
    done = in_a_shell("--version > /dev/full", folder)
    assert (done.returncode, done.stderr.count("\n")) == (6, 1)
    assert "No space left on device" in done.stderr


def test_a_working_directory_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's libraries would abort: every command reports the missing directory before it loads them."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for line in ("models", "doctor --json", "train /plan.json zoo:mlp", "show dgx1-v100", "--help"):
        assert main(line.split()) == 2
        assert (
            "the working directory cannot be used (No such file or directory): cd to an existing"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.gallery)])
def test_no_output_is_cut_off_in_silence(unbuffered: str, folder: Path, tmp_path: Path) -> None:
    """Output that a file cannot hold gives code 6, and a pipe without a reader code 1, silently; also if
    Python writes without a buffer, as in many containers. Lost stderr output leaves the code unchanged.
    """
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": unbuffered}
    command = f"{sys.executable} -B -m pipefit show plan.json --json"
    for line, code, words in (
        (
            f"ulimit -f 1; {command} > {tmp_path / 'cut'}",
            6,
            "pipefit: the output cannot be written: File too large; ",
        ),
        (f"set -o pipefail; {command} | true", 1, ""),
        (
            f"{sys.executable} -m pipefit simulate plan.json -o {tmp_path / 'made.json'} > /dev/null 2> /dev/full",
            0,
            "",
        ),
        (f"{sys.executable} -m pipefit show none.json 2> /dev/full", 6, ""),
        (
            f"{sys.executable} -m pipefit show none.json --json > /dev/full",
            6,
            "pipefit: file none.json does not exist",
        ),
        (
            f"ulimit -f 0; {sys.executable} -B -m pipefit simulate plan.json -o lost > /dev/full",
            6,
            "pipefit: lost",
        ),
    ):
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout) == (code, b"")
        assert done.stderr.decode().startswith(words) and bool(done.stderr) == bool(words)


def test_what_a_model_prints_goes_to_stderr(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On import, in the factory and in a layer: with --json stdout contains only the document."""
    monkeypatch.chdir(folder)
    assert main(["profile", "talker:make", "-b", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["pipefit"] == "profile"
    assert [word for word in ("import", "factory", "layer") if f"{word} speaks" not in err] == []


def test_debug_shows_the_traceback_wherever_it_stands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --debug the sentence follows the traceback, the code is unchanged, and the cause in the user's
    code is shown.
    """
    monkeypatch.chdir(folder)
    for line in ("--debug profile mine:breaks -b 1", "profile mine:breaks -b 1 --debug"):
        assert main(line.split()) == 2
        err = capsys.readouterr().err
        assert "Traceback" in err
        assert "ZeroDivisionError" in err
        assert err.splitlines()[-1].startswith("pipefit: mine:breaks raised")


def test_what_nobody_foresaw_is_one_sentence_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A foreign exception exits with 1; the message names it and points to --debug."""

    def fail(*_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("pipefit.schema.json_io.load", fail)
    assert main(["show", str(folder / "plan.json")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("pipefit: unexpected KeyError: 'lost'")
    assert "--debug" in err
    assert err.count("\n") == 1


def test_stopping_exits_as_shells_expect(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C exits with 130 and without a result."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(folder)
    monkeypatch.setattr("pipefit.simulator.simulate", interrupt)
    assert main(["simulate", "plan.json", "-o", "stopped.json"]) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert not (folder / "stopped.json").exists()
