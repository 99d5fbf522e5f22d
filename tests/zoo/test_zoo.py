"""Common properties of all models of the zoo, and refusals of `build`."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit import models
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from support.gallery_samples import sampled

TRANSFORMER: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 23, "sequence": 12}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "vgg11": ("vgg11", {"num_classes": 4, "image_size": 32, "width": 2}),
    "gpt": ("gpt", TRANSFORMER),
    "gpt-eager": ("gpt", TRANSFORMER | {"attention": "eager"}),
    "bert": ("bert", TRANSFORMER),
    "bert-eager": ("bert", TRANSFORMER | {"attention": "eager"}),
    "bert-plain": ("bert", TRANSFORMER | {"mask": False}),
    "bert-unfused": ("bert", TRANSFORMER | {"unfused": True}),
    "bert-span": ("bert", TRANSFORMER | {"head": "span"}),
    "bert-tied": ("bert", TRANSFORMER | {"tied": True}),
    "gpt-tied": ("gpt", TRANSFORMER | {"tied": True}),
    "mlp": ("mlp", {"inputs": 12, "classes": 4, "widths": (8, 64, 16), "dropout": 0.1}),
    "resnet": ("resnet", {"blocks": (1, 1), "num_classes": 4, "image_size": 16, "width": 4}),
    "unet": ("unet", {"depth": 2, "convolutions": 1, "num_classes": 3, "image_size": 8, "width": 4}),
    "amoebanet": ("amoebanet", {"layers": 3, "num_classes": 4, "image_size": 64, "filters": 8}),
}
DROPPING = [
    case
    for case, (name, _) in SMALL.items()
    if "dropout" in inspect.signature(models.MODELS[name]).parameters
]

every_small = pytest.mark.parametrize("case", SMALL)
every_dropping = pytest.mark.parametrize("case", DROPPING)
every_name = pytest.mark.parametrize("name", models.MODELS)


def small(case: str, **settings: Any) -> Task:
    name, defaults = SMALL[case]
    return models.build(name, **(defaults | settings))


def calm(case: str, **settings: Any) -> Task:
    """Return small settings without dropout."""
    return small(case, **settings, **({"dropout": 0.0} if case in DROPPING else {}))


def chain_of(task: Task) -> nn.Sequential:
    chain = task.build()
    assert isinstance(chain, nn.Sequential)
    return chain


class Counter(TorchDispatchMode):
    """Mode that counts the operations that reach torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def half(dtype: torch.dtype) -> Iterator[None]:
    """Create float tensors in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train_step(task: Task, chain: nn.Module, size: int = 3) -> torch.Tensor:
    inputs, targets = task.batch(size)
    loss = task.loss(chain(inputs), targets)
    loss.backward()
    return loss.detach()


@pytest.mark.sample(3)
@every_name
def test_describing_allocates_nothing(name: str) -> None:
    """Describing a model of default size runs no torch operation; calling its module does."""
    with Counter() as counter:
        task = models.build(name)
        assert counter.count == 0
        with torch.device("meta"):
            chain_of(task)
    assert counter.count > 0


@pytest.mark.sample(3)
@every_name
def test_built_on_a_device_context(name: str) -> None:
    """Under `torch.device("meta")` every parameter and buffer of the default size is on that device."""
    with torch.device("meta"):
        chain = chain_of(models.build(name))
    assert {tensor.device.type for tensor in [*chain.parameters(), *chain.buffers()]} == {"meta"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sampled(models.MODELS, often=("mlp", "gpt", "bert", "resnet", "unet")))
def test_default_size_trains_under_fake_tensors(name: str) -> None:
    """Weights, batch, loss and gradients of the default size are fake under the mode, without memory or
    waiting.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):  # text from files is real
        task = models.build(name)
        chain = chain_of(task)
        loss = train_step(task, chain, size=2)
        gradients = [parameter.grad for parameter in chain.parameters()]
        task.optimizer(chain.parameters()).step()
    assert isinstance(loss, FakeTensor) and loss.shape == ()
    assert all(isinstance(gradient, FakeTensor) for gradient in gradients)


