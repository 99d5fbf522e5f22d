"""Each refusal is one sentence: the part, the line, the reason, and a remedy that works."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.capture.model import chain
from pipefit.errors import PipefitError, UsageError
from pipefit.planner import plan
from pipefit.profiler import profile
from pipefit.runtime import Trainer
from pipefit.schema.json_io import load_cluster
from pipefit.schema.training import Training

HERE = f"{Path(__file__).name}:"


def batch(size: int) -> tuple[Any, Any]:
    """Return made-up regression data."""
    return torch.randn(size, 8), torch.randn(size, 8)


class Model(nn.Module):
    """A model with a module between two layers."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.last(x if self.inner is None else self.inner(x))


class Penalised(nn.Module):
    """A module that returns its result and the features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.first(x)
        return self.last(features).tanh(), features


BASE = Task(Model, batch=batch, loss=F.mse_loss, name="mine")


def within(inner: nn.Module) -> Task:
    """Build a traced task around a module."""
    return replace(BASE, module=Model(inner))


def by_hand(inner: nn.Module) -> Task:
    """Build a task with a module as a manual layer."""
    return replace(BASE, module=chain([nn.Linear(8, 8), inner, nn.Linear(8, 8)]))


class Part(nn.Module):
    """A linear layer followed by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Selects(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[x.sum(1) > 0])


class Distinct(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.unique(x).sum()


class Fails(Part):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


class MakesItsMask(Part):
    """A module that creates a missing mask, except under a compiler, as Switch Transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        mask: Any = None if torch.compiler.is_compiling() else torch.ones(8)
        return self.linear(x) * mask[None]


class Formats(Part):
    def forward(self, x: Tensor) -> Tensor:
        print(f"{x.mean():.2f}")
        return self.linear(x)


OUTSIDE = nn.Parameter(torch.ones(8))


class Reaches(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * OUTSIDE.detach()


class Registers(Part):
    """A module that creates a mask on its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(x.shape[1]), persistent=False)
        return self.linear(x) * self.mask


class PythonDraws(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * random.random()


class ForksItself(Part):
    def forward(self, x: Tensor) -> Tensor:
        os.fork()
        return self.linear(x)


class Packs(Part):
    """A module that packs each sample as a sequence of some of its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(1, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x > 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            x[..., None], lengths, batch_first=True, enforce_sorted=False
        )
        last: Tensor = self.recurrent(packed)[1][0]
        return self.linear(last)


class NumpyDraws(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.tensor(np.random.rand(8), dtype=torch.float32)


class Derives(Part):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(self.linear(x).pow(2).sum(), x, create_graph=True)
        return found


class StepsBack(Part):
    def forward(self, x: Tensor) -> Tensor:
        self.linear(x).sum().backward()
        return self.linear(x)


class Guards(Part):
    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return self.linear(x)


class GuardsLater(Part):
    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async(~torch.isnan(x).any())
        return self.linear(x)


class Masked(nn.Module):
    """Causal attention over the columns."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(1, 1, 2, dropout=0.0, batch_first=True)
        self.encoder, self.options = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), options

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        attended: Tensor = self.encoder(x.unsqueeze(-1), mask=mask, **self.options)
        return attended.squeeze(-1)


class Transposes(Part):
    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = torch.func.vjp(self.linear, x)[0]
        return value


class Sparse(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.sparse.mm(torch.eye(len(x)).to_sparse(), x))


