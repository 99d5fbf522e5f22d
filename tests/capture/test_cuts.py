"""Blocks of traced models are never a whole stage of a vision model, and never part of a residual block."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Chain, Task, capture
from pipefit.capture.sample import sample
from pipefit.profiler import profile
from support.gallery_samples import sampled
from support.pretrained_models import images, segmented
from support.undivided_model import Entangled

WIDTH = 8
VISION: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"},
        ["resnet.encoder.stages.0.layers.0", "resnet.encoder.stages.1.layers.1"],
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2},
        ["convnext.encoder.stages.0.layers.0", "convnext.encoder.stages.1.layers.1"],
    ),
    "swin": (
        "SwinForImageClassification",
        {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "image_size": 32, "patch_size": 2, "window_size": 4},
        ["swin.encoder.layers.0.blocks.0", "swin.encoder.layers.1.blocks.1"],
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
        },
        ["segformer.stages.0.blocks.0", "segformer.stages.1.blocks.1"],
    ),
}  # fmt: skip


def cut(module: nn.Module, *inputs: Tensor, **settings: Any) -> Chain:
    """Return the chain of a module on these inputs."""
    task = Task(module, batch=lambda _: (inputs, None), loss=lambda output, _: output.sum(), **settings)
    return capture(task, *sample(task, 2))


def names(chain: Chain) -> list[str]:
    """Return the names of its blocks."""
    return [block.name for block in chain.blocks]


@pytest.mark.parametrize("name", sampled(sorted(VISION), often=["segformer"]))
def test_the_stages_of_vision_models_are_divided_by_their_blocks(name: str) -> None:
    """None of the blocks is one of the four stages, which would hold most of the parameters."""
    transformers = pytest.importorskip("transformers")
    kind, settings, blocks = VISION[name]
    made = getattr(transformers, kind)
    module = made(made.config_class(**settings))
    batch = segmented if name == "segformer" else images
    task = Task(module, batch=lambda size: (batch(size), None), loss=None)
    found = names(capture(task, *sample(task, 2)))
    assert [block for block in blocks if block not in found] == []


class Shortcut(nn.Module):
    """A residual block whose branch is a container of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU()), nn.Sequential(nn.Linear(4 * WIDTH, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Shortcuts(nn.Module):
    """Two stages of two residual blocks each, as containers of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(nn.Sequential(Shortcut(), Shortcut()) for _ in range(2)))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(x))
        return logits


def test_containers_of_containers_are_cut_between_residual_blocks() -> None:
    """Cuts fall between residual blocks, not inside them, because the shortcut would cross too."""
    found = cut(Shortcuts(), torch.randn(2, WIDTH))
    assert names(found) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "head"]
    edges = [0]
    for block in found.blocks:
        edges.append(edges[-1] + block.layers)
    values = found.flatten((torch.randn(2, WIDTH),))
    for start, stop in pairwise(edges):
        for layer in found.layers[start:stop]:
            values = layer(values)
        assert len(values) == 1


class Columns(nn.Module):
    """A model whose blocks each read a column of an integer table, and which has a parameter at its root."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(WIDTH))
        self.tables = nn.ModuleList(nn.Embedding(5, WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, columns: Tensor) -> Tensor:
        x = self.token.expand(columns.shape[0], WIDTH)
        kind = columns[:, 0]
        for table, block in zip(self.tables, self.blocks, strict=True):
            x = torch.relu(block(x + table(kind)))
        logits: Tensor = self.head(x)
        return logits


def test_a_column_of_integers_closes_no_cut_and_a_parameter_of_the_root_no_block() -> None:
    """Every layer that reads a column takes it from the table again; the parameter joins the layer that uses
    it.
    """
    module, columns = Columns(), torch.randint(5, (2, 3))
    found = cut(module, columns)
    assert names(found) == ["tables.0", "blocks.0", "tables.1", "blocks.1", "tables.2", "blocks.2", "head"]
    first = {name for layer in found.layers[: found.blocks[0].layers] for name in layer.originals.values()}
    assert first == {"token", "tables.0.weight"}
    values = found.flatten((columns,))
    for layer in found.layers:
        values = layer(values)
    assert torch.equal(values[0], module(columns))


class Strided(nn.Module):
    """A model whose blocks each add a slice of the first layer's output; a non-contiguous slice cannot cross
    a cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        part = self.first(x)[:, ::2]
        x = part
        for block in self.blocks:
            x = torch.relu(block(x)) + part
        return x


def test_a_slice_of_what_is_computed_closes_no_cut() -> None:
    """Every layer that adds the slice takes it again; values and gradients equal the model's."""
    module, x = Strided(), torch.randn(2, WIDTH)
    found = cut(module, x)
    assert names(found) == ["first", "blocks.0", "blocks.1", "blocks.2"]
    values = found.flatten((x,))
    for layer in found.layers:
        values = layer(values)
    assert torch.equal(values[0], module(x))
    ours, theirs = (
        torch.autograd.grad(out.sum(), list(module.parameters())) for out in (values[0], module(x))
    )
    assert all(map(torch.allclose, ours, theirs))


def test_a_block_tells_what_was_merged_into_it_and_why() -> None:
    """A block names the modules merged into it, and the operation and line that prevent the cut."""
    found = cut(Entangled(WIDTH), torch.randn(2, WIDTH))
    assert names(found) == ["first", "third"]
    reason = found.blocks[0].undivided
    assert reason.startswith("first and second: ")
    assert "undivided_model.py:" in reason and "is changed in place, and used on both sides" in reason


class Spared(nn.Module):
    """A model that changes the result of a dropout of nothing, which is the dropout's input."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(WIDTH, WIDTH), drop, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result = self.first(x)
        self.drop(result).add_(1)
        return self.second(torch.relu(result))


@pytest.mark.parametrize("drop", [nn.Dropout(0.0), nn.AlphaDropout(0.0), nn.Dropout(0.5).eval()], ids=str)
def test_a_dropout_of_nothing_returns_its_input(drop: nn.Module) -> None:
    """A change of its result is seen in its input, also if values that cross a cut are copies."""
    module, x = Spared(drop), torch.randn(2, WIDTH)
    found = cut(module, x, granularity="layers")
    values: Any = found.flatten((x,))
    for layer in found.layers:
        values = layer([value.clone() for value in values])
    assert torch.equal(values[0], module(x))


class Attention(nn.Module):
    """Attention with queries, keys and values as parts of one tensor; no part can cross a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.joint(x).chunk(3, dim=-1)
        return self.out(torch.softmax(queries @ keys.transpose(-1, -2), -1) @ values)


def test_what_is_computed_from_parts_is_computed_once() -> None:
    """Parts are taken again from the tensor; products of parts are not recomputed in another layer."""
    found = cut(Attention(), torch.randn(2, 3, WIDTH), granularity="layers")
    code = "".join(layer.module.pipefit_code.text for layer in found.layers)
    assert [code.count(f"aten.{name}.") for name in ("linear", "matmul", "softmax")] == [2, 2, 1]
    assert [layer.name for layer in found.layers] == ["joint", "matmul", "out"]


@pytest.mark.gallery
def test_granularity_changes_no_number() -> None:
    """Layers, the layers that draw random numbers, and their costs are the same; only blocks differ."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"body": Shortcuts(), "drop": nn.Dropout(0.5)})

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = build()

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.parts["drop"](self.parts["body"](x))
            return logits

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, WIDTH), torch.randint(2, (size,))

    profiles = [
        profile(Task(Whole, batch=batch, loss=F.cross_entropy, granularity=granularity), microbatch_size=2)
        for granularity in ("blocks", "halves", "layers")
    ]
    assert len({(found.layers, found.measurements, found.fingerprint) for found in profiles}) == 1
    assert profiles[0].edges != profiles[2].edges


class Factored(nn.Module):
    """A module that combines two weights of one size in one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.left * self.right)


def test_a_layer_has_one_name_in_every_trace() -> None:
    """A layer that two parameters could name has the same name in every trace, because plans identify layers
    by name.
    """
    found = [cut(Factored(), torch.randn(2, WIDTH), granularity="layers").layers for _ in range(8)]
    assert {tuple(layer.name for layer in layers) for layers in found} == {("left",)}
