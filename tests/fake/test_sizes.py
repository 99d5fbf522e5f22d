"""Chains generated for other numbers of samples equal traces with these numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import gallery
from pipefit.capture import Chain, Task
from pipefit.capture.copying import copied
from pipefit.capture.graph_layer import GraphLayer
from pipefit.capture.sample import sample
from pipefit.capture.sizes import Family, Size, Sketch
from pipefit.errors import InfeasibleError
from pipefit.fake_cuda import chain as sizes
from pipefit.fake_cuda.chain import Chains, fake_chain
from pipefit.fake_cuda.target import FakeTarget
from pipefit.largest.task_plans import plan
from pipefit.models import build
from pipefit.profiler import profile
from pipefit.profiler.fake import profile_sizes
from pipefit.profiler.on_demand import OnDemand
from pipefit.schema.cluster import Cluster
from pipefit.schema.profile import Measurement, ModelProfile
from support.small_tasks import task_of
from support.undivided_model import Entangled

SAMPLE = ("segments", "tagger")  # for every run of the tests: images, and a recurrent layer
EVERY = (1, 2, 3, 5, 8)
WIDTH = 6


def told(chain: Chain) -> list[Any]:
    """Return a description of a chain in texts and numbers."""
    found: list[Any] = [
        chain.blocks,
        chain.inputs,
        chain.outputs,
        chain.targets,
        chain.packing,
        chain.autocast,
    ]
    for layer in chain.layers:
        module = layer.module
        assert isinstance(module, GraphLayer)
        code = module.pipefit_code
        found += [layer.name, sorted(layer.originals.items()), type(module), code.text, code.operations]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found.append((name, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad))
    return found


class Asking(nn.Module):
    """A model with one more operation at some numbers of samples."""

    def __init__(self, more: Callable[[int], bool]) -> None:
        super().__init__()
        self.first, self.second, self.more = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), more

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x.tanh().sigmoid() if self.more(len(x)) else x.tanh())


def asking(more: Callable[[int], bool]) -> Task:
    """Return the task of a model that branches on the number of samples."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, WIDTH), torch.randn(size, WIDTH)

    return Task(lambda: Asking(more), batch=batch, loss=F.mse_loss, name="asking")


def traces(task: Task, *wanted: int) -> list[int]:
    """Return the traced sizes when chains of these sizes are requested, in this order."""
    found = list[int]()

    def counted(task: Task, fake: FakeTarget, like: Any) -> Chain:
        found.append(len(like[0]))
        return fake_chain(task, fake, like)

    chains = Chains(task, EVERY)
    with FakeTarget("cpu") as fake, mock.patch.object(sizes, "fake_chain", counted):
        for samples in wanted:
            chains.of(samples, fake)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.gallery) for name in gallery.MODELS],
)
def test_a_chain_that_is_written_is_that_of_a_trace(name: str) -> None:
    """The names, code and tensors of all layers, the blocks and the shapes of the ends are equal."""
    task = gallery.task(name)
    with FakeTarget("cpu") as fake:
        traced = fake_chain(task, fake, sample(task, 3))
        made = Chains(task, EVERY).of(3, fake)
        if not traced.traced:  # by hand
            assert [layer.name for layer in made.layers] == [layer.name for layer in traced.layers]
            return
        assert told(made) == told(traced)


def test_a_profile_of_a_chain_that_is_written_is_that_of_a_trace() -> None:
    """Bytes, work, fingerprint and the digest of sizes are equal."""
    task = build("gpt", layers=1, hidden=16, heads=2, sequence=8, vocabulary=50)
    known = OnDemand(task, target="cuda", sizes=(1, 2, 4))
    assert known(2) == profile(task, microbatch_size=2, target="cuda")


def test_two_traces_do_for_all_sizes() -> None:
    """The smallest and the largest size are traced; if a single sample is another model, the next size is
    traced too.
    """
    assert traces(asking(lambda _: False), 3, 2, 5, 8, 1) == [1, 8]
    assert traces(asking(lambda samples: samples == 1), 3, 2, 5, 8, 1) == [1, 8, 2]
    assert traces(asking(lambda samples: samples < 3), 3, 2, 5) == [1, 8, 2, 3, 5]


