"""Which stages to run together, so that the bytes of every block can be told from those of its neighbours.

The papers call a layer what is a block here; L is the number of blocks and G that of devices.

**Whole models.** For every block l some run must have (a) l alone on a device, and, but for the first block, for some
n < l, as small as the number of runs allows, (b) blocks n to l - 1 on a device and (c) blocks n to l on a device.

With S = L - G, G >= 4 and L >= 2 G, the S + 1 = L - G + 1 runs k = 0 ... S do:

    [0..k] [k+1] ... [k+a] [k+a+1 .. S+a+1] [S+a+2] ... [L-1]        a = max(1, G - 2 - k)

that is, a growing first stage, `a` blocks alone, a second long stage, and the rest alone; but run S - 2 is

    [0..S-2] [S-1] [S, S+1] [S+2, S+3] [S+4] ... [L-1]

Proof. All have G stages: 2 + a + (G - 2 - a), and 4 + (G - 4). (a) Block 0 is alone in run 0, block k + 1 in run k, as
a >= 1; blocks S + 2 ... L - 1 in run S, whose second long stage is one block. (b), (c) Blocks 1 ... S: n = 0, in runs
l - 1 and l. Block S + 1: n = S; [S] is in run S - 1, [S, S+1] in run S - 2. Block S + 2: n = S + 1; [S+1] is in run S,
[S+1, S+2] in run S - 1, where a = 1. Blocks S + 1 + i for i = 2 ... G - 2: n = G - 1; in run k = G - 2 - i the second
long stage is [G-1 .. S+1+i], in run k + 1 it is [G-1 .. S+i]. Both are before run S - 2, as k + 1 <= G - 3 < S - 2.

On three devices so few runs are not enough: each block but the first and the last is alone in one split only, which
makes L - 2 runs, and none of them has a longer stage that ends with block L - 2. There, L runs are enough, each with
n = 0: the first blocks, the next one alone, the rest. Where L < 2 G, only max(4, L // 2) devices are used; and a model
of less than eight blocks is padded with empty ones, which are then left out of the runs. (mCAP, section 3.2; the paper
chose its runs, and padded, partly by hand.)

**Trimmed models.** With n = l - 1 for every block, all that is needed is each of L blocks alone and each of L - 1
pairs; the rest is cut away. G of these 2 L - 1 stages fit into a run, if they share no block: ceil((2 L - 1) / G) runs,
but at least three, as a block and the two pairs that it is in are in three runs. First come first served finds so few,
or, where that is three, four at most. (CAPSlog, PDP 2024, which takes 15 runs for L = 42 on G = 8; these are 11.)
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from pipefit.errors import UsageError

Edges = tuple[int, ...]  # stage s holds blocks edges[s] to edges[s + 1] - 1
Interval = tuple[int, int]  # blocks start to stop - 1, on one device
Stages = tuple[Interval, ...]  # run together, in the model's order, each on a device of its own

_FEWEST = 4  # devices; with so many, L - G + 1 runs are proven to be enough


def partitionings(blocks: int, devices: int) -> list[Edges]:
    """The runs, in order: `blocks - devices + 1` of them where that is possible.

    Raises:
        UsageError: as `check_devices`.
    """
    check_devices(devices)
    if devices < _FEWEST or blocks <= _FEWEST:
        return _on_three(blocks)
    used = min(devices, max(_FEWEST, blocks // 2))
    padded = max(blocks, 2 * used)
    runs = [_edges(_lengths(padded, used, run)) for run in range(padded - used + 1)]
    return list(dict.fromkeys((*(edge for edge in edges if edge < blocks), blocks) for edges in runs))


def check_devices(devices: int) -> None:
    """Check that incremental runs can be made on so many devices.

    Raises:
        UsageError: fewer than three, on which no block within the model can be alone.
    """
    if devices < 3:
        raise UsageError(
            f"incremental profiling needs at least three devices, not {devices}: one "
            "for a block alone, and one each for the blocks before and behind it; trimmed runs do with one device"
        )


def trimmed(blocks: int, devices: int) -> list[Stages]:
    """The runs of at most `devices` stages, of one or two blocks each, that have every block and every pair once.

    Raises:
        UsageError: no device.
    """
    if devices < 1:
        raise UsageError("profiling needs a device")
    pairs = [(start, start + 2) for first in (0, 1) for start in range(first, blocks - 1, 2)]
    waiting = [*pairs, *((block, block + 1) for block in range(blocks))]
    runs: list[Stages] = []
    while waiting:
        run: list[Interval] = []
        for interval in waiting:
            if len(run) < devices and not any(_overlap(interval, other) for other in run):
                run.append(interval)
        waiting = [interval for interval in waiting if interval not in run]
        runs.append(tuple(sorted(run)))
    return runs


def _lengths(blocks: int, devices: int, run: int) -> list[int]:
    """Lengths of the stages in run number `run`."""
    spare = blocks - devices
    if run == spare - 2:
        return [run + 1, 1, 2, 2, *[1] * (devices - 4)]
    alone = max(1, devices - 2 - run)
    return [run + 1, *[1] * alone, spare - run + 1, *[1] * (devices - 2 - alone)]


def _on_three(blocks: int) -> list[Edges]:
    """The first blocks, the next alone, the rest."""
    return [_edges([n for n in (run, 1, blocks - run - 1) if n]) for run in range(1, blocks)] + [(0, blocks)]


def _edges(lengths: list[int]) -> Edges:
    return (0, *accumulate(lengths))


def _overlap(one: Interval, other: Interval) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def intervals(edges: Edges) -> Stages:
    """First block and stop of every stage."""
    return tuple(pairwise(edges))
