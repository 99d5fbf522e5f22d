"""The benchmark of searches on small questions: the relations of its table at full size."""

from __future__ import annotations

import sys
from itertools import pairwise
from math import comb

import pytest

import bench_search
from bench_search import (
    SEARCHES,
    SIZES,
    Answer,
    Case,
    Row,
    cases,
    chain_case,
    compared,
    line,
    searched,
    summarise,
)
from pipefit.planner import bayesian
from support.gallery_samples import sampled, seeds

KINDS = ("random", "skewed", "alike", "heavy")


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one run of each search, and a dozen evaluations in place of 75."""
    monkeypatch.setattr(bench_search, "REPEATS", 1)
    monkeypatch.setattr(sys.modules[bayesian.__module__], "EVALUATIONS", 12)


def rows(case: Case, *skip: str) -> dict[str, Row]:
    """Return the rows by search."""
    return {row.search: row for row in compared(case, skip)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(2, of=4))
def test_exact_has_the_peaks_of_brute_force_and_none_has_less(kind: str, schedule: str, seed: int) -> None:
    """On every kind of chain `exact` and `best_split` find the optimum of all splits, bisection at least that
    peak.
    """
    found = rows(chain_case(kind, 11, 4, seed, schedule=schedule), "bayesian")
    best = found["exhaustive"]
    assert best.looked_at == comb(10, 3)
    for search in ("exact", "best_split"):
        assert (found[search].peak_bytes, found[search].over_optimum, found[search].all_as_low) == (
            best.peak_bytes, 1.0, True,
        )  # fmt: skip
    assert best.peak_bytes is not None and found["bisection"].peak_bytes is not None
    assert found["bisection"].peak_bytes >= best.peak_bytes


@pytest.mark.parametrize("search", sampled(SEARCHES, often=[one for one in SEARCHES if one != "bayesian"]))
def test_every_search_places_every_layer(search: str) -> None:
    """Every search has stages from the first layer to the last, none empty, one for each device."""
    if search == "bayesian":
        pytest.importorskip("skopt")
    edges = searched(chain_case("random", 12, 4, 0), search).edges
    assert (edges[0], edges[-1], len(edges)) == (0, 12, 5)
    assert all(start < stop for start, stop in pairwise(edges))


@pytest.mark.gallery
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", sampled(KINDS, often=("random", "heavy")))
def test_bayesian_optimisation_has_no_less_than_exact(kind: str) -> None:
    """A dozen evaluations never beat exact, on every kind of chain."""
    pytest.importorskip("skopt")
    found = rows(chain_case(kind, 16, 4, 0))["bayesian"]
    assert found.over_optimum is not None and found.over_optimum >= 1
    assert found.looked_at is not None and found.looked_at <= 12


@pytest.mark.gallery
def test_greedy_filling_misses_the_optimum_where_layers_differ_by_orders_of_magnitude() -> None:
    """Greedy filling misses the optimum in at least one skewed chain, which `exact` solves as brute force
    does.
    """
    found = [rows(chain_case("skewed", 20, 4, seed), "bayesian", "best_split") for seed in range(4, 8)]
    assert all(row["exact"].peak_bytes == row["exhaustive"].peak_bytes for row in found)
    assert any(row["bisection"].peak_bytes > row["exhaustive"].peak_bytes for row in found)


def test_what_is_not_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped search has a reason: too many splits for brute force, with their number; excluded by option;
    not installed.
    """
    monkeypatch.setattr(bench_search, "find_spec", lambda name: None)
    found = rows(chain_case("alike", 64, 8, 0), "best_split")
    assert {search: row.why_not for search, row in found.items()} == {
        "exact": "",
        "exhaustive": f"{comb(63, 7):.1e} splits",
        "bisection": "",
        "bayesian": "scikit-optimize is not installed",
        "best_split": "left out",
    }
    assert f"{comb(63, 7):.1e} splits" in line(found["exhaustive"])
    assert {entry["search"] for entry in summarise(list(found.values()))} == {"exact", "bisection"}


def test_seconds_are_the_least_of_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of the search and of the whole call are separate minima."""
    answers = [Answer((0, 2), 3.0, 6.0, 5), Answer((0, 2), 1.0, 9.0, 5), Answer((0, 2), 2.0, 7.0, 5)]
    waiting = iter(answers)
    monkeypatch.setattr(bench_search, "REPEATS", 3)
    monkeypatch.setattr(bench_search, "by_planner", lambda case, planner: next(waiting))
    assert searched(chain_case("alike", 2, 1, 0), "exact") == Answer((0, 2), 1.0, 6.0, 5)


def test_the_summary_is_the_slowest_and_the_farthest_from_the_optimum() -> None:
    """The summary of three cases matches one by hand; sizes are kept apart."""

    def row(layers: int, seconds: float, over: float) -> Row:
        case = {"model": "m", "schedule": "1f1b", "layers": layers, "devices": 4, "search": "bisection"}
        return Row(**case, seconds=seconds, plan_seconds=seconds + 1, over_optimum=over, all_as_low=over == 1)

    first, second = summarise(
        [row(30, 0.5, 1.0), row(30, 0.25, 1.5), row(30, 0.125, 1.25), row(42, 2.0, 3.0)]
    )
    assert first == {
        "layers": 30, "devices": 4, "search": "bisection", "cases": 3, "slowest_search_seconds": 0.5,
        "slowest_plan_seconds": 1.5, "median_over_optimum": 1.25, "worst_over_optimum": 1.5, "all_as_low": 1,
    }  # fmt: skip
    assert (second["layers"], second["cases"], second["slowest_search_seconds"]) == (42, 1, 2.0)


def test_every_size_has_chains_of_every_kind() -> None:
    """Every size has chains of every kind, with its layers and devices."""
    layers, devices = SIZES[2]
    found = list(cases(layers, devices))
    assert {case.name.split()[0] for case in found} == set(KINDS)
    assert {(case.layers, case.devices) for case in found} == {(layers, devices)}
