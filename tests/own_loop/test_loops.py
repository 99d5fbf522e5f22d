"""`apply` in loops as people write them: accumulation, autocast, loss scaling, clipping, two optimizers."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from pipefit.own_loop import apply
from support.own_loop_models import Language, classes, convolutional, images, mlp, tokens, vectors
from support.own_loop_oracle import bytes_of, peaks_of

Step = Callable[[Any], Any]
Made = tuple[nn.Module, tuple[torch.optim.Optimizer, ...], Step, Callable[[], Any]]


def accumulated() -> Made:
    """Four microbatches a step."""
    module = Language(dropout=0.1)
    optimizer = torch.optim.AdamW(module.parameters())

    def step(batch: Any) -> None:
        for ids, labels in batch:
            (classes(module(ids), labels) / len(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return module, (optimizer,), step, lambda: [tokens() for _ in range(3)]


def autocast() -> Made:
    """Under autocast to bfloat16, with clipping."""
    module = Language(dropout=0.1)
    optimizer = torch.optim.AdamW(module.parameters())

    def step(batch: Any) -> None:
        ids, labels = batch
        with torch.autocast("cpu", torch.bfloat16):
            loss = classes(module(ids), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return module, (optimizer,), step, tokens


def scaled() -> Made:
    """With a gradient scaler, a scheduler and an average of the weights."""
    module = convolutional()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    average = torch.optim.swa_utils.AveragedModel(module)

    def step(batch: Any) -> None:
        inputs, labels = batch
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = classes(module(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(module)

    return module, (optimizer,), step, images


def adversarial() -> Made:
    """A generator and a discriminator with an optimizer each."""
    module = nn.ModuleDict({"g": mlp(), "d": mlp()})
    of_g = torch.optim.Adam(module["g"].parameters())
    of_d = torch.optim.Adam(module["d"].parameters())

    def step(batch: Tensor) -> None:
        real, noise = batch
        fake = module["g"](noise)
        loss = module["d"](real).sigmoid().mean() - module["d"](fake.detach()).sigmoid().mean()
        of_d.zero_grad()
        loss.backward()
        of_d.step()
        of_g.zero_grad()
        module["d"](fake).sigmoid().mean().backward()
        of_g.step()

    return module, (of_g, of_d), step, vectors


def in_backward() -> Made:
    """The optimizer of a parameter steps as soon as its gradient is there."""
    module = mlp()
    optimizers = {p: torch.optim.Adam([p]) for p in module.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        parameter.register_post_accumulate_grad_hook(update)

    def step(batch: Any) -> None:
        nn.functional.mse_loss(module(batch[0]), batch[1]).backward()

    return module, tuple(optimizers.values()), step, vectors


def counted() -> Made:
    """The second optimizer steps in every third call, as a critic's or an accumulating one does."""
    module = mlp()
    often, rarely = torch.optim.SGD(module[:2].parameters()), torch.optim.Adam(module[2:].parameters())
    calls = 0

    def step(batch: Any) -> None:
        nonlocal calls
        nn.functional.mse_loss(module(batch[0]), batch[1]).backward()
        calls += 1
        often.step()
        often.zero_grad()
        if calls % 3 == 0:
            rarely.step()
            rarely.zero_grad()

    return module, (often, rarely), step, vectors


