"""Spreads stages over wires to hosts: devices behind one wire share what it carries, and early stages move the most.

On a DGX-1 every two devices share an uplink. If stage s is on device s, the two stages with the most microbatches in
flight share one, while that of the last two has nothing to carry. Of all orders of the devices the one is taken

    in which the fewest neighbours have no link of their own, whose messages would take the wires of hosts too;
    then of which the fullest wire carries the least, if a stage moves as many tensors as it has microbatches in flight;
    then in which the loads of all wires differ the least;
    then in which a byte takes the fewest seconds from the first stage to the last.

The order of the devices themselves stays where loads are no better. Costs: a tenth of a second for eight devices,
of which all orders are tried. Above eight it is a heuristic: stages swap devices, with each other or with those that
have no stage, as long as one swap is better.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray

from pipefit.cluster import Cluster
from pipefit.planner.bounds import in_flight
from pipefit.planner.host_links import host_route
from pipefit.planner.mapping import MOST, Orders, peer_rates
from pipefit.planner.prices import Floats
from pipefit.planner.question import Question

Rows = tuple[tuple[float, ...], ...]

_DIGITS = 9  # to which loads are equal


def spread(question: Question) -> tuple[int, ...]:
    """The device of every stage: that of its number, unless another order of equal devices has less full wires."""
    natural = tuple(range(question.stages))
    if not (question.means.host and question.means.mapping) or len(question.classes) > 1:
        return natural
    weights = tuple(in_flight(question.training, stage, question.stages) for stage in natural)
    return best_order(weights, _rows(_loads(question.cluster)), _rows(peer_rates(question.cluster)))


@lru_cache(maxsize=64)
def best_order(weights: tuple[int, ...], to_hosts: Rows, to_peers: Rows) -> tuple[int, ...]:
    """The same for stages that move so much each; rows of devices. Searches with other techniques ask it again.

    `to_hosts` are the seconds that a byte of a device takes of each wire to the host, to some scale; `to_peers` bytes
    per second over links between two devices, zero without one.
    """
    loads, rates = np.array(to_hosts).reshape(len(to_hosts), -1), np.array(to_peers)
    natural = np.arange(len(weights))[None]
    first = _scores(natural, weights, loads, rates)[:, 0]
    if len(rates) <= MOST:
        orders: Orders = np.array(list(permutations(range(len(rates)), len(weights))), dtype=np.intp)
    else:
        orders = _swapped(natural[0], weights, loads, rates)
    scores = _scores(orders, weights, loads, rates)
    best = int(np.lexsort(scores[::-1])[0])
    better = scores[1:3, best].tolist() < first[1:3].tolist()
    return tuple(map(int, orders[best])) if better else tuple(range(len(weights)))


def _rows(array: Floats) -> Rows:
    return tuple(map(tuple, array.tolist()))


def _loads(cluster: Cluster) -> Floats:
    """Seconds that a byte of each device takes of each wire on its way to the host: a row for a device."""
    routes = [host_route(cluster, device) for device in range(len(cluster.devices))]
    wires = {wire: n for n, wire in enumerate(dict.fromkeys(w for r in routes if r is not None for w in r.wires))}
    found = np.zeros((len(routes), len(wires)))
    for device, route in enumerate(routes):
        if route is not None:
            found[device, [wires[wire] for wire in route.wires]] = 1 / route.both_ways_per_second
    return found / (found.max(initial=0.0) or 1.0)


def _scores(orders: Orders, weights: tuple[int, ...], loads: Floats, rates: Floats) -> Floats:
    """What is compared of every order, what counts most first: a row each."""
    wires = np.einsum("s,osw->ow", np.array(weights, dtype=float), loads[orders])
    between = rates[orders[:, :-1], orders[:, 1:]]
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.where(between > 0, 1 / between, 0.0).sum(axis=1) * rates.max(initial=0.0)
    apart = (between == 0).sum(axis=1)
    found: Floats = np.round(
        np.array([apart, wires.max(axis=1, initial=0.0), (wires**2).sum(axis=1), seconds], dtype=float), _DIGITS
    )
    return found


def _swapped(start: NDArray[np.intp], weights: tuple[int, ...], loads: Floats, rates: Floats) -> Orders:
    """An order of some devices, improved by swaps as long as one of them is better."""
    order = np.array([*start, *sorted(set(range(len(rates))) - set(start.tolist()))], dtype=np.intp)
    count, best = len(start), -1
    while best != 0:
        tried = np.array([order, *_swaps(order, count)])
        best = int(np.lexsort(_scores(tried[:, :count], weights, loads, rates)[::-1])[0])
        order = tried[best]
    return order[None, :count]


def _swaps(order: NDArray[np.intp], count: int) -> Iterator[NDArray[np.intp]]:
    for one, other in combinations(range(len(order)), 2):
        if one < count:
            swapped = order.copy()
            swapped[[one, other]] = order[[other, one]]
            yield swapped
