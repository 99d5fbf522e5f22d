"""The cost rules against the paper's table of six tensors, and against what they promise for any tensor."""

from __future__ import annotations

from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.planner.techniques import Technique, TensorCosts, joint_choice, mpress_choice

# MB, and in ms: live interval, recomputation, round trips to the host and over four lanes of NVLink; the choice
PAPER = {
    "t1": (216, 78, 4, 42, 6, "host"),
    "t2": (115, 16, 3, 22, 3, "peers"),
    "t3": (216, 2, 4, 42, 6, "recompute"),
    "t4": (384, 214, 8, 74, 9, "host"),
    "t5": (384, 50, 8, 74, 9, "peers"),
    "t6": (1152, 12, 14, 222, 27, "recompute"),
}


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("rule", [mpress_choice, joint_choice])
def test_both_rules_choose_as_the_paper_does(name: str, rule) -> None:
    """For each tensor of the paper's table, from its times in milliseconds."""
    megabytes, interval, recompute, host, peer, choice = PAPER[name]
    costs = TensorCosts(
        nbytes=megabytes * 10**6,
        interval_seconds=interval / 1e3,
        recompute_seconds=recompute / 1e3,
        host_seconds=host / 1e3,
        peer_seconds=peer / 1e3,
    )
    assert rule(costs) == choice


@pytest.mark.parametrize("name", PAPER)
def test_the_rates_of_the_machine_give_the_same_choices(name: str) -> None:
    """Round trips at 10.4 GB/s to the host and 80 GB/s to peers, as the table's bytes and times say they are."""
    megabytes, interval, recompute, _, _, choice = PAPER[name]
    round_trip = 2 * megabytes * 1e6
    costs = TensorCosts(
        nbytes=megabytes * 10**6,
        interval_seconds=interval / 1e3,
        recompute_seconds=recompute / 1e3,
        host_seconds=round_trip / 10.4e9,
        peer_seconds=round_trip / 80e9,
    )
    assert joint_choice(costs, worth_seconds=1e-3) == choice


@pytest.mark.parametrize("seed", range(50))
def test_joint_never_adds_more_than_any_technique(seed: int) -> None:
    """Whatever is to be had, nothing else adds less."""
    rng = Random(seed)
    seconds = [rng.choice((None, rng.randrange(10))) for _ in range(3)]
    seconds = seconds if any(s is not None for s in seconds) else [1, None, None]
    interval = rng.randrange(10)
    costs = TensorCosts(
        nbytes=1, interval_seconds=interval, recompute_seconds=seconds[0], host_seconds=seconds[1],
        peer_seconds=seconds[2],
    )  # fmt: skip
    by_hand = {"recompute": seconds[0]} | {
        name: None if s is None else max(0, s - interval) for name, s in (("host", seconds[1]), ("peers", seconds[2]))
    }
    added = by_hand[joint_choice(costs).value]
    assert added is not None and added == min(s for s in by_hand.values() if s is not None)


def test_peers_are_not_taken_for_a_gain_that_is_not_worth_their_memory() -> None:
    """Half a millisecond fewer is no reason if a millisecond is asked for."""
    costs = TensorCosts(nbytes=1, interval_seconds=0.0, recompute_seconds=0.004, peer_seconds=0.0035)
    assert joint_choice(costs) is Technique.PEER
    assert joint_choice(costs, worth_seconds=0.001) is Technique.RECOMPUTE


def test_a_tensor_without_a_technique_is_refused() -> None:
    """There is nothing to choose, and a time below zero is no time."""
    with pytest.raises(UsageError, match="no technique"):
        joint_choice(TensorCosts(nbytes=1, interval_seconds=1.0))
    with pytest.raises(UsageError, match="zero or more"):
        TensorCosts(nbytes=1, interval_seconds=1.0, host_seconds=-1.0)
