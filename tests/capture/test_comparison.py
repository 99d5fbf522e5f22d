"""The net: a module and its chain side by side. What breaks a chain must be seen, and what is right must pass."""

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

import forgetful
import gallery
from forgetful import Layered, task_of
from gallery.oddities import Centring, Reversed
from huggingface_models import TINY
from pipefit.capture import Chain, Task, capture
from pipefit.capture.comparison import NotComparable, Numbers, compare
from pipefit.capture.model import built
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.models.hugging_face import hf
from sampled import sampled

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
    """What the comparison says of a task whose chain `broken` has changed."""
    whole, batches = built(task), [sample(task, size, seed=number) for number in range(2)]
    return compare(whole, broken(capture(whole, *batches[0])), batches)


def named(found: Numbers) -> list[str]:
    return [difference.what for difference in found.differences]


# -------------------------------------------------------------------- chains that are broken on purpose


class Wrapped(nn.Module):
    """A layer of a chain and something that is wrong with it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class WrongBackward(Wrapped):
    """Its backward has the other sign."""

    def forward(self, values: Any) -> Any:
        return Reversed.apply(self.inner(values), 1.0)


class SlightlyWrongBackward(Wrapped):
    """Its backward is a thousandth too large."""

    def forward(self, values: Any) -> Any:
        return Reversed.apply(self.inner(values), -1.001)


class NoBackward(Wrapped):
    """Its parameters get no gradient."""

    def forward(self, values: Any) -> Any:
        with torch.no_grad():
            made = self.inner(values)
        return made + 0 * values.sum()


class NoUpdate(Wrapped):
    """Its buffers keep their values."""

    def forward(self, values: Any) -> Any:
        before = [buffer.clone() for buffer in self.inner.buffers()]
        made = self.inner(values)
        for buffer, value in zip(self.inner.buffers(), before, strict=True):
            buffer.data.copy_(value)
        return made


class DrawsMore(Wrapped):
    """Draws once more."""

    def forward(self, values: Any) -> Any:
        torch.rand(1)
        return self.inner(values)


SECOND, LAST = 2, 4  # layers of `Layered`; between them are the activations


def breaking(layer: int, how: type[Wrapped]) -> Callable[[Chain], Chain]:
    """A chain with something wrong in a layer."""

    def broken(chain: Chain) -> Chain:
        layers = list(chain.layers)
        layers[layer] = replace(layers[layer], module=how(layers[layer].module))
        return replace(chain, layers=tuple(layers))

    return broken


@pytest.mark.parametrize("how", [WrongBackward, SlightlyWrongBackward])
def test_a_wrong_backward_is_seen_by_the_gradients_before_it(how: type[Wrapped]) -> None:
    """The losses are the same; the gradients of the layers up to the wrong one are not, and the rest are."""
    found = numbers(task_of(Layered), breaking(SECOND, how))
    wanted = [
        f"the gradient of {layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")
    ]
    assert named(found) == wanted
    with pytest.raises(
        UsageError, match=r"gradient of first.weight is \d.*a backward was lost.*pipefit.chain"
    ):
        found.check()


def test_zeros_do_not_hide_what_is_behind_them() -> None:
    """Behind a last layer of zeros every gradient is zero, whatever the backward does: the wrong one is seen still."""

    def zeros() -> nn.Module:
        model = Layered()
        nn.init.zeros_(model.last.weight)
        return model

    assert "the gradient of first.weight" in named(numbers(task_of(zeros), breaking(SECOND, WrongBackward)))


def test_a_lost_gradient_is_seen() -> None:
    """Parameters that get no gradient are told, as missing."""
    found = numbers(task_of(Layered), breaking(LAST, NoBackward))
    missing = [difference.what for difference in found.differences if difference.text == "is missing"]
    assert missing == ["the gradient of last.weight", "the gradient of last.bias"]


def test_a_gradient_where_none_belongs_is_seen() -> None:
    """A frozen parameter that the chain trains: an optimizer would change it."""

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
    """The first microbatch has the same loss, for it is computed with what the update made; the second has not."""
    found = numbers(gallery.task("centring"), breaking(0, NoUpdate))
    assert found.differences[0].what == "the loss of microbatch 2"
    assert "the buffer first.mean" in named(found)
    assert "keeps something from one call to the next" in str(found)
    assert isinstance(built(gallery.task("centring")).module, Centring)


def test_an_update_that_only_evaluation_reads_is_seen_in_the_buffer() -> None:
    """Batch norm trains without its running statistics; these are compared themselves."""
    task = task_of(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    found = numbers(task, breaking(1, NoUpdate), size=3)
    assert named(found) == [
        f"the buffer 1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    ]


def test_a_draw_too_many_is_seen() -> None:
    """The draws behind it are others."""
    found = numbers(task_of(forgetful.Dropping), breaking(0, DrawsMore))
    assert found.differences[0].what == "the loss of microbatch 1"


def test_a_layer_that_fails_is_named_as_a_failure_of_the_chain() -> None:
    """The sentence says that the module does not fail."""

    class Failing(Wrapped):
        def forward(self, values: Any) -> Any:
            raise RuntimeError("no such kernel")

    with pytest.raises(
        UsageError, match=r"forgetful fails as a chain, and as a module it does not.*no such kernel"
    ):
        numbers(task_of(Layered), breaking(0, Failing))


def test_a_module_that_fails_itself_cannot_be_compared() -> None:
    """That is no difference: it is told apart, and says what the module says."""

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_exporting():
                raise RuntimeError("needs a GPU")
            return super().forward(x)

    with pytest.raises(NotComparable, match=r"forgetful itself.*fails in training .*needs a GPU"):
        numbers(task_of(lambda: Failing(6, 3)))


# -------------------------------------------------------------------- models that a trace does not see through


@pytest.mark.parametrize(
    ("model", "first", "cause"),
    [
        (forgetful.Remembering, "the loss of microbatch 2", "from one call to the next"),
        (forgetful.SetAtFirst, "the loss of microbatch 2", "from one call to the next"),
        (forgetful.Growing, "the loss of microbatch 2", "from one call to the next"),
        (forgetful.CountingOutside, "the loss of microbatch 1", "the forward is another"),
        (forgetful.Seeding, "the loss of microbatch 1", "the forward is another"),
        (forgetful.Exporting, "the loss of microbatch 1", "the forward is another"),
    ],
)
def test_what_a_trace_forgets_is_seen(model: type[nn.Module], first: str, cause: str) -> None:
    """A tensor, a list or a count that lasts from call to call, a seed, code for exports alone: each is told, with the
    loss that shows it first and what the cause may be.
    """
    found = numbers(task_of(model))
    assert found.differences[0].what == first
    assert cause in str(found)


def test_by_hand_layers_are_held_to_the_module_that_they_are_of() -> None:
    """A chain by hand runs its own modules, and passes; it has something to lose too, as a module that it runs twice
    and that counts.
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


