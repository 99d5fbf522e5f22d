"""Strangers that connect to workers and send garbage are dropped, and training goes on with the numbers that it had."""

from __future__ import annotations

import multiprocessing as mp
import os
import secrets
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

import pipefit
from pipefit.runtime.callbacks import StepReport
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
