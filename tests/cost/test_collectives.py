"""What a sum over devices sends, against a ring that is followed round by round."""

from __future__ import annotations

import pytest

from pipefit.cost.collectives import Hop, ring_sum
from pipefit.simulator import Simulation
from profiles_in_slices import gridded


@pytest.mark.parametrize("members", [[0, 1], [3, 1, 2], [0, 1, 2, 3, 4]])
def test_a_ring_sends_what_its_rounds_send(members: list[int]) -> None:
    """Every member has one part for each member, and hands one on in every round until all have all sums."""
    count, part = len(members), 60
    held = [[{(member, number)} for number in range(count)] for member in members]  # which addends each part has
    sent = [0] * count
    for turn in range(2 * (count - 1)):
        moving = [(n, (n - turn) % count) for n in range(count)]
        given = [set(held[n][number]) for n, number in moving]
        for (n, number), addends in zip(moving, given, strict=True):
            held[(n + 1) % count][number] |= addends
            sent[n] += part
    assert all(addends == {(m, k) for m in members} for own in held for k, addends in enumerate(own))
    following = [*members[1:], members[0]]
    assert ring_sum(members, count * part) == tuple(
        Hop(member, target, nbytes, 2 * (count - 1))
        for member, target, nbytes in zip(members, following, sent, strict=True)
    )


def test_a_sum_of_one_is_none() -> None:
    """Nobody sends anything."""
    assert ring_sum([4], 100) == ()


def test_a_step_ends_with_the_sum_of_its_gradients() -> None:
    """Layers take no time and messages none of their own: what is left is the ring, with the delay of each round."""
    rate, delay = 64.0, 0.5
    plan = gridded(3, samples=6, bytes_per_second=rate, latency_seconds=delay, seconds=0.0)
    gradients = sum(cost.gradient_bytes for cost in plan.measured(0).costs)
    share = 2 * 2 * gradients // 3
    assert gradients
    assert Simulation(plan, steps=1).step_seconds == (pytest.approx(share / rate + 4 * delay),)
