"""A plain loop like `plain_loop.py`, with a larger batch and a memory budget: three more lines, and the same losses."""

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
optimizer = torch.optim.Adam(model.parameters())
loss_of = nn.functional.mse_loss
handle = pipefit.apply(  # 2
    model, budget="1.2 MiB", batch=lambda: make_batch(512), optimizer=optimizer, loss=loss_of
)
print(handle)  # 3
for step in range(50):
    x, y = make_batch(512)
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss:.6f}")
