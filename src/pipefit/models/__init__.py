"""Reference models by name, as tasks ready to profile or to train.

Example: `build("gpt", layers=4, hidden=128, heads=4)`.

Each model is a chain of named layers with generated data that it can learn, a loss and an optimizer.
Describing a model allocates nothing: its weights are created when the task's module is built, on the current
device or fake mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.models.amoebanet import amoebanet
from pipefit.models.bert import bert, mpress_bert
from pipefit.models.gpt import gpt, gpt_stdlib, mpress_gpt
from pipefit.models.mlp import mlp
from pipefit.models.resnet import resnet, resnet101
from pipefit.models.unet import unet
from pipefit.models.vgg import vgg11
from pipefit.texts import unknown

__all__ = [
    "MODELS", "amoebanet", "bert", "build", "gpt", "gpt_stdlib", "mlp", "mpress_bert", "mpress_gpt", "resnet",
    "resnet101", "unet", "vgg11",
]  # fmt: skip

MODELS: dict[str, Callable[..., Task]] = {
    "amoebanet": amoebanet,
    "bert": bert,
    "gpt": gpt,
    "gpt-stdlib": gpt_stdlib,
    "mlp": mlp,
    "mpress-bert": mpress_bert,
    "mpress-gpt": mpress_gpt,
    "resnet": resnet,
    "resnet101": resnet101,
    "unet": unet,
    "vgg11": vgg11,
}


def build(name: str, **settings: Any) -> Task:
    """Return the model of this name with these settings; the others keep their defaults.

    Raises:
        UsageError: no such model, no such setting, or an invalid value.
    """
    return factory(name)(**settings)


def factory(name: str) -> Callable[..., Task]:
    """Return the function that describes the model of this name.

    Raises:
        UsageError: no such model.
    """
    if name not in MODELS:
        raise UsageError(unknown(f"{name!r} is not a model of the zoo", name, sorted(MODELS)))
    return MODELS[name]
