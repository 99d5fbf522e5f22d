"""Claim: peaks are predicted exactly, without hardware: by the dry run and by the simulator, to the byte.

Random models of the zoo, settings, splits and schedules, and models that no zoo knows. For every device, in the first
step and in a steady one, three accounts of the highest bytes allocated: the CPU allocator's own events during real
training (the oracle, from torch's profiler), the dry run over fake tensors, and the simulator. A device's peak is the
higher of its two steps: what must fit.

    PYTHONPATH=src python benchmarks/bench_accuracy.py [--cases 300] [--seed 0] [--threads 1] [--json FILE]

The kernels of another processor: ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 before the command.

About a second a case. The JSON holds the totals, and of the table only the rows in which something differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import gallery
from gallery import CHAINS
from measured_on import machine
from support.random_trainings import Account, Case, accounts, plan_for, random_case

OWN_SHARE = 0.2  # of the cases, with models that no zoo knows
COLUMNS = (
    "model",
    "settings",
    "batch",
    "schedule",
    "split",
    "device",
    "step",
    "oracle B",
    "dry run B",
    "simulator %",
)


def cases(count: int, seed: int) -> Iterator[Case]:
    """The benchmark's cases, the same for the same seed."""
    rng = Random(seed)
    for _ in range(count):
        if rng.random() < OWN_SHARE:
            name = rng.choice(sorted(CHAINS))
            yield plan_for(gallery.task(name), rng, name=name)
        else:
            yield random_case(rng)


def row(account: Account) -> tuple[str, ...]:
    """One line of the table."""
    case, training = account.case, account.case.plan.training
    return (
        case.name,
        " ".join(f"{key}={value}".replace(" ", "") for key, value in case.settings.items()) or "-",
        f"{training.microbatches}x{training.microbatch_size}",
        training.schedule,
        "-".join(map(str, case.plan.split)),
        str(account.device),
        ("first", "steady")[account.step],
        str(account.oracle_bytes),
        f"{account.dry_run_difference:+d}",
        f"{100 * account.simulator_error:+.4f}",
    )


def summarise(found: Sequence[Account], count: int, seconds: float) -> dict[str, Any]:
    """The totals: how many, how many exact, and the largest errors."""
    steps = [abs(account.simulator_error) for account in found]
    devices = [
        abs(
            max(first.simulated_bytes, steady.simulated_bytes) / max(first.oracle_bytes, steady.oracle_bytes)
            - 1
        )
        for first, steady in zip(found[::2], found[1::2], strict=True)
    ]
    return {
        "cases": count,
        "devices": len(devices),
        "step_peaks": len(steps),
        "dry_run_equal_step_peaks": sum(account.dry_run_difference == 0 for account in found),
        "dry_run_largest_error_bytes": max(abs(account.dry_run_difference) for account in found),
        "simulator_equal_step_peaks": steps.count(0.0),
        "simulator_step_peaks_within_0.1_percent": sum(error <= 0.001 for error in steps),
        "simulator_largest_step_error_percent": round(100 * max(steps), 4),
        "simulator_equal_device_peaks": devices.count(0.0),
        "simulator_largest_device_error_percent": round(100 * max(devices), 4),
        "seconds": round(seconds),
    }


def sentence(totals: dict[str, Any]) -> str:
    """The totals in words."""
    within = totals["simulator_step_peaks_within_0.1_percent"] / totals["step_peaks"]
    return (
        f"{totals['cases']} cases, {totals['devices']} devices: dry run equal in "
        f"{totals['dry_run_equal_step_peaks']} of {totals['step_peaks']} steps; simulator equal in "
        f"{totals['simulator_equal_step_peaks']}, {within:.2%} within 0.1 %, largest error "
        f"{totals['simulator_largest_step_error_percent']} %; of a device's peak equal in "
        f"{totals['simulator_equal_device_peaks']} of {totals['devices']}, largest error "
        f"{totals['simulator_largest_device_error_percent']} %"
    )


def main() -> None:
    """Run, print, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="of the kernels, in the profile and in training"
    )
    parser.add_argument("--json", type=Path, help="write totals, the machine and differing rows here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began, found = time.perf_counter(), []
    print("  ".join(COLUMNS))
    for case in cases(options.cases, options.seed):
        for account in accounts(case):
            found.append(account)
            print("  ".join(row(account)), flush=True)
    totals = summarise(found, options.cases, time.perf_counter() - began)
    print(sentence(totals))
    if options.json is not None:
        wrong = [a for a in found if not a.oracle_bytes == a.dry_run_bytes == a.simulated_bytes]
        document = {
            "summary": totals | {"seed": options.seed},
            "machine": machine(),
            "columns": "  ".join(COLUMNS),
            "differing_rows": ["  ".join(row(account)) for account in wrong],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
