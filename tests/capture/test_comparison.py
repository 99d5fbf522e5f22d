"""Comparison of a module with its chain: broken chains are detected, and correct chains pass."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gallery
from gallery.oddities import Centring, Reversed
from pipefit.capture import Chain, Task, capture
from pipefit.capture.comparison import NotComparable, Numbers, compare
from pipefit.capture.model import built
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.models.hugging_face import hf
from support import untraceable_models
from support.gallery_samples import sampled
from support.huggingface_models import TINY
from support.untraceable_models import Layered, task_of

DROPOUT = (
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)


# Sums do not depend on the number of cores
pytestmark = pytest.mark.usefixtures("one_thread")


def numbers(task: Task, broken: Callable[[Chain], Chain] = lambda chain: chain, size: int = 2) -> Numbers:
    """Return the comparison's report for a task whose chain `broken` has changed."""
    whole, batches = built(task), [sample(task, size, seed=number) for number in range(2)]
    return compare(whole, broken(capture(whole, *batches[0])), batches)


def named(found: Numbers) -> list[str]:
    return [difference.what for difference in found.differences]


# -------------------------------------------------------------------- deliberately broken chains


class Wrapped(nn.Module):
    """A layer of a chain with a defect."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class WrongBackward(Wrapped):
    """A layer whose backward has the wrong sign."""

    def forward(self, values: Any) -> Any:
        return Reversed.apply(self.inner(values), 1.0)


class SlightlyWrongBackward(Wrapped):
    """A layer whose backward is a thousandth too large."""

    def forward(self, values: Any) -> Any:
        return Reversed.apply(self.inner(values), -1.001)


class NoBackward(Wrapped):
    """A layer whose parameters get no gradient."""

    def forward(self, values: Any) -> Any:
        with torch.no_grad():
            made = self.inner(values)
        return made + 0 * values.sum()


class NoUpdate(Wrapped):
    """A layer whose buffers keep their values."""

    def forward(self, values: Any) -> Any:
        before = [buffer.clone() for buffer in self.inner.buffers()]
        made = self.inner(values)
        for buffer, value in zip(self.inner.buffers(), before, strict=True):
            buffer.data.copy_(value)
        return made


class DrawsMore(Wrapped):
    """A layer that draws one more random number."""

    def forward(self, values: Any) -> Any:
        torch.rand(1)
        return self.inner(values)


SECOND, LAST = 2, 4  # layers of `Layered`; between them are the activations


def breaking(layer: int, how: type[Wrapped]) -> Callable[[Chain], Chain]:
    """Return a function that breaks one layer of a chain."""

    def broken(chain: Chain) -> Chain:
        layers = list(chain.layers)
        layers[layer] = replace(layers[layer], module=how(layers[layer].module))
        return replace(chain, layers=tuple(layers))

    return broken


@pytest.mark.parametrize("how", [WrongBackward, SlightlyWrongBackward])
def test_a_wrong_backward_is_seen_by_the_gradients_before_it(how: type[Wrapped]) -> None:
    """The losses agree; gradients differ for the layers up to the wrong one, and agree for the others."""
    found = numbers(task_of(Layered), breaking(SECOND, how))
    wanted = [
        f"the gradient of {layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")
    ]
    assert named(found) == wanted
    with pytest.raises(
        UsageError, match=r"gradient of first.weight is \d.*the chain lacks a backward.*pipefit.chain"
    ):
        found.check()


def test_zeros_do_not_hide_what_is_behind_them() -> None:
    """A last layer of zeros makes every earlier gradient zero; a wrong backward is detected all the same."""

    def zeros() -> nn.Module:
        model = Layered()
        nn.init.zeros_(model.last.weight)
        return model

    assert "the gradient of first.weight" in named(numbers(task_of(zeros), breaking(SECOND, WrongBackward)))


def test_a_lost_gradient_is_seen() -> None:
    """Parameters without a gradient are reported as missing."""
    found = numbers(task_of(Layered), breaking(LAST, NoBackward))
    missing = [difference.what for difference in found.differences if difference.text == "is missing"]
    assert missing == ["the gradient of last.weight", "the gradient of last.bias"]


def test_a_gradient_where_none_belongs_is_seen() -> None:
    """A frozen parameter that the chain trains is reported, because an optimizer would change it."""

    def frozen() -> nn.Module:
        model = Layered()
        model.second.requires_grad_(False)
        return model

    class Thawed(Wrapped):
        def forward(self, values: Any) -> Any:
            self.inner.requires_grad_(True)
            return self.inner(values)

    assert "the gradient of second.weight should not be there" in str(
        numbers(task_of(frozen), breaking(SECOND, Thawed))
    )


def test_an_update_of_a_buffer_that_is_lost_shows_in_the_second_microbatch() -> None:
    """A lost buffer update changes the loss of the second microbatch, not of the first."""
    found = numbers(gallery.task("centring"), breaking(0, NoUpdate))
    assert found.differences[0].what == "the loss of microbatch 2"
    assert "the buffer first.mean" in named(found)
    assert "keeps state between calls" in str(found)
    assert isinstance(built(gallery.task("centring")).module, Centring)


def test_an_update_that_only_evaluation_reads_is_seen_in_the_buffer() -> None:
    """Batch norm trains without its running statistics; they are compared directly."""
    task = task_of(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    found = numbers(task, breaking(1, NoUpdate), size=3)
    assert named(found) == [
        f"the buffer 1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    ]


def test_a_draw_too_many_is_seen() -> None:
    """An additional draw changes all later draws."""
    found = numbers(task_of(untraceable_models.Dropping), breaking(0, DrawsMore))
    assert found.differences[0].what == "the loss of microbatch 1"


def test_a_layer_that_fails_is_named_as_a_failure_of_the_chain() -> None:
    """The message says that the module does not fail."""

    class Failing(Wrapped):
        def forward(self, values: Any) -> Any:
            raise RuntimeError("no such kernel")

    with pytest.raises(UsageError, match=r"forgetful fails as a chain but not as a module.*no such kernel"):
        numbers(task_of(Layered), breaking(0, Failing))


def test_a_module_that_fails_itself_cannot_be_compared() -> None:
    """A failure of the module is not a difference; the message reports it separately and quotes the
    module.
    """

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_exporting():
                raise RuntimeError("needs a GPU")
            return super().forward(x)

    with pytest.raises(
        NotComparable, match=r"forgetful fails without pipefit too.*in training .*needs a GPU"
    ):
        numbers(task_of(lambda: Failing(6, 3)))


# -------------------------------------------------------------------- models with state that a trace loses


@pytest.mark.parametrize(
    ("model", "first", "cause"),
    [
        (untraceable_models.Remembering, "the loss of microbatch 2", "keeps state between calls"),
        (untraceable_models.SetAtFirst, "the loss of microbatch 2", "keeps state between calls"),
        (untraceable_models.Growing, "the loss of microbatch 2", "keeps state between calls"),
        (untraceable_models.CountingOutside, "the loss of microbatch 1", "The forward differs"),
        (untraceable_models.Seeding, "the loss of microbatch 1", "The forward differs"),
        (untraceable_models.Exporting, "the loss of microbatch 1", "The forward differs"),
    ],
)
def test_what_a_trace_forgets_is_seen(model: type[nn.Module], first: str, cause: str) -> None:
    """State that a trace loses (a tensor, a list or a count kept between calls, a seed, code for exports
    only) is reported with the first loss that differs and a possible cause.
    """
    found = numbers(task_of(model))
    assert found.differences[0].what == first
    assert cause in str(found)


def test_by_hand_layers_are_held_to_the_module_that_they_are_of() -> None:
    """A manual chain runs its own modules and passes, but can also lose state, such as that of a counting
    module that runs twice.
    """

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    twice = Counting(6, 6)
    assert named(numbers(task_of(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))))) == []
    assert named(numbers(task_of(lambda: nn.Sequential(twice, nn.Tanh(), twice, nn.Linear(6, 3)))))[0] == (
        "the loss of microbatch 1"
    )


# -------------------------------------------------------------------- correct chains


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    [
        *gallery.SAMPLE,
        *(
            pytest.param(name, marks=pytest.mark.gallery)
            for name in gallery.MODELS
            if name not in gallery.SAMPLE
        ),
    ],
)
def test_what_is_right_is_equal_bit_by_bit(name: str) -> None:
    """Correct chains agree bit by bit: traced and manual, tied and frozen, with batch norm, custom functions
    and custom losses.
    """
    found = numbers(gallery.task(name))
    assert (found.differences, found.apart) == ((), 0.0)
    assert found.gradients > 0
    assert "equal bit by bit" in str(found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sampled(["gpt2", "bert", "llama", "t5"], often=["gpt2", "llama"]))
def test_hugging_face_models_pass_with_dropout(name: str) -> None:
    """Dropout inside Hugging Face models draws the same in the module and in the chain."""
    settings = {key: value for key, value in TINY[name].items() if key not in (*DROPOUT, "dropout_rate")}
    found = numbers(hf(name, **settings))
    assert (found.differences, found.apart) == ((), 0.0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("precision", [None, "bfloat16", "mixed-bfloat16"])
@pytest.mark.parametrize("model", [untraceable_models.Dropping, untraceable_models.DrawingInVain])
def test_a_chain_draws_the_dropout_of_its_module(model: type[nn.Module], precision: Any) -> None:
    """Draws are the same in every precision, and also after an unused dropout."""
    assert named(numbers(task_of(model, precision=precision))) == []


@pytest.mark.parametrize(
    ("precision", "allowed"), [("float64", 1e-9), (None, 1e-4), ("bfloat16", 6e-2), ("mixed-bfloat16", 6e-2)]
)
def test_what_is_allowed_follows_the_precision_of_training(precision: Any, allowed: float) -> None:
    """The tolerance is that of the parameters' precision, or of autocast."""
    found = numbers(task_of(Layered, precision=precision))
    assert (found.differences, found.allowed) == ((), allowed)


