"""Fuzzer: commands must refuse mutated documents and made-up command lines with one sentence, or execute
them.

`python fuzz.py FILES LINES [SEED]` runs these numbers of files and lines in this process, and one line in
forty as a separate process, and prints failures; `make fuzz` does it with a long budget. All draws depend on
the seed only. Failures are: a traceback, an unexpected exception, more than `SECONDS`, more memory than ten
times the file and 64 MiB, a changed existing file, an unrequested new file, and executed code of a
document.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from typer.main import get_command

from pipefit.cli import app, main
from pipefit.lowering import lower
from pipefit.schema.json_io import save
from pipefit.schema.presets import machine_names, preset_text
from pipefit.simulator import simulate
from support.pipelines import make_plan, offload_all, random_profile
from support.synthetic_checkpoints import write

SECONDS, CODES = 20, {0, 2, 3, 4, 6}
CODE = "__import__('os').system('touch canary')"
TEXTS = (
    CODE, "$(touch canary)", "!!python/object/apply:os.system ['touch canary']", "\x1b[2J", "\ud800", "", "../../x",
    "é" * 99,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**70, 10**40, 0.0, -0.5, 1e308, 1e-320, float("nan"),
    float("inf"), None, True, False, [], {}, [[]], [0] * 99, {"a": 1}, *TEXTS,
)  # fmt: skip
WORDS = (
    "0", "-1", "1", "2", "1e400", "nan", "inf", str(2**63), str(10**40), "1.5", "", " ", "--", "-", "-h", "zoo:dog",
    "nowhere:make", "hf:none", "zoo:mlp", "1MiB", "0B", "emulated:2x1MiB", "emulated:0x1", "emulated:", "dgx1-v100",
    "joint", "exact", "gpipe", "pipedream", "1f1b", "never", "always", "profile.json", "plan.json", "trace.json",
    "program.json", "cluster.json", "cluster.toml", "checkpoints", "none.json", ".", "/dev/null", "/dev/full",
    "none/x.json", "widths=(4,)", "=", "a=" + CODE, *TEXTS[:4],
)  # fmt: skip
SLOW = ("demo", "fit", "train", "profile", "certify")  # of these only lines that name no model that there is


class Hangs(BaseException):
    """Raised when a command has not returned in time."""


def documents(folder: Path) -> None:
    """Return valid files of every kind."""
    plan = make_plan(random_profile(6), (2, 4))
    save(plan, folder / "plan.json")
    save(plan.profile, folder / "profile.json")
    save(plan.cluster, folder / "cluster.json")
    save(lower(plan), folder / "program.json")
    save(simulate(plan), folder / "trace.json")
    save(offload_all(plan), folder / "moving.json")
    (folder / "cluster.toml").write_text(preset_text("4x-titan-rtx"))
    write(folder / "checkpoints", 4)


def mutated(content: bytes, random: Random, *, as_json: bool) -> bytes:
    """Return the content with one to three mutations."""
    for _ in range(random.randint(1, 3)):
        mutate = random.choice((_flip, _cut, _repeat, _digits, *((_value,) * 6 if as_json else (_word,) * 3)))
        content = mutate(content, random)
    return content


def _flip(content: bytes, random: Random) -> bytes:
    place = random.randrange(len(content) or 1)
    return content[:place] + bytes([random.randrange(256)]) + content[place + 1 :]


def _cut(content: bytes, random: Random) -> bytes:
    start = random.randrange(len(content) or 1)
    return content[:start] + content[start + random.choice((1, 9, 1000)) :]


def _repeat(content: bytes, random: Random) -> bytes:
    start = random.randrange(len(content) or 1)
    return content[:start] + content[start : start + random.choice((1, 20, 400))] * 2 + content[start:]


def _digits(content: bytes, random: Random) -> bytes:
    places = [n for n, byte in enumerate(content) if chr(byte).isdigit()]
    place = random.choice(places) if places else 0
    return content[:place] + random.choice((b"-", b"9" * 30, b"0", b"1e999", b".")) + content[place + 1 :]


def _word(content: bytes, random: Random) -> bytes:
    lines = content.split(b"\n")
    at = random.randrange(len(lines))
    key = lines[at].partition(b"=")[0]
    value = random.choice(VALUES)
    lines[at] = key + b"= " + json.dumps(value).encode(errors="replace")
    return b"\n".join(lines)


def _value(content: bytes, random: Random) -> bytes:
    """Return another value, or none, at a random place of a JSON text."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return _flip(content, random)
    inner = data
    for _ in range(random.randint(0, 12)):
        parts = inner.values() if isinstance(inner, dict) else inner
        deeper = [part for part in parts if isinstance(part, dict | list) and part]
        if not deeper:
            break
        inner = random.choice(deeper)
    if inner:
        key = random.choice(list(inner)) if isinstance(inner, dict) else random.randrange(len(inner))
        if random.random() < 0.2:
            del inner[key]
        else:
            inner[key] = random.choice(VALUES)
    return json.dumps(data).encode(errors="replace")


