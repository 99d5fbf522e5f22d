"""The partitionings to run, with the properties proven in their docstring, for all small numbers of layers
and devices.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from pipefit.errors import UsageError
from pipefit.profiler.training_runs.runs import intervals, partitionings, trimmed


def tells_apart(runs, layers: int) -> bool:
    """Return whether every layer is alone in some run, and some n has both [n..l-1] and [n..l]."""
    seen = {stage for edges in runs for stage in intervals(edges)}
    pairs = all(any({(n, layer), (n, layer + 1)} <= seen for n in range(layer)) for layer in range(1, layers))
    return pairs and all((layer, layer + 1) in seen for layer in range(layers))


@pytest.mark.parametrize("devices", range(3, 17))
def test_every_layer_is_told_from_its_neighbours(devices: int) -> None:
    """(a), (b) and (c) hold for every layer, on at most the given devices; in L - G + 1 runs if that is
    proven.
    """
    for layers in range(1, 50):
        runs = partitionings(layers, devices)
        assert tells_apart(runs, layers), layers
        for edges in runs:
            assert edges[0] == 0 and edges[-1] == layers and len(edges) - 1 <= devices
            assert all(start < stop for start, stop in pairwise(edges))
        if devices >= 4 and layers >= 2 * devices:
            assert len(runs) == layers - devices + 1
        elif devices >= 4:
            assert len(runs) <= min(layers, devices + 1), "no more than on twice as many layers as devices"
        else:
            assert len(runs) == layers


def test_the_example_of_the_literature_takes_35_runs() -> None:
    """42 layers on 8 devices take 35 runs."""
    assert len(partitionings(42, 8)) == 35


@pytest.mark.parametrize("layers", range(4, 9))
def test_three_devices_cannot_do_it_in_so_few_runs(layers: int) -> None:
    """Three devices need more runs: no set of L - 2 splits separates every layer, by trying all sets."""
    every = [(0, *cuts, layers) for count in (1, 2) for cuts in combinations(range(1, layers), count)]
    alone = [
        (0, n, n + 1, layers) for n in range(1, layers - 1)
    ]  # each is the only split with its layer alone
    assert all(edges in every for edges in alone) and len(alone) == layers - 2
    assert not tells_apart(alone, layers)


@pytest.mark.parametrize("devices", range(1, 17))
def test_trimmed_runs_have_every_layer_and_every_pair_once(devices: int) -> None:
    """Trimmed runs hold every layer and pair once, on the given devices, without overlap; in the fewest runs,
    or four instead of three.
    """
    for layers in range(1, 60):
        runs = trimmed(layers, devices)
        wanted = [(n, n + 1) for n in range(layers)] + [(n, n + 2) for n in range(layers - 1)]
        assert sorted(stage for stages in runs for stage in stages) == sorted(wanted)
        for stages in runs:
            assert len(stages) <= devices
            assert all(stop <= start for (_, stop), (start, _) in pairwise(stages))
        fewest = max(-(-len(wanted) // devices), min(layers, 3))
        assert len(runs) == fewest or (len(runs), fewest) == (4, 3)


def test_the_example_of_the_literature_takes_11_trimmed_runs() -> None:
    """42 layers on 8 devices take 11 trimmed runs; CAPSlog takes 15."""
    assert len(trimmed(42, 8)) == 11


def test_trimmed_runs_need_a_device() -> None:
    """Zero devices are refused."""
    with pytest.raises(UsageError, match="needs at least one device"):
        trimmed(5, 0)


def test_two_devices_are_too_few() -> None:
    """On two devices no layer within the model can be alone."""
    with pytest.raises(UsageError, match="at least three devices, not 2"):
        partitionings(5, 2)
