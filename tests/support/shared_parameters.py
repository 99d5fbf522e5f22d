"""Modules with parameters under several names, and plain training of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task

WIDTH = 8


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return rows of numbers, and their targets."""
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH) * 3


class Head(nn.Module):
    """A head like BERT's: `bias` and `decoder.bias` are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.transform, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.decoder.bias = self.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.transform(x)))


class AddedTwice(Head):
    """A module that uses a parameter under both of its names."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class Body(nn.Module):
    """A linear layer, then a head: traced, because it is not a Sequential."""

    def __init__(self, head: Callable[[], nn.Module] = Head) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


class NamedByTheModel(nn.Module):
    """A model with its own name for a part's parameter, registered before the part's name."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        part = nn.Linear(WIDTH, WIDTH)
        if first:
            self.weight = part.weight
        self.body, self.part = nn.Linear(WIDTH, WIDTH), part
        if not first:
            self.weight = part.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.part(torch.tanh(self.body(x)))


class Both(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class Reversed(nn.Module):
    """A module that registers its last part before its first; the parts share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.first.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Blocks(nn.Module):
    """Blocks in a list; `shared` selects the shared parts: `biases`, `norms`, `blocks`."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(3)]
        if shared == "biases":
            for block in blocks[1:]:
                block[0].bias = blocks[0][0].bias
        if shared == "norms":
            for block in blocks[1:]:
                block[1] = blocks[0][1]
        if shared == "blocks":
            blocks[2] = blocks[0]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Unused(nn.Module):
    """A module with a second name for a parameter in a part that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.spare.weight = self.last.weight
        self.alone = nn.Parameter(torch.randn(WIDTH))
        self.again = self.alone

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Frozen(Body):
    """A module whose parameter with two names is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias.requires_grad_(False)


class Kept(nn.Module):
    """Scaling by a parameter with two names, and by one that a child has too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.again = self.scale
        self.norm = nn.LayerNorm(WIDTH)
        self.shift = self.norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.scale) * self.again + self.shift


class Embedded(nn.Module):
    """Token embeddings tied to the head, whose bias has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Linear(WIDTH, WIDTH, bias=False), Head()
        self.head.decoder.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(x)))


def sequential(*parts: nn.Module, tie: Callable[[Any], None] = lambda parts: None) -> nn.Sequential:
    tie(parts)
    return nn.Sequential(*parts)


def _share_bias(parts: Any) -> None:
    parts[2].bias = parts[0].bias


def _share_both(parts: Any) -> None:
    parts[2].bias, parts[2].weight = parts[0].bias, parts[0].weight


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def used_twice() -> nn.Sequential:
    one = linear()
    return nn.Sequential(one, nn.Tanh(), linear(), one)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a head": Body,
    "a head that adds twice": lambda: Body(AddedTwice),
    "a head in a sequence": lambda: sequential(linear(), nn.ReLU(), Head()),
    "a head that adds twice, in a sequence": lambda: sequential(linear(), nn.ReLU(), AddedTwice()),
    "two heads": lambda: sequential(Head(), nn.ReLU(), Head()),
    "named by the model first": lambda: NamedByTheModel(first=True),
    "named by the model last": lambda: NamedByTheModel(first=False),
    "two in a part": Both,
    "two in a part of a sequence": lambda: sequential(linear(), Both(), linear()),
    "registered in another order": Reversed,
    "blocks with one bias": lambda: Blocks("biases"),
    "blocks with one norm": lambda: Blocks("norms"),
    "a block twice": lambda: Blocks("blocks"),
    "unused": Unused,
    "frozen": Frozen,
    "kept twice": Kept,
    "kept twice in a sequence": lambda: sequential(linear(), Kept(), linear()),
    "embedded": Embedded,
    "layers with one bias": lambda: sequential(linear(), nn.Tanh(), linear(), tie=_share_bias),
    "layers that are equal": lambda: sequential(linear(), nn.Tanh(), linear(), tie=_share_both),
    "a layer twice": used_twice,
}


def task_of(name: str, **options: Any) -> Task:
    """Return a task with one of these models."""
    return Task(MODELS[name], batch=batch, loss=F.mse_loss, name="several-names", **options)


class Plain:
    """The usual plain loop: microbatches one after the other, `clip_grad_norm_` over `module.parameters()`,
    and with master weights an optimizer over float32 copies.
    """

    def __init__(self, task: Task, clip: float, microbatches: int = 2) -> None:
        torch.manual_seed(0)
        self.task, self.clip, self.microbatches, self.module = task, clip, microbatches, task.build()
        names = dict(self.module.named_parameters())
        trained = {name: parameter for name, parameter in names.items() if parameter.requires_grad}
        self.masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in trained.items()}
        self.worked_on = self.masters if task.master_weights else trained
        groups = [
            {"params": [self.worked_on[name]], **self._options(name, trained[name])} for name in trained
        ]
        self.optimizer = task.optimizer(groups)

    def _options(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {} if self.task.groups is None else self.task.groups(name, parameter)

    def step(self, batch: Sequence[Tensor]) -> None:
        """Take one step on inputs and targets."""
        self.module.zero_grad()
        for x, y in zip(*(tensor.chunk(self.microbatches) for tensor in batch), strict=True):
            assert self.task.loss is not None
            (self.task.loss(self.module(x), y) / self.microbatches).backward()
        names = dict(self.module.named_parameters())
        for name, one in self.worked_on.items():
            gradient = names[name].grad
            one.grad = None if gradient is None else gradient.to(one.dtype)
        nn.utils.clip_grad_norm_(self.worked_on.values(), self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for name, one in self.worked_on.items():
                names[name].copy_(one)

    @property
    def state(self) -> dict[str, Tensor]:
        """Return parameters by all of their names."""
        return dict(self.module.state_dict())
