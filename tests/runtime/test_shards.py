"""Stages of tensor shards, with and without replicas: the numbers of plain training."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.checkpoints import load_state_dict
from pipefit.errors import OutOfMemory, UsageError
from pipefit.runtime import Trainer, certify, certify_numbers, train
from pipefit.runtime.engine import replicas
from pipefit.runtime.engine.tensor_groups import Together
from pipefit.runtime.options import Saving
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan
from pipefit.tensor_parallel import collectives
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.local_batches import Plain, batches, equal
from support.offload_choices import movable
from support.sharded_stages import GRIDS, MODELS, divided, grid_plan, profiled
from support.small_tasks import batch_of, in_one_process

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

pytestmark = pytest.mark.usefixtures("one_thread")


def random_plan(name: str, seed: int, **training: Any) -> Plan:
    """Draw up to three stages of random grids on at most eight devices, in random order."""
    rng = Random(seed)
    count = rng.choice([1, 2, 3])
    degrees = [(8, 2)]
    while sum(data * tensor for data, tensor in degrees) > 8 or all(tensor == 1 for _, tensor in degrees):
        degrees = [rng.choice(GRIDS) for _ in range(count)]
        if name == "tied":  # stages that share a parameter have as many shards
            degrees = [(data, degrees[0][1]) for data, _ in degrees]
    edges = [0, *sorted(rng.sample(range(1, 6), count - 1)), 6]
    schedule = rng.choice(["gpipe", "1f1b"])
    return grid_plan(
        name, edges, degrees, microbatches=rng.randint(1, 3), schedule=schedule, rng=rng, **training
    )


def parameters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a state, without its buffers, which differ between replicas."""
    return {
        name: tensor for name, tensor in state.items() if "running" not in name and "num_batches" not in name
    }


RANDOM = [(name, seed) for name in MODELS for seed in range(9)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "seed"), sampled(RANDOM, often=[*zip(MODELS, range(3), strict=True)]))
def test_the_numbers_are_those_of_every_stage_mapped_over_its_slices(name: str, seed: int) -> None:
    """Losses and parameters after three steps equal every stage mapped over its local batches: random draws,
    batch statistics and tied weights included.
    """
    task = divided(name, optimizer=MOMENTUM)
    plan = random_plan(name, seed)
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    for inputs, targets in batches(task, plan, 3):
        assert trainer.step((inputs, targets)) == pytest.approx(plain.step(inputs, targets), rel=1e-6)
    assert equal(parameters(trainer.state_dict()), parameters(dict(plain.module.state_dict())), relative=1e-9)


def shares(trainer: Trainer) -> int:
    """Return the number of tensors that the trainer's ranks have parts of."""
    known = (stage.shards for stage in trainer.stages if stage.shards is not None)
    return sum(one.is_divided(name) for one in known for name in one.shards)


def test_statistics_of_samples_are_whole_where_only_shards_divide_a_stage() -> None:
    """Batch statistics of a stage with shards alone are complete: every rank has its own channels, and a
    state dict all of them.
    """
    task = divided("normed", optimizer=MOMENTUM)
    plan = grid_plan("normed", [0, 3, 6], [(1, 4), (1, 2)])
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    for inputs, targets in batches(task, plan, 2):
        trainer.step((inputs, targets))
        plain.step(inputs, targets)
    assert shares(trainer)
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-9)


