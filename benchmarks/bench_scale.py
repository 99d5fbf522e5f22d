"""Claim: `joint` chooses stages, replicas, microbatches and what replicas divide for large models on many devices in
seconds to minutes, and says how far its plan is from the best.

GPT of so many layers, hidden 1024, on so many A100 of 40 GB, eight to a host, profiled at microbatches of 1 to 16
samples, with a batch of four samples for each device. The blocks of a GPT are equal; of layers that "differ" each one
has another part, a half to one and a half, of its work, and another peak. "seconds" are the CPU's of the call of
`plan`, in one thread, without the profile; "GiB" is the most memory that the process has had; "gap" is how far the plan
is at most from the fastest of all.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_scale.py [LAYERSxDEVICES ...] [--differ] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random

from bench_grids import cluster
from measured_on import machine
from pipefit.models import build
from pipefit.planner import plan
from pipefit.profiler import profile
from pipefit.schema.layer_costs import Work
from pipefit.schema.profile import Measurement, ModelProfile

SIZES = ["32x8", "128x64"]
GIB_PER_KIB = 1 / (1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call of `plan`."""

    layers: int
    devices: int
    differ: bool
    seconds: float
    step_seconds: float
    gap: float
    gib: float

    def __str__(self) -> str:
        size = f"{self.layers:6} {self.devices:7} {'yes' if self.differ else 'no':>6}"
        return f"{size} {self.seconds:8.2f} {1e3 * self.step_seconds:8.1f} {self.gap:7.1%} {self.gib:6.2f}"


HEADINGS = "layers devices differ  seconds  step ms     gap    GiB"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("sizes", nargs="*", default=SIZES, metavar="LAYERSxDEVICES")
    parser.add_argument("--differ", action="store_true", help="every size again with layers that differ")
    parser.add_argument("--json", type=Path, help="write machine and rows here")
    options = parser.parse_args(arguments)
    rows = list[Row]()
    print(HEADINGS)
    for row in measured(options.sizes, differ=options.differ):
        rows.append(row)
        print(row, flush=True)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"machine": machine(), "rows": [*map(asdict, rows)]}, indent=1) + "\n"
        )


def measured(sizes: Sequence[str], *, differ: bool = False) -> Iterator[Row]:
    """A row for each size, or two, each in a process of its own, whose memory is that of this call."""
    for size in sizes:
        for different in (False, True) if differ else (False,):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                yield pool.submit(called, *map(int, size.split("x")), differ=different).result()


def called(layers: int, devices: int, *, differ: bool = False) -> Row:
    """What a call takes that chooses everything, in this process."""
    task = build("gpt", layers=layers - 3, hidden=1024, heads=16, sequence=512)
    costs = profile(task, microbatch_size=[1 << power for power in range(5)], target="cuda")
    costs = differing(costs) if differ else costs
    on, began = cluster(devices), time.process_time()
    made = plan(costs, on, batch_size=4 * devices)
    seconds = time.process_time() - began
    assert made.provenance is not None
    assert made.provenance.bound
    return Row(
        layers=layers,
        devices=devices,
        differ=differ,
        seconds=seconds,
        step_seconds=made.provenance.value,
        gap=made.provenance.value / made.provenance.bound - 1,
        gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * GIB_PER_KIB,
    )


def differing(costs: ModelProfile) -> ModelProfile:
    """A profile in which every layer has another part of its work, and another peak in its forward."""
    rng = Random(5)
    parts = [rng.uniform(0.5, 1.5) for _ in costs.layers]

    def of(measurement: Measurement) -> Measurement:
        kinds = tuple(
            replace(
                cost,
                forward=_part_of(cost.forward, part),
                backward=_part_of(cost.backward, part),
                forward_peak_bytes=cost.forward_peak_bytes + 512 * number,
            )
            for number, (cost, part) in enumerate(zip(measurement.costs, parts, strict=True))
        )
        return replace(measurement, kinds=kinds, layers=tuple(range(len(kinds))))

    return replace(costs, measurements=tuple(map(of, costs.measurements)))


def _part_of(work: Work, part: float) -> Work:
    """So large a part of work that is known operation by operation."""
    every = work.operations
    return Work.of(
        one._replace(flops=int(one.flops * part), moved_bytes=int(one.moved_bytes * part)) for one in every
    )


if __name__ == "__main__":
    main()
