"""Settings of models: types that carry their rule; optimizers, generated data and losses.

A model's factory is an ordinary function of keyword parameters. Their annotations (`Size`, `Share`, a
`Literal`) state the allowed values, to mypy and to `checked`, which refuses a wrong value in one sentence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from math import inf
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from pipefit.errors import UsageError
from pipefit.texts import meant, shortened

# ---- Optimizers of the zoo's models, by name and learning rate
#
# Per float32 parameter, AdamW and Adam keep 8 bytes of state and SGD with momentum keeps 4.

OptimizerName = Literal["adamw", "adam", "sgd"]


def optimizer_of(
    name: OptimizerName, lr: float | None, *, sgd_rate: float = 0.03, sgd_decay: float = 0.0
) -> Callable[..., optim.Optimizer]:
    """Return a function from parameters, or parameter groups, to the optimizer.

    `lr` None means the usual rate: 3e-4 for AdamW and Adam, the model's own `sgd_rate` for SGD, whose
    momentum is 0.9 and whose weight decay is the model's own `sgd_decay`.
    """
    match name:
        case "adamw":
            return partial(optim.AdamW, lr=lr or 3e-4)
        case "adam":
            return partial(optim.Adam, lr=lr or 3e-4)
        case "sgd":
            return partial(optim.SGD, lr=lr or sgd_rate, momentum=0.9, weight_decay=sgd_decay)


# ---- Classifiers of images and of pixels: generated inputs whose class can be learned, weights, and the loss
#
# The mean of an input, or the brightness around a pixel, indicates its class, so a model that trains on them
# visibly learns.


def noise_batch(size: int, *, shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    """Return `size` inputs of `shape` (default float type) and their classes (int64).

    Inputs are brighter the higher their class.
    """
    targets = torch.randint(classes, (size,))
    return torch.randn(size, *shape) + _brightness(targets, classes).reshape(
        size, *(1 for _ in shape)
    ), targets


def patched_batch(size: int, *, channels: int, side: int, patch: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return `size` square images of patches of random classes, and each pixel's class (int64).

    Patches are brighter the higher their class.

    The images are (size, channels, side, side) in the default float type, the classes (size, side, side).
    `patch`, the side of a patch, divides `side`.
    """
    count = side // patch
    patches = torch.randint(classes, (size, count, 1, count, 1))
    targets = patches.expand(size, count, patch, count, patch).reshape(size, side, side)
    return torch.randn(size, channels, side, side) + _brightness(targets, classes)[:, None], targets


def _brightness(targets: Tensor, classes: int) -> Tensor:
    """Map classes to even steps from above -1 for the first to below 1 for the last."""
    return 2 * (targets + 0.5) / classes - 1


