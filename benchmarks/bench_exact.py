"""How long the exact search takes: `python benchmarks/bench_exact.py [--json PATH]`.

Three kinds of chain: layers drawn at random, layers all alike (ties everywhere), and one layer a hundred times as
heavy as the others (every other stage has room to spare, so little can be pruned). 1F1B, four microbatches for each
device. Seconds are the best of three, for the search alone; the step time of a plan is simulated besides.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from pipefit.cluster import Cluster
from pipefit.planner.lexmin import solve
from pipefit.planner.question import Question
from pipefit.profile import (
    Assumptions,
    GradientOrigin,
    LayerCost,
    Measurement,
    ModelProfile,
    Origin,
    Parameter,
    SavedTensor,
    Span,
    Value,
    Work,
)
from pipefit.training import Training

SIZES = ((30, 4), (42, 4), (64, 8), (96, 16), (1000, 64))
CHAINS = ("random", "alike", "heavy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement. `evaluated` counts candidate stages."""

    chain: str
    layers: int
    devices: int
    seconds: float
    evaluated: int
    peak_bytes: int | None = None


def main() -> None:
    """Prints a table, and writes it as JSON where asked."""
    parser = argparse.ArgumentParser(description="How long the exact search takes.")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    rows = []
    print(f"{'chain':8}{'layers':>8}{'devices':>9}{'seconds':>10}{'stages looked at':>18}")
    for layers, devices in SIZES:
        for chain in CHAINS:
            row = measure(chain, layers, devices)
            rows.append(row)
            print(f"{row.chain:8}{row.layers:8}{row.devices:9}{row.seconds:10.4f}{row.evaluated:18,}", flush=True)
    if arguments.json:
        document = {
            "machine": platform.platform(),
            "python": platform.python_version(),
            "rows": [asdict(r) for r in rows],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def measure(chain: str, layers: int, devices: int) -> Row:
    """The best of three searches on one chain."""
    question = Question(
        profile=profile(make(chain, layers)),
        cluster=Cluster.emulated((devices, 1 << 50)),
        training=Training(batch_size=4 * devices, microbatches=4 * devices),
    )
    seconds, evaluated = [], 0
    for _ in range(3):
        began = time.perf_counter()
        evaluated = solve(question).evaluated
        seconds.append(time.perf_counter() - began)
    return Row(chain=chain, layers=layers, devices=devices, seconds=min(seconds), evaluated=evaluated)


def make(chain: str, count: int, seed: int = 0) -> list[LayerCost]:
    """Layers of one value each, which save their input and something of their own."""
    rng = Random(seed)
    widths = [rng.randrange(1 << 16, 1 << 20) if chain == "random" else 1 << 19 for _ in range(count + 1)]
    weights = [rng.randrange(1 << 24) if chain == "random" else 1 << 23 for _ in range(count)]
    if chain == "heavy":
        weights[count // 3] *= 100
    return [layer(widths[k], widths[k + 1], weights[k]) for k in range(count)]


def layer(inward: int, outward: int, weight: int) -> LayerCost:
    """One layer: gradients as large as the weights, optimizer state twice that."""
    work = Work(flops=2 * weight, moved_bytes=weight, seconds=None)
    later = (Span(peak_bytes=2 * inward + outward), Span(peak_bytes=2 * inward, released=(0,)))
    return LayerCost(
        module="Synthetic",
        parameters=(Parameter(name="weight", shape=(weight,), dtype="uint8", nbytes=weight, trainable=True),),
        buffer_bytes=0,
        inputs=(value(inward),),
        outputs=(value(outward),),
        output_origins=(Origin(kind="own", index=0),),
        storages=(outward, inward),
        saved=(saved(0, inward, "input", 0), saved(1, inward, "own", 1)),
        checkpoint_peak_bytes=0,
        mutates_inputs=False,
        early_state_bytes=0,
        forward_peak_bytes=outward + 2 * inward,
        backward_first=tuple(Span(peak_bytes=s.peak_bytes + weight, released=s.released) for s in later),
        backward_later=later,
        gradient_bytes=weight,
        input_gradients=(GradientOrigin(kind="own"),),
        gradient_storages=(inward,),
        state_bytes=2 * weight,
        update_first_peak_bytes=3 * weight,
        update_peak_bytes=weight,
        forward=work,
        backward=work,
        update=work,
    )


def value(nbytes: int) -> Value:
    """A boundary tensor."""
    return Value(shape=(nbytes,), dtype="uint8", nbytes=nbytes, requires_grad=True)


def saved(number: int, nbytes: int, kind: str, index: int) -> SavedTensor:
    """A saved tensor of a storage."""
    return SavedTensor(index=number, nbytes=nbytes, dtype="uint8", origin=Origin(kind=kind, index=index))


def profile(layers: list[LayerCost]) -> ModelProfile:
    """The layers, and the last one again as the loss: it takes what they leave."""
    chain = Measurement(
        microbatch_size=1,
        kinds=tuple(layers),
        layers=tuple(range(len(layers))),
        loss=layer(layers[-1].outputs[0].nbytes, 4, 0),
    )
    taken = Assumptions(target="cuda", device="fake", precision="float32", optimizer="adam", torch="2", threads=1)
    return ModelProfile(
        model="synthetic",
        fingerprint="0",
        layers=tuple(f"layer{k}" for k in range(len(layers))),
        measurements=(chain,),
        assumptions=taken,
    )


if __name__ == "__main__":
    main()
