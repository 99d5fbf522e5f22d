"""A row as what pipefit predicts: a task, a cluster, a training and the plan that the row's authors ran."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from clusters import cluster_of, with_context, with_tf32, with_workspaces
from models import Shape
from rows import Inexpressible, Row
from tasks import profiled, subject_of

from pipefit import Cluster, ModelProfile, Plan, Task, Training
from pipefit.schema.decisions import Decision, Microbatches, Run, What
from pipefit.schema.devices import DeviceKind
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import LayerCost, Value, Work
from pipefit.schema.profile import Measurement
from pipefit.schema.training import Precision
from pipefit.timing import seconds

MOST_REPEATED = 3
SHARDED = ("none", "optimizer", "gradients", "parameters")  # by ZeRO's stage
MOST_PIECES = 8192  # devices times buckets; a simulation takes half a minute
# A process loads all kernels before CUDA 11.7: nvidia-smi's 1644 MiB of an RTX 3090 with 158 MiB of tensors
# (pytorch/pytorch#49877)
EAGER_CONTEXT = 1486 << 20
# Megatron-LM's golden values that were recorded before August 2025, when it freed its empty gradients at once
_TEMPORARY = ("/golden_values_lts_", "/t5_mcore_tp4_pp1/golden_values_dev_dgx_a100")
# Seconds of an operation of Megatron-LM on the host: the median of those that rows of small models in Megatron's CI
# need to be as long as measured, of the calibration half
HOST_SECONDS = {"A100": 110e-6, "H100": 56e-6}
# bigscience's runs on 320 GPUs hung without CUDA_LAUNCH_BLOCKING=1, by which a host waits for every kernel
WAITING_GPUS = 320
SCHEDULES = {"": "1f1b", "1f1b": "1f1b", "gpipe": "torchgpipe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A row as a plan, and what the measurement has that the plan has not.

    A step of 1F1B repeats itself, so `plan` has at most `MOST_REPEATED` microbatches a stage of the row's
    `microbatches`. Seconds are those of `timed`, and of `longer` with some more microbatches, if the row has. They
    send as many bytes as with sequence parallelism, without its copies: in nanotron and Megatron tokens are the first
    dimension, so what ranks gather is in place. Their ranks draw only their own part of dropout. `rank` is the device
    whose memory was measured, None for the fullest one, or `summed` for all together.

    `gradient_bytes` are those of a parameter's gradient where the framework allocates it once and keeps it, perhaps
    in another dtype, else None; `plan` has two microbatches then. `held_bytes` is the model's output, which the
    training loop holds through the backward. `loss_bytes` are those that the framework's loss needs above pipefit's,
    in the forward and in the backward. `boundary_bytes` are those of a tensor between stages in a framework that
    neither receives ahead nor holds what it sent, `constant_bytes` those of buffers that it never frees.
    `largest_parameter` has the elements of a rank's largest parameter under DeepSpeed, whose flat buffers count for
    used memory. `copies_on_streams` is true of torchgpipe, whose copies between stages fill segments of other
    streams. The measured time is of one in `steps_per_time` parts of a step.
    """

    task: Task
    plan: Plan
    timed: Plan
    longer: Plan | None = None
    microbatches: int
    rank: int | None
    gradient_bytes: int | None = None
    summed: bool = False
    held_bytes: int = 0
    loss_bytes: tuple[int, int] = (0, 0)
    boundary_bytes: int | None = None
    constant_bytes: int = 0
    largest_parameter: int | None = None
    copies_on_streams: bool = False
    steps_per_time: int = 1


