"""The task's module after steps under every kind of plan: complete, as if it were trained in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit import Cluster, Plan, Task, Trainer, Training, profile
from pipefit import plan as make_plan
from pipefit.runtime import certify
from pipefit.schema.decisions import Decision, Run, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.profile import ModelProfile

WIDTH, SIZE = 16, 4


def module() -> nn.Sequential:
    """Build two blocks that tensor shards can divide, with a buffer."""
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    return nn.Sequential(
        nn.Sequential(*layers), nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 4))
    )


class Normed(nn.Module):
    """A model that has to be traced, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.norm(self.linear(values))
        return result + result.mean()


def task_of(own: nn.Module, **settings: Any) -> Task:
    """Return a task that trains this module."""
    chosen: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=0.01)} | settings
    return Task(own, batch=batch, loss=F.mse_loss, name="whole", **chosen)


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return a random batch."""
    return torch.randn(size, WIDTH), torch.randn(size, 4)


@cache
def profiled(precision: Any = None) -> ModelProfile:
    """Return a profile of whole layers, and of layers divided between two ranks."""
    return profile(
        task_of(module(), precision=precision),
        microbatch_size=(SIZE, SIZE // 2),
        tensor=() if precision else 2,
    )


def plan_of(
    *grids: dict[str, Any], decisions: tuple[Decision, ...] = (), precision: Any = None, **how: Any
) -> Plan:
    """Return a plan with one or two stages, each on the devices of its grid."""
    found, first, stages = profiled(precision), 0, []
    layers = len(found.layers)
    edges = (0, layers) if len(grids) == 1 else (0, layers // 2, layers)
    for number, grid in enumerate(grids):
        count = grid.get("data", 1) * grid.get("tensor", 1)
        one = Grid(devices=tuple(range(first, first + count)), **grid)
        stages.append(Stage(start=edges[number], stop=edges[number + 1], grid=one))
        first += count
    training = Training(batch_size=2 * SIZE, microbatches=2, precision=precision or "float32", **how)
    cluster = Cluster.emulated((first, 1 << 30))
    return Plan(profile=found, cluster=cluster, training=training, stages=tuple(stages), decisions=decisions)


def away(kind: Any, what: What = What.OFFLOAD) -> Decision:
    """Move all of a stage's state of a kind to the host."""
    return Decision(stage=0, subject=State(start=0, stop=2, kind=kind), what=what, place=parse_place("host"))


REPLICAS: dict[str, Any] = {"data": 2}
PLANS: dict[str, Callable[[], Plan]] = {
    "stages": lambda: plan_of({}, {}),
    "replicas": lambda: plan_of(REPLICAS),
    "zero 1": lambda: plan_of(REPLICAS | {"shard": "optimizer"}),
    "zero 2": lambda: plan_of(REPLICAS | {"shard": "gradients"}),
    "zero 3": lambda: plan_of(REPLICAS | {"shard": "parameters"}),
    "zero 3 in buckets": lambda: plan_of(REPLICAS | {"shard": "parameters", "buckets": 2}, {}),
    "shards": lambda: plan_of({"tensor": 2}),
    "shards and zero 3": lambda: plan_of({"tensor": 2, "data": 2, "shard": "parameters"}),
    "optimizer away": lambda: plan_of({}, decisions=(away("optimizer"),)),
    "updated on the host": lambda: plan_of({}, decisions=(away("optimizer", What.UPDATE),)),
    "parameters away": lambda: plan_of({}, decisions=(away("parameters"), away("optimizer"))),
    "zero 3 away": lambda: plan_of(
        REPLICAS | {"shard": "parameters"}, decisions=(away("parameters"), away("optimizer"))
    ),
    "recomputed": lambda: plan_of(
        REPLICAS | {"shard": "parameters"},
        decisions=(Decision(stage=0, subject=Run(start=0, stop=1), what=What.RECOMPUTE),),
    ),
    "mixed": lambda: plan_of(REPLICAS | {"shard": "parameters"}, precision="mixed-bfloat16"),
    "masters": lambda: plan_of(REPLICAS | {"shard": "parameters"}, precision="master-bfloat16"),
    "versions": lambda: plan_of({}, {}, schedule="pipedream-2bw"),
    "versions of shards": lambda: plan_of({"tensor": 2}, {}, schedule="pipedream-2bw"),
}


