"""The module stays the user's: class, state, hooks, copies, files, and everything after `remove`."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import random
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from pipefit import load, save, text
from pipefit.errors import InfeasibleError, UsageError
from pipefit.own_loop import LoopDecision, LoopPlan, apply
from pipefit.own_loop.offloading import HostPool, HostTensors
from pipefit.runtime.offload import copying
from support.own_loop_models import (
    Language,
    Model,
    Recurrent,
    classes,
    convolutional,
    mean_square,
    mlp,
    tokens,
    vectors,
)
from support.own_loop_oracle import train

LANGUAGE = Model(name="language", build=Language, batch=tokens, loss=classes)


def plan_of(**techniques: str) -> LoopPlan:
    """Return a plan with these decisions, by submodule with `__` for dots."""
    decisions = tuple(
        LoopDecision(name=name.replace("__", "."), technique=technique, moved=tuple(range(100)))
        for name, technique in techniques.items()
    )
    return LoopPlan(
        budget_bytes=1 << 40, peak_bytes=(0, 0), plain_bytes=(0, 0), decisions=decisions, step_seconds=1.0
    )


def test_everything_about_the_module_stays() -> None:
    """Class, attributes, parameters, state dict and hooks are the same objects while a plan is installed."""
    module = Language()
    module.blocks[0].register_forward_hook(lambda *_: None)
    before = [(type(m), list(vars(m)), dict(m._forward_hooks)) for m in module.modules()]
    parameters, state = list(module.parameters()), module.state_dict()
    handle = apply(module, plan=plan_of(blocks__0="recompute", blocks__1="offload"))
    assert [type(m) for m in module.modules()] == [kind for kind, _, _ in before]
    assert [dict(m._forward_hooks) for m in module.modules()] == [hooks for _, _, hooks in before]
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert list(module.state_dict()) == list(state)
    handle.remove()
    handle.remove()
    assert [(type(m), list(vars(m)), dict(m._forward_hooks)) for m in module.modules()] == before


def test_planning_changes_nothing() -> None:
    """A dry run leaves parameters, gradients, optimizer state, random states and attributes alone."""
    module = convolutional()
    optimizer = torch.optim.AdamW(module.parameters())
    inputs = torch.randn(4, 3, 16, 16)
    classes(module(inputs), torch.zeros(4, dtype=torch.int64)).backward()
    optimizer.step()
    tensors = [
        *module.state_dict().values(),
        *(p.grad for p in module.parameters()),
        *(t for state in optimizer.state.values() for t in state.values()),
    ]
    before = copy.deepcopy(tensors), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with apply(
        module,
        budget=10**9,
        batch=(inputs, torch.zeros(4, dtype=torch.int64)),
        optimizer=optimizer,
        loss=classes,
    ):
        pass
    after = [
        *module.state_dict().values(),
        *(p.grad for p in module.parameters()),
        *(t for state in optimizer.state.values() for t in state.values()),
    ]
    assert all(torch.equal(a, b) for a, b in zip(before[0], after, strict=True))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(tensors, after, strict=True))
    assert torch.equal(before[1], torch.get_rng_state())
    assert before[2] == random.getstate()
    assert (before[3] == np.random.get_state()[1]).all()


def test_copies_and_files_are_plain() -> None:
    """Copies, pickles and saved models run the plain forward of their class, with their own parameters."""
    module = mlp()
    apply(module, plan=plan_of(**{"0": "recompute", "1": "offload"}))
    file = io.BytesIO()
    torch.save(module, file)
    assert b"pipefit" not in file.getvalue()
    file.seek(0)
    x = torch.randn(3, 32)
    copied, read = copy.deepcopy(module), torch.load(file, weights_only=False)
    pickled = [pickle.loads(pickle.dumps(one)) for one in (module, copied)]
    assert inspect.signature(copied[0].forward) == inspect.signature(mlp()[0].forward)
    for one in (copied, read, *pickled, copy.deepcopy(copied)):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.zero_()
        assert torch.equal(one(x), torch.zeros(3, 32))
    assert not torch.equal(module(x), torch.zeros(3, 32))


def test_a_copy_is_freed_with_its_last_reference() -> None:
    """As without a plan: a loop that copies its model in every step holds no second copy."""
    module = mlp()
    apply(module, plan=plan_of(**{"0": "recompute", "1": "offload"}))
    gc.disable()
    try:
        copies = [copy.deepcopy(module), copy.deepcopy(copy.deepcopy(module))]
        parts = [weakref.ref(part) for one in copies for part in one.modules()]
        del copies
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


@pytest.mark.parametrize("technique", ["recompute", "offload"])
def test_second_backwards_and_second_derivatives(technique: str) -> None:
    """`retain_graph` and `create_graph` give the gradients of the module without a plan."""

    def gradients(module: nn.Module) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 64).reshape(2, 32).requires_grad_()
        y = module(x).square().sum()
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        again, *rest = torch.autograd.grad(y, [x, *module.parameters()], create_graph=True)
        second = torch.autograd.grad(again.square().sum(), list(module.parameters()), allow_unused=True)
        return [first, again, *rest, *(t for t in second if t is not None)]

    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)])
    plain = gradients(module)
    apply(module, plan=plan_of(**{"0": technique, "1": technique}))
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(module), strict=True))


def test_a_saved_tensor_that_changes_is_an_error() -> None:
    """A change in place of a saved tensor is an error under a plan too, as autograd's own."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).exp()
            y.mul_(2)
            return y

    module = nn.Sequential(Changing())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(torch.randn(4, 512)).sum().backward()
    apply(module, plan=plan_of(**{"0": "offload"}))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(torch.randn(4, 512)).sum().backward()