def test_a_model_of_the_zoo_passes_with_dropout() -> None:
    """The reference models, which are manual chains, pass with dropout."""
    task = build("gpt", layers=2, hidden=16, heads=2, vocabulary=32, sequence=8, dropout=0.2)
    assert numbers(task).apart == 0.0


def test_buffers_that_share_memory_do_so_in_both_runs() -> None:
    """Two buffers share memory, one a view of the other, and the forward changes it."""

    class Viewing(Layered):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.zeros(12))
            self.register_buffer("part", self.whole[:6])

        def between(self, x: Tensor) -> Tensor:
            self.whole.add_(1.0)
            return x * self.part

    task, module = task_of(Viewing), built(task_of(Viewing)).module
    found = numbers(task)
    assert (found.differences, found.buffers) == ((), 2)
    assert isinstance(module, nn.Module)
    plain = [
        F.cross_entropy(module(x), y).item() for x, y in (sample(task, 2, seed=number) for number in range(2))
    ]
    assert list(found.losses) == plain


# -------------------------------------------------------------------- no side effects


def surroundings(module: nn.Module, loss: nn.Module) -> dict[str, Any]:
    """Return all state of a module, a loss and the generators that a user can see."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().tolist()}
    found["numpy"] = np.random.get_state()[1].tolist()
    for part in (module, loss):
        found[f"{type(part).__name__} vars"] = [sorted(vars(each)) for each in part.modules()]
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            grad = tensor.grad
            found[f"{type(part).__name__} {name}"] = id(tensor), tensor.tolist(), tensor._version
            found[f"{type(part).__name__} {name} grad"] = None if grad is None else (id(grad), grad.tolist())
    return found


class Centred(nn.Module):
    """A loss with a frozen parameter and a buffer that moves with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return F.cross_entropy((outputs - self.centre) * self.scale, targets)


