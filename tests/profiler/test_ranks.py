"""Profiles of layers on tensor-parallel ranks, against closed forms of a GPT block, and refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.cli import main
from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.planner import plan as planned
from pipefit.profiler import profile
from pipefit.profiler.on_demand import OnDemand
from pipefit.report.show import describe
from pipefit.runtime import certify
from pipefit.schema.json_io import load, load_cluster
from pipefit.schema.layer_costs import Collective
from pipefit.schema.profile import Measurement, ModelProfile
from pipefit.tensor_parallel import ShardedChain, shard_chain

BATCH, SEQUENCE, HIDDEN, HEADS, WORDS, FLOAT = 2, 16, 64, 8, 50, 4
VALUE = FLOAT * BATCH * SEQUENCE * HIDDEN


@cache
def gpt() -> ModelProfile:
    """Profile a GPT with two blocks, whole and for two and four tensor-parallel ranks."""
    task = build(
        "gpt", layers=2, hidden=HIDDEN, heads=HEADS, vocabulary=WORDS, sequence=SEQUENCE, dropout=0.0
    )
    return profile(task, microbatch_size=BATCH, tensor=(4, 2, 1), sequences=True)


def block(measurement: Measurement) -> range:
    """Return the layers of the first block of GPT."""
    start, stop = gpt().edges[1:3]
    return range(start, stop)


def test_layers_are_measured_whole_and_divided() -> None:
    """Degrees are profiled in the requested order, after the whole layers, which are always included."""
    assert [(m.tensor, m.sequences) for m in gpt().measurements] == [
        *[(n, False) for n in (1, 4, 2)],
        (4, True),
        (2, True),
    ]
    assert [gpt().at(BATCH, ranks).tensor for ranks in (1, 2, 4)] == [1, 2, 4]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_has_its_share_of_a_block(ranks: int) -> None:
    """Matrices, their gradients and Adam's state are divided; norms and biases after a sum are not."""
    measured = gpt().at(BATCH, ranks)
    costs = [measured.costs[number] for number in block(measured)]
    divided, whole = 12 * HIDDEN**2 + 7 * HIDDEN, 6 * HIDDEN
    assert sum(cost.parameter_bytes for cost in costs) == FLOAT * (divided // ranks + whole)
    assert sum(cost.gradient_bytes for cost in costs) == FLOAT * (divided // ranks + whole)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_block_sums_twice_in_each_direction(ranks: int) -> None:
    """Sums follow attention and MLP forwards and precede them backwards, as in Megatron-LM."""
    measured = gpt().at(BATCH, ranks)
    costs = [measured.costs[number] for number in block(measured)]
    sums = [Collective("all_reduce", VALUE)] * 2
    assert [each for cost in costs for each in cost.forward.collectives] == sums
    assert [each for cost in costs for each in cost.backward.collectives] == sums
    assert not any(cost.forward.collectives or cost.backward.collectives for cost in gpt().at(BATCH).costs)


@pytest.mark.parametrize("ranks", [2, 4])
def test_by_positions_a_block_keeps_two_values_whole(ranks: int) -> None:
    """With sequence parallelism norms and residuals are divided, and each sum becomes a reduce-scatter.
    Values between blocks are whole, which takes one gather of the value, and one of its gradient, more than
    in Megatron-LM.
    """
    plain, along = (gpt().at(BATCH, ranks, sequences=sequences) for sequences in (False, True))
    saved = [
        sum(s.nbytes for n in block(m) for s in m.costs[n].saved if s.origin.kind == "own")
        for m in (plain, along)
    ]
    tokens = BATCH * SEQUENCE
    whole = 2 * (
        VALUE + 2 * FLOAT * tokens
    )  # the norms: an input each, and a mean and a deviation of each token
    kept = (
        saved[0] + VALUE,
        saved[1],
    )  # plain ranks also keep the whole input of the block, shared with the block before
    assert kept[0] - kept[1] == whole - whole // ranks
    costs = [along.costs[number] for number in block(along)]
    large = [
        Counter(one.kind for cost in costs for one in getattr(cost, phase).collectives if one.nbytes == VALUE)
        for phase in ("forward", "backward")
    ]
    assert large == [{"all_gather": 3, "reduce_scatter": 2}] * 2


def test_blocks_exchange_what_whole_ones_do() -> None:
    """Blocks exchange whole values, so stages of any degree may be neighbours."""
    whole, *divided = gpt().measurements
    for edge in gpt().edges[:-1]:
        assert all(one.costs[edge].inputs == whole.costs[edge].inputs for one in divided)


def test_equal_blocks_of_a_rank_are_measured_once() -> None:
    """Two blocks have the same keys and are measured once."""
    for measured in gpt().measurements:
        first, second, third = gpt().edges[1:4]
        assert measured.layers[first:second] == measured.layers[second:third]


def test_a_shared_parameter_is_the_rank_s() -> None:
    """A tied embedding is divided on both layers, and its bytes are the rank's."""
    task = build("gpt", layers=1, hidden=HIDDEN, heads=HEADS, vocabulary=800, sequence=SEQUENCE, tied=True)
    whole, divided = profile(task, microbatch_size=1, tensor=2).measurements
    (one,), (other,) = whole.shared, divided.shared
    assert (one.name, one.users) == (other.name, other.users)
    assert one.nbytes == 2 * other.nbytes == 800 * HIDDEN * FLOAT
    assert one.form == "" != other.form


def odd() -> Task:
    """Build layers with features that three ranks cannot share."""
    return Task(
        nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)),
        batch=lambda size: (torch.randn(size, 8), torch.randn(size, 8)),
        loss=F.mse_loss,
        name="odd",
    )


