"""Incremental profiling: on a model of known true costs, and by real runs of a small one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

from pipefit.capture import Task
from pipefit.errors import FileError, InfeasibleError, OutOfMemory, UsageError
from pipefit.profiler import profile
from pipefit.profiler.training_runs.profilers import plan_of as plan_made
from pipefit.profiler.training_runs.profilers import profile_incrementally, train
from pipefit.profiler.training_runs.runs import intervals
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.profile import AdditiveCosts, Block
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.gallery_samples import seeds
from support.small_tasks import plan_of, task_of
from support.synthetic_models import alike, skewed
from support.synthetic_models import profile as profile_of

GPIPE = Training(batch_size=4, microbatches=4, schedule="gpipe")
TRUE = AdditiveCosts(mem_isolated=tuple(range(100, 112)), mem_added=(100, *range(21, 32)), training=GPIPE)
TASK = task_of(lambda: [nn.Linear(8, 8)])  # never run, since peaks are made up


class MadeUp:
    """Runs with additive peaks, on devices of `memory_bytes`; may break after some runs."""

    def __init__(self, memory_bytes: int = 1 << 30, breaks_after: int = 1 << 30) -> None:
        self.memory_bytes, self.left = memory_bytes, breaks_after
        self.splits: list[tuple[int, ...]] = []

    def __call__(self, plan: Plan) -> tuple[int, ...]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        self.splits.append(plan.split)
        peaks = tuple(TRUE.peak(stage.start, stage.stop) for stage in plan.stages)
        if max(peaks) > self.memory_bytes:
            raise OutOfMemory("too much")
        return peaks

    def profile(self, store: Path, devices: int = 4, **options: object) -> AdditiveCosts:
        return profile_incrementally(
            TASK, profile_of(alike(12)), Cluster.emulated((devices, self.memory_bytes)), GPIPE,
            store=store, run=self, **options,
        )  # fmt: skip


@pytest.mark.parametrize(("devices", "runs"), [(3, 12), (4, 9), (5, 8), (6, 7), (20, 7)])
def test_additive_costs_are_found_exactly(tmp_path: Path, devices: int, runs: int) -> None:
    """Additive costs are found exactly in L - G + 1 runs for 12 layers on four to six devices; more devices
    stay unused, and on three every layer is a run.
    """
    made_up = MadeUp()
    assert made_up.profile(tmp_path / "runs.json", devices) == TRUE
    assert len(made_up.splits) == runs


@pytest.mark.parametrize("memory_bytes", [250, 215, 190])
def test_what_runs_out_of_memory_is_replaced(tmp_path: Path, memory_bytes: int) -> None:
    """On devices too small for the long stages, other runs give the same numbers."""
    made_up = MadeUp(memory_bytes)
    assert made_up.profile(tmp_path / "runs.json", 6) == TRUE
    assert len(made_up.splits) > 7
    assert len(made_up.splits) == len(set(made_up.splits)), "a run is made once"


@pytest.mark.parametrize(("memory_bytes", "what"), [(105, "layer0 alone"), (115, "layer0 and layer1")])
def test_what_fits_nowhere_is_named(tmp_path: Path, memory_bytes: int, what: str) -> None:
    """A layer too large for a device alone, or with its neighbour, is named, with a remedy."""
    with pytest.raises(InfeasibleError, match=f"{what}.*smaller microbatches.*The last failure: too much"):
        MadeUp(memory_bytes).profile(tmp_path / "runs.json", 12)


@pytest.mark.parametrize("breaks_after", range(9))
def test_a_break_loses_nothing(tmp_path: Path, breaks_after: int) -> None:
    """The second call makes only the missing runs, and reports the number done."""
    store = tmp_path / "runs.json"
    first, second = MadeUp(breaks_after=breaks_after), MadeUp()
    with pytest.raises(KeyboardInterrupt):
        first.profile(store)
    told: list[tuple[int, int]] = []
    assert second.profile(store, progress=lambda done, planned, edges: told.append((done, planned))) == TRUE
    assert len(first.splits) == breaks_after and len(second.splits) == 9 - breaks_after
    assert told == [(done, 9) for done in range(breaks_after, 9)]
    assert [path.name for path in tmp_path.iterdir()] == ["runs.json"]


def test_a_break_while_runs_are_saved_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier runs are kept, without temporary files next to them."""
    store = tmp_path / "runs.json"
    with pytest.raises(KeyboardInterrupt):
        MadeUp(breaks_after=2).profile(store)
    before = store.read_text()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        MadeUp().profile(store)
    assert store.read_text() == before and [path.name for path in tmp_path.iterdir()] == ["runs.json"]


def test_why_it_did_not_fit_outlives_a_break(tmp_path: Path) -> None:
    """A second call without new runs reports the first one's refusal."""
    for memory_bytes in (1, 105):
        made_up = MadeUp(memory_bytes)
        for _ in range(2):
            with pytest.raises(InfeasibleError, match="The last failure: too much"):
                made_up.profile(tmp_path / f"{memory_bytes}.json", 12)


