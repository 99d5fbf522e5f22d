"""Cuts, crossing values, layer names and refusals of traced models."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gallery
from gallery.masked import Masked
from pipefit.capture import Chain, Task, capture
from pipefit.capture.model import chain
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.fake_cuda.chain import fake_chain
from pipefit.fake_cuda.target import FakeTarget
from support.gallery_samples import sampled


def captured(task: Task, size: int = 2) -> Chain:
    """Return the task's chain for microbatches of `size` samples."""
    return capture(task, *sample(task, size))


def of(module: nn.Module, *inputs: Tensor) -> Chain:
    """Return the chain of a module on these inputs."""
    return captured(
        Task(module, batch=lambda _: (inputs, None), loss=lambda output, _: output.sum(), name="mine")
    )


def names(found: Chain) -> list[str]:
    """Return the names of its blocks."""
    return [block.name for block in found.blocks or found.layers]


def edges(found: Chain) -> list[int]:
    """Return the first layers of its blocks, and the number of layers."""
    return [0, *accumulate(block.layers for block in found.blocks)]


def crossing(found: Chain, inputs: Any) -> list[list[tuple[int, ...]]]:
    """Return the shapes of the values that leave each block."""
    values, shapes = found.flatten(inputs), []
    for layer in found.layers:
        values = layer(values)
        shapes.append([tuple(value.shape) for value in values])
    return [shapes[edge - 1] for edge in edges(found)[1:]]


def test_children_of_containers_are_blocks() -> None:
    """Children of containers are blocks, and so are other modules with parameters; other operations join a
    block.
    """
    assert names(captured(gallery.task("resnet"))) == [
        "conv1", "bn1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc",
    ]  # fmt: skip


def test_layers_are_finer_than_halves_and_halves_than_blocks() -> None:
    """Halves are finer than blocks, and layers finer than halves; the layers are the same for all
    granularities.
    """
    tasks = [replace(gallery.task("masked"), granularity=name) for name in ("blocks", "halves", "layers")]
    chains = [captured(task) for task in tasks]
    assert len({tuple(layer.name for layer in found.layers) for found in chains}) == 1
    blocks, halves = (set(edges(found)) for found in chains[:2])
    assert blocks < halves < set(range(len(chains[2].layers) + 1)) and not chains[2].blocks


def test_halves_part_attention_and_mlp() -> None:
    """The attention and the MLP of a block become separate blocks."""
    found = names(captured(replace(gallery.task("masked"), granularity="halves")))
    assert "blocks.1.qkv" in found and "blocks.1.mlp" in found


def test_a_module_that_runs_again_is_a_layer_again() -> None:
    """Each run of a shared block is a separate block with the same parameters."""
    found = captured(gallery.task("repeated"))
    assert names(found) == ["inward", "block", "block@1", "block@2", "outward"]
    runs = [number for number, layer in enumerate(found.layers) if layer.name.startswith("block")]
    assert {shared.users for shared in found.shared} == {tuple(runs)}
    assert len({id(found.layers[number].module.weight) for number in runs}) == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    sampled(
        ["resnet", "densenet", "unet", "tied", "frozen", "two losses", "repeated", "quantised", "centring"],
        often=["tied", "frozen", "two losses", "repeated", "quantised", "centring"],
    ),
)
def test_names_are_the_models_own(name: str) -> None:
    """The layers' state, under its original names, is the model's state: each entry once, the same
    tensors.
    """
    task = gallery.task(name)
    module = task.build()
    found = captured(replace(task, module=module))
    state = {
        layer.originals[entry]: tensor.data_ptr()
        for layer in found.layers
        for entry, tensor in layer.module.state_dict().items()
    }
    assert state == {entry: tensor.data_ptr() for entry, tensor in module.state_dict().items()}


def test_skips_travel_along() -> None:
    """A value that a later layer needs passes through the layers between."""
    task = gallery.task("unet")
    found = captured(task)
    assert names(found) == ["down.0", "down.1", "down.2", "up.0", "up.1", "head"]
    shapes = crossing(found, sample(task, 2)[0])
    assert shapes[2] == [(2, 8, 16, 16), (2, 16, 8, 8), (2, 32, 4, 4)]
    assert shapes[3] == [(2, 8, 16, 16), (2, 16, 8, 8)]


def test_masks_are_made_again() -> None:
    """A mask of 2 x 1 x 8 x 8 does not cross: its padding of 2 x 8 bytes does, up to the last layer that
    needs it.
    """
    task = gallery.task("masked")
    shapes = crossing(captured(task), sample(task, 2)[0])
    assert shapes == [[(2, 8, 16), (2, 8)], *[[(2, 8), (2, 8, 16)]] * 2, [(2, 8, 16)], [(2, 8, 40)]]


def test_outputs_keep_their_structure() -> None:
    """An external loss receives the module's result, constants included."""
    task = gallery.task("masked")
    found = captured(task)
    values = found.flatten(sample(task, 2)[0])
    for layer in found.layers:
        values = layer(values)
    rebuilt = found.rebuild(values)
    assert set(rebuilt) == {"logits", "scale"} and rebuilt["scale"] == 2.0


def test_inputs_must_stay_alike() -> None:
    """A number among the inputs is a setting: another value is refused, and so is a missing entry."""
    task = gallery.task("masked")
    found, (inputs, _) = captured(task), sample(task, 2)
    assert len(found.flatten(dict(reversed(inputs.items())))) == 2
    with pytest.raises(UsageError, match=r"3\.0, but the model was captured with 2\.0"):
        found.flatten({**inputs, "scale": 3.0})
    with pytest.raises(UsageError, match="changed"):
        found.flatten({"tokens": inputs["tokens"]})