def used(own: nn.Module, like: nn.Module, folder: Path, *, tolerance: float) -> None:
    """Assert that a module equals another one in every operation that reads its parameters."""
    given = torch.ones(3, WIDTH, dtype=next(like.parameters()).dtype)
    torch.save(own.state_dict(), folder / "weights.pt")
    loaded = module().to(given.dtype)
    loaded.load_state_dict(torch.load(folder / "weights.pt"))
    for one in (own, copy.deepcopy(own), loaded):
        torch.testing.assert_close(one(given), like(given), rtol=tolerance, atol=tolerance)
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor, like.state_dict()[name], rtol=tolerance, atol=tolerance)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PLANS)
def test_the_module_is_whole_after_every_step(name: str, tmp_path: Path) -> None:
    """After steps, evaluations and saves the module has the numbers of training in place; peaks equal the dry
    run's.
    """
    plan = PLANS[name]()
    precision: Any = plan.training.precision if plan.training.precision != "float32" else None
    own, plain = module(), module()
    endless = plan.training.endless
    alone = (
        plan_of({}, {}, precision=precision, schedule=plan.training.schedule)
        if endless
        else plan_of({}, precision=precision)
    )
    trainer, beside = (
        Trainer(task_of(own, precision=precision), plan),
        Trainer(task_of(plain, precision=precision), alone),
    )
    tolerance = 1e-4 if precision is None else 0.05
    torch.manual_seed(1)
    for step in range(4 if endless else 2):
        given = batch(2 * SIZE)
        trainer.step(given)
        beside.step(given)
        used(own, plain, tmp_path, tolerance=tolerance)
        if endless:  # whose pipeline an evaluation, and a save, would empty
            continue
        assert trainer.evaluate(given) == pytest.approx(beside.evaluate(given), rel=tolerance)
        trainer.save(tmp_path / f"saved-{step}", background=False)
        used(own, plain, tmp_path, tolerance=tolerance)
    assert trainer.trace.peak_bytes == certify(task_of(module(), precision=precision), plan).peak_bytes
    trainer.finish()
    beside.finish()
    used(own, plain, tmp_path, tolerance=tolerance)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["stages", "replicas", "zero 1", "zero 3", "shards", "parameters away"])
