"""Small models of every kind, and their saved tensors: for tests of fake devices."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipefit.schema.profile import Target

TARGETS: tuple[Target, ...] = ("cpu", "cuda")
HALF = torch.float16
ATTENDED = (2, 4, 100, 32)  # batch, heads, positions, head dimension


class Saved(list[Tensor]):
    """The tensors that a call saves for backward, one per storage, without the parameters."""

    def __init__(self, call: Callable[[], object], parameters: Iterable[Tensor] = ()) -> None:
        super().__init__()
        seen = {p.untyped_storage()._cdata for p in parameters}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in seen:
                seen.add(tensor.untyped_storage()._cdata)
                self.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.result = call()

    @property
    def nbytes(self) -> list[int]:
        return sorted(t.untyped_storage().nbytes() for t in self)

    @property
    def kinds(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(tuple(t.shape), t.dtype) for t in self if t.numel() > 2]  # without random seeds and counts


class Meter(TorchDispatchMode):
    """Bytes in live storages, by weak references; and the names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.now = self.peak = 0
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.operators.add(func.__name__.split(".")[0])
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.live:
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self.live[key] = (weakref.ref(storage, lambda _: self._free(key)), nbytes)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def _free(self, key: int) -> None:
        self.now -= self.live.pop(key)[1]


class Block(nn.Module):
    """A GPT-2 block with eager attention: explicit softmax, dropout and tanh GELU."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        y = self.dropout(F.softmax(q @ k.transpose(-1, -2), -1)) @ v
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(x.shape)))
        h = self.up(self.norm_2(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.dropout(self.down(h))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16 * 49, 10)),
    )


class First(nn.Module):
    """The first output of a module with several; `times` copies of its input."""

    def __init__(self, module: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.module, self.times = module, times

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(*[x] * self.times)[0]
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (cnn, (8, 3, 32, 32)),
    "gpt": (lambda: Block(64, 4, 0.1), (2, 16, 64)),
    "attention": (
        lambda: First(nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True), times=3),
        (2, 16, 64),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2),
        (2, 16, 64),
    ),
    "lstm": (lambda: First(nn.LSTM(64, 32, 2, dropout=0.1)), (5, 4, 64)),
    "gru": (lambda: First(nn.GRU(64, 32, 2, dropout=0.1)), (5, 4, 64)),
}
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": torch.optim.AdamW,
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
}


def train(model: nn.Module, x: Tensor, stepper: torch.optim.Optimizer) -> Saved:
    """Train one step of cross entropy on the model's last dimension; return the forward's saved tensors."""
    saved = Saved(lambda: model(x), model.parameters())
    assert isinstance(saved.result, Tensor)
    logits = saved.result.flatten(0, -2)
    F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=x.device)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    stepper.step()
    stepper.zero_grad()
    return saved
