"""Parallel dry runs: several processes give the same answer, and run each device once."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pipefit.runtime.dry_run.certify import Rehearsed
from pipefit.schema.layer_costs import Kernel
from support.separate_process import printed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has forks of this kind")

# In a separate process, because a process cannot fork after a backward.
_PROGRAM = """
from contextlib import nullcontext
from unittest import mock

from pipefit.memory.cuda_allocator import AllocatorSettings
from pipefit.processes import beside, forking
from support.known_profiles import profile
from pipefit.runtime import certify
from pipefit.runtime.dry_run import certify as dry_run
from pipefit.runtime.dry_run import reserved
from support.small_tasks import plan_of
from support.two_pool_model import on_gpus, wide

with forking(), mock.patch("os.sched_getaffinity", lambda _: {0, 1}):
    (profiled,) = beside(lambda: profile(wide(), microbatch_size=700, target="cuda"))
    found = profiled()


def answer(plan, how, cores):
    "What is certified, and how many devices are run in this process."
    with (
        how,
        mock.patch("os.sched_getaffinity", lambda _: set(range(cores))),
        mock.patch.object(dry_run, "assemble", wraps=dry_run.assemble) as run,
    ):
        return certify(wide(), plan, allocator=AllocatorSettings()), run.call_count


plans = {
    schedule: on_gpus(
        plan_of(wide(), [3, 1, 2], size=700, microbatches=4, schedule=schedule, profiled=found)
    )
    for schedule in ("1f1b", "pipedream")
}
divided = {(name, cores): answer(plan, forking(), cores) for name, plan in plans.items() for cores in (2,)}
alone = {name: answer(plan, nullcontext(), 2) for name, plan in plans.items()}
for (name, cores), (trace, here) in divided.items():
    assert trace == alone[name][0], (name, cores)
    print(name, cores, here, alone[name][1])
"""


def test_devices_are_divided_between_processes() -> None:
    """Devices are divided between child processes; the parent runs none, so that it can fork again."""
    assert printed(_PROGRAM) == ["1f1b 2 0 3", "pipedream 2 0 3"]


def test_parts_of_a_dry_run_tell_of_all_devices() -> None:
    """A divided dry run reports every device and each assumption once, and differs from a whole one as soon
    as one part does.
    """
    assumed = Kernel(
        operation="aten._local_scalar_dense.default()", peak_bytes=None, reason="its value is not known"
    )
    peaks: Any = None
    one, other = (
        Rehearsed({0: [], 2: []}, {0: peaks, 2: peaks}, (assumed,)),
        Rehearsed({1: []}, {1: peaks}, (assumed,)),
    )
    together = Rehearsed.together([one, other])
    assert together.samples.keys() == together.peaks.keys() == {0, 1, 2}
    assert together.assumed == (assumed,)
    assert together.alike
    assert not Rehearsed.together([one, other._replace(alike=False)]).alike
