"""Claim: a checkpoint holds training up about as long as torch's own asynchronous one, and is as large as its tensors.

A GPT of the zoo with AdamW, in one process. The same tensors - parameters, both moments and counters - are saved in one
run, repeat by repeat in turn, by

    pipefit    Trainer.save: a snapshot, then safetensors shards, hashed and flushed to the disk by a thread
    torch      torch.distributed.checkpoint.async_save of the same tensors, with its own defaults

    none       nobody

For each: the seconds in which training stands still, those of the step behind it, the seconds until the checkpoint is
whole, and its bytes on the disk beside the tensors' bytes. Figures are medians. One thread computes.

    python benchmarks/bench_checkpoints.py [--repeats 5] [--hidden 512] [--layers 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import pipefit
from measured_on import machine
from pipefit.models import build
from pipefit.runtime import Trainer

BATCH = 4
Saved = Callable[[], Any]  # returns when the checkpoint is whole


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the saves of one system cost, in medians over repeats."""

    system: str
    still_seconds: float
    step_behind_seconds: float
    whole_seconds: float
    disk_bytes: int


def make_trainer(hidden: int, layers: int) -> Trainer:
    """The GPT on one device, after a step, so that there are moments to save."""
    task = build("gpt", layers=layers, hidden=hidden, heads=8, vocabulary=1024, sequence=16)
    profile = pipefit.profile(task, microbatch_size=BATCH)
    plan = pipefit.plan(profile, pipefit.load_cluster("emulated:1x16GiB"), batch_size=BATCH)
    return Trainer(task, plan, numbers=False)


def by_pipefit(trainer: Trainer, folder: Path) -> Saved:
    """Begin to save."""
    trainer.save(folder)
    return trainer.finish


def by_torch(trainer: Trainer, folder: Path) -> Saved:
    """Begin to save the same tensors."""
    tensors: dict[str, Any] = dict(trainer.state_dict(optimizer=True))
    return dcp.async_save(tensors, checkpoint_id=folder).result


def by_nobody(trainer: Trainer, folder: Path) -> Saved:
    """Save nothing."""
    folder.mkdir()
    return trainer.finish


SYSTEMS: dict[str, Callable[[Trainer, Path], Saved]] = {
    "none": by_nobody,
    "pipefit": by_pipefit,
    "torch": by_torch,
}


def measure(trainer: Trainer, repeats: int, folder: Path) -> list[Cost]:
    """The costs of all, in turn; the first repeat warms up."""
    batch = trainer.task.batch(BATCH)
    trainer.step(batch)
    found: dict[str, list[Cost]] = {name: [] for name in SYSTEMS}
    for repeat in range(repeats + 1):
        for name, save in SYSTEMS.items():
            target = folder / f"{name}-{repeat}"
            times = [time.perf_counter()]
            whole = save(trainer, target)
            times.append(time.perf_counter())
            trainer.step(batch)
            times.append(time.perf_counter())
            whole()
            still, behind, rest = (
                b - a for a, b in zip(times, [*times[1:], time.perf_counter()], strict=True)
            )
            nbytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
            cost = Cost(
                system=name,
                still_seconds=still,
                step_behind_seconds=behind,
                whole_seconds=still + behind + rest,
                disk_bytes=nbytes,
            )
            found[name] += [cost] * (repeat > 0)
    return [median(costs) for costs in found.values()]


def median(costs: list[Cost]) -> Cost:
    """The median of every figure."""
    return Cost(
        system=costs[0].system,
        still_seconds=statistics.median(cost.still_seconds for cost in costs),
        step_behind_seconds=statistics.median(cost.step_behind_seconds for cost in costs),
        whole_seconds=statistics.median(cost.whole_seconds for cost in costs),
        disk_bytes=costs[0].disk_bytes,
    )


def line(cost: Cost, tensor_bytes: int) -> str:
    """One line of the table."""
    return (
        f"{cost.system:8} stands still {cost.still_seconds:.3f} s  step behind it {cost.step_behind_seconds:.3f} s  "
        f"whole after {cost.whole_seconds:.3f} s  {cost.disk_bytes} bytes, {cost.disk_bytes / tensor_bytes:.4f} of its "
        "tensors'"
    )


def main() -> None:
    """Print the table; with --json, write it too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to save to; one for temporary files unless given"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trainer = make_trainer(options.hidden, options.layers)  # before there is a process group
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        costs = measure(trainer, options.repeats, Path(folder))
        dist.destroy_process_group()
    tensor_bytes = sum(tensor.nbytes for tensor in trainer.state_dict(optimizer=True).values())
    print(f"{tensor_bytes} bytes of tensors")
    print(*(line(cost, tensor_bytes) for cost in costs), sep="\n")
    if options.json:
        document = {
            "machine": machine(),
            "model": {"hidden": options.hidden, "layers": options.layers},
            "tensor_bytes": tensor_bytes,
            "rows": [*map(asdict, costs)],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
