"""A sharded model under `torchrun`, and a memory budget for each rank: three more lines.

torchrun --nproc-per-node 2 examples/fsdp_budget.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import pipefit  # 1


class Network(nn.Module):
    """A residual network of four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.leave = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up inputs and targets."""
    x = torch.randn(size, 16)
    return x, x.sum(dim=1, keepdim=True).sin()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Network()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
loss_of = nn.functional.mse_loss

handle = pipefit.apply(model, budget="1.4 MiB", batch=make_batch(512), optimizer=optimizer, loss=loss_of)  # 2
print(handle)  # 3
torch.manual_seed(1 + dist.get_rank())
for step in range(8):
    x, y = make_batch(512)
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss:.6f}")
dist.destroy_process_group()
