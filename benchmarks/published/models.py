"""Transformers as the frameworks of the published rows build them: chains of a `pipefit.Task`.

`Style` has what frameworks and architectures do differently and memory depends on: which norm saves what, joint
projections whose views keep the whole, fused activations, the kind of attention, adapters, and the copy of the
logits that the loss makes. The operations are torch's own; a kernel that fuses several is one of torch's that saves
the same bytes (`nn.RMSNorm`; `F.glu` for a fused SwiGLU).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit import Task

CHUNK = 128  # tokens of a piece of the logits, where a framework computes the loss in pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters of a rank, on the projections that `targets` names: q, k, v, o (output), m (MLP), h (head)."""

    rank: int
    targets: str
    dropout: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What an architecture and its framework do.

    `norm`: `layer` (torch's), `rms` (one kernel that saves its input), `rms-cast` (plain operations on a float32
    copy) or `rms-plain` (plain operations in the dtype of the input). `mlp`: `gelu`, or gated: `gated` (plain
    operations) and `gated-fused` (one kernel that saves its inputs). `rotary` is the share of a head that is rotated;
    0 for learned positions. `values`: whether values stay a view of the joint projection; `joint` (nanotron) rotates
    queries in place in a copy of the projection, and keys and values in another. `attention`: `flash` (by
    scaled_dot_product_attention) or `scores`. `capped`: Gemma 2's soft caps on scores, and norms after attention
    and MLP. `normed`: a norm after the embedding. `draws`: whether dropout draws its mask, or stands for the
    time of ranks that draw their part alone, where pipefit's ranks draw the whole. `loss`: `float32` (a copy of the
    logits), `half`, or `pieces`.
    """

    norm: Literal["layer", "rms", "rms-cast", "rms-plain"] = "layer"
    mlp: Literal["gelu", "gated", "gated-fused"] = "gelu"
    bias: bool = True
    rotary: float = 0.0
    parallel: Literal["no", "own norms", "one norm"] = "no"
    values: Literal["view", "copy", "joint"] = "copy"
    attention: Literal["flash", "scores"] = "flash"
    softmax: Literal["half", "float32"] = "half"
    dropout: float = 0.0
    draws: bool = True
    tied: bool = False
    capped: bool = False
    normed: bool = False
    loss: Literal["float32", "half", "pieces"] = "float32"


def dropped(hidden: Tensor, style: Style, *, training: bool) -> Tensor:
    """Apply dropout, if the model has some, or a function that moves as many bytes in half precision."""
    if not style.draws:
        return F.relu(hidden)
    return F.dropout(hidden, style.dropout, training) if style.dropout else hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    head_size: int

    @property
    def qkv(self) -> tuple[int, int, int]:
        """The widths of queries, keys and values."""
        return self.heads * self.head_size, self.kv_heads * self.head_size, self.kv_heads * self.head_size


class CastRMSNorm(nn.Module):
    """RMSNorm of plain operations on a float32 copy of its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., size) to the same shape."""
        dtype, wide = hidden.dtype, hidden.float()
        scaled = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return (scaled * self.weight.float()).to(dtype=dtype)


class PlainRMSNorm(nn.Module):
    """RMSNorm of plain operations in the dtype of its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., size) to the same shape."""
        scaled = hidden * torch.rsqrt(torch.mean(hidden * hidden, dim=-1, keepdim=True) + 1e-5)
        return self.weight * scaled


def norm_of(style: Style, size: int) -> nn.Module:
    """Return the norm of a style."""
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "layer": nn.LayerNorm if style.bias else partial(nn.LayerNorm, bias=False),
        "rms": nn.RMSNorm,
        "rms-cast": CastRMSNorm,
        "rms-plain": PlainRMSNorm,
    }
    return kinds[style.norm](size)


def capped(values: Tensor, most: float) -> Tensor:
    """Return values that a hyperbolic tangent keeps between `-most` and `most`."""
    return torch.tanh(values / most) * most


class Adapted(nn.Module):
    """A linear layer with low-rank adapters on the given parts of its output (LitGPT's LoRALinear, LoRAQKVLinear)."""

    def __init__(
        self, inputs: int, parts: tuple[int, ...], adapted: tuple[bool, ...], by: Adapters, bias: bool
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, sum(parts), bias=bias)
        self.widths = [width for width, has in zip(parts, adapted, strict=True) if has]
        self.lora_a = nn.Parameter(torch.zeros(by.rank * len(self.widths), inputs))
        self.lora_b = nn.Parameter(torch.zeros(sum(self.widths), by.rank))
        self.dropout, self.outputs, self.joint = by.dropout, sum(parts), len(parts) > 1
        starts = [sum(parts[:number]) for number in range(len(parts))]
        indices = [
            torch.arange(start, start + width)
            for start, width, has in zip(starts, parts, adapted, strict=True)
            if has
        ]
        self.whole = all(adapted)
        if not self.whole:
            self.register_buffer("places", torch.cat(indices), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, sequence, inputs) to (batch, sequence, outputs)."""
        plain = self.linear(hidden)
        dropped = F.dropout(hidden, self.dropout, self.training)
        if not self.joint:
            return plain + (dropped @ self.lora_a.transpose(0, 1) @ self.lora_b.transpose(0, 1)) * 2.0
        lowered = F.linear(dropped, self.lora_a).transpose(-2, -1)
        weights = self.lora_b.unsqueeze(-1)
        if len(set(self.widths)) == 1:
            raised = F.conv1d(lowered, weights, groups=len(self.widths))
        else:
            pieces = zip(lowered.chunk(len(self.widths), dim=1), weights.split(self.widths), strict=True)
            raised = torch.cat([F.conv1d(one, weight) for one, weight in pieces], dim=1)
        raised = raised.transpose(-2, -1)
        if not self.whole:
            padded = raised.new_zeros(*raised.shape[:-1], self.outputs)
            raised = padded.index_copy(-1, self.places, raised)
        return plain + raised * 2.0


def projection(
    inputs: int, parts: tuple[int, ...], adapted: tuple[bool, ...], by: Adapters | None, bias: bool
) -> nn.Module:
    """Return a linear layer, with adapters if any of its parts has some."""
    if by is None or not any(adapted):
        return nn.Linear(inputs, sum(parts), bias=bias)
    return Adapted(inputs, parts, adapted, by, bias)


class Attention(nn.Module):
    """Causal self-attention with a joint projection of queries, keys and values."""

    def __init__(self, shape: Shape, style: Style, by: Adapters | None) -> None:
        super().__init__()
        targets = by.targets if by else ""
        self.shape, self.style = shape, style
        self.qkv = projection(shape.hidden, shape.qkv, tuple(t in targets for t in "qkv"), by, style.bias)
        self.out = projection(shape.qkv[0], (shape.hidden,), ("o" in targets,), by, style.bias)
        self.rotated = int(style.rotary * shape.head_size) // 2 * 2

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        batch, length, _ = hidden.shape
        size = self.shape.head_size
        if self.style.values == "joint":
            return self.joint(self.qkv(hidden).view(batch, length, 3, -1, size))
        query, key, value = self.qkv(hidden).split(self.shape.qkv, dim=-1)
        query, key, value = (
            part.view(batch, length, -1, size).transpose(1, 2) for part in (query, key, value)
        )
        if self.rotated:
            query, key = self.rotate(query), self.rotate(key)
        if self.style.values == "copy":
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        if self.shape.kv_heads != self.shape.heads:
            times = self.shape.heads // self.shape.kv_heads
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        attend = self.flash if self.style.attention == "flash" else self.scores
        return self.out(attend(query, key, value).transpose(1, 2).reshape(batch, length, -1))

    def flash(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend by a kernel that keeps no scores."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def joint(self, parts: Tensor) -> Tensor:
        """Attend with joint queries, keys and values (batch, sequence, 3, heads, head_size), as nanotron does.

        flash-attention rotates in place, which costs no memory and is left out: queries stay a view of a copy of the
        projection, keys and values of another copy. The result is transposed, so the next product copies it.
        """
        batch, length = parts.shape[:2]
        query, key, value = parts.permute(2, 0, 1, 3, 4).contiguous().unbind(0)
        pair = torch.stack((key, value)).permute(1, 2, 0, 3, 4).contiguous()
        key, value = pair.unbind(2)
        heads = self.flash(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        result = heads.transpose(1, 2).reshape(batch, length, -1)
        return self.out(result.clone() if batch > 1 else result)

    def scores(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend by products with scores, masked and normalised."""
        scores = query @ (key * self.shape.head_size**-0.5).transpose(-2, -1)
        if self.style.capped:
            scores = capped(scores, 50.0)
        if self.style.softmax == "float32":
            scores = scores.float()
        weights = self.masked(scores).softmax(-1).to(value.dtype)
        return dropped(weights, self.style, training=self.training) @ value

    def masked(self, scores: Tensor) -> Tensor:
        """Hide later tokens; a softmax in half precision is Megatron's kernel, which scales and masks too."""
        if self.style.softmax == "half":
            return scores
        shape = scores.shape[-2:]
        return scores + torch.full(shape, -10000.0, dtype=scores.dtype, device=scores.device).triu(1)

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate the first dimensions of every head by its position."""
        length, rotated = heads.shape[-2], self.rotated
        places = torch.arange(length, device=heads.device)[:, None] * torch.ones(rotated, device=heads.device)
        cos, sin = places.cos().to(heads.dtype), places.sin().to(heads.dtype)
        turned = heads[..., :rotated]
        half = torch.cat((-turned[..., rotated // 2 :], turned[..., : rotated // 2]), dim=-1)
        result = turned * cos + half * sin
        if rotated == heads.shape[-1]:
            return result
        return torch.cat((result, heads[..., rotated:]), dim=-1)


class FeedForward(nn.Module):
    """Up, an activation, and down; gated if the style is."""

    def __init__(self, shape: Shape, style: Style, by: Adapters | None) -> None:
        super().__init__()
        has, self.style = (bool(by and "m" in by.targets),), style
        make = partial(projection, shape.hidden, adapted=has, by=by, bias=style.bias)
        if style.mlp == "gated-fused":
            self.up = projection(shape.hidden, (2 * shape.ffn,), has, by, style.bias)
        else:
            self.up = make((shape.ffn,))
        if style.mlp == "gated":
            self.gate = make((shape.ffn,))
        self.down = projection(shape.ffn, (shape.hidden,), has, by, style.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        if self.style.mlp == "gelu":
            return self.down(F.gelu(self.up(hidden), approximate="tanh"))
        if self.style.mlp == "gated-fused":
            return self.down(F.glu(self.up(hidden)))
        gate, up = self.gate(hidden), self.up(hidden)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and MLP, one after the other or side by side, each with a norm before."""

    def __init__(self, shape: Shape, style: Style, by: Adapters | None) -> None:
        super().__init__()
        self.norm1, self.parallel, self.style = norm_of(style, shape.hidden), style.parallel, style
        self.attention = Attention(shape, style, by)
        if style.parallel != "one norm":
            self.norm2 = norm_of(style, shape.hidden)
        after = (lambda: norm_of(style, shape.hidden)) if style.capped else nn.Identity
        self.after1, self.after2 = after(), after()
        self.feedforward = FeedForward(shape, style, by)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        first = self.norm1(hidden)
        if self.parallel == "no":
            hidden = hidden + self.drop(self.after1(self.attention(first)))
            return hidden + self.drop(self.after2(self.feedforward(self.norm2(hidden))))
        second = first if self.parallel == "one norm" else self.norm2(hidden)
        return hidden + self.attention(first) + self.feedforward(second)

    def drop(self, hidden: Tensor) -> Tensor:
        """Apply dropout, if the model has some."""
        return dropped(hidden, self.style, training=self.training)


class Embedding(nn.Module):
    """Tokens (batch, sequence) to hidden states, with learned positions if nothing is rotated."""

    def __init__(self, shape: Shape, style: Style) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocab, shape.hidden)
        if not style.rotary:
            self.position = nn.Embedding(shape.seq, shape.hidden)
        self.learned, self.style = not style.rotary, style
        self.norm = norm_of(style, shape.hidden) if style.normed else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, sequence) to (batch, sequence, hidden)."""
        hidden = self.token(tokens)
        if self.learned:
            hidden = hidden + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return dropped(self.norm(hidden), self.style, training=self.training)


class Head(nn.Module):
    """Hidden states to logits, in float32 pieces of `CHUNK` tokens if the loss takes them so."""

    def __init__(self, shape: Shape, style: Style, by: Adapters | None) -> None:
        super().__init__()
        self.linear = projection(shape.hidden, (shape.vocab,), (bool(by and "h" in by.targets),), by, False)
        self.pieces = style.loss == "pieces"

    def forward(self, hidden: Tensor) -> Any:
        """Map (batch, sequence, hidden) to logits, or to a tuple of their pieces along the sequence."""
        if not self.pieces:
            return self.linear(hidden)
        logits = (self.linear(piece) for piece in hidden.split(CHUNK, dim=1))
        return tuple(each.float() for each in logits)  # LitGPT of August 2024 caps no pieces


def decoder(shape: Shape, style: Style, by: Adapters | None) -> nn.Sequential:
    """Return the chain: embedding, blocks, norm, head; with adapters, all other weights are frozen."""
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    chain["embedding"] = embedding = Embedding(shape, style)
    for number in range(shape.layers):
        chain[f"block{number}"] = Block(shape, style, by)
    chain["norm"] = norm_of(style, shape.hidden)
    chain["head"] = head = Head(shape, style, by)
    if style.tied and isinstance(head.linear, nn.Linear):
        head.linear.weight = embedding.token.weight
    model = nn.Sequential(chain)
    if by is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "lora_" in name
    return model


def loss(style: Style, output: Any, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens."""
    if style.loss == "pieces":
        parts = zip(output, targets.split(CHUNK, dim=1), strict=True)
        losses = [
            F.cross_entropy(logits.reshape(-1, logits.shape[-1]), part.reshape(-1), reduction="none")
            for logits, part in parts
        ]
        return torch.cat(losses).mean()
    logits = output if style.loss == "half" else output.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(size: int, *, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return random tokens and targets (size, sequence)."""
    return torch.randint(shape.vocab, (size, shape.seq)), torch.randint(shape.vocab, (size, shape.seq))


def decoder_task(
    shape: Shape, style: Style, by: Adapters | None, optimizer: Callable[..., torch.optim.Optimizer]
) -> Task:
    """Return the task of a decoder."""
    return Task(
        partial(decoder, shape, style, by),
        batch=partial(batch, shape=shape),
        loss=partial(loss, style),
        optimizer=optimizer,
        name=f"decoder of {shape.layers} x {shape.hidden}",
    )
