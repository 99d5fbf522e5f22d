"""Whose training a checkpoint is, and whose a folder of checkpoints is.

A training gets an identity as it starts. Its checkpoints carry it, and so does whatever goes on from one of them. Every
start by a user is a run of its own; workers that are started again within it, by `pipefit train --restarts` or by
torchrun, belong to the same run.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pipefit.errors import UsageError
from pipefit.texts import printable, shortened

_LONGEST_ID = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A training, and the run of it that is under way or has saved.

    Args:
        training: made at the training's start, and kept by all that go on from its checkpoints.
        run: made at each start by a user, and kept by restarts.
        host: the name of the machine on which the run started.
        pid: its process there: that of `pipefit train`, of the script, or of torchrun's first worker.
        started_seconds: when that was, since 1970.
        plan: of what, in how many stages, on what.
    """

    __pydantic_config__ = {"extra": "forbid"}

    training: str
    run: str
    host: str
    pid: int
    started_seconds: float
    plan: str

    def __post_init__(self) -> None:
        if not all(0 < len(name) <= _LONGEST_ID for name in (self.training, self.run)):
            raise UsageError(f"a training and its run have names of 1 to {_LONGEST_ID} characters")
        if not 0 <= self.started_seconds < 1 << 40:
            raise UsageError(f"a run has started at a time, not at {self.started_seconds}")

    def __str__(self) -> str:
        """The training by its names, for a sentence."""
        return (
            f"{printable(self.training[:8])} ({printable(shortened(self.plan))}), process {self.pid} on "
            f"{printable(shortened(self.host))}, started {utc(self.started_seconds)}"
        )


def new_owner(plan: str, *, training: str | None = None) -> Owner:
    """The owner that this process is: of a new training, or of a new run of `training`.

    Worker processes that torchrun starts again have the run of their first start.
    """
    agent = _agent()
    run = secrets.token_hex(16) if agent is None else sha256(agent.name.encode()).hexdigest()[:32]
    return Owner(
        training=training or run,
        run=run,
        host=socket.gethostname() or "this host",
        pid=os.getpid(),
        started_seconds=time.time(),
        plan=plan,
    )


def restarted_since() -> float | None:
    """When the first start of this worker's run was, in seconds since 1970, if torchrun has started it again."""
    agent = _agent()
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return agent.started_seconds if agent is not None and again else None


def utc(seconds: float) -> str:
    """A moment in words, such as 2026-11-27 20:22:38 UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def process_start(pid: int) -> float | None:
    """When a process of this machine started, in seconds since 1970; None where there is none, or nobody can say."""
    try:
        ticks = int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
        boot = next(
            int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime ")
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return boot + ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Agent:
    """torchrun's process on this machine, which starts workers again and outlives them."""

    name: str
    started_seconds: float


def _agent() -> _Agent | None:
    """The agent that started this process; None where it was not torchrun.

    On one machine it is the process itself. On several, the first worker may be started again on another machine, so
    that the job's name is the better one, if it has one.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if job is None:
        return None
    started = process_start(os.getppid())
    several = False
    with suppress(KeyError, ValueError):
        several = int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"])
    if (several and job != "none") or started is None:
        return _Agent(job, started or time.time())
    return _Agent(f"{socket.gethostname()} {os.getppid()} {started}", started)
