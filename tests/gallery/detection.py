"""Models that detect objects in images: heads on several scales, losses of several parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, IN_PLACE, SENT, TIED, Model


def conv(inward: int, outward: int, stride: int = 1) -> nn.Sequential:
    """Build a convolution with its norm and activation."""
    return nn.Sequential(
        nn.Conv2d(inward, outward, 3, stride, 1, bias=False),
        nn.BatchNorm2d(outward),
        nn.LeakyReLU(0.1, inplace=True),
    )


class Boxes(nn.Module):
    """Classes and boxes on three scales (Liu et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 8, 2), conv(8, 8))
        self.scales = nn.ModuleList([conv(8, 12, 2), conv(12, 12, 2)])
        self.kinds = nn.ModuleList(nn.Conv2d(width, 4, 3, padding=1) for width in (8, 12, 12))
        self.places = nn.ModuleList(nn.Conv2d(width, 4, 3, padding=1) for width in (8, 12, 12))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = [self.stem(x)]
        for scale in self.scales:
            found.append(scale(found[-1]))
        kinds = [head(x).flatten(2) for head, x in zip(self.kinds, found, strict=True)]
        places = [head(x).flatten(2) for head, x in zip(self.places, found, strict=True)]
        return {"kinds": torch.cat(kinds, 2), "places": torch.cat(places, 2)}


