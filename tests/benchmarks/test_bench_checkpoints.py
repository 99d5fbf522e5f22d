"""The benchmark of checkpoints: both systems save the same tensors, without temporary files on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from bench_checkpoints import make_trainer, measure


@pytest.mark.gallery
def test_both_systems_are_measured(tmp_path: Path) -> None:
    """A tiny model has seconds for each system, and the bytes of tensors plus a header on disk."""
    trainer = make_trainer(16, 1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        none, ours, torchs = measure(trainer, 1, tmp_path)
    finally:
        dist.destroy_process_group()
    tensor_bytes = sum(tensor.nbytes for tensor in trainer.state_dict(optimizer=True).values())
    assert none.disk_bytes == 0
    assert all(tensor_bytes < cost.disk_bytes < 2 * tensor_bytes + (1 << 16) for cost in (ours, torchs))
    assert all(0 < cost.still_seconds < cost.whole_seconds for cost in (ours, torchs))
