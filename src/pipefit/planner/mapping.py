"""Device mapping: place stages so that peers with memory to spare are near stages that lack it.

Links of some machines differ: on a DGX-1 a GPU reaches one neighbour over two lanes of NVLink, another over
one, and the rest through the host. All orders of the devices are tried. For each, the stages that lack memory
(borrowers) take it from neighbours that have some (lenders), so that the longest of their copies is as short
as possible; the order with the shortest wins, and of equal ones the first. (MPress, HPCA 2023, Fig. 6, whose
score is 1 / that time.)

The shortest time of an order is exact, without a search: by Hall's theorem, copies of t seconds are enough if
and only if every set of borrowers can place its bytes,

    sum of its bytes  <=  sum over lenders of min(the lender's spare bytes, t x the rates to it from the set)

so t is the largest of the times at which both sides are equal. All orders are computed at once as rows of
arrays; orders that only swap equal devices are computed once. Cost: half a second for eight devices. Above
eight it is a heuristic: an order is improved by a few swaps of two devices, times count single borrowers and
all together, and borrowers, the neediest first, take from the remaining lenders, the fastest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.planner.problem import Question, Split
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Member, MemberKind, Place, Share

Floats = NDArray[np.float64]
Orders = NDArray[np.intp]

MOST = 8  # largest number of devices for which all orders are tried
_SWAPS = 4  # swaps of two devices if there are more
_PARTS = 1.0, 0.75, 0.5, 0.25, 0.125  # parts of the needs


class Mapping(NamedTuple):
    """The device of every stage, the seconds of the longest copies, and the bytes lent between stages."""

    devices: tuple[int, ...]
    seconds: float
    lent: dict[tuple[int, int], int]  # bytes, by borrowing stage and lending stage

    def lenders_of(self, stage: int) -> dict[int, int]:
        """Return the bytes that a stage borrows, by lending stage."""
        return {lender: nbytes for (borrower, lender), nbytes in self.lent.items() if borrower == stage}

    def without_striping(self) -> Mapping:
        """Return the mapping with one lender for every borrower: the one that lends it the most."""
        most: dict[int, tuple[int, int]] = {}
        for pair, nbytes in self.lent.items():
            if pair[0] not in most or nbytes > self.lent[most[pair[0]]]:
                most[pair[0]] = pair
        return self._replace(lent={pair: self.lent[pair] for pair in most.values()})


def peer_rates(cluster: Cluster) -> Floats:
    """Return bytes per second between every two devices over their own link; zero without a link."""
    count = len(cluster.devices)
    rates = np.zeros((count, count))
    for link in cluster.links:
        ends = [n for kind, n in link.members if kind is MemberKind.DEVICE and n is not None]
        joined = np.ix_(ends, ends)
        rates[joined] = np.maximum(rates[joined], link.copy_rate)
    np.fill_diagonal(rates, 0.0)
    return rates


def is_symmetric(rates: Floats) -> bool:
    """Return whether all devices reach all others at the same rate, so that all mappings are equal."""
    apart = rates[~np.eye(len(rates), dtype=bool)]
    return bool(len(apart) == 0 or (apart == apart[0]).all())


def mapped(needs: Sequence[int], spares: Sequence[int], rates: Floats) -> Mapping:
    """Return the best mapping of stages to the same number of devices, all of one kind.

    `needs` are the bytes that each stage must place elsewhere, `spares` the bytes that each has left. If no
    order places all needs, the order is the best for the largest tested part of them, and the seconds are
    infinite.
    """
    if is_symmetric(rates) or not any(needs) or not any(spares):
        return lending(tuple(range(len(needs))), needs, spares, rates)
    return _best_of_orders(tuple(needs), tuple(spares), tuple(map(tuple, rates.tolist())))


@lru_cache(maxsize=64)
def _best_of_orders(
    needs: tuple[int, ...], spares: tuple[int, ...], rows: tuple[tuple[float, ...], ...]
) -> Mapping:
    """Return the best mapping if links differ and some stages can lend; cached for other searches."""
    rates = np.array(rows)
    every = _orders(rows) if len(needs) <= MOST else None
    for part in _PARTS:
        placed = [int(part * need) for need in needs]
        orders = _swapped(placed, spares, rates) if every is None else every
        seconds = copy_seconds(orders, placed, spares, rates)
        if seconds.min() < np.inf:
            break
    return lending(tuple(map(int, orders[int(seconds.argmin())])), needs, spares, rates)


def mapped_stages(question: Question, split: Split, needs: Sequence[int], spares: Sequence[int]) -> Mapping:
    """Return the best mapping of a split's stages.

    Stages stay on their devices if devices differ or some have no stage.
    """
    rates, at, means = peer_rates(question.cluster), split.devices, question.means
    if means.mapping and len(question.classes) == 1 and len(at) == len(rates):
        result = mapped(needs, spares, rates)
    else:
        result = lending(tuple(range(len(at))), needs, spares, rates[np.ix_(at, at)])._replace(devices=at)
    return result if means.striping else result.without_striping()


def copy_seconds(orders: Orders, needs: Sequence[int], spares: Sequence[int], rates: Floats) -> Floats:
    """Return the seconds of each order's longest copies if borrowers use their lenders in the best shares."""
    borrowers = [stage for stage, need in enumerate(needs) if need]
    lenders = [stage for stage, spare in enumerate(spares) if spare and not needs[stage]]
    longest: Floats = np.zeros(len(orders))
    if not borrowers:
        return longest
    room = np.array([float(spares[stage]) for stage in lenders])
    to_lender = rates[orders[:, borrowers][:, :, None], orders[:, lenders][:, None, :]]
    count = len(borrowers)
    for size in range(1, count + 1) if len(needs) <= MOST else {1, count}:
        for chosen in combinations(range(count), size):
            need = float(sum(needs[borrowers[n]] for n in chosen))
            result = _until(need, room, to_lender[:, chosen].sum(axis=1))
            longest = np.maximum(longest, result)
    return longest


