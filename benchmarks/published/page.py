"""The page `docs/against_reality.md`: its sentences, tables and two pictures, from the records of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from calibration import calibrated
from scores import (
    MEMORY,
    Record,
    errors,
    fits,
    grouped,
    percent,
    refused,
    scatter,
    summaries,
    summary,
    table,
    tau,
    worst,
)

REPEATS = 0.03  # bigscience measured one plan in 110.5 and in 113.5 s on one day

OPENING = """# Against published measurements

No GPU was at hand, but others have published what training took on theirs. `make published` turns rows of
[`benchmarks/published/rows.csv`](../benchmarks/published/rows.csv), 847 measurements with their configuration and
source, into a task, a cluster and the plan that was run, and prints pipefit's predictions next to the measurements
([JSON](../benchmarks/results/published.json)). Rows become plans by their columns alone, and no constant is tuned to a
row. Operations of Megatron-LM on the host of an A100 or H100 take the median of what its CI's rows of one half
need. Three figures of a kind of GPU in the presets follow from one half of the rows, by kind, and are checked on the
other: the shares of the peak that products and fused attention reach, and the elements a second of elementwise
kernels, for A100, H100 and its kin, RTX 3090 and 4090. For GPUs without the last one, the share of the float32 rate
that depthwise convolutions reach was chosen with both halves in view. Where a source leaves a variant of its model
open (a loss or an MLP, fused or not), the variant was chosen with its rows in view. The errors of the other half were
in view too while the facts behind its estimates were found, so that half is not an untouched check.

A row is of class A (eager torch, or nearly), B (fused kernels or `torch.compile`), C (context or expert
parallelism, Transformer Engine, FP8, 4-bit weights) or D (too little is said). Only A and B are
predicted. "By default" is what pipefit says of the plan; "with the framework's bytes" adds or
subtracts those in which the framework's public code differs from pipefit's training:

- **gradients in float32** for half-precision parameters (Megatron, nanotron): 4 bytes a parameter
  from the start; DeepSpeed's BF16_Optimizer keeps those in half precision too, 6 bytes;
- **state that replicas divide evenly**: in frameworks each replica owns a part of every tensor, or of a flat buffer;
  in pipefit a layer has one owner, and that of the embedding is the fullest;
- **the loss**: torch's makes three copies of the logits. Megatron's softmax is in float32, 2 bytes a token and
  word more than torch's in half precision; nanotron's copies float32 logits once and works in place; llm-foundry's
  fused loss makes two copies, and so does torchtune's in chunks, which is compiled;
- **the output of the model** in a loop that names it until the backward has ended (LitGPT), or in the last stage of
  DeepSpeed's pipeline, whose two buffers keep the logits of two microbatches;
- **tensors between stages**: Megatron and nanotron receive and send synchronously, and a rank of sequence
  parallelism only its part of the sequence; pipefit receives ahead, and sends whole tensors;
- **buffers that stay**: Megatron Core's for attention scores and in place of gradients that a fused product has added
  to its buffer, and cuBLAS's workspace of 32 MiB in deterministic mode;
- **flat buffers** of DeepSpeed's ZeRO 1, for used memory: gradients tested in float32 and normed in float64, a part of
  them flattened, parameters gathered. They live while no activation does, but need separate segments;
- **gradients filled with zeros** between steps, as `zero_grad` did before torch 2, so they exist in the first forward;
- **segments of other streams**, for reserved memory: torchgpipe copies every microbatch on another stream;
- **the context**, for what fits on an RTX 3090 with CUDA 11.3: 1,486 MiB, as one of its users measured. It was
  added with wrong rows of timm in view.

Steps of a pipeline repeat themselves, so seconds of many microbatches follow from those of few. Seconds of
sequence parallelism leave out pipefit's copies of gathered tensors: in Megatron and nanotron tokens are the first
dimension, and what ranks gather is in place. They also leave out the whole masks of dropout that pipefit's ranks draw,
so that a plan does not change the numbers: Megatron's ranks draw only their part.
"""

LEARNED = """## What each source taught

- **LitGPT.** Within 1.5 % but for one row (Llama 2 7 B, -2.9 %), once the model's output is taken as its launcher
  returns it: Lightning Fabric converts logits to float32, which is 2.5 times the logits in half precision,
  invisible in the model's code. The table of October 2023 names a commit whose RMSNorm computes in half precision.
  Its three recipes for Llama 2 7 B (LoRA, Adapter, Adapter v2) need 3 to 6 % more than parameters, state, logits
  and the tensors that the source's own code saves. With norms in float32, which its code had three days before the
  table appeared, they would be within 0.5 %; but the figure of LoRA was in a table of 5 October already, before
  that code. Three rows of full fine-tuning with AdamW (Llama 3.2 1 B and 3 B, Phi-3) show less memory than the 8
  bytes a parameter of weights, gradients and two moments, and Phi-3's 30 GB of them exceed the 24 GB of the card:
  AdamW's state cannot have been in them. These figures are not compared. The row of `gemma2-2b/lora.yaml` is of
  Gemma 2, as the configuration says, though the table calls it `gemma-2b`; the code of its day capped no logits in
  pieces.
