"""Transformers with a dictionary of inputs, a padding mask and a number: plain, tied and partly frozen."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import TIED, Model


class Block(nn.Module):
    """A transformer block with its own attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Masked(nn.Module):
    """A model from a dictionary with a padding mask to a dictionary, its loss outside. `tied` reuses the
    embedding at the end.
    """

    def __init__(self, *, tied: bool = False, blocks: int = 3, width: int = 16, words: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = self.embed(tokens) * scale
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        wide = causal & mask.bool()[:, None, None, :]
        for block in self.blocks:
            x = block(x, wide)
        return {"logits": self.head(x), "scale": scale}


def padded(size: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Draw words, the last ones possibly padding."""
    tokens = torch.randint(40, (size, 8))
    mask = (torch.arange(8) < torch.randint(4, 9, (size, 1))).long()
    return {"tokens": tokens, "mask": mask, "scale": 2.0}, {"next": tokens.roll(-1, 1)}


def token_loss(outputs: dict[str, Any], targets: dict[str, Tensor]) -> Tensor:
    """Compute the cross entropy of every word."""
    return F.cross_entropy(outputs["logits"].flatten(0, 1), targets["next"].flatten())


def partly_frozen() -> nn.Module:
    """Freeze the embedding and the first block."""
    model = Masked()
    for part in (model.embed, model.blocks[0]):
        part.requires_grad_(False)
    return model


def encoder() -> nn.Module:
    """Build torch's encoder layers in a chain."""
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, activation="gelu"),
        nn.Linear(32, 2),
    )


MASKED = (
    Model(
        name="masked", special="dictionaries in and out, a mask, a number among the inputs",
        module=Masked, batch=padded, loss=token_loss,
    ),
    Model(
        name="tied", special="the same with the embedding reused at the end",
        module=partial(Masked, tied=True), batch=padded, loss=token_loss, rounded=TIED,
    ),
    Model(
        name="frozen", special="the same with an embedding and a block that do not train",
        module=partly_frozen, batch=padded, loss=token_loss,
    ),
    Model(
        name="encoder", special="torch's encoder layers in a chain, post- and pre-norm, with dropout; Adagrad",
        module=encoder, batch=lambda size: (torch.randn(size, 10, 16), torch.rand(size, 10, 2)),
        loss=lambda outputs, targets: F.binary_cross_entropy(outputs.sigmoid(), targets),
        optimizer=torch.optim.Adagrad,
    ),
)  # fmt: skip
