"""The GPUs of workers, and backwards in a process that has used fake ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from pipefit.errors import UsageError
from pipefit.fake_cuda.target import FakeTarget
from pipefit.lowering import lower
from pipefit.memory.cuda_allocator import AllocatorSettings
from pipefit.runtime import certify
from pipefit.runtime import trainer as trainer_module
from pipefit.runtime.comm import transport
from pipefit.runtime.comm.transport import HostBuffers, Network
from pipefit.runtime.hardware import Hardware, check_backwards, check_hosts
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan
from support.small_tasks import batch_of, plan_of, task_of, trainer_of

GPU = torch.device("cuda", 0)


def test_backwards_on_a_gpu_are_refused_after_fake_ones() -> None:
    """A GPU backward after fake GPUs is refused, since torch's engine would fail with an obscure assertion;
    CPU backwards still run.
    """
    with FakeTarget("cuda"):
        pass
    check_backwards([torch.device("cpu")])
    with pytest.raises(UsageError, match="in another process and load the plan here"):
        check_backwards([torch.device("cpu"), GPU])


def on_hosts(*hosts: int, order: tuple[int, ...]) -> Plan:
    """Return a plan with a layer on each of these GPU devices, which sit in such hosts."""
    plan = plan_of(task_of(lambda: [nn.Linear(8, 8) for _ in hosts], outputs=8), [1] * len(hosts))
    devices = tuple(
        replace(device, host=host) for device, host in zip(plan.cluster.devices, hosts, strict=True)
    )
    cluster = replace(
        plan.cluster, backend="cuda", devices=devices, hosts=plan.cluster.hosts * (max(hosts) + 1)
    )
    stages = tuple(
        replace(stage, grid=Grid.of(device)) for stage, device in zip(plan.stages, order, strict=True)
    )
    return replace(plan, cluster=cluster, stages=stages)


@contextmanager
def started(rank: int, world: int, local: int | None = None, shown: int = 8) -> Iterator[None]:
    """Set the environment of a worker started by torchrun with `local` workers per machine, or by a launcher
    without local ranks.
    """
    told = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    if local:
        told |= {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}
    with (
        mock.patch.dict(os.environ, told),
        mock.patch.object(torch.cuda, "device_count", return_value=shown),
        mock.patch.object(torch.cuda, "set_device"),
    ):
        yield


def found(plan: Plan, local: int | None = None, shown: int = 8) -> list[int]:
    """Return the number of each worker's GPU on its machine."""
    numbers = []
    for rank in range(len(plan.ranks)):
        with started(rank, len(plan.ranks), local, shown):
            check_hosts(plan, rank)
            numbers.append(Hardware(plan).device(plan.workers[rank]).index)
    return numbers


def test_every_worker_is_on_the_gpu_of_its_stage() -> None:
    """Every worker computes on the GPU of its stage, for any order of stages on devices and any local rank."""
    plan = on_hosts(0, 0, 0, 0, order=(2, 0, 3, 1))
    assert found(plan, local=4) == [2, 0, 3, 1]
    assert found(plan) == [2, 0, 3, 1]


def test_a_gpu_is_counted_on_its_host() -> None:
    """A GPU's number counts on its host: devices 2 and 3 are the second machine's first two, unless one
    machine has all.
    """
    plan = on_hosts(0, 0, 1, 1, order=(3, 2, 0, 1))
    assert plan.workers == (0, 1, 3, 2)
    assert found(plan, local=2) == [0, 1, 1, 0]
    assert found(plan) == [0, 1, 1, 0]
    assert found(plan, local=4) == [0, 1, 3, 2]


def test_workers_on_the_wrong_machine_are_told() -> None:
    """Two workers on each of two machines are refused if the plan has three of four on one host."""
    with pytest.raises(UsageError) as caught:
        found(on_hosts(0, 0, 0, 1, order=(0, 1, 2, 3)), local=2)
    assert (
        "workers [0, 1] were started on one machine, but worker 0 belongs to host 0, which has workers [0, 1, 2]"
        in str(caught.value)
    )