- **nanotron.** Its public code explains what used to be missing. Queries are rotated in place and stay a view of
  a copy of all queries, keys and values, and keys and values are copied once more; so attention keeps five widths
  instead of three. Tokens are the first dimension, so a batch of more than one sample is copied before the output
  projection. Linear layers of sequence parallelism keep gathered inputs. Every replica owns a part of every
  tensor. With these, its loss, and a rank's part between stages, 14 of 16 plans are within 0.6 %; they were up to
  8 % too low. Reserved bytes are 2 % off in the median, and 5 to 14 % too low in five plans of small microbatches.
  Three plans of eight stages over two nodes take 54 to 62 ms a sample and replica, whatever their microbatch, four to
  six times the estimate: the source does not name the network between its nodes.
- **Megatron-LM, local layers.** Within 1 % once its buffer for scores, cuBLAS's workspace and its masks are
  counted, and gradients of a microbatch before. Over four ranks 5 % too high: pipefit gathers attention's result
  before a small output projection, which Megatron divides; and the bytes that stay between steps have room for
  one workspace, not two. T5 was up to 2.6 % too low, and is within 0.8 % now. torch counts the allocator's blocks,
  and tensors of 1 to 10 MB leave 30 to 80 MiB of them unused; plans of several ranks are run dry too, to count
  these. And autograd gets an empty gradient where a fused product has added the real one to Megatron's buffer:
  since August 2025 Transformer Engine keeps one for every shape of weights, 58 MiB on one rank. Values recorded
  before, by the history of their files, have none.
- **Megatron-LM, seconds of tensor parallelism.** They were 55 % too long: half of a forward went into whole masks
  of dropout, which Megatron's ranks do not draw. Within 11 % without these.
- **DeepSpeed.** Used memory was 12 to 44 % too low. With its flat buffers and held logits it is within 8 % in the
  median. Rows of one stage and several replicas are still 18 to 34 % too low, and nothing in the public code
  explains it; with eight stages of one GPU each, fragmentation and flat buffers count twice. Small microbatches
  were slower than estimated, until sums of gradients and rounds of tiles on a GPU's multiprocessors counted. Its
  V100 nodes have four GPUs; two links join each pair. A step over two tensor-parallel ranks takes 34 % longer than
  estimated, and its used memory is half as much again; it is in eight pairs in the wrong order. Its
  script puts both ranks into one node, in which the source measured all-reduces of 124 GB/s, so neither its links
  nor its configuration explain it. Of rows on more than 128 GPUs only seconds are predicted.
- **bigscience, seconds and order.** Its runs on 320 GPUs hung without `CUDA_LAUNCH_BLOCKING=1`, by which the host
  waits for every kernel. With the host's seconds of an operation, which come from Megatron's CI, steps of 384 A100
  with eight tensor-parallel ranks and one or two samples in a microbatch are within 5 %; without, three were 11 to
  17 % too short. Its own benchmark gives the network: 2.5 GB/s for each of NCCL's channels on A100 and 2.6 on V100,
  not the 12.5 GB/s of an Omni-Path port. DeepSpeed fills stages up to the largest, which leaves one block for the last
  of 12 stages with 78; its tensor-parallel ranks send only their parts between stages. The source says not to compare
  days before and after 25 February, when its nodes became faster, so these are two jobs.
- **torchtune.** Its loss in chunks converts no logits in memory, since every chunk is compiled; the row with it
  was 25 % too high.
- **Collectives over several hosts.** They were up to eight times too slow: one ring left every host by one
  network port. NCCL has a ring and trees for every port. Within a host every hop had the latency of a copy, 10 us;
  NCCL's protocols need 0.6 to 3.4 us. Eight tensor-parallel ranks of nanotron were 16 % too slow, now 5 %.
- **torchgpipe.** Reserved bytes, summed over devices, on torch 1.3. AmoebaNets are within 0.4 %, where they were
  up to 11 % too low: copies between stages use 32 streams a device, each with separate segments of at least 20
  MiB, for received tensors and for gradients. Its 3 x 3 maximum pools are average pools. U-Nets are within 10 %:
  cuDNN's workspaces for kernels of up to 900 MiB are not known. Stages of the source count modules of flattened
  models, and are mapped to the nearest of pipefit's layers.
