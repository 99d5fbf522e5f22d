"""Claim: where runs of layers may be recomputed, plans of `joint` are within a few per cent of the fastest there is.

Small chains of six to eight layers on two to four devices, made up at random, with caps that no split meets with all
kept. An exact solver chooses the cuts and which layers are recomputed, alone or with the one before: a mixed-integer
programme (HiGHS, by way of scipy) has a binary variable for every stage with its layers and what of them is recomputed,
among those whose peak by the ledger is within the cap; the begin of every forward and backward is a number, and each
comes behind those before it in the order of 1F1B and behind the messages it needs. Beside it:

    mpress   the heuristic of the MPress paper, which may recompute alone
    joint    heuristic, local search and polishing, which may recompute alone, just before the backward
    bound    below which `joint` proves that no plan is

Seconds are CPU seconds; gaps are per cent above the exact optimum, which is checked to be the simulator's step.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_exact.py [--questions N] [--tables]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from measured_on import machine
from page_tables import markdown, put
from pipefit.planner import Means, Planner, PlanOptions, Question, joint, mpress, solved
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.synthetic_models import layer, measurement, profile, training, value
from support.tight_questions import cluster, keeping_layer

RESULTS = Path(__file__).parent / "results" / "exact.json"
MEANS = Means(host=False, peers=False, ahead=False)
Layers = tuple[int, int]


class Column(NamedTuple):
    """A stage that may be chosen: its place, its layers, what is recomputed, and its seconds. Of a backward the `early`
    ones come first, in which the last layers run again: they need no gradient from the next stage.
    """

    stage: int
    layers: Layers
    runs: tuple[Layers, ...]
    forward: float
    backward: float
    update: float
    early: float


class Exact(NamedTuple):
    """The optimum: its seconds, its plan, how many variables there were, and CPU seconds."""

    seconds: float
    plan: Plan
    variables: int
    binaries: int
    solver_seconds: float


def case(seed: int, layers: int, devices: int) -> tuple[ModelProfile, Cluster, Training]:
    """A chain whose layers keep much, on devices that cannot keep it."""
    rng = Random(seed)
    widths = [rng.choice((2, 4, 8)) for _ in range(layers)]
    costs = [
        keeping_layer(8, 8 * width, rng.choice((4, 8, 16)), float(rng.randint(2, 9))) for width in widths
    ]
    how = training("1f1b", 6)
    chain = profile(measurement(costs, layer((value(8), value(1)), (value(4),), seconds=0.5)))
    ample = cluster([1 << 40] * devices, host_rate=1.0, peer_rate=rng.choice((8.0, 40.0)))
    even = [layers * n // devices for n in range(devices + 1)]
    kept = Simulation(plan_of(chain, ample, how, even, ())).peak_bytes
    every = [
        Decision(stage=s, subject=Run(start=a, stop=b), what=What.RECOMPUTE)
        for s, (a, b) in enumerate(pairwise(even))
    ]
    least = Simulation(plan_of(chain, ample, how, even, every)).peak_bytes
    cap = round(max(least) + rng.uniform(0.1, 0.6) * max(max(kept) - max(least), 1))
    return chain, cluster([cap] * devices, host_rate=1.0, peer_rate=ample.links[-1].bytes_per_second), how


def plan_of(
    chain: ModelProfile, on: Cluster, how: Training, edges: Sequence[int], decisions: Sequence[Decision]
) -> Plan:
    """The plan of stages between these edges, in the order of devices."""
    stages = tuple(Stage(start=a, stop=b, grid=Grid.of(n)) for n, (a, b) in enumerate(pairwise(edges)))
    return Plan(profile=chain, cluster=on, training=how, stages=stages, decisions=tuple(decisions))


# -------------------------------------------------------------------- the exact solver


def columns(chain: ModelProfile, on: Cluster, how: Training) -> Iterator[Column]:
    """Every stage that fits its device, without those that recompute more than another of the same layers."""
    layers, stages = len(chain.layers), len(on.devices)
    for stage in range(stages):
        for start, stop in combinations(range(layers + 1), 2):
            if start < stage or layers - stop < stages - 1 - stage or (stage == 0) != (start == 0):
                continue
            if (stage == stages - 1) == (stop == layers):
                yield from of_layers(chain, on, how, stage, (start, stop))


def of_layers(
    chain: ModelProfile, on: Cluster, how: Training, stage: int, layers: Layers
) -> Iterator[Column]:
    """The ways to recompute parts of a stage that fit."""
    (start, stop), count = layers, len(on.devices)
    before = [start * n // max(stage, 1) for n in range(stage)]
    after = [
        stop + (len(chain.layers) - stop) * (n + 1) // max(count - 1 - stage, 1)
        for n in range(count - 1 - stage)
    ]
    edges = [*before, start, stop, *after]
    for runs in recomputations(start, stop):
        decisions = [
            Decision(stage=stage, subject=Run(start=a, stop=b), what=What.RECOMPUTE) for a, b in runs
        ]
        if (
            Simulation(plan_of(chain, on, how, edges, decisions), steps=2).peak_bytes[stage]
            <= on.budgets[stage]
        ):
            costs = chain.measurements[0].costs
            times = [
                (c.forward.seconds or 0.0, c.backward.seconds or 0.0, c.update.seconds or 0.0) for c in costs
            ]
            forward, backward, update = (sum(one[k] for one in times[start:stop]) for k in range(3))
            again = sum(times[layer][0] for a, b in runs for layer in range(a, b))
            if stop == len(chain.layers):
                loss = chain.measurements[0].loss
                forward, backward = (
                    forward + (loss.forward.seconds or 0.0),
                    backward + (loss.backward.seconds or 0.0),
                )
            early = (
                sum(times[place][0] for place in range(*runs[-1])) if runs and runs[-1][1] == stop else 0.0
            )
            yield Column(stage, layers, runs, forward, backward + again, update, early)


def recomputations(start: int, stop: int) -> Iterator[tuple[Layers, ...]]:
    """All choices of runs: each layer is kept, recomputed alone, or with the one before."""
    for choice in product("kaj", repeat=stop - start):
        if any(c == "j" and (n == 0 or choice[n - 1] == "k") for n, c in enumerate(choice)):
            continue
        runs: list[Layers] = []
        for place, c in enumerate(choice, start=start):
            if c == "a":
                runs.append((place, place + 1))
            elif c == "j":
                runs[-1] = runs[-1][0], place + 1
        yield tuple(runs)


def order(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """What a stage computes under 1F1B."""
    first = min(stages - stage, microbatches)
    found = [("F", m) for m in range(first)]
    for m in range(microbatches):
        found += [("B", m)] + ([("F", m + first)] if m + first < microbatches else [])
    return found


class Model:
    """Rows of the programme: `columns` first, then the begins of all actions, and the end of the step."""

    def __init__(self, given: list[Column], stages: int, microbatches: int) -> None:
        self.given, self.count = given, len(given) + 2 * stages * microbatches + 1
        self._stages, self._microbatches = stages, microbatches
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def at(self, kind: str, stage: int, microbatch: int) -> int:
        """The variable of when an action begins."""
        return len(self.given) + ((kind == "B") * self._stages + stage) * self._microbatches + microbatch

    def add(self, row: dict[int, float], low: float, high: float = np.inf) -> None:
        """A row between two values."""
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def behind(self, later: int, earlier: int, lasting: dict[int, float]) -> None:
        """One action begins when another one, which takes as long as the chosen columns say, has ended."""
        row = {later: 1.0, earlier: -1.0}
        for column, seconds in lasting.items():
            row[column] = row.get(column, 0.0) - seconds
        self.add(row, 0.0)


def solve(chain: ModelProfile, on: Cluster, how: Training) -> Exact | None:
    """The fastest plan; None where none fits."""
    began, stages, count = time.process_time(), len(on.devices), how.microbatches
    given = [*columns(chain, on, how)]
    model, width, rate = (
        Model(given, stages, count),
        chain.measurements[0].costs[0].inputs[0].nbytes,
        on.links[-1],
    )
    message = rate.latency_seconds + width / rate.bytes_per_second
    of_stage = [[n for n, one in enumerate(given) if one.stage == stage] for stage in range(stages)]
    if not all(of_stage):
        return None
    for stage, own in enumerate(of_stage):
        model.add(dict.fromkeys(own, 1.0), 1.0, 1.0)
        for cut in range(1, len(chain.layers)) if stage + 1 < stages else ():
            ends = {n: 1.0 for n in own if given[n].layers[1] == cut}
            model.add(ends | {n: -1.0 for n in of_stage[stage + 1] if given[n].layers[0] == cut}, 0.0, 0.0)
        lasting = {
            "F": {n: given[n].forward for n in own},
            "B": {n: given[n].backward for n in own},
        }
        for (one, m), (following, k) in pairwise(order(stage, stages, count)):
            model.behind(model.at(following, stage, k), model.at(one, stage, m), lasting[one])
        for m in range(count):
            if stage + 1 < stages:
                sent = {n: given[n].forward + message for n in own}
                model.behind(model.at("F", stage + 1, m), model.at("F", stage, m), sent)
            if stage:
                sent = {n: given[n].backward + message for n in own}
                sent |= {n: -given[n].early for n in of_stage[stage - 1]}
                model.behind(model.at("B", stage - 1, m), model.at("B", stage, m), sent)
        last = {n: given[n].backward + given[n].update for n in own}
        model.behind(model.count - 1, model.at("B", stage, count - 1), last)
    where = [(row, column, value) for row, found in enumerate(model.rows) for column, value in found.items()]
    rows, cols, values = (np.array(part) for part in zip(*where, strict=True))
    matrix = csr_array((values, (rows, cols)), shape=(len(model.rows), model.count))
    price, binary = np.zeros(model.count), np.zeros(model.count)
    price[-1], binary[: len(given)] = 1.0, 1.0
    most = np.where(binary > 0, 1.0, np.inf)
    answer = milp(
        price,
        constraints=LinearConstraint(matrix, model.low, model.high),
        integrality=binary,
        bounds=Bounds(np.zeros(model.count), most),
        options={"mip_rel_gap": 1e-9},
    )
    if answer.x is None:
        return None
    taken = [given[n] for n in range(len(given)) if answer.x[n] > 0.5]
    decisions = [
        Decision(stage=one.stage, subject=Run(start=a, stop=b), what=What.RECOMPUTE)
        for one in taken
        for a, b in one.runs
    ]
    plan = plan_of(chain, on, how, [0, *(one.layers[1] for one in taken)], decisions)
    return Exact(float(answer.fun), plan, model.count, len(given), time.process_time() - began)


# -------------------------------------------------------------------- beside it


def answered(seed: int, layers: int, devices: int) -> dict[str, Any] | None:
    """A row; None where nothing fits, or all can be kept."""
    chain, on, how = case(seed, layers, devices)
    exact = solve(chain, on, how)
    if exact is None or not exact.plan.decisions:
        return None
    simulated = Simulation(exact.plan)
    assert abs(simulated.step_seconds[-1] - exact.seconds) < 1e-6 * exact.seconds, (
        simulated.step_seconds,
        exact.seconds,
    )
    question = Question(
        profile=chain,
        cluster=on,
        training=how,
        options=PlanOptions(stages=devices, allow_infeasible=True, means=MEANS),
    )
    row: dict[str, Any] = {
        "layers": layers, "devices": devices, "seed": seed, "variables": exact.variables, "binaries": exact.binaries,
        "exact": exact.seconds, "exact cpu": exact.solver_seconds,
    }  # fmt: skip
    planners: dict[str, tuple[Planner, Question]] = {"mpress": (mpress, question), "joint": (joint, question)}
    for name, (planner, asked) in planners.items():
        began = time.process_time()
        made = solved(asked, planner, name=name)
        assert made.prediction is not None, "planners predict"
        assert made.provenance is not None, "and say who they are"
        fits = max(made.prediction.peak_bytes) <= on.budgets[0]
        row |= {
            name: made.prediction.step_seconds if fits else None,
            f"{name} cpu": time.process_time() - began,
        }
        row["bound"] = made.provenance.bound
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each size of question."""
    lines = []
    for size in dict.fromkeys((row["layers"], row["devices"]) for row in rows):
        own = [row for row in rows if (row["layers"], row["devices"]) == size]
        cells = [gaps(own, name) for name in ("mpress", "joint")]
        bound = max(100 * (row["exact"] / row["bound"] - 1) for row in own)
        took = [np.mean([row[f"{name} cpu"] for row in own]) for name in ("exact", "mpress", "joint")]
        variables = f"{min(r['variables'] for r in own)} to {max(r['variables'] for r in own)}"
        lines.append((
            f"{size[0]} layers on {size[1]}", str(len(own)), variables, *cells, f"{bound:.0f} %",
            *(f"{seconds:.1f} s" for seconds in took),
        ))  # fmt: skip
    columns = (
        "question", "cases", "variables", "mpress above exact", "joint above exact", "exact above the bound, at most",
        "exact", "mpress", "joint",
    )  # fmt: skip
    return markdown(columns, lines)


def gaps(own: Sequence[dict[str, Any]], name: str) -> str:
    """The mean gap, the largest, and how often nothing that fits was found."""
    found = [100 * (row[name] / row["exact"] - 1) for row in own if row[name] is not None]
    short = len(own) - len(found)
    told = f"{np.mean(found):.1f} %, at most {max(found):.1f}" if found else ""
    return told + (f"; none in {short}" if short else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer the questions, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=10, help="for each size")
    parser.add_argument(
        "--tables", action="store_true", help="put the table of the JSON into the page, solve nothing"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    if options.tables:
        rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
        put({"exact": table(rows)})
    for layers, devices in () if options.tables else ((6, 2), (6, 3), (7, 3), (8, 3), (8, 4)):
        seed = found = 0
        while found < options.questions:
            row = answered(seed, layers, devices)
            seed += 1
            if row is not None:
                found += 1
                rows.append(row)
                print(
                    {
                        key: round(value, 3) if isinstance(value, float) else value
                        for key, value in row.items()
                    },
                    flush=True,
                )
                options.json.write_text(
                    json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
                )
    print(table(rows))


if __name__ == "__main__":
    main()
