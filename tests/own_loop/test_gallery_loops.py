"""`apply` in a plain loop of every model of the gallery, from the least budget to nearly everything kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import gallery
from gallery.model import Model as GalleryModel
from pipefit.errors import InfeasibleError
from pipefit.own_loop import Handle, apply
from support.gallery_samples import sampled
from support.own_loop_models import Model
from support.own_loop_oracle import Trained, train

OFTEN = ("graph convolutions",)
PARTS = (0.0, 1 / 3, 2 / 3, 1.0)  # of the way from the least peak to one byte less than the plain peak


def in_a_loop(model: GalleryModel) -> Model:
    """Return a model of the gallery with one batch, which every step gets a copy of."""
    torch.manual_seed(1)
    inputs, targets = model.batch(2 * model.size)
    if isinstance(inputs, tuple) and isinstance(model.module(), nn.Sequential):
        inputs = (inputs,)

    def batch() -> Any:
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (inputs, targets))

    return Model(name=model.name, build=model.module, batch=batch, loss=model.loss, optimizer=model.optimizer)


def trained(model: Model, module: nn.Module, budget: int | None) -> tuple[Trained, Handle | None]:
    """Train a copy of a module, with a plan if there is a budget."""
    module = copy.deepcopy(module)
    optimizer = model.optimizer([p for p in module.parameters() if p.requires_grad])
    handle = None
    if budget is not None:
        handle = apply(module, budget=budget, batch=model.batch(), optimizer=optimizer, loss=model.loss)
    return train(model, module, optimizer), handle


def least_peak(model: Model, module: nn.Module) -> int:
    """Return the least peak that `apply` names."""
    with pytest.raises(InfeasibleError) as error:
        trained(model, module, 1)
    return int(error.value.found["least_bytes"])


@pytest.mark.gallery
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", sampled(gallery.MODELS, often=OFTEN))
def test_four_budgets_of_a_model(name: str) -> None:
    """Every budget from the least peak on is kept: certified peaks are those of the allocator's events, and
    losses, parameters and buffers are bitwise those of the loop without a plan.

    Models of the gallery that are `metered` may have certified peaks above the allocator's.
    """
    model = in_a_loop(gallery.MODELS[name])
    torch.manual_seed(0)
    module = model.build()
    plain, _ = trained(model, module, None)
    kept, handle = trained(model, module, 1 << 40)
    assert handle is not None
    assert kept.equals(plain)
    least, most = least_peak(model, module), max(handle.plan.plain_bytes) - 1
    for budget in sorted({max(least, least + int((most - least) * part)) for part in PARTS}):
        planned, handle = trained(model, module, budget)
        assert handle is not None
        certified, peaks = handle.plan.peak_bytes, (planned.peaks[0], max(planned.peaks[1:]))
        above = [a - b for a, b in zip(certified, peaks, strict=True)]
        assert min(above) >= 0 if gallery.MODELS[name].metered else above == [0, 0], budget
        assert max(certified) <= budget
        assert planned.equals(plain)
