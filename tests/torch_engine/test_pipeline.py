"""Plans on torch's own pipelines: numbers of a plain loop, and certified peaks equal to the allocator's events."""

from __future__ import annotations

import json
import os
import re
import runpy
import socket
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import timedelta
from functools import partial
from io import StringIO
from operator import ge
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.optim import SGD, Adafactor, Adam, Optimizer, RMSprop

import pipefit
from pipefit.capture import Task
from pipefit.cli import main
from pipefit.errors import PeerLost, UsageError
from pipefit.models import build
from pipefit.runtime import Trainer
from pipefit.schema.decisions import Decision, SavedTensors, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid
from pipefit.schema.json_io import save
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Category
from support.known_profiles import profile
from support.random_layer_chains import KINDS, WIDTH, Part, mean_of_all
from support.selecting_layers import selecting
from support.sharded_stages import Degrees, divided, grid_plan
from support.small_tasks import alone, batch_of, in_one_process, plan_of, task_of
from support.torch_engine_cases import divided_case, divided_task, engine_case, engine_task, turning_task
from support.torch_engine_workers import STEPS, Workers, whole_copy

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Workers for all tests of this module."""
    pool = Workers()
    yield pool
    pool.close()


def some_layers() -> Task:
    """Return a small task."""
    return task_of(lambda: [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)])


@pytest.mark.parametrize(
    ("split", "schedule", "microbatches", "recompute"),
    [
        ((2, 2, 1), "1f1b", 4, "never"),
        ((2, 3), "gpipe", 3, "always"),
        ((2, 2, 1), "eager-1f1b", 4, "stages"),
        ((2, 1, 2), "1f1b", 2, "never"),
        ((5,), "1f1b", 2, "never"),
    ],
)
def test_numbers_of_a_plain_loop(
    workers: Workers, split: tuple[int, ...], schedule: str, microbatches: int, recompute: str
) -> None:
    """Weights equal those of a plain loop bit by bit, losses up to the rounding of their mean."""
    task = some_layers()
    plan = plan_of(task, split, microbatches=microbatches, schedule=schedule, recompute=recompute)
    losses, state = alone(task, plan, STEPS)
    ran = workers.train(plan, some_layers)
    assert all(one.losses == pytest.approx(losses, rel=1e-6) for one in ran.values())
    trained = {name: t for one in ran.values() for name, t in one.state.items()}
    assert trained.keys() == state.keys()
    assert all(torch.equal(trained[name], tensor) for name, tensor in state.items())


def layers_named(*names: str) -> Task:
    """Return a task of layers of these kinds, whose loss depends on every value."""

    def layers() -> list[nn.Module]:
        return [Part(KINDS[name].function, KINDS[name].module()) for name in names]

    return replace(
        task_of(layers, loss=mean_of_all),
        batch=lambda size: (torch.randn(size, WIDTH, WIDTH), torch.randn(size, WIDTH, WIDTH)),
    )


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(
    ("names", "split"),
    [
        (("linear", "detached", "second in place", "linear"), (2, 2)),
        (("linear", "bent", "relu", "second in place", "linear"), (2, 3)),
        (("linear", "bent", "norm", "second in place", "linear"), (2, 3)),
    ],
)
def test_received_values_that_layers_change(
    workers: Workers, names: tuple[str, ...], split: tuple[int, ...], recompute: str
) -> None:
    """Layers may change received values in place, with and without gradients, in every step."""
    task = layers_named(*names)
    plan = plan_of(task, split, microbatches=3, recompute=recompute)
    losses, state = alone(task, plan, STEPS)
    for one in workers.train(plan, layers_named, *names).values():
        assert one.losses == pytest.approx(losses, rel=1e-6)
        for name, tensor in one.state.items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-6)


def whole_replicas(plan: Plan) -> Plan:
    """Return the plan with replicas that divide nothing."""
    stages = [replace(stage, grid=replace(stage.grid, shard="none")) for stage in plan.stages]
    return replace(plan, stages=tuple(stages))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [seed for seed in range(59) if seed not in (7, 16, 30, 42, 52)])  # no plan
def test_replicas_that_divide_parameters(workers: Workers, seed: int) -> None:
    """Peaks are the certified ones; numbers are those of whole replicas, bit by bit if no sum has another order."""
    task, plan = divided_case(seed)
    trace = pipefit.certify_pipeline(task, plan)
    trainer, losses = in_one_process(task, whole_replicas(plan), STEPS, numbers=False)
    names = {name for name, _ in task.build().named_parameters()}
    parameters = {name: tensor for name, tensor in trainer.state_dict().items() if name in names}
    epsilon = max(torch.finfo(parameter.dtype).eps for parameter in parameters.values())
    adapts = isinstance(next(trainer.stages).optimizer, Adam | RMSprop)  # updates by gradients near zero
    is_same_order = plan.stages[0].grid.data == 2 and plan.training.clip_norm is None
    for device, one in workers.train(plan, divided_task, seed).items():
        assert [trace.devices[device].step_peak_bytes(step) for step in range(STEPS)] == one.peaks
        assert one.losses == pytest.approx(losses, rel=16 * epsilon)
        for name in one.state.keys() & parameters:
            if is_same_order:
                assert torch.equal(one.state[name], parameters[name])
            elif parameters[name].dtype == torch.float64 and not adapts:
                torch.testing.assert_close(one.state[name], parameters[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("split", "schedule"), [((2, 2), "1f1b"), ((4,), "1f1b"), ((1, 3), "gpipe")])
def test_linear_layers_on_views(workers: Workers, split: tuple[int, ...], schedule: str) -> None:
    """A bias is added in place, and 1F1B holds the last outputs until the next microbatch's forward."""
    plan = plan_of(turning_task(), split, size=4, microbatches=4, schedule=schedule)
    trace, simulated = (
        pipefit.certify_pipeline(turning_task(), plan),
        pipefit.simulate(plan, engine="torch"),
    )
    for device, one in workers.train(plan, turning_task).items():
        assert [trace.devices[device].step_peak_bytes(step) for step in range(STEPS)] == one.peaks
        assert simulated.devices[device].step_peak_bytes(1) == one.peaks[1]