def class_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits (batch, classes, ...), in float32 also for a model in half
    precision.
    """
    return F.cross_entropy(output.float(), targets)


def initialise(layer: nn.Module) -> None:
    """Initialise weights before a ReLU as He et al. (2015), and biases to zero.

    Any width then trains, also without batch norm.
    """
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(layer, nn.Linear):
        nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
    if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


# ---- Rules of settings

Parameters = ParamSpec("Parameters")
Described = TypeVar("Described")


@dataclass(frozen=True, slots=True)
class Rule:
    """The allowed values of a setting: a test, and the words that follow "must be"."""

    accepts: Callable[[object], bool]
    words: str


class Setting(NamedTuple):
    """One setting of a model: its default, and the words that follow "must be"; empty without a known
    rule.
    """

    name: str
    default: object
    words: str


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value < high


def at_least(least: int) -> Rule:
    """Return the rule of whole numbers of `least` or more."""
    return Rule(lambda value: _is_whole(value, least), f"a whole number, {least} or more")


def from_to(least: int, most: int) -> Rule:
    """Return the rule of whole numbers from `least` to `most`."""
    return Rule(
        lambda value: isinstance(value, int) and _is_whole(value, least) and value <= most,
        f"a whole number, {least} to {most:,}",
    )


def multiple_of(step: int, *, least: int) -> Rule:
    """Return the rule of multiples of `step`, `least` or more."""
    return Rule(
        lambda value: isinstance(value, int) and _is_whole(value, least) and value % step == 0,
        f"a multiple of {step}, {least} or more",
    )


Size = Annotated[int, at_least(1)]
Depth = Annotated[int, from_to(1, 10_000)]  # layers; more would take minutes to build
Sizes = Annotated[
    tuple[int, ...],
    Rule(
        lambda value: (
            isinstance(value, tuple) and len(value) > 0 and all(_is_whole(size, 1) for size in value)
        ),
        "a tuple of whole numbers, each 1 or more, such as (64, 32)",
    ),
]
Share = Annotated[float, Rule(lambda value: _is_number(value, 0, 1), "a number from 0 to below 1")]
Rate = Annotated[
    float, Rule(lambda value: value != 0 and _is_number(value, 0, inf), "a finite number above 0")
]


def rule_of(hint: Any) -> Rule:
    """Return an annotation's rule.

    An annotated type has its own; literals, flags and unions with None have derived rules.

    Raises:
        TypeError: the annotation carries no rule, a mistake in the factory.
    """
    if get_origin(hint) is Annotated:
        return next(item for item in hint.__metadata__ if isinstance(item, Rule))
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return Rule(
            lambda value: isinstance(value, str) and value in choices, " or ".join(map(repr, choices))
        )
    if hint is bool:
        return Rule(lambda value: isinstance(value, bool), "True or False")
    if get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
        (other,) = (rule_of(part) for part in get_args(hint) if part is not NoneType)
        return Rule(lambda value: value is None or other.accepts(value), f"{other.words}, or None")
    raise TypeError(f"settings of type {hint} are not supported")


def describe(factory: Callable[..., object]) -> str:
    """Format the settings of a model with their defaults: `layers=12, hidden=768, ...`."""
    return ", ".join(
        f"{item.name}={item.default!r}" for item in inspect.signature(factory).parameters.values()
    )


def settings_of(factory: Callable[..., object]) -> tuple[Setting, ...]:
    """Return the settings of a factory that have a default, in its order; without rules for a foreign
    factory.
    """
    hints = get_type_hints(factory, include_extras=True) if hasattr(factory, "__wrapped__") else {}
    return tuple(
        Setting(item.name, item.default, rule_of(hints[item.name]).words if item.name in hints else "")
        for item in inspect.signature(factory).parameters.values()
        if item.default is not item.empty
    )


def checked(factory: Callable[Parameters, Described]) -> Callable[Parameters, Described]:
    """Wrap a factory so that unknown settings and wrong values are refused first.

    Raises:
        UsageError: from each call of the result; names the model, the setting, the value and the rule.
    """
    hints = get_type_hints(factory, include_extras=True)
    rules = {name: rule_of(hints[name]) for name in inspect.signature(factory).parameters}

    @wraps(factory)
    def describe_model(*args: Parameters.args, **settings: Parameters.kwargs) -> Described:
        for name, value in settings.items():
            if name not in rules:
                near = meant(name, rules)
                guess = f"{near} It" if near else "it"
                raise UsageError(
                    f"{factory.__name__} does not have a setting {name!r}: {guess} has {describe(factory)}"
                )
            if not rules[name].accepts(value):
                raise UsageError(
                    f"{factory.__name__}: {name} must be {rules[name].words}, not {shortened(repr(value))}"
                )
        return factory(*args, **settings)

    return describe_model


def check_heads(model: str, hidden: int, heads: int) -> None:
    """Check that the hidden size divides equally among the attention heads.

    Raises:
        UsageError: it does not; names the nearest sizes that do.
    """
    if hidden % heads:
        fewer = next(count for count in range(min(heads, hidden), 0, -1) if hidden % count == 0)
        wider = (hidden // heads + 1) * heads
        raise UsageError(
            f"{model}: hidden={hidden} is not divisible by heads={heads}: try heads={fewer} or hidden={wider}"
        )