def file_cases(folder: Path, random: Random) -> Iterator[tuple[str, bytes, list[list[str]]]]:
    """Return names, mutated contents, and the lines that read them."""
    uniform = ["--planner", "uniform"]
    readers: dict[str, list[list[str]]] = {
        "plan.json": [["show", "given.json"], ["simulate", "given.json"]],
        "moving.json": [["simulate", "given.json"], ["export", "given.json", "--to", "perfetto"]],
        "profile.json": [
            ["show", "given.json"],
            ["plan", "given.json", "--cluster", "emulated:2x1GiB", *uniform],
        ],
        "cluster.json": [
            ["show", "given.json"],
            ["plan", "profile.json", "--cluster", "given.json", *uniform],
        ],
        "program.json": [["show", "given.json"]],
        "trace.json": [["compare", "trace.json", "given.json"], ["report", "given.json", "-o", "page.html"]],
        "cluster.toml": [
            ["show", "given.toml"],
            ["plan", "profile.json", "--cluster", "given.toml", *uniform],
        ],
        "checkpoints/step-00000004/manifest.json": [["checkpoint", "given"]],
        "checkpoints/step-00000004/worker-00001.safetensors": [["checkpoint", "given"]],
    }
    while True:
        name = random.choice(list(readers))
        content = (folder / name).read_bytes()
        if name == "cluster.toml":
            content = preset_text(random.choice(machine_names())).encode()
        yield name, mutated(content, random, as_json=name.endswith(".json")), readers[name]


def lines(random: Random) -> Iterator[list[str]]:
    """Return command lines of the existing options, with values of every kind."""
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    while True:
        name = random.choice(list(commands))
        options = [
            option
            for parameter in commands[name].params
            for option in parameter.opts
            if option.startswith("-")
        ]
        drawn = [random.choice(WORDS) for _ in range(random.randint(0, 3))]
        for _ in range(random.randint(0, 4)):
            drawn += [random.choice(options)] + [random.choice(WORDS)] * random.randint(0, 1)
        if name not in SLOW or (not {"zoo:mlp", "hf:none"} & set(drawn) and name != "demo"):
            yield [name, *drawn]


