"""The simulator of this version beside that of another checkout, on programs that both have. Not a benchmark itself.

Each version simulates in a process of its own, with its own sources, and repeats take turns: what disturbs the machine
disturbs both. A child process reads the name of a program and of a reading, and answers with the CPU's seconds.

    PYTHONPATH=CHECKOUT/src python benchmarks/simulator_beside.py CHECKOUT     the child, of the version in CHECKOUT
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

HERE = Path(__file__).resolve()
PROGRAMS = ("plain 1f1b", "offload in every layer")
READINGS = ("peaks", "new costs", "peaks and seconds", "trace", "lower")

Seconds = Callable[[str, str], float]  # of a program and a reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The least seconds of both versions for one reading of a program, and the ratio of ours to the other's."""

    program: str
    reading: str
    seconds: float
    others_seconds: float
    ratio: float

    def __str__(self) -> str:
        seconds = f"{self.seconds:.4f} s beside {self.others_seconds:.4f} s"
        return f"{self.program:24} {self.reading:18} {seconds}: {self.ratio:.2f} times"


def least_seconds(other: Path, repeat: int) -> list[Beside]:
    """Every reading of every program, in `repeat` turns of this version and of the one in `other`."""
    found = []
    with ExitStack() as stack:
        versions = [stack.enter_context(version(checkout)) for checkout in (HERE.parents[1], other.resolve())]
        for program in PROGRAMS:
            for reading in READINGS:
                turns = [[ask(program, reading) for ask in versions] for _ in range(repeat)]
                ours, theirs = map(min, zip(*turns, strict=True))
                found.append(
                    Beside(
                        program=program,
                        reading=reading,
                        seconds=ours,
                        others_seconds=theirs,
                        ratio=ours / theirs,
                    )
                )
    return found


@contextmanager
def version(checkout: Path) -> Iterator[Seconds]:
    """A child process of the version in `checkout`, as a function of what it shall simulate."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(HERE), str(checkout)]
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        asked, told = child.stdin, child.stdout

        def seconds(program: str, reading: str) -> float:
            print(program, reading, sep="\t", file=asked)
            return float(told.readline())

        yield seconds
        asked.close()


def answer() -> None:
    """The child: simulates what is asked for until nothing more is."""
    sys.path.insert(0, str(Path(sys.argv[1]) / "benchmarks"))
    import bench_simulator

    readings = works(bench_simulator)
    for line in sys.stdin:
        program, reading = line.rstrip("\n").split("\t")
        began = process_time()
        readings[program, reading]()
        print(process_time() - began, flush=True)


def works(version: Any) -> dict[tuple[str, str], Callable[[], object]]:
    """What is timed, in names that every version's benchmark of the simulator has."""
    plan = version.example()
    costs = version.Costs.of(plan)
    found = dict[tuple[str, str], Callable[[], object]]()
    for name, lowered in zip(PROGRAMS, (version.lower, version.offload_all), strict=True):
        program = lowered(plan)

        def simulation(costs: Any = costs, program: Any = program) -> Any:
            return version.Simulation(plan, program=program, steps=1, costs=costs)

        def figures(simulation: Callable[[], Any] = simulation) -> object:
            made = simulation()
            return made.peak_bytes, made.step_seconds

        found |= {
            (name, "peaks"): lambda simulation=simulation: simulation().peak_bytes,
            (name, "new costs"): lambda simulation=simulation: simulation(version.Costs.of(plan)).peak_bytes,
            (name, "peaks and seconds"): figures,
            (name, "trace"): lambda program=program: version.simulate(plan, program=program, steps=1),
            (name, "lower"): lambda lowered=lowered: lowered(plan),
        }
    return found


if __name__ == "__main__":
    answer()