@every_small
def test_every_parameter_learns(case: str) -> None:
    """One backward reaches every parameter, with finite gradients of its shape."""
    torch.manual_seed(0)
    task = small(case)
    chain = chain_of(task)
    assert train_step(task, chain).isfinite()
    for name, parameter in chain.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.sample(14)
@every_small
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_has_a_loss_in_single(case: str, dtype: torch.dtype) -> None:
    """After `.to(dtype)`, with inputs of that type, gradients have that type and the loss is float32."""
    torch.manual_seed(0)
    task = small(case)
    chain = chain_of(task).to(dtype)
    with half(dtype):
        loss = train_step(task, chain)
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert {parameter.grad.dtype for parameter in chain.parameters() if parameter.grad is not None} == {dtype}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case", sampled(["vgg11", "gpt", "bert", "mlp", "resnet", "unet"], often=["gpt", "mlp", "unet"])
)
def test_the_data_can_be_learned(case: str) -> None:
    """The default optimizer lowers the loss on fresh batches to below four fifths of a guess's."""
    torch.manual_seed(0)
    task = calm(case, **({"width": 8} if case in ("vgg11", "unet") else {}))
    chain = chain_of(task)
    optimizer = task.optimizer(chain.parameters())
    losses = []
    for _ in range(120):
        losses.append(train_step(task, chain, size=16).item())
        optimizer.step()
        optimizer.zero_grad()
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


@every_small
def test_batches_follow_the_default_generator(case: str) -> None:
    """The same seed gives the same batch of the requested size, the next draw another one."""
    task = small(case)

    def draw() -> list[torch.Tensor]:
        inputs, targets = task.batch(5)
        return [*(inputs if isinstance(inputs, tuple) else (inputs,)), targets]

    torch.manual_seed(7)
    first, second = draw(), draw()
    torch.manual_seed(7)
    again = draw()
    assert all(tensor.shape[0] == 5 for tensor in first)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(first[-1], second[-1]) or not torch.equal(first[0], second[0])


@every_dropping
def test_no_dropout_is_deterministic(case: str) -> None:
    """With dropout 0 a model in training mode gives the same output twice; with dropout it does not."""
    torch.manual_seed(0)
    for dropout in (0.0, 0.5):
        task = small(case, dropout=dropout)
        chain = chain_of(task)
        inputs, _ = task.batch(4)
        assert torch.equal(chain(_copy(inputs)), chain(_copy(inputs))) == (dropout == 0.0)


def _copy(values: Any) -> Any:
    return tuple(value.clone() for value in values) if isinstance(values, tuple) else values.clone()


@pytest.mark.sample(4)
@every_small
def test_any_split_computes_the_same(case: str) -> None:
    """Cut anywhere, with the crossing values passed as a tensor or tuple, the output is the whole chain's."""
    torch.manual_seed(0)
    task = calm(case)
    chain = chain_of(task)
    inputs, _ = task.batch(2)
    whole = chain(_copy(inputs))
    for cut in range(1, len(chain)):
        assert torch.equal(chain[cut:](chain[:cut](_copy(inputs))), whole), cut


@every_small
def test_a_task_travels_to_a_worker(case: str) -> None:
    """A task survives pickling: the copy builds the same weights from the same seed."""
    task = small(case)
    copy = pickle.loads(pickle.dumps(task))
    chains = []
    for one in (task, copy):
        torch.manual_seed(3)
        chains.append(chain_of(one).state_dict())
    assert all(torch.equal(chains[0][name], chains[1][name]) for name in chains[0])


@every_name
@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)],
)
def test_optimizer_and_rate_are_settings(
    name: str, optimizer: str, kind: type[torch.optim.Optimizer]
) -> None:
    """Every model takes each optimizer by name, with its rate, over parameters or parameter groups."""
    parameter = nn.Parameter(torch.zeros(2))
    factory = models.build(name, optimizer=optimizer, lr=0.25).optimizer
    made = factory(iter([parameter]))
    assert type(made) is kind
    assert made.param_groups[0]["lr"] == 0.25
    assert made.param_groups[0].get("momentum", 0.9) == 0.9
    assert [group["lr"] for group in factory([{"params": [parameter], "lr": 0.5}]).param_groups] == [0.5]


