"""Claim: where no time was measured, estimates are within a quarter of published training throughput.

The analytic model of `pipefit.timing` beside what others measured, with the presets' own figures: BERT large and GPT
on one V100 and one A100; when offloading a block's activations costs nothing (PipeOffload's k); and the round trips of
tensors on a DGX-1 (MPress). Nothing is run: profiles are fake, for the kernels of CUDA.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_time.py [--json FILE]

A minute. The parts of the peak figures that V100 and A100 reach were chosen with these rows in sight, three numbers for
the ten of `TRAINING`; the rows of `FUSED` and of the tables below took no part in it. "over" is the estimate against
what was published.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from measured_on import machine
from pipefit.models import build
from pipefit.profiler import profile
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, SavedTensors, What
from pipefit.schema.devices import DeviceKind, Link, Member, MemberKind, parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import LayerCost
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Precision, Training
from pipefit.simulator import Simulation
from pipefit.timing import PassSeconds, layer_seconds

COLUMNS = ("what", "on", "published", "estimated", "over")
BERT: dict[str, Any] = {"layers": 24, "hidden": 1024, "heads": 16, "head": "span", "attention": "eager"}
GPT: dict[str, Any] = {"vocabulary": 51200, "attention": "eager"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A measured throughput of one device, and what it was measured of.

    An update follows every `accumulated` microbatches. With `recomputed`, all blocks run their forward again, and the
    throughput is in TFLOP/s that count it, as Megatron's papers do; otherwise it is in sequences per second.
    """

    what: str
    cluster: str
    model: str
    settings: dict[str, Any] = field(repr=False)
    size: int
    throughput: float
    precision: Precision
    accumulated: int = 1
    recomputed: bool = False


def bert(
    cluster: str, sequence: int, size: int, throughput: float, half: bool, accumulated: int = 1
) -> Published:
    """A row of NVIDIA's BERT for PyTorch (DeepLearningExamples, 20.06), on one GPU."""
    precision: Precision = "master-float16" if half else "float32"
    return Published(
        what=f"BERT large, {sequence} tokens, {size} at once, {precision.removeprefix('master-')}",
        cluster=cluster,
        model="bert",
        settings=BERT | {"sequence": sequence},
        size=size,
        throughput=throughput,
        precision=precision,
        accumulated=accumulated,
    )


def gpt(what: str, cluster: str, size: int, throughput: float, **settings: Any) -> Published:
    """A row of Megatron's papers, of one GPU."""
    return Published(
        what=what,
        cluster=cluster,
        model="gpt",
        settings=GPT | settings,
        size=size,
        throughput=throughput,
        precision="master-float16",
        recomputed=True,
    )


