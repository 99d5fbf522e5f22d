"""Report on a run that ran out of memory: layers and their bytes, the failed request, and alternatives that
fit.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn

from pipefit.cli import main
from pipefit.errors import OutOfMemory, UsageError
from pipefit.planner import remedies
from pipefit.report.page import page
from pipefit.report.show import describe_post_mortem
from pipefit.runtime import certify, train
from pipefit.runtime.hardware import moment
from pipefit.schema.cluster import Cluster
from pipefit.schema.json_io import load, save
from pipefit.schema.plan import Plan
from pipefit.schema.post_mortem import PostMortem, of_dry_run
from pipefit.schema.trace import MemorySample
from pipefit.simulator import simulate
from pipefit.simulator.simulation import contents_at
from pipefit.tables import Table, plain
from support.browser import Opener
from support.small_tasks import batch_of, plan_of, task_of, trainer_of

TASK = task_of(lambda: [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)])


@cache
def roomy() -> Plan:
    """Return a plan of two stages on devices with room for all."""
    return plan_of(TASK, (2, 3), size=4, microbatches=4)


def capped(nbytes: int) -> Plan:
    """Return the same plan on devices with these bytes."""
    return replace(roomy(), cluster=Cluster.emulated((2, nbytes)))


@cache
def ran_out(nbytes: int) -> PostMortem:
    """Return the remains of a step on devices with these bytes, in this process."""
    plan = capped(nbytes)
    trainer = trainer_of(TASK, (2, 3), size=4, microbatches=4, memory_bytes=nbytes, profiled=plan.profile)
    with pytest.raises(OutOfMemory) as caught:
        trainer.step(batch_of(TASK, plan))
    assert caught.value.post_mortem is not None
    return caught.value.post_mortem


def caps() -> list[int]:
    """Return memory with which the run ends at its first forwards, at a backward, and at the update."""
    highest = max(simulate(roomy()).peak_bytes)
    return [highest // 2, highest * 3 // 4, highest - 1]


@pytest.mark.parametrize("place", range(3))
def test_the_moment_is_the_one_allocation_that_did_not_fit(place: int) -> None:
    """The held bytes fit, and the failed request on top of them does not; both are whole tensors of the
    action's peak, which equals that of a run with room.
    """
    found = ran_out(caps()[place])
    assert (
        found.held_bytes
        <= found.budget_bytes
        < found.moment.total_bytes
        == found.held_bytes + found.asked_bytes
    )
    assert found.left_bytes == found.budget_bytes - found.held_bytes
    assert found.asked_bytes > 0 and found.asked_bytes % 4 == 0
    assert f"{found.lack_bytes} B" in found.sentence or "KiB over" in found.sentence
    whole = next(
        sample
        for sample in simulate(roomy()).devices[found.device].memory
        if (sample.step, sample.action) == (found.moment.step, found.moment.action)
    )
    assert whole.total_bytes >= found.moment.total_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", range(3))
def test_layers_hold_what_the_device_holds_as_the_action_begins(place: int) -> None:
    """Parameters, gradients and optimizer state of all layers equal the meter's counts at that moment."""
    found = ran_out(caps()[place])
    told = contents_at(found.plan, found.device, found.moment)
    assert told is not None
    by_name = {category.value: nbytes for category, nbytes in found.moment.by_category.items()}
    assert sum(row.parameter_bytes for row in told.layers) == by_name["parameters"]
    assert sum(row.total_bytes for row in told.layers) <= found.held_bytes
    tables = [
        block
        for block in describe_post_mortem(found)
        if isinstance(block, Table) and "layer" in block.columns
    ]
    table, tensors = tables
    assert tensors.title == "the largest activations"
    assert {row[0] for row in table.rows} >= {
        found.plan.profile.layers[row.layer] for row in told.layers if row.layer
    }


def test_a_dry_run_s_moment_is_the_first_action_that_is_over() -> None:
    """The moment is on the worst device, with all earlier actions within the device's memory; a plan that
    fits has none.
    """
    plan = capped(caps()[1])
    found = of_dry_run(plan, certify(TASK, plan))
    assert found is not None and not found.asked_bytes
    before = found.traced.memory[: found.traced.memory.index(found.moment)]
    assert (
        max((sample.total_bytes for sample in before), default=0)
        <= found.budget_bytes
        < found.moment.total_bytes
    )
    assert of_dry_run(roomy(), certify(TASK, roomy())) is None


def test_every_remedy_fits_and_is_what_it_says() -> None:
    """Each remedy is simulated within its budgets; those for the same devices come first, the fastest
    first.
    """
    found = ran_out(caps()[2])
    told = remedies(found)
    assert len(told) >= 2
    for one in told:
        peaks = simulate(replace(one.plan, prediction=None)).peak_bytes
        assert all(peak <= budget for peak, budget in zip(peaks, one.plan.cluster.budgets, strict=True))
        assert one.plan.training.batch_size == found.plan.training.batch_size
    same = [one for one in told if one.plan.cluster.devices == found.plan.cluster.devices]
    assert told[: len(same)] == same
    seconds = [simulate(one.plan).step_seconds[-1] for one in same]
    assert seconds == sorted(seconds)


