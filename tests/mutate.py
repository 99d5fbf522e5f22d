"""Shows that the tests notice small mistakes: makes each of `mutants.toml` in a copy of the tree and runs its tests.

    python tests/mutate.py [--jobs 2] [--only WORD]

The answer is a table; the exit code is 1 where a mutant survives, its text is not found, or the tests fail without any.
A few minutes: most mutants die in the first seconds of their tests. A mutant that runs past its time counts as dead,
for a test would hang.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
COPIED = ("src", "tests", "benchmarks", "pyproject.toml")
SECONDS = 180  # for the tests of one mutant


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One mistake: `new` in place of `old` in a file of `src/pipefit`."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Of the file, in the tree."""
        return Path("src/pipefit") / self.file


def read(path: Path) -> list[Mutant]:
    """The mutants of a list, with the paths of their tests."""
    document: dict[str, Any] = tomllib.loads(path.read_text())
    named = document["tests"]
    return [
        Mutant(**{**fields, "tests": tuple(test for name in fields["tests"] for test in named[name])})
        for fields in document["mutant"]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line for each mutant and a sum; 0 where all die."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree that are tested at once")
    parser.add_argument("--only", default="", help="mutants whose file or description has this word")
    parser.add_argument("--list", type=Path, default=HERE / "mutants.toml", help="another list")
    options = parser.parse_args(arguments)
    chosen = [m for m in read(options.list) if options.only in m.file or options.only in m.what]
    tests = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    with trees(options.jobs) as free:
        if not passes(free, tests, SECONDS * len(tests)):
            print("the tests fail without any mutant: make them pass first")
            return 1
        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(lambda mutant: told(mutant, free), chosen))
    print(f"{verdicts.count('killed')} of {len(chosen)} killed")
    return 0 if verdicts == ["killed"] * len(chosen) else 1


def told(mutant: Mutant, free: SimpleQueue[Path]) -> str:
    """The verdict on a mutant, which is also printed."""
    began = perf_counter()
    verdict = judge(mutant, free)
    print(f"{verdict:9} {perf_counter() - began:5.1f} s  {mutant.file:24} {mutant.what}", flush=True)
    return verdict


def judge(mutant: Mutant, free: SimpleQueue[Path]) -> str:
    """`killed`, `survived`, or `not found`, where the code has moved on."""
    source = (ROOT / mutant.path).read_text() if (ROOT / mutant.path).exists() else ""
    if source.count(mutant.old) != 1:
        return "not found"
    tree = free.get()
    try:
        (tree / mutant.path).write_text(source.replace(mutant.old, mutant.new))
        return "survived" if run(tree, mutant.tests, SECONDS) else "killed"
    finally:
        (tree / mutant.path).write_text(source)
        free.put(tree)


def passes(free: SimpleQueue[Path], tests: Sequence[str], seconds: float) -> bool:
    """Whether the tests pass in a copy as it is."""
    tree = free.get()
    try:
        return run(tree, tests, seconds)
    finally:
        free.put(tree)


def run(tree: Path, tests: Sequence[str], seconds: float) -> bool:
    """Whether the tests pass in a tree, in time."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    own = {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        found = subprocess.run(
            command, cwd=tree, env={**os.environ, **own}, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return found.returncode == 0


@contextmanager
def trees(count: int) -> Iterator[SimpleQueue[Path]]:
    """So many copies of what the tests need, without compiled files: a mutant may be as long as what it replaces."""
    with tempfile.TemporaryDirectory() as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            tree = Path(folder) / str(number)
            for name in COPIED:
                copy(ROOT / name, tree / name)
            free.put(tree)
        yield free


def copy(source: Path, target: Path) -> None:
    """A file or a folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    sys.exit(main())
