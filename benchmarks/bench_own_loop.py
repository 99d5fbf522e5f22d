"""Claim: `pipefit.apply` keeps every budget that it accepts; torch's memory budget for compiled models does not.

Each model trains in a plain loop with (1) nothing, (2) `torch.utils.checkpoint` around every block, as
`gradient_checkpointing=True` does, (3) `torch._functorch.config.activation_memory_budget` under `torch.compile`, and
(4) `pipefit.apply`. A budget is a part of the activations: the bytes between parameters, gradients and batch and
the peak of (1). torch documents its budget as a part of the saved activations, not as a bound on the peak.

Peaks are the CPU allocator's events. Steps are compared by CPU seconds of alternating steps in one process, which
other processes on the machine do not change.

    PYTHONPATH=src python benchmarks/bench_own_loop.py [--steps 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pipefit
from measured_on import machine
from pipefit.errors import InfeasibleError
from support.own_loop_oracle import bytes_of, peaks_of

PARTS = (0.05, 0.15, 0.3, 0.5)
BACKEND = "aot_eager_decomp_partition"  # torch's partitioner, and the same kernels as without a compiler


class Feedforward(nn.Module):
    """A residual block of a transformer's size, without attention."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Llama(nn.Module):
    """A block of a llama: RMS norms, causal attention, and a gated feed-forward."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Convolutions(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.c2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.n1, self.n2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.n2(self.c2(F.relu(self.n1(self.c1(x))))))


def encoder() -> nn.Module:
    """Make torch's own encoder layer."""
    return nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "feed-forward": (Feedforward, (512, 64)),
    "llama": (Llama, (8, 64, 64)),
    "encoder": (encoder, (8, 64, 64)),
    "convolutions": (Convolutions, (8, 16, 24, 24)),
}
BLOCKS = 8


class Loop:
    """A model, its batch, and its training step."""

    def __init__(self, name: str) -> None:
        build, shape = MODELS[name]
        torch.manual_seed(0)
        self.module = nn.Sequential(*[build() for _ in range(BLOCKS)])
        self.batch = torch.randn(shape), torch.randn(shape)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        self.forward: Callable[[Tensor], Tensor] = self.module

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        outputs = self.forward(self.batch[0])
        loss = F.mse_loss(outputs, self.batch[1])
        loss.backward()
        self.optimizer.step()

    def resident(self) -> int:
        """Return the bytes of parameters, buffers and batch."""
        return bytes_of([*self.module.parameters(), *self.module.buffers(), self.batch])

    def peak(self) -> int:
        """Return the peak of the second of two steps."""
        self.step()
        self.optimizer.zero_grad()

        def steps() -> None:
            for _ in range(2):
                with record_function("step"):
                    self.step()

        return max(peaks_of(steps, self.resident(), "step"))


def checkpointed(name: str) -> Loop:
    """Return a loop with every block recomputed."""
    loop = Loop(name)
    for block in loop.module:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return loop


def compiled(name: str, part: float) -> Loop:
    """Return a loop under torch's memory budget."""
    loop = Loop(name)
    torch._dynamo.reset()
    functorch.activation_memory_budget = part
    loop.forward = torch.compile(loop.module, backend=BACKEND)
    loop.step()
    loop.step()
    return loop


def planned(name: str, budget: int) -> tuple[Loop, Any]:
    """Return a loop under `pipefit.apply`, and its handle."""
    loop = Loop(name)
    handle = pipefit.apply(
        loop.module, budget=budget, batch=loop.batch, optimizer=loop.optimizer, loss=F.mse_loss, offload=False
    )
    return loop, handle


def cost(loop: Loop, name: str, steps: int) -> float:
    """Return the median, over pairs of steps, of CPU seconds relative to the plain loop."""
    plain = Loop(name)
    ratios = []
    for number in range(steps + 2):
        seconds = []
        for one in (plain, loop) if number % 2 else (loop, plain):
            start = time.process_time()
            one.step()
            seconds.append(time.process_time() - start)
        ratios.append(seconds[1] / seconds[0] if number % 2 else seconds[0] / seconds[1])
    return round(statistics.median(ratios[2:]), 3)


def rows_of(name: str, steps: int) -> dict[str, Any]:
    """Return the figures of a model."""
    plain = Loop(name)
    most, held = plain.peak(), plain.resident() + bytes_of(list(plain.module.parameters()))
    loop = checkpointed(name)
    blocks = {"peak_bytes": loop.peak(), "cost": cost(loop, name, steps)}
    kept, handle = planned(name, most)
    rows = []
    for part in PARTS:
        budget = held + int(part * (most - held))
        loop = compiled(name, part)
        row = {"part": part, "budget_bytes": budget, "compiled": {"peak_bytes": loop.peak()}}
        row["compiled"]["cost"] = cost(loop, name, steps)
        try:
            loop, handle = planned(name, budget)
            row["apply"] = {
                "certified_bytes": max(handle.plan.peak_bytes),
                "peak_bytes": loop.peak(),
                "cost": cost(loop, name, steps),
            }
        except InfeasibleError as error:
            row["apply"] = {"least_bytes": error.found["least_bytes"]}
        rows.append(row)
    return {
        "plain_bytes": most,
        "held_bytes": held,
        "checkpointed": blocks,
        "all_kept_cost": cost(kept, name, 5 * steps),
        "budgets": rows,
    }


def line(name: str, result: dict[str, Any], row: dict[str, Any]) -> str:
    """Return one budget as a line of the table."""

    def figures(one: dict[str, Any]) -> str:
        if "least_bytes" in one:
            return f"refused: at least {one['least_bytes'] / 1e6:.2f}"
        kept = "" if one["peak_bytes"] <= row["budget_bytes"] else ", above"
        return f"{one['peak_bytes'] / 1e6:.2f}{kept}, {one['cost']:.2f}x"

    every = (figures(one) for one in (row["compiled"], result["checkpointed"], row["apply"]))
    return f"| {name} | {row['part']} | {row['budget_bytes'] / 1e6:.2f} | " + " | ".join(every) + " |"


def main() -> None:
    """Measure all models, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| model | part | budget, MB | compiled | checkpointed blocks | `apply` |\n|---|---|---|---|---|---|"
    )
    results = {}
    for name in MODELS:
        results[name] = rows_of(name, options.steps)
        for row in results[name]["budgets"]:
            print(line(name, results[name], row), flush=True)
        print(f"{name}: everything kept costs {results[name]['all_kept_cost']:.3f}x", file=sys.stderr)
    if options.json:
        document = {"machine": machine(), "backend": BACKEND, "blocks": BLOCKS, "models": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