def test_a_chain_by_hand_is_made_once() -> None:
    """The chain does not depend on the number of samples; each requested one has the form of its batch."""
    task = build("mlp", widths=(8,), inputs=4)
    assert traces(task, 3, 2, 5, 1) == [1]
    assert traces(task, 8, 2, 5, 1) == [8]

    def batch(size: int) -> tuple[Tensor | list[Tensor], Tensor]:
        inputs = torch.randn(size, 4)
        return [inputs] if size > 2 else inputs, torch.zeros(size, dtype=torch.int64)

    odd, fake = replace(task, batch=batch), FakeTarget("cpu")
    chains = Chains(odd, EVERY)
    with fake:
        assert [chains.of(samples, fake).layers[0].packing for samples in (1, 3, 2)] == [
            "bare",
            "list",
            "bare",
        ]


def test_of_equal_layers_one_is_copied_and_run() -> None:
    """A survey of a cached chain copies a layer of each kind, whatever their number, and leaves its layers
    unchanged: a batch norm has counted no batch, and no parameter has a gradient.
    """

    def surveyed(layers: int) -> tuple[int, ModelProfile, Chain]:
        task = task_of(
            lambda: [module for _ in range(layers) for module in (nn.Linear(8, 8), nn.BatchNorm1d(8))],
            outputs=8,
        )
        chains, fake = Chains(replace(task, loss=F.l1_loss), EVERY), FakeTarget("cuda")
        with fake:
            kept = chains.unrun(2, fake)
        with mock.patch("pipefit.fake_cuda.chain.copied", wraps=copied) as copies:
            made = profile_sizes(chains.task, [2, 3], target="cuda", threads=1, chains=chains)
        return sum(len([*call.args[0].children()]) for call in copies.call_args_list), made, kept

    (few, _, _), (many, made, kept) = surveyed(2), surveyed(9)
    assert few == many
    task = task_of(
        lambda: [module for _ in range(9) for module in (nn.Linear(8, 8), nn.BatchNorm1d(8))], outputs=8
    )
    assert made == profile(replace(task, loss=F.l1_loss), microbatch_size=[2, 3], target="cuda", threads=1)
    assert all(parameter.grad is None for layer in kept.layers for parameter in layer.module.parameters())


def test_lines_of_code_are_traced_where_they_are_told() -> None:
    """Source lines take a quarter of a trace. A trace without them is repeated with them if a block cannot be
    divided, and later traces include them at once. torch 2.11 cannot omit them.
    """
    emits, always = list[bool](), not hasattr(fx.config, "do_not_emit_stack_traces")

    def noted(task: Task, fake: FakeTarget, like: Any) -> Chain:
        emits.append(not getattr(fx.config, "do_not_emit_stack_traces", False))
        return fake_chain(task, fake, like)

    with FakeTarget("cpu") as fake, mock.patch.object(sizes, "fake_chain", noted):
        Chains(asking(lambda _: False)).of(3, fake)
        assert emits == [always]
        emits.clear()
        chains = Chains(replace(asking(lambda _: False), module=partial(Entangled, WIDTH)))
        found = [chains.of(samples, fake).blocks for samples in (3, 5)]
    assert emits == [always, True, True]
    assert all("undivided_model.py:" in blocks[0].undivided for blocks in found)


def test_a_trace_serves_a_task_with_another_optimizer() -> None:
    """Master weights belong to the optimizer: a model in bfloat16 is traced once, with them and without."""
    task = replace(asking(lambda _: False), precision="bfloat16")
    chains, other = Chains(task, (2,)), replace(task, precision="master-bfloat16")
    first = OnDemand(task, target="cuda", chains=chains)(2)
    with mock.patch.object(sizes, "fake_chain"):  # nothing is traced any more
        second = OnDemand(other, target="cuda", chains=chains.also_for(other))(2)
    assert second == profile(other, microbatch_size=2, target="cuda") != first