@pytest.mark.parametrize("seed", [96, 158])
def test_models_that_autograd_refuses(seed: int) -> None:
    """Saved tensors that a later layer changes in place are an error of the plan, as in pipefit's runtime."""
    task, plan = divided_case(seed)
    inputs, targets = task.batch(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        task.loss(task.build()(inputs), targets).backward()
    for certify in (pipefit.certify, pipefit.certify_pipeline):
        with pytest.raises(UsageError, match="microbatch 0 cannot go backward through layers 0 to 7"):
            certify(task, plan)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [*range(1, 11), *range(12, 26)])  # 0 and 11 have no plan
def test_certified_peaks_of_random_plans(workers: Workers, seed: int) -> None:
    """Peaks equal the dry run on every device, in the first and in a later step."""
    task, plan = engine_case(seed)
    trace = pipefit.certify_pipeline(task, plan)
    for device, one in workers.train(plan, engine_task, seed).items():
        assert [trace.devices[device].step_peak_bytes(step) for step in range(STEPS)] == one.peaks


@pytest.mark.filterwarnings("ignore:peaks do not include")
@pytest.mark.parametrize("how", ["elements", "assigned"])
def test_layers_that_select_by_values(workers: Workers, how: str) -> None:
    """Certified peaks are the allocator's if everything is selected, and not below if some is."""
    for least in (-99.0, 0.0):
        task = selecting(how, least)
        plan = plan_of(task, (2, 1), size=4, microbatches=3)
        trace = pipefit.certify_pipeline(task, plan)
        for device, one in workers.train(plan, selecting, how, least).items():
            certified = [trace.devices[device].step_peak_bytes(step) for step in range(STEPS)]
            assert certified == one.peaks or (least == 0 and all(map(ge, certified, one.peaks)))


