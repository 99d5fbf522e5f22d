"""Devices of many budgets: the search distinguishes budgets as far as it can, and its plan fits."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest

from pipefit.planner import Question, plan
from pipefit.planner.hybrid.programme import States, states_of
from pipefit.planner.hybrid.search import Sizes, few_classes
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from support.gallery_samples import sampled
from support.microbatch_size_profiles import sized
from support.synthetic_models import AMPLE, devices, plain

HOW = Training(batch_size=16, microbatches=4)


def costs(seed: int, layers: int) -> ModelProfile:
    """Build some layers in microbatches of four samples; replicas may divide two layers."""
    return sized(plain(Random(seed), layers), 4, 2)


def question(*sizes: int) -> Question:
    """Build a question of six layers on devices of these sizes."""
    return Question(profile=costs(0, 6), cluster=devices(*sizes), training=HOW)


@pytest.mark.parametrize("seed", range(20))
def test_states_are_those_that_devices_can_be_found_for(seed: int) -> None:
    """States are the whole product restricted by Hall's condition, in product order, and counted without a
    list.
    """
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 5, draw.integers(1, 5)).tolist()
    there = [sum(sizes[number:]) for number in range(len(sizes))]
    asked = [
        one
        for one in product(*(range(most + 1) for most in there))
        if all(sum(one[number:]) <= most for number, most in enumerate(there))
    ]
    states = States(sizes)
    assert states_of(sizes) == states.count == len(asked)
    assert states.used.tolist() == list(map(sum, asked))


def test_classes_that_differ_least_become_one_with_what_the_smallest_has() -> None:
    """Budgets of 10, 11, 30 and 31 bytes become three classes, then two, each with its smallest budget."""
    asked = question(31, 10, 30, 11)

    def upto(most: int) -> tuple[list[tuple[int, tuple[int, ...]]], float]:
        def may(sizes: Sizes) -> bool:
            return len(sizes) <= most

        found = few_classes(asked, may, may)
        return [(one.memory_bytes, one.devices) for one in found.classes], found.kept

    assert upto(4) == ([(31, (0,)), (10, (1,)), (30, (2,)), (11, (3,))], 1.0)
    assert upto(3) == ([(30, (0, 2)), (10, (1,)), (11, (3,))], 30 / 31)
    assert upto(2) == ([(30, (0, 2)), (10, (1, 3))], 10 / 11)


def test_what_is_cheap_is_not_bought_with_more_than_a_slight_part_of_a_budget() -> None:
    """Budgets that differ by three per cent become one class, those that differ by half stay apart."""
    found = few_classes(question(60, 60, 31, 31, 30, 30), lambda sizes: len(sizes) == 1, lambda _: True)
    assert [one.devices for one in found.classes] == [(0, 1), (2, 3, 4, 5)]


@pytest.mark.parametrize("planner", sampled(["joint", "exact"], often=["exact"]))
def test_twenty_devices_of_as_many_budgets_have_a_plan_that_fits(planner: str) -> None:
    """Twenty devices of twenty budgets have a plan that fits; its peak is between its bound and that of
    devices with the smallest budget.
    """
    profile, most = costs(3, 20), 20
    low = max(plan(profile, devices(*[AMPLE] * most), training=HOW, planner="exact").prediction.peak_bytes)
    budgets = [2 * low + low * number // 30 for number in range(most)]
    found = plan(profile, devices(*budgets), training=HOW, planner=planner)
    assert all(taken <= budget for taken, budget in zip(found.prediction.peak_bytes, budgets, strict=True))
    if planner == "exact":
        assert 0 < found.provenance.bound <= found.provenance.value <= low / budgets[0]
