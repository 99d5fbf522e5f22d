"""Llama with frozen weights and trained low-rank adapters: LoRA, and QLoRA over 4-bit weights."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipefit.capture import Task

BLOCK = 64  # weights of four bits that share a scale
LEVELS = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def unpacked(packed: Tensor, scales: Tensor, levels: Tensor, shape: tuple[int, int]) -> Tensor:
    """Unpack two weights per byte to bfloat16."""
    places = torch.stack((packed >> 4, packed & 15), dim=-1).view(-1, BLOCK).int()
    return (levels[places] * scales[:, None]).to(torch.bfloat16).view(shape)


class Product(torch.autograd.Function):
    """A product of inputs and 4-bit weights, unpacked for the forward and again for the backward."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, packed: Tensor, scales: Tensor, levels: Tensor, shape: Any
    ) -> Tensor:
        """Save only the packed weights."""
        ctx.save_for_backward(packed, scales, levels)
        ctx.shape = shape
        return functional.linear(inputs, unpacked(packed, scales, levels, shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the inputs; weights have none."""
        return grads[0] @ unpacked(*ctx.saved_tensors, ctx.shape), None, None, None, None


class FourBits(nn.Module):
    """A frozen linear layer without bias: four bits per weight and a scale for every 64."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape = outputs, inputs
        count = inputs * outputs
        self.register_buffer("packed", torch.randint(256, (count // 2,), dtype=torch.uint8))
        self.register_buffer("scales", torch.rand(count // BLOCK) / inputs**0.5)
        self.register_buffer("levels", torch.tensor(LEVELS))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs in the dtype of the inputs."""
        return cast("Tensor", Product.apply(inputs, self.packed, self.scales, self.levels, self.shape))


class Adapted(nn.Module):
    """A frozen linear layer plus a product of two narrow ones in float32."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inputs, rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(rank, outputs, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Add the outputs of both."""
        beside: Tensor = self.up(self.down(inputs.to(self.down.weight.dtype)))
        return cast("Tensor", self.base(inputs) + beside.to(inputs.dtype))


def _built(settings: dict[str, Any], rank: int, *, four_bits: bool) -> nn.Module:
    """Build the model in bfloat16 with adapters on its linear layers except the last one."""
    import transformers

    config = transformers.AutoConfig.for_model("llama", **settings)
    model: nn.Module = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    owners = [owner for block in cast("Any", model).model.layers for owner in block.modules()]
    for owner in owners:
        for name, linear in [*owner.named_children()]:
            if isinstance(linear, nn.Linear):
                sizes = linear.in_features, linear.out_features
                setattr(owner, name, Adapted(FourBits(*sizes) if four_bits else linear, *sizes, rank))
    return model


def _batch(size: int, *, words: int, sequence: int) -> tuple[dict[str, Tensor], None]:
    tokens = torch.randint(words, (size, sequence))
    return {"input_ids": tokens, "labels": tokens.clone()}, None


def _task(settings: dict[str, Any], rank: int, sequence: int, *, four_bits: bool) -> Task:
    settings = LLAMA_8B | settings
    return Task(
        partial(_built, settings, rank, four_bits=four_bits),
        batch=partial(_batch, words=settings["vocab_size"], sequence=sequence),
        loss=None,
        optimizer=torch.optim.AdamW,
        name="qlora" if four_bits else "lora",
    )


def lora(rank: int = 16, sequence: int = 2048, **settings: Any) -> Task:
    """Build a Llama of 8 B frozen in bfloat16."""
    return _task(settings, rank, sequence, four_bits=False)


def qlora(rank: int = 16, sequence: int = 2048, **settings: Any) -> Task:
    """Build a Llama of 8 B frozen in four bits except for embeddings and the last layer, which have
    bfloat16.
    """
    return _task(settings, rank, sequence, four_bits=True)
