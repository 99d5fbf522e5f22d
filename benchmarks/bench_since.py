"""Claim: where nothing is moved, the machinery that moves costs a step nothing: at most 1.02 times that of before it.

Steps of the GPT of bench_runtime.py, two workers of one thread, in this tree and in another checkout of pipefit, of
before the machinery of compaction, say: `git worktree add --detach ../before a9569ed`. Both have the same environment,
and are asked in turn, repeat by repeat.

    python benchmarks/bench_since.py TREE [--repeats 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
SCHEDULES = "1f1b", "gpipe"
STEPS = 3


def worker(rank: int, store: str) -> None:
    """One of two processes of a tree: for each line of stdin, a schedule, steps are run and their seconds printed."""
    import torch
    import torch.distributed as dist

    import bench_runtime

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    runs = {schedule: bench_runtime.pipefit_system(schedule, "cpu", rank) for schedule in SCHEDULES}
    batch = bench_runtime.make_task().batch(bench_runtime.BATCH)
    for line in sys.stdin:
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            runs[line.strip()](batch)
        dist.barrier()
        print((time.perf_counter() - began) / STEPS, (time.process_time() - used) / STEPS, flush=True)
    dist.destroy_process_group()


def started(tree: Path, rank: int, store: str) -> subprocess.Popen[str]:
    """A worker with the code of a tree."""
    paths = os.pathsep.join(str(tree / folder) for folder in ("src", "benchmarks"))
    return subprocess.Popen(
        [sys.executable, "-P", __file__, "--worker", str(rank), store],  # -P: bench_runtime is the tree's
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def asked(workers: list[subprocess.Popen[str]], schedule: str) -> tuple[float, float]:
    """Seconds of a step: the slower worker's on the clock, and those of both on the CPU."""
    for process in workers:
        assert process.stdin is not None
        print(schedule, file=process.stdin, flush=True)
    lines = [process.stdout.readline() for process in workers if process.stdout is not None]
    clocks, used = zip(*(map(float, line.split()) for line in lines), strict=True)
    return max(clocks), sum(used)


def measure(trees: dict[str, Path], repeats: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Seconds by schedule and tree, repeat by repeat; the first repeat warms up."""
    with tempfile.TemporaryDirectory() as folder:
        workers = {
            name: [started(tree, rank, f"{folder}/{name}") for rank in (0, 1)] for name, tree in trees.items()
        }
        seconds: dict[str, dict[str, list[tuple[float, float]]]] = {
            s: {name: [] for name in trees} for s in SCHEDULES
        }
        for repeat in range(repeats + 1):
            for schedule, found in seconds.items():
                for name in list(trees)[:: 1 if repeat % 2 else -1]:
                    timed = asked(workers[name], schedule)
                    if repeat:
                        found[name].append(timed)
        for process in (process for both in workers.values() for process in both):
            process.communicate()
    return seconds


def main() -> None:
    """Print the ratios; with `--json`, write them with the seconds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, help="the root of another checkout")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    trees = {"now": HERE, "before": options.tree}
    git = ["git", "-C", str(options.tree), "rev-parse", "--short", "HEAD"]
    before = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    seconds = measure(trees, options.repeats)
    ratios: dict[str, Any] = {}
    for schedule, found in seconds.items():
        pairs = list(zip(found["now"], found["before"], strict=True))
        clock, cpu = (statistics.median(now[n] / then[n] for now, then in pairs) for n in (0, 1))
        ratios[schedule] = {"clock": clock, "cpu": cpu}
        print(f"{schedule:6} now / {before}: {clock:.3f}, of CPU seconds {cpu:.3f}")
    if options.json:
        from measured_on import machine

        document = {"machine": machine(), "before": before, "ratios": ratios, "seconds": seconds}
        Path(options.json).write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), sys.argv[3])
    else:
        main()
