"""Updates divided between hosts and devices, against every division."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from pipefit.planner import Question
from pipefit.planner.improvement import Update, _updates, busy_seconds, divided_updates
from pipefit.planner.problem import Split
from pipefit.schema.devices import Host
from support.synthetic_models import layer, measurement, profile, training, value
from support.tight_questions import cluster, keeping_layer, random_case


def longest(updates: list[Update], away: frozenset[int]) -> float:
    """Return the end of the busiest host or wire, by hand."""
    hosts, wires = [0.0] * 4, dict[str, float]()
    for stage, update in enumerate(updates):
        if stage in away:
            for wire in update.wires:
                wires[wire] = wires.get(wire, 0.0) + update.wire_seconds
        else:
            hosts[update.host] += update.host_seconds
    return max(*hosts, *wires.values(), 0.0)


def every(updates: list[Update]) -> float:
    """Return the shortest of all divisions."""
    stages = range(len(updates))
    return min(
        longest(updates, frozenset(some)) for n in range(len(updates) + 1) for some in combinations(stages, n)
    )


def found_by(monkeypatch: pytest.MonkeyPatch, updates: list[Update]) -> list[frozenset[int]]:
    monkeypatch.setattr("pipefit.planner.improvement._updates", lambda question, split: updates)
    case = random_case(Random(0), ("1f1b",))
    question = Question(profile=case.profile, cluster=case.cluster, training=case.training)
    parts = divided_updates(question, Split((0, 1), (0,)))
    return [frozenset(stage for stage, part in enumerate(one) if not part) for one in parts]


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("shared", [1, 2])
def test_equal_stages_are_divided_as_well_as_they_can_be(
    monkeypatch: pytest.MonkeyPatch, stages: int, shared: int
) -> None:
    """With one host and wires of one or two stages each, the first division is the shortest of all."""
    for seconds in (0.2, 1.0, 5.0):
        updates = [Update(0, 0.74, (f"wire{n // shared}",), seconds) for n in range(stages)]
        first = found_by(monkeypatch, updates)[0]
        assert longest(updates, first) == pytest.approx(every(updates))


@pytest.mark.parametrize("seed", range(30))
def test_random_stages_are_divided_nearly_as_well(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With two hosts a division never exceeds all-host or all-device updates, and the best by
    at most half.
    """
    rng = Random(seed)
    updates = [
        Update(n // 3, rng.uniform(0.1, 2.0), (f"wire{n // 2}",), rng.uniform(0.1, 2.0))
        for n in range(rng.randrange(1, 7))
    ]
    first = longest(updates, found_by(monkeypatch, updates)[0])
    whole = frozenset(range(len(updates)))
    assert first <= min(longest(updates, frozenset()), longest(updates, whole))
    assert first <= 1.5 * every(updates)
    some = frozenset(n for n in whole if rng.random() < 0.5)
    assert max(busy_seconds(updates, some).values()) == pytest.approx(longest(updates, some))


def test_the_seconds_are_those_of_the_stage() -> None:
    """A host moves 5 bytes for each byte of parameters, gradients and state, at 80 % of its rate; 1 moves
    each way.
    """
    chain = profile(measurement([keeping_layer(1, 1, 1, 1.0)] * 2, layer((value(1), value(1)), (value(4),))))
    slow = replace(
        cluster([99], host_rate=4.0, peer_rate=1.0), hosts=(Host(memory_bytes=99, memory_bandwidth=10.0),)
    )
    question = Question(profile=chain, cluster=slow, training=training("1f1b", 1))
    update = (_updates(question, Split((0, 2), (0,))) or [])[0]
    assert (update.host, update.wire_seconds) == (0, pytest.approx(2 / 4.0))
    assert update.host_seconds == pytest.approx(2 * 5 / (10.0 * 0.8))
    unknown = replace(question, cluster=cluster([99], host_rate=4.0, peer_rate=1.0))
    assert divided_updates(unknown, Split((0, 2), (0,))) == []