- **Megatron-LM in CI, seconds.** Models of small layers take two to five times the estimate: launches of eager
  kernels from Python, and what it logs of every parameter, bind them, not the GPU. The median row of the calibration
  half needs 110 us an operation on the host of an A100, and 56 on that of an H100, many times the cost of plain
  PyTorch. With these, rows of the other half are 2 to 42 % off; they were 58 to 81 % too short.
- **DeepLearningExamples.** Its fine-tuning script of BERT keeps float16 weights and float32 masters (apex, level
  O2), where "AMP" reads like autocast, which keeps more. Its loader for pre-training (LDDL) makes batches of
  sequences of about equal length, up to the length that the row says: seconds of these rows are not compared.
- **Lambda, seconds.** Its configurations train ResNet-50 without `channels_last`. cuDNN's tensor-core kernels
  take no other layout, so every convolution converts its images twice, which takes longer than its products.
  Elementwise kernels load few elements at a time: in half precision an A100 or H100 reaches about half of its
  bandwidth, a B200 a quarter. With both, most ResNet-50 are within a fifth; before, they were estimated two to
  four times too fast. Several GPUs without peer-to-peer copies are slower than estimated; one row (eight A100)
  takes 2.4 times as long a step as its sibling of four.
- **SSD300 of DeepLearningExamples, seconds.** 11 rows on A100 and V100 are within 12 %, half of them within 4 %.
  Only images are in `channels_last`, and cuDNN's results follow them. Rows in TF32 were 26 % too slow until its scripts
  were read: those for A100 keep `channels_last` in float32 too, those for V100 do not.
- **torchgpipe and V100, seconds.** float32 convolutions of 3 x 3 take less time than their products at the peak
  rate: cuDNN uses Winograd's transform. torch counts the weight gradients of grouped convolutions (ResNeXt) as
  often as there are groups; pipefit does no longer.
- **llm-foundry.** FSDP with mixed precision is half-precision parameters with float32 state (16 bytes a
  parameter, gathered as bfloat16, block by block), not autocast: under autocast all cast weights of a forward
  stay until the backward. Its loss is a fused kernel on half-precision logits by default. Sequences of 512 to
  65,536 tokens tell products and attention apart: causal attention reaches about 90 TFLOP/s on A100 (Triton) and
  190 on H100, forward and backward.
- **Depthwise and grouped convolutions, seconds.** Estimates of EfficientNet were up to 56 % too low: a depthwise
  convolution was a product on tensor cores with conversions of its images. Kernels of torch and cuDNN load an
  element for every product and convert nothing. With that, EfficientNet and ConvNeXt on one GPU are within 23 %,
  half of them within 11 %; estimates for eight GPUs are 18 to 37 % too low, for a reason that is not known.
  RegNet-Y with `channels_last` on an RTX 3090 still takes five times the estimate,
  presumably in cuDNN's direct kernels: they took 50 to 100 ms for a layer with 64 channels a group in a profile
  of pytorch/pytorch#34977.
- **timm.** Its models are built by the library itself, in the release of July 2022, so the code that was measured
  is the code that is run dry. Seconds of vision transformers on an RTX 3090 were 4 % off in the median, however
  their rate was chosen, and are 2 % off since products count in rounds of tiles: their widths fill the last round
  more or less. The caching allocator's reserved bytes, not tensors alone, decide whether the next batch fits, and
  so does the CUDA context, which held all kernels before CUDA 11.7. On torch 1.12 `zero_grad` kept the gradients,
  which decides for large transformers and VGG.
- **timm, models that were not built before.** 46 rows of 31 families came in last (Swin, CaiT, XCiT, mixers, DLA,
  HRNet, NASNet, DPN, NFNet, ResNeSt and others). Nothing was changed for them, except that a model's factory may
  read the rates that it computes. Seconds are 8 % off in the median, and nine in ten within 20 %. HRNet-W18 (-31 %)
  and MobileNetV3 (-27 %) are the farthest off; the former perhaps since its channels are 18, 36, 72 and 144, while
  tensor cores take multiples of 8, and padding is not counted. Of 85 statements about fitting two are wrong: the
  next batches of ResMLP-24 and of CrossViT-B are predicted to fit with at most 0.1 GiB to spare.