def test_workers_are_started_host_by_host() -> None:
    """Launchers start a host's workers in a row, even if stages go from one host to another and back."""
    plan = on_hosts(0, 1, 1, 0, order=(1, 0, 2, 3))
    assert plan.workers == (0, 3, 1, 2)
    assert found(plan, local=2) == [0, 1, 0, 1]


def test_a_single_gpu_is_taken_where_the_launcher_shows_no_other() -> None:
    """A worker that sees a single GPU uses it, as under SLURM; torchrun's local world size shows a shared
    GPU, which is refused.
    """
    plan = on_hosts(0, 0, order=(1, 0))
    assert found(plan, shown=1) == [0, 0]
    with pytest.raises(UsageError, match="needs GPU 1 of this machine, which has 1"):
        found(plan, local=2, shown=1)


def test_all_devices_may_share_one_gpu() -> None:
    """All devices may share one GPU: every worker uses the first GPU under any plan, over gloo, since NCCL
    refuses this.
    """
    plan = on_hosts(0, 0, 1, order=(2, 0, 1))
    with started(0, 3, 3, shown=1), mock.patch.object(torch.cuda, "is_available", return_value=True):
        assert [Hardware(plan, shared=True).device(number).index for number in plan.workers] == [0, 0, 0]
        assert [Hardware(plan, shared).backend for shared in (True, False)] == ["gloo", "nccl"]
        with pytest.raises(UsageError, match="--share-device"):
            Hardware(plan).device(2)


@pytest.mark.parametrize(("device", "kind"), [("cuda", HostBuffers), ("cpu", Network)])
def test_who_shares_a_gpu_talks_by_way_of_the_host(device: str, kind: type) -> None:
    """Workers that share a GPU send tensors through the host's network; CPU workers are unaffected."""
    plan, made = on_hosts(0, 0, order=(0, 1)), mock.create_autospec(Network)
    with mock.patch.object(transport, "connect", return_value=made) as connected:
        found = transport.transport_of(Hardware(plan, shared=True), lower(plan), torch.device(device), 1.0)
    assert isinstance(found, kind) or (found is made and kind is Network)
    assert connected.call_args.args[2] == torch.device("cpu")


def test_an_evaluation_runs_no_backward() -> None:
    """An evaluation, which lacks a backward, runs on a GPU after fake ones; a step is refused."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 4)])
    trainer = trainer_of(task, [1, 1])
    batch = batch_of(task, trainer.plan)
    with mock.patch.object(trainer_module, "check_backwards", side_effect=UsageError("no backward")):
        assert trainer.evaluate(batch) > 0
        with pytest.raises(UsageError, match="no backward"):
            trainer.step(batch)


def test_without_fake_gpus_backwards_may_run_on_real_ones() -> None:
    """If no target has been used, backwards run on GPUs, and autograd follows their streams."""
    with mock.patch("pipefit.fake_cuda.target.privateuse1_name", return_value="privateuseone"):
        check_backwards([GPU])


@pytest.mark.parametrize("devices", [1, 3])
def test_an_allocator_may_reserve_what_a_certificate_leaves_it(devices: int) -> None:
    """An allocator may reserve a device's memory except for the certificate's context and communicators."""
    task = task_of(lambda: [nn.Linear(8, 8) for _ in range(3)], outputs=8)
    plan = plan_of(task, [3] if devices == 1 else [1, 1, 1], memory_bytes=1 << 34)
    plan = replace(plan, cluster=replace(plan.cluster, backend="cuda"))
    for number, device in enumerate(
        certify(task, plan, target="cuda", allocator=AllocatorSettings()).devices
    ):
        told = device.allocator
        assert told is not None
        assert told.context_bytes
        beside = told.context_bytes + told.communicators * told.communicator_bytes
        assert Hardware(plan).cap_bytes(lower(plan), number) == device.budget_bytes - beside