def test_what_a_run_took_beyond_its_plan_is_left_free_by_remedies() -> None:
    """If the moment exceeds the plan's prediction, every remedy for the same devices leaves the difference
    free.
    """
    found = ran_out(caps()[2])
    more = list(found.moment.bytes)
    more[-1] += 3 << 20
    larger = Cluster.emulated((2, caps()[2] + (4 << 20)))
    taken = replace(
        found, plan=replace(found.plan, cluster=larger), moment=replace(found.moment, bytes=tuple(more))
    )
    for one in remedies(taken):
        assert min(one.plan.cluster.reserves) >= 3 << 20


@pytest.mark.parametrize(
    ("said", "asked"),
    [("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has", 2 << 20), ("Tried to allocate 20.00 bytes.", 20),
     ("CUBLAS_STATUS_ALLOC_FAILED", 0)],
)  # fmt: skip
def test_a_gpu_s_words_tell_what_was_asked_for(said: str, asked: int) -> None:
    """The allocator's peak excludes the failed request, so it is added; a library without a message adds
    nothing.
    """

    class Peaks:
        def end(self, step: int, seconds: float) -> MemorySample:
            return MemorySample(step=step, action="1F0", seconds=seconds, bytes=(5, 0, 0, 7, 0, 0, 0, 0, 0))

    told = moment(torch.OutOfMemoryError(said), Peaks(), 3, 0.5)  # type: ignore[arg-type]
    assert told is not None
    assert (told.asked_bytes, told.sample.total_bytes, told.sample.step) == (asked, 12 + asked, 3)


def test_a_later_failure_that_is_no_action_s_has_no_post_mortem() -> None:
    """Another error does not report the remains of an earlier step, and a step with room again trains."""
    plan = capped(caps()[0])
    trainer = trainer_of(TASK, (2, 3), size=4, microbatches=4, memory_bytes=caps()[0], profiled=plan.profile)
    for _ in range(2):
        with pytest.raises(OutOfMemory) as caught:
            trainer.step(batch_of(TASK, plan))
        assert caught.value.post_mortem is not None
    assert all(runner.record.ran_out is None for runner in trainer.runners)


def test_workers_send_it_to_their_parent() -> None:
    """The error of a training by workers has the post-mortem of the device whose worker failed first."""
    with pytest.raises(OutOfMemory) as caught:
        train(partial(_task), capped(caps()[0]), steps=1)
    found = caught.value.post_mortem
    assert (
        found is not None
        and f"device {found.device} ran out of memory at {found.moment.action}" in found.sentence
    )
    assert [device.device for device in found.trace.devices] == [found.device]


def _task() -> object:
    return TASK


def test_impossible_ones_are_refused() -> None:
    """A device outside the run, and a request above the held bytes, are refused."""
    found = ran_out(caps()[0])
    with pytest.raises(UsageError, match="device 7 is not part of this run"):
        replace(found, device=7)
    with pytest.raises(UsageError, match="the failed allocation of"):
        replace(found, asked_bytes=found.moment.total_bytes + 1)


def test_its_page_and_its_text_say_what_was_asked_for_and_what_would_fit() -> None:
    """Both have the head, the categories, the layers and the remedies; the page draws the run and the
    plan.
    """
    found = ran_out(caps()[0])
    made, text = page(found), plain(describe_post_mortem(found))
    for words in (
        "Memory by category",
        "Largest layers",
        "Plans that would have fitted",
        "ran out of memory",
    ):
        assert words in made
    assert found.head in text and "what would fit" in text
    assert not re.search(r"(?:src|href)\s*=|https?:", made)


def test_a_command_that_runs_out_leaves_it_beside_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence has the command that makes the page, which then works; --post-mortem names the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_model.py").write_text("from test_post_mortem import TASK\n\ndef build(): return TASK\n")
    monkeypatch.setattr("pipefit.cli.certify.resolve", lambda *_: TASK)
    save(capped(caps()[0]), "plan.json")
    assert main(["certify", "plan.json", "own_model:build"]) == 4
    assert "pipefit report plan.out-of-memory.json" in capsys.readouterr().err
    assert load("plan.out-of-memory.json", PostMortem).moment.action
    assert main(["report", "plan.out-of-memory.json"]) == 0
    assert "ran out of memory" in Path("plan.out-of-memory.html").read_text(encoding="utf-8")
    assert main(["report", "plan.out-of-memory.json", "plan.json"]) == 2
    assert main(["certify", "plan.json", "own_model:build", "--post-mortem", "died.json", "--json"]) == 4
    assert Path("died.json").exists()


def test_a_page_shows_the_device_that_ran_out_whichever_it_is(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shows the device at first, after a click on its bar, and in the other trace, which has more
    devices; for a run with all devices and for one with only that device's trace, though another one is
    fuller.
    """
    for section in ("describe_remedies", "lesson"):  # which take seconds
        monkeypatch.setattr(f"pipefit.report.page.{section}", lambda _: "")
    found = ran_out(caps()[2])
    other = replace(found, device=1 - found.device, asked_bytes=0)
    for died in (found, other, replace(other, trace=replace(found.trace, devices=(other.traced,)))):
        at = opened(page(died))
        pressed, *seen = at.evaluate("""() => {
          const find = (id) => document.getElementById(id), bars = [...document.querySelectorAll(".device")];
          const seen = [], see = () => seen.push(find("device").value);
          const click = () => bars.forEach((bar) => bar.click());
          see(); click(); see();
          find("source").value = 1;
          find("source").dispatchEvent(new Event("change"));
          see(); click(); see();
          return [bars.every((bar) => bar.ariaPressed === "true"), ...seen];
        }""")
        assert pressed and seen == [str(died.device)] * 4 and at.complaints == []
