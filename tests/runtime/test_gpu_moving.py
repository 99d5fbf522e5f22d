"""Tensors offloaded from a CUDA device to pinned memory, and to another process of the same GPU. Skipped
without one.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pipefit.capture import Task
from pipefit.lowering import lower
from pipefit.memory.arenas import Arena, arenas_of
from pipefit.models import build
from pipefit.runtime import Trainer, certify
from pipefit.runtime.offload.copying import SlotPart
from pipefit.runtime.offload.cuda import CudaDriver, OnStreams
from pipefit.runtime.offload.lending import CudaMemory, Lending
from pipefit.schema.decisions import Decision, SavedTensors, What
from pipefit.schema.devices import Member, MemberKind, parse_place
from pipefit.schema.plan import Plan
from support.gpu_lender import lend
from support.known_profiles import profile
from support.random_offloads import movable, with_disk
from support.separate_process import elsewhere
from support.small_tasks import batch_of, plan_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
STEPS = 3


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Free the memory of earlier tests."""
    for moment in range(2):
        gc.collect()
        torch.cuda.empty_cache()
        if not moment:
            yield


def gpt() -> Task:
    """Return a small GPT, whose layers keep megabytes."""
    return build("gpt", layers=4, hidden=256, heads=8, vocabulary=5000, sequence=256)


def moving_to(place: str) -> tuple[Plan, Plan]:
    """Return plans with all layers on one GPU of two: without moves, and with every other saved storage moved
    away.
    """
    task = gpt()
    layers = len(list(task.build().children()))
    found = elsewhere(profile, task, microbatch_size=8, target="cuda")
    still = plan_of(
        task, [layers], size=8, microbatches=4, schedule="gpipe", memory_bytes=1 << 34, profiled=found
    )
    still = replace(still, cluster=replace(still.cluster, backend="cuda", devices=still.cluster.devices * 2))
    link = replace(still.cluster.links[0], members=parse_place("device0*1+device1*1+host0*1").members)
    still = replace(still, cluster=with_disk(replace(still.cluster, links=(link,)), disk_bytes=1 << 34))
    subject = SavedTensors(tensors=tuple(movable(still, 0)[::2]))
    decision = Decision(stage=0, subject=subject, what=What.OFFLOAD, place=parse_place(place), ahead=1)
    return still, replace(still, decisions=(decision,))


def trained(plan: Plan) -> tuple[list[float], int]:
    """Return the losses, and the allocator's peak in the last step above its starting level."""
    task = gpt()
    base = int(torch.cuda.memory_stats(DEVICE).get("requested_bytes.all.current", 0))
    trainer = Trainer(task, plan)
    losses = [trainer.step(batch_of(task, plan, step)) for step in range(STEPS)]
    torch.cuda.synchronize(DEVICE)
    assert all(not runner.mover.borrowed.in_use for runner in trainer.runners)
    return losses, trainer.trace.devices[0].step_peak_bytes(STEPS - 1) - base


def warm() -> None:
    """Let libraries allocate their lasting workspaces."""
    trained(moving_to("host")[0])
    gc.collect()


@pytest.mark.parametrize("place", ["host", "disk"])
def test_what_is_moved_to_the_host_comes_back(place: str) -> None:
    """With offload to the host, losses are bitwise those of the plan without moves; the allocator's peaks are
    within 1 % of the certificate.
    """
    warm()
    still, moved = moving_to(place)
    (expected, high), (losses, low) = trained(still), trained(moved)
    assert losses == expected
    peaks = [
        elsewhere(certify, gpt(), plan, target="cuda").devices[0].step_peak_bytes(1)
        for plan in (still, moved)
    ]
    assert [high, low] == [pytest.approx(peak, rel=0.01) for peak in peaks]
    assert low < high


def test_what_is_moved_to_another_process_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload into memory lent by a second process of this GPU gives the same: data is written there, and not
    counted here.
    """
    warm()
    still, moved = moving_to("device1*2+host*1")
    arenas = arenas_of(moved, lower(moved))
    lent = [arena for arena in arenas if arena.lender.kind is MemberKind.DEVICE]
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    lender = context.Process(target=lend, args=(lent, there), daemon=True)
    lender.start()
    memory = CudaMemory(moved.cluster, arenas, lambda number: DEVICE, CudaDriver())
    mapped = {arena: memory.borrow(arena, told) for arena, told in zip(lent, here.recv(), strict=True)}
    expected, high = trained(still)
    monkeypatch.setattr(Lending, "within", lambda *_: Lending(arenas, OnStreams.of, memory, mapped))
    losses, low = trained(moved)
    assert losses == expected
    assert low < high
    here.send("what is there?")
    assert here.recv() == [True] * len(lent)
    mapped.clear()
    here.send("that is all")
    lender.join(60)
    assert lender.exitcode == 0


@pytest.mark.parametrize("nbytes", [1, 1000, (1 << 24) + 3])
def test_bytes_make_the_round_trip(nbytes: int) -> None:
    """Copies of odd sizes make the round trip; freed memory that is reused before the return does not corrupt
    them.
    """
    arena, cluster = Arena(Member.host(0), 0, 2, nbytes), moving_to("host")[0].cluster
    slot, other = CudaMemory(cluster, [arena], lambda number: DEVICE, CudaDriver()).own(arena)
    copier, tensor = OnStreams.of(DEVICE), torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=DEVICE)
    wanted, storage = tensor.clone(), tensor.untyped_storage()
    copier.join(copier.start([SlotPart(storage, 0, slot, 0, nbytes)], outward=True, seconds=0.0))
    storage.resize_(0)
    spoils = [torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
    copier.join(
        copier.start([SlotPart(spoils[0].untyped_storage(), 0, other, 0, nbytes)], outward=True, seconds=0.0)
    )
    storage.resize_(nbytes)
    copier.join(copier.start([SlotPart(storage, 0, slot, 0, nbytes)], outward=False, seconds=0.0))
    assert torch.equal(tensor, wanted)