def shared_out(
    name: str, edges: list[int], degrees: list[Degrees], shard: str, clip_norm: float | None
) -> Plan:
    """Return a plan whose stages are on grids, with replicas that divide their state by `shard`."""
    plan = grid_plan(name, edges, degrees, microbatches=3, clip_norm=clip_norm)
    grids = [replace(stage.grid, shard=shard) for stage in plan.stages]
    return replace(
        plan, stages=tuple(replace(s, grid=grid) for s, grid in zip(plan.stages, grids, strict=True))
    )


with_momentum = partial(divided, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "edges", "degrees", "shard", "clip_norm"),
    [
        ("dropped", [0, 3, 6], [(1, 2), (1, 2)], "none", 0.3),
        ("tied", [0, 6], [(1, 4)], "none", None),
        ("normed", [0, 2, 6], [(2, 1), (2, 1)], "optimizer", None),
        ("tied", [0, 2, 6], [(2, 1), (2, 1)], "optimizer", 0.3),
        ("dropped", [0, 6], [(2, 2)], "optimizer", 0.3),
        ("normed", [0, 2, 6], [(2, 1), (2, 1)], "gradients", 0.3),
        ("dropped", [0, 3, 6], [(2, 1), (2, 1)], "parameters", None),
        ("tied", [0, 6], [(2, 2)], "parameters", 0.3),
    ],
)
def test_tensor_shards_and_divided_state(
    workers: Workers, name: str, edges: list[int], degrees: list[Degrees], shard: str, clip_norm: float | None
) -> None:
    """Ranks and owners train the numbers of pipefit's runtime, and their peaks are the certified ones."""
    task, plan = with_momentum(name), shared_out(name, edges, degrees, shard, clip_norm)
    trace = pipefit.certify_pipeline(task, plan)
    trainer, losses = in_one_process(task, plan, STEPS)
    parameters = {name for name, _ in task.build().named_parameters()}
    for device, one in workers.train(plan, with_momentum, name).items():
        assert [trace.devices[device].step_peak_bytes(step) for step in range(STEPS)] == one.peaks
        assert one.losses == pytest.approx(losses, rel=1e-12)
        assert one.state.keys() & parameters
        for trained in one.state.keys() & parameters:
            torch.testing.assert_close(one.state[trained], trainer.state_dict()[trained], rtol=0, atol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
def test_dry_runs_for_gpus(shard: str) -> None:
    """Replicas need no GPU for their dry run; they hold the same state between steps as on a CPU."""
    plan = shared_out("dropped", [0, 3, 6], [(2, 1), (2, 1)], shard, None)
    cpu, gpu = (pipefit.certify_pipeline(with_momentum("dropped"), plan, target=t) for t in ("cpu", "cuda"))
    for there, here in zip(cpu.devices, gpu.devices, strict=True):
        begins = [next(s for s in device.memory if s.step == 1) for device in (there, here)]
        for category in (Category.PARAMETERS, Category.OPTIMIZER):
            assert len({sample.bytes[list(Category).index(category)] for sample in begins}) == 1


def saved_after_a_step(plan: Plan, name: str, folder: str) -> dict[str, Tensor]:
    """Train a step on torch's engine, save a checkpoint of pipefit and one of torch, and load both."""
    task = with_momentum(name)
    pipeline = pipefit.pipeline(task, plan)
    inputs, targets = batch_of(task, plan)
    pipeline.step(inputs, target=targets)
    pipeline.save(folder)
    pipeline.finish()
    checkpoint.save({"model": pipeline.state_dict(optimizer=True)}, checkpoint_id=f"{folder}-torch")
    pipeline.step(inputs, target=targets)
    loaded = {key: torch.zeros_like(tensor) for key, tensor in pipeline.state_dict(optimizer=True).items()}
    checkpoint.load({"model": loaded}, checkpoint_id=f"{folder}-torch")
    pipeline.load_state_dict(loaded)
    state = {key: whole_copy(tensor) for key, tensor in pipeline.state_dict(optimizer=True).items()}
    pipeline.step(inputs, target=targets)
    assert pipeline.load(folder) == 1
    again = {key: whole_copy(tensor) for key, tensor in pipeline.state_dict(optimizer=True).items()}
    assert all(torch.equal(again[key], tensor) for key, tensor in state.items())
    return state


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "edges", "degrees", "shard"),
    [
        ("tied", [0, 6], [(2, 2)], "optimizer"),
        ("tied", [0, 6], [(2, 2)], "gradients"),
        ("dropped", [0, 3, 6], [(2, 1), (2, 1)], "parameters"),
        ("tied", [0, 6], [(2, 2)], "parameters"),
    ],
)
def test_checkpoints_of_shards_have_the_whole_state(
    workers: Workers, tmp_path: Path, name: str, edges: list[int], degrees: list[Degrees], shard: str
) -> None:
    """Ranks that divide weights, and replicas that divide state, save what any other plan continues from."""
    plan = shared_out(name, edges, degrees, shard, None)
    states = workers.run(4, saved_after_a_step, plan, name, str(tmp_path / "runs"))
    trainer, _ = in_one_process(with_momentum(name), plan, 1)
    expected = trainer.state_dict(optimizer=True)
    other = Trainer(with_momentum(name), shared_out(name, [0, 6], [(1, 1)], "none", None))
    assert other.load(tmp_path / "runs") == 1
    found = other.state_dict(optimizer=True)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-12)
    for key, tensor in (item for state in states for item in state.items()):
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-12)


