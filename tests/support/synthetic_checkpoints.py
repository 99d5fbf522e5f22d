"""Made-up checkpoints for tests of the files: two shards, as two workers would write them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pipefit.checkpoints import folders
from pipefit.checkpoints.hold import Owner
from pipefit.checkpoints.manifest import (
    GroupSettings,
    Manifest,
    ParameterNumbers,
    Part,
    ScaleState,
    StoredTensor,
    TrainedStage,
)
from pipefit.checkpoints.shards import write_shard
from pipefit.schema.profile import Fingerprint
from pipefit.texts import dtype_name

TASK = Fingerprint(
    layers=("a", "b"), parameters=("p", "q"), shared=(), inputs=("x",), targets=("y",), loss="mse",
    precision="float32", optimizer="AdamW", options=("weight_decay=1",), groups="",
)  # fmt: skip

OWNER = Owner(
    training="a" * 32, run="b" * 32, host="here", pid=7, started_seconds=1.7e9, plan="a model on devices"
)


def tensors_of(rank: int) -> dict[str, Tensor]:
    """Return a worker's tensors: a weight, a counter and the optimizer's tensors."""
    torch.manual_seed(rank)
    return {
        f"{rank}.weight": torch.randn(3, 4),
        f"{rank}.count": torch.tensor(7 + rank),
        f"optimizer/{rank}.weight/exp_avg": torch.randn(3, 4).bfloat16(),
    }


def part_of(partial: Path, rank: int) -> Part:
    """Return a worker's part; write its shard to `partial`."""
    tensors = tensors_of(rank)
    stored = tuple(
        StoredTensor(
            name=f"{rank}.{'count' if 'count' in key else 'weight'}",
            kind="optimizer" if key.startswith("optimizer") else "model",
            state="exp_avg" if key.startswith("optimizer") else "",
            shard=rank,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
        )
        for key, tensor in tensors.items()
    )
    return Part(
        shard=write_shard(partial / f"worker-{rank:05d}.safetensors", tensors),
        tensors=stored,
        stages=(TrainedStage(start=rank, stop=rank + 1, device=rank, batches=5),),
        groups=(
            GroupSettings(
                parameters=(f"{rank}.weight",),
                options={"lr": 0.1, "betas": (0.9, 0.95)},
                scheduled={"base_lrs": 0.1},
            ),
        ),
        numbers=(ParameterNumbers(name=f"{rank}.weight", values={"updates": 5}),),
        scheduler={"last_epoch": 5},
    )


def manifest_of(parts: list[Part], step: int) -> Manifest:
    """Return the manifest of these parts."""
    return Manifest(
        pipefit_version="0.1.0",
        torch_version="2.13.0",
        owner=OWNER,
        saved_seconds=1.8e9,
        step=step,
        seed=3,
        model=TASK,
        plan="0" * 64,
        schedule="1f1b",
        stages=tuple(stage for part in parts for stage in part.stages),
        loss_scale=ScaleState(value=65536.0, quiet=2),
        shards=tuple(part.shard for part in parts),
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
        aliases=(("tied.weight", "0.weight"),),
        groups=tuple(group for part in parts for group in part.groups),
        numbers=tuple(numbers for part in parts for numbers in part.numbers),
        scheduler=parts[0].scheduler,
    )


def write(directory: Path, step: int) -> Path:
    """Write a whole checkpoint of two workers; return its folder."""
    partial = folders.begin(directory, step, OWNER)
    for rank in (0, 1):
        folders.write_part(partial, rank, part_of(partial, rank))
    return folders.complete(partial, manifest_of([folders.read_part(partial, rank) for rank in (0, 1)], step))
