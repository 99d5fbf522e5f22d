"""Models of the zoo and of Hugging Face on tensor shards and replicas: the numbers of plain training.

Each replica has its own batch statistics, so that the plain model computes them on the same local batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from pipefit.capture import Task, capture
from pipefit.capture.chain import Chain
from pipefit.capture.exporting import arguments, the_loss
from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.models.hugging_face import hf
from pipefit.runtime import Trainer, certify
from pipefit.schema.decisions import Decision, Run, SavedTensors, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import SHARDINGS
from pipefit.schema.plan import Plan
from pipefit.simulator import simulate
from pipefit.tensor_parallel.tracing import blocks_begin
from support.gallery_samples import sampled
from support.huggingface_models import SMALL as WIDTHS
from support.huggingface_models import TEXT, TINY
from support.known_profiles import profile
from support.offload_choices import movable, random_place
from support.ranks_and_whole import InDouble
from support.sharded_stages import grid_plan
from support.unseen_models import UNSEEN

SIZE, BATCH, STEPS = 4, 8, 3
TOLERANCE, SMALL = 1e-9, 1e-3  # the bias of keys has no gradient but rounding
AMPLIFIED = {"resnet101": 1e-6}  # plain training from weights 1e-15 apart ends 3e-7 apart after three steps
FOUR = {"num_attention_heads": 4, "num_key_value_heads": 4}
GPT = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 8, "dropout": 0.0}
RESNET: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "num_labels": 10}
SWIN: dict[str, Any] = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
                        "window_size": 4, "drop_path_rate": 0.0, "num_labels": 10}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **WIDTHS,
    **TEXT,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}
ORDINARY: dict[str, Callable[[], Task]] = {
    "gpt": lambda: build("gpt", **GPT, vocabulary=26, tied=True),
    "mlp": lambda: build("mlp", inputs=16, widths=(32, 64, 32, 16)),
}
GALLERY: dict[str, Callable[[], Task]] = {
    "bert": lambda: build("bert", **GPT, vocabulary=24),
    "resnet": lambda: build("resnet", width=16, blocks=(1, 1), image_size=16, num_classes=10),
    "unet": lambda: build("unet", width=8, image_size=16, depth=2, dropout=0.0),
    "vgg": lambda: build("vgg11", width=8, image_size=32, dropout=0.0),
    **{f"hf:{name}": lambda name=name: hf(name, **TINY[name]) for name in ("gpt2", "bert", "t5", "vit")},
    "hf:llama": lambda: hf("llama", **TINY["llama"] | {"intermediate_size": 256}),
    "hf:llama, heads of keys": lambda: hf("llama", **TINY["llama"] | {"intermediate_size": 256} | FOUR),
}
BESIDE: dict[str, Callable[[], Task]] = {  # models of few or of no products that ranks divide
    "gpt-stdlib": lambda: build("gpt-stdlib", **GPT),
    "amoebanet": lambda: build("amoebanet", layers=3, filters=16, num_classes=10, image_size=64),
    "hf:resnet": lambda: replace(hf("resnet", **RESNET), batch=images),
    "hf:mixtral": lambda: hf("mixtral", **EXPERTS, sequence=8),
    "mpress-gpt": lambda: build("gpt", **GPT, vocabulary=26, tied=True, attention="eager"),
    "mpress-bert": lambda: build("bert", **GPT, vocabulary=24, head="span", attention="eager"),
    "mpress-bert, unfused": lambda: build(
        "bert", **GPT, vocabulary=24, head="span", attention="eager", unfused=True
    ),
    "resnet101": lambda: build("resnet101", width=4, image_size=33, num_classes=10),
    "hf:swin": lambda: replace(hf("swin", **SWIN), batch=images),
    **{f"hf:{name}": lambda name=name: hf(name, **TINY[name]) for name in ("whisper", "bart")},
}
FEW = (("mlp", 2),)
NORMED = ("resnet", "amoebanet", "hf:resnet")
EVERY = {**ORDINARY, **GALLERY, **BESIDE, **UNSEEN}
SEQUENCES = (
    "gpt",
    "bert",
    "hf:gpt2",
    "hf:bert",
    "hf:t5",
    "hf:llama, heads of keys",
    "mpress-gpt",
    "mpress-bert",
)  # models whose positions four ranks divide
PLANS = [(name, 0) for name in ORDINARY]
PLANS += [(name, seed) for name in (*ORDINARY, *GALLERY) for seed in range(3) if (name, seed) not in PLANS]

pytestmark = pytest.mark.usefixtures("one_thread")


def images(size: int) -> tuple[Any, None]:
    """Return small images with labels."""
    return {"pixel_values": torch.randn(size, 3, 32, 32), "labels": torch.randint(10, (size,))}, None


def in_double(name: str) -> Task:
    """Return the named task in double precision, with an optimizer that keeps small differences small."""
    base = EVERY[name]()

    def batch(size: int) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda t: t.double() if t.is_floating_point() else t, base.batch(size)
        )

    def module() -> nn.Module:
        return base.build().double()

    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return Task(
        module, batch=batch, loss=base.loss, optimizer=optimizer, name=name.replace(":", " ").replace(",", "")
    )


def random_grids(chain: Chain, seed: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Draw one to three stages between blocks, on at most eight devices; stages that share a parameter have
    equally many shards.
    """
    rng, cuts = Random(seed), blocks_begin(chain)
    edges = [0, *sorted(rng.sample(cuts, rng.randint(0, min(2, len(cuts))))), len(chain.layers)]
    known = [(data, tensor) for data in (1, 2) for tensor in (1, 2, 4)]
    while True:
        degrees = [rng.choice(known) for _ in edges[1:]]
        if chain.shared:
            degrees = [(data, degrees[0][1]) for data, _ in degrees]
        if sum(data * tensor for data, tensor in degrees) <= 8 and any(tensor > 1 for _, tensor in degrees):
            return edges, degrees


