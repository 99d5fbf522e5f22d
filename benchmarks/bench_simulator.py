"""How long lowering and the simulator take: programs of 100 layers, 8 stages and 64 microbatches under 1F1B.

    plain                      whole stages, kept
    offload in every layer     segments of a layer, each of which moves a saved tensor away and has it back
    runs recomputed            in every stage two runs of three layers go forward twice
    4 bundles a stage          in every stage four times three saved tensors move away together, and come back early
    4 bundles, 128 layers      the same of 128 layers and 32 microbatches

    PYTHONPATH=src python benchmarks/bench_simulator.py [--beside CHECKOUT] [--json PATH] [--repeat N]
        [--only READING ...]

Seven readings of each program: making it, with its checks (lower); the peaks of one step alone; peaks and step time;
the whole trace; what a planner pays for a candidate: lowering, and the peaks and seconds of two steps; and the clock
alone for two steps, compiled (with the arrays that it reads) and in Python. Seconds are the CPU's, the least of N
repeats: a simulation waits for nothing, so that a busy machine distorts them less than it does the clock.
With `--beside`, the first two programs are simulated by the version in another checkout too, in turns
(`simulator_beside.py`): "new costs" are the peaks of the first plan of a profile, for which nothing is kept yet, and
"lower" is what makes the program, before any simulation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pipefit.lowering import lower
from pipefit.schema.decisions import Decision, Run, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Stage
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.simulator import Costs, Simulation, simulate
from pipefit.simulator.clock import _LIBRARY, _compiled, _interpreted
from simulator_beside import least_seconds
from support.pipelines import equal_profile, make_cluster, make_plan, offload_all

LAYERS, STAGES, MICROBATCHES = 100, 8, 64
LARGE_LAYERS, FEWER_MICROBATCHES = 128, 32
STEPS = 1
RUNS, BUNDLES, TOGETHER = (
    2,
    4,
    3,
)  # of a stage: recomputed runs, bundles; layers of a run, tensors of a bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One reading of one program."""

    program: str
    reading: str
    actions: int
    seconds: float
    us_per_action: float


def example(layers: int | None = None, microbatches: int | None = None) -> Plan:
    """The plan that is measured: LAYERS layers in uneven stages, MICROBATCHES microbatches, links of 10 GB/s."""
    layers, microbatches = layers or LAYERS, microbatches or MICROBATCHES
    profile = equal_profile(
        layers,
        input_bytes=10**7,
        output_bytes=10**7,
        kept_bytes=10**7,
        forward_seconds=1e-3,
        backward_seconds=2e-3,
    )
    split = [layers // STAGES + (number < layers % STAGES) for number in range(STAGES)]
    return make_plan(
        profile, split, microbatches=microbatches, cluster=make_cluster(STAGES, bytes_per_second=1e10)
    )


def programs() -> Iterator[tuple[str, Plan, Program]]:
    """Every plan and its program, by name."""
    plain = example()
    yield "plain 1f1b", plain, lower(plain)
    yield "offload in every layer", plain, offload_all(plain)
    runs = decided(plain, RUNS, recomputed)
    yield "runs recomputed", runs, lower(runs)
    bundles = decided(plain, BUNDLES, moved)
    yield "4 bundles a stage", bundles, lower(bundles)
    large = decided(example(LARGE_LAYERS, FEWER_MICROBATCHES), BUNDLES, moved)
    yield "4 bundles, 128 layers", large, lower(large)


def decided(plan: Plan, count: int, decide: Callable[[int, range], Decision]) -> Plan:
    """The plan with so many decisions in every stage, each about layers that adjoin, evenly spread."""
    decisions = (
        decide(number, range(start, start + TOGETHER))
        for number, stage in enumerate(plan.stages)
        for start in starts(stage, count)
    )
    return replace(plan, decisions=tuple(decisions))


def starts(stage: Stage, count: int) -> range:
    """The first layers of so many runs in a stage."""
    every = (stage.stop - stage.start) // count
    return range(stage.stop - count * every, stage.stop, every)


def recomputed(stage: int, layers: range) -> Decision:
    """The layers go forward twice."""
    return Decision(stage=stage, subject=Run(start=layers.start, stop=layers.stop), what=What.RECOMPUTE)


def moved(stage: int, layers: range) -> Decision:
    """What the layers save besides their inputs goes to the host together, and is back one action early."""
    subject = SavedTensors(tensors=tuple((layer, 0) for layer in layers))
    return Decision(stage=stage, subject=subject, what=What.OFFLOAD, place=parse_place("host"), ahead=1)


def best_seconds(work: Callable[[], object], repeat: int) -> float:
    """The shortest of `repeat` runs."""
    times = []
    for _ in range(repeat):
        start = process_time()
        work()
        times.append(process_time() - start)
    return min(times)


def measure(
    name: str, plan: Plan, program: Program, repeat: int, only: Sequence[str] | None = None
) -> Iterator[Row]:
    """One row per reading, or for some of them."""
    actions, costs = sum(map(len, program.actions)), Costs.of(plan)
    readings: dict[str, Callable[[], object]] = {
        "lower": lambda: lower(plan),
        "peaks": lambda: Simulation(plan, program=program, steps=STEPS, costs=costs).peak_bytes,
        "peaks and seconds": lambda: _figures(Simulation(plan, program=program, steps=STEPS, costs=costs)),
        "trace": lambda: simulate(plan, program=program, steps=STEPS),
        "candidate": lambda: _figures(Simulation(plan, costs=costs)),
        **clocks(Simulation(plan, program=program, steps=STEPS, costs=costs)),
    }
    if program != lower(plan):  # it was written by hand
        readings = {name: run for name, run in readings.items() if name not in ("lower", "candidate")}
    for reading, run in readings.items():
        if only is not None and reading not in only:
            continue
        seconds = best_seconds(run, repeat)
        yield Row(
            program=name,
            reading=reading,
            actions=actions,
            seconds=seconds,
            us_per_action=seconds / actions * 1e6,
        )


def clocks(simulation: Simulation) -> dict[str, Callable[[], object]]:
    """The clocks of two steps."""
    timed = simulation._timed_program

    def compiled() -> object:
        for kept in ("flat", "opposite"):
            timed.__dict__.pop(kept, None)
        return _compiled(_LIBRARY, timed, 2)

    own = {"clock": compiled} if _LIBRARY is not None else {}
    return {**own, "clock in Python": lambda: _interpreted(timed, 2)}


def _figures(simulation: Simulation) -> tuple[object, object]:
    return simulation.peak_bytes, simulation.step_seconds


def line(row: Row) -> str:
    """One line of the table."""
    return (
        f"{row.program:24} {row.reading:18} {row.actions:6} actions  {row.seconds:.4f} s  "
        f"{row.us_per_action:.2f} us per action"
    )


def main() -> None:
    """Print the table; with --json, write it too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--beside", type=Path, help="the checkout of an older version to simulate with, in turns"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="readings, such as clock and 'clock in Python'")
    options = parser.parse_args()
    rows = []
    for name, plan, program in programs():
        for row in measure(name, plan, program, options.repeat, options.only):
            print(line(row), flush=True)
            rows.append(row)
    beside = [] if options.beside is None else least_seconds(options.beside, options.repeat)
    print(*beside, sep="\n")
    if options.json:
        from measured_on import machine  # imports torch, whose objects would slow the garbage collector down

        document = {"machine": machine(), "rows": [*map(asdict, rows)], "beside": [*map(asdict, beside)]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