class Embeds(nn.Module):
    """A model whose embedding table has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


class Holder:
    """A class unknown to torch."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Ends(Model):
    """A model that returns `end` of its outputs."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.end = end

    def forward(self, x: Tensor) -> Any:
        return self.end(super().forward(x))


def ending(end: Callable[[Tensor], Any], *, own_loss: bool = False) -> Task:
    """Build a model that returns the given end."""
    return replace(BASE, module=Ends(end), loss=None if own_loss else F.mse_loss)


def fed(make: Callable[..., Any]) -> Task:
    """Build a model with the given batches."""
    return replace(BASE, batch=make)


def judged(loss: Callable[[Any, Any], Any]) -> Task:
    """Build a model with the given loss."""
    return replace(BASE, loss=loss)


def words(size: int) -> tuple[Tensor, Tensor]:
    """Return tokens with numeric targets."""
    return torch.randint(20, (size,)), torch.randn(size, 8)


with pytest.warns((DeprecationWarning, FutureWarning), match=r"torch\.jit"):  # the second from torch 2.14 on
    SCRIPTED: nn.Module = torch.jit.trace(nn.Linear(8, 8), torch.randn(2, 8))  # type: ignore[no-untyped-call]

SENTENCES: dict[str, tuple[Callable[[], Task], tuple[str, ...]]] = {
    "branch": (
        lambda: ending(lambda x: x if x.sum() > 0 else -x), (HERE, "pipefit.chain([", "or do that in a submodule"),
    ),
    "selection": (lambda: within(Selects()), ("module inner", HERE, "a shape depends on the values", "pipefit.chain")),
    "distinct": (lambda: within(Distinct()), ("module inner", HERE, "a shape depends on the values", "torch.where")),
    "failure": (lambda: within(Fails()), ("module inner", HERE, "raises ValueError: not today", "without pipefit")),
    "another way for a compiler": (
        lambda: within(MakesItsMask()),
        ("module inner", HERE, "checks whether it is being compiled", "raises TypeError", "among the inputs"),
    ),
    "failure by hand": (lambda: by_hand(Fails()), ("layer 1 (Fails)", HERE, "ValueError: not today")),
    "format": (lambda: within(Formats()), ("module inner", HERE, "needs the values of a tensor")),
    "buffer in a forward": (lambda: within(Registers()), ("inner", HERE, "registers the buffer 'mask'", "in __init__")),
    "optimizer": (
        lambda: replace(BASE, optimizer=lambda groups: torch.optim.SGD(groups, lr=-1.0)),
        ("the optimizer of mine cannot be created", "Invalid learning rate", "such as its class"),
    ),
    "weights in a loss": (
        lambda: judged(lambda x, y: F.mse_loss(x, y) + OUTSIDE.square().sum()),
        ("the loss of mine cannot be planned", "a parameter of another module", "loss=None"),
    ),
    "tensor from outside": (lambda: by_hand(Reaches()), ("layer 1 (Reaches)", HERE, "make it a buffer")),
    "python draws": (lambda: within(PythonDraws()), ("module inner", HERE, "draws random numbers", "torch.rand")),
    "numpy draws": (lambda: within(NumpyDraws()), ("module inner", HERE, "draws random numbers", "torch.rand")),
    "forks": (lambda: within(ForksItself()), ("module inner", HERE, "it forks this process", "that makes batches")),
    "forks by hand": (lambda: by_hand(ForksItself()), ("layer 1 (ForksItself)", "it forks this process", "custom_op")),
    "packed": (lambda: within(Packs()), ("inner.recurrent", HERE, "packs sequences", "the padded batch", "mask the")),
    "packed by hand": (lambda: by_hand(Packs()), ("layer 1 (Packs)", HERE, "the padded batch, and mask the padding")),
    "draws by hand": (lambda: by_hand(NumpyDraws()), ("layer 1 (NumpyDraws)", "draws random numbers", "torch.rand")),
    "gradients": (
        lambda: within(Derives()), ("module inner", HERE, "computes gradients inside its forward", "autograd.Function"),
    ),
    "backward": (lambda: within(StepsBack()), ("module inner", HERE, "computes gradients inside", "as operations")),
    "gradients by hand": (lambda: by_hand(Derives()), ("layer 1 (Derives)", HERE, "do not support gradients inside")),
    "guard by hand": (
        lambda: by_hand(Guards()), ("layer 1 (Guards)", HERE, "not a number", "every condition", "_assert_async"),
    ),
    "mask": (lambda: within(Masked()), ("module inner", HERE, "compare a mask with a causal mask", "is_causal=True")),
    "product with a Jacobian": (
        lambda: by_hand(Transposes()), ("layer 1 (Transposes)", HERE, "do not support gradients inside"),
    ),
    "sparse": (lambda: within(Sparse()), ("module inner", HERE, "makes a sparse tensor", "use dense tensors")),
    "sparse gradients": (
        lambda: replace(BASE, module=Embeds, batch=words), ("layer table (Embedding)", "sparse=False"),
    ),
    "scripted": (lambda: within(SCRIPTED), ("inner of mine is a TorchScript module", "the original module")),
    "scripted by hand": (lambda: by_hand(SCRIPTED), ("1 of mine is a TorchScript module", "the original module")),
    "lazy": (lambda: within(nn.LazyLinear(8)), ("inner.weight of mine does not have a shape", "call the module on")),
    "lazy factory": (lambda: replace(BASE, module=lambda: Model(nn.LazyLinear(8))), ("builds mine", "LazyLinear")),
    "quantised": (
        lambda: within(torch.ao.nn.quantized.dynamic.Linear(8, 8)), ("inner of mine is a quantised Linear", "before"),
    ),
    "no module": (lambda: replace(BASE, module=lambda: 3), ("returned a int", "an nn.Module")),  # type: ignore[arg-type, return-value]
    "failing factory": (lambda: replace(BASE, module=lambda: Model(nn.Linear(8))), ("builds mine fails", "built")),  # type: ignore[arg-type]
    "object": (lambda: ending(Holder), ("mine", HERE, "it returns a Holder", "dictionaries or dataclasses")),
    "object inside": (lambda: ending(lambda x: {"a": {"b": Holder(x)}}), ("a Holder as ['a']['b']", "dataclasses")),
    "nothing": (lambda: ending(lambda _: None), ("mine returns None and no tensor", "return a tensor")),
    "number": (lambda: ending(lambda _: 1.0), ("mine returns a float and no tensor", "return a tensor")),
    "no loss": (lambda: ending(lambda _: None, own_loss=True), ("not return a loss", "None", "Task(..., loss=...)")),
    "too many": (
        lambda: fed(lambda n: ((torch.randn(n, 8),) * 2, torch.randn(n, 8))),
        ("cannot be called with the inputs of a batch, 2 positional", "takes (x)", "a dictionary becomes keywords"),
    ),
    "other keywords": (
        lambda: fed(lambda n: ({"z": torch.randn(n, 8)}, None)), ("the keyword arguments z", "takes (x)"),
    ),
    "no batch": (lambda: fed(lambda _: None), ("must return a pair (inputs, targets), not None",)),
    "generator": (lambda: fed(lambda n: (t for t in batch(n))), ("a pair (inputs, targets), not a generator",)),
    "numpy": (lambda: fed(lambda n: (np.zeros((n, 8)),) * 2), ("not a ndarray; convert it with torch.as_tensor",)),
    "no argument": (lambda: fed(lambda: batch(2)), ("fails for 2 samples", "the number of samples")),
    "other sizes": (
        lambda: fed(lambda n: (torch.randn(n, 8), torch.randn(n + 1, 8))),
        ("targets of a batch of mine has shape (3, 8), but dimension 0 must be the 2 samples", "into the module"),
    ),
    "no samples": (lambda: fed(lambda n: (torch.randn(n, 8), torch.tensor(1.0))), ("has shape ()", "dimension 0")),
    "sparse batch": (
        lambda: fed(lambda n: (torch.eye(n, 8).to_sparse(), torch.randn(n, 8))), ("inputs of a", "a sparse tensor"),
    ),
    "nested batch": (
        lambda: fed(lambda n: (torch.nested.nested_tensor([torch.ones(8)] * n), None)), ("is a nested tensor", "dense"),
    ),
    "vector": (lambda: judged(lambda x, y: (x - y).mean(1)), ("must be a scalar tensor, not a tensor of shape (2,)",)),
    "loss of nothing": (lambda: judged(lambda *_: None), ("must be a scalar tensor, not None",)),
    "loss as a number": (lambda: judged(lambda x, y: F.mse_loss(x, y).item()), ("scalar tensor, not a float",)),
    "detached": (lambda: judged(lambda x, y: F.mse_loss(x, y).detach()), ("mine does not require a gradient",)),
    "complex": (lambda: judged(lambda x, _: torch.fft.fft(x).mean()), ("to have a gradient, not torch.complex64",)),
    "failing loss": (lambda: judged(lambda *_: {}["logits"]), ("the loss of mine cannot be run on", HERE)),
    "numpy loss": (lambda: judged(lambda x, _: torch.tensor(x.detach().numpy().mean())), ("the loss of mine", HERE)),
    "lengths": (
        lambda: judged(lambda x, y: F.ctc_loss(x.log_softmax(-1)[:, None], y[:1, :1].long(), (2,), (1,))),
        (HERE, "give the lengths of ctc_loss as tensors"),
    ),
    "float64 data": (
        lambda: fed(lambda n: tuple(t.double() for t in batch(n))),
        ("layer first (Linear) cannot be run on float64 (2, 8)", "float32 and float64", "precision='float32'"),
    ),
    "closure": (
        lambda: replace(BASE, optimizer=torch.optim.LBFGS),
        ("the optimizer cannot be run on float32 (8, 8)", "without a closure"),
    ),
    "matrices": (
        lambda: replace(BASE, optimizer=torch.optim.Muon), ("the optimizer cannot be run on", "options that groups="),
    ),
    "sparse optimizer": (
        lambda: replace(BASE, optimizer=torch.optim.SparseAdam), ("the optimizer cannot be run", "use Adam or AdamW"),
    ),
    "capturable": (
        lambda: replace(BASE, optimizer=lambda groups: torch.optim.Adam(groups, capturable=True)),
        ("the optimizer cannot be run", "remove capturable"),
    ),
    "penalty": (
        lambda: replace(BASE, module=Penalised, loss=lambda o, _: torch.autograd.grad(o[0].sum(), o[1])[0].sum()),
        ("the loss of mine cannot be run", "return that gradient from the module"),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(("make", "parts"), SENTENCES.values(), ids=SENTENCES)
def test_refusals_say_what_where_and_the_way_out(make: Callable[[], Task], parts: tuple[str, ...]) -> None:
    """The message is one sentence without a line break: the part, the line, the reason and the remedy."""
    with pytest.raises(UsageError) as refused:
        profile(make(), microbatch_size=2)
    text = str(refused.value)
    assert [part for part in parts if part not in text] == [] and "\n" not in text, text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"module": None}, "module of a Task must be an nn.Module or a function that builds one, not None"),
        ({"batch": 3}, "batch of a Task must be a function of the batch size .*, not a int"),
        ({"optimizer": "adamw"}, "optimizer of a Task must be a function of parameter groups .*, not a str"),
        (
            {"loss": nn.Bilinear(8, 8, 1)},
            "loss of a Task has parameters, .*: make it part of the module, .* loss=None",
        ),
        (
            {"loss": "mse"},
            "loss of a Task must be a function of .*, or None if the module computes it, not a str",
        ),
    ],
)
def test_a_task_is_checked_where_it_is_born(settings: dict[str, Any], text: str) -> None:
    """A task with a non-callable argument is refused by name at construction."""
    with pytest.raises(UsageError, match=text):
        replace(BASE, **settings)


def test_modules_that_cannot_be_copied_are_named() -> None:
    """The message names the innermost part that cannot be copied, quotes its error, and gives the remedy: a
    function that builds it.
    """

    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = open(__file__)  # noqa: SIM115 - what no copy can have
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    made = within(nn.Sequential(nn.Linear(8, 8), Open()))
    with pytest.raises(
        UsageError, match=r"inner\.1 of mine \(Open\) cannot be copied \(TypeError: cannot pickle"
    ):
        profile(made, microbatch_size=2)
    assert isinstance(made.module, Model) and isinstance(made.module.inner, nn.Sequential)
    made.module.inner[1].held.close()  # type: ignore[union-attr, operator]


def test_the_way_out_of_lazy_modules_works() -> None:
    """After one call the module has shapes and can be trained."""
    module = Model(nn.LazyLinear(8))
    module(batch(2)[0])
    assert len(profile(replace(BASE, module=module), microbatch_size=2).layers) == 3


def test_the_way_out_of_a_mask_that_is_compared_works() -> None:
    """With an annotation of the mask, the model can be planned."""
    assert profile(within(Masked(is_causal=True)), microbatch_size=2).layers


def test_the_way_out_of_a_check_of_values_works() -> None:
    """torch's own check runs later, on real values, so that a profile does not need them."""
    assert profile(by_hand(GuardsLater()), microbatch_size=2).layers


def test_a_float64_model_under_a_default_training() -> None:
    """The message names both remedies, and both work: float64 in the training, or float32 in the task."""
    task = replace(BASE, module=lambda: Model().double(), batch=lambda n: tuple(t.double() for t in batch(n)))
    cluster, default = load_cluster("emulated:2x64MiB"), Training(batch_size=4, microbatches=2)
    with pytest.raises(
        UsageError, match=r"with --precision float32, or plan for Training\(..., precision='float64'\)"
    ):
        plan(profile(task, microbatch_size=2), cluster, default)
    cast = replace(task, precision="float32")
    for one, training in ((task, replace(default, precision="float64")), (cast, default)):
        made = plan(profile(one, microbatch_size=2), cluster, training, stages=2)
        assert Trainer(one, made).step(one.batch(4)) > 0


def test_what_the_owners_code_refuses_is_passed_on() -> None:
    """A pipefit error raised by a batch function or a factory is not wrapped into another error."""

    def refuse(*_: Any) -> Any:
        raise PipefitError("mine")

    for task in (fed(refuse), replace(BASE, module=refuse)):
        with pytest.raises(PipefitError, match=r"^mine$"):
            profile(task, microbatch_size=2)
