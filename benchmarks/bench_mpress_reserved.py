"""Claim: the largest models of `bench_mpress.py` fit by what their GPUs reserve too, and not only by requested bytes.

Each plan, made with the same caps in requested bytes, is run dry with the simulated allocator, with fixed and with
expandable segments. Of the device whose process takes the largest part of its memory: requested, allocated and reserved
bytes, and what the process takes with context and communicators; and how many devices have too little.

    PYTHONPATH=src:benchmarks OMP_NUM_THREADS=1 python benchmarks/bench_mpress_reserved.py [--only WORD ...] [--tables]

Minutes for each plan, because a dry run with the allocator runs every layer. Each row is written to the JSON as soon as
it is there, and a row that is there is not made again. `--only` takes machines, models and microbatches, as there.
`--tables` runs nothing, and puts the table of the JSON into docs/compaction.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench_mpress import MACHINES, WAYS, Asked, questions
from measured_on import machine
from page_tables import markdown, put
from pipefit.allocator import AllocatorSettings
from pipefit.planner import PLANNERS, solved
from pipefit.runtime.dry_run import certify_each
from pipefit.trace import DeviceTrace
from pipefit.zoo import build

RESULTS = Path(__file__).parent / "results" / "mpress_reserved.json"
SETTINGS = {"fixed": AllocatorSettings(), "expandable": AllocatorSettings(expandable=True)}
ENDLESS = 8  # microbatches in each of two steps under a schedule that never empties the pipeline
GIB = 1 << 30
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
    seconds: float  # of the CPU, for the dry run that tells of all settings

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
    if plan.training.endless:
        few = replace(plan.training, batch_size=ENDLESS * asked.job.microbatch, microbatches=ENDLESS)
        plan = replace(plan, training=few)
    task = build(asked.job.model, size=asked.size)
    if asked.job.precision != "float32":
        task = replace(task, precision=asked.job.precision)
    began = time.process_time()
    found = certify_each(task, plan, list(SETTINGS.values()))
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the rows that are missing, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="machines, models, or microbatches as M=32")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["joint"], help="ways to plan")
    parser.add_argument("--tables", action="store_true", help="put the table of the JSON into the page, run nothing")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = [Row(**row) for row in json.loads(options.json.read_text())["rows"]] if options.json.exists() else []
    for asked in () if options.tables else questions(options.only):
        for way in options.ways:
            key = asked.machine, asked.model, asked.microbatches, way
            if key not in {(row.machine, row.model, row.microbatches, row.way) for row in rows}:
                rows += measured(asked, way)
                print(*(" | ".join(row.cells) for row in rows[-len(SETTINGS) :]), sep="\n", flush=True)
                document = {"machine": machine(), "rows": [asdict(row) for row in rows]}
                options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.tables:
        rows.sort(key=lambda row: (MACHINES.index(row.machine), row.model.partition("-")[0]))
        put({"reserved": markdown(COLUMNS, [row.cells for row in rows])})


if __name__ == "__main__":
    main()
