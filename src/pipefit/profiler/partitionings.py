"""Which stages to run together, so that the bytes of every layer can be told from those of its neighbours.

**Whole models.** For every layer l some run must have (a) l alone on a device, and, but for the first layer, for some
n < l, as small as the number of runs allows, (b) layers n to l - 1 on a device and (c) layers n to l on a device.

With S = L - G, G >= 4 and L >= 2 G, the S + 1 = L - G + 1 runs k = 0 ... S do:

    [0..k] [k+1] ... [k+a] [k+a+1 .. S+a+1] [S+a+2] ... [L-1]        a = max(1, G - 2 - k)

that is, a growing first stage, `a` layers alone, a second long stage, and the rest alone; but run S - 2 is

    [0..S-2] [S-1] [S, S+1] [S+2, S+3] [S+4] ... [L-1]

Proof. All have G stages: 2 + a + (G - 2 - a), and 4 + (G - 4). (a) Layer 0 is alone in run 0, layer k + 1 in run k, as
a >= 1; layers S + 2 ... L - 1 in run S, whose second long stage is one layer. (b), (c) Layers 1 ... S: n = 0, in runs
l - 1 and l. Layer S + 1: n = S; [S] is in run S - 1, [S, S+1] in run S - 2. Layer S + 2: n = S + 1; [S+1] is in run S,
[S+1, S+2] in run S - 1, where a = 1. Layers S + 1 + i for i = 2 ... G - 2: n = G - 1; in run k = G - 2 - i the second
long stage is [G-1 .. S+1+i], in run k + 1 it is [G-1 .. S+i]. Both are before run S - 2, as k + 1 <= G - 3 < S - 2.

On three devices so few runs are not enough: each layer but the first and the last is alone in one split only, which
makes L - 2 runs, and none of them has a longer stage that ends with layer L - 2. There, L runs are enough, each with
n = 0: the first layers, the next one alone, the rest. Where L < 2 G, only max(4, L // 2) devices are used; and a model
of less than eight layers is padded with empty ones, which are then left out of the runs. (mCAP, section 3.2; the paper
chose its runs, and padded, partly by hand.)

**Trimmed models.** With n = l - 1 for every layer, all that is needed is each of L layers alone and each of L - 1
pairs; the rest is cut away. G of these 2 L - 1 stages fit into a run, if they share no layer: ceil((2 L - 1) / G) runs,
but at least three, as a layer and the two pairs that it is in are in three runs. First come first served finds so few,
or, where that is three, four at most. (CAPSlog, PDP 2024, which takes 15 runs for L = 42 on G = 8; these are 11.)
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from pipefit.errors import UsageError

Edges = tuple[int, ...]  # stage s holds layers edges[s] to edges[s + 1] - 1
Interval = tuple[int, int]  # layers start to stop - 1, on one device
Stages = tuple[Interval, ...]  # run together, in the model's order, each on a device of its own

_FEWEST = 4  # devices; with so many, L - G + 1 runs are proven to be enough


def partitionings(layers: int, devices: int) -> list[Edges]:
    """The runs, in order: `layers - devices + 1` of them where that is possible.

    Raises:
        UsageError: fewer than three devices, on which no layer within the model can be alone.
    """
    if devices < 3 and devices < layers:
        raise UsageError(
            f"incremental profiling needs at least three devices, not {devices}: one "
            "for a layer alone, and one each for the layers before and behind it; trimmed runs do with one device"
        )
    if devices < _FEWEST or layers <= _FEWEST:
        return _on_three(layers)
    used = min(devices, max(_FEWEST, layers // 2))
    padded = max(layers, 2 * used)
    runs = [_edges(_lengths(padded, used, run)) for run in range(padded - used + 1)]
    return list(dict.fromkeys((*(edge for edge in edges if edge < layers), layers) for edges in runs))


def trimmed(layers: int, devices: int) -> list[Stages]:
    """The runs of at most `devices` stages, of one or two layers each, that have every layer and every pair once.

    Raises:
        UsageError: no device.
    """
    if devices < 1:
        raise UsageError("profiling needs a device")
    pairs = [(start, start + 2) for first in (0, 1) for start in range(first, layers - 1, 2)]
    waiting = [*pairs, *((layer, layer + 1) for layer in range(layers))]
    runs: list[Stages] = []
    while waiting:
        run: list[Interval] = []
        for interval in waiting:
            if len(run) < devices and not any(_overlap(interval, other) for other in run):
                run.append(interval)
        waiting = [interval for interval in waiting if interval not in run]
        runs.append(tuple(sorted(run)))
    return runs


def _lengths(layers: int, devices: int, run: int) -> list[int]:
    """Lengths of the stages in run number `run`."""
    spare = layers - devices
    if run == spare - 2:
        return [run + 1, 1, 2, 2, *[1] * (devices - 4)]
    alone = max(1, devices - 2 - run)
    return [run + 1, *[1] * alone, spare - run + 1, *[1] * (devices - 2 - alone)]


def _on_three(layers: int) -> list[Edges]:
    """The first layers, the next alone, the rest."""
    return [_edges([n for n in (run, 1, layers - run - 1) if n]) for run in range(1, layers)] + [(0, layers)]


def _edges(lengths: list[int]) -> Edges:
    return (0, *accumulate(lengths))


def _overlap(one: Interval, other: Interval) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def intervals(edges: Edges) -> Stages:
    """First layer and stop of every stage."""
    return tuple(pairwise(edges))
