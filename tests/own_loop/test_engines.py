"""Plans for modules under other engines, wrapped or sharded, and for models of transformers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import record_function

from pipefit.errors import UsageError
from pipefit.own_loop import LoopPlan, apply
from support.gallery_samples import sampled
from support.own_loop_models import Language, classes, tokens
from support.own_loop_oracle import bytes_of, peaks_of


@contextmanager
def group(backend: str, ranks: int) -> Iterator[None]:
    """Be one of some ranks. Collectives of torch's `fake` backend do nothing, for any number of ranks."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        mesh_of.cache_clear()


def wrapped(module: nn.Module, **options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, **options)


def with_unused(module: nn.Module) -> nn.Module:
    """Give a module a part that its forward does not call."""
    module.unused = nn.Linear(2, 2)
    return module


@cache
def mesh_of(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,))


def sharded(module: nn.Module, **options: Any) -> nn.Module:
    mesh = mesh_of(dist.get_world_size())
    for block in module.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


Engine = Callable[[nn.Module], nn.Module]
ENGINES: dict[str, Engine] = {
    "wrapped": wrapped,
    "gradients in buckets": partial(wrapped, gradient_as_bucket_view=True),
    "unused parameters": lambda module: wrapped(with_unused(module), find_unused_parameters=True),
    "sharded": sharded,
    "sharded, gathered until the backward": partial(sharded, reshard_after_forward=False),
    "sharded, in bfloat16": partial(sharded, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
}
GROUPS = {"one rank": ("gloo", 1), "four ranks": ("fake", 4)}  # a fake group has no DistributedDataParallel
CASES = [(e, g) for e in ENGINES for g in GROUPS if g == "one rank" or e.startswith("sharded")]
OFTEN = {("wrapped", "one rank"), ("sharded", "four ranks")}


def made(engine: Engine) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = engine(Language(dropout=0.1, layers=2))
    return module, torch.optim.AdamW(module.parameters())


def plan_for(engine: Engine, part: float) -> LoopPlan:
    """Return the plan of an engine's loop for a part of its peak."""
    peak, plan = 1 << 40, None
    for share in (1.0, part):
        module, optimizer = made(engine)
        with apply(
            module, budget=int(peak * share), batch=tokens(), optimizer=optimizer, loss=classes
        ) as handle:
            plan = handle.plan
            peak = max(plan.plain_bytes)
    assert plan is not None
    return plan


def trained(engine: Engine, plan: LoopPlan | None) -> list[Tensor]:
    """Train three steps from the parameters on; return the parameters, and gradients of the last step."""
    module, optimizer = made(engine)
    if plan is not None:
        apply(module, plan=plan)
    torch.manual_seed(1)
    for _ in range(3):
        ids, labels = tokens()
        with record_function("step"):
            optimizer.zero_grad()
            outputs = module(ids)
            loss = classes(outputs, labels)
            loss.backward()
            optimizer.step()
    return [local(t.detach()) for p in module.parameters() for t in (p, p.grad) if t is not None]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.sample(2)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("engine", "ranks"), sampled(CASES, often=OFTEN))
def test_bytes_of_engines_are_certified(engine: str, ranks: str) -> None:
    """Buckets, gathered parameters and reduced gradients count: peaks equal the allocator's events."""
    with group(*GROUPS[ranks]):
        plan = plan_for(ENGINES[engine], 0.75)
        assert plan.decisions
        for _ in range(3):  # gloo's thread may hold a bucket a moment longer, which only raises a peak
            peaks = peaks_of(lambda: trained(ENGINES[engine], plan), 0, "step")
            if plan.peak_bytes == (peaks[0], max(peaks[1:])):
                break
    assert plan.peak_bytes == (peaks[0], max(peaks[1:]))
    assert max(peaks) <= plan.budget_bytes