def test_ranks_that_divide_nothing_are_refused() -> None:
    """The error has the divided share and the reason."""
    with pytest.raises(
        UsageError, match=r"5 tensor-parallel ranks cannot shard odd: 0 % of .* cannot be split into 5 parts"
    ):
        profile(odd(), microbatch_size=4, tensor=5)


class Looking(nn.Module):
    """A layer whose forward branches on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_layer_that_cannot_be_traced_is_named() -> None:
    """A hand-written chain may have untraceable layers; tensor-parallel ranks cannot divide it."""
    task = replace(odd(), module=nn.Sequential(nn.Linear(8, 16), Looking(), nn.Linear(16, 8)))
    assert profile(task, microbatch_size=4)
    with pytest.raises(
        UsageError, match=r"layer 1 cannot be sharded over tensor-parallel ranks, .* use only replicas"
    ):
        profile(task, microbatch_size=4, tensor=2)


SETTINGS = ("layers=1", "hidden=64", "heads=4", "vocabulary=50", "sequence=16")
SMALL = ["zoo:gpt", *(word for setting in SETTINGS for word in ("--set", setting))]


@pytest.mark.gallery
def test_the_command_profiles_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--tensor` may be given several times; the saved profile has all degrees, and `--sequences` adds
    sequence-parallel ones; a plan takes the requested ones.
    """
    path = tmp_path / "profile.json"
    degrees = ["--tensor", "2", "--tensor", "4", "--sequences"]
    assert main(["profile", *SMALL, "-b", "2", *degrees, "-o", str(path)]) == 0
    assert [m.tensor for m in load(path, ModelProfile).measurements] == [1, 2, 4, 2, 4]
    assert main(["show", str(path)]) == 0
    told = capsys.readouterr().out
    assert (
        "4 tensor-parallel ranks shard" in told
        and "on one of 4 tensor-parallel ranks with sequence parallelism" in told
    )
    asked = ["plan", str(path), "-c", "emulated:2x64MiB", "--tensor", "2", "--batch-size", "4"]
    for which, expected in (("--sequences", True), ("--no-sequences", False)):
        assert main([*asked, which]) == 0
        assert ("with sequence parallelism" in capsys.readouterr().out) == expected


@pytest.mark.parametrize("wrong", [0, "2", (2, 1.5)])
def test_numbers_of_ranks_are_whole(wrong: object) -> None:
    """Numbers of ranks are at least one."""
    with pytest.raises(UsageError, match="tensor must be a whole number of at least 1"):
        profile(odd(), microbatch_size=4, tensor=wrong)  # type: ignore[arg-type]


def test_a_degree_that_was_not_profiled_is_refused() -> None:
    """The error lists the profiled degrees and the flag for another."""
    with pytest.raises(
        UsageError, match=r"for whole layers and layers sharded over 2 and 4 ranks, not .* --tensor 8"
    ):
        gpt().at(BATCH, 8)


def test_seconds_of_a_rank_are_measured() -> None:
    """Every pass of a rank's layers is timed, without its peers."""
    found = profile(odd(), microbatch_size=4, tensor=2, device="cpu").at(4, 2)
    assert not found.estimated


def test_profiles_of_ranks_are_made_on_demand() -> None:
    """Each size and set of degrees is profiled once."""
    at = OnDemand(odd())
    assert at(4, (2,)) is at(4, (1, 2))
    assert [m.tensor for m in at(4, (2,)).measurements] == [1, 2]
    assert [m.tensor for m in at(4).measurements] == [1]


def test_a_printed_profile_says_what_is_divided() -> None:
    """The printed profile has the divided share of bytes and operations, and the table's degree."""
    text = "\n".join(map(str, describe(gpt())))
    assert "2 tensor-parallel ranks shard 9" in text
    assert "on one of 4 tensor-parallel ranks" in text


class Offset(nn.Module):
    """Two linear layers that ranks divide, and a tensor in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.offset = torch.ones(8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the layers' output plus the tensor."""
        result: torch.Tensor = self.layers(values) + self.offset
        return result


WEIGHTS = torch.ones(8)


@pytest.mark.parametrize(
    ("loss", "again"),
    [(F.mse_loss, 0), (lambda outputs, targets: (WEIGHTS * (outputs - targets)).square().mean(), 1)],
)
def test_dry_runs_take_the_division_of_a_profile(
    loss: Any, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the chains of a profile, a chain is not divided again, unless its loss holds tensors; peaks are equal."""
    task = Task(Offset, batch=lambda size: (torch.randn(size, 8), torch.randn(size, 8)), loss=loss)
    known = OnDemand(task, target="cuda", sizes=(1,))
    made = planned(known(1, [2]), load_cluster("2x-rtx-3090"), microbatches=2, tensor=2, stages=1)
    calls = list[object]()

    def counted(*given: Any, **options: Any) -> ShardedChain:
        calls.append(given)
        return shard_chain(*given, **options)

    monkeypatch.setattr("pipefit.runtime.dry_run.certify.shard_chain", counted)
    trace = certify(task, made, chains=known.chains)
    assert len(calls) == again and trace == certify(task, made) and len(calls) == again + 1
