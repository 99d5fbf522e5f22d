"""Models of all kinds, trained by random plans with and without recomputation, train as a plain loop does,
and need the predicted memory.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from gallery import COMPARED, FAMILIES, MODELS, SAMPLE
from gallery.page import PAGE, counts_in, render
from gallery.plain import Step
from gallery.plain import train as train_plainly
from gallery.planned import SEED, Prepared, Run, prepared, trained
from pipefit.schema.plan import Plan
from support.gallery_samples import sampled
from support.random_trainings import Case, accounts

ROUNDED = {"rtol": 1e-4, "atol": 1e-6}
EXACT = {"rtol": 0.0, "atol": 0.0}


# All tests of one model run one after the other, so that it is profiled once.
of_every_model = pytest.mark.parametrize(
    "name",
    sampled(MODELS, often=SAMPLE),
    scope="module",
)


# Sums do not depend on the number of cores
pytestmark = pytest.mark.usefixtures("one_thread")


def differences(ours: Step, plain: Step, tolerance: dict[str, float]) -> list[str]:
    """Return the differences of one step; parameters are compared to the bit."""
    assert ours.gradients.keys() == plain.gradients.keys()
    assert ours.state.keys() == plain.state.keys()
    found = [f"losses {ours.losses} {plain.losses}"] if unlike(ours.losses, plain.losses, tolerance) else []
    for what, mine, theirs in (
        ("gradient", ours.gradients, plain.gradients),
        ("state", ours.state, plain.state),
    ):
        found += [
            f"{what} {name}"
            for name, tensor in theirs.items()
            if unlike(mine[name], tensor, EXACT if what == "state" and name in plain.gradients else tolerance)
        ]
    return found


def unlike(mine: Tensor | list[float], theirs: Tensor | list[float], tolerance: dict[str, float]) -> bool:
    """Return whether the two differ."""
    pair = [value if isinstance(value, Tensor) else torch.tensor(value) for value in (mine, theirs)]
    return not torch.allclose(*(value.double() for value in pair), **tolerance)


def plainly(found: Prepared, run: Run) -> list[Step]:
    """Return the plain loop's numbers on the same batches, with backwards in the order of the plan's
    schedule.

    Where the plan rounds gradients differently, updates use the plan's: Adam divides a gradient by its own size, so
    one of rounding alone, as that of the bias of attention's keys, changes its weight by a whole step.
    """
    model, plan = found.model, run.plan
    return train_plainly(
        copy.deepcopy(found.module),
        found.batches(plan),
        updating=[step.gradients for step in run.steps] if model.rounded else (),
        loss=model.loss,
        optimizer=model.optimizer,
        size=model.size,
        last_first=plan.training.schedule == "torchgpipe",
        draws=found.draws,
        seed=SEED,
    )


@pytest.mark.sample(1)
@of_every_model
def test_numbers_are_those_of_a_plain_loop(name: str) -> None:
    """Every loss, gradient, parameter and buffer in each of three steps is the plain loop's: to the bit,
    unless a model's gradients are summed in another order.
    """
    found = prepared(name)
    for run in trained(name):
        tolerance = ROUNDED if found.model.rounded else EXACT
        pairs = zip(run.steps, plainly(found, run), strict=True)
        wrong = [differences(*pair, tolerance) for pair in pairs]
        assert wrong == [[]] * 3, f"{describe(found, run.plan)}: {wrong}"


def describe(found: Prepared, plan: Plan) -> Case:
    """Describe the plan in words, with a trainable module."""
    return Case(name=found.model.name, settings={}, task=found.copied(), plan=plan)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sampled(MODELS, often=COMPARED), scope="module")
def test_peaks_are_those_of_the_allocator(name: str) -> None:
    """Simulator, dry run, meter and allocator agree on the peak of every device in every step, to the byte.
    If a model names a reason for higher ones, they are higher under one of its plans.
    """
    found, simulated, metered = prepared(name), set[int](), set[int]()
    for run in trained(name):
        case = describe(found, run.plan)
        for account in accounts(case):
            meter = run.trace.devices[account.device].step_peak_bytes(account.step)
            assert account.dry_run_bytes == meter, str(case)
            simulated.add(account.simulated_bytes - account.dry_run_bytes)
            metered.add(account.dry_run_difference)
    model = found.model
    seen = max(simulated) > 0, min(simulated) < 0, max(metered) > 0, min(metered) < 0
    named = bool(model.above), False, bool(model.metered), False
    assert seen == named, f"simulator {sorted(simulated)}, dry run {sorted(metered)}"


def test_the_page_shows_every_model() -> None:
    """docs/gallery.md matches the gallery's current output; see `gallery.page`."""
    text = PAGE.read_text()
    assert render(counts_in(text)) == text


@pytest.mark.sample(3)
@of_every_model
def test_the_page_counts_the_layers(name: str) -> None:
    """A model has the blocks and layers of the page."""
    found = prepared(name).profile
    assert counts_in(PAGE.read_text())[name] == (len(found.edges) - 1, len(found.layers))


def test_the_sample_has_a_model_of_every_family() -> None:
    """The sample trained in every run covers all families, in both forms."""
    chosen = [{model.name for model in models} & set(SAMPLE) for models in FAMILIES.values()]
    assert all(chosen) and len(MODELS) == sum(map(len, FAMILIES.values())) >= 60  # no two have one name
    assert len({isinstance(MODELS[name].module(), torch.nn.Sequential) for name in SAMPLE}) == 2