"""


def tables(records: Sequence[Record], factors: Mapping[str, float]) -> str:
    """Return all tables, in Markdown."""
    parts = ["## Memory", _overview(records)]
    for what in MEMORY:
        groups = list(grouped(records, lambda r: f"{r['source']}, class {r['class']}", what))
        if groups:
            parts += [
                f"**{what.capitalize()}** bytes, with the framework's bytes:",
                summaries("source", groups),
            ]
    parts += ["## Does it fit", _fits(records)]
    parts += ["## Seconds of a step", *_seconds(records, factors)]
    parts += ["## The worst rows", "Allocated bytes:", worst(records, "allocated"), "Seconds, as calibrated:"]
    parts.append(worst([calibrated(r, factors) for r in records if r["half"] == "unseen"], "seconds"))
    predicted = sum(not record["refused"] for record in records)
    parts += [
        "## Rows without a prediction",
        f"{predicted} of {len(records)} rows are predicted; the others:",
    ]
    parts.append(table(("reason", "rows"), refused(records)))
    return "\n\n".join(parts)


def _overview(records: Sequence[Record]) -> str:
    rows = []
    for what in MEMORY:
        if found := errors(records, what):
            s = summary(found)
            below = sum(error < -0.01 for error in found)
            rows.append(
                (what, len(found), f"{100 * s['median']:.2f} %", f"{100 * s['of 95 %']:.1f} %", below)
            )
    return table(("bytes", "rows", "median error", "95 % within", "more than 1 % below"), rows)


def _fits(records: Sequence[Record]) -> str:
    counts = fits(records)
    rows = [(source, c["right"], c["wrong"]) for source, c in sorted(counts.items())]
    right, wrong = (sum(c[name] for c in counts.values()) for name in ("right", "wrong"))
    share = right / max(1, right + wrong)
    told = f"{right} of {right + wrong} statements are right ({100 * share:.1f} %): that it fits, or that it ran out"
    return f"{told} of memory, the next larger batch of a row included.\n\n" + table(
        ("source", "right", "wrong"), rows
    )


def _seconds(records: Sequence[Record], factors: Mapping[str, float]) -> list[str]:
    unseen = [record for record in records if record["half"] == "unseen"]
    better = [calibrated(record, factors) for record in unseen]
    parts = []
    rows = []
    for name, group in (("presets", unseen), ("presets times the factors below", better)):
        if found := errors(group, "seconds"):
            s = summary(found)
            within = sum(abs(error) <= 0.25 for error in found) / len(found)
            rows.append(
                (
                    name,
                    len(found),
                    f"{100 * s['median']:.1f} %",
                    f"{100 * s['of 90 %']:.1f} %",
                    f"{100 * within:.0f} %",
                )
            )
    parts.append("Rows of the half that took no part in the calibration (by a hash of the row's name):")
    parts.append(table(("seconds by", "rows", "median error", "90 % within", "rows within 25 %"), rows))
    order, clear = tau(records), tau(records, apart=REPEATS)
    if order and clear:
        parts.append(
            f"Order of plans of the same job: Kendall's tau {order[0]:.2f} over {order[1]} pairs, {clear[0]:.2f} over "
            f"the {clear[1]} of plans more than {100 * REPEATS:.0f} % apart, as far as bigscience's two measurements "
            "of one plan on one day are."
        )
    parts.append("Measured over predicted seconds, median of the other half, by device and arithmetic:")
    parts.append(table(("device", "factor"), [(name, f"{factor:.2f}") for name, factor in factors.items()]))
    groups = list(grouped(better, lambda r: f"{r['source']}, class {r['class']}", "seconds"))
    parts += ["By source, unseen half, as calibrated:", summaries("source", groups)]
    signed = [f"{name} {percent(s['signed median'])}" for name, s in groups]
    return [*parts, f"Signed medians: {', '.join(signed)}."]


def write(path: Path, pictures: Path, records: Sequence[Record], factors: Mapping[str, float]) -> None:
    """Write the page and its two pictures."""
    memory = scatter(records, MEMORY, "Peak memory, GB (1e9)", 1e9)
    better = [calibrated(record, factors) for record in records if record["half"] == "unseen"]
    seconds = scatter(better, ("seconds",), "Seconds of a step, unseen half, as calibrated", 1.0)
    for name, picture in (("published_memory.svg", memory), ("published_seconds.svg", seconds)):
        (pictures / name).write_text(picture, encoding="utf-8")
    shown = "\n".join(
        (
            "![Predicted over measured memory](pictures/published_memory.svg)",
            "",
            "![Predicted over measured seconds](pictures/published_seconds.svg)",
        )
    )
    reached = f"This page has a run over {len(records)} of the rows."
    text = "\n\n".join((OPENING.rstrip(), reached, shown, tables(records, factors), LEARNED.rstrip()))
    path.write_text(text + "\n", encoding="utf-8")
