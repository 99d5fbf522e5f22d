"""The benchmark of stages on several workers: its pacing of messages and sums."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import bench_degrees_real as bench
from bench_degrees_real import Later, Step, Wires, pace_messages
from pipefit.schema.actions import Action, Kind
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Link, Member

SECONDS = 0.05  # of a transfer
SECONDS_OF = {"predicted_seconds": 1.0, "seconds": 1.0, "error": 0.0}


def test_a_link_carries_one_transfer_after_the_other_and_two_links_carry_two() -> None:
    """Each transfer begins, for torch, at its arrival time; links to other devices stay free meanwhile."""
    wires, there, began = Wires(), list[tuple[str, float]](), time.monotonic()

    def begin(name: str) -> list[Any]:
        there.append((name, time.monotonic() - began))
        return []

    names = (
        ("first", 1),
        ("other", 2),
        ("second", 1),
    )  # so that the second is due last, however slowly they are begun
    for transfer in [wires.carry(to, SECONDS, lambda name=name: begin(name)) for name, to in names]:  # type: ignore[misc]
        transfer.wait()
    at = dict(there)
    assert at["first"] >= SECONDS and at["other"] >= SECONDS and at["second"] >= 2 * SECONDS
    assert there[-1][0] == "second"


def test_rows_that_are_kept_tell_of_their_own_run(tmp_path: Path) -> None:
    """A run of some models replaces only their rows; others keep their measurement's description."""
    file = tmp_path / "measured.json"

    def run(day: str, *models: str) -> None:
        with (
            mock.patch.object(bench, "machine", return_value=day),
            mock.patch.object(
                bench, "of_model", lambda model, *_: [Step(model=model, way=day, **SECONDS_OF)]
            ),
            mock.patch("sys.argv", ["bench", "--models", *models, "--json", str(file)]),
        ):
            bench.main()

    run("monday", "gpt", "mlp")
    run("tuesday", "mlp")
    told = [
        (one["machine"], [row["way"] for row in one["rows"]])
        for one in json.loads(file.read_text())["measured"]
    ]
    assert told == [("monday", ["monday"]), ("tuesday", ["tuesday"])]
    run("friday", "gpt", "mlp")
    (last,) = json.loads(file.read_text())["measured"]
    assert (last["machine"], [row["model"] for row in last["rows"]]) == ("friday", ["gpt", "mlp"])


def test_what_fails_is_told_where_it_is_waited_for() -> None:
    """A peer's failure is reported at the wait, in torch's words."""

    def begin() -> list[Any]:
        raise RuntimeError("connection closed by peer")

    transfer = Wires().carry(0, 0.0, begin)
    with pytest.raises(RuntimeError, match="closed by peer"):
        transfer.wait()


def test_sends_and_sums_take_what_their_link_takes_and_receives_nothing() -> None:
    """A send takes its bytes over the rate; a sum over three takes twice two thirds of the bytes, plus four
    latencies.
    """

    class Network:
        device = 0

        def start(self, action: Action, tensors: object, message: object) -> list[str]:
            return [f"started {action.kind}"]

        def collect(self, *_: object) -> list[str]:
            return ["collected"]

    carried = list[tuple[int, float]]()

    class Noted(Wires):
        def carry(self, target: int, seconds: float, begin: Any) -> Later:
            carried.append((target, seconds))
            return super().carry(target, 0.0, begin)

    ample = Cluster.emulated((3, 1 << 30))
    devices = tuple(map(Member.device, range(3)))
    cluster = replace(ample, links=(Link(members=devices, bytes_per_second=1e3, latency_seconds=0.5),))
    pace_messages(Network, Noted(), cluster)  # type: ignore[arg-type]
    tensors, network = [torch.zeros(75)], Network()
    message = SimpleNamespace(source=1, target=2)
    network.start(Action(kind=Kind.SEND_FORWARD, stage=0, microbatch=0), tensors, message)
    assert network.start(Action(kind=Kind.RECV_FORWARD, stage=0, microbatch=0), tensors, message) == [
        f"started {Kind.RECV_FORWARD}"
    ]
    network.collect(Action(kind=Kind.REDUCE, stage=0), tensors, (0, 1, 2), 0)
    assert carried == [(2, pytest.approx(0.8)), (1, pytest.approx(0.4 + 4 * 0.5))]