@pytest.mark.parametrize(
    ("name", "kind", "rate"),
    [
        ("gpt", torch.optim.AdamW, 3e-4),
        ("bert", torch.optim.AdamW, 3e-4),
        ("vgg11", torch.optim.SGD, 1e-3),
        ("mlp", torch.optim.SGD, 0.03),
        ("amoebanet", torch.optim.SGD, 0.1),
        ("resnet", torch.optim.SGD, 0.1),
        ("resnet101", torch.optim.SGD, 0.1),
        ("unet", torch.optim.SGD, 0.1),
    ],
)
def test_transformers_default_to_adamw_and_the_others_to_sgd(
    name: str, kind: type[torch.optim.Optimizer], rate: float
) -> None:
    """Transformers default to AdamW at 3e-4, the others to SGD at the rate that trains them."""
    made = models.build(name).optimizer([nn.Parameter(torch.zeros(2))])
    assert type(made) is kind
    assert made.param_groups[0]["lr"] == rate


def test_unknown_model_lists_the_models() -> None:
    """A wrong model name is refused with the existing names."""
    with pytest.raises(UsageError) as refusal:
        models.build("gtp")
    names = "amoebanet, bert, gpt, gpt-stdlib, mlp, mpress-bert, mpress-gpt, resnet, resnet101, unet, vgg11"
    assert str(refusal.value) == f"'gtp' is not a model of the zoo: did you mean gpt? Choose one of {names}"


@every_name
def test_unknown_setting_lists_the_settings(name: str) -> None:
    """A wrong setting is refused with all existing settings and their defaults."""
    with pytest.raises(UsageError) as refusal:
        models.build(name, hiden=3)
    sentence = str(refusal.value)
    assert sentence.startswith(f"{models.MODELS[name].__name__} does not have a setting 'hiden': ")
    for setting in inspect.signature(models.MODELS[name]).parameters.values():
        assert f"{setting.name}={setting.default!r}" in sentence