def _until(need: float, room: Floats, rate: Floats) -> Floats:
    """Return when lenders, each at its rate until it is full, have taken `need` bytes; infinity if never."""
    with np.errstate(divide="ignore", invalid="ignore"):
        full = np.where(rate > 0, room / rate, np.inf)  # time at which each lender is full
    by_time = np.argsort(full, axis=1)
    full, rate = np.take_along_axis(full, by_time, 1), np.take_along_axis(rate, by_time, 1)
    room = np.where(rate > 0, room[by_time], 0.0)
    taken, running = np.zeros(len(rate)), rate.sum(axis=1)
    result = np.full(len(rate), np.inf)
    for n in range(rate.shape[1]):  # all lenders before the n-th are full
        with np.errstate(divide="ignore", invalid="ignore"):
            at = np.where(running > 0, (need - taken) / running, np.inf)
        result = np.where((result == np.inf) & (at <= full[:, n] * (1 + 1e-12)), at, result)
        taken, running = taken + room[:, n], np.maximum(running - rate[:, n], 0.0)
    return result


# ---- Orders


@lru_cache(maxsize=8)
def _orders(rows: tuple[tuple[float, ...], ...]) -> Orders:
    """Return all orders of the devices; of orders that differ by a symmetry of the links, only the first."""
    rates = np.array(rows)
    every = np.array(list(permutations(range(len(rates)))), dtype=np.intp)
    alike = (rates[every[:, :, None], every[:, None, :]] == rates).all(axis=(1, 2))
    first = np.ones(len(every), dtype=bool)
    keys = every @ (len(rates) ** np.arange(len(rates))[::-1])
    for symmetry in every[alike]:
        first &= keys <= symmetry[every] @ (len(rates) ** np.arange(len(rates))[::-1])
    return every[first]


def _swapped(needs: Sequence[int], spares: Sequence[int], rates: Floats) -> Orders:
    """Return one order, improved by swaps of two devices while that shortens the longest copies."""
    best = np.arange(len(needs))[None]
    for _ in range(_SWAPS):
        tried = np.array([best[0], *swaps(best[0], len(needs))])
        seconds = copy_seconds(tried, needs, spares, rates)
        if seconds.argmin() == 0:
            break
        best = tried[seconds.argmin()][None]
    return best


