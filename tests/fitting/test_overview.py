"""The overview of `fit`, on one screen: every number is that of a separately requested plan."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from inspect import isfunction, signature
from typing import Any

import pytest
import torch
from torch import nn

import pipefit
from pipefit.cli import main
from pipefit.errors import UsageError
from pipefit.largest import attempts, overview
from pipefit.largest.task_plans import plan
from pipefit.models import build
from pipefit.planner import PLANNERS
from pipefit.planner import plan as planned
from pipefit.report import show
from pipefit.report.fit import describe_overview
from pipefit.schema.cluster import Cluster
from pipefit.schema.fit import Overview, samples_per_second
from pipefit.schema.grids import SHARDINGS
from pipefit.simulator import Simulation
from pipefit.tables import plain
from support.known_profiles import profile
from support.small_tasks import task_of

KIB = 1024
WIDTHS = {"widths": (64, 32, 16), "inputs": 20}
TASK = build("mlp", **WIDTHS, optimizer="adamw")


@cache
def seen(kib: int, devices: int = 2) -> Overview:
    """Return an overview of a small perceptron on `devices` emulated devices."""
    return pipefit.fit(TASK, f"emulated:{devices}x{kib}KiB", microbatches=2, target="cuda")


@cache
def lowest_peak(devices: int, size: int) -> int:
    """Return the lowest peak of all splits, by `plan`."""
    made = plan(
        profile(TASK, microbatch_size=size, target="cuda"),
        Cluster.emulated((devices, 1 << 30)),
        microbatches=2,
        objective="peak",
    )
    assert made.prediction is not None
    return max(made.prediction.peak_bytes)


@pytest.mark.parametrize("kib", [88, pytest.param(160, marks=pytest.mark.gallery)])
def test_the_largest_microbatch_of_which_all_is_kept_fits_and_its_double_does_not(kib: int) -> None:
    """The largest microbatch without recomputation fits by its plan for the lowest peak, and its double does
    not, on one device and on two.
    """
    for row in seen(kib).reaches:
        kept, budget = row.largest[0], kib * KIB
        size = 0 if kept is None else kept.value
        assert row.one.need_bytes == lowest_peak(row.devices, 1)
        assert not size or lowest_peak(row.devices, size) <= budget
        assert lowest_peak(row.devices, 2 * size or 1) > budget


def test_what_more_may_be_done_for_is_never_smaller() -> None:
    """Recomputation allows at least the keeping size, offload at least that of recomputation; all of them
    fit.
    """
    for row in seen(88).reaches:
        sizes = [0 if one is None else one.value for one in row.largest]
        assert sizes == sorted(sizes)
        assert all(one is None or one.fits for one in (*row.largest, row.fastest))


def test_counts_of_devices_are_1_2_4_8() -> None:
    """Counts of devices are 1, 2, 4 and 8, up to the model's number of blocks."""
    assert [row.devices for row in seen(88).reaches] == [1, 2, 4, 7]


@pytest.mark.gallery
def test_the_clusters_own_count_of_devices_is_among_them() -> None:
    """A cluster of three devices includes a count of three."""
    assert [row.devices for row in seen(96, 3).reaches] == [1, 2, 3, 4, 7]
    assert seen(96, 3).here.devices == 3