class Returned(nn.Module):
    """A model that returns the weights of its embedding, with which the loss computes the next words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.words.weight, self.down(self.up(self.words(x)).tanh())


def next_words(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    weight, found = outputs
    return nn.functional.cross_entropy((found @ weight.t()).flatten(0, 1), targets.flatten())


def words(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(32, (size, 6)), torch.randint(32, (size, 6))


@pytest.mark.parametrize("degrees", [[(1, 2), (1, 2)], pytest.param([(2, 2)], marks=pytest.mark.gallery)])
def test_a_loss_takes_a_parameter_that_the_model_returns(degrees: list[tuple[int, int]]) -> None:
    """A parameter that the model returns reaches the loss as a value, and its gradient returns to the
    parameter, divided or not.
    """
    task = Task(
        lambda: Returned().double(), batch=words, loss=next_words, optimizer=MOMENTUM, name="returned"
    )
    found = profile(task, microbatch_size=(4, 2), tensor=(1, 2))
    plan = grid_plan(found, [0, *range(1, len(degrees)), len(found.layers)], degrees)
    trainer, batch = Trainer(task, plan), words(8)
    torch.manual_seed(0)
    module = Returned().double()
    module.load_state_dict(trainer.state_dict())
    optimizer = MOMENTUM(module.parameters())
    for _ in range(3):
        loss = next_words(module(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert trainer.step(batch) == pytest.approx(loss.item(), rel=1e-6)
    assert shares(trainer)
    assert equal(trainer.state_dict(), dict(module.state_dict()), relative=1e-9)


def test_clipping_counts_every_part_once_and_what_is_whole_once() -> None:
    """The gradient norm over two batches counts divided parts and whole parameters once."""
    task, norm = divided("tied", optimizer=partial(torch.optim.SGD, lr=1.0)), 0.01
    found = replace(
        profiled("tied", [(2, 2), (1, 2)]), fingerprint=profile(task, microbatch_size=4).fingerprint
    )
    plan = grid_plan(found, [0, 2, 6], [(2, 2), (1, 2)], clip_norm=norm)
    trainer, plain = Trainer(task, plan, accumulate=2), Plain(task, plan)
    (first, one), (second, other) = batches(task, plan, 2)
    trainer.step((first, one))
    trainer.step((second, other))
    plain.backward(first, one, 0.5)
    plain.steps += 1
    plain.backward(second, other, 0.5)
    expected = nn.utils.clip_grad_norm_(plain.module.parameters(), norm)
    plain.optimizer.step()
    found_norms = {stage.agreement.norm for stage in trainer.stages if stage.agreement is not None}
    assert len(found_norms) == 1  # all agree, to the bit
    assert found_norms.pop() == pytest.approx(float(expected), rel=1e-6)
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-12)


@pytest.mark.gallery
def test_smaller_batches_and_evaluations_divide_parameters_as_training_does() -> None:
    """Eighteen samples of 24 train as in plain training, in microbatches of twelve and six, and can be
    evaluated.
    """
    task, plan = divided("tied", optimizer=MOMENTUM), grid_plan("tied", [0, 2, 6], [(3, 2), (1, 2)])
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    inputs, targets = batch_of(task, plan)
    for count in (18, 24):
        expected = plain.step(inputs[:count], targets[:count])
        assert trainer.step((inputs[:count], targets[:count])) == pytest.approx(expected, rel=1e-6)
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-9)
    plain.module.eval()
    with torch.inference_mode():
        expected = float(nn.functional.mse_loss(plain.module(inputs), targets))
        assert trainer.evaluate((inputs, targets)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "degrees"),
    [
        pytest.param("1f1b", [(1, 1), (1, 2)], marks=pytest.mark.gallery),
        ("pipedream-2bw", [(1, 2), (1, 1)]),
    ],
)
def test_the_last_microbatch_may_be_smaller_where_only_shards_divide_stages(
    schedule: str, degrees: Any
) -> None:
    """The last microbatch, six samples after twelve, may go to neighbours with more or fewer shards; numbers
    equal those without shards.
    """
    task = divided("normed", optimizer=MOMENTUM)
    shards, whole = (
        Trainer(task, grid_plan("normed", [0, 5, 6], how, schedule=schedule))
        for how in (degrees, [(1, 1), (1, 1)])
    )
    inputs, targets = batch_of(task, shards.plan)
    for count in (18, 24):
        batch = inputs[:count], targets[:count]
        assert shards.step(batch) == pytest.approx(whole.step(batch), rel=1e-6, nan_ok=True)
    assert equal(shards.state_dict(), whole.state_dict(), relative=1e-9)


def test_an_evaluation_uses_the_statistics_of_all_channels() -> None:
    """An evaluation uses the statistics of all channels, and buffers outside the state dict."""
    task, plan = divided("normed", optimizer=MOMENTUM), grid_plan("normed", [0, 6], [(1, 4)])
    trainer, plain = Trainer(task, plan), Plain(task, plan)
    inputs, targets = batch_of(task, plan)
    trainer.step((inputs, targets))
    plain.step(inputs, targets)
    plain.module.eval()
    expected = nn.functional.mse_loss(plain.module(inputs), targets).item()
    assert trainer.evaluate((inputs, targets)) == pytest.approx(expected, rel=1e-6)
    before = trainer.state_dict()
    plain.module.train()
    assert trainer.step((inputs, targets)) == pytest.approx(plain.step(inputs, targets), rel=1e-6)
    assert equal(trainer.state_dict(), dict(plain.module.state_dict()), relative=1e-9)
    assert not equal(trainer.state_dict(), before, relative=1e-9)


HOW = [([0, 6], [(1, 1)]), ([0, 3, 6], [(1, 4), (2, 1)]), ([0, 2, 6], [(2, 2), (1, 2)])]
OTHER_DEGREES = [(name, how) for name in ("normed", "dropped") for how in HOW]


@pytest.mark.gallery
@pytest.mark.parametrize(
    ("name", "how"), sampled(OTHER_DEGREES, often=[OTHER_DEGREES[0], *OTHER_DEGREES[4:]])
)
def test_training_goes_on_under_other_degrees(name: str, how: Any, tmp_path: Path) -> None:
    """Training resumes under other degrees: checkpoints have whole tensors, the optimizer's too, under the
    module's names.
    """
    adam = partial(torch.optim.AdamW, lr=0.01)
    task = divided(name, optimizer=adam)
    found = replace(
        profiled(name, [(1, 2), *how[1]]), fingerprint=profile(task, microbatch_size=4).fingerprint
    )
    saved, other = grid_plan(found, [0, 3, 6], [(1, 2), (1, 2)]), grid_plan(found, *how)
    before, after = Trainer(task, saved), Trainer(task, other, seed=1)
    never = Trainer(task, saved)
    first, second = batches(task, saved, 2)
    for trainer in (before, never):
        trainer.step(first)
    before.save(tmp_path)
    before.finish()
    assert after.load(tmp_path) == 1
    assert equal(after.state_dict(optimizer=True), before.state_dict(optimizer=True), relative=0)
    assert after.state_dict(optimizer=True).keys() >= {"optimizer/0.up.weight/exp_avg"}
    never.step(second)
    after.step(second)
    if name == "dropped" and all(data == 1 for data, _ in how[1]):  # slices draw for themselves
        assert equal(after.state_dict(), never.state_dict(), relative=1e-9)
    plain = task.build()
    plain.load_state_dict(load_state_dict(tmp_path))
    assert equal(dict(plain.state_dict()), before.state_dict(), relative=0)


def test_whole_checkpoints_are_divided_as_they_are_loaded(tmp_path: Path) -> None:
    """A checkpoint of a plan without shards is divided between ranks as it is loaded, and trains with the
    same numbers.
    """
    task = divided("normed", optimizer=MOMENTUM)
    whole, plan = (
        grid_plan("normed", [0, 6], [(1, 1)]),
        grid_plan("normed", [0, 6], [(1, 4)]),
    )
    one, ranks = Trainer(task, whole), Trainer(task, plan, seed=1)
    first, second = batches(task, whole, 2)
    one.step(first)
    one.save(tmp_path)
    one.finish()
    ranks.load(tmp_path)
    assert ranks.step(second) == pytest.approx(one.step(second), rel=1e-6)
    assert equal(ranks.state_dict(), one.state_dict(), relative=1e-9)
    ranks.load_state_dict(one.state_dict(optimizer=True))
    assert equal(ranks.state_dict(optimizer=True), one.state_dict(optimizer=True), relative=0)


class Rows(torch.optim.SGD):
    """An optimizer that divides a gradient by its norm, as LARS and LAMB do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update with gradients of length 1."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if parameter.grad is None else parameter.grad / parameter.grad.norm()
        super().step()


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", [Rows, torch.optim.Adafactor, torch.optim.Muon])
def test_an_optimizer_that_needs_whole_parameters_is_refused(optimizer: Any) -> None:
    """An optimizer that needs whole parameters is refused, in profiles and in plans with shards; it trains if
    nothing is divided.
    """

    def made(groups: Any) -> torch.optim.Optimizer:
        if optimizer is torch.optim.Muon:  # for matrices alone
            groups = [{**g, "params": [p for p in g["params"] if p.ndim == 2]} for g in groups]
        return optimizer([g for g in groups if g["params"]], lr=0.01)

    task = divided("dropped", optimizer=made)
    found = replace(profiled("dropped", [(1, 2)]), fingerprint=profile(task, microbatch_size=4).fingerprint)
    why = rf"optimizer {optimizer.__name__} of dropped does not update parameters element by element"
    with pytest.raises(UsageError, match=why):
        profile(task, microbatch_size=4, tensor=2)
    with pytest.raises(UsageError, match=why):
        Trainer(task, grid_plan(found, [0, 6], [(1, 2)]))
    Trainer(task, grid_plan(found, [0, 6], [(1, 1)]))