# -------------------------------------------------------------------- what is right


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
    """Traced and by hand, tied and frozen, with batch norm, custom functions and losses of their own."""
    found = numbers(gallery.task(name))
    assert (found.differences, found.apart) == ((), 0.0)
    assert found.gradients > 0
    assert "equal bit by bit" in str(found)


@pytest.mark.parametrize("name", sampled(["gpt2", "bert", "llama", "t5"], often=["gpt2", "llama"]))
def test_hugging_face_models_pass_with_dropout(name: str) -> None:
    """Their own dropout draws the same in the module and in the chain."""
    settings = {key: value for key, value in TINY[name].items() if key not in (*DROPOUT, "dropout_rate")}
    found = numbers(hf(name, **settings))
    assert (found.differences, found.apart) == ((), 0.0)


@pytest.mark.parametrize("precision", [None, "bfloat16", "mixed-bfloat16"])
@pytest.mark.parametrize("model", [forgetful.Dropping, forgetful.DrawingInVain])
def test_a_chain_draws_the_dropout_of_its_module(model: type[nn.Module], precision: Any) -> None:
    """Draws are the same, in whatever precision, and also behind one that nobody uses."""
    assert named(numbers(task_of(model, precision=precision))) == []


@pytest.mark.parametrize(
    ("precision", "allowed"), [("float64", 1e-9), (None, 1e-4), ("bfloat16", 6e-2), ("mixed-bfloat16", 6e-2)]
)
def test_what_is_allowed_follows_the_precision_of_training(precision: Any, allowed: float) -> None:
    """That of the parameters, or of autocast."""
    found = numbers(task_of(Layered, precision=precision))
    assert (found.differences, found.allowed) == ((), allowed)


def test_a_model_of_the_zoo_passes_with_dropout() -> None:
    """The reference models are chains by hand."""
    task = build("gpt", layers=2, hidden=16, heads=2, vocabulary=32, sequence=8, dropout=0.2)
    assert numbers(task).apart == 0.0


def test_buffers_that_share_memory_do_so_in_both_runs() -> None:
    """One is a view of the other, which the forward changes."""

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


# -------------------------------------------------------------------- nothing moves


def surroundings(module: nn.Module, loss: nn.Module) -> dict[str, Any]:
    """All that a user can see of a module, a loss and the generators."""
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
    """Dropout, a buffer that is replaced, one that is updated, a tensor in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.BatchNorm1d(6), torch.ones(6)
        self.register_buffer("mean", torch.zeros(6))

    def between(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return F.dropout(self.norm(x)) * self.table - self.mean


def test_the_caller_sees_nothing_of_it() -> None:
    """Parameters, gradients, buffers, attributes, the state of a loss and all random generators stay as they are, of a
    batch function that draws from Python and numpy, too.
    """
    module, loss = Everything(), Centred()
    loss(module(torch.randn(4, 6)), torch.tensor([0, 1, 2, 0])).backward()
    module.last.bias.grad = None
    task = Task(module, batch=forgetful.batch, loss=loss)
    before = surroundings(module, loss)
    found = numbers(task, size=3)
    assert surroundings(module, loss) == before
    assert found.differences == ()
    assert found.apart == 0.0


def test_a_function_that_reaches_the_module_leaves_no_trace_in_it() -> None:
    """By hand, a lambda over the module adds to the buffers and gradients of the original: both are put back. What the
    original got is compared all the same.
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
    task = Task(module, batch=forgetful.batch, loss=F.cross_entropy)
    assert "the gradient of 0.scale" not in named(numbers(task))
    assert "the gradient of 0.scale" in named(numbers(task, breaking(0, WrongBackward)))
    assert module[0].scale.grad is None
    assert not module[0].mean.any()
