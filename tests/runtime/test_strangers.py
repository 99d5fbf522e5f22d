"""Strangers that connect to workers and send garbage are dropped, and training goes on with the numbers that it had."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import secrets
import socket
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import pipefit
from network_workers import show
from pipefit.errors import WorkerFailed
from pipefit.runtime.callbacks import StepReport
from pipefit.runtime.launch import _Supervisor
from pipefit.runtime.orders import Orders
from pipefit.runtime.processes import forks, start
from resuming import SEED, patient, plan_for

LISTENING = "0A"
STEPS = 6


def ports(process: int) -> list[tuple[str, int]]:
    """The address and port of every TCP socket at which a process listens."""
    inodes = set[str]()
    for file in Path(f"/proc/{process}/fd").iterdir():
        try:
            inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
        except OSError:  # closed meanwhile
            continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == LISTENING and row[9] in inodes]
    return [(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in found]


def disturb(address: tuple[str, int]) -> list[socket.socket]:
    """Strangers at one port: one that says nothing, some with garbage of several lengths, one that leaves at once."""
    stayed = []
    for nbytes in (0, 1, 8, 64, 1 << 16):
        stranger = socket.create_connection(address, timeout=5)
        stranger.setblocking(False)
        with suppress(OSError):  # they may hang up on us
            stranger.send(secrets.token_bytes(nbytes))
        stayed.append(stranger)
    socket.create_connection(address, timeout=5).close()
    return stayed


@pytest.mark.parametrize("tokens", [("ours", "ours"), ("ours", "")])
def test_workers_know_each_other_by_a_token(tokens: tuple[str, str], tmp_path: Path) -> None:
    """Who connects as a worker and does not know it is refused by name, by whoever does."""
    context, pipes = forks(), []
    for rank, token in enumerate(tokens):
        ours, theirs = context.Pipe(duplex=False)
        start(context.Process(target=show, args=(rank, token, str(tmp_path / "store"), theirs), daemon=True))
        theirs.close()
        pipes.append(ours)
    told = [pipe.recv() if pipe.poll(60) else None for pipe in pipes]
    if tokens == ("ours", "ours"):
        assert told == ["welcome", "welcome"]
    else:
        assert told[0].startswith("what has connected as worker 1 does not know the token of this training: ")


def test_every_start_has_a_token_of_its_own() -> None:
    """Of 16 random bytes."""
    plan = plan_for("dropout", "1f1b", (2, 2, 2))
    tokens = {_Supervisor(plan, Orders(steps=1, seed=0, numbers=False), 1, 1, None, None).token for _ in range(9)}
    assert len(tokens) == 9
    assert {len(bytes.fromhex(token)) for token in tokens} == {16}


def impersonate(process: int, met: dict[tuple[str, int], list[socket.socket]]) -> None:
    """Connect to every new port of a process as gloo's workers do, with small numbers, and send bytes of no meaning."""
    for address in ports(process):
        if address not in met:
            met[address] = [socket.create_connection(address, timeout=5) for _ in range(3)]
            for number, stranger in enumerate(met[address]):
                stranger.sendall(number.to_bytes(8, "little"))


@pytest.mark.gallery
@pytest.mark.timeout(600)
def test_strangers_that_pose_as_workers_are_found_out() -> None:
    """While workers connect to each other: the training has the numbers that it had, or ends and says why."""
    task, plan, met = partial(patient, 0.0), plan_for("dropout", "1f1b", (2, 2, 2)), {}
    expected, _ = pipefit.train(task, plan, steps=3, seed=SEED, numbers=False)
    over = threading.Event()

    def pose() -> None:
        while not over.is_set():
            for worker in mp.active_children():
                with suppress(OSError):
                    impersonate(worker.pid, met)

    stranger = threading.Thread(target=pose)
    stranger.start()
    try:
        found, _ = pipefit.train(task, plan, steps=3, seed=SEED, numbers=False, timeout_seconds=100, start_seconds=100)
    except WorkerFailed as error:
        found = str(error)
    finally:
        over.set()
        stranger.join()
    assert met
    assert found == expected or re.search("does not show the token|does not know the token|is gone", str(found)), found


def test_strangers_are_dropped_and_training_goes_on() -> None:
    """At every port of every worker, between two steps; workers listen on the loopback interface alone."""
    task, plan = partial(patient, 0.2), plan_for("dropout", "1f1b", (2, 2, 2))
    expected, _ = pipefit.train(task, plan, steps=STEPS, seed=SEED, numbers=False)
    strangers, addresses = list[socket.socket](), list[tuple[str, int]]()

    def on_step(report: StepReport) -> None:
        if report.step == 0:
            for worker in mp.active_children():
                assert worker.pid is not None
                addresses.extend(ports(worker.pid))
            for address in addresses:
                strangers.extend(disturb(address))

    losses, _ = pipefit.train(task, plan, steps=STEPS, seed=SEED, numbers=False, on_step=on_step)
    for stranger in strangers:
        stranger.close()
    assert losses == expected
    assert {address for address, _ in addresses} == {"127.0.0.1"}
