"""A training loop of your own that saves, and goes on from its last checkpoint when torchrun starts it again.

torchrun --nproc-per-node 3 --max-restarts 3 examples/restarting_loop.py checkpoints
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import pipefit

BATCH_SIZE = 32


def make_module() -> nn.Sequential:
    """Every worker calls this, after the same seed, and keeps the layers of its stage."""
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def make_batch(size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, samples along dimension 0."""
    inputs = torch.randn(size, 16)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def main() -> None:
    """Profile, plan, go on from what there is, train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    task = pipefit.Task(
        make_module, batch=make_batch, loss=nn.functional.mse_loss, optimizer=torch.optim.Adam
    )
    profile = pipefit.profile(task, microbatch_size=8)
    plan = pipefit.plan(profile, pipefit.load_cluster("emulated:3x1MiB"), batch_size=BATCH_SIZE, stages=3)
    trainer = pipefit.Trainer(task, plan, seed=given.seed)
    for step in range(trainer.resume(given.folder), given.steps):
        torch.manual_seed(step)  # the batch of a step is the same after a restart, and on every worker
        loss = trainer.step(make_batch(BATCH_SIZE))
        if (step + 1) % given.every == 0:
            trainer.save(given.folder, keep=3)
        if trainer.rank == 0:
            print(f"step {step}: loss {loss:.6f}", flush=True)
    trainer.finish()


if __name__ == "__main__":
    main()
