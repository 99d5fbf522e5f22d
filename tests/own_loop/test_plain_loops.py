"""`apply` in plain loops: the budget is kept, peaks equal the allocator's events, and numbers do not change."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from scipy.optimize import OptimizeResult, milp
from torch.utils.checkpoint import checkpoint

from pipefit.errors import InfeasibleError
from pipefit.own_loop import Handle, apply, choice
from support.gallery_samples import sampled
from support.own_loop_models import MODELS, Model
from support.own_loop_oracle import Trained, train

BY_NAME = {model.name: model for model in MODELS}
PARTS = (1.0, 0.85, 0.7, 0.55)
CASES = [(name, part, offload) for name in BY_NAME for part in PARTS for offload in (True, False)]
OFTEN = {
    ("language, dropout", 0.7, True),
    ("keywords and own loss", 0.7, True),
    ("batch norm", 0.7, False),
    ("u-net", 0.85, True),
    ("buffers in use", 0.85, False),
    ("siamese", 0.7, True),
    ("gru", 0.7, True),
}


def trained(model: Model, budget: int | None, *, offload: bool = True) -> tuple[Trained, Handle | None]:
    """Train a model with and without a plan."""
    torch.manual_seed(0)
    module = model.build()
    optimizer = model.optimizer(module.parameters())
    handle = None
    if budget is not None:
        torch.manual_seed(3)
        handle = apply(
            module, budget=budget, batch=model.batch(), optimizer=optimizer, loss=model.loss, offload=offload
        )
    return train(model, module, optimizer), handle


@pytest.mark.sample(1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("name", "part", "offload"), sampled(CASES, OFTEN))
def test_the_budget_is_kept_to_the_byte(name: str, part: float, offload: bool) -> None:
    """Certified peaks of the first and of later steps equal the allocator's events and are within the budget;
    losses, parameters and buffers are bitwise those of the plain loop. A budget is refused only with a least
    peak above it.
    """
    model = BY_NAME[name]
    plain, _ = trained(model, None)
    budget = int(max(plain.peaks) * part)
    try:
        planned, handle = trained(model, budget, offload=offload)
    except InfeasibleError as error:
        assert error.found["least_bytes"] > budget  # noqa: PT017
        return
    assert handle is not None
    allocated = planned.peaks[0], max(planned.peaks[1:])
    if model.above:
        assert all(have >= has for have, has in zip(handle.plan.peak_bytes, allocated, strict=True))
    else:
        assert handle.plan.peak_bytes == allocated
    assert max(planned.peaks) <= budget
    assert planned.equals(plain)
    assert bool(handle.plan.decisions) == (max(handle.plan.plain_bytes) > budget)


@pytest.mark.usefixtures("one_thread")
def test_the_least_peak_is_not_above_checkpointed_blocks() -> None:
    """Without offloading, a budget that checkpointing of every block keeps is kept too."""
    model = BY_NAME["language"]
    torch.manual_seed(0)
    module = model.build()
    for block in module.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    by_hand = train(model, module, model.optimizer(module.parameters()))
    planned, handle = trained(model, max(by_hand.peaks), offload=False)
    assert handle is not None
    assert max(planned.peaks) <= max(by_hand.peaks)
    assert planned.losses == by_hand.losses


@pytest.mark.usefixtures("one_thread")
def test_a_search_that_ends_early_makes_no_needless_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision of a poor solution that the time limit leaves is needed: without it, the budget is not kept."""

    def dearest(costs: Any, **options: Any) -> OptimizeResult:
        return OptimizeResult(milp(-costs, **options), status=1)

    model = BY_NAME["language"]
    plain, _ = trained(model, None)
    budget = int(max(plain.peaks) * 0.7)
    monkeypatch.setattr(choice, "milp", dearest)
    _, handle = trained(model, budget)
    assert handle is not None
    decisions = handle.plan.decisions
    assert decisions
    for left_out in decisions:
        fewer = replace(handle.plan, decisions=tuple(one for one in decisions if one != left_out))
        torch.manual_seed(0)
        module = model.build()
        apply(module, plan=fewer)
        assert max(train(model, module, model.optimizer(module.parameters())).peaks) > budget
