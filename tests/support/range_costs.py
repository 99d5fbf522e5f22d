"""Costs of a run of layers as a stage, from the storage account (`storage_account.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipefit.schema.actions import Action, Kind
from pipefit.schema.profile import Measurement
from pipefit.schema.trace import Category
from support.storage_account import Device, StageAccount


class Moment(NamedTuple):
    """An isolated action: its peak above its entry, and its final level above the entry."""

    peak_bytes: int
    after_bytes: int


def range_account(
    measurement: Measurement, start: int, stop: int, *, microbatches: int = 1
) -> dict[str, int]:
    """Return the costs of layers `start` to `stop - 1` as a stage, by the names of the closed forms' `Band`.

    Each number is the difference that one action makes, in a step with or without recomputation.
    """
    plain = dict(_actions(measurement, start, stop, microbatches, again=False))
    again = dict(_actions(measurement, start, stop, microbatches, again=True))
    rest, arrived = plain["rest"].after_bytes, plain["load"].after_bytes + plain["receive"].after_bytes
    later = plain["STEP later"]
    return {
        "static": rest - plain["early"].after_bytes,
        "gradients": -later.after_bytes,
        "state": plain["state"].after_bytes,
        "early": plain["early"].after_bytes,
        "weights": plain["STASH"].after_bytes,
        "retained": arrived + plain["F"].after_bytes + plain["WAIT_SEND_F"].after_bytes,
        "inputs": arrived,
        "received": plain["receive"].after_bytes,
        "output_gradients": plain["RECV_B"].after_bytes,
        "input_gradients": -plain["WAIT_SEND_B"].after_bytes,
        "sent": -plain["WAIT_SEND_F"].after_bytes,
        "forward_peak": plain["F"].peak_bytes,
        "backward_first_peak": plain["B"].peak_bytes,
        "backward_later_peak": plain["B later"].peak_bytes,
        "update_first_peak": plain["early"].after_bytes + plain["STEP"].peak_bytes,
        "update_peak": later.peak_bytes,
        "buffers": arrived + again["N and R"].after_bytes - plain["retained"].after_bytes,
        "kept": arrived + again["N"].after_bytes + again["WAIT_SEND_F"].after_bytes,
        "checkpoint_sent": -again["WAIT_SEND_F"].after_bytes,
        "checkpoint_peak": again["N"].peak_bytes,
    }


def _actions(
    measurement: Measurement, start: int, stop: int, microbatches: int, *, again: bool
) -> Iterator[tuple[str, Moment]]:
    """Return two steps of two consecutive microbatches each; the second microbatch of a step is the later
    one.
    """
    device = Device()
    stage = StageAccount(device, measurement, start, stop, microbatches=microbatches)
    early = device.levels.get(Category.OPTIMIZER, 0)
    yield "rest", Moment(device.level, device.level)
    yield "early", Moment(early, early)

    def do(kind: Kind, microbatch: int | None = 0, *, wait: bool = False) -> Moment:
        entry = device.peak = device.level
        stage.act(Action(kind, 0, microbatch, wait=wait))
        device.reach(0)
        return Moment(device.peak - entry, device.level - entry)

    for step in range(2):
        for microbatch in range(2):
            suffix = " later" * (microbatch + step > 0)
            base = device.level
            yield "receive" + suffix, do(Kind.RECV_FORWARD, microbatch) if start else Moment(0, 0)
            yield "load" + suffix, do(Kind.LOAD, microbatch)
            arrived = device.level
            yield (
                ("N" if again else "F") + suffix,
                do(Kind.FORWARD_ONLY if again else Kind.FORWARD, microbatch),
            )
            yield "WAIT_SEND_F" + suffix, do(Kind.SEND_FORWARD, microbatch, wait=True)
            if again:
                yield "R" + suffix, do(Kind.RECOMPUTE, microbatch)
                yield "N and R", Moment(0, device.level - arrived)
            yield "retained", Moment(0, device.level - base)
            yield "RECV_B" + suffix, do(Kind.RECV_BACKWARD, microbatch) if not stage.last else Moment(0, 0)
            yield "B" + suffix, do(Kind.BACKWARD, microbatch)
            yield "WAIT_SEND_B" + suffix, do(Kind.SEND_BACKWARD, microbatch, wait=True)
        yield "STEP" + " later" * step, do(Kind.STEP, None)
    yield "state", Moment(0, device.levels.get(Category.OPTIMIZER, 0))
    yield "STASH", do(Kind.STASH)
