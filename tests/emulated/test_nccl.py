"""The emulated NCCL has the behaviour that pipefit's messages rely on, and pipefit trains over it. Skipped
without it.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from pipefit.lowering import whole_run
from pipefit.memory.arenas import communicators
from pipefit.runtime import train
from pipefit.schema.plan import Plan
from support.emulated_nccl import Library, Lines, Operation, Player, Reads
from support.message_oracle import LineOf, Start, by_direction, by_pair, outcome
from support.resumable_grids import plan_of_grids
from support.sharded_stages import divided
from test_message_order import lowered, shuffled

EMULATED = torch.cuda.is_available() and torch.cuda.get_device_name(0).startswith("Emulated")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not EMULATED, reason="needs the emulated CUDA (make cuda)")]
FOLDER = Path(torch.__file__).parents[1]
WORD = re.compile(r"(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|REDUCE|AGREE)(\d*)(.*)")


def test_collectives_and_orders_by_itself() -> None:
    """Sums equal plain loops; programs that must end do, programs that must hang hang, and mismatches are
    named.
    """
    found = subprocess.run([FOLDER / "check_nccl"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def reader(lines: Lines, placement: tuple[int, ...], line_of: LineOf) -> Reads:
    """Return the oracle's reading of a program in which every stage has a separate device."""

    def read(device: int, word: str) -> Operation | None:
        matched = WORD.fullmatch(word)
        if matched is None:
            return None
        stage, name, microbatch, subject = matched.groups()
        start = Start(device, int(stage), name, microbatch, subject)
        if start.is_sum:
            own = tuple(n for n, words in enumerate(lines) if f"{n}{name}{subject}" in words)
            return Operation(("sum", own), own, None, start.content)
        ends = tuple(sorted((placement[start.stage], placement[start.other])))
        return Operation(line_of(start, placement), ends, start.sends, start.content)

    return read


@pytest.mark.parametrize("seed", range(2))
def test_random_programs_end_where_the_oracle_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a communicator for each direction or for each pair, programs end, hang or mix up data as the
    oracle predicts.
    """
    monkeypatch.setenv("EMULATED_NCCL_CONNECT", "0")  # the host that plays all devices cannot wait for itself
    rng, player, seen = Random(seed), Player(Library(FOLDER / "nvidia/cu13/lib")), Counter[str]()
    for _ in range(20):
        stages, line_of = rng.randint(2, 4), rng.choice([by_direction, by_pair])
        program = lowered(rng.choice(["gpipe", "1f1b"]), stages, rng.randint(1, 4))
        placement, lines = shuffled(program, rng, moves=rng.randrange(7), devices=stages)
        expected = outcome(lines, placement, line_of)

        assert player.outcome(lines, reader(lines, placement, line_of)) == expected, (expected, lines)
        seen[expected] += 1
    assert seen["ends"] and seen["hangs"]


def over_nccl(plan: Plan) -> Plan:
    """Return the same plan for GPUs."""
    return replace(plan, cluster=replace(plan.cluster, backend="cuda"))


@pytest.mark.parametrize("grids", ["replicas", "ZeRO 3", "shards", "pipedream", "pipedream, ZeRO 2"])
def test_workers_train_over_nccl_as_over_gloo(
    grids: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The losses are the same, with at most the planned number of communicators on each device."""
    monkeypatch.setenv("EMULATED_NCCL_DEADLINE", "120")
    monkeypatch.setenv("EMULATED_NCCL_TELL", "1")
    plan, make = plan_of_grids("still", grids), partial(divided, "still")
    losses, _ = train(make, over_nccl(plan), steps=3, cap=False)
    made = re.findall(r"process (\d+) makes", capfd.readouterr().err)
    assert losses == pytest.approx(train(make, plan, steps=3)[0], rel=1e-12)
    counted = [communicators(plan, whole_run(plan), device) for device in plan.workers]
    assert sorted(Counter(made).values()) == sorted(counted)