def along_positions(plan: Plan, rng: Random) -> Plan:
    """Return the plan with sequence parallelism in two of three stages of shards."""
    chosen = [stage.grid.tensor > 1 and rng.random() < 2 / 3 for stage in plan.stages]
    both = zip(plan.stages, chosen, strict=True)
    return replace(
        plan, stages=tuple(replace(one, grid=replace(one.grid, sequences=also)) for one, also in both)
    )


def parts_of(batch: Any, size: int) -> Iterator[Any]:
    """Split a batch into parts of `size` samples."""
    for first in range(0, BATCH, size):
        yield pytree.tree_map_only(Tensor, lambda t, at=first: t[at : at + size], batch)


def loss_of(module: nn.Module, task: Task, batch: Any) -> Tensor:
    """Return the loss of a plain model."""
    inputs, targets = batch
    args, kwargs = ((inputs,), {}) if isinstance(module, nn.Sequential) else arguments(inputs)
    outputs = module(*args, **kwargs)
    loss: Tensor = the_loss(outputs, "plain") if task.loss is None else task.loss(outputs, targets)
    return loss


def plain_step(module: nn.Module, optimizer: torch.optim.Optimizer, task: Task, batch: Any) -> float:
    """Run one plain training step of a batch in microbatches; return the mean loss."""
    total = 0.0
    for part in parts_of(batch, SIZE):
        loss = loss_of(module, task, part)
        (loss * (SIZE / BATCH)).backward()
        total += loss.item() * SIZE / BATCH
    optimizer.step()
    optimizer.zero_grad()
    return total


