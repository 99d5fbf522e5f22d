"""Trimmed profiling: made-up peaks, and real runs of a small model against dry runs of whole pipelines."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from pipefit.capture import Task
from pipefit.errors import FileError, InfeasibleError, OutOfMemory, UsageError
from pipefit.lowering.passes.recomputation import Recompute, recompute_decisions
from pipefit.profiler import profile
from pipefit.profiler.training_runs.profilers import profile_incrementally, profile_trimmed
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import AdditiveCosts
from pipefit.schema.training import Training
from support.gallery_samples import sampled
from support.small_tasks import task_of
from support.synthetic_models import alike
from support.synthetic_models import profile as profile_of

TRUE = AdditiveCosts(
    mem_isolated=tuple(range(100, 112)), mem_added=(100, *range(21, 32)),
    training=Training(batch_size=4, microbatches=4, schedule="gpipe"),
)  # fmt: skip
GPIPE = Training(batch_size=4, microbatches=2, schedule="gpipe")


class MadeUp:
    """Stages with additive peaks, on devices of `memory_bytes`; may break after some runs."""

    def __init__(self, memory_bytes: int = 1 << 30, breaks_after: int = 1 << 30) -> None:
        self.memory_bytes, self.left = memory_bytes, breaks_after
        self.stages: list[Stage] = []

    def __call__(self, plan: Plan, stage: int) -> int:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        self.stages.append(plan.stages[stage])
        peak = TRUE.peak(plan.stages[stage].start, plan.stages[stage].stop)
        if peak > self.memory_bytes:
            raise OutOfMemory("too much")
        return peak

    def profile(self, store: Path, devices: int = 4, **options: object) -> AdditiveCosts:
        task = task_of(lambda: [nn.Linear(8, 8)])  # never run, since peaks are made up
        return profile_trimmed(
            task, profile_of(alike(12)), Cluster.emulated((devices, self.memory_bytes)),
            Training(batch_size=4, microbatches=4, schedule="gpipe"), store=store, run=self, **options,
        )  # fmt: skip


@pytest.mark.parametrize(("devices", "runs"), [(1, 23), (2, 12), (4, 6), (8, 4)])
def test_additive_costs_are_found_exactly(tmp_path: Path, devices: int, runs: int) -> None:
    """Twelve single layers and eleven pairs run once each, on the available devices; one is enough."""
    made_up, told = MadeUp(), []
    assert made_up.profile(tmp_path / "runs.json", devices, progress=lambda *what: told.append(what)) == TRUE
    assert len(made_up.stages) == 23
    assert [(done, planned) for done, planned, _ in told] == [(n, runs) for n in range(runs)]
    assert {stage.device for stage in made_up.stages} == set(range(devices))


@pytest.mark.parametrize("breaks_after", [0, 3, 4, 10, 22])
def test_a_break_loses_nothing_but_the_run_it_was_in(tmp_path: Path, breaks_after: int) -> None:
    """The second call begins with the run that broke."""
    store = tmp_path / "runs.json"
    first, second = MadeUp(breaks_after=breaks_after), MadeUp()
    with pytest.raises(KeyboardInterrupt):
        first.profile(store)
    assert second.profile(store) == TRUE
    assert len(second.stages) == 23 - breaks_after // 4 * 4


@pytest.mark.parametrize(("memory_bytes", "what"), [(105, "layer6 alone"), (125, "layer3 and layer4")])
def test_what_fits_nowhere_is_named(tmp_path: Path, memory_bytes: int, what: str) -> None:
    """A layer too large for a device alone, or with its neighbour, is named; all others are
    already measured.
    """
    made_up = MadeUp(memory_bytes)
    with pytest.raises(InfeasibleError, match=f"{what}.*smaller microbatches.*The last failure: too much"):
        made_up.profile(tmp_path / "runs.json")
    assert len(made_up.stages) == 23


def test_a_record_of_whole_runs_is_refused(tmp_path: Path) -> None:
    """The two kinds of runs do not mix in one file."""
    made_up = MadeUp()
    made_up.profile(tmp_path / "runs.json")
    with pytest.raises(FileError, match="runs made for trimmed runs, not incremental runs"):
        profile_incrementally(
            task_of(lambda: [nn.Linear(8, 8)]), profile_of(alike(12)), Cluster.emulated((4, 1 << 30)),
            Training(batch_size=4, microbatches=4, schedule="gpipe"), store=tmp_path / "runs.json",
            run=lambda plan: (1,) * len(plan.stages),
        )  # fmt: skip


def test_the_place_in_1f1b_is_not_known(tmp_path: Path) -> None:
    """A schedule with peaks that depend on the stage's position is refused, before any run."""
    task = small()
    with pytest.raises(UsageError, match="under 1f1b a stage's memory depends"):
        profile_trimmed(
            task, profile(task, microbatch_size=2), Cluster.emulated((4, 1 << 30)),
            Training(batch_size=4, microbatches=2, schedule="1f1b"), store=tmp_path / "runs.json",
        )  # fmt: skip


def small() -> Task:
    """Build six layers of different widths."""
    widths = [8, 64, 16, 128, 8, 32, 4]
    return task_of(lambda: [nn.Linear(a, b) for a, b in pairwise(widths)], optimizer=torch.optim.Adam)


@pytest.mark.parametrize("recompute", sampled(["never", "always"], often=["always"]))
def test_real_runs_tell_what_whole_pipelines_need(tmp_path: Path, recompute: Recompute) -> None:
    """Every layer and every pair match the dry run of a whole pipeline with that stage, to the byte; single
    layers also match the incremental profiler.
    """
    task = small()
    chain, cluster = profile(task, microbatch_size=2), Cluster.emulated((4, 1 << 26))
    state = torch.get_rng_state()
    costs = profile_trimmed(task, chain, cluster, GPIPE, store=tmp_path / "trimmed.json", recompute=recompute)
    assert torch.equal(state, torch.get_rng_state())
    for run in json.loads((tmp_path / "trimmed.json").read_text())["runs"]:
        for (start, stop), peak in zip(run["stages"], run["peaks"], strict=True):
            ends = [(a, b) for a, b in ((0, start), (start, stop), (stop, 6)) if a < b]
            stages = tuple(Stage(start=a, stop=b, grid=Grid.of(number)) for number, (a, b) in enumerate(ends))
            decisions = recompute_decisions(stages, chain.edges, recompute, "gpipe", GPIPE.microbatches)
            plan = Plan(profile=chain, cluster=cluster, training=GPIPE, stages=stages, decisions=decisions)
            assert certify(task, plan).peak_bytes[ends.index((start, stop))] == peak
            assert costs.peak(start, stop) == peak
    store = tmp_path / "incremental.json"
    whole = profile_incrementally(task, chain, cluster, GPIPE, store=store, recompute=recompute)
    assert whole.mem_isolated == costs.mem_isolated


def test_caps_of_emulated_devices_are_kept(tmp_path: Path) -> None:
    """A pair that exceeds its cap is named, with the device that was too small."""
    task = small()
    chain = profile(task, microbatch_size=2)
    costs = profile_trimmed(task, chain, Cluster.emulated((2, 1 << 26)), GPIPE, store=tmp_path / "ample.json")
    fullest = max(costs.peak(start, start + 2) for start in range(5))
    with pytest.raises(InfeasibleError, match=r"together on a device exceeded.*device 0 ran out of memory"):
        profile_trimmed(task, chain, Cluster.emulated((1, fullest - 1)), GPIPE, store=tmp_path / "tight.json")
