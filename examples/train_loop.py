"""A training loop of your own around `pipefit.Trainer`.

    python examples/train_loop.py                                   # one process runs all three devices in turn
    torchrun --nproc-per-node 3 examples/train_loop.py              # one process for each device

Both print the same losses.
"""

import argparse

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
    """Profile, plan, train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    task = pipefit.Task(
        make_module, batch=make_batch, loss=nn.functional.mse_loss, optimizer=torch.optim.Adam
    )
    profile = pipefit.profile(task, microbatch_size=8)
    plan = pipefit.plan(profile, pipefit.load_cluster("emulated:3x1MiB"), batch_size=BATCH_SIZE, stages=3)
    trainer = pipefit.Trainer(task, plan)
    torch.manual_seed(0)
    for step in range(steps):
        loss = trainer.step(make_batch(BATCH_SIZE))  # the same batch on every worker
        if trainer.rank == 0:
            print(f"step {step}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
