"""`plain_loop.py` on three memory-limited devices: the five lines that are new are numbered.

python examples/pipefit_loop.py                             # one process runs all devices in turn
torchrun --nproc-per-node 3 examples/pipefit_loop.py        # one process for each device
"""

import torch
from torch import nn

import pipefit  # 1


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
task = pipefit.Task(model, batch=make_batch, loss=nn.functional.mse_loss, optimizer=torch.optim.Adam)  # 2
profile = pipefit.profile(task, microbatch_size=8)  # 3
plan = pipefit.plan(profile, pipefit.load_cluster("emulated:3x1MiB"), batch_size=32, stages=3)  # 4
trainer = pipefit.Trainer(task, plan)  # 5
for step in range(50):
    loss = trainer.step(make_batch(32))
    print(f"step {step}: loss {loss:.6f}")