def test_equal_blocks_have_equal_code() -> None:
    """The generated code of equal layers is the same text, so that a profile measures one of them."""
    found = captured(Task(lambda: Masked(blocks=4), **_settings("masked")))
    codes = [
        [layer.module.pipefit_code.text for layer in found.layers[start:stop]]
        for start, stop in pairwise(edges(found))
    ]
    assert codes[2] == codes[3]


def _settings(name: str) -> dict[str, Any]:
    task = gallery.task(name)
    return {"batch": task.batch, "loss": task.loss}


class Strided(nn.Module):
    """Blocks whose values are not contiguous, as after a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for part in self.parts:
            x = x + part(x.transpose(1, 2)).transpose(1, 2)
        return x.reshape(x.shape[0], -1)


def test_layout_survives_a_cut() -> None:
    """Crossing values are contiguous, and the next layer sees the model's layout."""
    module = Strided()
    x = torch.randn(2, 6, 6)
    found = of(module, x)
    values = found.flatten((x,))
    for layer in found.layers:
        assert all(value.is_contiguous() for value in values)
        values = layer(tuple(value.contiguous() for value in values))
    assert names(found) == ["parts.0", "parts.1", "parts.2"] and torch.equal(values[0], module(x))


class InPlace(nn.Module):
    """A module that writes into a tensor, another view of which is used later."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x)
        other = x.view(-1)
        y = self.parts[1](x)
        other.mul_(2)
        return self.parts[3](self.parts[2](y + x))


def test_no_cut_between_a_view_and_its_change() -> None:
    """Two views of one memory stay in one layer until the last in-place change."""
    found = of(module := InPlace(), x := torch.randn(3, 4))
    values = found.flatten((x,))
    for layer in found.layers:
        values = layer(tuple(value.clone() for value in values))  # as another device would have them
    assert torch.equal(values[0], module(x))


class Careful(nn.Module):
    """A module with its own contexts: no gradient, and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x)
        with torch.no_grad():
            scale = x.abs().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.parts[2](self.parts[1](x))
        return x.float() / scale


def test_contexts_are_entered_again() -> None:
    """Gradients and dtypes equal the model's, at every cut."""
    x, module = torch.randn(2, 8), Careful()
    task = Task(
        module, batch=lambda _: ((x,), None), loss=lambda output, _: output.sum(), granularity="layers"
    )
    found = captured(task)
    values = found.flatten((x,))
    for layer in found.layers:
        values = layer(values)
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch.equal(values[0], module(x))
    theirs = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    ours = torch.autograd.grad(values[0].sum(), list(module.parameters()))
    assert all(map(torch.equal, ours, theirs))


def test_parts_by_hand() -> None:
    """`pipefit.chain` takes modules and names; layers keep the names as a prefix of the original names."""
    parts = chain([nn.Linear(4, 4), ("head", nn.Linear(4, 2))])
    found = of(parts, torch.randn(2, 4))
    assert names(found) == ["0", "head"]
    assert dict(found.layers[1].originals) == {"weight": "head.weight", "bias": "head.bias"}


# ---------------------------------------------------------------- refusals


class Wrong(nn.Module):
    """A linear layer inside a container, and an unsupported operation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)


class Branches(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.linear(x).sum() > 0 else x[:1]


class Reads(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.add_(1.0)) * x.mean().item()


class Leaves(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.from_numpy(x.numpy())


class Returns(Wrong):
    def forward(self, x: Tensor) -> Any:
        self.linear(x)
        return {3}


class Writes(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return self.linear(x)


class Within(nn.Module):
    """A module that wraps a part at some place in a model."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.inner = part

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Branches, "depends on the values"),
        (Reads, ".item()"),
        (Leaves, "numpy"),
        (Writes, "changes its input x in place"),
    ],
)
def test_refusals_say_where_and_why(
    kind: type[nn.Module], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A refusal names the module, the line of the user's file, the reason and the remedy; torch prints
    nothing.
    """
    with pytest.raises(UsageError) as refused:
        of(Within(kind()), torch.randn(2, 3))
    text = str(refused.value)
    assert "module inner" in text and f"{Path(__file__).name}:" in text
    assert words in text and "pipefit.chain" in text and "\n" not in text
    assert capfd.readouterr() == ("", "")


def test_strange_outputs_are_refused() -> None:
    """A set is not a supported structure of tensors."""
    with pytest.raises(UsageError, match=r"test_export.py:\d+\): it returns a set, not a tensor or a"):
        of(Within(Returns()), torch.randn(2, 3))


def test_a_loss_must_be_there() -> None:
    """Without a loss in the task the model must return one."""
    task = Task(
        nn.Bilinear(3, 3, 2), batch=lambda _: ((torch.randn(2, 3), torch.randn(2, 3)), None), loss=None
    )
    with pytest.raises(UsageError, match="does not return a loss"):
        captured(task)


def test_capture_allocates_nothing() -> None:
    """A model of 4 TB is captured: neither the tracing nor the layers touch its bytes."""

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(1 << 19, 1 << 19, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = F.relu(part(x))
            return x

    task = Task(
        Huge, batch=lambda size: (torch.randn(size, 1 << 19), None), loss=lambda output, _: output.mean()
    )
    with FakeTarget("cpu") as fake:
        found = fake_chain(task, fake, sample(task, 1))
    assert names(found) == ["parts.0", "parts.1", "parts.2", "parts.3"]
