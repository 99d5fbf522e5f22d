"""Claim: the largest models of `bench_mpress.py` fit by what their GPUs reserve too, and not only by requested bytes.

Each plan, made with the same caps in requested bytes, is run dry with the simulated allocator, with fixed and with
expandable segments. Of the device whose process takes the largest part of its memory: requested, allocated and reserved
bytes, and what the process takes with context and communicators; and how many devices have too little.

    PYTHONPATH=src:benchmarks OMP_NUM_THREADS=1 python benchmarks/bench_mpress_reserved.py [--only WORD ...] [--tables]

Half a minute of the CPU for a plan, because a dry run with the allocator runs every layer. Each row is written to the
JSON as soon as it is there, and a row that is there is not made again. `--only` takes machines, models and
microbatches, as there. `--tables` runs nothing, and puts the tables of the JSON into docs/compaction.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from bench_mpress import MACHINES, WAYS, Asked, questions
from measured_on import machine
from page_tables import markdown, put
from pipefit.memory.cuda_allocator import AllocatorSettings
from pipefit.models import build
from pipefit.planner import PLANNERS, solved
from pipefit.runtime.dry_run.certify import certify
from pipefit.schema.trace import DeviceTrace

RESULTS = Path(__file__).parent / "results" / "mpress_reserved.json"
SETTINGS = {"fixed": AllocatorSettings(), "expandable": AllocatorSettings(expandable=True)}
GIB = 1 << 30
SHOWN, TIGHT = 32, GIB // 16  # microbatches and room of the rows in the page; the JSON has all rows
COLUMNS = (
    "machine", "model", "M", "plan", "segments", "requested", "allocated", "reserved", "process", "memory", "short",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan under one allocator: bytes of the device with the fullest process, and how many devices lack memory."""

    machine: str
    model: str
    microbatches: int
    way: str
    segments: str
    device: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    memory_bytes: int
    short_devices: int
    seconds: float  # of the CPU, for the dry runs of all settings

    @property
    def left_bytes(self) -> int:
        """Bytes that the process leaves of the fullest device; negative if it is too small."""
        return self.memory_bytes - self.process_bytes

    @property
    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        sizes = (
            self.requested_bytes, self.allocated_bytes, self.reserved_bytes, self.process_bytes, self.memory_bytes,
        )  # fmt: skip
        figures = [f"{size / GIB:.2f} GiB" for size in sizes]
        short = f"{self.short_devices} devices" if self.short_devices else "none"
        return self.machine, self.model, str(self.microbatches), self.way, self.segments, *figures, short


def measured(asked: Asked, way: str) -> list[Row]:
    """The rows of a plan."""
    chosen = WAYS[way]
    plan = solved(asked.question(chosen.means), PLANNERS[chosen.planner], name=chosen.planner)
    task = build(asked.job.model, size=asked.size)
    if asked.job.precision != "float32":
        task = replace(task, precision=asked.job.precision)
    began = time.process_time()
    found = [certify(task, plan, target="cuda", allocator=one) for one in SETTINGS.values()]
    seconds = time.process_time() - began
    return [row_of(asked, way, name, one.devices, seconds) for name, one in zip(SETTINGS, found, strict=True)]


def row_of(asked: Asked, way: str, segments: str, devices: Sequence[DeviceTrace], seconds: float) -> Row:
    """What is told of the devices of a dry run."""
    known = [(device, device.allocator) for device in devices if device.allocator is not None]
    fullest, own = max(known, key=lambda pair: pair[1].process_bytes / pair[0].budget_bytes)
    return Row(
        machine=asked.machine,
        model=asked.model,
        microbatches=asked.microbatches,
        way=way,
        segments=segments,
        device=fullest.device,
        requested_bytes=own.requested_bytes,
        allocated_bytes=own.allocated_bytes,
        reserved_bytes=own.reserved_bytes,
        process_bytes=own.process_bytes,
        memory_bytes=fullest.budget_bytes,
        short_devices=sum(device.lack_bytes > 0 for device in devices),
        seconds=round(seconds, 1),
    )


def read(path: Path) -> list[Row]:
    """The rows that are there."""
    return (
        [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] if path.exists() else []
    )


def written(path: Path, rows: Sequence[Row]) -> None:
    """Write all rows, in the order of the table; they replace what was there."""
    document = {"machine": machine(), "rows": [asdict(row) for row in in_order(rows)]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By machine, family, size, microbatches and way; fixed segments first."""
    asked = {(one.machine, one.model, one.microbatches): number for number, one in enumerate(questions(()))}
    ways, settings = list(WAYS), list(SETTINGS)

    def place(row: Row) -> tuple[int, ...]:
        machine, question = MACHINES.index(row.machine), asked[row.machine, row.model, row.microbatches]
        return machine, question, ways.index(row.way), settings.index(row.segments)

    return sorted(rows, key=place)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """The tables of the docs, by their titles."""
    return {
        "reserved": markdown(
            COLUMNS,
            [row.cells for row in in_order(rows) if row.microbatches == SHOWN and row.left_bytes < TIGHT],
        ),
        "largest by reserved bytes": markdown(
            ("machine", "family", "plan", *SETTINGS, "asked"),
            [*_largest([row for row in rows if row.microbatches == SHOWN])],
        ),
    }


def _largest(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Of every machine, family and way the largest model whose processes fit with M = 32, of those that were asked."""
    for name, family, way in product(MACHINES, ("bert", "gpt"), ("mpress", "joint")):
        own = [row for row in rows if (row.machine, row.way) == (name, way) and row.model.startswith(family)]
        if own:
            fits = [
                [_size(row) for row in own if row.segments == one and not row.short_devices]
                for one in SETTINGS
            ]
            asked = sorted({_size(row) for row in own})
            yield name, family, way, *(f"{max(sizes, default=0):g}B" for sizes in fits), _listed(asked)


def _size(row: Row) -> float:
    return float(row.model.rpartition("-")[2].removesuffix("B"))


def _listed(sizes: Sequence[float]) -> str:
    return ", ".join(f"{size:g}" for size in sizes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the rows that are missing, and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="machines, models, or microbatches as M=32")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["mpress", "joint"], help="ways to plan")
    parser.add_argument(
        "--tables", action="store_true", help="put the tables of the JSON into the page, run nothing"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = read(options.json)
    for asked in () if options.tables else questions(options.only):
        for way in options.ways:
            key = asked.machine, asked.model, asked.microbatches, way
            if key not in {(row.machine, row.model, row.microbatches, row.way) for row in rows}:
                rows += measured(asked, way)
                print(*(" | ".join(row.cells) for row in rows[-len(SETTINGS) :]), sep="\n", flush=True)
                written(options.json, rows)
    if options.tables:
        put(tables(rows))


if __name__ == "__main__":
    main()
