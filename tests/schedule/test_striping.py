"""Striping: blocks over several links that end together, and no earlier in any other way."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.errors import UsageError
from pipefit.lowering.passes.offload import neighbours, striped
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import ALIGNMENT, Link, Member, parse_place
from support.pipelines import make_cluster

LATENCY = 1e-5


def star(lanes: list[int]) -> Cluster:
    """Build device 0 with a link of given lanes to each other device, plus a device and a host without direct
    links.
    """
    links = [
        Link.between("device0", f"device{n}", bytes_per_second=1e9, lanes=count, latency_seconds=LATENCY)
        for n, count in enumerate(lanes, start=1)
    ]
    return make_cluster(len(lanes) + 2, *links)


def test_a_dgx1_stripes_by_lanes() -> None:
    """Device 0 of a DGX-1 reaches 3 and 4 over two lanes each, 1 and 2 over one, and no other directly."""
    dgx1 = Cluster.preset("dgx1-v100")
    assert neighbours(dgx1, 0) == (1, 2, 3, 4)
    assert striped(dgx1, 0) == parse_place("device1*1+device2*1+device3*2+device4*2")
    assert striped(dgx1, 0, [3, 4, 1, 2]) == parse_place("device3*2+device4*2+device1*1+device2*1")
    assert striped(dgx1, 0, peers=[3, 4]) == parse_place("device3*1+device4*1")


def test_symmetric_links_get_equal_blocks() -> None:
    """Peers on a switch take equal blocks."""
    dgx2 = Cluster.preset("dgx2-a100")
    assert striped(dgx2, 2) == parse_place("+".join(f"device{n}*1" for n in (0, 1, 3, 4, 5, 6, 7)))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 1000))
def test_all_blocks_end_at_once_and_no_others_end_earlier(lanes: list[int], units: int) -> None:
    """A tensor of u units a lane takes u units' time on every link; any other division over the same links
    takes longer.
    """
    nbytes = units * sum(lanes) * ALIGNMENT
    blocks = dict(striped(star(lanes), 0).split(nbytes))
    ends = [Fraction(blocks[Member.device(n)], count) for n, count in enumerate(lanes, start=1)]
    assert ends == [Fraction(units * ALIGNMENT)] * len(lanes)
    total = sum(lanes)
    for other in product(range(total + 1), repeat=len(lanes) - 1):
        dealt = [*other, total - sum(other)]
        if dealt[-1] >= 0 and dealt != lanes:
            assert max(Fraction(share, count) for share, count in zip(dealt, lanes, strict=True)) > 1


@given(st.lists(st.floats(1e9, 6e11), min_size=1, max_size=7))
def test_blocks_on_links_of_any_rates_end_within_a_per_cent(rates: list[float]) -> None:
    """Shares are whole numbers of parts: for non-integer rates, the last block ends at most 1 % after the
    bound, with all links busy to the end.
    """
    links = [
        Link.between("device0", f"device{n}", bytes_per_second=rate) for n, rate in enumerate(rates, start=1)
    ]
    nbytes = 1 << 36
    blocks = striped(make_cluster(len(rates) + 1, *links), 0).split(nbytes)
    last = max(block / rate for (_, block), rate in zip(blocks, rates, strict=True))
    assert last <= 1.01 * nbytes / sum(rates)


def test_only_peers_that_a_direct_link_reaches_are_striped_over() -> None:
    """A peer without a direct link, the device itself and an empty choice are refused, with valid peers."""
    cluster = star([2, 1])
    for peers, named in (([1, 3], "3"), ([0], "0"), ([], "no peers")):
        with pytest.raises(UsageError, match=rf"over \[?{named}\]?: its links lead to 1, 2; name some"):
            striped(cluster, 0, peers)
    with pytest.raises(UsageError, match="its links lead to no other device"):
        striped(cluster, 3)
    with pytest.raises(
        UsageError, match=r"striping of cluster .* names device9, but the cluster has 4 devices"
    ):
        striped(cluster, 9)
