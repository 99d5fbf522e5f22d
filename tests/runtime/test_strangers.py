"""Foreign connections that send garbage to workers: they are dropped, and the numbers do not change."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import pipefit
from pipefit.errors import PeerLost, PipefitWarning
from pipefit.runtime.comm.transport import TOKEN
from pipefit.runtime.launch.forks import forks, start
from pipefit.runtime.launch.launch import _Supervisor
from pipefit.runtime.launch.worker import Orders
from pipefit.runtime.options import StepReport
from support import network_workers
from support.network_workers import late, show
from support.process_tree import children, open_files
from support.resumed_tasks import SEED, patient, plan_for, undisturbed

ROOT = Path(__file__).parents[2]
LISTENING = "0A"
STEPS = 6


def ports(process: int) -> list[tuple[str, int]]:
    """Return the address and port of every TCP socket at which a process listens."""
    inodes = {name.removeprefix("socket:[").removesuffix("]") for name in open_files(process)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == LISTENING and row[9] in inodes]
    return [(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in found]


def disturb(address: tuple[str, int]) -> list[socket.socket]:
    """Open foreign connections to one port: a silent one, some with garbage of several lengths, and one that
    closes at once.
    """
    stayed = []
    for nbytes in (0, 1, 8, 64, 1 << 16):
        stranger = socket.create_connection(address, timeout=60)
        stranger.setblocking(False)
        with suppress(OSError):  # they may hang up on us
            stranger.send(secrets.token_bytes(nbytes))
        stayed.append(stranger)
    socket.create_connection(address, timeout=60).close()
    return stayed


@pytest.mark.parametrize("tokens", [("ours", "ours"), ("ours", "")])
def test_workers_know_each_other_by_a_token(tokens: tuple[str, str], tmp_path: Path) -> None:
    """A connection to a worker without the token is refused by name, on either side."""
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
        assert told[0].startswith(
            "a process that connected as worker 1 does not know the token of this training: "
        )


def test_every_start_has_a_token_of_its_own() -> None:
    """Every start has a new token of 16 random bytes."""
    plan = plan_for("dropout", "1f1b", (2, 2, 2))
    tokens = {_Supervisor(plan, Orders(steps=1, seed=0), None, None).token for _ in range(9)}
    assert len(tokens) == 9
    assert {len(bytes.fromhex(token)) for token in tokens} == {16}


def impersonate(process: int, met: dict[tuple[str, int], list[socket.socket]], how: str, flags: Path) -> None:
    """Connect to every new port of a process as gloo's workers do, with small numbers; send random bytes,
    nothing, or close at once, then continue the process.
    """
    for address in ports(process):
        if address not in met:
            met[address] = [socket.create_connection(address, timeout=60) for _ in range(3)]
            garbage = secrets.token_bytes(4096) if how == "talks" else b""
            try:
                for number, stranger in enumerate(met[address]):
                    stranger.sendall(number.to_bytes(8, "little") + garbage)
                    if how == "leaves":
                        stranger.close()
            finally:
                (flags / network_workers.met(process)).touch()


def posing(folder: Path, starts: int, how: str) -> tuple[list[float], list[str]]:
    """Return losses and messages of a training with an impostor in a worker's place in the first `starts`
    starts.
    """
    met: dict[tuple[str, int], list[socket.socket]] = {}
    over = threading.Event()
    for number, worker in itertools.product(range(starts), range(2)):
        (folder / f"{number}-pipefit-worker-{worker}").touch()

    def pose() -> None:
        while not over.is_set():
            for worker in mp.active_children() if len(met) < 2 * starts else ():
                with suppress(OSError):
                    impersonate(worker.pid or 0, met, how, folder)
            time.sleep(0.01)

    stranger = threading.Thread(target=pose)
    stranger.start()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", PipefitWarning)
            plan = plan_for("dropout", "1f1b", (3, 3))
            losses, _ = pipefit.train(partial(late, str(folder)), plan, steps=3, seed=SEED, numbers=False)
    finally:
        over.set()
        stranger.join()
    return losses, [str(warning.message) for warning in told]


WAYS = [
    "leaves",
    pytest.param("talks", marks=pytest.mark.gallery),
    pytest.param("is silent", marks=pytest.mark.gallery),
]


@pytest.mark.parametrize("how", WAYS)
def test_a_stranger_that_takes_a_place_is_dropped_and_training_goes_on(how: str, tmp_path: Path) -> None:
    """An impostor that takes a worker's place during setup is dropped, in any behaviour, and the workers
    connect again.
    """
    losses, told = posing(tmp_path, 1, how)
    assert losses == undisturbed(3)
    (said,) = told
    assert re.search(
        r"^worker [01] \(device [01], .*; no worker failed on its own, so they connect again: ", said
    )
    assert said.endswith("start 2 of 5")


@pytest.mark.gallery
def test_a_stranger_that_comes_again_and_again_ends_the_training(tmp_path: Path) -> None:
    """An impostor at every start ends the training after five starts, with the reason."""
    with pytest.raises(PeerLost, match=r"^worker [01] \(device [01], "):
        posing(tmp_path, 9, "leaves")
    assert len(list(tmp_path.glob("*-pipefit-worker-*"))) == 8


@pytest.mark.gallery
@pytest.mark.timeout(300)
@pytest.mark.parametrize("restarts", [0, 1])
def test_under_torchrun_a_stranger_costs_one_of_its_restarts(restarts: int, tmp_path: Path) -> None:
    """Under torchrun, an impostor ends one start with a message; with `--max-restarts`, training continues
    with the losses of an undisturbed one.
    """
    script = [str(ROOT / "examples" / "restarting_loop.py"), "--steps", "4", "--every", "2"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", TOKEN: secrets.token_hex(16)}
    alone = subprocess.run(
        [sys.executable, *script, tmp_path / "alone"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (tmp_path / "flags").mkdir()
    for worker in range(3):
        (tmp_path / "flags" / f"0-torchrun-worker-{worker}").touch()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    late = [
        str(ROOT / "tests" / "support" / "network_workers.py"),
        str(tmp_path / "flags"),
        *script,
        str(tmp_path / "together"),
    ]
    met: dict[tuple[str, int], list[socket.socket]] = {}
    with subprocess.Popen(
        [*torchrun, "--max-restarts", str(restarts), *late],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        while run.poll() is None:
            for child in children(run.pid) if len(met) < 3 else ():
                with suppress(OSError):
                    impersonate(child, met, "leaves", tmp_path / "flags")
            time.sleep(0.01)
        out, err = run.communicate()
    assert len(met) == 3 and "PeerLost" in err
    assert (run.returncode, out) == ((0, alone.stdout) if restarts else (1, ""))


def test_strangers_are_dropped_and_training_goes_on() -> None:
    """Foreign connections at every port of every worker between two steps are dropped; workers listen on the
    loopback interface alone.
    """
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
