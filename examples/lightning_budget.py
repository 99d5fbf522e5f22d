"""A LightningModule with a memory budget: three more lines, and the same losses."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipefit  # 1


class Images(LightningModule):
    """A small network for images."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)
        )
        self.leave = nn.Linear(16, 10)
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x.mean(dim=(2, 3)))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 3, 16, 16), torch.randint(10, (64,))), batch_size=16)
module = Images()
trainer = Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
handle = pipefit.apply(module, budget="3 MiB", batch=next(iter(loader)), step=trainer)  # 2
print(handle)  # 3
trainer.fit(module, loader)
for loss in module.losses:
    print(f"loss {loss:.6f}")