def test_a_parameter_that_changes_is_an_error() -> None:
    """A step between a forward and its backward is an error of the plain loop, and of a recomputation."""
    module = mlp()
    apply(module, plan=plan_of(**{"0": "recompute"}))
    loss = module(torch.randn(4, 32)).sum()
    with torch.no_grad():
        module[0][0].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight of 0 was modified by an inplace operation"):
        loss.backward()


def test_values_that_are_assumed_are_named() -> None:
    """A plan names operations whose memory depends on values."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return x[x > 0].sum()

    handle = apply(Masked(), budget=10**9, batch=torch.randn(8, 32))
    assert "nonzero" in handle.plan.gap or "index" in handle.plan.gap
    assert handle.plan.gap in str(handle).replace("\n", " ")


def test_values_of_a_batch_of_a_function_are_known() -> None:
    """A function that makes a batch makes real tensors, whose values are as known as those of a batch."""
    module = nn.Linear(4, 3)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.softmax(-1) * nn.functional.one_hot(targets, 3)).sum()

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, 4), torch.arange(8) % 3

    made, given = (
        apply(copy.deepcopy(module), budget=10**9, batch=b, loss=loss).plan for b in (batch, batch())
    )
    assert made == given


def test_selections_by_whole_numbers_of_the_batch_are_known() -> None:
    """A mask that follows from tokens selects what it will; numbers in fresh memory follow from nothing."""

    class Picked(nn.Module):
        def __init__(self, least: int) -> None:
            super().__init__()
            self.embedding, self.least = nn.Embedding(1024, 32), least

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.embedding(tokens)[tokens >= self.least].sin().sum()

    some, every = (apply(Picked(n), budget=10**9, batch=torch.arange(1024)).plan for n in (1016, 0))
    assert max(every.peak_bytes) - max(some.peak_bytes) > 1000 * 32 * 4


class Stateful(nn.Module):
    """A module whose second forward differs from the first: it changes something that is not a buffer."""

    box: ClassVar[list[int]] = [0]

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(32, 32), change
        self.draws, self.random = np.random.default_rng(1), random.Random(1)
        self.count, self.tensor, self.own = {"n": 0}, [torch.zeros(1)], types.SimpleNamespace(n=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.change(self)).sin()


OUTSIDE = np.random.RandomState(1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: float(m.draws.random()), "it draws random numbers outside torch"),
        (lambda m: m.random.random(), "it draws random numbers outside torch"),
        (lambda m: m.count.update(n=m.count["n"] + 1) or m.count["n"], "its forward sets 0.count"),
        (lambda m: vars(m.own).update(n=m.own.n + 1) or m.own.n, "its forward sets 0.own"),
        (lambda m: m.box.append(1) or len(m.box), "its forward sets 0.box"),
        (lambda m: m.tensor[0].add_(1), "its forward changes a tensor that is not one of its buffers"),
    ],
    ids=["numpy", "random", "dictionary", "object", "class", "tensor"],
)
def test_a_forward_that_changes_something_is_not_repeated(change: Callable[[Any], Any], said: str) -> None:
    """The plan names what a second forward would change again; a dry run leaves it as it was."""
    module = nn.Sequential(Stateful(change))
    before = [module[0].draws.bit_generator.state, module[0].random.getstate(), dict(module[0].count), 0]
    plan = apply(module, budget=10**9, batch=vectors(), optimizer=torch.optim.SGD, loss=mean_square).plan
    assert dict(plan.refused)["0"] == said
    own = module[0]
    assert [own.draws.bit_generator.state, own.random.getstate(), own.count, own.own.n] == before
    assert own.tensor[0].item() == 0


class Log:
    """Keeps what a hook sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def see(self, *_: object) -> None:
        self.seen.append(1)

    __call__ = see