V100_GPT: dict[str, Any] = {"layers": 40, "hidden": 1536, "heads": 16, "sequence": 1024}
# Fine-tuning for SQuAD (384 tokens), and pre-training, whose head reads few tokens, so that SQuAD's stands for it
TRAINING = (
    bert("dgx1-v100", 384, 8, 12, False),
    bert("dgx1-v100", 128, 8, 40, False, 8192),
    bert("dgx1-v100", 512, 2, 9, False, 16384),
    bert("dgx1-v100", 384, 10, 49, True),
    bert("dgx1-v100", 128, 16, 158, True, 4096),
    bert("dgx1-v100", 512, 4, 33, True, 8192),
    bert("dgx2-a100", 384, 32, 116, True),
    bert("dgx2-a100", 128, 64, 415, True, 1024),
    bert("dgx2-a100", 512, 16, 78, True, 2048),
    gpt("GPT 1.2B of Megatron, 2019, TFLOP/s", "dgx1-v100", 8, 39, **V100_GPT),
)
# Kernels that join operations, which plain operations do not reach; the V100 of a DGX-2H has 450 W
FUSED = (
    gpt("GPT 1.2B of Megatron 1.0, TFLOP/s", "dgx1-v100", 8, 62.4, **V100_GPT),
    gpt(
        "GPT 1.7B of Megatron, 2021, TFLOP/s", "dgx-a100", 16, 137,
        layers=24, hidden=2304, heads=24, sequence=2048,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published figure beside the estimate."""

    what: str
    on: str
    published: float
    estimated: float

    @property
    def over(self) -> float:
        """The estimate above what was published, as a share of that."""
        return self.estimated / self.published - 1


def kind_of(cluster: str) -> DeviceKind:
    """The kind of a preset's devices."""
    return Cluster.preset(cluster).devices[0].kind


def profiled(model: str, settings: dict[str, Any], size: int, precision: Precision) -> ModelProfile:
    """The profile of a model of the zoo, for CUDA."""
    task = build(model, **settings)
    if precision != "float32":
        task = replace(task, precision=precision)
    return profile(task, microbatch_size=size, target="cuda")


def throughput(case: Published) -> Row:
    """The estimated throughput of one device."""
    found, kind = profiled(case.model, case.settings, case.size, case.precision), kind_of(case.cluster)
    count = case.accumulated
    training = Training(batch_size=count * case.size, microbatches=count, precision=case.precision)
    times = layer_seconds(found.at(case.size), kind, training)
    passes = sum(time.forward + time.backward for time in times)
    update = sum(time.update for time in times) / case.accumulated
    if case.recomputed:
        passes += sum(time.forward for time in blocks(found, times))
        estimated = megatron_flops(case.size, **case.settings) / (passes + update) / 1e12
    else:
        estimated = case.size / (passes + update)
    return Row(what=case.what, on=kind.name, published=case.throughput, estimated=estimated)


def blocks(found: ModelProfile, times: Sequence[PassSeconds]) -> list[PassSeconds]:
    """The seconds of the blocks alone."""
    return [time for name, time in zip(found.layers, times, strict=False) if name.startswith("block")]


def megatron_flops(size: int, *, layers: int, hidden: int, sequence: int, vocabulary: int, **_: Any) -> float:
    """Floating-point operations of a step with recomputation (Narayanan et al., 2021, equation 3)."""
    inner = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return 96 * size * sequence * layers * hidden**2 * inner


# -------------------------------------------------------------------- PipeOffload

OFFLOAD = (
    (4096, 1.70, 0.311),
    (8192, 1.46, 0.200),
    (16384, 1.15, 0.062),
    (32768, 0.80, -0.074),
)  # tokens, k, lost
_HIDDEN, _COPY_RATE, _BYTES = (
    4096,
    15e9,
    20,
)  # theirs: hidden size, bytes per second, bytes a token and hidden unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """How long a block's activations take to the host and back, as a share of its forward and backward (k).

    `lost` is the share of throughput lost where all are offloaded: as published; as k alone would have it where one
    stream copies out and in by turns, 1 - 1 / k; and simulated, where each direction has a stream of its own, at the
    published k with one and with two forwards or backwards of slack for every copy.
    """

    tokens: int
    k: float
    estimated_k: float
    lost: float
    estimated_lost: float
    simulated_lost: float
    simulated_lost_with_slack: float


def offload(tokens: int, k: float, lost: float) -> Offload:
    """A row of PipeOffload's table, on an A100, with its rate of copies and bytes of a block."""
    settings = {
        "layers": 8,
        "hidden": _HIDDEN,
        "heads": 32,
        "sequence": tokens,
        "vocabulary": 1000,
        "dropout": 0.0,
    }
    found = profiled("gpt", settings, 1, "bfloat16")
    training = Training(batch_size=1, microbatches=1, precision="bfloat16")
    block = blocks(found, layer_seconds(found.at(1), kind_of("dgx-a100"), training))[0]
    passes = block.forward + block.backward
    estimated = 2 * _BYTES * tokens * _HIDDEN / _COPY_RATE / passes
    plan = offloadable(found, k * passes / 2)
    kept = Simulation(plan, steps=2).step_seconds[-1]
    moved, slack = (Simulation(offloaded(plan, actions), steps=2).step_seconds[-1] for actions in (1, 2))
    return Offload(
        tokens=tokens,
        k=k,
        estimated_k=estimated,
        lost=lost,
        estimated_lost=max(0.0, 1 - 1 / estimated),
        simulated_lost=1 - kept / moved,
        simulated_lost_with_slack=1 - kept / slack,
    )


def offloadable(found: ModelProfile, copy_seconds: float, stages: int = 8) -> Plan:
    """So many blocks on A100s, one each, in four times as many microbatches; the host is `copy_seconds` away."""
    box, names = Cluster.preset("dgx-a100"), found.layers
    cost = found.at(1).costs[names.index("block1")]
    rate = sum(cost.storages[index] for index in own_storages(cost)) / copy_seconds
    nvlink = next(
        link for link in box.links if all(member.kind is MemberKind.DEVICE for member in link.members)
    )
    peers = replace(nvlink, members=tuple(map(Member.device, range(stages))))
    uplinks = tuple(
        Link.between(f"device{device}", "host0", bytes_per_second=rate) for device in range(stages)
    )
    edges = (0, *(names.index(f"block{number}") for number in range(1, stages)), len(names))
    return Plan(
        profile=found,
        cluster=replace(box, devices=box.devices[:1] * stages, links=(peers, *uplinks)),
        training=Training(batch_size=4 * stages, microbatches=4 * stages, precision="bfloat16"),
        stages=tuple(
            Stage(start=a, stop=b, grid=Grid.of(device)) for device, (a, b) in enumerate(pairwise(edges))
        ),
    )


def offloaded(plan: Plan, actions: int) -> Plan:
    """The plan with all that blocks save of their own at the host, each copy with so many actions of slack."""
    decisions = []
    for number, name in enumerate(plan.profile.layers):
        stage = next(n for n, there in enumerate(plan.stages) if there.start <= number < there.stop)
        if name.startswith("block") and stage + 1 < len(
            plan.stages
        ):  # the last one has one microbatch at a time
            saved = own_storages(plan.measurement.costs[number])
            decisions.append(
                Decision(
                    stage=stage,
                    subject=SavedTensors(tensors=tuple((number, first) for first in saved.values())),
                    what=What.OFFLOAD,
                    place=parse_place("host"),
                    ahead=actions,
                    behind=actions,
                )
            )
    return replace(plan, decisions=tuple(decisions))


def own_storages(cost: LayerCost) -> dict[int, int]:
    """The storages that a layer allocates and saves but does not hand on, each with the first tensor that names it."""
    returned = {origin.index for origin in cost.output_origins if origin.kind == "own"}
    saved = [
        tensor for tensor in cost.saved if tensor.origin.kind == "own" and tensor.origin.index not in returned
    ]
    return {tensor.origin.index: tensor.index for tensor in reversed(saved)}


# -------------------------------------------------------------------- MPress

SWAPPED = (
    (216, 42, 6),
    (115, 22, 3),
    (384, 74, 9),
    (1152, 222, 27),
)  # MB, ms to the host and back, ms over NVLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Milliseconds of a tensor's round trip on a DGX-1, published and by the preset's links."""

    megabytes: int
    host_ms: float
    estimated_host_ms: float
    peers_ms: float
    estimated_peers_ms: float


def swap(megabytes: int, host_ms: float, peers_ms: float) -> Swap:
    """To the host, and striped over the four lanes from device 0 to devices 3 and 4."""
    cluster, here, nbytes = Cluster.preset("dgx1-v100"), Member.device(0), megabytes * 10**6
    to_host = cluster.route(here, Member.host(0)).seconds(nbytes)
    to_peers = max(cluster.route(here, Member.device(peer)).seconds(nbytes // 2) for peer in (3, 4))
    return Swap(
        megabytes=megabytes,
        host_ms=host_ms,
        estimated_host_ms=2e3 * to_host,
        peers_ms=peers_ms,
        estimated_peers_ms=2e3 * to_peers,
    )


def main() -> None:
    """Estimate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    print(f"{COLUMNS[0]:48} {COLUMNS[1]:9} {COLUMNS[2]:>9} {COLUMNS[3]:>9} {COLUMNS[4]:>6}")
    rows = {"training": list(map(throughput, TRAINING)), "fused": list(map(throughput, FUSED))}
    for row in (*rows["training"], *rows["fused"]):
        print(f"{row.what:48} {row.on:9} {row.published:9.4g} {row.estimated:9.4g} {row.over:+6.0%}")
    offloads = [offload(*case) for case in OFFLOAD]
    for each in offloads:
        print(
            f"offloading a block of {each.tokens:5} tokens: k {each.k:.2f}, estimated {each.estimated_k:.2f}; lost "
            f"{each.lost:+.0%}, estimated {each.estimated_lost:+.0%}, simulated {each.simulated_lost:+.0%}, with slack "
            f"{each.simulated_lost_with_slack:+.0%}"
        )
    swaps = [swap(*case) for case in SWAPPED]
    for found in swaps:
        print(
            f"{found.megabytes:4} MB there and back: host {found.host_ms:.0f} ms, estimated "
            f"{found.estimated_host_ms:.0f}; peers {found.peers_ms:.0f} ms, estimated {found.estimated_peers_ms:.1f}"
        )
    if asked.json is not None:
        document = {
            "machine": machine(),
            "kinds": {name: asdict(kind_of(name)) for name in ("dgx1-v100", "dgx2-a100", "dgx-a100")},
            **{name: [asdict(row) | {"over": row.over} for row in found] for name, found in rows.items()},
            "offload": [asdict(each) for each in offloads],
            "swap": [asdict(each) for each in swaps],
        }
        asked.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
