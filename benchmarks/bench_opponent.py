"""Claim: a blind search over whole plans hardly ever beats `joint`, whose plans are near a bound of all plans.

For random questions (`random_questions.py`): the gap of the plan to its bound, and by how much a local search of some
seconds is faster than the plan. The search knows nothing of schedules, prices or links. It changes a plan at random
(cuts, devices, the number of stages, what happens to a few layers, when it happens) and keeps a change if the simulated
plan fits better, or fits and is not slower; half of its time it starts from the plan itself. It shares only the
simulator with the planner, so whatever it gains is missed by the planner, and the rest of a gap is perhaps the bound's.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_opponent.py [--seeds FIRST LAST] [--seconds S]
        [--beside FILE] [--json FILE]

Rows of seeds that the JSON file has already are kept, but for the seconds of the search, which `--again` repeats.
`--beside FILE` compares the plans with those of another file, of another version, and keeps these in the rows. A plan's
gap is its seconds over its bound; a question without a plan that fits has none, and the search then has only to find
one that fits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import exp, inf
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

from measured_on import machine
from pipefit.errors import UsageError
from pipefit.memory import Costs, missing_bytes
from pipefit.planner import plan
from pipefit.schema.decisions import Decision, Run, SavedTensors, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.simulator import Assembled, Parts
from random_questions import RandomQuestion, random_question

RESULTS = Path(__file__).parent / "results" / "opponent.json"
KEEP, RECOMPUTE, JOINED, HOST = "keep", "recompute", "joined", "host"
TREATMENTS = KEEP, KEEP, RECOMPUTE, JOINED, HOST
STATES = "device", "host", "updated"
BEATEN = 0.03  # part of a step by which the search has to be faster to count as a win
COOL = 0.02  # part of a step by which a change may be slower at the beginning of a search


# -------------------------------------------------------------------- plans, as the search sees them


class Whole(NamedTuple):
    """A whole plan: the first layer of every stage and the end, its device, and what happens to every layer."""

    edges: tuple[int, ...]
    devices: tuple[int, ...]
    layers: tuple[str, ...]
    states: tuple[str, ...]
    ahead: tuple[int, ...]  # of every device, for recomputation and reloads
    behind: tuple[int, ...]


def decoded(of: Plan) -> Whole:
    """Return a plan as the search sees it, without peers and with one time for all tensors of a device."""
    count, devices = len(of.profile.layers), len(of.cluster.devices)
    layers, states = [KEEP] * count, ["device"] * count
    ahead, behind = [0] * devices, [1] * devices
    for one in of.decisions:
        device, subject = of.stages[one.stage].devices[0], one.subject
        if isinstance(subject, Run):
            layers[subject.start : subject.stop] = [RECOMPUTE, *[JOINED] * (subject.stop - subject.start - 1)]
        elif isinstance(subject, SavedTensors):
            for number, _ in subject.tensors:
                layers[number] = HOST
            behind[device] = max(behind[device], one.behind)
        elif subject.kind == "optimizer":
            moved = "updated" if one.what is What.UPDATE else "host"
            states[subject.start : subject.stop] = [moved] * (subject.stop - subject.start)
        ahead[device] = max(ahead[device], one.ahead)
    edges = (*(stage.start for stage in of.stages), count)
    there = tuple(stage.devices[0] for stage in of.stages)
    return Whole(edges, there, tuple(layers), tuple(states), tuple(ahead), tuple(behind))


def encoded(whole: Whole, of: RandomQuestion) -> Plan:
    """Return the plan."""
    ends = list(pairwise(whole.edges))
    stages = tuple(
        Stage(start=a, stop=b, grid=Grid.of(device))
        for (a, b), device in zip(ends, whole.devices, strict=True)
    )
    decisions = [one for number in range(len(ends)) for one in _decisions(whole, number)]
    return Plan(
        profile=of.profile,
        cluster=of.cluster,
        training=of.training,
        stages=stages,
        decisions=tuple(decisions),
    )


def _decisions(whole: Whole, stage: int) -> Iterator[Decision]:
    start, stop = whole.edges[stage : stage + 2]
    device, runs, away = whole.devices[stage], list[list[int]](), list[int]()
    for number in range(start, stop):
        match whole.layers[number]:
            case "joined" if runs and runs[-1][1] == number:
                runs[-1][1] = number + 1
            case "recompute" | "joined":
                runs.append([number, number + 1])
            case "host":
                away.append(number)
    ahead, behind = whole.ahead[device], whole.behind[device]
    for a, b in runs:
        yield Decision(stage=stage, subject=Run(start=a, stop=b), what=What.RECOMPUTE, ahead=min(1, ahead))
    if away:
        tensors = SavedTensors(tensors=tuple((number, index) for number in away for index in (1, 2)))
        yield Decision(
            stage=stage,
            subject=tensors,
            what=What.OFFLOAD,
            place=parse_place("host"),
            ahead=ahead,
            behind=behind,
        )
    for number in range(start, stop):
        if whole.states[number] != "device":
            what = What.UPDATE if whole.states[number] == "updated" else What.OFFLOAD
            subject = State(start=number, stop=number + 1, kind="optimizer")
            place, early = parse_place("host"), 0 if what is What.UPDATE else 1
            yield Decision(stage=stage, subject=subject, what=what, place=place, ahead=early)


# -------------------------------------------------------------------- moves


def _cut(rng: Random, whole: Whole) -> Whole:
    """Shift one cut, or all cuts of some adjacent stages, by a block or two."""
    inner = len(whole.edges) - 2
    if not inner:
        return whole
    first, by = rng.randint(1, inner), 2 * rng.choice((-2, -1, -1, 1, 1, 2))
    last = first if rng.random() < 0.6 else rng.randint(first, inner)
    edges = tuple(edge + by * (first <= n <= last) for n, edge in enumerate(whole.edges))
    return whole._replace(edges=edges) if all(a < b for a, b in pairwise(edges)) else whole


def _swap(rng: Random, whole: Whole) -> Whole:
    """Swap the devices of two stages, or a used and an unused device."""
    order = [*whole.devices, *sorted(set(range(len(whole.ahead))) - set(whole.devices))]
    if len(order) < 2:
        return whole
    one, other = rng.sample(range(len(order)), 2)
    order[one], order[other] = order[other], order[one]
    return whole._replace(devices=tuple(order[: len(whole.devices)]))


def _permute(rng: Random, whole: Whole) -> Whole:
    """Move one device to another stage, and those between by one stage."""
    order = list(whole.devices)
    order.insert(rng.randrange(len(order)), order.pop(rng.randrange(len(order))))
    return whole._replace(devices=tuple(order))


def _exchange(rng: Random, whole: Whole) -> Whole:
    """Swap the devices of two stages together with their numbers of layers."""
    if len(whole.devices) < 2:
        return whole
    one, other = rng.sample(range(len(whole.devices)), 2)
    order, sizes = list(whole.devices), [b - a for a, b in pairwise(whole.edges)]
    for of in (order, sizes):
        of[one], of[other] = of[other], of[one]
    edges = tuple(sum(sizes[:n]) for n in range(len(sizes) + 1))
    return whole._replace(edges=edges, devices=tuple(order))


def _count(rng: Random, whole: Whole) -> Whole:
    """Join two adjacent stages, or split one on an unused device."""
    unused, stage = (
        sorted(set(range(len(whole.ahead))) - set(whole.devices)),
        rng.randrange(len(whole.devices)),
    )
    start, stop = whole.edges[stage : stage + 2]
    if unused and rng.random() < 0.5 and stop - start > 2:
        cut, device = 2 * rng.randrange(start // 2 + 1, stop // 2), rng.choice(unused)
        edges = (*whole.edges[: stage + 1], cut, *whole.edges[stage + 1 :])
        return whole._replace(edges=edges, devices=(*whole.devices[:stage], device, *whole.devices[stage:]))
    if stage and len(whole.devices) > 2:
        edges = (*whole.edges[:stage], *whole.edges[stage + 1 :])
        return whole._replace(edges=edges, devices=(*whole.devices[:stage], *whole.devices[stage + 1 :]))
    return whole


def _treat(rng: Random, whole: Whole) -> Whole:
    """Treat a few adjacent layers in another way."""
    return whole._replace(layers=_some(rng, whole.layers, TREATMENTS))


def _block(rng: Random, whole: Whole) -> Whole:
    """Treat a block, or some adjacent blocks, in another way: as a run of its own if it is recomputed."""
    start = 2 * rng.randrange(len(whole.layers) // 2)
    count, treatment = rng.choice((1, 1, 2, 4)), rng.choice((KEEP, RECOMPUTE, HOST))
    both = [treatment, JOINED if treatment == RECOMPUTE else treatment]
    layers = [*whole.layers[:start], *both * count, *whole.layers[start + 2 * count :]]
    return whole._replace(layers=tuple(layers[: len(whole.layers)]))


def _state(rng: Random, whole: Whole) -> Whole:
    """Move the state of some adjacent layers, or of none."""
    return whole._replace(states=_some(rng, whole.states, STATES))


def _time(rng: Random, whole: Whole) -> Whole:
    """Let a device recompute and reload earlier or later, or offload more slowly."""
    device = rng.randrange(len(whole.ahead))
    ahead, behind = list(whole.ahead), list(whole.behind)
    if rng.random() < 0.6:
        ahead[device] = rng.choice((0, 1, 2))
    else:
        behind[device] = rng.choice((1, 2, 3))
    return whole._replace(ahead=tuple(ahead), behind=tuple(behind))


def _some(rng: Random, of: tuple[str, ...], ways: Sequence[str]) -> tuple[str, ...]:
    start, count, way = rng.randrange(len(of)), rng.choice((1, 1, 2, 4, 8)), rng.choice(ways)
    return tuple(way if start <= n < start + count else one for n, one in enumerate(of))


MOVES: tuple[Callable[[Random, Whole], Whole], ...] = (
    _cut, _cut, _cut, _swap, _permute, _exchange, _count, _treat, _treat, _block, _block, _block, _state, _time,
)  # fmt: skip


# -------------------------------------------------------------------- the search


class Opponent:
    """Local search of whole plans for one question."""

    def __init__(self, question: RandomQuestion) -> None:
        self._question = question
        self._parts = Parts(Costs(question.profile.measurements[0], question.training))
        self.count = 0

    def score(self, whole: Whole) -> tuple[int, float]:
        """Return the missing bytes and the seconds of a plan; infinite if it cannot be carried out."""
        self.count += 1
        try:
            found = Assembled(encoded(whole, self._question), self._parts)
            budgets = self._question.cluster.budgets
            over = sum(max(0, p - b) for p, b in zip(found.peak_bytes, budgets, strict=True))
            away = missing_bytes(found.plan, found.arenas)
            over += sum(n for member, n in away.items() if member.kind != "device")
            return over, found.seconds
        except UsageError:
            return 1 << 62, inf

    def search(self, start: Whole, seconds: float, rng: Random) -> tuple[tuple[int, float], Whole]:
        """Return the best score and plan that random changes make of a plan in some CPU seconds."""
        began = time.process_time()
        now = best = self.score(start), start
        while (part := (time.process_time() - began) / seconds) < 1:
            other = now[1]
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                other = rng.choice(MOVES)(rng, other)
            if other == now[1]:
                continue
            score = self.score(other)
            warm = COOL * (1 - part) * -_log(rng)
            if score[0] < now[0][0] or (score[0] == now[0][0] and score[1] <= now[0][1] * (1 + warm)):
                now = score, other
            if score < best[0]:
                best = score, other
        return best

    def even(self) -> Whole:
        """Return a split into equal numbers of blocks that keeps everything, in the order of the devices."""
        layers, count = len(self._question.profile.layers), len(self._question.cluster.devices)
        edges = tuple(2 * (layers // 2 * n // count) for n in range(count + 1))
        keep, state = (KEEP,) * layers, ("device",) * layers
        return Whole(edges, tuple(range(count)), keep, state, (1,) * count, (1,) * count)


def _log(rng: Random) -> float:
    return -exp(-5 * rng.random())


# -------------------------------------------------------------------- answers


def answered(seed: int) -> tuple[dict[str, Any], Plan]:
    """Return the row of a question without the search, and its plan."""
    question = random_question(seed)
    began = time.process_time()
    made = plan(question.profile, question.cluster, question.training, allow_infeasible=True)
    spent = time.process_time() - began
    assert made.prediction is not None, "planners predict"
    assert made.provenance is not None, "planners say where a plan comes from"
    simulated = Assembled(made, Parts(Costs.of(made)))
    fits = all(
        peak <= budget for peak, budget in zip(simulated.peak_bytes, question.cluster.budgets, strict=True)
    ) and not missing_bytes(made, simulated.arenas)
    row = {
        "seed": seed,
        "classes": question.classes,
        "devices": len(question.cluster.devices),
        "blocks": len(question.profile.blocks),
        "microbatches": question.training.microbatches,
        "fits": fits,
        "seconds": simulated.seconds,
        "predicted": made.prediction.step_seconds,
        "bound": made.provenance.bound,
        "cpu": spent,
        "plan": [list(made.split), [stage.devices[0] for stage in made.stages], len(made.decisions)],
    }
    return row, made


def opposed(row: dict[str, Any], made: Plan, seconds: float) -> dict[str, Any]:
    """Return the row with the search's seconds of a step; None if nothing that it found fits."""
    question = random_question(row["seed"])
    opponent, rng = Opponent(question), Random(row["seed"])
    starts = [opponent.even()]
    if all(len(stage.devices) == 1 for stage in made.stages):
        starts.append(decoded(made))
    found = [opponent.search(start, seconds / len(starts), rng) for start in starts]
    (over, best), whole = min(found, key=lambda one: one[0])
    won = [list(whole.edges), list(whole.devices), [f"{a} {b}" for a, b in _changed(whole)]]
    return row | {
        "opponent": None if over else best,
        "opponent plans": opponent.count,
        "opponent plan": won,
        "from": ["even", "plan"][found.index(((over, best), whole))],
    }