def test_sizes_of_which_none_lies_between_are_traced_when_they_are_asked_for() -> None:
    """A plan with microbatches of one size takes one trace."""
    assert traces(asking(lambda _: False), 8) == [8]
    assert traces(asking(lambda _: False), 1, 8) == [1, 8]


def alone(one: Measurement) -> Measurement:
    """Return a measurement without interactions between samples, which are found once for all sizes."""
    kinds = tuple(replace(kind, coupled="") for kind in one.kinds)
    return replace(one, kinds=kinds, loss=replace(one.loss, coupled=""))


def test_a_model_that_is_another_one_between_is_profiled_by_traces() -> None:
    """If a checked size differs from its trace, later profiles come from traces."""
    task = asking(lambda samples: samples == 4)
    known = OnDemand(task, sizes=(1, 2, 4, 8))
    assert known(4) != profile(task, microbatch_size=4)
    assert known.checked([2])()
    assert not known.checked([2, 4])()
    assert alone(known(4).measurements[0]) == alone(profile(task, microbatch_size=4).measurements[0])
    assert known.checked()()


def test_a_plan_has_the_profile_of_a_trace() -> None:
    """The profile equals a trace's for a model that differs at the chosen size; an infeasible question is
    refused.
    """
    task = asking(lambda samples: samples == 2)
    room = plan(task, Cluster.emulated((1, 1 << 30)), microbatch_size=2, microbatches=2).prediction
    assert room is not None
    made = plan(task, Cluster.emulated((1, room.peak_bytes[0])), batch_size=4, objective="peak")
    for one in made.profile.measurements:
        assert alone(one) == alone(profile(task, microbatch_size=one.microbatch_size).measurements[0])
    with pytest.raises(InfeasibleError):
        plan(task, Cluster.emulated((1, 100)), batch_size=4)


@pytest.mark.parametrize(
    ("few", "many", "between"),
    [
        ([2, 7, 3], [8, 7, 3], [4, 7, 3]),
        ([6, -1], [24, -1], [12, -1]),
        ([-2], [-8], [-4]),
        ([4], [64], None),  # the square
        ([3], [9], None),  # one more
    ],
)
def test_numbers_are_the_same_or_in_proportion(
    few: list[int], many: list[int], between: list[int] | None
) -> None:
    """Numbers for two and eight samples that are equal or proportional have a size; other growth has none."""
    found = [Size.of(one, 2, other, 8) for one, other in zip(few, many, strict=True)]
    assert (None if None in found else [size.at(4) for size in found if size]) == between


class Reshaping(nn.Module):
    """A model whose one operation takes these arguments."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.operation = nn.Linear(WIDTH, WIDTH), operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self.linear(x)).sum()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("operation", "derived"),
    [
        (lambda x: x.view(len(x), 2, 3), True),
        (lambda x: x.expand(len(x), len(x), WIDTH), True),
        (lambda x: x[: len(x) // 2], False),  # half a number for each sample
        (lambda x: x / len(x), True),  # an integer divisor
        (lambda x: x * (1 / len(x)), False),  # a float that depends on the samples
        (lambda x: x.view(len(x), 2, 3) if len(x) < 4 else x.view(len(x), WIDTH), False),
        (lambda x: x.new_ones(len(x) ** 2) + x.mean(), False),
    ],
)
def test_chains_are_derived_of_proportional_operations(
    operation: Callable[[Tensor], Tensor], derived: bool
) -> None:
    """Chains of two and eight samples form a family unless operations differ in more than proportional
    integers; a derived chain equals the trace.
    """
    task = Task(lambda: Reshaping(operation), batch=asking(bool).batch, loss=None, name="reshaping")
    with FakeTarget("cpu") as fake:
        few, many, between = (fake_chain(task, fake, sample(task, size)) for size in (2, 8, 4))
        family = Family.of(few, 2, Sketch.of(many), 8)
        assert (family is not None) == derived
        if family is not None:
            assert family.has(between, 4)
            made = sizes.chain_again(few, fake)
            family.write(made, 4)
            assert told(made) == told(between)
