"""The benchmark of trained plans: pacing of computation, choice of caps, and reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import bench_joint_real as bench
from bench_joint_real import Result, Trained
from pipefit.errors import InfeasibleError
from pipefit.planner import PLANNERS, Question, solved
from pipefit.timing import PassSeconds, layer_seconds


@pytest.fixture(scope="module")
def asked() -> Question:
    return bench.question("mixer")


def trained(way: str, predicted: float, measured: float, peak: int = 90, certified: int = 90) -> Trained:
    return Trained(
        way=way, split=(1,), decisions=(), predicted_seconds=predicted, seconds=measured,
        quartile_seconds=(measured, measured), certified_bytes=(certified,), peak_bytes=(peak,),
    )  # fmt: skip


def result(*plans: Trained) -> Result:
    return Result(
        model="one",
        blocks=4,
        cap_bytes=90,
        lowest_split_bytes=100,
        out_of_memory="device 0 ...",
        trained=plans,
    )


def test_a_microbatch_takes_a_quarter_of_a_second(asked: Question) -> None:
    """Forward and backward of all layers take a quarter of a second; so do their saved tensors to the host
    and back.
    """
    kind = asked.cluster.devices[0].kind
    passes = sum(s.forward + s.backward for s in layer_seconds(asked.measurement, kind, asked.training))
    kept = sum(sum(cost.storages) for cost in asked.measurement.costs)
    assert passes == pytest.approx(0.25)
    assert 2 * kept / asked.cluster.links[0].bytes_per_second == pytest.approx(0.25)


@pytest.mark.gallery
def test_no_split_fits_below_the_cap(asked: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the cap the planner of proven lowest peaks finds no split, but `joint` has a plan."""
    monkeypatch.setattr(bench, "PARTS", (0.7,))
    monkeypatch.setattr(bench, "WAYS", {"joint": bench.WAYS["joint"]})
    lowest = solved(asked, PLANNERS["exact"], name="exact").prediction
    assert lowest is not None
    cap, found = bench.plans(asked, max(lowest.peak_bytes))
    joint = found["joint"].prediction
    assert joint is not None and max(joint.peak_bytes) <= cap
    with pytest.raises(InfeasibleError):
        solved(bench.capped(asked, cap), PLANNERS["exact"], name="exact")


def test_a_pass_takes_what_its_layers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes its layers' seconds, with the loss on its stage, and an update those of its run; a host
    update none.
    """

    class Runner:
        last, start, stop = True, 1, 3

        def forward(self, flight: object, first: int, end: int) -> str:
            return f"{first} to {end}"

        checkpoint = recompute = backward = forward

        def step(self, action: object) -> str:
            return "updated"

    slept = list[float]()
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))

    def lasts(call) -> float:
        slept.clear()
        call()
        return sum(slept)

    seconds = [PassSeconds(*(unit * number for number in (1, 2, 3))) for unit in (5.0, 0.01, 0.02, 0.04)]
    bench.pace(Runner, Runner, seconds)
    stage = Runner()
    update = SimpleNamespace(layers=None, place=None)
    assert stage.forward(None, 1, 2) == "1 to 2"
    for wanted, call in {
        0.01: lambda: stage.forward(None, 1, 2),
        0.07: lambda: stage.recompute(None, 1, 3),
        0.14: lambda: stage.backward(None, 1, 3),
        0.09: lambda: stage.step(update),
        0.03: lambda: stage.step(SimpleNamespace(layers=(1, 2), place=None)),
        0.0: lambda: stage.step(SimpleNamespace(layers=None, place="host")),
    }.items():
        assert lasts(call) == pytest.approx(wanted)


def test_pairs_are_in_order_if_the_faster_is_predicted_to_be() -> None:
    """Two of three plans are predicted 2 % apart, within the noise."""
    one = result(trained("joint", 1.0, 1.0), trained("mpress", 1.02, 0.9), trained("recompute", 2.0, 3.0))
    assert list(bench.ordered(one)) == [True, True]
    other = result(trained("joint", 1.0, 1.1), trained("recompute", 2.0, 1.0))
    assert list(bench.ordered(other)) == [False]
    told = bench.summary([one, other])
    assert "2 of 3 pairs of plans in the predicted order" in told
    assert "joint is 0.90 times as fast as mpress in the mean of 1" in told


def test_peaks_are_those_certified_and_below_the_cap() -> None:
    """A byte above the certified peak is reported, and so is one above the cap."""
    assert result(trained("joint", 1.0, 1.0)).as_certified
    assert not result(trained("joint", 1.0, 1.0, peak=89)).as_certified
    assert not result(trained("joint", 1.0, 1.0, peak=91, certified=91)).as_certified
    assert "PEAKS NOT AS CERTIFIED" in next(bench.told(result(trained("joint", 1.0, 1.0, peak=89))))


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Results are read as written, so that a run can resume."""
    one = result(trained("joint", 1.0, 1.0), trained("recompute", 2.0, 3.0))
    bench.written(tmp_path / "real.json", [one])
    assert bench.read(tmp_path / "real.json") == {"one": one}
