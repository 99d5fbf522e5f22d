"""Device mapping against all orders and all ways to lend, by linear programmes."""

from __future__ import annotations

from itertools import permutations
from random import Random
from time import process_time

import numpy as np
import pytest
from scipy.optimize import linprog

from pipefit.planner.mapping import copy_seconds, is_symmetric, mapped, peer_rates
from pipefit.schema.cluster import Cluster


def by_programme(order: tuple[int, ...], needs: list[int], spares: list[int], rates: np.ndarray) -> float:
    """Return the shortest longest copy of an order: a linear programme over the shares and the time."""
    pairs = [
        (a, b)
        for a, need in enumerate(needs)
        for b, spare in enumerate(spares)
        if need and spare and not needs[b] and rates[order[a], order[b]] > 0
    ]
    count = len(pairs) + 1
    equal, values, above, limits = [], [], [], []
    for a, need in enumerate(needs):
        if need:
            equal.append([float(pair[0] == a) for pair in pairs] + [0.0])
            values.append(need)
    for b, spare in enumerate(spares):
        above.append([float(pair[1] == b) for pair in pairs] + [0.0])
        limits.append(spare)
    for number, (a, b) in enumerate(pairs):
        above.append([float(number == n) for n in range(len(pairs))] + [-rates[order[a], order[b]]])
        limits.append(0.0)
    found = linprog(
        [0.0] * (count - 1) + [1.0],
        A_ub=above,
        b_ub=limits,
        A_eq=equal,
        b_eq=values,
        bounds=[(0, None)] * count,
    )
    return float(found.fun) if found.status == 0 else float("inf")


def random_links(rng: Random, count: int) -> np.ndarray:
    rates = np.zeros((count, count))
    for a in range(count):
        for b in range(a):
            rates[a, b] = rates[b, a] = rng.choice((0, 0, 1, 1, 2))
    return rates


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(25))
def test_the_mapping_is_the_best_of_all_orders_and_all_ways_to_lend(seed: int) -> None:
    """The mapping is optimal for four devices with random lanes, and stages that lack and have
    random bytes.
    """
    rng = Random(seed)
    rates, count = random_links(rng, 4), 4
    lacking = rng.sample(range(count), rng.randrange(1, 4))
    needs = [rng.randrange(1, 30) if n in lacking else 0 for n in range(count)]
    spares = [0 if n in lacking else rng.randrange(0, 60) for n in range(count)]
    best = min(by_programme(order, needs, spares, rates) for order in permutations(range(count)))
    assert mapped(needs, spares, rates).seconds == pytest.approx(best)


@pytest.mark.parametrize("seed", range(25))
def test_what_is_lent_is_there_and_in_time(seed: int) -> None:
    """Borrowers place all their bytes, lenders stay within theirs, and no copy exceeds the score."""
    rng = Random(seed)
    rates = random_links(rng, 5)
    needs = [rng.randrange(1, 1000), rng.randrange(1, 1000), 0, 0, 0]
    spares = [0, 0, *(rng.randrange(200, 2000) for _ in range(3))]
    found = mapped(needs, spares, rates)
    sent = [sum(n for (a, _), n in found.lent.items() if a == stage) for stage in range(5)]
    taken = [sum(n for (_, b), n in found.lent.items() if b == stage) for stage in range(5)]
    assert all(n <= spare for n, spare in zip(taken, spares, strict=True))
    if found.seconds == float("inf"):
        return
    assert sent == needs
    order = found.devices
    for (a, b), nbytes in found.lent.items():
        assert nbytes <= rates[order[a], order[b]] * found.seconds + 1


def test_eight_devices_take_less_than_a_second() -> None:
    """A DGX-1 with four stages that lack memory is mapped in under a second, and no order is better."""
    rates = peer_rates(Cluster.preset("dgx1-v100")) / 1e10
    needs, spares = [20, 14, 9, 3, 0, 0, 0, 0], [0, 0, 0, 0, 4, 10, 17, 24]
    began = process_time()
    found = mapped(needs, spares, rates)
    assert process_time() - began < 1.0
    rng = Random(0)
    some = np.array([rng.sample(range(8), 8) for _ in range(2000)])
    assert found.seconds <= copy_seconds(some, needs, spares, rates).min() * (1 + 1e-9)
    assert found.seconds == pytest.approx(by_programme(found.devices, needs, spares, rates))
    assert found.seconds < by_programme(tuple(range(8)), needs, spares, rates)


def test_links_that_are_all_alike_are_not_searched() -> None:
    """On a DGX-2 every mapping is equally good; stages stay in order."""
    rates = peer_rates(Cluster.preset("dgx2-a100"))
    assert is_symmetric(rates) and not is_symmetric(peer_rates(Cluster.preset("dgx1-v100")))
    found = mapped([5, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 9], rates)
    assert found.devices == tuple(range(8)) and found.lent == {(0, 7): 5}


def test_ten_devices_are_improved_by_swaps() -> None:
    """In a ring, the stage that lacks memory is mapped next to the stage with spare memory."""
    rates = np.zeros((10, 10))
    for n in range(10):
        rates[n, (n + 1) % 10] = rates[(n + 1) % 10, n] = 1.0
    found = mapped([8] + [0] * 9, [0] * 5 + [8] + [0] * 4, rates)
    assert found.seconds == pytest.approx(8.0)
    assert abs(found.devices[0] - found.devices[5]) in (1, 9)


def test_where_not_all_can_be_placed_the_order_is_good_for_a_part() -> None:
    """On a DGX-1 whose last devices have less than the first one lacks, some of them become
    its neighbours.
    """
    rates = peer_rates(Cluster.preset("dgx1-v100"))
    found = mapped([100, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 30, 30], rates)
    assert found.seconds == float("inf")
    assert found.lent == {(0, 6): 30, (0, 7): 30}
    assert all(rates[found.devices[0], found.devices[lender]] > 0 for lender in (6, 7))


@pytest.mark.parametrize("lanes", [(1,), (0, 1, 2)])
def test_of_many_devices_nobody_lends_more_than_it_has(lanes: tuple[int, ...]) -> None:
    """No device lends more than it has or borrows more than it needs, in under four seconds for 64 devices,
    half of them borrowers.
    """
    rng, count = Random(7), 64
    rates = np.zeros((count, count))
    for a in range(count):
        for b in range(a):
            rates[a, b] = rates[b, a] = rng.choice(lanes)
    needs = [rng.randrange(1, 1000) if n % 2 else 0 for n in range(count)]
    spares = [0 if n % 2 else rng.randrange(1, 1500) for n in range(count)]
    began = process_time()
    found = mapped(needs, spares, rates)
    assert process_time() - began < 4
    assert sorted(found.devices) == list(range(count)) and found.lent
    for stage in range(count):
        assert sum(n for (a, _), n in found.lent.items() if a == stage) <= needs[stage]
        assert sum(n for (_, b), n in found.lent.items() if b == stage) <= spares[stage]