def box_targets(size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw a class and a box for each of 84 places."""
    return torch.randn(size, 3, 16, 16), {
        "kinds": torch.randint(4, (size, 84)),
        "places": torch.randn(size, 4, 84),
    }


def box_loss(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """Compute a loss of boxes at objects and of the hardest empty places."""
    there = targets["kinds"] > 0
    losses = F.cross_entropy(outputs["kinds"], targets["kinds"], reduction="none")
    hard = losses.masked_fill(there, 0.0).topk(20, 1).values
    off = F.smooth_l1_loss(outputs["places"], targets["places"], reduction="none").sum(1)
    return ((losses + off) * there).sum() / there.sum().clamp(min=1) + hard.mean()


class Pyramid(nn.Module):
    """A pyramid that adds coarse features to fine ones; one head for all scales (Lin et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.ModuleList([conv(3, 8, 2), conv(8, 12, 2), conv(12, 16, 2)])
        self.side = nn.ModuleList(nn.Conv2d(width, 8, 1) for width in (8, 12, 16))
        self.smooth = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.head = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 3, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for part in self.bottom:
            x = part(x)
            found.append(x)
        above = None
        scores = []
        for x, side, smooth in reversed(list(zip(found, self.side, self.smooth, strict=True))):
            above = (
                side(x) if above is None else side(x) + F.interpolate(above, size=x.shape[2:], mode="nearest")
            )
            scores.append(smooth(above).flatten(2))
        joined = torch.cat(scores, 2).unsqueeze(-1)
        return self.head(joined).squeeze(-1)


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute a cross entropy that down-weights confident answers."""
    losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return (losses * (1 - torch.exp(-losses)).square()).sum() / targets.sum().clamp(min=1)


class Grid(nn.Module):
    """Boxes in the cells of a grid, with positions in a buffer (Redmon et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 8, 2), conv(8, 12, 2))
        self.passed, self.deep = nn.Conv2d(12, 4, 1), conv(12, 16, 2)
        self.head = nn.Conv2d(32, 20, 1)
        rows, columns = torch.meshgrid(torch.arange(2.0), torch.arange(2.0), indexing="ij")
        self.register_buffer("corners", torch.stack([columns, rows], -1)[:, :, None])
        self.register_buffer("anchors", torch.tensor([[1.0, 2.0], [2.0, 1.0]]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.body(x)
        x = torch.cat([F.pixel_unshuffle(self.passed(x), 2), self.deep(x)], 1)
        x = self.head(x).unflatten(1, (2, 10)).permute(0, 3, 4, 1, 2)
        centres, sizes = x[..., :2].sigmoid() + self.corners, x[..., 2:4].clamp(max=4).exp() * self.anchors
        return torch.cat([centres - sizes / 2, centres + sizes / 2], -1), x[..., 4], x[..., 5:]


def overlap_loss(outputs: tuple[Tensor, Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """Compute the loss of box overlap, objectness and class."""
    boxes, sure, kinds = outputs
    wanted = targets["boxes"]
    inner = (
        torch.minimum(boxes[..., 2:], wanted[..., 2:]) - torch.maximum(boxes[..., :2], wanted[..., :2])
    ).clamp(min=0)
    areas = [(box[..., 2:] - box[..., :2]).prod(-1) for box in (boxes, wanted)]
    shared = inner.prod(-1)
    off = 1 - shared / (areas[0] + areas[1] - shared)
    there = F.binary_cross_entropy_with_logits(sure, targets["there"])
    return (
        (off * targets["there"]).mean()
        + there
        + F.cross_entropy(kinds.flatten(0, 3), targets["kinds"].flatten())
    )


def grid_targets(size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw two boxes in each of four cells."""
    corner = torch.rand(size, 2, 2, 2, 2)
    boxes = torch.cat([corner, corner + 0.5 + torch.rand(size, 2, 2, 2, 2)], -1)
    there, kinds = torch.rand(size, 2, 2, 2).round(), torch.randint(5, (size, 2, 2, 2))
    return torch.randn(size, 3, 16, 16), {"boxes": boxes, "there": there, "kinds": kinds}


class Queries(nn.Module):
    """Learned queries to an image, with a loss after every layer (Carion et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, 12, 4, 4), nn.Parameter(torch.randn(1, 16, 12))
        self.encoder = nn.TransformerEncoderLayer(12, 2, 24, 0.0, batch_first=True)
        self.questions = nn.Embedding(5, 12)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(12, 2, 24, 0.1, batch_first=True) for _ in range(2)
        )
        self.kinds, self.boxes = (
            nn.Linear(12, 4),
            nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4)),
        )

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        memory = self.encoder(self.patches(x).flatten(2).mT + self.places)
        x, found = self.questions.weight.expand(len(x), -1, -1), []
        for layer in self.decoder:
            x = layer(x, memory)
            found.append({"kinds": self.kinds(x), "boxes": self.boxes(x).sigmoid()})
        return found


def every_layer(outputs: list[dict[str, Tensor]], targets: dict[str, Tensor]) -> Tensor:
    """Compute the losses of all layers, with queries and answers matched in a given order."""
    return sum(
        F.cross_entropy(found["kinds"].flatten(0, 1), targets["kinds"].flatten())
        + F.l1_loss(found["boxes"], targets["boxes"])
        for found in outputs
    )


class Centres(nn.Module):
    """A heat map of centres, and sizes read at the true ones (Zhou et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Sequential(conv(3, 8, 2), conv(8, 12, 2)), nn.ConvTranspose2d(12, 8, 4, 2, 1)
        self.heat, self.size = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 2, 1)

    def forward(self, image: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.up(self.down(image)), inplace=True)
        sizes = self.size(x).flatten(2).mT
        return self.heat(x), sizes.gather(1, centres[..., None].expand(-1, -1, 2))


class Segments(nn.Module):
    """Parallel dilated convolutions, and an upsampled answer (Chen et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.low = nn.Sequential(conv(3, 8), conv(8, 12, 2)), nn.Conv2d(8, 4, 1)
        self.holes = nn.ModuleList(nn.Conv2d(12, 6, 3, padding=rate, dilation=rate) for rate in (1, 2, 4))
        self.pooled, self.head = (
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 6, 1)),
            nn.Conv2d(28, 5, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        early = self.body[0](x)
        x = self.body[1](early)
        parts = [hole(x) for hole in self.holes]
        parts.append(F.interpolate(self.pooled(x), size=x.shape[2:], mode="bilinear", align_corners=False))
        x = F.interpolate(torch.cat(parts, 1), size=early.shape[2:], mode="bilinear", align_corners=True)
        return self.head(torch.cat([x, self.low(early)], 1))


class Regions(nn.Module):
    """A network that crops given regions from the features, with a class and a mask for each (He et al.,
    2017).
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kinds = nn.Sequential(conv(3, 8, 2), conv(8, 8)), nn.Linear(8 * 16, 4)
        self.mask = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2, 2))

    def forward(self, image: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
        count = moves.shape[1]
        features = self.body(image).repeat_interleave(count, 0)
        grid = F.affine_grid(moves.flatten(0, 1), (len(features), 8, 4, 4), align_corners=False)
        cut = F.grid_sample(features, grid, align_corners=False)
        return self.kinds(cut.flatten(1)).unflatten(0, (-1, count)), self.mask(cut).unflatten(0, (-1, count))


class Hourglass(nn.Module):
    """Two encoder-decoders in a row with a skip at every size (Newell et al., 2016)."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.skip, self.down, self.back = conv(8, 8), conv(8, 8), conv(8, 8)
        self.inner = Hourglass(depth - 1) if depth > 1 else conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.back(self.inner(self.down(F.max_pool2d(x, 2))))
        return self.skip(x) + F.interpolate(inner, scale_factor=2)


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.glasses = conv(3, 8), nn.ModuleList(Hourglass(2) for _ in range(2))
        self.heads, self.again = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(2)), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first = self.heads[0](self.glasses[0](x))
        return torch.stack([first, self.heads[1](self.glasses[1](x + self.again(first)))], 1)


def region_batch(size: int) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Draw three regions of each image."""
    moves = torch.eye(2, 3) * 0.5 + 0.2 * torch.randn(size, 3, 2, 3)
    return (torch.randn(size, 3, 16, 16), moves), {
        "kinds": torch.randint(4, (size, 3)), "masks": torch.rand(size, 3, 1, 8, 8).round(),
    }  # fmt: skip


DETECTION = (
    Model(
        name="boxes", special="heads on three scales, the hardest wrong places count, dictionaries of targets",
        module=Boxes, batch=box_targets, loss=box_loss,
    ),
    Model(
        name="pyramid", special="coarse features added to fine ones, one head for all scales, focal loss",
        module=Pyramid,
        batch=lambda size: (torch.randn(size, 3, 16, 16), torch.rand(size, 3, 84).round()), loss=focal,
    ),
    Model(
        name="grid", special="pixels unshuffled past a layer, boxes from buffers, overlap as a loss",
        module=Grid, batch=grid_targets, loss=overlap_loss, optimizer=ADAM, rounded=SENT,
    ),
    Model(
        name="queries", special="a table that is used whole, a list of dictionaries out, losses behind every layer",
        module=Queries,
        batch=lambda size: (
            torch.randn(size, 3, 16, 16), {"kinds": torch.randint(4, (size, 5)), "boxes": torch.rand(size, 5, 4)},
        ),
        loss=every_layer, rounded=TIED,
    ),
    Model(
        name="centres", special="a transposed convolution, sizes gathered at given places",
        module=Centres,
        batch=lambda size: (
            (torch.randn(size, 3, 16, 16), torch.randint(64, (size, 3))),
            (torch.rand(size, 3, 8, 8), torch.rand(size, 3, 2)),
        ),
        loss=lambda outputs, targets: F.mse_loss(outputs[0].sigmoid(), targets[0]) + F.l1_loss(outputs[1], targets[1]),
        rounded=SENT,
    ),
    Model(
        name="segments", special="convolutions with holes side by side, bilinear enlarging, an early skip",
        module=Segments, batch=lambda size: (torch.randn(size, 3, 12, 12), torch.randint(5, (size, 12, 12))),
        loss=F.cross_entropy, above=IN_PLACE,
    ),
    Model(
        name="regions", special="regions cut out by sampling on a grid, samples repeated for each region",
        module=Regions, batch=region_batch,
        loss=lambda outputs, targets: F.cross_entropy(outputs[0].flatten(0, 1), targets["kinds"].flatten())
        + F.binary_cross_entropy_with_logits(outputs[1], targets["masks"]),
    ),
    Model(
        name="hourglass", special="a module that holds itself, a skip at every size, an answer half-way that goes on",
        module=Points, batch=lambda size: (torch.randn(size, 3, 16, 16), torch.rand(size, 2, 4, 16, 16)),
        loss=F.mse_loss,
    ),
)  # fmt: skip