def test_runs_of_something_else_are_refused(tmp_path: Path) -> None:
    """A store of other devices, and an invalid file, are refused and stay unchanged."""
    store = tmp_path / "runs.json"
    MadeUp().profile(store)
    before = store.read_text()
    with pytest.raises(
        FileError, match=r"runs made for 4 devices of .*, not 5 devices of .*: name another file"
    ):
        MadeUp().profile(store, devices=5)
    assert store.read_text() == before
    for text in (
        '{"runs": 3}',
        before.replace('"peaks": [', '"peaks": [1, '),
        before.replace('"stages"', '"edges"'),
    ):
        store.write_text(text)
        with pytest.raises(FileError, match="is not a record of profiling runs"):
            MadeUp().profile(store)


def test_runs_of_other_blocks_are_refused(tmp_path: Path) -> None:
    """Runs name stages by numbers of blocks, which differ if the same layers are in other blocks."""
    made, coarse = MadeUp(), tuple(Block(name=f"block{number}", layers=2) for number in range(6))
    made.profile(tmp_path / "runs.json")
    again = replace(profile_of(alike(12)), blocks=coarse)
    with pytest.raises(
        FileError, match=r"runs made for other blocks of layers, such as .* granularity.*: name another"
    ):
        profile_incrementally(
            TASK,
            again,
            Cluster.emulated((4, made.memory_bytes)),
            GPIPE,
            store=tmp_path / "runs.json",
            run=made,
        )


OTHER_TASKS = {
    "inputs": ({"inputs": 9}, r"inputs of float32 \(n, 8\), not float32 \(n, 9\)"),
    "optimizer": ({"optimizer": torch.optim.Adam}, "SGD, not Adam"),
    "loss": ({"loss": nn.functional.l1_loss}, "another loss"),
}


@pytest.mark.parametrize(("changed", "says"), OTHER_TASKS.values(), ids=OTHER_TASKS)
def test_runs_of_another_task_are_refused(tmp_path: Path, changed: dict[str, object], says: str) -> None:
    """A record of another input size, optimizer or loss is refused with the difference."""

    def run(task: Task) -> AdditiveCosts:
        return profile_incrementally(
            task, profile(task, microbatch_size=1), Cluster.emulated((3, 1 << 30)), GPIPE, store=tmp_path / "runs.json",
            run=lambda plan: (1,) * len(plan.stages),
        )  # fmt: skip

    def task(inputs: int = 8, **options: object) -> Task:
        return task_of(lambda: [nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 4)], inputs=inputs, **options)

    run(task())
    with pytest.raises(FileError, match=says):
        run(task(**changed))


@pytest.mark.parametrize(
    ("training", "recompute", "says"),
    [
        (
            Training(batch_size=8, microbatches=8, schedule="gpipe"),
            "never",
            "4 microbatches of 1, not 8 microbatches",
        ),
        (Training(batch_size=4, microbatches=4, schedule="torchgpipe"), "never", "gpipe, not torchgpipe"),
        (GPIPE, "always", "recompute never, not recompute always"),
        (replace(GPIPE, clip_norm=1.0), "never", "unclipped gradients, not clipped gradients"),
    ],
)
def test_runs_under_another_training_are_refused(
    tmp_path: Path, training: Training, recompute: str, says: str
) -> None:
    """Another number of microbatches, schedule, recomputation or clipping changes peaks and is refused."""
    store = tmp_path / "runs.json"
    MadeUp().profile(store)
    with pytest.raises(FileError, match=says):
        profile_incrementally(
            TASK, profile_of(alike(12)), Cluster.emulated((4, 1 << 30)), training, recompute=recompute, store=store,
            run=MadeUp(),
        )  # fmt: skip


@pytest.mark.parametrize("microbatches", [1, 4])
def test_1f1b_is_refused_where_a_stages_place_matters(tmp_path: Path, microbatches: int) -> None:
    """1F1B is refused with several microbatches; with one, it is GPipe."""
    training = Training(batch_size=microbatches, microbatches=microbatches, schedule="1f1b")
    asked = (TASK, profile_of(alike(12)), Cluster.emulated((4, 1 << 30)), training)
    if microbatches == 1:
        assert profile_incrementally(*asked, store=tmp_path / "runs.json", run=MadeUp()).training == training
        return
    with pytest.raises(UsageError, match="under 1f1b a stage's memory depends on its position"):
        profile_incrementally(*asked, store=tmp_path / "runs.json", run=MadeUp())