WHOLE = "must be a whole number, 1 or more, not"
SIZES = "must be a tuple of whole numbers, each 1 or more, such as (64, 32), not"
SHARE = "must be a number from 0 to below 1, not"
PIXELS = "leaves single pixels for the last of"
BATCH_NORM = "groups of blocks, but batch norm needs more: use"
HALVED = "cannot be halved depth=%d times to 2 x 2 pixels or more: use"
RATE = "must be a finite number above 0, or None, not"


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("gpt", {"layers": 0}, "gpt: layers must be a whole number, 1 to 10,000, not 0"),
        ("bert", {"layers": 10_001}, "bert: layers must be a whole number, 1 to 10,000, not 10001"),
        ("gpt", {"hidden": -768}, f"gpt: hidden {WHOLE} -768"),
        ("gpt", {"hidden": "big"}, f"gpt: hidden {WHOLE} 'big'"),
        ("gpt", {"hidden": 768.0}, f"gpt: hidden {WHOLE} 768.0"),
        ("gpt", {"sequence": True}, f"gpt: sequence {WHOLE} True"),
        ("gpt", {"heads": (2, 3)}, f"gpt: heads {WHOLE} (2, 3)"),
        ("gpt", {"intermediate": 0}, "gpt: intermediate must be a whole number, 1 or more, or None, not 0"),
        ("gpt", {"dropout": 1.0}, f"gpt: dropout {SHARE} 1.0"),
        ("gpt", {"dropout": -0.1}, f"gpt: dropout {SHARE} -0.1"),
        ("gpt", {"dropout": float("nan")}, f"gpt: dropout {SHARE} nan"),
        ("gpt", {"dropout": "0.1"}, f"gpt: dropout {SHARE} '0.1'"),
        ("gpt", {"dropout": False}, f"gpt: dropout {SHARE} False"),
        ("gpt", {"attention": "flash"}, "gpt: attention must be 'sdpa' or 'eager', not 'flash'"),
        ("gpt", {"attention": (1,)}, "gpt: attention must be 'sdpa' or 'eager', not (1,)"),
        ("gpt", {"heads": 5}, "gpt: hidden=768 is not divisible by heads=5: try heads=4 or hidden=770"),
        (
            "bert",
            {"hidden": 6, "heads": 12},
            "bert: hidden=6 is not divisible by heads=12: try heads=6 or hidden=12",
        ),
        ("bert", {"mask": 1}, "bert: mask must be True or False, not 1"),
        ("vgg11", {"image_size": 31}, "vgg11: image_size must be a whole number, 32 or more, not 31"),
        ("vgg11", {"optimizer": "lion"}, "vgg11: optimizer must be 'adamw' or 'adam' or 'sgd', not 'lion'"),
        ("mlp", {"lr": 0}, f"mlp: lr {RATE} 0"),
        ("mlp", {"lr": float("inf")}, f"mlp: lr {RATE} inf"),
        ("mlp", {"lr": "fast"}, f"mlp: lr {RATE} 'fast'"),
        ("mlp", {"widths": ()}, f"mlp: widths {SIZES} ()"),
        ("mlp", {"widths": 64}, f"mlp: widths {SIZES} 64"),
        ("mlp", {"widths": (64, 0)}, f"mlp: widths {SIZES} (64, 0)"),
        ("mlp", {"widths": (64, "a")}, f"mlp: widths {SIZES} (64, 'a')"),
        ("amoebanet", {"layers": 0}, "amoebanet: layers must be a multiple of 3, 3 or more, not 0"),
        ("amoebanet", {"layers": 19}, "amoebanet: layers must be a multiple of 3, 3 or more, not 19"),
        ("amoebanet", {"layers": True}, "amoebanet: layers must be a multiple of 3, 3 or more, not True"),
        ("amoebanet", {"filters": 12}, "amoebanet: filters must be a multiple of 8, 8 or more, not 12"),
        (
            "amoebanet",
            {"image_size": 32},
            "amoebanet: image_size must be a multiple of 32, 64 or more, not 32",
        ),
        ("amoebanet", {"pooling": "min"}, "amoebanet: pooling must be 'max' or 'average', not 'min'"),
        ("resnet", {"blocks": (3, 0)}, f"resnet: blocks {SIZES} (3, 0)"),
        (
            "resnet",
            {"blocks": (1, 1), "image_size": 8},
            f"resnet: image_size=8 {PIXELS} 2 {BATCH_NORM} 9 or more",
        ),
        ("resnet101", {"image_size": 32}, f"resnet101: image_size=32 {PIXELS} 4 {BATCH_NORM} 33 or more"),
        ("unet", {"width": 5}, "unet: width must be a multiple of 2, 2 or more, not 5"),
        (
            "unet",
            {"image_size": 200},
            f"unet: image_size=200 {HALVED % 5} a multiple of 32 such as 192 or 224",
        ),
        ("unet", {"image_size": 32}, f"unet: image_size=32 {HALVED % 5} a multiple of 32 such as 64"),
        (
            "unet",
            {"image_size": 7, "depth": 1},
            f"unet: image_size=7 {HALVED % 1} a multiple of 2 such as 6 or 8",
        ),
    ],
)
def test_wrong_values_are_refused(name: str, settings: dict[str, Any], sentence: str) -> None:
    """An invalid value is refused in one sentence: model, setting, valid values, the given value."""
    with pytest.raises(UsageError) as refusal:
        models.build(name, **settings)
    assert str(refusal.value) == sentence


def test_a_direct_call_is_checked_too() -> None:
    """Calling a model's own function gives the same refusals as `build`, in the same words."""
    with pytest.raises(UsageError, match="gpt: layers must be a whole number, 1 to 10,000, not 0"):
        models.gpt(layers=0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt", {"dropout": 0}),
        ("gpt", {"lr": 1}),
        ("gpt", {"lr": None}),
        ("gpt", {"intermediate": None}),
        ("mlp", {"widths": (1,)}),
        ("vgg11", {"image_size": 32}),
        ("amoebanet", {"layers": 3, "filters": 8, "image_size": 64}),
        ("resnet", {"blocks": (1,), "image_size": 5}),
        ("unet", {"depth": 1, "width": 2, "convolutions": 1, "image_size": 4}),
    ],
)
def test_values_at_the_edge_are_accepted(name: str, settings: dict[str, Any]) -> None:
    """The smallest sizes, whole numbers for shares and rates, and None as a default are accepted."""
    assert models.build(name, **settings).name == name
