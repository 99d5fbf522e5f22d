"""Claim: copies that run beside computing cost less than copies that are waited for, and less than recomputation where
the simulator says so; and of random plans, the one that the simulator says is faster is faster.

Two workers of one thread on emulated devices, whose links take 12 ms to copy what one wide layer keeps. The profile is
measured at the start, on the same machine; a plan's predicted step is the simulator's second one.

    keep                       everything stays on the devices
    recompute                  the wide layers of both stages go forward twice
    host, at once              what two of them keep goes to the host and comes back, and is waited for each time
    host, beside computing     one computation later, and one computation ahead
    peer, ...                  the same with the other device's memory
    random ...                 20 plans or more with random decisions of all kinds and random schedules

Every plan trains a few steps by turns with all others, several times over; its figure is the median of all steps but
the first of each time. Two plans count where their predictions differ by more than the noise: `--noise` of the longer
step, or, if that is more, twice the quartiles' distance of a plan's steps, in the median over the plans. Wide layers
sleep, or with `--compute kernels` multiply matrices, for which the machine should have nothing else to do.

    python benchmarks/bench_overlap.py [--compute sleeping|kernels] [--plans 24] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path

import pipefit
from measured_on import machine
from overlap_plans import make_plan, make_task, named_plans, random_plans
from pipefit.schema.plan import Plan
from pipefit.simulator import simulate

STEPS = 4  # of a turn; the first is not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan: seconds of a step as they were predicted and measured, and the quartiles of what was measured."""

    name: str
    schedule: str
    microbatches: int
    decisions: tuple[str, ...]
    predicted_seconds: float
    seconds: float
    quartile_seconds: tuple[float, float]

    @property
    def spread(self) -> float:
        """The difference between the quartiles, as a part of the median."""
        low, high = self.quartile_seconds
        return (high - low) / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How well predicted and measured order agree: over all pairs (Kendall's tau), and over those that differ."""

    plans: int
    noise: float
    pairs: int
    in_order: int
    tau: float


def measure(compute: str, plans: Sequence[tuple[str, Plan]], repeats: int) -> list[Row]:
    """Train all plans by turns."""
    taken: dict[str, list[float]] = {name: [] for name, _ in plans}
    for repeat in range(repeats):
        for name, plan in plans:
            _, trace = pipefit.train(partial(make_task, compute), plan, steps=STEPS)
            taken[name] += trace.step_seconds[1:]
        print(f"turn {repeat + 1} of {repeats}", flush=True)
    return [row(name, plan, taken[name]) for name, plan in plans]


def row(name: str, plan: Plan, taken: Sequence[float]) -> Row:
    """The figures of one plan."""
    low, median, high = statistics.quantiles(taken, n=4)
    return Row(
        name=name,
        schedule=plan.training.schedule,
        microbatches=plan.training.microbatches,
        decisions=tuple(map(str, plan.decisions)),
        predicted_seconds=simulate(plan, steps=2).step_seconds[1],
        seconds=median,
        quartile_seconds=(low, high),
    )


def agreement(rows: Sequence[Row], least_noise: float) -> Agreement:
    """Predicted and measured order of all pairs of plans."""
    noise = max(least_noise, 2 * statistics.median(one.spread for one in rows))
    signs = [
        (_sign(a.predicted_seconds - b.predicted_seconds) * _sign(a.seconds - b.seconds), _apart(a, b, noise))
        for a, b in combinations(rows, 2)
    ]
    told = [sign for sign, apart in signs if apart]
    return Agreement(
        plans=len(rows),
        noise=noise,
        pairs=len(told),
        in_order=sum(sign > 0 for sign in told),
        tau=sum(sign for sign, _ in signs) / len(signs),
    )


def _apart(one: Row, other: Row, noise: float) -> bool:
    predicted = one.predicted_seconds, other.predicted_seconds
    return max(predicted) - min(predicted) > noise * max(predicted)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def line(one: Row) -> str:
    """One line of the table."""
    return (
        f"{one.name:24} {one.schedule:11} {one.microbatches} microbatches  predicted {one.predicted_seconds:.3f} s  "
        f"measured {one.seconds:.3f} s ({one.quartile_seconds[0]:.3f} to {one.quartile_seconds[1]:.3f})"
    )


def main() -> None:
    """Print the table and the agreement; with --json, write them too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compute", choices=["sleeping", "kernels"], default="sleeping")
    parser.add_argument("--plans", type=int, default=24, help="random ones")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--noise", type=float, default=0.03)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore", pipefit.PipefitWarning)
    still = make_plan(options.compute)
    plans = [*named_plans(still), *random_plans(still, options.plans)]
    rows = measure(options.compute, plans, options.repeats)
    found = agreement([one for one in rows if one.name.startswith("random")], options.noise)
    print(*map(line, rows), sep="\n")
    print(
        f"{found.in_order} of {found.pairs} pairs whose predictions differ by more than {found.noise:.1%} in order; "
        f"tau over all pairs {found.tau:.2f}"
    )
    if options.json:
        document = {
            "machine": machine(),
            "compute": options.compute,
            "rows": [*map(asdict, rows)],
            "agreement": asdict(found),
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
