"""Execution of programs: exact memory caps, failures that leave nothing allocated, and invalid programs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import FileError, OutOfMemory, UsageError
from pipefit.lowering import lower
from pipefit.runtime import Trainer, certify, trainer
from pipefit.runtime.comm import transport
from pipefit.runtime.options import Supervision
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, parse_program
from support.known_profiles import profile
from support.small_tasks import batch_of, plan_of, task_of, trainer_of


class Fuse(nn.Module):
    """The identity, which can raise in its forward or backward number `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.at: tuple[str, int] | None = None
        self.calls = {"forward": 0, "backward": 0}

    def burn(self, what: str) -> None:
        if self.at == (what, self.calls[what]):
            raise RuntimeError(f"the fuse blew in {what} {self.calls[what]}")
        self.calls[what] += 1

    def forward(self, x: Tensor) -> Tensor:
        self.burn("forward")
        return _Watched.apply(x, self)


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.fuse.burn("backward")
        return gradient.clone(), None


def fused(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Task:
    """Return enough layers for three stages, with a fuse in the middle."""
    return task_of(
        lambda: [nn.Linear(8, 32), nn.Tanh(), Fuse(), nn.Linear(32, 16), nn.Linear(16, 4)],
        optimizer=optimizer,
    )


@functools.cache
def three_stages(schedule: str = "1f1b") -> Plan:
    """Return a plan for `fused`."""
    return plan_of(fused(), [2, 2, 1], microbatches=4, schedule=schedule)


def capped(plan: Plan, peaks: list[int]) -> Plan:
    """Return the plan on devices with these caps."""
    return replace(plan, cluster=Cluster.emulated(*((1, nbytes) for nbytes in peaks)))


def failure(run: Callable[[], object], kind: type[BaseException]) -> str:
    """Return the message of the failure of `run`, without references to the exception."""
    try:
        run()
    except kind as error:
        return str(error)
    pytest.fail("nothing failed")


@pytest.fixture(autouse=True)
def frozen() -> None:
    """Freeze imported objects, so that collecting and counting objects takes milliseconds."""
    gc.collect()
    gc.freeze()


def programs() -> int:
    """Return the number of live programs."""
    gc.collect()
    return sum(type(thing) is Program for thing in gc.get_objects())


def living() -> int:
    """Return the number of live tensors."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_the_certified_peak_is_the_smallest_cap_that_trains() -> None:
    """Training runs with every device capped at its certified peak; with one byte less on any device it does
    not.
    """
    task = fused()
    plan = three_stages()
    peaks = list(certify(task, plan).peak_bytes)
    enough = Trainer(task, capped(plan, peaks))
    for step in range(2):
        enough.step(batch_of(task, plan, step))
    assert enough.trace.peak_bytes == tuple(peaks)
    for device in range(3):
        caps = [nbytes - (number == device) for number, nbytes in enumerate(peaks)]
        short = Trainer(task, capped(plan, caps))
        message = failure(
            lambda short=short: [short.step(batch_of(task, plan, step)) for step in (0, 1)], OutOfMemory
        )
        assert f"device {device} ran out of memory at {device}" in message


def test_out_of_memory_says_where_and_what() -> None:
    """An out-of-memory error names device, action, need, excess, the largest holders, stage and layers."""
    task = fused()
    plan = three_stages()
    peak = certify(task, plan).devices[1].peak
    assert peak is not None
    caps = [1 << 20, peak.total_bytes - 1, 1 << 20]
    starved = Trainer(task, capped(plan, caps))
    message = failure(lambda: [starved.step(batch_of(task, plan, step)) for step in (0, 1)], OutOfMemory)
    assert f"device 1 ran out of memory at {peak.action}: it needed" in message
    assert "1 B over its" in message
    assert all(f"{category.value} " in message for category in peak.by_category)
    assert f"({peak.action}, stage 1, layers 2 to 3)" in message


def assert_trains_alike(one: Trainer, other: Trainer, task: Task) -> None:
    """Assert equal losses for two more steps, and equal parameters and buffers after them."""
    for step in range(2):
        batch = batch_of(task, other.plan, step)
        assert one.step(batch) == other.step(batch)
    ours, theirs = one.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_failed_step_begins_the_accumulation_again() -> None:
    """A failed step discards accumulated gradients: the next update needs all of its batches again."""
    task = fused()
    broken, sound = (Trainer(task, three_stages(), accumulate=2) for _ in range(2))
    fuse = broken.runners[1].stages[1].layers[0].module
    fuse.at = "backward", 0
    failure(lambda: broken.step(batch_of(task, broken.plan, 9)), RuntimeError)
    fuse.at = None
    assert_trains_alike(broken, sound, task)


def test_evaluating_again_keeps_nothing_more() -> None:
    """Repeated evaluation keeps one program for each number of microbatches."""
    task = fused()
    run = Trainer(task, three_stages())
    batch = batch_of(task, run.plan)
    run.evaluate(batch)
    known = programs()
    for _ in range(3):
        run.evaluate(batch)
    assert programs() == known


def test_a_device_too_small_for_its_parameters_says_so() -> None:
    """A cap below the parameters is reported before the first step, in the words of other out-of-memory
    errors.
    """
    task = fused()
    plan = capped(plan_of(task, [2, 2, 1]), [100, 1 << 20, 1 << 20])
    message = failure(lambda: Trainer(task, plan), OutOfMemory)
    assert "device 0 ran out of memory at setting up" in message


FAILURES = [("forward", 0), ("forward", 2), ("backward", 0), ("backward", 1), ("backward", 3)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("at", FAILURES)
def test_a_failed_step_leaves_nothing_behind(at: tuple[str, int], schedule: str) -> None:
    """An exception in mid-pipeline frees every buffer, graph and gradient, by the meters and by a count of
    tensors.
    """
    task = fused()
    broken = Trainer(task, three_stages(schedule))
    batch = batch_of(task, broken.plan)
    broken.step(batch)
    gc.collect()
    levels, tensors = [runner.meter.total for runner in broken.runners], living()
    fuse = broken.runners[1].stages[1].layers[0].module
    fuse.calls, fuse.at = {"forward": 0, "backward": 0}, at
    assert "the fuse blew" in failure(lambda: broken.step(batch), RuntimeError)
    gc.collect()
    assert [runner.meter.total for runner in broken.runners] == levels
    # Gradients are gone too; a successful step has freed them as well
    assert living() <= tensors


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("at", FAILURES[:-1])  # the last stage has made its update before the last failure
def test_the_step_after_a_failed_one_is_right(at: tuple[str, int], schedule: str) -> None:
    """The step after a failed one gets none of its messages and gradients, and has the numbers of a run
    without the failure.
    """
    task = fused()
    broken, sound = (Trainer(task, three_stages(schedule)) for _ in range(2))
    fuse = broken.runners[1].stages[1].layers[0].module
    fuse.at = at
    failure(lambda: broken.step(batch_of(task, broken.plan, 9)), RuntimeError)
    fuse.at = None
    assert_trains_alike(broken, sound, task)


def with_program(
    monkeypatch: pytest.MonkeyPatch, task: Task, text: str, split: list[int], microbatches: int
) -> Trainer:
    """Return a trainer that executes the program in `text`."""
    program = parse_program(
        text, placement=tuple((device,) for device in range(len(split))), microbatches=microbatches
    )
    monkeypatch.setattr("pipefit.runtime.engine.execution.lower", lambda plan, **_: program)
    monkeypatch.setattr(trainer, "step_programs", lambda plan: (program,))
    monkeypatch.setattr(transport, "whole_run", lambda plan: program)
    return trainer_of(task, split, microbatches=microbatches)


OUT = "0OFFLOAD0[1.0]@host 0WAIT_OFFLOAD0[1.0]@host"
BACK = "0RELOAD0[1.0]@host 0WAIT_RELOAD0[1.0]@host"


@pytest.mark.sample(11)
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("device 0: 0LOAD0 0F0 0B0 0B0 0STEP", "microbatch 0 cannot go backward"),
        ("device 0: 0LOAD0 0B0 0STEP", "microbatch 0 cannot go backward"),
        ("device 0: 0LOAD0 0R0 0B0 0STEP", "layers 0 to 4 of microbatch 0 cannot be recomputed"),
        ("device 0: 0LOAD0 0F0 0R0 0B0 0STEP", "layers 0 to 4 of microbatch 0 cannot be recomputed"),
        (
            "device 0: 0LOAD0 0N0[0:3] 0F0[3:5] 0R0[0:2] 0B0 0STEP",
            "layers 0 to 1 of microbatch 0 cannot be recomputed",
        ),
        (
            "device 0: 0LOAD0 0F0[0:2] 0F0[2:5] 0B0[1:5] 0B0[0:1] 0STEP",
            "cannot go backward through layers 1 to 4",
        ),
        (
            "device 0: 0LOAD0 0F0[0:2] 0F0[2:5] 0B0[0:2] 0B0[2:5] 0STEP",
            "cannot go backward through layers 0 to 1",
        ),
        (
            "device 0: 0LOAD0 0F0[0:2] 0B0[0:2] 0F0[2:5] 0B0[2:5] 0STEP",
            "cannot go backward through layers 0 to 1",
        ),
        (
            "device 0: 0LOAD0 0F0 0I0 0W0 0STEP",
            "neither the runtime nor the simulator supports 0I0 yet: lower the plan again",
        ),
        ("device 0: 0LOAD0 0F0 0B0 0STEP0", "0STEP0 belongs to an asynchronous schedule, but the plan uses"),
        (
            "device 0: 0LOAD0 0F0{0:1} 0B0 0STEP",
            "neither the runtime nor the simulator supports 0F0{0:1} yet",
        ),
        (
            f"device 0: 0LOAD0 {OUT} 0F0 0B0 0STEP",
            "0OFFLOAD0[1.0]@host offloads a missing tensor: layer 1 has not saved",
        ),
        (
            f"device 0: 0LOAD0 0F0 0B0 {OUT} 0STEP",
            "0OFFLOAD0[1.0]@host offloads a missing tensor: layer 1 has not saved",
        ),
        (
            f"device 0: 0LOAD0 0F0 {OUT} 0B0 0STEP",
            "0B0 needs a tensor that is away: 0WAIT_RELOAD0[1.0]@host must come",
        ),
        (
            f"device 0: 0LOAD0 0F0 {OUT} {OUT} 0STEP",
            "0OFFLOAD0[1.0]@host offloads the storage of saved tensor 1.0 a second",
        ),
        (
            f"device 0: 0LOAD0 0F0[0:2] {OUT} 0F0[2:5] {BACK} 0B0 0STEP",
            "0WAIT_OFFLOAD0[1.0]@host frees a tensor that is still re",
        ),
        (
            f"device 0: 0LOAD0 0F0 {BACK} 0B0 0STEP",
            "0RELOAD0[1.0]@host reloads a storage that is on the device",
        ),
        (
            f"device 0: 0LOAD0 0F0 {OUT} {BACK.replace('host', 'device1')} 0B0 0STEP",
            "0RELOAD0[1.0]@device1 reloads a storage that is away (@host)",
        ),
        (
            f"device 0: 0LOAD0 0F0[0:2] 0N0[2:5] {OUT} 0R0[2:5] 0B0[2:5] {BACK} 0B0[0:2] 0STEP",
            "0R0[2:5] needs a tensor that is away: 0WAIT_RELOAD0[1.0]@host must come before it",
        ),
        (
            "device 0: 0LOAD0 0F0 0OFFLOAD0[1.0] 0WAIT_OFFLOAD0[1.0] 0B0",
            "0OFFLOAD0[1.0] lacks a place: write @host",
        ),
    ],
)
def test_a_program_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, named: str) -> None:
    """A program with a second backward, a backward without its forward, or an unknown action is refused by
    the action's name, without a leak.
    """
    task = fused()
    wrong = with_program(monkeypatch, task, text, [5], 1)
    level = wrong.runners[0].meter.total
    message = failure(lambda: wrong.step(batch_of(task, wrong.plan)), UsageError)
    assert named in message
    gc.collect()
    assert wrong.runners[0].meter.total == level


PIECES = (
    "0F0[0:2] 0F0[2:5] 0B0",
    "0F0[0:2] 0F0[2:5] 0B0[2:5] 0B0[0:2]",
    "0F0[0:1] 0N0[1:3] 0F0[3:5] 0R0[1:3] 0B0",
    "0N0[0:3] 0N0[3:5] 0R0[3:5] 0B0[3:5] 0R0[0:3] 0B0[0:3]",
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", PIECES)
def test_a_microbatch_in_pieces_trains_the_same_numbers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A microbatch whose forwards are split and run again has the gradients of a whole one, bit by bit."""
    task = fused()
    whole = trainer_of(task, [5], microbatches=1)
    batches = [batch_of(task, whole.plan, step) for step in range(2)]
    losses = [whole.step(batch) for batch in batches]
    pieces = with_program(monkeypatch, task, f"device 0: 0LOAD0 {text} 0STEP", [5], 1)
    assert [pieces.step(batch) for batch in batches] == losses
    ours, theirs = pieces.state_dict(), whole.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("size", [5, 8, 0])
def test_a_batch_that_the_plan_has_no_room_for_is_refused(size: int) -> None:
    """A batch above the plan's size is refused with both sizes and a fix; targets must match inputs in
    number.
    """
    task = fused()
    small = trainer_of(task, [3, 2])
    with pytest.raises(
        UsageError, match=f"the batch holds {size} samples, but the plan trains batches of 4: plan for"
    ):
        small.step((torch.zeros(size, 8), torch.zeros(size, 4)))
    with pytest.raises(UsageError):
        small.step((torch.zeros(4, 8), torch.zeros(3, 4)))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (lambda size: torch.zeros(size, 8), "must return a pair"),
        (lambda size: (torch.zeros(size, 8),), "must return a pair .*, not 1 value"),
        (lambda size: None, "must return a pair .*, not None"),
        (lambda size: ({1, 2}, torch.zeros(size, 4)), "the inputs of a batch must be a tensor, .* not a set"),
        (
            lambda size: (torch.zeros(size, 8), [1, 2]),
            "the targets of a batch must be a tensor, .* not a list",
        ),
    ],
)
def test_a_batch_that_is_no_pair_of_tensors_is_refused(batch: Callable[[int], Any], words: str) -> None:
    """A batch function that does not return a pair of tensors is refused before anything runs."""
    with pytest.raises(UsageError, match=words):
        profile(replace(fused(), batch=batch), microbatch_size=2)


@pytest.mark.parametrize(
    "batch", [None, torch.zeros(4, 8), (torch.zeros(4, 8),), (1, 2), (torch.zeros(4, 8), 3)]
)
def test_a_step_on_something_else_than_a_batch_is_refused(batch: Any) -> None:
    """`step` accepts only a pair (inputs, targets) of the captured form."""
    with pytest.raises(UsageError, match=r"a step takes a pair|the (in|tar)\w+ changed"):
        trainer_of(fused(), [3, 2]).step(batch)


def test_a_plan_for_another_model_is_refused() -> None:
    """A plan with another model's fingerprint is refused, in training and in the dry run."""
    other = task_of(lambda: [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 4)])
    plan = plan_of(fused(), [3, 2])
    for run in (Trainer, certify):
        with pytest.raises(FileError, match="does not belong to this task: it was made for 5 layers, not 4"):
            run(other, plan)


def test_events_and_samples_are_the_program() -> None:
    """A trace has the device's actions in order, at increasing times, without an event for loading."""
    run = trainer_of(fused(), [2, 2, 1], microbatches=3)
    for step in range(2):
        run.step(batch_of(run.task, run.plan, step))
    for runner, device in zip(run.runners, run.trace.devices, strict=True):
        program = [str(action) for action in lower(run.plan).actions[runner.number]]
        assert [sample.action for sample in device.memory] == program * 2
        assert [event.action for event in device.events] == [
            text for text in program if "LOAD" not in text
        ] * 2
        times = [time for event in device.events for time in (event.start_seconds, event.end_seconds)]
        assert times == sorted(times)
    assert len(run.trace.step_seconds) == run.trace.steps == 2


def test_a_supervisor_is_told_of_every_action() -> None:
    """`on_action` gets the number of every action as it begins, and their total at the end."""
    heard: list[int] = []
    task = fused()
    run = Trainer(task, plan_of(task, [5], microbatches=3), supervision=Supervision(on_action=heard.append))
    run.step(batch_of(task, run.plan))
    assert heard == list(range(len(lower(run.plan).actions[0]) + 1))