@pytest.mark.parametrize("way", ["closure", "method", "partial", "object", "forward"])
def test_what_a_part_of_a_submodule_changes_is_not_repeated(way: str) -> None:
    """A recomputation would call hooks of the parts of a submodule again. Its own hooks run outside its forward."""
    module, seen, log = mlp(), [], Log()

    def see(*given: Any) -> Any:
        seen.append(1)
        return given[-1] if way == "forward" else None

    hooks = {"closure": see, "method": log.see, "partial": functools.partial(log.see, 1), "object": log}
    if way == "forward":
        module[1][1].forward = see
    else:
        module[1][1].register_forward_hook(hooks[way])
        module[2].register_forward_hook(hooks[way])
    plan = apply(module, budget=10**9, batch=vectors(), optimizer=torch.optim.SGD, loss=mean_square).plan
    said = "variable seen" if way in ("closure", "forward") else "the Log of a hook"
    assert dict(plan.refused)["1"] == f"its forward sets {said}"
    assert "2" not in dict(plan.refused)
    assert seen == log.seen == []


def test_a_reason_is_printed_once_for_all_its_submodules() -> None:
    """Text of a plan has one sentence for each reason, with the names of all its submodules."""
    module = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True)) for _ in range(3)), mlp()
    )
    plan = apply(module, budget=10**9, batch=vectors(), optimizer=torch.optim.SGD, loss=mean_square).plan
    reason = "its input is changed in place before its backward"
    assert plan.refused == (("0.1", reason), ("1.1", reason), ("2.1", reason))
    said = f"0.1, 1.1 and 2.1 are not recomputed, each for this reason: {reason}."
    assert " ".join(text(plan).split()).endswith(said)
    alone = " ".join(text(replace(plan, refused=plan.refused[:1])).split())
    assert alone.endswith(f"0.1 is not recomputed: {reason}.")


class Scaled(nn.Module):
    """A layer that depends on a number of its class, or of its own; on a buffer, and on its mode."""

    factor, calls = 1.0, 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(32, 64), nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x * self.factor + self.shift).sin().cos()
        return self.drop(y)[:, :32]


