"""Faults of workers in every worker and phase; source of the tables in docs/faults.md.

PYTHONPATH=src:tests:benchmarks python -m support.worker_faults
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import tempfile
import time
import warnings
from functools import cache, partial
from itertools import product
from pathlib import Path
from unittest import mock

import torch

from page_tables import markdown, put
from pipefit.checkpoints import find
from pipefit.errors import PipefitWarning, WorkerFailed
from pipefit.runtime import Trainer, train
from pipefit.runtime.options import Saving
from pipefit.schema.plan import Plan
from support.known_profiles import profile
from support.resumed_tasks import HAPPENED, SEED, faulty, named, plan_for
from support.sharded_stages import grid_plan

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
STEP, EVERY, TIMEOUT = (
    5,
    2,
    3,
)  # the step of the fault, those between checkpoints, the seconds an action may take
START = 8  # the seconds that the start may take where a worker stands still in it
SPLIT = (3, 3)

FAULTS = {
    "raises": "failed {where}: ValueError: enough",
    "is killed (signal 9)": "failed {where}: killed by signal 9",
    "ends by itself": "failed {where}: its process exited with code 3",
    "stands still (SIGSTOP)": "hangs {where}: no sign of life for {silent} s",
}
HAPPENS = dict(zip(FAULTS, ("raises", "killed", "ends", "stopped"), strict=True))
PLACES = {
    "start": ("as it builds its task", "while it started"),
    "batch": ("as it makes a batch", "while it made its batch"),
    "F1": ("in a forward", "at {worker}F1"),
    "B1": ("in a backward", "at {worker}B1"),
    "STEP": ("in the update", "at {worker}STEP"),
    "save": ("as it saves", "while it saved a checkpoint"),
}
SECONDS = 300  # in which all is over on a loaded machine too
TITLE = "seconds to the end, steps lost"


def plan_on(data: int, tensor: int) -> Plan:
    """Return the same plan as a single stage, which replicas and shards share."""
    profiled = profile(faulty("raises", "never", 0, STEP), microbatch_size=(2, 1), tensor=(1, 2))
    return grid_plan(profiled, [0, 6], [(data, tensor)], microbatches=4)


def suffered(
    folder: Path, fault: str, place: str, worker: int, plan: Plan | None = None
) -> tuple[str, float]:
    """Return the message of training after a fault, and the seconds until everything has ended."""
    stage = worker if plan is None else 0
    at = place if place in ("start", "batch", "save") else f"{stage}{place}"
    happened = folder / "happened"
    try:
        with mock.patch.dict(os.environ, {HAPPENED: str(happened)}):
            train(
                partial(faulty, HAPPENS[fault], at, worker, STEP),
                plan or plan_for("dropout", "1f1b", SPLIT),
                steps=9,
                seed=SEED,
                numbers=False,
                timeout_seconds=TIMEOUT if fault == "stands still (SIGSTOP)" else 60,
                start_seconds=START if (fault, place) == ("stands still (SIGSTOP)", "start") else 60,
                saving=Saving(directory=str(folder), every=EVERY),
            )
    except WorkerFailed as error:
        if not happened.exists():
            raise AssertionError(str(error)) from error
        return str(error), time.time() - happened.stat().st_mtime
    raise AssertionError("nothing has failed")


def assert_named(folder: Path, fault: str, place: str, worker: int, plan: Plan | None = None) -> None:
    """Assert that the message names the worker, its phase, the training's progress and the checkpoint, and
    that no process is left soon after.
    """
    said, seconds = suffered(folder, fault, place, worker, plan)
    stage = worker if plan is None else 0
    where = PLACES[place][1].format(worker=stage)
    if fault == "stands still (SIGSTOP)" and plan is not None and plan.stages[0].grid.tensor > 1:
        said = re.sub(
            r"^worker \d (.*), or device \d of its tensor group, hangs", rf"worker {worker} \1 hangs", said
        )
        said = re.sub(
            r"device \d", f"device {worker}", said, count=1
        )  # one of those that wait for each other
    expected = FAULTS[fault].format(where=where, silent=START if place == "start" else TIMEOUT)
    assert said.startswith(f"worker {worker} (device {worker}, ") and expected in said
    done = 0 if place == "start" else STEP + (place == "save")
    reached = rf"steps done: {done}, last saved: {'none' if place == 'start' else '[24]; resume'}"
    assert re.search(f"; {reached}", said), said
    assert mp.active_children() == []
    assert seconds < SECONDS


KILLS = {  # phases, and where a worker is killed then
    "start": "start",
    "batch": "batch",
    "forward": "{stage}F1",
    "backward": "{stage}B1",
    "exchange": "",
    "update": "{stage}STEP",
    "end of the step": "end",
    "save": "save",
    "end": "finish",
}
EXCHANGES = {  # by worker
    "replicas": ("0REDUCE", "0WAIT_REDUCE"),
    "pipedream": ("0SEND_F1", "1SEND_B1"),
    "pipedream-2bw": ("0WAIT_RECV_B1", "1WAIT_RECV_F1"),
}
UPDATES = {"pipedream": ("0STEP1", "1STEP1"), "pipedream-2bw": ("0STEP-1", "1STEP3")}  # by worker


@cache
def plan_named(name: str) -> Plan:
    """Return two replicas of a stage, or two stages under an asynchronous schedule."""
    return plan_on(2, 1) if name == "replicas" else plan_for("dropout", name, SPLIT)


@cache
def losses_of(name: str, folder: Path, steps: int = 9) -> list[float]:
    """Return the losses of one undisturbed process that saves at the same steps."""
    trainer, losses = Trainer(named("dropout"), plan_named(name), seed=SEED, numbers=False), list[float]()
    for step in range(steps):
        torch.manual_seed(SEED + step)
        losses.append(trainer.step(trainer.task.batch(8)))
        if not (step + 1) % EVERY:
            trainer.save(folder)
    return [*losses[trainer.late :], *trainer.finish()]


def assert_survived(folder: Path, name: str, phase: str, worker: int) -> None:
    """Assert that training restarts after a worker is killed once in a phase, with the losses of an
    undisturbed run; or that all steps were done and saved, with a message that says so.
    """
    stage = 0 if name == "replicas" else worker
    place = KILLS[phase].format(stage=stage) or EXCHANGES[name][worker]
    if phase == "update" and name in UPDATES:
        place = UPDATES[name][worker]
    once = folder / "once"
    once.touch()
    runs = folder / "runs"
    expected = losses_of(name, folder / "expected")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", PipefitWarning)
            losses, _ = train(
                partial(faulty, "killed", place, worker, STEP, str(once)),
                plan_named(name),
                steps=9,
                seed=SEED,
                numbers=False,
                saving=Saving(directory=str(runs), every=EVERY),
                restarts=1,
            )
    except WorkerFailed as error:
        losses, said, restarted = expected, str(error), "steps done: 9, last saved: 9"
    else:
        said, restarted = "\n".join(str(one.message) for one in told), "restart 1 of 1 continues after step"
    assert losses == expected
    assert f"worker {worker} (device {worker}, " in said and "killed by signal 9" in said, said
    assert restarted in said, said
    assert phase == "end" or restarted.startswith("restart")
    assert not once.exists()
    assert mp.active_children() == []
    assert find(runs).manifest.step == 9


def lost(said: str) -> int:
    """Return the steps to train again, as a failure reports them."""
    found = re.search(r"steps done: (\d+), last saved: (none|\d+)", said)
    assert found is not None, said
    return int(found[1]) - (0 if found[2] == "none" else int(found[2]))


def table() -> str:
    """Return every fault in every phase: seconds and lost steps for the worker with the worse result."""
    found = dict[tuple[str, str], list[tuple[float, int]]]()
    for fault, place, worker in product(FAULTS, PLACES, (0, 1)):
        with tempfile.TemporaryDirectory() as folder:
            said, seconds = suffered(Path(folder), fault, place, worker)
        found.setdefault((fault, place), []).append((seconds, lost(said)))
    worst = {case: (max(s for s, _ in each), max(n for _, n in each)) for case, each in found.items()}
    rows = [
        [
            fault,
            *(f"{seconds:.1f} s, {steps}" for seconds, steps in (worst[fault, place] for place in PLACES)),
        ]
        for fault in FAULTS
    ]
    return markdown(["a worker", *(words for words, _ in PLACES.values())], rows)


if __name__ == "__main__":
    put({TITLE: table()}, PAGE)