def printed(script: str) -> str:
    """Return what a script prints."""
    with redirect_stdout(StringIO()) as output:
        runpy.run_path(script, run_name="__main__")
    return output.getvalue()


def test_the_example(workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    """The example trains to the losses of `pipefit_loop.py`, which one process runs."""
    theirs = workers.run(3, printed, str(EXAMPLES / "torch_pipeline_loop.py"))
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / "pipefit_loop.py"), run_name="__main__")
    ours = capsys.readouterr().out
    losses, expected = ([float(x) for x in re.findall(r"loss ([0-9.]+)", text)] for text in (theirs[0], ours))
    assert len(losses) == 50
    assert losses == pytest.approx(expected, abs=2e-6)
    assert theirs[1] == theirs[2] == theirs[0]


def saved_and_loaded(plan: Plan, folder: str) -> bool:
    """Save a pipeline by torch's distributed checkpoints, train on, load it; return whether it is as it was."""
    task = some_layers()
    pipeline = pipefit.pipeline(task, plan)
    before = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    checkpoint.save({"model": pipeline.state_dict()}, checkpoint_id=folder)
    inputs, targets = batch_of(task, plan)
    pipeline.step(inputs, target=targets)
    changed = any(not torch.equal(tensor, before[name]) for name, tensor in pipeline.state_dict().items())
    checkpoint.load({"model": pipeline.state_dict()}, checkpoint_id=folder)
    pipeline.load_state_dict(pipeline.state_dict())
    return changed and all(torch.equal(t, before[name]) for name, t in pipeline.state_dict().items())