def setup_of(row: Row, samples: int | None = None) -> Setup:
    """Return the setup of a row, or of the same row with other `samples` in a microbatch.

    Raises:
        Inexpressible: pipefit cannot express the row, or the row does not say enough.
    """
    _refuse(row)
    optimizer, precision = optimizer_of(row), precision_of(row)
    subject = subject_of(row, optimizer)
    shape = subject.shape
    degrees = pp, dp, tp = row.pp or 1, row.dp or 1, row.tp or 1
    micro, count = samples or row.samples, microbatches_of(row)
    along = row.seq_parallel == "yes" and tp > 1
    if pp * dp * tp * _buckets(row, pp, dp) > MOST_PIECES:
        raise Inexpressible("too many gathers and reductions to simulate in seconds")
    task, found = profiled(subject, optimizer, precision, micro, dp, tp, along=along)
    timed = subject_of(row, optimizer, divided=tp > 1)
    clocked = profiled(timed, optimizer, precision, micro, dp, tp, along=along)[1]
    if pp > 1 and tp > 1 and (along or _deepspeed(row)):
        clocked = sent_in_parts(clocked, tp)
    cluster = cluster_of(row, pp * dp * tp)
    if "tf32" in row.precision.lower():
        cluster = with_tf32(cluster)
    if said := re.search(r"context (\d+) MiB", row.trust):
        cluster = with_context(cluster, int(said[1]) << 20)
    elif re.search(r"CUDA 11\.[0-6]", row.version):
        cluster = with_context(cluster, EAGER_CONTEXT)
    if "--deterministic-mode" in row.remarks:  # needs CUBLAS_WORKSPACE_CONFIG=:4096:8
        cluster = with_workspaces(cluster, 32 << 20)
    clocked = hosted(row, clocked, cluster, precision)
    edges = edges_of(row, found, shape, pp)
    schedule = SCHEDULES[row.schedule.lower()]

    def plan_of(count: int, of: ModelProfile, *, along: bool = False) -> Plan:
        stages = tuple(
            Stage(start=a, stop=b, grid=_grid(row, number, *degrees, along=along))
            for number, (a, b) in enumerate(pairwise(edges))
        )
        training = Training(
            batch_size=micro * dp * count, microbatches=count, precision=precision, schedule=schedule
        )
        decisions = decisions_of(row, found, stages, count)
        return Plan(profile=of, cluster=cluster, training=training, stages=stages, decisions=decisions)

    fewest, repeated = MOST_REPEATED * pp, schedule == "1f1b"
    least = min(count, fewest) if repeated else count
    kept = bool(
        re.search(r"torch 1\.\d+(?![\d.]* or )", row.version)
    )  # `zero_grad` of torch 1 fills gradients with zeros
    wide = precision.startswith("master") and "float32" in row.precision and "2 + 4" in row.state_bytes
    wide = wide or bool(re.search(r"float32 (main gradients|gradient)", row.precision))
    # gradients that exist before the first forward are those that a microbatch before has left
    plan = plan_of(max(least, 2 if (kept or wide) and pp == 1 else 1), found, along=along)
    both = wide and _deepspeed(row)  # its BF16_Optimizer keeps gradients of the parameters' dtype too
    return Setup(
        task=task,
        plan=plan,
        timed=plan_of(least, clocked),
        longer=plan_of(min(count, fewest + pp), clocked) if repeated and count > fewest else None,
        microbatches=count,
        rank=rank_of(row, plan),
        gradient_bytes=6 if both else 4 if wide else (2 if "master" in precision else 4) if kept else None,
        summed="sum over devices" in row.mem_rank,
        held_bytes=held_bytes(row, found, micro),
        loss_bytes=loss_bytes(row, shape, micro),
        boundary_bytes=boundary_bytes(row, shape, micro, along=along),
        constant_bytes=constant_bytes(row, shape, micro),
        largest_parameter=shape.vocab * shape.hidden // tp if shape and _deepspeed(row) else None,
        copies_on_streams=row.framework.startswith("torchgpipe"),
        steps_per_time=count if "micro-batches" in row.time_kind else 1,
    )