def swaps(order: NDArray[np.intp], count: int) -> Iterator[NDArray[np.intp]]:
    """Yield the order with one of its first `count` devices and a later one swapped."""
    for one, other in combinations(range(len(order)), 2):
        if one < count:
            swapped = order.copy()
            swapped[[one, other]] = order[[other, one]]
            yield swapped


# ---- Shares of lenders


def lending(order: tuple[int, ...], needs: Sequence[int], spares: Sequence[int], rates: Floats) -> Mapping:
    """Return the mapping of an order, with shares that reach its time: a maximum flow to lenders."""
    seconds = float(copy_seconds(np.array([order], dtype=np.intp), needs, spares, rates)[0])
    limit = {
        (a, b): spare if seconds == float("inf") else int(rates[order[a], order[b]] * seconds) + 1
        for a, need in enumerate(needs)
        for b, spare in enumerate(spares)
        if need and spare and not needs[b] and rates[order[a], order[b]] > 0
    }
    if len(needs) > MOST:
        return Mapping(order, seconds, _taken_in_turn(limit, needs, spares))
    flow = dict.fromkeys(limit, 0)
    while _augmented(flow, limit, needs, spares):
        pass
    return Mapping(order, seconds, {pair: nbytes for pair, nbytes in flow.items() if nbytes})


def _taken_in_turn(
    limit: dict[tuple[int, int], int], needs: Sequence[int], spares: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Return the bytes of each pair, up to its limit: neediest borrower first, fastest lender first."""
    left, room, flow = list(needs), list(spares), dict[tuple[int, int], int]()
    for a, b in sorted(limit, key=lambda pair: (-needs[pair[0]], -limit[pair], pair)):
        taken = min(left[a], room[b], limit[a, b])
        if taken:
            flow[a, b], left[a], room[b] = taken, left[a] - taken, room[b] - taken
    return flow


def _augmented(
    flow: dict[tuple[int, int], int],
    limit: dict[tuple[int, int], int],
    needs: Sequence[int],
    spares: Sequence[int],
) -> bool:
    """Send more bytes along the shortest augmenting path of the flow; return whether there was one."""
    sent = [sum(n for (a, _), n in flow.items() if a == stage) for stage in range(len(needs))]
    taken = [sum(n for (_, b), n in flow.items() if b == stage) for stage in range(len(spares))]
    queue: list[tuple[int, list[tuple[int, int]], int]]
    queue = [(stage, [], need - sent[stage]) for stage, need in enumerate(needs) if sent[stage] < need]
    seen = {stage for stage, _, _ in queue}
    while queue:
        stage, way, most = queue.pop(0)
        for (a, b), bytes_in_time in limit.items():
            if a != stage or b in seen or flow[a, b] == bytes_in_time:
                continue
            step, more = [*way, (a, b)], min(most, bytes_in_time - flow[a, b])
            if taken[b] < spares[b]:
                _send(flow, step, min(more, spares[b] - taken[b]))
                return True
            seen.add(b)
            for other, lender in limit:
                if lender == b and other not in seen and flow[other, b]:
                    seen.add(other)
                    queue.append((other, [*step, (other, b)], min(more, flow[other, b])))
    return False


def _send(flow: dict[tuple[int, int], int], way: Sequence[tuple[int, int]], nbytes: int) -> None:
    """Send bytes along a path; every second pair takes them back."""
    for number, pair in enumerate(way):
        flow[pair] += -nbytes if number % 2 else nbytes


_PEERS_PARTS = 64  # number of parts that the shares of a stripe are in


def shared_out(shares: dict[int, int], devices: Sequence[int]) -> Place:
    """Return the place of tensors that go to lenders in proportion to these bytes."""
    whole = sum(shares.values())
    parts = {stage: round(_PEERS_PARTS * nbytes / whole) for stage, nbytes in shares.items()}
    return Place(Share(Member.device(devices[stage]), n) for stage, n in sorted(parts.items()) if n)