def test_distributed_checkpoints_restore_a_pipeline(workers: Workers, tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` saves the state under the model's names, and restores it in place."""
    plan = plan_of(some_layers(), (2, 3))
    assert all(workers.run(2, saved_and_loaded, plan, str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": "pipedream"}, "ends every step with an empty pipeline, unlike schedule pipedream"),
        ({"place": "device1"}, "moves saved tensors to the host only"),
        ({"state": "optimizer"}, "cannot carry out the decision on stage 0: offload optimizer"),
    ],
)
def test_refusals(changes: dict[str, str], said: str) -> None:
    """A plan that torch's engine cannot run is refused in a sentence that names the way out."""
    task = some_layers()
    plan = plan_of(task, (2, 3), schedule=changes.get("schedule", "1f1b"))
    if "place" in changes:
        subject, place = SavedTensors(tensors=((0, 0),)), parse_place(changes["place"])
    else:
        subject, place = State(start=0, stop=2, kind="optimizer"), parse_place("host")
    if "schedule" not in changes:
        decision = Decision(stage=0, subject=subject, what=What.OFFLOAD, place=place)
        plan = replace(plan, decisions=(decision,))
    for call in (pipefit.pipeline, pipefit.certify_pipeline):
        with pytest.raises(UsageError, match=f"{said}.*: train this plan with pipefit's own runtime"):
            call(task, plan)


def test_grids_are_refused() -> None:
    """Messages go from a place to the same place."""
    plan = shared_out("dropped", [0, 3, 6], [(2, 1), (1, 2)], "none", None)
    said = "the same numbers of replicas and of tensor shards in every stage.*: train this plan with pipefit's own"
    with pytest.raises(UsageError, match=said):
        pipefit.certify_pipeline(with_momentum("dropped"), plan)


class Scaled(nn.Linear):
    """A layer with a parameter without dimensions, which may change its inputs."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__(8, 8)
        self.in_place = in_place
        if not in_place:
            self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values.tanh_() if self.in_place else values * self.scale)


class Double(nn.Linear):
    """A linear layer that computes in float64."""

    def __init__(self) -> None:
        super().__init__(8, 8, dtype=torch.float64)

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values.double()).float()


def test_shared_parameters_of_several_dtypes_cannot_be_divided() -> None:
    """FSDP2 gathers all layers of a stage that share parameters together, so these have one dtype."""

    def layers() -> list[nn.Module]:
        result = [nn.Linear(8, 8), Double(), nn.Linear(8, 8), Double(), nn.Linear(8, 4)]
        result[2].weight, result[3].weight = result[0].weight, result[1].weight
        return [*result]

    task = task_of(layers)
    plan = plan_of(task, (5,), profiled=profile(task, microbatch_size=(2, 1)))
    plan = replace(plan, cluster=pipefit.load_cluster("emulated:2x1GiB"))
    grid = Grid(devices=(0, 1), data=2, shard="parameters")
    plan = replace(plan, stages=(replace(plan.stages[0], grid=grid),))
    said = "layers of stage 0 that share parameters, which have parameters of float32 and float64"
    with pytest.raises(UsageError, match=said):
        pipefit.simulate(plan, engine="torch")


@pytest.mark.parametrize(
    ("layer", "optimizer", "said"),
    [
        (Scaled, SGD, "cannot divide parameters of layer 1, which has a parameter without dimensions"),
        (
            partial(Scaled, in_place=True),
            SGD,
            "cannot divide parameters of layer 1, which changes its inputs",
        ),
        (
            partial(nn.Linear, 8, 8),
            Adafactor,
            "Adafactor.*element by element.*or divide optimizer state only",
        ),
    ],
)
def test_parameters_that_replicas_cannot_divide(
    layer: Callable[[], nn.Module], optimizer: Callable[..., Optimizer], said: str
) -> None:
    """The message names the parameter, the layer or the optimizer, and the way out."""
    task = task_of(lambda: [nn.Linear(8, 8), layer(), nn.Linear(8, 4)], optimizer=partial(optimizer, lr=0.1))
    grid = Grid(devices=(0, 1), data=2, shard="parameters")
    plan = plan_of(task, (3,), profiled=profile(task, microbatch_size=(2, 1)))
    plan = replace(plan, cluster=pipefit.load_cluster("emulated:2x1GiB"))
    plan = replace(plan, stages=(replace(plan.stages[0], grid=grid),))
    with pytest.raises(UsageError, match=said):
        pipefit.certify_pipeline(task, plan)


def test_shared_parameters_on_one_device_are_refused() -> None:
    """A sum over workers has each of them once."""
    plan = plan_of(with_momentum("tied"), (1, 1, 3, 1), devices=2, schedule="gpipe")
    with pytest.raises(UsageError, match="a parameter that stages 0 and 2 share on one device"):
        pipefit.certify_pipeline(with_momentum("tied"), plan)


def trained_without_the_other(plan: Plan) -> str:
    """Train a step that the second worker does not join; return the error."""
    pipeline = pipefit.pipeline(some_layers(), plan, timeout_seconds=10, numbers=False)
    said = ""
    if dist.get_rank() == 0:
        inputs, targets = batch_of(some_layers(), plan)
        with pytest.raises(PeerLost) as caught:
            pipeline.step(inputs, target=targets)
        said = str(caught.value)
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return said


def test_a_worker_that_hangs(workers: Workers) -> None:
    """Other workers wait as long as the caller says, and then raise a sentence."""
    said, _ = workers.run(2, trained_without_the_other, plan_of(some_layers(), (2, 3)))
    assert re.match(r"after .*, device 0 waited for a worker that has ended or hangs \(.*[Tt]imed out", said)


class Failing(nn.Linear):
    """A layer that fails when it is `armed`."""

    armed = False

    def forward(self, values: Tensor) -> Tensor:
        if Failing.armed:
            raise PeerLost("the peer of a tensor-parallel layer has ended")
        return super().forward(values)


def failing_layers() -> Task:
    """Return a task with a layer that may fail."""
    return task_of(lambda: [nn.Linear(8, 8), Failing(8, 4)])


def error_of_a_layer(plan: Plan) -> str:
    """Return the error of a step in which a layer fails."""
    pipeline = pipefit.pipeline(failing_layers(), plan, numbers=False)
    Failing.armed = True
    inputs, targets = batch_of(failing_layers(), plan)
    with pytest.raises(PeerLost) as caught:
        pipeline.step(inputs, target=targets)
    return str(caught.value)


def test_errors_of_layers_stay_what_they_are(workers: Workers) -> None:
    """torch's engine wraps the errors of layers in its own; those of pipefit are raised without it."""
    said = workers.run(1, error_of_a_layer, plan_of(failing_layers(), (2,)))
    assert said == ["the peer of a tensor-parallel layer has ended"]


def joined_with(plans: list[Plan], port: int) -> str:
    """Join the other worker, as torchrun's workers do, with a plan of one's own; return the error."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    found = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in found.items()}),
        pytest.raises(UsageError) as caught,
    ):
        pipefit.pipeline(some_layers(), plans[rank])
    return str(caught.value)


def test_workers_with_different_plans(workers: Workers) -> None:
    """They would wait for each other's messages forever."""
    plans = [plan_of(some_layers(), split) for split in ((2, 3), (3, 2))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = workers.run(2, joined_with, plans, port)
    assert all("worker 1 would train by another plan than worker 0" in one for one in said)


def test_a_batch_of_another_size_is_refused(workers: Workers) -> None:
    """torch's engine has buffers for batches of one size."""
    with pytest.raises(AssertionError, match=r"the batch holds 3 samples.*drop_last=True"):
        workers.run(1, another_batch, plan_of(some_layers(), (5,)))


def another_batch(plan: Plan) -> None:
    """Train a batch that is too small."""
    task = some_layers()
    inputs, targets = task.batch(3)
    pipefit.pipeline(task, plan).step(inputs, target=targets)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`pipefit certify --engine torch` prints the peaks; its trace names forwards, backwards and the update."""
    settings = ["--set", "widths=(16,8)"]
    save(plan_of(build("mlp", widths=(16, 8)), (2, 3)), tmp_path / "plan.json")
    command = ["certify", str(tmp_path / "plan.json"), "zoo:mlp", *settings, "--engine", "torch", "--json"]
    assert main(command) == 0
    memory = json.loads(capsys.readouterr().out)["devices"][0]["memory"]
    actions = [sample["action"] for sample in memory if sample["step"] == 1]
    assert actions == ["receive buffers and batch", "0F0", "0F1", "0B0", "0B1", "update"]