def with_statistics_of_slices(module: nn.Module, chain: Chain, plan: Plan) -> None:
    """Let every batch norm of a plain model normalize each replica's samples separately, and keep the
    statistics of the first replica of its stage.
    """
    for name, norm in module.named_modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            (layer,) = (n for n, one in enumerate(chain.layers) if f"{name}.weight" in one.originals.values())
            (stage,) = (stage for stage in plan.stages if stage.start <= layer < stage.stop)
            norm.forward = partial(in_slices, norm, stage.grid.data)  # type: ignore[method-assign]


def in_slices(norm: nn.modules.batchnorm._BatchNorm, count: int, values: Tensor) -> Tensor:
    """Normalize each local batch with its own statistics; the norm keeps the first one's."""
    first, *others = values.chunk(count)
    own = [
        F.batch_norm(other, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)
        for other in others
    ]
    return torch.cat([type(norm).forward(norm, first), *own])


def far(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest number, or to a small one if all are rounding
    errors.
    """
    return float((one.double() - other.double()).abs().max()) / max(float(other.double().abs().max()), SMALL)


def all_that_may_be(plan: Plan, rng: Random) -> Plan:
    """Return the plan with divided state, recomputed layers, tensors and state offloaded to hosts or other
    devices, and updates there, as far as the simulator supports them.
    """
    for number, stage in enumerate(plan.stages):
        for shard in rng.sample(SHARDINGS[1:], 3) if stage.grid.data > 1 and rng.random() < 0.7 else ():
            grid = replace(stage.grid, shard=shard, buckets=rng.choice((1, 2)))
            stages = tuple(replace(s, grid=grid) if s is stage else s for s in plan.stages)
            if is_possible(tried := replace(plan, stages=stages)):
                plan = tried
                break
        for one in freeing(plan, number, rng):
            tried = replace(plan, decisions=(*plan.decisions, one))
            plan = tried if is_possible(tried) else plan
    return plan


def freeing(plan: Plan, number: int, rng: Random) -> Iterator[Decision]:
    """Return decisions of every kind about a stage, each for some of its layers."""
    stage, host = plan.stages[number], parse_place("host")
    start, stop = sorted(rng.sample(range(stage.start, stage.stop + 1), 2))
    yield Decision(
        stage=number, subject=Run(start=start, stop=stop), what=What.RECOMPUTE, ahead=rng.choice((0, 1))
    )
    if tensors := movable(plan, number):
        some = tuple(rng.sample(tensors, rng.randint(1, min(4, len(tensors)))))
        place = random_place(plan, number, rng)
        yield Decision(stage=number, subject=SavedTensors(tensors=some), what=What.OFFLOAD, place=place)
    for what, kind in ((What.UPDATE, "optimizer"), (What.OFFLOAD, "optimizer"), (What.OFFLOAD, "parameters")):
        start, stop = sorted(rng.sample(range(stage.start, stage.stop + 1), 2))
        yield Decision(stage=number, subject=State(start=start, stop=stop, kind=kind), what=what, place=host)


def is_possible(plan: Plan) -> bool:
    """Return whether the simulator supports the plan."""
    try:
        simulate(plan)
    except UsageError:
        return False
    return True


def assert_trained_as_on_one_device(name: str, seed: int, *, freed: bool = False) -> None:
    """Assert losses, parameters and statistics after three steps, for stages of random grids, some with
    sequence parallelism.

    With `freed`, memory is freed in all ways at once, and bytes equal the dry run's.
    """
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
    task = in_double(name)
    with InDouble():
        torch.manual_seed(0)
        plain = task.build().train()
        chain = capture(task, *task.batch(SIZE))
        edges, degrees = random_grids(chain, seed)
        sizes, tensor = (
            sorted({SIZE, *(SIZE // data for data, _ in degrees)})[::-1],
            {1, *(t for _, t in degrees)},
        )
        found = profile(
            task, microbatch_size=tuple(sizes), tensor=tuple(sorted(tensor)), sequences=name in SEQUENCES
        )
        plan = grid_plan(found, edges, degrees, microbatches=BATCH // SIZE, rng=Random(seed))
        plan = along_positions(plan, Random(seed + 1)) if name in SEQUENCES else plan
        plan = all_that_may_be(plan, Random(seed + 2)) if freed else plan
        with_statistics_of_slices(plain, chain, plan)
        trainer = Trainer(task, plan, numbers=False)
        optimizer = task.optimizer([p for p in plain.parameters() if p.requires_grad])
        for step in range(STEPS):
            torch.manual_seed(step)
            batch = task.batch(BATCH)
            assert trainer.step(batch) == pytest.approx(plain_step(plain, optimizer, task, batch), rel=1e-6)
        assert not freed or trainer.trace.peak_bytes == certify(task, plan).peak_bytes
    ours, theirs = trainer.state_dict(), dict(plain.state_dict())
    assert ours.keys() == theirs.keys()
    assert [
        key for key, tensor in theirs.items() if far(ours[key], tensor) > AMPLIFIED.get(name, TOLERANCE)
    ] == []


@pytest.mark.gallery
@pytest.mark.parametrize(
    ("name", "seed"),
    sampled(PLANS, often=[("mlp", 0)]),
)
def test_grids_of_shards_and_replicas_train_as_one_device_does(name: str, seed: int) -> None:
    """Grids of shards and replicas train models of the zoo and of Hugging Face as one device does."""
    assert_trained_as_on_one_device(name, seed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "seed"), sampled(product(EVERY, range(3)), often=FEW))
def test_they_do_with_everything_that_frees_memory(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grids train as one device does with everything that frees memory: ZeRO, recomputed layers, tensors and
    state on hosts and on other devices.

    Only transformers' own grouped product of all experts supports double precision.
    """
    if name == "hf:mixtral":
        pytest.importorskip("transformers")
        monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False)
    assert_trained_as_on_one_device(name, seed, freed=True)


