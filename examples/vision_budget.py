"""A vision loop with autocast, loss scaling and averaged weights, and a memory budget: three more lines."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pipefit  # 1


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up images and classes."""
    return torch.randn(size, 3, 16, 16), torch.randint(10, (size,))


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    *(Block(16) for _ in range(3)),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
scaler = torch.amp.GradScaler("cpu")


def train(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Train on a batch; return its loss."""
    images, labels = batch
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    average.update_parameters(model)
    return loss


handle = pipefit.apply(model, budget="2.5 MiB", batch=make_batch(16), optimizer=optimizer, step=train)  # 2
print(handle)  # 3
for step in range(8):
    print(f"step {step}: loss {train(make_batch(16)):.6f}")
