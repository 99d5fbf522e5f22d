"""The task's module on workers: its numbers are those of plain training, or reading them raises an error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipefit import Cluster, Plan, Training, profile
from pipefit.errors import UsageError
from pipefit.runtime.task_module import Absent
from pipefit.schema.decisions import Decision, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.profile import ModelProfile
from support.separate_process import in_workers
from support.worker_modules import BATCH, BUILT, MICROBATCHES, Tied, reading_workers, task_of


@cache
def profiled(name: str) -> ModelProfile:
    """Return a profile of whole layers, and of layers divided between two ranks."""
    size = BATCH // MICROBATCHES
    return profile(task_of(BUILT[name]()), microbatch_size=(size, size // 2), tensor=2)


def plan_of(name: str, *grids: dict[str, Any], decisions: Sequence[Decision] = ()) -> Plan:
    """Return a plan with one or two stages, on two devices."""
    found = profiled(name)
    layers, each = len(found.layers), 2 // len(grids)
    edges = (0, layers) if len(grids) == 1 else (0, layers // 2, layers)
    stages = [
        Stage(start=start, stop=stop, grid=Grid(devices=tuple(range(n * each, (n + 1) * each)), **grid))
        for n, (start, stop, grid) in enumerate(zip(edges[:-1], edges[1:], grids, strict=True))
    ]
    return Plan(
        profile=found,
        cluster=Cluster.emulated((2, 1 << 30)),
        training=Training(batch_size=BATCH, microbatches=MICROBATCHES),
        stages=tuple(stages),
        decisions=tuple(decisions),
    )


def away(kind: Any) -> Decision:
    """Move state of the first stage to the host."""
    subject = State(start=0, stop=1, kind=kind)
    return Decision(stage=0, subject=subject, what=What.OFFLOAD, place=parse_place("host"))


DIVIDED: dict[str, Any] = {"data": 2, "shard": "parameters"}
PLANS: dict[str, Callable[[str], Plan]] = {
    "written whole zero 2": lambda name: plan_of(name, {"data": 2, "shard": "gradients"}),
    "written zero 3": lambda name: plan_of(name, DIVIDED),
    "traced stages": lambda name: plan_of(name, {}, {}),
    "written shards": lambda name: plan_of(name, {"tensor": 2}),
}
MORE: dict[str, Callable[[str], Plan]] = {
    "written whole replicas": lambda name: plan_of(name, {"data": 2}),
    "written whole zero 1": lambda name: plan_of(name, {"data": 2, "shard": "optimizer"}),
    "traced zero 3": lambda name: plan_of(name, DIVIDED),
    "traced shards": lambda name: plan_of(name, {"tensor": 2}),
    "written stages": lambda name: plan_of(name, {}, {}),
    "written away": lambda name: plan_of(name, {}, {}, decisions=[away("parameters"), away("optimizer")]),
    "written zero 3 away": lambda name: plan_of(
        name, DIVIDED, decisions=[away("parameters"), away("optimizer")]
    ),
}


@pytest.mark.parametrize(
    "plans", [PLANS, pytest.param(MORE, marks=pytest.mark.gallery)], ids=["often", "more"]
)
def test_workers_read_numbers_of_plain_training_or_an_error(
    plans: dict[str, Callable[[str], Plan]], tmp_path: Path
) -> None:
    """Under every kind of plan, everything that a worker reads of the module, its parts and its tensors is that of
    plain training, or raises one sentence; whole weights can be loaded, and another trainer can go on.
    """
    made = {name: plan(name.partition(" ")[0]) for name, plan in plans.items()}
    in_workers(2, reading_workers, str(tmp_path), made)


def test_absent_tensors_have_a_form_and_no_numbers() -> None:
    """Sharing, storages and pointers of an absent tensor raise an error, and so does a copy of one; its form is
    known, and copied numbers are in all its places.
    """
    module = BUILT["traced"]()
    assert isinstance(module, Tied)
    weight = module.first.weight
    absent = Absent.like(weight, "first.weight")
    for part in (module.first, module.last):
        absent.place_in(part._parameters, "weight")
    for read in (
        Tensor.share_memory_,
        Tensor.untyped_storage,
        Tensor.data_ptr,
        Tensor.__dlpack__,
        Tensor.sum,
        copy.copy,
    ):
        with pytest.raises(UsageError, match=r"first\.weight cannot be read"):
            read(absent)
    assert f"{absent}" == "<first.weight of shape (8, 8), which this process lacks>"
    assert "FloatTensor of size 8x8" in repr(torch.nn.ParameterDict({"own": absent}))
    module.load_state_dict(
        module.state_dict(keep_vars=True) | {"first.weight": weight, "last.weight": weight}
    )
    assert module.first.weight is module.last.weight
    assert torch.equal(module.first.weight, weight)