@pytest.mark.gallery
@pytest.mark.parametrize("name", NORMED)
def test_replicas_of_batch_norm_train_as_so_many_models_whose_gradients_are_averaged(name: str) -> None:
    """Replicas of batch norm train as model copies with averaged gradients, in a plain loop.

    The first replica's statistics are stored, and an evaluation uses each replica's own.
    """
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
    task = in_double(name)
    with InDouble():
        torch.manual_seed(0)
        copies = [task.build().train()]
        copies += [copy.deepcopy(copies[0])]
        optimizer = task.optimizer(list(copies[0].parameters()))
        cuts = blocks_begin(capture(task, *task.batch(SIZE)))
        found = profile(task, microbatch_size=(SIZE, SIZE // 2))
        edges = [0, cuts[len(cuts) // 2], len(found.layers)]
        plan = grid_plan(found, edges, [(2, 1), (2, 1)], microbatches=BATCH // SIZE)
        trainer = Trainer(task, plan, numbers=False)
        for step in range(STEPS):
            torch.manual_seed(step)
            batch = task.batch(BATCH)
            losses = [
                loss_of(*one) for one in zip(copies * 2, [task] * 4, parts_of(batch, SIZE // 2), strict=True)
            ]
            torch.stack(losses).mean().backward()
            for one, other in zip(*(one.parameters() for one in copies), strict=True):
                one.grad += other.grad
                other.grad = None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for one, other in zip(*(one.parameters() for one in copies), strict=True):
                    other.copy_(one)
            assert trainer.step(batch) == pytest.approx(torch.stack(losses).mean().item(), rel=1e-9)
        for one in copies:
            one.eval()
        with torch.no_grad():
            losses = [
                loss_of(*one) for one in zip(copies * 2, [task] * 4, parts_of(batch, SIZE // 2), strict=True)
            ]
        assert trainer.evaluate(batch) == pytest.approx(torch.stack(losses).mean().item(), rel=1e-9)
    ours, theirs = trainer.state_dict(), dict(copies[0].state_dict())
    assert [name for name, tensor in theirs.items() if far(ours[name], tensor) > TOLERANCE] == []
