"""`pipefit_loop.py` on torch's own pipelines: the three lines that differ are numbered.

torchrun --nproc-per-node 3 examples/torch_pipeline_loop.py
"""

import torch
from torch import nn

import pipefit


class Network(nn.Module):
    """A residual network of four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.leave = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.leave(x)


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up inputs and targets."""
    x = torch.randn(size, 16)
    return x, x.sum(dim=1, keepdim=True).sin()


torch.manual_seed(0)
model = Network()
task = pipefit.Task(model, batch=make_batch, loss=nn.functional.mse_loss, optimizer=torch.optim.Adam)
profile = pipefit.profile(task, microbatch_size=8)
plan = pipefit.plan(profile, pipefit.load_cluster("emulated:3x1MiB"), batch_size=32, stages=3)
pipeline = pipefit.pipeline(task, plan)  # 1
for step in range(50):
    inputs, targets = make_batch(32)  # 2
    loss = pipeline.step(inputs, target=targets)  # 3
    print(f"step {step}: loss {loss:.6f}")