def state(folder: Path) -> dict[str, str]:
    """Return the files of a folder, with a digest of each."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in paths}


def remove(folder: Path, names: set[str]) -> None:
    """Remove files of a folder, and the folders created for them."""
    for name in names:
        (folder / name).unlink()
        with suppress(OSError):  # it is not empty
            (folder / name).parent.rmdir()


@contextmanager
def limited() -> Iterator[None]:
    """Interrupt the context after a time limit."""

    def ring(number: int, frame: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def wrong(words: list[str], folder: Path, *, nbytes: int = 0) -> str:
    """Return the failure of a line; empty if there is none."""
    before, most = state(folder), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    out, err = io.StringIO(), io.StringIO()
    try:
        with limited(), redirect_stdout(out), redirect_stderr(err):
            code = main(words)
    except Hangs:
        return f"takes more than {SECONDS} s"
    except BaseException as error:  # noqa: BLE001 - it is reported
        return f"raises {type(error).__name__}: {error}"[:300]
    said, after = err.getvalue(), state(folder)
    named = {os.path.normpath(word.partition("=")[2] or word) for word in words}
    named |= {f"{os.path.splitext(name)[0]}.html" for name in named}  # where a report goes
    named |= {"page.html"}
    unasked = sorted(
        n for n in set(after) - set(before) if not {n, os.path.dirname(n)} & named
    )  # or in a new folder
    took = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - most
    checks: tuple[tuple[Callable[[], bool], str], ...] = (
        (lambda: code not in CODES or "Traceback" in said, f"ends with {code}: {said[-300:]}"),
        (lambda: code not in (0, 4) and not said.startswith("pipefit: "), f"says {said[:300]!r}"),
        (lambda: "\x1b" in said, "writes to the terminal"),
        (
            lambda: any(after.get(name) != digest for name, digest in before.items()),
            "changes a file that was there",
        ),
        (lambda: bool(unasked), f"leaves {unasked}"),
        (lambda: took > 10 * nbytes + (64 << 20), f"takes {took >> 20} MiB for {nbytes} bytes"),
    )
    found = next((sentence for check, sentence in checks if check()), "")
    remove(folder, set(after) - set(before))
    return found


def wrong_alone(words: list[str], folder: Path) -> str:
    """Return the failure of a line as a separate process; empty if there is none."""
    before = state(folder)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pipefit", *words],
            cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, timeout=60,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "takes more than 60 s"
    said, after = done.stderr.decode(errors="replace"), state(folder)
    remove(folder, set(after) - set(before))
    if done.returncode not in CODES or "Traceback" in said:
        return f"ends with {done.returncode}: {said[-300:]}"
    changed = any(after.get(name) != digest for name, digest in before.items())
    return "changes a file that was there" if changed else ""


def can_be_sent(words: list[str]) -> bool:
    """Return whether these words can be passed to a process: file systems cannot encode some text."""
    try:
        return bool([os.fsencode(word) for word in words])
    except UnicodeEncodeError:
        return False


def fuzz_processes(folder: Path, *, command_lines: int, seed: int) -> list[str]:
    """Return the failures of this many command lines, each as a separate process, in a folder with
    documents.
    """
    drawn = (words for words in lines(Random(seed)) if can_be_sent(words))
    told = (
        (words, wrong_alone(words, folder)) for words, _ in zip(drawn, range(command_lines), strict=False)
    )
    return [f"pipefit {words}, alone, {what}" for words, what in told if what]


def fuzz(folder: Path, *, files: int, command_lines: int, seed: int) -> list[str]:
    """Return the failures of this many mutated files and command lines, in an empty current folder."""
    random, found = Random(seed), list[str]()
    documents(folder)
    for words in (
        ["show", "plan.json"],
        ["checkpoint", "checkpoints"],
        ["report", "trace.json", "-o", "page.html"],
    ):
        wrong(words, folder)  # imported modules stay imported
    for (name, content, readers), _ in zip(file_cases(folder, random), range(files), strict=False):
        given = folder / ("given" if "/" in name else f"given{Path(name).suffix}")
        if "/" in name:
            write(given, 4)
            (given / Path(*Path(name).parts[1:])).write_bytes(content)
        else:
            given.write_bytes(content)
        for words in readers:
            if what := wrong(words, folder, nbytes=len(content)):
                found.append(f"{' '.join(words)} of a mutated {name} {what}")
                (Path(tempfile.gettempdir()) / f"pipefit-fuzz-{seed}-{len(found)}").write_bytes(content)
        for path in sorted([given, *given.rglob("*")] if given.is_dir() else [given], reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    for words, _ in zip(lines(random), range(command_lines), strict=False):
        if what := wrong(words, folder):
            found.append(f"pipefit {words} {what}")
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        numbers = [int(word) for word in sys.argv[1:]] + [0]
        told = fuzz(Path(empty), files=numbers[0], command_lines=numbers[1], seed=numbers[2])
        told += fuzz_processes(Path(empty), command_lines=numbers[1] // 40, seed=numbers[2])
    print(*told, f"{len(told)} of {numbers[0]} files and {numbers[1]} lines went wrong", sep="\n")
    sys.exit(bool(told))