class Counted(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return super().forward(x * Counted.calls)


@functools.cache
def table(size: int) -> torch.Tensor:
    return torch.arange(size).sin()


class Cached(nn.Module):
    """A layer with tables from caches, of its module and of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    @functools.lru_cache  # noqa: B019
    def own(self, size: int) -> torch.Tensor:
        return torch.arange(size).cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + table(32)) * self.own(32)


@pytest.mark.parametrize("warm", [False, True])
def test_caches_of_functions_hold_no_fake_tensors(warm: bool) -> None:
    """A dry run has caches of its own: what was there is there again."""
    module = nn.Sequential(Cached(), Cached())
    table.cache_clear()
    before = table(32) if warm else None
    apply(module, budget=10**9, batch=vectors(), optimizer=torch.optim.SGD, loss=mean_square).remove()
    assert table.cache_info().currsize == warm
    assert table(32) is before or not warm
    assert type(module[0].own(32)) is torch.Tensor


def change_numbers(module: Any) -> None:
    for one in module:
        one.factor += 0.5
        one.drop.p *= 0.5
    module.eval()


def change_buffers(module: Any) -> None:
    for one in module:
        one.shift += 1


def replace_buffers(module: Any) -> None:
    for one in module:
        one.shift = one.shift + 1


def gradient_with(change: Callable[[Any], Any], plan: LoopPlan | None) -> tuple[torch.Tensor, Any]:
    """Return a gradient of which `change` runs between forward and backward, and the module."""
    torch.manual_seed(0)
    module = nn.Sequential(Scaled(), Scaled())
    if plan is not None:
        apply(module, plan=plan)
    loss = module(torch.ones(4, 32)).square().sum()
    change(module)
    loss.backward()
    return module[0].linear.weight.grad, module


def test_a_recomputation_has_the_numbers_of_its_forward() -> None:
    """A recomputation has the numbers and modes of its forward; the loop keeps those that it has set."""
    plain, _ = gradient_with(change_numbers, None)
    planned, module = gradient_with(change_numbers, plan_of(**{"0": "recompute", "1": "recompute"}))
    assert torch.equal(plain, planned)
    assert not module[0].training
    assert (module[0].factor, module[0].drop.p) == (1.5, 0.25)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("change", [change_buffers, replace_buffers])
def test_a_buffer_that_changes_is_not_recomputed_with(change: Callable[[Any], Any]) -> None:
    """A buffer that the loop changes before a backward is an error; a plan that sees the change avoids it."""
    with pytest.raises(
        RuntimeError, match="buffer shift of 1 was modified by an inplace operation, or replaced"
    ):
        gradient_with(change, plan_of(**{"0": "recompute", "1": "recompute"}))
    module = nn.Sequential(Scaled(), Scaled())

    def step(batch: torch.Tensor) -> None:
        loss = module(batch).square().sum()
        change(module)
        loss.backward()

    plan = apply(module, budget=10**9, batch=torch.ones(4, 32), step=step).plan
    assert dict(plan.refused)["0"] == "its buffer shift is changed before its backward"


def test_a_dry_run_leaves_classes_as_they_were() -> None:
    """A dry run puts back the counters and lists of classes."""
    module = nn.Sequential(Counted(), Stateful(lambda m: m.box.append(1) or len(m.box)))
    before = list(Stateful.box)
    apply(module, budget=10**9, batch=vectors(), optimizer=torch.optim.SGD, loss=mean_square)
    assert (Counted.calls, Stateful.box) == (0, before)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "drawn", [torch.rand, lambda size: torch.rand(size).item()], ids=["tensor", "number"]
)
@pytest.mark.parametrize(
    "first", [nn.Linear(32, 32), nn.Identity()], ids=["dropped", "fails if all are dropped"]
)
def test_layers_that_a_draw_may_drop_are_counted(first: nn.Module, drawn: Callable[[Any], Any]) -> None:
    """A condition on an unknown value is counted as true and as false: the higher peak is certified."""

    class Dropping(nn.Module):
        def __init__(self, drops: bool) -> None:
            super().__init__()
            self.linear, self.drops = nn.Linear(32, 32), drops

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sin() if not self.drops or drawn(()) < 0.5 else x

    peaks = []
    for drops in (False, True):
        module = nn.Sequential(first, Dropping(drops), Dropping(drops))
        plan = apply(module, budget=10**9, batch=vectors(), optimizer=torch.optim.SGD, loss=mean_square).plan
        peaks.append(max(plan.peak_bytes))
        assert bool(plan.gap) == drops
    assert peaks[1] - peaks[0] in range(64)  # the draws


def test_conditions_that_raise_an_error_get_the_other_answer() -> None:
    """A loop may check that some conditions hold and others do not; its peak is that of the loop without checks."""
    peaks = []
    for checks in (True, False):
        module = mlp()

        def step(batch: Any, module: nn.Module = module, checks: bool = checks) -> None:
            inputs, targets = batch
            if checks and (not (inputs.abs() < 1e6).all() or inputs.isnan().any()):
                raise ValueError
            loss = mean_square(module(inputs), targets)
            if checks and not loss.isfinite():
                raise FloatingPointError(f"{loss:.3f}")
            if checks and loss > 1e6:
                raise OverflowError
            loss.backward()

        plan = apply(module, budget=10**9, batch=vectors(), step=step).plan
        assert ("with every condition on them true" in plan.gap) == checks
        peaks.append(plan.peak_bytes)
    assert peaks[0] == peaks[1]


@pytest.mark.usefixtures("one_thread")
def test_a_buffer_that_a_forward_replaces_is_freed() -> None:
    """The dry run holds no tensor of the module that training would have freed."""

    class Replacing(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("level", torch.zeros(size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.level = self.level * 0.9
            return self.linear(x).sum()

    few, many = (
        max(apply(Replacing(n), budget=10**9, batch=torch.ones(1, 2)).plan.peak_bytes) for n in (10**6, 10**7)
    )
    assert many - few == 2 * 9 * 10**6 * 4


def test_generators_that_a_forward_uses_by_name_are_put_back() -> None:
    """A dry run draws from a generator of the script, and restores it."""
    module = nn.Sequential(Stateful(float))
    module[0].forward = lambda x: module[0].linear(x * float(OUTSIDE.rand())).sin()
    before = OUTSIDE.get_state()[1:]
    plan = apply(module, budget=10**9, batch=vectors(), optimizer=torch.optim.SGD, loss=mean_square).plan
    assert dict(plan.refused)["0"] == "it draws random numbers outside torch"
    assert str(OUTSIDE.get_state()[1:]) == str(before)


def test_a_plan_for_a_card() -> None:
    """A module on the CPU is planned with the kernels and rates of a named card, and trains here."""
    module = Language(dropout=0.1)
    with apply(
        module, budget=10**9, batch=tokens(), optimizer=torch.optim.AdamW, loss=classes, device="rtx-4090"
    ) as handle:
        peak = max(handle.plan.peak_bytes)
    handle = apply(
        module,
        budget=int(peak * 0.8),
        batch=tokens(),
        optimizer=torch.optim.AdamW,
        loss=classes,
        device="rtx-4090",
    )
    assert handle.plan.decisions
    ids, labels = tokens()
    classes(module(ids), labels).backward()


@pytest.mark.parametrize(
    ("module", "batch", "loss"),
    [(Language(layers=1), tokens, classes), (nn.Linear(32, 32), vectors, mean_square)],
    ids=["with submodules", "without"],
)
def test_a_budget_that_cannot_be_kept_says_what_would_do(module: nn.Module, batch: Any, loss: Any) -> None:
    """The error names the least peak; that peak as the budget is kept."""
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(InfeasibleError, match=r"in 1\.00 KiB does not fit: the least peak") as raised:
        apply(module, budget="1 KiB", batch=batch(), optimizer=optimizer, loss=loss)
    least = raised.value.found["least_bytes"]
    with pytest.raises(InfeasibleError, match=r"no plan was found for the loop in .*: the least peak"):
        apply(module, budget=least - 1, batch=batch(), optimizer=optimizer, loss=loss)
    handle = apply(module, budget=least, batch=batch(), optimizer=optimizer, loss=loss)
    assert max(handle.plan.peak_bytes) <= least


def test_what_a_plan_prints() -> None:
    """The handle lists every decision: submodule, technique, bytes, seconds."""
    module = Language()
    text = str(apply(module, plan=plan_of(blocks__0="recompute", blocks__1="offload")))
    assert "within a budget of 1.00 TiB" in text
    assert "blocks.0" in text
    assert "recompute" in text


def test_a_plan_is_applied_again(tmp_path: Path) -> None:
    """A saved plan serves an equal module without a dry run."""
    first = Language()
    optimizer = torch.optim.AdamW(first.parameters())
    plain = apply(first, budget=10**9, batch=tokens(), optimizer=optimizer, loss=classes)
    plain.remove()
    budget = int(max(plain.plan.peak_bytes) * 0.75)
    handle = apply(first, budget=budget, batch=tokens(), optimizer=optimizer, loss=classes)
    second = Language()
    save(handle.plan, tmp_path / "loop.json")
    again = apply(second, plan=load(tmp_path / "loop.json", LoopPlan))
    assert again.plan == handle.plan
    ran = train(LANGUAGE, second, torch.optim.AdamW(second.parameters()))
    assert (ran.peaks[0], max(ran.peaks[1:])) == handle.plan.peak_bytes


def _cut_at_a_drawn_place(first: int, _: nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
    width = [32][first + int(torch.empty(1).uniform_().item())]
    return given[0][:, :width]


def test_impossible_requests() -> None:
    """Compiled modules, second plans, unknown submodules and half a request are refused by name."""
    module = mlp()
    with pytest.raises(UsageError, match="budget and a batch"):
        apply(module, budget=1)
    for wrong, said in (
        ({"budget": float("nan")}, "budget must be a number above 0"),
        ({"optimizer": "adam"}, "optimizer must be an Optimizer, not 'adam': pass optimizers"),
        ({"loss": None}, r"the module returns a tensor of shape \(512, 32\), not a loss"),
        ({"loss": lambda *_: 1.0}, "loss= returns a float, not a loss"),
        ({"loss": lambda outputs, _: outputs + missing}, r"test_handles\.py:\d+\) NameError"),  # type: ignore[name-defined] # noqa: F821
    ):
        with pytest.raises(UsageError, match=said):
            apply(module, **{"budget": 10**9, "batch": vectors(), "loss": mean_square} | wrong)
    with pytest.raises(UsageError, match="does not have a submodule 'head'"):
        apply(module, plan=plan_of(head="recompute"))
    apply(module, plan=plan_of(**{"0": "recompute"}))
    with pytest.raises(UsageError, match="has a plan already"):
        apply(module, plan=plan_of(**{"0": "recompute"}))
    searching = torch.optim.LBFGS(mlp().parameters())
    packed = mlp()
    packed.register_forward_pre_hook(
        lambda part, given: pack_padded_sequence(given[0][:, None], given[0].argmax(1), batch_first=True).data
    )
    with pytest.raises(UsageError, match=r"shape of a tensor depends on values.*pad it"):
        apply(packed, budget="1GiB", batch=vectors(), loss=lambda output, _: output.sum())
    for first, part, said in (  # the draw is assumed to be 1, then 0
        (0, packed, r"shape of a tensor depends on values.*pad it"),
        (1, mlp(), r"index out of range.* an index that is read from a tensor"),
    ):
        drawing = nn.Sequential(part)
        drawing.register_forward_pre_hook(partial(_cut_at_a_drawn_place, first))
        with pytest.raises(UsageError, match=said):
            apply(drawing, budget="1GiB", batch=vectors(), loss=lambda output, _: output.sum())
    with pytest.raises(UsageError, match="LBFGS chooses by values how often it calls its closure"):
        apply(
            mlp(),
            budget=10**9,
            batch=vectors(),
            optimizer=searching,
            step=lambda _: searching.step(lambda: 0.0),
        )
    functional = torch.func.grad(lambda x: x.sum())
    with pytest.raises(UsageError, match="saves tensors out of sight"):
        apply(mlp(), budget=10**9, batch=torch.ones(3), step=functional)
    sparse = mlp()
    sparse.register_buffer("edges", torch.eye(2).to_sparse())
    for unusual, said in ((sparse, "sparse_coo"), (nn.Sequential(nn.LazyLinear(2)), "run one forward first")):
        with pytest.raises(UsageError, match=said):
            apply(unusual, budget=10**9, batch=vectors(), loss=mean_square)
    with pytest.raises(UsageError, match="0 has sparse gradients"):
        apply(nn.Sequential(nn.Embedding(2, 2, sparse=True)), budget=10**9, batch=vectors(), loss=mean_square)
    parts = nn.Linear(32, 32)
    parts.register_forward_pre_hook(
        lambda part, given: torch.nested.nested_tensor([given[0][:3], given[0][:5]], layout=torch.jagged)
    )
    with pytest.raises(UsageError, match=r"shape of a tensor depends on values.*pad it"):
        apply(parts, budget=10**9, batch=vectors(), loss=lambda output, _: output.values().sum())
    squared = torch.compile(torch.square, backend="eager")
    with pytest.raises(UsageError, match=r"calls a function compiled by torch\.compile"):
        apply(mlp(), budget=10**9, batch=vectors(), loss=lambda outputs, _: squared(outputs).sum())
    scripted = nn.Sequential(nn.Linear(32, 32), torch.jit.script(nn.ReLU()))
    with pytest.raises(UsageError, match="1 is scripted"):
        apply(scripted, budget=10**9, batch=vectors(), loss=mean_square)
    compiled = mlp()
    compiled[1].compile()
    with pytest.raises(UsageError, match="1 is compiled"):
        apply(compiled, budget=10**9, batch=vectors(), loss=mean_square)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("budget", [np.int64(10**9), np.uint32(10**9), torch.tensor(10**9), 1e9])
def test_budgets_of_other_libraries(budget: Any) -> None:
    """Numbers of NumPy and torch are bytes too."""
    assert apply(mlp(), budget=budget, batch=vectors(), loss=mean_square).plan.budget_bytes == 10**9


def test_optimizers_that_step_seldom() -> None:
    """The state of one that steps in every eighth call is counted; one that does not step is named."""
    module = mlp()

    def planned(calls: int) -> LoopPlan:
        number, optimizer = 0, torch.optim.Adam(module.parameters())

        def step(batch: Any) -> None:
            nonlocal number
            mean_square(module(batch[0]), batch[1]).backward()
            number += 1
            if number % calls == 0:
                optimizer.step()
                for parameter in module.parameters():
                    parameter.grad.zero_()  # type: ignore[union-attr]

        return apply(module, budget=10**9, batch=vectors(), optimizer=optimizer, step=step).plan

    counted, missed = planned(8), planned(32)
    state = sum(2 * parameter.nbytes + 4 for parameter in module.parameters())
    assert counted.peak_bytes[1] - missed.peak_bytes[1] == state
    assert counted.gap == ""
    assert "Adam does not step in them, so its update and state are not counted" in missed.gap


def test_an_optimizer_that_is_not_found_is_refused() -> None:
    """Its state would not be counted."""
    module = mlp()
    inner = types.SimpleNamespace(optimizer=torch.optim.Adam(module.parameters()))
    outer = types.SimpleNamespace(inner=inner)

    def step(batch: Any) -> None:
        mean_square(module(batch[0]), batch[1]).backward()
        outer.inner.optimizer.step()

    with pytest.raises(UsageError, match=r"steps an? Adam that a dry run does not find.*optimizer="):
        apply(module, budget=10**9, batch=vectors(), step=step)
    assert apply(module, budget=10**9, batch=vectors(), step=step, state=[inner]).plan.gap == ""


def test_a_text_with_a_number_is_no_condition() -> None:
    """A loss that is printed is not read by the loop."""
    module = mlp()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        result = mean_square(outputs, targets)
        assert len(f"{result} {result:.3f} {result:>8}") > 14
        return result

    assert apply(module, budget=10**9, batch=vectors(), loss=loss).plan.gap == ""


def test_variables_of_a_step() -> None:
    """Tensors that a step uses by name are counted; its counters and lists are as before the dry run."""
    module, weight, losses, count = mlp(), torch.ones(8, 32), [torch.ones(3)], 0
    recent: deque[torch.Tensor] = deque(maxlen=2)
    carried: torch.Tensor | None = None
    optimizer = torch.optim.SGD(module.parameters())

    def step(batch: torch.Tensor) -> None:
        nonlocal count, carried
        count += 1
        carried = batch * 2 if carried is None else carried + batch
        recent.append(batch)
        optimizer.zero_grad()
        loss = (module(batch) * weight[:1]).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() * loss.item())

    def peak() -> int:
        plan = apply(module, budget=10**9, batch=torch.ones(8, 32), optimizer=optimizer, step=step).plan
        assert plan.gap.startswith("the loop reads numbers from tensors, as item() does")
        return max(plan.peak_bytes)

    few = peak()
    assert (len(losses), count, len(recent), carried) == (1, 0, 0, None)
    weight = torch.ones(1008, 32)
    assert peak() - few == 1000 * 32 * 4


@pytest.mark.parametrize("draws", [False, True])
def test_draws_outside_torch_are_named(draws: bool) -> None:
    """A forward that skips layers by a number of Python's says that peaks are those of some draws."""
    module = mlp()

    def draw(*_: object) -> None:
        if draws:
            random.random()

    module.register_forward_pre_hook(draw)
    handle = apply(module, budget="1GiB", batch=vectors(), loss=mean_square)
    assert ("draws from the generators of Python or NumPy" in handle.plan.gap) == draws


class Own:
    """A trainer of the user's: a step with options of its own."""

    def __init__(self, module: nn.Module, rows: int) -> None:
        self.module, self.weight = module, torch.ones(rows, 32)
        self.optimizer = torch.optim.SGD(module.parameters())

    def step(self, scale: float, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (scale * self.module(batch) * self.weight[:1]).sum().backward()
        self.optimizer.step()


def test_a_step_that_is_a_method_with_arguments() -> None:
    """Tensors of the object whose method is a step are counted, and left as they were."""

    def peak(rows: int) -> int:
        own = Own(mlp(), rows)
        step = partial(partial(own.step), 0.5)
        asked = {"batch": torch.ones(8, 32), "optimizer": own.optimizer, "step": step}
        plan = apply(own.module, budget=10**9, **asked).plan
        assert torch.equal(own.weight, torch.ones(rows, 32))
        return max(plan.peak_bytes)

    assert peak(1008) - peak(8) == 1000 * 32 * 4


@pytest.mark.parametrize("technique", ["recompute", "offload"])
def test_a_model_that_is_compiled_later(technique: str) -> None:
    """The compiler leaves planned submodules as they are, and the numbers too."""
    gradients = []
    for compiles in (False, True):
        torch.manual_seed(0)
        module = mlp()
        apply(module, plan=plan_of(**{"0": technique}))
        called = torch.compile(module, backend="eager") if compiles else module
        called(torch.ones(2, 32)).sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_parts_of_a_storage_that_are_written_one_after_the_other(
    kind: type[nn.RNNBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates of a cell are parts of one storage, saved while others are still to be written: copies that begin
    at once are repeated.
    """
    monkeypatch.setattr(
        HostTensors, "of", classmethod(lambda cls, _: cls(HostPool(pinned=False), copying.Beside()))
    )
    torch.manual_seed(0)
    module = Recurrent(kind)
    x = torch.randn(8, 32, 32)
    gradients = []
    for handle in (None, plan_of(first="offload", second="offload")):
        if handle is not None:
            apply(module, plan=handle)
        module.zero_grad()
        module(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