def _look_at_little(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    """Look at one size of microbatches in one precision."""
    for name, value in ({"_SIZES": (1,), "_PRECISIONS": ()} | settings).items():
        monkeypatch.setattr(f"pipefit.largest.overview.{name}", value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cluster", ["emulated:1x48KiB+1x96KiB", "emulated:1x20KiB+1x88KiB+1x30KiB"])
def test_of_devices_that_differ_the_largest_are_used_first(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among unlike devices one is the largest, and counts stop at the cluster's; the peak is a plan's lowest
    share of budgets, and the limiting device has its number in the cluster.
    """
    _look_at_little(monkeypatch)
    found = pipefit.fit(TASK, cluster, microbatches=2, target="cuda")
    have = found.cluster
    assert [row.devices for row in found.reaches] == list(range(1, len(have.devices) + 1))
    assert found.reaches[0].one.budget_bytes == max(have.budgets)
    assert found.reaches[0].one.need_bytes == lowest_peak(1, 1)
    made = plan(
        profile(TASK, microbatch_size=1, target="cuda"), have, microbatches=2, data=1, objective="peak"
    )
    peaks = made.prediction.peak_bytes if made.prediction is not None else ()
    share = max(peak / budget for peak, budget in zip(peaks, have.budgets, strict=True))
    assert found.here.one.need_bytes == pytest.approx(share * found.here.one.budget_bytes)
    text = " ".join(plain(describe_overview(found), 80).split())
    assert "Rows with fewer devices use those with the most memory." in text
    assert f"device {found.limiting.device} limits" in text


def test_a_sample_that_one_device_holds_fits_though_not_on_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second device of a kibibyte holds no stage, yet a sample fits on one device."""
    _look_at_little(monkeypatch)
    found = pipefit.fit(TASK, "emulated:1x1KiB+1x96KiB", microbatches=2, target="cuda")
    assert found.fits and found.here.devices == 1 and show.text(found).startswith("Fits: mlp of")


def test_recomputing_all_blocks_is_among_what_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the search ends at its limit of work without a plan, recomputing all blocks is still tried."""
    _look_at_little(monkeypatch, _COUNTS=(1,), PLANNERS=PLANNERS | {"joint": PLANNERS["uniform"]})
    task = build("gpt-stdlib", layers=4, hidden=64, heads=4, sequence=128)
    costs = profile(task, microbatch_size=1, target="cuda")
    made = planned(
        costs, Cluster.emulated((1, 1 << 30)), microbatches=4, planner="uniform", recompute="always"
    )
    least = max(made.prediction.peak_bytes) if made.prediction is not None else 0
    found = pipefit.fit(task, Cluster.emulated((1, least + 1024)), target="cuda")
    assert found.reaches[0].largest[0] is None and found.reaches[0].largest[1] is not None


def test_state_is_what_the_optimizer_has_by_its_own_arithmetic() -> None:
    """AdamW's state is four times the parameters, half of that in bfloat16; its step counts stay on the host
    of a GPU.
    """
    model = TASK.build()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    rows = {row.precision: row for row in seen(88).precisions}
    assert rows["float32"].state_bytes == 16 * numbers
    assert rows["bfloat16"].state_bytes == 8 * numbers
    assert rows["float32"].need_bytes == lowest_peak(1, 1)


def test_devices_beyond_the_models_stages_are_for_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven blocks use seven devices at most; the next batch to plan is one for all devices."""
    few = seen(88)  # before settings are replaced
    _look_at_little(monkeypatch, _COUNTS=(1,))
    found = pipefit.fit(TASK, "emulated:9x96KiB", target="cuda")
    text = " ".join(plain(describe_overview(found, "zoo:mlp --cluster emulated:9x96KiB"), 80).split())
    assert "this model has at most 7 stages: the other devices of 9 devices are for replicas" in text
    assert found.here.fastest is not None
    assert f"--batch-size {9 * 4 * found.here.fastest.value} " in text
    assert "for replicas" not in plain(describe_overview(few), 80)


def test_models_of_many_layers_have_all_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of many layers try fewer microbatches, in the same precisions, with the same bytes."""
    few = seen(88)  # before the setting is replaced
    monkeypatch.setattr("pipefit.largest.overview._MANY_LAYERS", 3)
    found = pipefit.fit(TASK, "emulated:2x88KiB", microbatches=2, target="cuda")
    assert found.precisions == few.precisions and len(found.precisions) == 4
    assert set(found.sizes) <= {1, 4, 16}


def test_replicas_need_what_plans_of_them_need() -> None:
    """For every division of state the peak is that of the plan by hand, or a bound of it."""
    found, cluster = seen(88), Cluster.emulated((2, 1 << 30))
    costs = [profile(TASK, microbatch_size=size, target="cuda") for size in (2, 1)]
    both = replace(costs[0], measurements=tuple(one for made in costs for one in made.measurements))
    for number, shard in enumerate(SHARDINGS):
        way = f"ZeRO-{number}" if number else "data parallel"
        for one in (one for one in found.replicated if one.way == way and not one.recompute):
            made = planned(
                both,
                cluster,
                batch_size=4,
                microbatch_size=2,
                stages=1,
                data=2,
                shard=shard,
                planner="uniform",
            )
            grid = replace(made.stages[0].grid, buckets=7 if number > 1 else 1)
            peak = max(Simulation(replace(made, stages=(replace(made.stages[0], grid=grid),))).peak_bytes)
            assert one.need_bytes <= peak if one.is_bound else one.need_bytes == peak
            assert (one.samples_per_second is not None) == (peak <= 88 * KIB)
    assert {one.way for one in found.replicated} >= {"data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"}


def test_does_not_fit_is_said_with_its_proof_alone() -> None:
    """A kibibyte holds no layer; without a proof, the refusal lists the attempts."""
    assert show.text(seen(1)).startswith(
        "Does not fit: mlp of"
    ) and "\nOne sample does not fit: " in show.text(seen(1))
    found = replace(seen(1), impossible="")
    text = " ".join(plain(describe_overview(found, "zoo:mlp"), 80).split())
    assert (
        text.startswith("No plan found: mlp of")
        and "Tried, without a plan that fits one sample: pipelines" in text
    )
    assert "tensor-parallel" not in text
    assert "Not tried: microbatches of several samples, and a search of full length: pipefit plan zoo" in text
    for none in (text, " ".join(show.text(seen(1)).split())):
        assert (
            "No plan was found for microbatches of 1 sample: with all" in none and "that fits is" not in none
        )
    some = " ".join(show.text(seen(88)).split())
    assert re.search(
        r"Of microbatches of 1, .*, \d+ samples, the table has the largest with a plan that fits: ", some
    )


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        ("no room", "one sample on emulated:2x1KiB does not fit: no room"),
        ("", "no plan was found for one sample on "),
    ],
)
def test_the_refusal_says_how_certain_it_is(
    proof: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a proof, the last sentence does not say that nothing fits."""
    found = replace(seen(1), impossible=proof)  # before `fit` is replaced
    monkeypatch.setattr(overview, "fit", lambda *_, **__: found)
    assert main(["fit", "zoo:mlp", "-c", "emulated:2x1KiB"]) == 3
    out, err = capsys.readouterr()
    assert err.startswith(f"pipefit: {words}") and "fits on" not in err.removeprefix(f"pipefit: {words}")
    assert "--grow memory --step 1KiB" in " ".join(out.split())


def test_the_fastest_of_all_ways_is_named() -> None:
    """Replicas are named if they are faster than pipelines, and pipelines otherwise."""
    found, best = seen(88), seen(88).here.fastest
    assert best is not None
    rate, usual = samples_per_second(best), f"Fastest of these: microbatches of {best.value} samples"
    for factor, words in (
        (2.0, "Fastest of these: 2 replicas (ZeRO-3): "),
        (0.5, usual),
    ):
        last = replace(found.replicated[-1], recompute=False, samples_per_second=factor * rate)
        text = " ".join(plain(describe_overview(replace(found, replicated=(last,))), 80).split())
        assert words in text and text.count("Fastest of these") == text.count("Next: ") == 1


def test_the_screen_says_yes_or_no_first_and_ends_with_a_command() -> None:
    """Lines are at most 80 columns, and the final command makes a plan."""
    text = plain(describe_overview(seen(88), "zoo:mlp --cluster emulated:2x88KiB"), 80)
    assert text.startswith("Fits: mlp of") and "tight" not in text  # emulated devices are exact
    assert max(map(len, text.splitlines())) <= 80
    assert "Next: pipefit plan zoo:mlp --cluster emulated:2x88KiB --batch-size" in " ".join(text.split())


def test_little_room_on_gpus_is_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a GPU has little room beyond one sample, the first words are
    `Fits, tightly`: uncounted memory may not fit.
    """
    need = seen(88).here.one.need_bytes
    _look_at_little(monkeypatch)
    cluster = replace(Cluster.emulated((2, need + 1)), backend="cuda").reserving([0, 0])
    found = pipefit.fit(TASK, cluster, microbatches=2)
    best = found.here.fastest
    assert best is not None and 0.95 * best.budget_bytes <= best.need_bytes <= best.budget_bytes
    assert show.text(found).startswith("Fits, tightly: mlp of")


def test_a_function_of_python_answers_as_the_command_does() -> None:
    """The function returns data and prints as the screen, with the next call in place of the command."""
    found = seen(88)
    assert show.text(found).startswith("Fits: mlp of") and max(map(len, show.text(found).splitlines())) <= 80
    size = found.here.fastest.plan.training.batch_size if found.here.fastest else 0
    assert f"Next: pipefit.plan(task, cluster, batch_size={size})" in " ".join(show.text(found).split())
    assert repr(found) == "<Overview: mlp on emulated:2x88KiB: 2 x emulated-cpu 88.00 KiB: fits>"
    assert "<table>" in show.html(found)
    assert isfunction(pipefit.fit) and list(signature(pipefit.fit).parameters)[:3] == [
        "model",
        "cluster",
        "microbatches",
    ]


def test_wrong_arguments_in_python_are_named() -> None:
    """An invalid task, cluster or training is refused by the argument's name, with valid ones."""
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: pipefit.fit("emulated:2x1MiB", TASK), "model must be a Task, not 'emulated.*pipefit.Task"),  # type: ignore[arg-type]
        (lambda: pipefit.fit(TASK, 4), "cluster must be a Cluster, not 4.*4x-titan-rtx"),  # type: ignore[arg-type]
        (lambda: pipefit.fit(TASK, "emulated:2x24"), "lacks a unit"),
        (lambda: plan(TASK, "emulated:2x1MiB", 4), "training must be a Training, not 4.*by name"),  # type: ignore[arg-type]
    ]
    for call, words in calls:
        with pytest.raises(UsageError, match=words):
            call()


def test_json_without_a_fit_exits_with_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    """The result has the numbers of the screen, which docs/fit.md shows."""
    line = ["fit", "zoo:mlp", "--set", "widths=(64,32,16)", "--set", "inputs=20", "--microbatches", "2", "-c"]
    assert main([*line, "emulated:2x1KiB", "--json"]) == 3
    out, err = capsys.readouterr()
    told = json.loads(out)
    found = told["result"]
    assert told["exit_code"] == 3 and told["error"] in err
    assert not found["fits"] and found["devices"][0]["largest_microbatch"]["kept"] == 0
    assert "one sample on emulated:2x1KiB does not fit: " in err


@pytest.mark.parametrize("option", ["--from 2", "--plot a.html", "-b 2", "-o p.json", "--recompute always"])
def test_options_of_a_search_need_grow(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options without an effect are refused by name."""
    assert main(["fit", "zoo:mlp", "-c", "emulated:2x1MiB", *option.split()]) == 2
    assert "needs --grow" in capsys.readouterr().err


@pytest.mark.gallery
def test_gpt2_on_a_preset_takes_seconds() -> None:
    """GPT-2 takes under 20 s on two busy cores, without importing torch."""
    began = time.process_time()
    found = pipefit.fit(build("gpt"), Cluster.preset("4x-titan-rtx"))
    assert time.process_time() - began < 20
    assert found.here.fastest is not None


def test_a_proof_does_not_count_workspace_that_larger_microbatches_may_not_need() -> None:
    """A kernel may need more inside a call for one sample than for two, so its workspace proves nothing."""
    costs, more = profile(TASK, microbatch_size=1), 1 << 20
    measured, small = costs.at(1), Cluster.emulated((1, 512 * KIB))
    kinds = tuple(
        replace(
            kind,
            forward_peak_bytes=kind.forward_peak_bytes + more,
            checkpoint_peak_bytes=kind.checkpoint_peak_bytes + more,
            forward_workspace_bytes=kind.forward_workspace_bytes + more,
            checkpoint_workspace_bytes=kind.checkpoint_workspace_bytes + more,
        )
        for kind in measured.kinds
    )
    inside = replace(costs, measurements=(replace(measured, kinds=kinds),))
    outside = [replace(kind, forward_workspace_bytes=0, checkpoint_workspace_bytes=0) for kind in kinds]
    assert not attempts.impossible(lambda _: inside, small)
    tensors = replace(inside, measurements=(replace(measured, kinds=tuple(outside)),))
    assert "needs at least" in attempts.impossible(lambda _: tensors, small)


@pytest.mark.parametrize(
    ("name", "settings", "ranks", "sequences"),
    [
        ("gpt", {"layers": 1, "hidden": 64, "heads": 4, "sequence": 128, "vocabulary": 5000}, 2, True),
        ("mlp", {"widths": (64, 256, 64, 1000)}, (2, 4), False),
    ],
)
def test_a_proof_holds_for_layers_that_ranks_divide(
    name: str, settings: dict[str, Any], ranks: Any, sequences: bool
) -> None:
    """No rank of a measured layer, or of the loss, needs less than a proof says of its part of the whole one."""
    found = profile(build(name, **settings), microbatch_size=1, tensor=ranks, sequences=sequences)
    whole, *divided = ((*one.costs, one.loss) for one in found.measurements)
    for measurement, costs in zip(found.measurements[1:], divided, strict=True):
        for one, other in zip(whole, costs, strict=True):
            assert one.least_divided_bytes // measurement.tensor <= other.least_tensor_bytes


def test_layers_are_divided_between_ranks_if_nothing_fits_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's parameters, gradients and Adam state take 65 KiB, an eighth of that 8 KiB: `fit` finds the ranks,
    and names them; 6 KiB hold neither.
    """
    _look_at_little(monkeypatch)
    wide = partial(nn.Linear, 64, 64)
    task = task_of(lambda: [wide() for _ in range(4)], inputs=64, outputs=64, optimizer=torch.optim.AdamW)
    found, none = (pipefit.fit(task, f"emulated:8x{kib}KiB", microbatches=2) for kib in (30, 6))
    assert found.fits and found.divided is not None and found.divided.need_bytes <= 30 * KIB
    assert "between 8 tensor-parallel ranks" in show.text(found) and "tensor=8)" in show.text(found)
    assert found.as_json()["divided"]["ranks"] == 8
    assert not none.fits and "and 8 tensor-parallel ranks in the same three ways" in show.text(none)