class Simulated:
    """Simulated runs of a made-up chain under caps."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __call__(self, plan: Plan) -> tuple[int, ...]:
        peaks = Simulation(plan, steps=2).peak_bytes
        if any(peak > budget for peak, budget in zip(peaks, self.cluster.budgets, strict=True)):
            raise OutOfMemory("a device passed its cap")
        return peaks[: len(plan.stages)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("seed", seeds(6, of=12))
def test_it_succeeds_under_every_cap_under_which_it_can(tmp_path: Path, seed: int, recompute: str) -> None:
    """Layers may differ by orders of magnitude, devices too, under caps around those of every split.
    Profiling succeeds exactly if trying all splits finds a run with each layer alone, and two runs with and
    without it after the same layers.
    """
    rng = Random(seed)
    layers, devices = rng.randrange(4, 8), rng.randrange(3, 5)
    chain = profile_of(skewed(rng, layers))
    scales = [rng.choice((1, 1, 2)) for _ in range(devices)]
    ample = Cluster.emulated(*((1, 1 << 60) for _ in scales))
    peaks = {
        edges: Simulation(plan_made(chain, ample, GPIPE, intervals(edges), recompute), steps=2).peak_bytes
        for count in range(1, devices + 1)
        for cuts in combinations(range(1, layers), min(count, layers) - 1)
        for edges in [(0, *cuts, layers)]
    }
    needs = sorted(
        {max(-(-peak // scale) for peak, scale in zip(p, scales, strict=True)) for p in peaks.values()}
    )
    for number, cap in enumerate([needs[0] - 1, *rng.sample(needs, min(len(needs), 6)), needs[-1]]):
        cluster = Cluster.emulated(*((1, cap * scale) for scale in scales))
        fitting = {
            interval for edges, p in peaks.items() for interval in intervals(edges)
            if all(peak <= budget for peak, budget in zip(p, cluster.budgets, strict=True))
        }  # fmt: skip
        alone = all((n, n + 1) in fitting for n in range(layers))
        told = all(any({(n, k), (n, k + 1)} <= fitting for n in range(k)) for k in range(1, layers))
        store = tmp_path / f"{number}.json"
        if alone and told:
            costs = profile_incrementally(
                TASK, chain, cluster, GPIPE, recompute=recompute, store=store, run=Simulated(cluster)
            )
            assert (len(costs.mem_isolated), costs.recompute) == (layers, recompute)
        else:
            with pytest.raises(InfeasibleError, match=r"every run with layer.*exceeded a device's memory"):
                profile_incrementally(
                    TASK, chain, cluster, GPIPE, recompute=recompute, store=store, run=Simulated(cluster)
                )


def small() -> Task:
    """Build eight layers of different widths."""
    widths = [8, 64, 16, 128, 8, 32, 32, 64, 4]
    return task_of(lambda: [nn.Linear(a, b) for a, b in pairwise(widths)])


def test_real_runs_tell_what_the_dry_run_says(tmp_path: Path) -> None:
    """Eight layers on four emulated devices take five runs; single-layer peaks are those of a dry run, to the
    byte, and measured prefixes are reproduced.
    """
    task = small()
    chain, cluster = profile(task, microbatch_size=2), Cluster.emulated((4, 1 << 26))
    training = Training(batch_size=4, microbatches=2, schedule="gpipe")
    state = torch.get_rng_state()
    costs = profile_incrementally(task, chain, cluster, training, store=tmp_path / "runs.json")
    assert torch.equal(state, torch.get_rng_state())
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert len(runs) == 5
    for run in runs:
        for (start, stop), peak in zip(run["stages"], run["peaks"], strict=True):
            if start == 0:
                assert costs.peak(start, stop) == peak
    plan = plan_of(task, [stop - start for start, stop in runs[1]["stages"]], schedule="gpipe")
    assert certify(task, plan).peak_bytes == tuple(runs[1]["peaks"]) == train(task, plan)


def test_caps_of_emulated_devices_are_kept(tmp_path: Path) -> None:
    """With caps just above the need of half of the layers, failed runs are replaced, and all layers are
    measured.
    """
    task = small()
    chain = profile(task, microbatch_size=2)
    training = Training(batch_size=4, microbatches=2, schedule="gpipe")
    ample, tight = (tmp_path / "ample.json", tmp_path / "tight.json")
    roomy = profile_incrementally(task, chain, Cluster.emulated((4, 1 << 26)), training, store=ample)
    cap = max(max(run["peaks"]) for run in json.loads(ample.read_text())["runs"]) - 1
    costs = profile_incrementally(task, chain, Cluster.emulated((4, cap)), training, store=tight)
    runs = json.loads(tight.read_text())["runs"]
    failed = [run for run in runs if None in run["peaks"]]
    assert failed and all(
        set(run["peaks"]) == {None} and "ran out of memory" in run["failure"] for run in failed
    )
    assert all(max(run["peaks"]) <= cap and not run["failure"] for run in runs if run not in failed)
    assert len(costs.mem_isolated) == len(roomy.mem_isolated) == 8