def sent_in_parts(found: ModelProfile, ranks: int) -> ModelProfile:
    """Return a profile of which every rank sends its part of a tensor between layers, where pipefit sends it whole.

    DeepSpeed's pipeline divides what it sends if ranks divide layers (`is_pipe_partitioned`), and with sequence
    parallelism a rank has only a part.
    """

    def parts(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(
            replace(value, shape=(*value.shape[:-1], value.shape[-1] // ranks), nbytes=value.nbytes // ranks)
            if value.has_gradient
            else value
            for value in values
        )

    def sent(measurement: Measurement) -> Measurement:
        head = measurement.layers[-1]
        kinds = (
            replace(
                kind,
                inputs=parts(kind.inputs),
                outputs=kind.outputs if number == head else parts(kind.outputs),
            )
            for number, kind in enumerate(measurement.kinds)
        )
        return replace(measurement, kinds=tuple(kinds))

    return replace(found, measurements=tuple(map(sent, found.measurements)))


def hosted(row: Row, found: ModelProfile, cluster: Cluster, precision: Precision) -> ModelProfile:
    """Return a profile with the seconds of the host, if operations of a Megatron-LM may be bound by them."""
    kind, dtype = cluster.devices[0].kind, precision.split("-")[-1]
    host = next((seconds for name, seconds in HOST_SECONDS.items() if row.gpu.startswith(name)), None)
    if host and row.framework.startswith("Megatron-LM"):
        return with_host(found, kind, dtype, host, waits=False)
    if host and _deepspeed(row) and (row.gpus or 0) >= WAITING_GPUS:
        return with_host(found, kind, dtype, host, waits=True)
    return found


def with_host(
    found: ModelProfile, kind: DeviceKind, dtype: str, host_seconds: float, *, waits: bool
) -> ModelProfile:
    """Return a profile whose passes take the time of the host, which needs `host_seconds` for every operation.

    A host that waits for every kernel adds its seconds; another one works ahead, so the longer of both counts.
    """

    def timed(work: Work) -> Work:
        own, host = seconds(work, kind, dtype), host_seconds * sum(each.number for each in work.operations)
        return replace(work, seconds=own + host if waits else max(own, host))

    def slower(cost: LayerCost) -> LayerCost:
        return replace(cost, forward=timed(cost.forward), backward=timed(cost.backward))

    measurements = (
        replace(each, kinds=tuple(map(slower, each.kinds)), loss=slower(each.loss))
        for each in found.measurements
    )
    return replace(found, measurements=tuple(measurements))


def _deepspeed(row: Row) -> bool:
    return row.framework.lower().startswith("megatron-deepspeed")


def held_bytes(row: Row, found: ModelProfile, micro: int) -> int:
    """Return the bytes of the output that LitGPT's loop names until the backward has ended."""
    if not row.framework.lower().startswith(("litgpt", "lit-gpt")):
        return 0
    return sum(value.nbytes for value in found.at(micro).costs[-1].outputs)


def loss_bytes(row: Row, shape: Shape | None, micro: int) -> tuple[int, int]:
    """Return the bytes of a framework's loss above torch's in half precision, in the forward and in the backward.

    torch's makes two copies of the logits in the forward and three until the backward ends. Megatron's softmax is
    float32, changed in place, and copied once more where ranks divide it. DeepSpeed's pipeline holds outputs of its
    last stage, in float32, until their buffer, one of two, is used again. nanotron copies float32 logits once, and
    works in place. llm-foundry's loss is one kernel, which keeps the logits and makes their gradient, and so is
    torchtune's loss in chunks, which compiles the conversion of every chunk.
    """
    if shape is None:
        return 0, 0
    framework, copy = row.framework.lower(), 2 * micro * shape.seq * shape.vocab // (row.tp or 1)
    if framework == "nanotron":
        return -copy, -copy * (1 if (row.tp or 1) > 1 else 3)
    if _deepspeed(row):  # two microbatches before in a forward, one in a backward
        return 5 * copy, copy * (2 + ((row.tp or 1) > 1))
    if framework.startswith("megatron-lm"):
        return copy, copy * ((row.tp or 1) > 1)
    fused = framework.startswith("llm-foundry") or "loss in chunks" in row.class_reason
    return (-copy, -copy) if fused else (0, 0)


def boundary_bytes(row: Row, shape: Shape | None, micro: int, *, along: bool) -> int | None:
    """Return the bytes of a tensor between stages of nanotron or Megatron-LM, whose transfers are synchronous.

    With sequence parallelism ranks exchange their parts of the sequence, while pipefit's exchange whole tensors.
    """
    if shape is None or not row.framework.lower().startswith(("nanotron", "megatron-lm")):
        return None
    return 2 * micro * shape.seq * shape.hidden // ((row.tp or 1) if along else 1)


def constant_bytes(row: Row, shape: Shape | None, micro: int) -> int:
    """Return the bytes of Megatron Core's buffers: for scores, which its local attention shares among layers, and
    in place of gradients.
    """
    if shape is None or not row.framework.lower().startswith("megatron-lm") or "local" not in row.attention:
        return 0
    scores = 2 * micro * shape.heads * max(shape.seq, row.seq or 0) ** 2 // (row.tp or 1)
    return scores + placeholder_bytes(row, shape)


def placeholder_bytes(row: Row, shape: Shape) -> int:
    """Return the bytes of the empty gradients that autograd gets where a fused product adds the real ones to a buffer.

    Transformer Engine's `get_dummy_wgrad` keeps one for every shape of a rank's weights.
    """
    if "--no-gradient-accumulation-fusion" in row.remarks or any(file in row.ref for file in _TEMPORARY):
        return 0
    ranks, hidden = row.tp or 1, shape.hidden
    outputs = [sum(shape.qkv), shape.ffn, shape.vocab]  # of layers whose ranks divide the outputs
    if "+" in row.layers:  # a decoder that attends to an encoder
        outputs += [hidden, 2 * hidden]
    shapes = {(each // ranks, hidden) for each in outputs}
    shapes |= {(hidden, each // ranks) for each in (shape.qkv[0], shape.ffn)}
    return 2 * sum(rows * columns for rows, columns in shapes)


def _refuse(row: Row) -> None:
    """Refuse rows with techniques that pipefit lacks."""
    if (row.cp or 1) > 1 or (row.ep or 1) > 1:
        raise Inexpressible("context or expert parallelism")
    if (row.virtual_stages or 1) > 1:
        raise Inexpressible("interleaved stages")
    if row.offload not in ("", "none", "none presumably"):
        raise Inexpressible("offloading of the framework's own kind")
    if row.kind == "C":
        raise Inexpressible("class C: Transformer Engine, FP8, 4-bit weights or another optimizer")
    if row.kind == "D":
        raise Inexpressible("class D: the source says too little")
    if row.schedule.lower() not in SCHEDULES:
        raise Inexpressible("another schedule")
    if re.search(r"selective|per operator", row.recompute):
        raise Inexpressible("recomputation of single operators")


def precision_of(row: Row) -> Precision:
    """Return pipefit's name of a row's precision.

    Raises:
        Inexpressible: not said.
    """
    text = row.precision.lower()
    if "deeplearningexamples" in row.framework.lower() and "squad" in row.model.lower() and "float16" in text:
        return "master-float16"  # its script's "AMP" is apex's level O2, float16 weights, not autocast
    if row.zero == 3 and re.search(r"fsdp mixed precision|float32 parameters, bf16", text):
        return "master-bfloat16"  # FSDP gathers float32 shards as bfloat16, which is what the layers compute with
    names: tuple[tuple[str, Precision], ...] = (
        (r"mixed-float16", "mixed-float16"),
        (r"mixed-bfloat16|amp_bf16|fsdp mixed precision|float32 parameters, bf16", "mixed-bfloat16"),
        (r"bf16.*float32", "master-bfloat16"),
        (r"fp16.*float32 master|fp16 \(apex", "master-float16"),
        (r"^tf32|^float32", "float32"),
        (r"^bf16|^bfloat16", "bfloat16"),
        (r"^fp16", "float16"),
    )
    for pattern, name in names:
        if re.search(pattern, text):
            return name
    raise Inexpressible("the precision is not said")


def optimizer_of(row: Row) -> Callable[..., torch.optim.Optimizer]:
    """Return the optimizer of a row, or one with the same state.

    Raises:
        Inexpressible: pipefit's torch has no optimizer with the same state.
    """
    text = row.optimizer.lower()
    if re.search(r"8bit|8-bit|adafactor|in backward", text):
        raise Inexpressible("another optimizer")
    if row.framework.startswith("torchtune"):  # its recipes with AdamW set `fused`
        return _fused
    if "adam" in text or "lamb" in text:  # LAMB has Adam's two moments
        return torch.optim.AdamW
    if "rmsprop" in text:
        return torch.optim.RMSprop
    if "sgd" in text:
        return _momentum if "momentum" in text else torch.optim.SGD
    raise Inexpressible("the optimizer is not said")


def _fused(groups: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, fused=True)  # type: ignore[arg-type]


def _momentum(groups: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def microbatches_of(row: Row) -> int:
    """Return the microbatches of a step and replica; two where not said, so that gradients accumulate."""
    if row.accumulation:
        return row.accumulation
    replicas = (row.dp or 1) * row.samples
    if row.global_batch and row.global_batch % replicas == 0:
        return row.global_batch // replicas
    return 2


def _buckets(row: Row, pp: int, dp: int) -> int:
    """Return the parts in which replicas reduce gradients: about the blocks of a stage."""
    if dp == 1 or row.zero == 1 or not row.layers.isdigit():
        return 1
    return max(1, int(row.layers) // pp)


def _grid(row: Row, stage: int, pp: int, dp: int, tp: int, *, along: bool) -> Grid:
    """Return the grid of a stage: ranks of a replica are neighbours, then replicas, then stages.

    FSDP gathers and reduces block by block, DDP in buckets of 25 MB; so there are as many buckets as blocks.
    """
    first = stage * dp * tp
    buckets = _buckets(row, pp, dp)
    shard = SHARDED[row.zero or 0] if dp > 1 else "none"
    return Grid(
        devices=tuple(range(first, first + dp * tp)),
        data=dp,
        tensor=tp,
        shard=shard,
        buckets=buckets,
        sequences=along,  # type: ignore[arg-type]
    )


def edges_of(row: Row, found: ModelProfile, shape: Shape | None, pp: int) -> Sequence[int]:
    """Return the layers at which stages begin and end: an embedding, blocks, a norm and a head.

    nanotron balances 4 h^2 + 3 h f a block and v h for the head; others spread blocks evenly, and in bigscience's
    last rows embedding and head count as a block each.
    """
    layers = len(found.layers)
    if pp == 1:
        return 0, layers
    if balance := re.search(r"balance ([\d,]+)", row.remarks):
        return _balanced([int(count) for count in balance[1].split(",")], found.edges)
    if shape is None:
        raise Inexpressible("the split into stages is not said")
    if row.framework == "nanotron":
        return _by_cost(shape, pp, layers)
    if "embedding layers count" in row.remarks:
        return _spread(layers - 1, pp, layers)
    if _deepspeed(row):  # its cut of the least largest stage fills every stage up to that
        most = -(-shape.layers // pp)
        return 0, *(min(1 + most * stage, layers - 2) for stage in range(1, pp)), layers
    each, more = divmod(shape.layers, pp)
    counts = [each + (stage < more) for stage in range(pp)]
    inner = [1 + edge for edge in accumulate(counts)]
    return 0, *inner[:-1], layers


def _balanced(counts: Sequence[int], edges: Sequence[int]) -> Sequence[int]:
    """Return the edges of stages with these numbers of layers, scaled if the source counts layers otherwise.

    torchgpipe counts modules of its flattened models, so edges move to the nearest of pipefit's blocks.
    """
    wanted = [edge * edges[-1] / sum(counts) for edge in accumulate(counts)]
    return 0, *(min(edges, key=lambda edge: abs(edge - each)) for each in wanted[:-1]), edges[-1]


def _spread(units: int, pp: int, layers: int) -> Sequence[int]:
    each, more = divmod(units, pp)
    inner = list(accumulate(each + (stage < more) for stage in range(pp)))
    return 0, *inner[:-1], layers


def _by_cost(shape: Shape, pp: int, layers: int) -> Sequence[int]:
    """Return nanotron's cut: blocks are dealt until a stage has its share of the cost."""
    block = 4 * shape.hidden**2 + 3 * shape.hidden * shape.ffn
    costs = [0, *[block] * shape.layers, 0, shape.vocab * shape.hidden]
    total, edges = sum(costs), [0]
    for number, reached in enumerate(accumulate(costs)):
        if len(edges) < pp and reached > total / pp * len(edges):
            edges.append(number + 1)
    return *edges, layers


def decisions_of(row: Row, found: ModelProfile, stages: Sequence[Stage], count: int) -> tuple[Decision, ...]:
    """Return the recomputation of every block, or of stages in all microbatches but the last."""
    if row.recompute.startswith("except_last") and count > 1:
        taken = Microbatches(taken=count - 1, every=count)
        return tuple(
            Decision(
                stage=number,
                subject=Run(start=stage.start, stop=stage.stop),
                what=What.RECOMPUTE,
                microbatches=taken,
            )
            for number, stage in enumerate(stages)
        )
    if not re.search(r"^full", row.recompute):
        return ()
    return tuple(
        Decision(stage=number, subject=Run(start=layer, stop=layer + 1), what=What.RECOMPUTE)
        for number, stage in enumerate(stages)
        for layer in range(stage.start, stage.stop)
        if found.layers[layer].startswith("block")
    )


def rank_of(row: Row, plan: Plan) -> int | None:
    """Return the device that was measured, if the row names one."""
    if "rank 0" in row.mem_rank:
        return 0
    if "last rank" in row.mem_rank:
        return plan.stages[-1].devices[-1]
    return None
