"""Image classifiers of the published rows, built by timm, in the release of the month of its own measurements.

A model on one GPU is one layer, so the code of its authors runs, not a graph of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import torch
from rows import Inexpressible
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit import Task, chain

INSTALL = "python -m pip install --no-deps timm==0.6.7"
# timm imports these for its data sets; PyPI has no torchvision for CPU builds of torch
_UNUSED = (
    "torchvision", "torchvision.datasets", "torchvision.models", "torchvision.models.feature_extraction",
    "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms", "torchvision.transforms.functional",
)  # fmt: skip


@cache
def timm() -> Any:
    """Return the library, imported without torchvision.

    Raises:
        Inexpressible: it is not installed.
    """
    stand_ins = {name: MagicMock() for name in _UNUSED if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        return import_module("timm")
    except ImportError as error:
        raise Inexpressible(f"timm is missing: {INSTALL}") from error
    finally:
        for name in stand_ins:
            del sys.modules[name]


def named(model: str) -> str:
    """Return timm's name of an image classifier.

    Raises:
        Inexpressible: timm is not installed, or lacks the model.
    """
    name = model.replace("-", "_").replace("se_resnext", "seresnext").replace("resnet_", "resnet")
    if not timm().is_model(name):
        raise Inexpressible("the architecture is not among those of timm")
    return name


def build(name: str, form: torch.memory_format, *, staged: bool = False) -> nn.Module:
    """Return an image classifier: a chain of one layer, or a module that stages divide."""
    model = timm().create_model(name).to(memory_format=form)
    return model if staged else chain([model])


def batch(size: int, *, side: int, form: torch.memory_format) -> tuple[Tensor, Tensor]:
    """Return random images and classes."""
    return torch.randn(size, 3, side, side).contiguous(memory_format=form), torch.randint(1000, (size,))


def task(name: str, notes: str, optimizer: Callable[..., torch.optim.Optimizer], *, staged: bool) -> Task:
    """Return the task of a classifier by timm's name; `notes` say the side of images and the memory format."""
    side = re.search(rf"{name[-2:]}: (\d+)", notes) or re.search(
        r"images of (\d+)", notes
    )  # of one size, of all
    form = torch.channels_last if "nhwc" in notes else torch.contiguous_format
    return Task(
        partial(build, name, form, staged=staged),
        batch=partial(batch, side=int(side[1]) if side else 224, form=form),
        loss=F.cross_entropy,
        optimizer=optimizer,
        name=name,
    )
