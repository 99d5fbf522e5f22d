"""Claim: what torch's own pipelines hold is certified to the byte, and their numbers are those of plain training.

Random models and plans: GPipe, 1F1B and other orders, one and several stages a rank, replicas, recomputation, moves
to the host, clipping, half precision. Gloo workers train them by `pipefit.pipeline`; on every device, in the first
step and in a later one, the CPU allocator's own events are compared with `pipefit.certify_pipeline`. Losses and
weights are compared with `pipefit.Trainer`, bit by bit.

    PYTHONPATH=src python benchmarks/bench_torch_engine.py [--cases 300] [--seed 0] [--json FILE]

A few seconds a case, most of them for the profile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import gallery
import pipefit
from measured_on import machine
from pipefit.capture import Task
from pipefit.errors import PipefitError
from pipefit.schema.plan import Plan
from support.small_tasks import in_one_process
from support.torch_engine_cases import engine_case, engine_task
from support.torch_engine_workers import STEPS, Trained, Workers

SMALLEST = 1e-14  # batch norms of two samples amplify the rounding of float64


def above_allocator(task: Task) -> str:
    """Return why certified peaks of a model of the gallery may be above the allocator's; empty if they may not.

    pipefit's own dry run has the same reasons.
    """
    return gallery.MODELS[task.name].metered if task.name in gallery.MODELS else ""


def differences(
    task: Task, plan: Plan, ran: dict[int, Trained], numbers: tuple[list[float], Any]
) -> list[str]:
    """Return the differences of peaks and numbers, in words."""
    trace = pipefit.certify_pipeline(task, plan)
    may_be_above = bool(above_allocator(task))
    result = [
        f"device {device}, step {step}: {certified} certified, {peak} allocated"
        for device, one in ran.items()
        for step, peak in enumerate(one.peaks)
        for certified in [trace.devices[device].step_peak_bytes(step)]
        if certified != peak and not (may_be_above and certified > peak)
    ]
    losses, state = numbers
    first = {stage.devices[0] for stage in plan.stages}  # batch norms of other replicas see other samples
    replicas = plan.stages[0].grid.data > 1  # whose sums are rounded in another order
    apart = [
        float((tensor.double() - state[name].double()).abs().max())
        / max(torch.finfo(tensor.dtype).eps, SMALLEST)
        for device, one in ran.items()
        for name, tensor in one.state.items()
        if name in state and tensor.numel() and tensor.is_floating_point() and device in first
    ]
    if not max(apart, default=0.0) <= (1e4 if replicas else 0.0):
        result.append(f"weights differ by {max(apart)} eps")
    rounding = max(torch.finfo(tensor.dtype).eps for tensor in state.values() if tensor.is_floating_point())
    tolerance = rounding if replicas else 1e-6
    if any(
        abs(a - b) > tolerance * abs(b)
        for one in ran.values()
        for a, b in zip(one.losses, losses, strict=True)
    ):
        result.append(f"losses {next(iter(ran.values())).losses}, not {losses}")
    return result


def reference(task: Task, plan: Plan) -> tuple[list[float], Any]:
    """Return losses and weights of pipefit's own runtime."""
    trainer, losses = in_one_process(task, plan, STEPS)
    return losses, {name: tensor.clone() for name, tensor in trainer.state_dict().items()}


def main() -> None:
    """Run the cases and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pool, began, told = Workers(), time.perf_counter(), Counter[str]()
    wrong: dict[str, list[str]] = {}
    named = Counter[str]()
    done, seed = 0, options.seed
    while done < options.cases:
        try:
            task, plan = engine_case(seed)
            numbers = reference(task, plan)
        except PipefitError as error:
            told["not made"] += 1
            print(f"seed {seed} has no case: {str(error)[:100]}", flush=True)
            seed += 1
            continue
        try:
            found = differences(task, plan, pool.train(plan, engine_task, seed), numbers)
        except Exception as error:  # noqa: BLE001 - reported
            found = [f"{type(error).__name__}: {error}"]
        kinds = [plan.training.schedule, f"{len(plan.ranks)} ranks", *{str(d.what) for d in plan.decisions}]
        kinds += ["several stages a rank"] * (len(plan.ranks) < len(plan.stages))
        kinds += ["replicas"] * (plan.stages[0].grid.data > 1) + [plan.training.precision]
        told.update(kinds)
        told["peaks"] += STEPS * len(plan.workers)
        if reason := above_allocator(task):
            named[reason] += 1
        if found:
            wrong[f"{seed} {task.name} {plan!r} {plan.training.phrases}"] = found
            print(f"seed {seed} {task.name} {plan.training.phrases}:", *found, sep="\n  ", flush=True)
        done, seed = done + 1, seed + 1
        engine_case.cache_clear()
        result: dict[str, Any] = {
            "cases": done,
            "peaks": told["peaks"],
            "different": wrong,
            "may_be_above": dict(named),
            "kinds": dict(sorted(told.items())),
            "seconds": round(time.perf_counter() - began),
            "machine": machine(),
        }
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    pool.close()
    print(json.dumps(result | {"different": len(wrong)}, indent=2))


if __name__ == "__main__":
    main()
