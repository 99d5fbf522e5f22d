"""Claim: what is done for every second microbatch alone may be faster than what is done for all or none.

`joint` decides for all microbatches. Small questions on two devices are answered by every plan that there is
(`tests/support/tight_questions.py`), once so, and once with every decision also for the even or the odd
microbatches alone. By how much the fastest plan is then faster, in per cent.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_shares.py [--questions N]

Some two seconds a question.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice, product
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pipefit.errors import UsageError
from pipefit.memory.stage import Costs
from pipefit.schema.decisions import Microbatches
from pipefit.schema.plan import Plan
from pipefit.simulator.assembled import Assembled, Parts
from support.tight_questions import EVERY, Case, plans, random_case

SCHEDULES = ("1f1b", "gpipe", "pipedream")
ALL, HALVES = (Microbatches(),), (Microbatches(), Microbatches(1, 2, 0), Microbatches(1, 2, 1))


def ways(plan: Plan, shares: Sequence[Microbatches]) -> Iterator[Plan]:
    """The plan with each of its decisions for each share of the microbatches, just in time and early."""
    for chosen in product(shares, repeat=len(plan.decisions)):
        for ahead in (0, 1) if chosen else (0,):
            pairs = zip(plan.decisions, chosen, strict=True)
            yield replace(plan, decisions=tuple(replace(d, microbatches=m, ahead=ahead) for d, m in pairs))


def fastest(case: Case, shares: Sequence[Microbatches]) -> float | None:
    """Seconds of the fastest plan that fits; None if there is none."""
    parts, best = Parts(Costs(case.profile.measurements[0], case.training)), list[float]()
    for made in (way for plan in plans(case, EVERY) for way in ways(plan, shares)):
        try:
            found = Assembled(made, parts)
        except UsageError:  # what this schedule does not carry out
            continue
        if all(p <= d.memory_bytes for p, d in zip(found.peak_bytes, case.cluster.devices, strict=True)):
            best = [min([*best, found.step_seconds[-1]])]
    return best[0] if best else None


def gains() -> Iterator[tuple[str, float]]:
    """The schedule of each question that has an answer, and by how much shares are faster."""
    for seed in count():
        case = random_case(Random(seed), SCHEDULES)
        if len(case.cluster.devices) == 2 and (whole := fastest(case, ALL)) is not None:
            half = fastest(case, HALVES)
            assert half is not None, "all is one of the shares"
            yield case.training.schedule, 100 * (whole / half - 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each schedule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=80)
    found = [*islice(gains(), parser.parse_args(arguments).questions)]
    for schedule in SCHEDULES:
        own = [gain for name, gain in found if name == schedule]
        faster, mean = sum(gain > 1e-6 for gain in own), sum(own) / max(1, len(own))
        print(
            f"{schedule}: {len(own)} questions, {faster} faster, mean {mean:.1f} %, most {max(own, default=0.0):.1f} %"
        )


if __name__ == "__main__":
    main()