ELEMENTWISE = [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", sampled(ELEMENTWISE, often=ELEMENTWISE[2:]))
def test_optimizers_that_update_element_by_element_train(optimizer: Any) -> None:
    """Elementwise optimizers train on shards; their state has the shape of its parameter and is joined as it
    is.
    """
    task = divided("normed", optimizer=partial(optimizer, lr=0.01))
    found = replace(profiled("normed", [(1, 2)]), fingerprint=profile(task, microbatch_size=4).fingerprint)
    ranks, whole = (Trainer(task, grid_plan(found, [0, 6], [degrees])) for degrees in ((1, 2), (1, 1)))
    for one in batches(task, ranks.plan, 2):
        assert ranks.step(one) == pytest.approx(whole.step(one), rel=1e-6)
    own, other = ranks.state_dict(optimizer=True), whole.state_dict(optimizer=True)
    assert own.keys() == other.keys()
    assert all(own[name].shape == other[name].shape for name in other)


@pytest.mark.gallery
def test_recomputing_and_moving_away_change_no_number() -> None:
    """Recomputation and offload change no number: ranks repeat collectives in one order, and saved tensors
    return from the host and, half from each, from two devices of another stage.
    """
    task = divided("dropped", optimizer=MOMENTUM)
    plan = grid_plan("dropped", [0, 3, 6], [(1, 2), (2, 2)], microbatches=3)
    again = Decision(stage=0, subject=Run(start=0, stop=2), what=What.RECOMPUTE, microbatches=Microbatches())
    moved = tuple(movable(plan, 1)[:3])
    place = parse_place("host*1+device0*1")
    away = Decision(stage=1, subject=SavedTensors(tensors=moved), what=What.OFFLOAD, place=place)
    kept, freed = Trainer(task, plan), Trainer(task, replace(plan, decisions=(again, away)))
    for one in batches(task, plan, 2):
        assert kept.step(one) == freed.step(one)
    assert equal(kept.state_dict(), freed.state_dict(), relative=0)


def test_a_rank_that_overflows_makes_all_of_them_skip() -> None:
    """With half-precision master weights, an overflow in one part makes all ranks skip the update."""
    task = divided("dropped", precision="master-float16")
    found = profile(task, microbatch_size=4, tensor=(1, 2))
    ranks, whole = (
        Trainer(task, grid_plan(found, [0, 3, 6], degrees)) for degrees in ([(1, 2)] * 2, [(1, 1)] * 2)
    )
    skipped = []
    for number, (inputs, targets) in enumerate(batches(task, ranks.plan, 3)):
        one = inputs, targets * (1e3 if number == 0 else 1)
        assert ranks.step(one) == pytest.approx(whole.step(one), rel=1e-2)
        agreed = [
            stage.agreement for trainer in (ranks, whole) for stage in trainer.stages if stage.agreement
        ]
        assert len({agreement.overflow for agreement in agreed}) == 1
        assert len({agreement.scale.value for agreement in agreed if agreement.scale}) == 1
        skipped.append(agreed[0].overflow)
    assert skipped[0]
    assert not skipped[-1]


def test_workers_train_and_save_as_one_process_does(tmp_path: Path) -> None:
    """Four workers over gloo, in two tensor-parallel groups across two hosts, have the losses and peaks of
    one process and save whole tensors.
    """
    task = divided("tied")
    found = profile(task, microbatch_size=4, tensor=2)
    plan = grid_plan(found, [0, 3, 6], [(1, 2), (1, 2)], clip_norm=1.0)
    grids = (Grid(devices=(0, 2), tensor=2), Grid(devices=(1, 3), tensor=2))
    stages = tuple(replace(stage, grid=grid) for stage, grid in zip(plan.stages, grids, strict=True))
    plan = replace(plan, stages=stages, cluster=Cluster.emulated((2, 1 << 30)).machines(2, 1e9))
    losses, trace = train(partial(divided, "tied"), plan, steps=2, saving=Saving(directory=str(tmp_path)))
    alone, expected = in_one_process(task, plan, 2)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert trace.peak_bytes == alone.trace.peak_bytes == certify(task, plan).peak_bytes
    assert equal(load_state_dict(tmp_path), alone.state_dict(), relative=1e-12)
    again = Trainer(task, grid_plan(found, [0, 6], [(1, 1)]))
    assert again.load(tmp_path) == 2
    assert equal(again.state_dict(optimizer=True), alone.state_dict(optimizer=True), relative=1e-12)


def hooked(name: str) -> tuple[Task, nn.Module]:
    """Build a module with a hook on the gradient of a parameter."""
    module = divided("dropped").build()
    module.get_parameter(name).register_hook(lambda gradient: 2 * gradient)
    return replace(divided("dropped", optimizer=MOMENTUM), module=module), module


def test_hooks_see_whole_gradients_or_are_refused() -> None:
    """A hook on a norm, which every rank has whole, is kept; a hook on a divided product is refused."""
    task, module = hooked("0.norm.weight")
    found = profile(task, microbatch_size=4, tensor=(1, 2))
    other, alone = hooked("0.norm.weight")
    alone.load_state_dict(module.state_dict())
    ranks = Trainer(task, grid_plan(found, [0, 6], [(1, 2)]))
    first = batches(task, ranks.plan, 1)[0]
    ranks.step(first)
    assert equal(module.state_dict(), ranks.state_dict(), relative=0)  # it has what its ranks have trained
    assert not torch.equal(module.state_dict()["0.norm.weight"], alone.state_dict()["0.norm.weight"])
    whole = Trainer(other, grid_plan(found, [0, 6], [(1, 1)]))
    whole.step(first)
    assert equal(ranks.state_dict(), whole.state_dict(), relative=1e-9)
    with pytest.raises(
        UsageError, match=r"up\.weight has hooks on its gradient, but 2 tensor-parallel ranks would shard it"
    ):
        profile(hooked("0.up.weight")[0], microbatch_size=4, tensor=2)


def test_a_rank_that_runs_out_of_memory_ends_its_group() -> None:
    """A rank that runs out of memory ends its group: the error names the device and its action, no thread
    remains, and the same trainer continues with a smaller batch.
    """
    task = divided("dropped", optimizer=MOMENTUM)
    plan = grid_plan("dropped", [0, 6], [(1, 2)])
    peaks = certify(task, plan).peak_bytes
    device = replace(plan.cluster.devices[1], memory_bytes=peaks[1] - 1)
    small = replace(plan, cluster=replace(plan.cluster, devices=(plan.cluster.devices[0], device)))
    trainer = Trainer(task, small)
    inputs, targets = batch_of(task, plan)
    trainer.step((inputs, targets))  # in which optimizer state is born
    for _ in range(2):
        with pytest.raises(OutOfMemory, match=r"device 1 ran out of memory at 0[FB]"):
            trainer.step((inputs, targets))
        assert not [thread for thread in threading.enumerate() if thread.name == "pipefit-turn"]
    assert trainer.step((inputs[:4], targets[:4])) > 0


def test_one_process_refuses_shards_on_gpus() -> None:
    """One process refuses shards on GPUs, because backward threads cannot wait for each other."""
    plan = grid_plan("dropped", [0, 3, 6], [(1, 2), (1, 1)])
    with pytest.raises(
        UsageError, match="devices 0, 1 hold tensor shards, which a single process cannot train on GPUs"
    ):
        Together(replace(plan, cluster=replace(plan.cluster, backend="cuda")))


def test_ranks_that_would_divide_otherwise_than_profiled_are_refused() -> None:
    """Ranks that would divide layers differently from the profile, as with another release, are refused,
    because workers might not meet in collectives.
    """
    task, plan = divided("dropped", optimizer=MOMENTUM), grid_plan("dropped", [0, 6], [(1, 2)])
    other = tuple(replace(m, forms="another") if m.tensor == 2 else m for m in plan.profile.measurements)
    with pytest.raises(
        UsageError, match="2 tensor-parallel ranks would shard dropped differently than in its profile"
    ):
        Trainer(task, replace(plan, profile=replace(plan.profile, measurements=other)))


def test_a_trainer_refuses_ranks_that_compute_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer, before its first step, and a certificate refuse ranks that compute other numbers, and name
    the layer.
    """
    task, plan = (
        divided("dropped", optimizer=MOMENTUM),
        grid_plan("dropped", [0, 3, 6], [(2, 2), (1, 1)]),
    )
    assert "layers sharded over 2 tensor-parallel ranks agree with 5 distinct blocks" in str(
        certify_numbers(task, plan)
    )
    monkeypatch.setattr(collectives, "_summed", lambda gradient, group: gradient.clone())
    for refused in (Trainer, certify_numbers):
        with pytest.raises(UsageError, match=r"layer 0 of dropped, sharded over 2 .* computes other numbers"):
            refused(task, plan)
    assert Trainer(task, plan, numbers=False).not_compared == ""


@pytest.mark.gallery
def test_an_evaluation_traces_each_local_batch_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation traces and divides the model once for each size of a local batch, however many devices
    the process has; a second evaluation does neither.
    """
    task, plan = divided("tied", optimizer=MOMENTUM), grid_plan("tied", [0, 2, 6], [(3, 2), (1, 2)])
    trainer = Trainer(task, plan)
    calls = Counter[str]()
    for name in ("fake_chain", "shard_chain"):
        monkeypatch.setattr(replicas, name, counted(calls, name, getattr(replicas, name)))
    for _ in range(2):
        trainer.evaluate(batch_of(task, plan))
        assert calls == {"fake_chain": 2, "shard_chain": 2}


def counted(calls: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, whose calls are counted under `name`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return call
