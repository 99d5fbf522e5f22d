"""Requested, allocated and reserved bytes of five models' plans: fixed and expandable segments, planned addresses.

    PYTHONPATH=src python benchmarks/bench_reserved.py [--json PATH] [--only NAME] [--steps N]

Each model is planned for four A100 of 80 GB under 1F1B, in eight microbatches, and run dry for CUDA's kernels over N
steps. A device's figures are those of its caching allocator, cuBLAS's workspaces included; what the context and the
communicators take is not among them. Nothing is measured on a GPU. Seconds are the CPU's, of the dry run with the
allocator, and without.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

from measured_on import machine
from pipefit.capture import Task
from pipefit.memory.cuda_allocator import AllocatorSettings
from pipefit.models import build
from pipefit.planner import plan as make_plan
from pipefit.profiler import profile
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.trace import AllocatorPeaks
from pipefit.units import format_bytes

CLUSTER, DEVICES, MICROBATCHES = "4x-a100-80gb", 4, 8
MODELS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "gpt": (4, {}),
    "bert": (8, {}),
    "vgg11": (32, {}),
    "resnet101": (16, {}),
    "unet": (4, {}),
}
SETTINGS = {"default": AllocatorSettings(), "expandable": AllocatorSettings(expandable=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The allocators of one plan's devices, by settings."""

    name: str
    microbatch_size: int
    peaks: dict[str, list[AllocatorPeaks]]
    requested_seconds: float
    allocator_seconds: float

    def __str__(self) -> str:
        """The device that reserves most by the default settings, and by how much all reserve more than is requested."""
        default, expandable = self.peaks["default"], self.peaks["expandable"]
        worst = max(range(len(default)), key=lambda number: default[number].reserved_bytes)
        one, other = default[worst], expandable[worst]
        sizes = (
            one.requested_bytes,
            one.allocated_bytes,
            one.reserved_bytes,
            other.reserved_bytes,
            one.planned_bytes,
        )
        asked = sum(peaks.requested_bytes for peaks in default)
        held = [sum(peaks.reserved_bytes for peaks in devices) for devices in (default, expandable)]
        over = [nbytes / asked - 1 for nbytes in (*held, sum(peaks.planned_bytes for peaks in default))]
        return (
            f"| {self.name}, {self.microbatch_size} | {' | '.join(map(format_bytes, sizes))} "
            f"| {' | '.join(f'{100 * share:.1f} %' for share in over)} |"
            f"   {self.allocator_seconds:.1f} s, {self.requested_seconds:.1f} s without"
        )


def planned(task: Task, size: int) -> Plan:
    """The plan with the lowest peak."""
    found = profile(task, microbatch_size=size, target="cuda")
    cluster = Cluster.preset(CLUSTER)
    return make_plan(
        found, cluster, batch_size=size * MICROBATCHES, microbatches=MICROBATCHES, planner="exact"
    )


def measure(name: str, task: Task, size: int, steps: int) -> Row:
    """What the devices of one model's plan hold at most."""
    plan, peaks = planned(task, size), {}
    start = process_time()
    certify(task, plan, steps=steps)
    between = process_time()
    for which, settings in SETTINGS.items():
        trace = certify(task, plan, steps=steps, allocator=settings)
        peaks[which] = [device.allocator for device in trace.devices if device.allocator]
    end = process_time()
    return Row(
        name=name,
        microbatch_size=size,
        peaks=peaks,
        requested_seconds=between - start,
        allocator_seconds=(end - between) / len(SETTINGS),
    )


def main() -> None:
    """Print the table; with --json, write it too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="one of the names in the table")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    rows = []
    print(
        "| model, samples | requested | allocated | reserved | expandable | planned "
        "| over requested | expandable | planned |"
    )
    for name, (size, settings) in MODELS.items():
        if options.only in (None, name):
            rows.append(measure(name, build(name, **settings), size, options.steps))
            print(rows[-1], flush=True)
    if options.json:
        document = {"machine": machine(), "steps": options.steps, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