def test_changes_of_the_module_are_trained_on(name: str) -> None:
    """Changes of the module between steps take effect, as in training in place, also without autograd."""
    own, plain = module(), module()
    trainer, beside = Trainer(task_of(own), PLANS[name]()), Trainer(task_of(plain), plan_of({}))
    torch.manual_seed(1)
    for change in (_nothing, _clamped, _loaded, _frozen, _nothing):
        change(own)
        change(plain)
        given = batch(2 * SIZE)
        assert trainer.step(given) == pytest.approx(beside.step(given), rel=1e-4)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(trainer.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def _nothing(own: nn.Module) -> None:
    """Leave the module unchanged."""


def _frozen(own: nn.Module) -> None:
    next(own.parameters()).requires_grad_(False)


def _clamped(own: nn.Module) -> None:
    for parameter in own.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def _loaded(own: nn.Module) -> None:
    other = module()
    own.load_state_dict({name: tensor * 0.5 for name, tensor in other.state_dict().items()})


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["stages", "replicas", "zero 3", "shards"])
def test_what_is_loaded_after_an_interrupted_update_is_trained_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that the module loads after an interrupted update, of one stage or replica alone, are used by all
    of them, and replicas stay equal.
    """
    own, plain = module(), module()
    trainer = Trainer(task_of(own), PLANS[name](), numbers=False)
    torch.manual_seed(1)
    trainer.step(batch(2 * SIZE))
    plain.load_state_dict(own.state_dict())
    update, calls = torch.optim.AdamW.step, list[Any]()

    def interrupted(optimizer: Any) -> Any:
        calls.append(optimizer)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return update(optimizer)

    with monkeypatch.context() as failing:
        failing.setattr(torch.optim.AdamW, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(batch(2 * SIZE))
    own.load_state_dict(plain.state_dict())
    given, targets = batch(2 * SIZE)
    expected = F.mse_loss(plain(given), targets).item()
    assert trainer.evaluate((given, targets)) == pytest.approx(expected, rel=1e-4)
    used = plain.state_dict()
    assert all(torch.equal(tensor, used[key]) for key, tensor in own.state_dict().items())
    trainer.step(batch(2 * SIZE))
    plain.load_state_dict(own.state_dict())
    expected = F.mse_loss(plain(given), targets).item()
    assert trainer.evaluate((given, targets)) == pytest.approx(expected, rel=1e-4)


def test_buffers_that_a_device_has_in_memory_of_its_own_are_followed() -> None:
    """On a GPU, layers have buffers of their own: the module has their numbers, also if it is trained in place."""
    own = Normed()
    task, reference = task_of(own), copy.deepcopy(own)
    plan = make_plan(profile(task, microbatch_size=SIZE), Cluster.emulated((1, 1 << 30)), batch_size=SIZE)
    trainer = Trainer(task, plan)
    for stage in trainer.stages:
        for layer in stage.layers:
            for part in layer.module.modules():
                part._buffers.update(
                    {name: one.clone() for name, one in part._buffers.items() if one is not None}
                )
    inputs, targets = batch(SIZE)
    trainer.step((inputs, targets))
    reference(inputs)
    for name, buffer in reference.named_buffers():
        assert torch.equal(dict(own.named_buffers())[name], buffer), name


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["zero 3", "shards", "parameters away"])
def test_what_is_loaded_is_in_the_module(name: str, tmp_path: Path) -> None:
    """The module has the state of a loaded checkpoint or state dict, and after a failed step the state before
    it.
    """
    own = module()
    trainer = Trainer(task_of(own), PLANS[name]())
    trainer.step(batch(2 * SIZE))
    trainer.save(tmp_path, background=False)
    saved = copy.deepcopy(own.state_dict())
    trainer.step(batch(2 * SIZE))
    trainer.load(tmp_path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in own.state_dict().items())
    trainer.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in saved.items()})
    assert not any(parameter.any() for parameter in own.parameters())


@pytest.mark.parametrize(
    "degrees",
    [{"data": 2, "shard": "parameters"}, pytest.param({"data": 1, "tensor": 2}, marks=pytest.mark.gallery)],
)
def test_a_model_of_hugging_face_is_saved_and_generates(degrees: dict[str, Any], tmp_path: Path) -> None:
    """A Hugging Face model is saved and generates as a model trained as a whole, whatever its stages keep."""
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(64, (2 * SIZE, 16), generator=torch.Generator().manual_seed(1))

    def made() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))

    def trained(asked: dict[str, Any]) -> Any:
        own = made()
        task = Task(
            own,
            batch=lambda size: {"input_ids": tokens[:size], "labels": tokens[:size]},
            loss=None,
            name="llama",
        )
        found = make_plan(
            task,
            Cluster.emulated((2, 1 << 30)),
            batch_size=2 * SIZE,
            microbatches=2,
            planner="uniform",
            stages=1,
            **asked,
        )
        trainer = Trainer(task, found, numbers=False)
        for _ in range(2):
            trainer.step(task.batch(2 * SIZE))
        return own.eval()

    own, plain = trained(degrees), trained({"data": 1})
    own.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=1e-4, atol=1e-4)
    written = [
        one.generate(tokens[:1, :3], max_new_tokens=4, do_sample=False).tolist() for one in (own, plain)
    ]
    assert written[0] == written[1]
