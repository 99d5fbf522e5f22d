"""The ablation of the joint planner: compared variants, and its rows about activations at the host."""

from __future__ import annotations

import re

import pytest

import bench_ablation
from bench_ablation import WAYS
from bench_mpress import Row


def row(way: str, speed: float, model: str) -> Row:
    return Row(
        machine="dgx1-v100", model=model, microbatches=32, way=way, planning_seconds=1.0, step_seconds=100 / speed,
        samples_per_second=speed,
    )  # fmt: skip


def test_every_way_leaves_out_one_thing() -> None:
    """Each variant of joint allows all techniques but one, except the variants with all and with none."""
    all_of_it = WAYS["all"].means
    for name, (planner, means) in WAYS.items():
        fields = ("recompute", "host", "peers", "mapping", "striping", "ahead")
        differs = sum(getattr(means, field) != getattr(all_of_it, field) for field in fields)
        assert planner == "mpress" or differs == {"all": 0, "nothing at all": 3}.get(name, 1)


def test_the_table_has_a_column_for_each_model() -> None:
    """The table has a row for each variant too; missing results are empty."""
    rows = [row("all", 2.0, "one"), row("no host", 1.5, "one"), row("all", 4.0, "other")]
    lines = bench_ablation.table(rows).splitlines()
    assert lines[0] == "| allowed | one | other |"
    assert "| all | 2.00 | 4.00 |" in lines and "| no host | 1.50 |  |" in lines


@pytest.mark.gallery
def test_the_longest_lived_half_is_more_than_half_of_the_activations() -> None:
    """More stages leave fewer activations on the devices, at no cost while copies are shorter than passes."""
    left = []
    for stages in (8, 16):
        found = re.fullmatch(
            r".* (\d+)% of the activations are left, 0.0% longer", bench_ablation.longest_half(stages)
        )
        assert found is not None
        left.append(int(found[1]))
    assert 25 < left[1] < 50 < left[0] < 75
