"""Claim: on the MPress paper's machines and models, simulated, who fails and who is faster comes out as the paper says,
and `joint` is never slower than `mpress`.

Bert of 0.35 to 6.2 billion parameters under PipeDream, minibatches of 12, and GPT of 5.3 to 25.5 billion under 1F1B in
16, 32 and 64 microbatches of 2 (`bench_demands.py` has the models and what is assumed of them), on a DGX-1 and a DGX-2:

    none         the compute-balanced split as it is
    balanced     the split with the lowest peak
    recompute    the compute-balanced split, and `mpress` with nothing but recomputing whole blocks
    host         the same with nothing but moves to the host, optimizer state included
    peers        the same with nothing but moves to devices that have memory to spare
    mpress       all three
    joint        the default planner

Samples per second are those of the third simulated step; seconds are estimates for the kinds of device. Caps are in
requested bytes, 2 GiB below what the driver offers: 0.5 for the CUDA context, 0.5 for five communicators, and 3 per
cent of a V100 for what the caching allocator reserves beyond requested bytes (docs/memory.md). A plan's seconds are
those of the CPU.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_mpress.py [--only WORD ...] [--again WAY ...] [--tables]

Half an hour on one core. Each row is written to the JSON as soon as it is there, and a row that is there is not made
again, unless its way is named by `--again`. `--only` takes machines, models and microbatches, such as `dgx1-v100
bert-4.0B M=32`. `--tables` plans nothing, and puts the tables of the JSON into docs/compaction.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from bench_demands import BERT, GPT, Job, profiled
from measured_on import machine
from page_tables import markdown, put
from pipefit.errors import UsageError
from pipefit.planner import PLANNERS, Means, PlanOptions, Question, solved
from pipefit.planner.driver import accounts
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from pipefit.simulator.assembled import assembled

RESULTS = Path(__file__).parent / "results" / "mpress.json"
RESERVE = 2 << 30
MACHINES = "dgx1-v100", "dgx2-a100"
GIB = 1 << 30

Key = tuple[str, str, int, str]  # machine, model, microbatches, way


class Way(NamedTuple):
    """A planner, and what it may use."""

    planner: str
    means: Means = Means()


WAYS = {
    "none": Way("time"),
    "balanced": Way("exact"),
    "recompute": Way("mpress", Means(recompute="blocks", host=False, peers=False)),
    "host": Way("mpress", Means(recompute="never", peers=False)),
    "peers": Way("mpress", Means(recompute="never", host=False)),
    "mpress": Way("mpress"),
    "joint": Way("joint"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be trained, and on what."""

    machine: str
    job: Job
    size: str
    microbatches: int

    @property
    def model(self) -> str:
        """The model's name."""
        return f"{self.job.model.removeprefix('mpress-')}-{self.size}"

    @property
    def profile(self) -> ModelProfile:
        """What its layers cost."""
        return costs(self.job, self.size)

    @property
    def training(self) -> Training:
        """How it is trained."""
        return Training(
            batch_size=self.job.microbatch * self.microbatches,
            microbatches=self.microbatches,
            precision=self.job.precision,
            schedule="pipedream" if self.job.asynchronous else "1f1b",
        )

    def question(self, means: Means) -> Question:
        """The question to a planner; it answers also where nothing fits."""
        return Question(
            profile=self.profile,
            cluster=capped(self.machine),
            training=self.training,
            options=PlanOptions(allow_infeasible=True, means=means),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What a technique does on a stage: bytes that its device's peak would be higher without it, and seconds added."""

    stage: int
    what: str
    layers: int
    freed_bytes: int
    added_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An answer; `short_bytes` is what the device that lacks the most lacks, zero if the plan fits.

    `bound` are the seconds below which no plan is, where the planner knows them. Without `step_seconds` there is no
    plan, for the reason in `why_not`.
    """

    machine: str
    model: str
    microbatches: int
    way: str
    planning_seconds: float
    step_seconds: float | None = None
    samples_per_second: float | None = None
    short_bytes: int = 0
    bound: float | None = None
    split: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    freed: tuple[Freed, ...] = ()
    remarks: tuple[str, ...] = ()
    why_not: str = ""

    @property
    def key(self) -> Key:
        """What the row answers."""
        return self.machine, self.model, self.microbatches, self.way

    @property
    def fits(self) -> bool:
        """Whether there is a plan, for which every device has the memory."""
        return self.step_seconds is not None and self.short_bytes == 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the rows that are missing, and print what they say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="machines, models, or microbatches as M=32")
    parser.add_argument("--again", nargs="+", choices=WAYS, default=[], help="ways whose rows are made anew")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ways to make rows of")
    parser.add_argument(
        "--tables", action="store_true", help="put the tables of the JSON into the page, plan nothing"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = read(options.json)
    if not options.tables:
        made: set[Key] = set()
        for asked in questions(options.only):
            for way in options.ways:
                key = asked.machine, asked.model, asked.microbatches, way
                if key not in rows or (way in options.again and key not in made):
                    made.add(key)
                    rows[key] = answered(asked, way, WAYS[way])
                    print(line(rows[key]), flush=True)
                    written(options.json, in_order(rows))
    found = tables([*rows.values()])
    for title, text in found.items():
        print(f"\n{title}\n\n{text}")
    if options.tables:
        put(found)


# -------------------------------------------------------------------- questions and answers


def questions(only: Sequence[str]) -> Iterator[Asked]:
    """All questions of which every word given names the machine, the model or the microbatches; with none, all.

    One model after the other, so that each is profiled once.
    """
    for job, counts in ((BERT, (32,)), (GPT, (32, 16, 64))):
        for size in job.sizes:
            for count in counts:
                for name in MACHINES:
                    asked = Asked(machine=name, job=job, size=size, microbatches=count)
                    if chosen(asked, only):
                        yield asked


def chosen(asked: Asked, only: Sequence[str]) -> bool:
    """Whether the words that are given name this question: of each sort that is given, one word."""
    sorts = [w for w in only if w in MACHINES], [w for w in only if w.startswith("M=")]
    models = [w for w in only if w not in sorts[0] and w not in sorts[1]]
    return (
        (not sorts[0] or asked.machine in sorts[0])
        and (not sorts[1] or f"M={asked.microbatches}" in sorts[1])
        and (not models or any(asked.model.startswith(word) for word in models))
    )


@lru_cache(maxsize=1)
def costs(job: Job, size: str) -> ModelProfile:
    """The profile of a member of a family."""
    return profiled(job, size)


@lru_cache
def capped(name: str) -> Cluster:
    """The machine, whose devices leave the reserve to what is no tensor."""
    found = Cluster.preset(name)
    return found.reserving([RESERVE] * len(found.devices))


def answered(asked: Asked, name: str, way: Way) -> Row:
    """The row of a way of that name; one without a plan where the planner cannot make any."""
    question, began = asked.question(way.means), time.process_time()
    head = {"machine": asked.machine, "model": asked.model, "microbatches": asked.microbatches, "way": name}
    try:
        made = solved(question, PLANNERS[way.planner], name=way.planner)
    except UsageError as error:
        return Row(**head, planning_seconds=time.process_time() - began, why_not=str(error))
    return Row(**head, planning_seconds=time.process_time() - began, **figures(made))


def figures(made: Plan) -> dict[str, Any]:
    """What is told of a plan: its third step, simulated again, and what each technique does on each stage."""
    assert made.prediction is not None, "planners predict"
    assert made.provenance is not None, "and say who they are"
    seconds = Simulation(made, steps=3).step_seconds[2]
    told = accounts(made, assembled(made), most_actions=1 << 40).compactions
    over = [p - b for p, b in zip(made.prediction.peak_bytes, made.cluster.budgets, strict=True)]
    return {
        "step_seconds": seconds,
        "samples_per_second": made.training.batch_size / seconds,
        "short_bytes": max(0, *over),
        "bound": made.provenance.bound if made.provenance.objective.unit == "seconds" else None,
        "split": made.split,
        "devices": tuple(stage.device for stage in made.stages),
        "freed": tuple(Freed(**{**asdict(one), "what": technique(one.what)}) for one in told),
        "remarks": tuple(remark for remark in made.provenance.remarks if "are shown" not in remark),
    }


def technique(what: str) -> str:
    """What a compaction does, in one of four words."""
    if any(kind in what for kind in ("optimizer", "gradients", "parameters")):
        return "state"
    if what == "recompute":
        return what
    return "peers" if "device" in what else "host"


# -------------------------------------------------------------------- the JSON


def read(path: Path) -> dict[Key, Row]:
    """The rows that are there."""
    if not path.exists():
        return {}
    rows = [row_of(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    return {row.key: row for row in rows}


def row_of(document: dict[str, Any]) -> Row:
    """A row as it was written."""
    freed = tuple(Freed(**one) for one in document["freed"])
    lists = {name: tuple(document[name]) for name in ("split", "devices", "remarks")}
    return Row(**{**document, **lists, "freed": freed})


def in_order(rows: dict[Key, Row]) -> list[Row]:
    """The rows in the order of machines, questions and ways."""
    order = {
        (asked.machine, asked.model, asked.microbatches, way): (MACHINES.index(asked.machine), number, turn)
        for number, asked in enumerate(questions(()))
        for turn, way in enumerate(WAYS)
    }
    return sorted(rows.values(), key=lambda row: order[row.key])


def written(path: Path, rows: Sequence[Row]) -> None:
    """Write all rows; they replace what was there."""
    document = {"machine": machine(), "reserve_bytes": RESERVE, "rows": [asdict(row) for row in rows]}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


# -------------------------------------------------------------------- tables

SHOWN = 32  # microbatches of the rows in the page; the JSON has all rows


def line(row: Row) -> str:
    """One line for whoever waits."""
    asked = f"{row.machine} {row.model:10} M={row.microbatches:2} {row.way:10}"
    return f"{asked} {cell(row):>15}  {row.planning_seconds:.1f} s"


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """The tables of the docs, by their titles."""
    found = {}
    for name in MACHINES:
        for family in ("bert", "gpt"):
            own = [row for row in rows if row.machine == name and row.model.startswith(family)]
            if own:
                found[f"{family} on {name}: samples per second"] = speeds(own)
                found[f"{family} on {name}: what frees memory"] = techniques(own)
    found["in short"] = "\n".join(summary(rows))
    return found


def speeds(rows: Sequence[Row]) -> str:
    """Samples per second of every way with M = 32, or by how much the fullest device is too small."""
    columns = ("model", "M", *WAYS, "joint / mpress", "gap", "planned in")
    return markdown(columns, [speeds_row(own) for own in by_question(rows) if _shown(own)])


def _shown(own: dict[str, Row]) -> bool:
    return next(iter(own.values())).microbatches == SHOWN


def speeds_row(own: dict[str, Row]) -> tuple[str, ...]:
    """One line of the table."""
    first = next(iter(own.values()))
    cells = [cell(own[way]) if way in own else "" for way in WAYS]
    joint = own.get("joint")
    gain = ratio(own, "joint", "mpress")
    return (
        first.model,
        str(first.microbatches),
        *cells,
        "" if gain is None else f"{gain:.2f}",
        f"{100 * (joint.step_seconds / joint.bound - 1):.0f} %"
        if joint and joint.step_seconds and joint.bound
        else "",
        f"{joint.planning_seconds:.0f} s" if joint else "",
    )


def cell(row: Row) -> str:
    """Samples per second; or how much is missing."""
    if row.step_seconds is None:
        return "refused"
    return f"{row.samples_per_second:.2f}" if row.fits else f"short {row.short_bytes / GIB:.1f} GiB"


def techniques(rows: Sequence[Row]) -> str:
    """What frees how many GiB on which stage, in the plans of `mpress` and `joint`."""
    lines = []
    for own in by_question(rows):
        for way in ("mpress", "joint"):
            row = own.get(way)
            if row is not None and row.microbatches == SHOWN and row.step_seconds is not None and row.freed:
                stages = [stage_cell(row, stage) for stage in range(len(row.split))]
                lines.append(
                    (row.model, way if row.fits else f"{way} (short)", "-".join(map(str, row.split)), *stages)
                )
    return markdown(("model", "planner", "layers", *(f"stage {n}" for n in range(8))), lines)


def stage_cell(row: Row, stage: int) -> str:
    """The techniques of a stage with GiB, in the order of their bytes: `recompute 12.0, host 3.1`."""
    own = sorted((one for one in row.freed if one.stage == stage), key=lambda one: -one.freed_bytes)
    return ", ".join(f"{one.what} {one.freed_bytes / GIB:.1f}" for one in own)


def by_question(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """The rows of each question, by their ways."""
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.key[:3], {})[row.way] = row
    return [*found.values()]


def ratio(own: dict[str, Row], one: str, other: str) -> float | None:
    """How many times the samples per second of another way one has, if both fit."""
    first, second = own.get(one), own.get(other)
    if first is None or second is None or not (first.fits and second.fits):
        return None
    assert first.samples_per_second, "it fits"
    assert second.samples_per_second, "so does this"
    return first.samples_per_second / second.samples_per_second


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """The paper's pattern in numbers."""
    for name in MACHINES:
        own = by_question([row for row in rows if row.machine == name])
        gains = [gain for one in own if (gain := ratio(one, "joint", "mpress")) is not None]
        if gains:
            yield (
                f"- {name}: `joint` against `mpress` {mean(gains):.2f} in the mean of {len(gains)}, "
                f"from {min(gains):.2f} to {max(gains):.2f}."
            )
        for title, pair in {
            "recompute against host": ("recompute", "host"),
            "balanced against none": BALANCED,
        }.items():
            found = [f"{title_of(one)} {r:.2f}" for one in own if (r := pure(one, *pair)) is not None]
            yield f"- {name}: {title}: {', '.join(found) or 'never both'}."
        for family in ("bert", "gpt"):
            fits = {way: largest(own, family, way) for way in WAYS}
            yield (
                f"- {name}, largest {family}: "
                + ", ".join(f"{way} {size}" for way, size in fits.items())
                + "."
            )


BALANCED = ("balanced", "none")


def pure(own: dict[str, Row], one: str, other: str) -> float | None:
    """The ratio of two ways, of questions with M = 32; of balanced splits also where the other does not fit."""
    if next(iter(own.values())).microbatches != 32:
        return None
    if (one, other) == BALANCED and one in own and other in own:
        first, second = own[one].samples_per_second, own[other].samples_per_second
        return first / second if first and second else None
    if "none" in own and own["none"].fits:  # nothing is recomputed or moved
        return None
    return ratio(own, one, other)


def title_of(own: dict[str, Row]) -> str:
    """The model of a question."""
    return next(iter(own.values())).model


def largest(own: Sequence[dict[str, Row]], family: str, way: str) -> str:
    """The largest member of a family that fits with M = 32; `or more` where a larger one was not asked about."""
    asked = [
        one for one in own if title_of(one).startswith(family) and next(iter(one.values())).microbatches == 32
    ]
    sizes = {float(title_of(one).rpartition("-")[2].removesuffix("B")): one.get(way) for one in asked}
    best = max((size for size, row in sizes.items() if row is not None and row.fits), default=0.0)
    more = any(size > best and row is None for size, row in sizes.items())
    return (f"{best:g}B" if best else "none") + " or more" * more


if __name__ == "__main__":
    main()
