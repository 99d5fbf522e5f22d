"""Generative models."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, SHARED, TIED, Model


class Variational(nn.Module):
    """An autoencoder with sampled codes and its loss inside (Kingma and Welling, 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(72, 5), nn.Linear(72, 5)
        self.decode = nn.Linear(5, 72)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(6, 1, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.encoder(x).flatten(1)
        mean, log_variance = self.mean(features), self.log_variance(features)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        again = self.decoder(self.decode(code).view(-1, 8, 3, 3))
        apart = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return {"loss": F.binary_cross_entropy(again, x, reduction="none").sum((1, 2, 3)).mean() + apart}


class Codebook(nn.Module):
    """The nearest of 16 codes, with straight-through gradients (van den Oord et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(16, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.permute(0, 2, 3, 1)
        number = (flat.unsqueeze(-2) - self.codes.weight).square().sum(-1).argmin(-1)
        code = self.codes(number)
        off = F.mse_loss(code, flat.detach()) + 0.25 * F.mse_loss(flat, code.detach())
        return (flat + (code - flat).detach()).permute(0, 3, 1, 2), off


class Quantising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1))
        self.codebook = Codebook()
        self.decoder = nn.Sequential(
            nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code, off = self.codebook(self.encoder(x))
        return self.decoder(code), off


class Adversaries(nn.Module):
    """A generator and a critic with a loss each; the critic does not see the origin of its sample
    (Goodfellow, 2014).

    The generator's loss goes through the critic's current weights, without gradients for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh()
        )
        self.critic = nn.Sequential(nn.Linear(8, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        made = self.generator(noise)
        judged = self.critic(torch.cat([real, made.detach()]))
        critic_loss = F.softplus(-judged[: len(real)]).mean() + F.softplus(judged[len(real) :]).mean()
        first, last = self.critic[0], self.critic[2]
        hidden = F.leaky_relu(F.linear(made, first.weight.detach(), first.bias.detach()), 0.2)
        fooled = F.linear(hidden, last.weight.detach(), last.bias.detach())
        return critic_loss + F.softplus(-fooled).mean()


class Timed(nn.Module):
    """A residual block conditioned on time (Ho et al., 2020)."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, inward), nn.GroupNorm(2, outward)
        self.conv1, self.conv2 = (
            nn.Conv2d(inward, outward, 3, padding=1),
            nn.Conv2d(outward, outward, 3, padding=1),
        )
        self.time, self.drop = nn.Linear(16, outward), nn.Dropout(0.1)
        self.pass_by = nn.Conv2d(inward, outward, 1) if inward != outward else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.pass_by(x) + self.conv2(self.drop(F.silu(self.norm2(h))))


class PixelAttention(nn.Module):
    """Attention over all pixels, with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(2, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.flatten(2) for t in self.qkv(self.norm(x)).chunk(3, 1))
        weights = (q.mT @ k / math.sqrt(q.shape[1])).softmax(-1)
        return x + self.out((v @ weights.mT).unflatten(2, x.shape[2:]))


class Diffusion(nn.Module):
    """A predictor of the noise in an image at some time: long skips, with time as an input of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([Timed(8, 8), Timed(8, 12)])
        self.shrink = nn.ModuleList([nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(12, 12, 3, 2, 1)])
        self.middle = nn.ModuleList([Timed(12, 12), PixelAttention(12), Timed(12, 12)])
        self.up = nn.ModuleList([Timed(24, 8), Timed(16, 8)])
        self.last = nn.Conv2d(8, 3, 3, padding=1)
        self.register_buffer("speeds", torch.exp(-torch.arange(4) * 2.0))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * self.speeds
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x, kept = self.first(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            kept.append(x)
            x = shrink(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, time)), time)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), kept.pop()], 1), time)
        return self.last(x)


class Coupling(nn.Module):
    """A coupling layer: one half shifts and scales the other; returns the log scale (Dinh et al., 2017)."""

    def __init__(self, flipped: bool) -> None:
        super().__init__()
        mask = torch.arange(6) % 2 == int(flipped)
        self.register_buffer("mask", mask.float())
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12))

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, stretched = pair
        scale, shift = self.net(x * self.mask).chunk(2, 1)
        scale = scale.tanh() * (1 - self.mask)
        return x * scale.exp() + shift * (1 - self.mask), stretched + scale.sum(1)


def likelihood(outputs: tuple[Tensor, Tensor], targets: None) -> Tensor:
    """Compute the negative log-likelihood of the data under a normal distribution, pulled back."""
    x, stretched = outputs
    return (0.5 * x.square().sum(1) - stretched).mean()


class MaskedConvolution(nn.Conv2d):
    """A convolution over earlier pixels only (van den Oord et al., 2016)."""

    def __init__(self, inward: int, outward: int, *, own: bool) -> None:
        super().__init__(inward, outward, 3, padding=1)
        mask = torch.ones(3, 3)
        mask[1, 1 + own :] = 0
        mask[2] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=1)


def pixels() -> nn.Module:
    """Build a chain of masked convolutions."""
    inner = [part for _ in range(3) for part in (MaskedConvolution(8, 8, own=True), nn.ReLU(inplace=True))]
    return nn.Sequential(
        MaskedConvolution(1, 8, own=False), nn.ReLU(inplace=True), *inner, nn.Conv2d(8, 4, 1)
    )


class AdaptiveBlock(nn.Module):
    """Norms without weights, shifted and scaled by a condition that starts at zero (Peebles
    and Xie, 2023).
    """

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 24), nn.GELU("tanh"), nn.Linear(24, width))
        self.modulate = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulate.weight)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = self.modulate(F.silu(condition))[:, None].chunk(6, -1)
        h = self.norm(x) * (1 + a) + b
        x = x + c * self.attention(h, h, h, need_weights=False)[0]
        return x + f * self.mlp(self.norm(x) * (1 + d) + e)


class FlowMatching(nn.Module):
    """A predictor of the velocity from noise to an image, given a class that is sometimes dropped (Lipman et
    al., 2023).
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Linear(12, 12), nn.Parameter(0.02 * torch.randn(16, 12))
        self.kinds, self.time = nn.Embedding(6, 12), nn.Linear(1, 12)
        self.blocks = nn.ModuleList(AdaptiveBlock() for _ in range(3))
        self.last = nn.Linear(12, 12)

    def forward(self, image: Tensor, noise: Tensor, time: Tensor, kind: Tensor) -> Tensor:
        part = time[:, None, None]
        x = self.patches(torch.lerp(noise, image, part)) + self.places
        withheld = torch.rand(len(kind)) < 0.2
        condition = self.kinds(kind.masked_fill(withheld, 5)) + self.time(time[:, None])
        for block in self.blocks:
            x = block(x, condition)
        return F.mse_loss(self.last(x), image - noise)


class MaskedImages(nn.Module):
    """An autoencoder that encodes a quarter of the patches, in an order drawn in the forward, and decodes all
    (He et al., 2022).
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Linear(12, 16), nn.Parameter(0.02 * torch.randn(1, 16, 16))
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)
        )
        self.narrow, self.hidden = nn.Linear(16, 8), nn.Parameter(torch.zeros(1, 1, 8))
        self.decoder, self.last = (
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
            nn.Linear(8, 12),
        )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.rand(image.shape[:2]).argsort(1)
        seen = order[:, :4, None]
        x = (self.patches(image) + self.places).gather(1, seen.expand(-1, -1, 16))
        for layer in self.encoder:
            x = layer(x)
        filled = self.hidden.expand(len(image), 16, -1).scatter(1, seen.expand(-1, -1, 8), self.narrow(x))
        return self.last(self.decoder(filled)), torch.ones(image.shape[:2]).scatter(1, order[:, :4], 0.0)


def hidden_pixels(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Compute the errors on the hidden patches."""
    off = (outputs[0] - targets).square().mean(-1)
    return (off * outputs[1]).sum() / outputs[1].sum()


class Flowing(nn.Module):
    """One vector field, integrated by four Runge-Kutta steps (Chen et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.field = (
            nn.Linear(4, 10),
            nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 10)),
        )
        self.outward = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for _ in range(2):
            a = self.field(x)
            b = self.field(x + 0.25 * a)
            c = self.field(x + 0.25 * b)
            x = x + (a + 2 * b + 2 * c + self.field(x + 0.5 * c)) / 12
        return self.outward(x)


def patches(size: int) -> Tensor:
    """Cut an image into sixteen patches."""
    return torch.randn(size, 16, 12)


def with_itself(make: Any) -> Any:
    """Draw batches with their inputs as targets."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        made = make(size)
        return made, made.clone()

    return batch


GENERATIVE = (
    Model(
        name="variational", special="draws codes in the forward, transposed convolutions, own loss in a dictionary",
        module=Variational, batch=lambda size: ((torch.rand(size, 1, 12, 12),), None), loss=None, optimizer=ADAM,
    ),
    Model(
        name="codebook", special="argmin and a table of codes, gradients straight through by detach",
        module=Quantising, batch=with_itself(lambda size: torch.randn(size, 3, 12, 12)),
        loss=lambda outputs, targets: F.mse_loss(outputs[0], targets) + outputs[1], optimizer=ADAM,
    ),
    Model(
        name="adversaries", special="two losses against each other, weights that are used with and without gradients",
        module=Adversaries, batch=lambda size: ((torch.randn(size, 6), torch.randn(size, 8)), None), loss=None,
        optimizer=ADAM, size=4, above=SHARED,
    ),
    Model(
        name="diffusion", special="a U-Net with skips across the model, the time goes to every block, dropout",
        module=Diffusion,
        batch=lambda size: ((torch.randn(size, 3, 8, 8), torch.rand(size)), torch.randn(size, 3, 8, 8)),
        loss=F.mse_loss, optimizer=ADAM,
    ),
    Model(
        name="coupling", special="a chain of pairs, masks as buffers, no targets",
        module=lambda: nn.Sequential(*(Coupling(flipped=bool(n % 2)) for n in range(4))),
        batch=lambda size: ((torch.randn(size, 6), torch.zeros(size)), None), loss=likelihood, optimizer=ADAM,
    ),
    Model(
        name="pixels", special="weights times a mask in each forward, activations in place, written as a chain",
        module=pixels, batch=lambda size: (torch.rand(size, 1, 8, 8), torch.randint(4, (size, 8, 8))),
        loss=F.cross_entropy,
    ),
    Model(
        name="flow matching", special="a condition shifts and scales every norm, classes withheld at random",
        module=FlowMatching,
        batch=lambda size: ((patches(size), patches(size), torch.rand(size), torch.randint(5, (size,))), None),
        loss=None, optimizer=ADAM,
    ),
    Model(
        name="masked images", special="an order drawn in the forward, gather and scatter, a quarter of the sequence",
        module=MaskedImages, batch=with_itself(patches), loss=hidden_pixels, optimizer=ADAM,
    ),
    Model(
        name="flowing", special="one field run eight times, as a solver of differential equations does",
        module=Flowing, batch=lambda size: (torch.randn(size, 4), torch.randn(size, 3)), loss=F.mse_loss,
        rounded=TIED, above=SHARED,
    ),
)  # fmt: skip