def _changed(whole: Whole) -> Iterator[tuple[int, str]]:
    for number, (layer, state) in enumerate(zip(whole.layers, whole.states, strict=True)):
        if (layer, state) != (KEEP, "device"):
            yield number, f"{layer} {state}"


# -------------------------------------------------------------------- tables


HEADINGS = (
    f"{'class':14} {'questions':>9} {'fit':>4} {'gap median':>10} {'p90':>6} {'worst':>6} "
    f"{'beaten by > 3 %':>15} {'p90':>6} {'worst':>6} {'CPU s':>6}"
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each class: the gap to the bound, and what the search gains."""
    groups = defaultdict[str, list[dict[str, Any]]](list)
    for row in rows:
        for name in ("all", *row["classes"]):
            groups[name].append(row)
    lines = [HEADINGS]
    for name, own in groups.items():
        gaps = sorted(
            100 * (row["seconds"] / row["bound"] - 1) for row in own if row["fits"] and row["bound"]
        )
        wins = sorted(100 * gain(row) for row in own if "opponent" in row)
        cells = [f"{median(gaps):10.1f} {_p90(gaps):6.1f} {gaps[-1]:6.1f}" if gaps else " " * 24]
        beaten = sum(one > 100 * BEATEN for one in wins)
        cells.append(f"{beaten:15} {_p90(wins):6.1f} {wins[-1]:6.1f}" if wins else " " * 29)
        cpu = sum(row["cpu"] for row in own) / len(own)
        lines.append(f"{name:14} {len(own):9} {len(gaps):4} {' '.join(cells)} {cpu:6.2f}")
    return "\n".join(lines)


def gain(row: dict[str, Any]) -> float:
    """Return the part by which the plan is slower than the search's; infinite if only the search's fits."""
    if row["opponent"] is None:
        return 0.0
    return row["seconds"] / row["opponent"] - 1 if row["fits"] else inf


def _p90(rising: Sequence[float]) -> float:
    return rising[min(len(rising) - 1, 9 * len(rising) // 10)]


def compared(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> str:
    """Return the seeds whose plans are slower than in other rows, and how much faster the others are."""
    known = {row["seed"]: row for row in others}
    pairs = [(row, known[row["seed"]]) for row in rows if row["seed"] in known]
    lost = [one["seed"] for one, other in pairs if other["fits"] and not one["fits"]]
    now_fit = [one["seed"] for one, other in pairs if one["fits"] and not other["fits"]]
    both = [(one, other) for one, other in pairs if one["fits"] and other["fits"]]
    slower = {
        one["seed"]: round(100 * (one["predicted"] / other["predicted"] - 1), 2)
        for one, other in both
        if one["predicted"] > other["predicted"] * (1 + 1e-9)
    }
    faster = sorted(
        ((round(100 * (other["predicted"] / one["predicted"] - 1), 1), one["seed"]) for one, other in both),
        reverse=True,
    )
    cpu = sum(one["cpu"] for one, _ in pairs) / max(1e-9, sum(other["cpu"] for _, other in pairs))
    return (
        f"{len(pairs)} questions: slower by % {slower}; do not fit any more {lost}; fit now {now_fit}; "
        f"faster by more than 1 %: {sum(gained > 1 for gained, _ in faster)}; most {faster[:12]}; "
        f"CPU {cpu:.2f}x"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer the questions, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 100), metavar=("FIRST", "LAST"))
    parser.add_argument("--seconds", type=float, default=0.0, help="CPU seconds of the search; 0 for none")
    parser.add_argument("--again", action="store_true", help="plan and search known seeds again")
    parser.add_argument("--beside", type=Path, help="JSON of another version, to compare the plans with")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows: dict[int, dict[str, Any]] = {}
    if options.json.exists():
        rows = {row["seed"]: row for row in json.loads(options.json.read_text(encoding="utf-8"))["rows"]}
    for seed in range(*options.seeds):
        known = rows.get(seed, {})
        if options.again or not known or (options.seconds and "opponent" not in known):
            row, made = answered(seed)
            rows[seed] = opposed(row, made, options.seconds) if options.seconds else row
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[seed].items()}, flush=True)
            document = {"machine": machine(), "rows": [rows[n] for n in sorted(rows)]}
            options.json.write_text(json.dumps(document) + "\n", encoding="utf-8")
    own = [rows[seed] for seed in range(*options.seeds) if seed in rows]
    print(table(own))
    if options.beside is not None:
        others = json.loads(options.beside.read_text(encoding="utf-8"))["rows"]
        print(compared(own, others))
        for other in others:
            if other["seed"] in rows:
                before = {key: other[key] for key in ("fits", "predicted", "bound", "cpu")}
                rows[other["seed"]]["before"] = before
        document = {"machine": machine(), "rows": [rows[seed] for seed in sorted(rows)]}
        options.json.write_text(json.dumps(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