@pytest.mark.sample(1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("engine", sampled(ENGINES, often={"sharded"}))
def test_engines_train_the_same_numbers(engine: str) -> None:
    """A planned module under DistributedDataParallel and fully_shard has bitwise the same parameters and
    gradients.
    """
    with group("gloo", 1):
        plan = plan_for(ENGINES[engine], 0.7)
        plain, planned = (trained(ENGINES[engine], p) for p in (None, plan))
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


def test_a_static_graph_is_refused_by_name() -> None:
    """The refusal of an option that no dry run follows names the option."""
    with group("fake", 2):
        module, optimizer = made(partial(wrapped, static_graph=True))
        with pytest.raises(UsageError, match="use static_graph=False"):
            apply(module, budget="1 GiB", batch=tokens(), optimizer=optimizer, loss=classes)


def test_a_dry_run_leaves_an_engine_as_it_was() -> None:
    """A sharded module has its parameters, hooks and states after a dry run, and no gathered parameter."""

    def seen(module: nn.Module) -> list[Any]:
        states = [part._get_fsdp_state() for part in module.modules() if hasattr(part, "_get_fsdp_state")]
        kept = [
            vars(state).get("_fsdp_param_groups") or [vars(state).get("_fsdp_param_group")]
            for state in states
        ]
        groups = [group for groups in kept for group in groups if group is not None]  # torch 2.11 has one
        parts = [*module.modules(), *states, *groups, *(p for group in groups for p in group.fsdp_params)]
        return [
            (k, id(v), len(v) if hasattr(v, "__len__") else 0) for one in parts for k, v in vars(one).items()
        ]

    with group("fake", 2):
        module, optimizer = made(sharded)
        before = seen(module)
        apply(module, budget="1 GiB", batch=tokens(), optimizer=optimizer, loss=classes).remove()
        assert seen(module) == before


def test_a_hugging_face_model() -> None:
    """A model of transformers recomputes whole blocks if it makes no cache; with one, the blocks are refused."""
    transformers = pytest.importorskip("transformers")

    def planned(*, cache: bool) -> Any:
        config = transformers.LlamaConfig(
            vocab_size=90,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            use_cache=cache,
        )
        module = transformers.LlamaForCausalLM(config)
        ids = torch.randint(90, (8, 32))
        with apply(
            module,
            budget="2.5 MiB",
            batch={"input_ids": ids, "labels": ids},
            optimizer=torch.optim.AdamW,
            offload=False,
        ) as handle:
            return handle.plan

    assert "DynamicCache" in dict(planned(cache=True).refused)["model.layers.0"]
    assert "model.layers.0" not in dict(planned(cache=False).refused)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "batch", sampled(["unpadded", "padded", "packed", "without a mask"], often=["packed"])
)
def test_values_of_a_batch_decide_about_masks(batch: str) -> None:
    """A model of transformers builds the attention mask in the dry run that it builds for this batch."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    module = transformers.LlamaForCausalLM(config)
    ids = torch.randint(90, (8, 64))
    inputs = {"input_ids": ids, "labels": ids}
    if batch in ("unpadded", "padded"):
        inputs["attention_mask"] = torch.ones_like(ids)
    if batch == "padded":
        inputs["attention_mask"][:, 48:] = 0
    if batch == "packed":
        inputs["position_ids"] = torch.arange(32).repeat(8, 2)
    with apply(module, budget="1 GiB", batch=inputs, optimizer=torch.optim.AdamW) as handle:
        certified = handle.plan.peak_bytes
    optimizer = torch.optim.AdamW(module.parameters())
    outputs = None

    def train() -> None:
        nonlocal outputs
        for _ in range(2):
            with record_function("step"):
                optimizer.zero_grad()
                outputs = module(**inputs)
                outputs.loss.backward()
                optimizer.step()

    resident = bytes_of([*module.parameters(), *module.buffers(), inputs])
    assert tuple(peaks_of(train, resident, "step")) == certified


def test_values_are_forgotten_where_unknown_ones_are_written() -> None:
    """A number that is read from a tensor with unknown parts is an assumed one."""
    read = array("q")  # a dry run puts back lists

    def step(batch: tuple[Tensor, Tensor]) -> None:
        ids, x = batch
        counts = torch.zeros(4, dtype=torch.int64)
        counts[1:] += ids[1:4]
        read.append(int(counts[2]))
        rows = counts.view(2, 2)
        rows[0] = (x[:2] > 0).long()
        read.append(int(counts[3]))
        filled = torch.empty(5, dtype=torch.int64).copy_(ids)
        read.append(int(filled[2]))
        filled[:1] = (x[:1] > 0).long()
        read.append(int(filled[2]))

    apply(nn.Linear(1, 1), budget="1 MiB", batch=(torch.arange(7, 12), torch.ones(4)), step=step)
    assert set(list(read)[::2]) == {9}
    assert set(list(read)[1::2]) == {1}  # what a condition on an unknown number assumes
