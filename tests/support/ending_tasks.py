"""A task whose training ends at one action: the worker is killed or raises, or Ctrl-C reaches the parent."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from unittest import mock

from pipefit.capture import Task
from pipefit.runtime.engine.runner import DeviceRunner
from pipefit.schema.actions import Action
from pipefit.schema.trace import Stream
from support.random_offloads import make_chain

HOW = ("killed", "raises", "interrupted")
STEP = 1  # the one in which it happens; everything has been done once before


def make_ending(how: str, device: int, action: str) -> Task:
    """End training in this worker when it reaches this action in the second step."""
    original = DeviceRunner._timed

    def timed(self: DeviceRunner, done: Action, text: str, stream: Stream) -> None:
        if (self.number, self.record.steps, text) == (device, STEP, action):
            _end(how)
        original(self, done, text, stream)

    mock.patch.object(DeviceRunner, "_timed", timed).start()
    return make_chain()


def _end(how: str) -> None:
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ValueError("enough")
        case "interrupted":
            parent = mp.parent_process()
            assert parent is not None and parent.pid is not None
            os.kill(parent.pid, signal.SIGINT)
