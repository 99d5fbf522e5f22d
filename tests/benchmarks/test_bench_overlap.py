"""The benchmark of copies alongside computing: its plans, and its comparison of two orders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlap_plans as plans
from bench_overlap import Row, agreement, row
from pipefit.lowering import lower
from pipefit.schema.actions import Kind
from pipefit.schema.plan import Plan
from pipefit.simulator import simulate


@pytest.fixture(scope="module")
def still() -> Plan:
    """Train the plan without decisions; its layers hardly sleep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "PAUSE", 1e-4)
        return plans.make_plan("sleeping")


def rows(figures: list[tuple[float, float]]) -> list[Row]:
    """Build rows of plans with these predictions and measurements."""
    return [
        Row(
            name=str(number), schedule="gpipe", microbatches=1, decisions=(), predicted_seconds=predicted,
            seconds=measured, quartile_seconds=(measured, measured),
        )
        for number, (predicted, measured) in enumerate(figures)
    ]  # fmt: skip


FIGURES = st.lists(
    st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)),
    min_size=2,
    max_size=9,
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
)


@given(FIGURES)
def test_the_agreement_of_all_pairs_is_kendalls_tau(figures: list[tuple[float, float]]) -> None:
    """Without ties the agreement is Kendall's tau, as scipy computes it."""
    from scipy.stats import kendalltau  # a second, in every process that collects tests

    found = agreement(rows(figures), 0.0)
    assert found.tau == pytest.approx(kendalltau(*zip(*figures, strict=True)).statistic)
    assert found.pairs == len(figures) * (len(figures) - 1) // 2


def test_pairs_within_the_noise_do_not_count() -> None:
    """The first two of three plans are predicted 2 % apart, and measured in the other order."""
    found = agreement(rows([(1.0, 1.1), (1.02, 1.0), (2.0, 3.0)]), 0.03)
    assert (found.pairs, found.in_order) == (2, 2)
    assert agreement(rows([(1.0, 1.1), (1.02, 1.0), (2.0, 3.0)]), 0.01).in_order == 2


def test_unsteady_plans_raise_the_noise(still: Plan) -> None:
    """Quartiles a tenth of the median apart raise the noise: pairs count from a fifth on."""
    unsteady = row("unsteady", still, [0.95, 0.95, 1.0, 1.05, 1.05])
    assert unsteady.spread == pytest.approx(0.1)
    assert agreement([unsteady, unsteady], 0.03).noise == pytest.approx(0.2)


def test_named_plans_free_the_same_storages(still: Plan) -> None:
    """Each named plan offloads or recomputes for every microbatch on both devices; alongside computing is
    predicted to cost less than at once, if a copy takes as long as a forward.
    """
    named = dict(plans.named_plans(still))
    for name, plan in named.items():
        kind = Kind.RECOMPUTE if name == "recompute" else Kind.OFFLOAD
        done = [[a for a in actions if a.kind is kind and not a.wait] for actions in lower(plan).actions]
        assert list(map(len, done)) == [0 if name == "keep" else plans.MICROBATCHES] * 2
    seconds = {name: simulate(plan).step_seconds[1] for name, plan in named.items()}
    for place in ("host", "peer"):
        assert seconds["keep"] <= seconds[f"{place}, beside computing"] < seconds[f"{place}, at once"]


def test_random_plans_are_of_all_kinds(still: Plan) -> None:
    """Random plans have every schedule, decisions of both kinds, and are deterministic."""
    made = [plan for _, plan in plans.random_plans(still, 24)]
    assert {plan.training.schedule for plan in made} == set(plans.SCHEDULES)
    assert len({decision.what for plan in made for decision in plan.decisions}) == 2
    assert made == [plan for _, plan in plans.random_plans(still, 24)]