class Everything(Layered):
    """A module with dropout, a replaced buffer, an updated buffer and a tensor in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.BatchNorm1d(6), torch.ones(6)
        self.register_buffer("mean", torch.zeros(6))

    def between(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return F.dropout(self.norm(x)) * self.table - self.mean


def test_the_caller_sees_nothing_of_it() -> None:
    """Parameters, gradients, buffers, attributes, the state of a loss and all random generators stay as they
    are, even if a batch function draws from Python and numpy.
    """
    module, loss = Everything(), Centred()
    loss(module(torch.randn(4, 6)), torch.tensor([0, 1, 2, 0])).backward()
    module.last.bias.grad = None
    task = Task(module, batch=untraceable_models.batch, loss=loss)
    before = surroundings(module, loss)
    found = numbers(task, size=3)
    assert surroundings(module, loss) == before
    assert found.differences == ()
    assert found.apart == 0.0


def test_a_function_that_reaches_the_module_leaves_no_trace_in_it() -> None:
    """In a manual chain, a lambda over the module adds to the original's buffers and gradients: both are
    restored, and the original's values are compared all the same.
    """

    class Reaching(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("mean", torch.zeros(6))
            self.scale = nn.Parameter(torch.ones(6))
            self.reach = lambda x: self.mean.add_(1.0) * self.scale * x

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.reach(x))

    module = nn.Sequential(Reaching())
    task = Task(module, batch=untraceable_models.batch, loss=F.cross_entropy)
    assert "the gradient of 0.scale" not in named(numbers(task))
    assert "the gradient of 0.scale" in named(numbers(task, breaking(0, WrongBackward)))
    assert module[0].scale.grad is None
    assert not module[0].mean.any()
