"""Claim: each part of the joint planner's choice earns its place somewhere, and lending is declined where it gains
nothing.

Steps on a DGX-1 as in `bench_mpress.py`, with everything allowed, and without one thing at a time: recomputation, runs
finer than a block, the host, peers, the mapping of stages to devices, striping over several lenders, and whatever comes
back or is recomputed ahead of its use; and without all of it, which is the fastest split that fits as it is. Beside
them the planner of MPress with peers alone, where mapping and striping matter most. The models:

    bert-0.64B, bert-1.67B    under PipeDream, layers as they are written: whole blocks
    gpt-10.3B, traced         under 1F1B; traced, a block is fourteen layers, so that runs may be finer
    gpt-10.3B, flash          the same with attention that keeps no scores, where lending was found worthless for large
                              models ("Re-evaluating the memory-balanced pipeline parallelism: BPipe", arXiv 2401.02088)

And activations at the host (PipeOffload, arXiv 2503.01328): eight blocks of a GPT on eight A100 whose links to the host
make k, the time of a block's activations there and back against its forward and backward, what its paper has. `joint`
may use the host alone, and has the memory that is needed where each copy has the time of two forwards or backwards. And
by hand, on 8 to 64 devices, the longest-lived half of all activations, those of the first half of the stages, is away.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_ablation.py [--only MODEL ...] [--tables]

Ten minutes on one core; rows are kept as those of `bench_mpress.py` are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from bench_demands import BERT, GPT
from bench_mpress import GIB, Asked, Row, Way, answered, by_question, cell, line, read, written
from bench_time import OFFLOAD, blocks, kind_of, offloadable, offloaded, profiled
from page_tables import markdown, put
from pipefit.models import build
from pipefit.models.transformer import AttentionKind
from pipefit.planner import Means, PlanOptions, Question, joint, solved
from pipefit.profiler import profile
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from pipefit.timing import layer_seconds

RESULTS = Path(__file__).parent / "results" / "ablation.json"
NOTHING = Means(recompute="never", host=False, peers=False)
WAYS = {
    "all": Way("joint"),
    "no recomputation": Way("joint", Means(recompute="never")),
    "whole blocks": Way("joint", Means(recompute="blocks")),
    "no host": Way("joint", Means(host=False)),
    "no peers": Way("joint", Means(peers=False)),
    "no mapping": Way("joint", Means(mapping=False)),
    "no striping": Way("joint", Means(striping=False)),
    "nothing ahead": Way("joint", Means(ahead=False)),
    "nothing at all": Way("joint", NOTHING),
    "peers alone": Way("mpress", Means(recompute="never", host=False)),
    "and no mapping": Way("mpress", Means(recompute="never", host=False, mapping=False)),
    "and no striping": Way("mpress", Means(recompute="never", host=False, striping=False)),
}


class Whole(nn.Module):
    """A chain of layers as one module, which is traced."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = make()

    def forward(self, *values: Any) -> Any:
        """What the chain makes of them."""
        return self.layers(*values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced(Asked):
    """A model that is traced, with plain attention or one that keeps no scores."""

    attention: AttentionKind

    @property
    def model(self) -> str:
        """The model's name, and what is special about it."""
        return f"gpt-{self.size}, {'traced' if self.attention == 'eager' else 'flash'}"

    @property
    def profile(self) -> ModelProfile:
        """What its layers cost."""
        return traced(self.size, self.attention)


@cache
def traced(size: str, attention: AttentionKind) -> ModelProfile:
    """The profile of a GPT whose blocks are traced."""
    task = build(GPT.model, size=size, attention=attention)
    make = task.module
    whole = replace(task, module=lambda: Whole(make), precision=GPT.precision)
    return profile(whole, microbatch_size=GPT.microbatch, target="cuda")


ASKED = (
    Asked(machine="dgx1-v100", job=BERT, size="0.64B", microbatches=32),
    Asked(machine="dgx1-v100", job=BERT, size="1.67B", microbatches=32),
    Traced(machine="dgx1-v100", job=GPT, size="10.3B", microbatches=32, attention="eager"),
    Traced(machine="dgx1-v100", job=GPT, size="10.3B", microbatches=32, attention="sdpa"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the rows that are missing, and print what they say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="models, such as bert-0.64B or flash")
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    parser.add_argument(
        "--tables", action="store_true", help="put the table of the JSON into the page, plan nothing"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = read(options.json)
    for asked in () if options.tables else ASKED:
        if options.only and not any(word in asked.model for word in options.only):
            continue
        for name, way in WAYS.items():
            key = asked.machine, asked.model, asked.microbatches, name
            if key not in rows or options.again:
                rows[key] = answered(asked, name, way)
                print(line(rows[key]), flush=True)
                written(options.json, [*rows.values()])
    print(table([*rows.values()]))
    if options.tables:
        put({"ablation": table([*rows.values()])})
    else:
        print(*map(at_the_host, OFFLOAD), *map(longest_half, (8, 16, 32, 64)), sep="\n")


def table(rows: Sequence[Row]) -> str:
    """Samples per second of every model in every way."""
    own = {next(iter(one.values())).model: one for one in by_question(rows)}
    lines = [
        (way, *(cell(one[way]) if way in one else "" for one in own.values()))
        for way in WAYS
        if any(way in one for one in own.values())
    ]
    return markdown(("allowed", *own), lines)


# -------------------------------------------------------------------- activations at the host


def at_the_host(case: tuple[int, float, float]) -> str:
    """What it costs to have all activations at the host, by the plan of `joint`."""
    tokens, k, _ = case
    plan = offload_plan(tokens, k)
    kept, leanest = Simulation(plan), Simulation(offloaded(plan, 2))
    caps = [round(1.02 * peak) for peak in leanest.peak_bytes]  # small tensors are not worth a transfer
    spare = [device.memory_bytes - cap for device, cap in zip(plan.cluster.devices, caps, strict=True)]
    question = Question(
        profile=plan.profile,
        cluster=plan.cluster.reserving(spare),
        training=plan.training,
        options=PlanOptions(allow_infeasible=True, means=Means(recompute="never", peers=False)),
    )
    made = solved(question, joint, name="joint")
    assert made.prediction is not None, "planners predict"
    over = max(p - b for p, b in zip(made.prediction.peak_bytes, caps, strict=True))
    longer = made.prediction.step_seconds / kept.step_seconds[-1] - 1
    return f"{tokens:5} tokens, k {k:.2f}: {longer:6.1%} longer" + (
        f", {over / GIB:.2f} GiB too much" if over > 0 else ""
    )


def offload_plan(tokens: int, k: float, stages: int = 8) -> Plan:
    """So many equal blocks on A100s, one each, with ample memory."""
    settings = {
        "layers": stages,
        "hidden": 4096,
        "heads": 32,
        "sequence": tokens,
        "vocabulary": 1000,
        "dropout": 0.0,
    }
    found = profiled("gpt", settings, 1, "bfloat16")
    training = Training(batch_size=1, microbatches=1, precision="bfloat16")
    block = blocks(found, layer_seconds(found.at(1), kind_of("dgx-a100"), training))[0]
    return offloadable(found, k * (block.forward + block.backward) / 2, stages)


def longest_half(stages: int) -> str:
    """What is left of the activations of all devices where the first half of the stages moves its own, and the step."""
    plan = offload_plan(16384, 0.8, stages)
    first = tuple(d for d in offloaded(plan, 2).decisions if 2 * d.stage < stages)
    one = Simulation(replace(plan, training=replace(plan.training, batch_size=1, microbatches=1)))
    moved, kept = Simulation(replace(plan, decisions=first)), Simulation(plan)
    held = [sum(peaks) - sum(one.peak_bytes) for peaks in (moved.peak_bytes, kept.peak_bytes)]
    longer = moved.step_seconds[-1] / kept.step_seconds[-1] - 1
    return f"{stages:2} stages: {held[0] / held[1]:.0%} of the activations are left, {longer:.1%} longer"


if __name__ == "__main__":
    main()
