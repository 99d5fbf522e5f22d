"""Plans under other engines: the module is planned, then wrapped, sharded or handed to a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import record_function

from own_loop_models import Language, classes, tokens
from own_loop_oracle import bytes_of, peaks_of
from pipefit.errors import UsageError
from pipefit.own_loop import Handle, apply


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Run a group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def sharded(module: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def made(part: float | None) -> tuple[nn.Module, Handle | None]:
    """Return a model, with a plan for a part of its peak."""
    torch.manual_seed(0)
    module = Language(dropout=0.1)
    if part is None:
        return module, None
    wanted: dict[str, Any] = {"batch": tokens(), "optimizer": torch.optim.AdamW, "loss": classes}
    with apply(module, budget="1 GiB", **wanted) as handle:
        peak = max(handle.plan.peak_bytes)
    return module, apply(module, budget=int(peak * part), **wanted)


def whole(parameter: Tensor) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.mark.usefixtures("group", "one_thread")
@pytest.mark.parametrize("engine", [pytest.param(wrapped, marks=pytest.mark.gallery), sharded])
def test_engines_train_the_same_numbers(engine: Callable[[nn.Module], nn.Module]) -> None:
    """A planned module under DistributedDataParallel and fully_shard has bitwise the same parameters."""

    def trained(part: float | None) -> list[Tensor]:
        module, handle = made(part)
        assert handle is None or handle.plan.decisions
        engine_module = engine(module)
        optimizer = torch.optim.AdamW(engine_module.parameters())
        torch.manual_seed(1)
        for _ in range(3):
            ids, labels = tokens()
            optimizer.zero_grad()
            classes(engine_module(ids), labels).backward()
            optimizer.step()
        return [whole(parameter.detach()) for parameter in engine_module.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(None), trained(0.7), strict=True))


@pytest.mark.usefixtures("group")
def test_engines_are_refused_by_name() -> None:
    """A wrapper and sharded parameters are not planned as if they were plain modules."""
    module, _ = made(None)
    with pytest.raises(UsageError, match="inside of DistributedDataParallel"):
        apply(wrapped(module), budget="1 GiB", batch=tokens(), loss=classes)
    module, _ = made(None)
    with pytest.raises(UsageError, match="DTensor"):
        apply(sharded(module), budget="1 GiB", batch=tokens(), loss=classes)


def test_a_hugging_face_model() -> None:
    """A model of transformers recomputes whole blocks if it makes no cache; with one, the blocks are refused."""
    transformers = pytest.importorskip("transformers")

    def planned(*, cache: bool) -> Any:
        config = transformers.LlamaConfig(
            vocab_size=90,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("batch", ["unpadded", "padded", "packed", "without a mask"])
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
    read: list[int] = []

    def step(batch: tuple[Tensor, Tensor]) -> None:
        ids, x = batch
        counts = torch.zeros(4, dtype=torch.int64)
        counts[1:] += ids[1:4]
        read.append(int(counts[2]))
        rows = counts.view(2, 2)
        rows[0] = (x[:2] > 0).long()
        read.append(int(counts[3]))

    apply(nn.Linear(1, 1), budget="1 MiB", batch=(torch.arange(7, 12), torch.ones(4)), step=step)
    assert set(read[::2]) == {9}
    assert set(read[1::2]) == {1}