def remembered() -> Made:
    """Keeps the outputs of three steps."""
    module, recent = mlp(), deque[Tensor](maxlen=3)
    optimizer = torch.optim.SGD(module.parameters())

    def step(batch: Any) -> None:
        outputs = module(batch[0])
        recent.append(outputs.detach())
        (outputs - torch.stack(tuple(recent)).mean(0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return module, (optimizer,), step, vectors


def rarely_remembered() -> Made:
    """Keeps something in every second call, until it has four."""
    module, recent, calls = mlp(), deque[Tensor](maxlen=4), 0
    optimizer = torch.optim.SGD(module.parameters())

    def step(batch: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            recent.append(torch.zeros(50_000))
        nn.functional.mse_loss(module(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return module, (optimizer,), step, vectors


class Several:
    """Optimizers that step in turn."""

    def __init__(self, module: nn.Sequential) -> None:
        self.optimizers = [torch.optim.Adam(part.parameters()) for part in (module[:2], module[2:])]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def held() -> Made:
    """The optimizers are in a list of an object that the step uses."""
    module = mlp()
    several = Several(module)

    def step(batch: Any) -> None:
        nn.functional.mse_loss(module(batch[0]), batch[1]).backward()
        several.step()

    return module, (), step, vectors


def judged() -> Made:
    """A copy of the updated model makes the loss of the next call."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters())
    teachers = [module]

    def step(batch: Any) -> None:
        with torch.no_grad():
            targets = teachers[0](batch[1])
        nn.functional.mse_loss(module(batch[0]), targets).backward()
        optimizer.step()
        teachers[0] = copy.deepcopy(module)

    return module, (optimizer,), step, vectors


LOOPS = {
    make.__name__: make
    for make in (
        accumulated,
        autocast,
        scaled,
        adversarial,
        in_backward,
        counted,
        held,
        judged,
        rarely_remembered,
        remembered,
    )
}


def trained(name: str, budget: int | None) -> tuple[list[int], dict[str, Tensor], Any]:
    """Train eleven steps; return the peaks of each, the final state, and the handle."""
    torch.manual_seed(0)
    module, optimizers, step, batch = LOOPS[name]()
    others = [one for one in (c.cell_contents for c in step.__closure__) if isinstance(one, nn.Module)]
    handle = None
    if budget is not None:
        torch.manual_seed(3)
        handle = apply(module, budget=budget, batch=batch(), optimizer=optimizers or None, step=step)
    torch.manual_seed(7)
    batches = [batch() for _ in range(11)]

    def loop() -> None:
        for one in batches:
            with record_function("step"):
                step(one)

    tensors = [t for one in (module, *others) for t in (*one.parameters(), *one.buffers())]
    peaks = peaks_of(loop, bytes_of(tensors) + bytes_of(batches[0]), "step")
    return peaks, {k: v.clone() for one in (module, *others) for k, v in one.state_dict().items()}, handle


@pytest.mark.sample(1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", LOOPS)
def test_a_step_of_the_user(name: str) -> None:
    """The peaks of the user's own step equal the allocator's events, and its numbers do not change."""
    plain_peaks, plain, _ = trained(name, None)
    budget = int(max(plain_peaks) * 0.8)
    peaks, state, handle = trained(name, budget)
    assert handle is not None
    assert handle.plan.decisions
    longer = 4 if name == "scaled" else 0  # a number that a fake scaler keeps
    assert [
        have - has for have, has in zip(handle.plan.peak_bytes, (peaks[0], max(peaks[1:])), strict=True)
    ] in (
        [0, 0],
        [0, longer],
    )
    assert max(peaks) <= budget
    assert all(torch.equal(value, plain[key]) for key, value in state.items())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
def test_optimizer_state_on_the_host(begun: bool) -> None:
    """On request state is on the host between steps: the peak is lower, certified, and the numbers stay."""

    def trained(budget: int | None) -> tuple[list[int], list[Tensor], Any]:
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        data = torch.randn(256, 128), torch.randn(256, 128)
        handle = None
        if begun:
            nn.functional.mse_loss(module(data[0]), data[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if budget is not None:
            handle = apply(
                module,
                budget=budget,
                batch=data,
                optimizer=optimizer,
                loss=nn.functional.mse_loss,
                offload=False,
                state_on_host=True,
            )

        def loop() -> None:
            for _ in range(3):
                with record_function("step"):
                    optimizer.zero_grad()
                    outputs = module(data[0])
                    loss = nn.functional.mse_loss(outputs, data[1])
                    loss.backward()
                    optimizer.step()

        here = [state["momentum_buffer"] for state in optimizer.state.values()] if handle is None else []
        small = [s["momentum_buffer"] for s in optimizer.state.values() if s["momentum_buffer"].nbytes < 1024]
        resident = bytes_of([*module.parameters()]) + bytes_of(data) + bytes_of(here or small)
        peaks = peaks_of(loop, resident, "step")
        states = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
        if handle is not None:
            handle.remove()
        assert len(optimizer.state_dict()["state"]) == 8
        return peaks, [*(p.detach() for p in module.parameters()), *states], handle

    plain_peaks, plain, _ = trained(None)
    peaks, planned, handle = trained(10**9)
    assert handle.plan.peak_bytes == (peaks[0], max(peaks[1:]))
    assert max(peaks) <= max(plain_peaks) - 4 * 128 * 128 * 4
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
