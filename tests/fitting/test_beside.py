"""Planning and overviews with a second process: the same answers, with most of the work done there."""

from __future__ import annotations

import sys

import pytest

from support.separate_process import printed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has forks of this kind")

# In a separate process, because one that has run a backward can no longer fork.
_PROGRAM = """
import os
import pickle
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pipefit
import torch
from pipefit.processes import forking
from pipefit.fake_cuda import chain as sizes
from pipefit.fake_cuda.target import FakeTarget
from pipefit.largest import task_plans as reserving
from pipefit.largest.overview import fit
from pipefit.largest.task_plans import certify
from pipefit.profiler import fake
from fake.test_sizes import asking

GPUS = pipefit.Cluster.preset("4x-titan-rtx")
FakeTarget("cuda")  # autograd counts devices, before torch.export of torch 2.14 adds eight
torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))  # imports for all forks at once


def here(how, ask):
    "What is answered, and how often a model is traced, surveyed and run dry in this process."
    with (
        how,
        mock.patch.object(sizes, "fake_chain", wraps=sizes.fake_chain) as traced,
        mock.patch.object(fake, "survey", wraps=fake.survey) as surveyed,
        mock.patch.object(reserving, "certify", wraps=certify) as dry,
    ):
        return ask(), traced.call_count, surveyed.call_count, dry.call_count


def planned(task):
    made = pipefit.plan(task, GPUS, batch_size=8, data=2)
    return replace(made, provenance=replace(made.provenance, seconds=0.0))


ASKED = {
    "planned": lambda: planned(asking(lambda _: False)),
    "odd": lambda: planned(asking(lambda samples: 1 < samples < 8)),
    "looked": lambda: fit(asking(lambda _: False), GPUS).as_json(),
    "refused": lambda: fit(asking(lambda samples: 1 / 0), GPUS),
}
def answer(how, ask):
    try:
        return here(how, ask)
    except Exception as error:
        return str(error), 0


def forked(ask, file):
    "The answer of a process that is forked here, and forks."
    process = os.fork()
    if not process:
        file.write_bytes(pickle.dumps(answer(forking(), ask)))
        os._exit(0)
    os.waitpid(process, 0)
    return pickle.loads(file.read_bytes())


with mock.patch("os.sched_getaffinity", lambda _: {0, 1}), tempfile.TemporaryDirectory() as folder:
    asked = {name: ASKED[name] for name in sys.argv[1:]}
    found = {name: forked(ask, Path(folder, name)) for name, ask in asked.items()}
    for name, ask in asked.items():
        alone = answer(nullcontext(), ask)
        assert alone[0] == found[name][0], (name, alone[0], found[name][0])
        print(name, *found[name][1:], *alone[1:])
    if "planned" in asked:  # torch refuses backwards in a fork from now on
        assert answer(forking(), asked["planned"])[0] == found["planned"][0]
"""


# traces, surveys and dry runs in this process, with and without the second one
COUNTS = {
    "planned": (1, 1, 1, 3, 4, 1),
    "looked": (1, 3, 0, 4, 6, 0),
    "odd": (4, 5, 2, 4, 8, 2),
    "refused": (0, 0),
}


@pytest.mark.parametrize(
    "asked",
    [
        ["planned", "refused"],
        *(pytest.param([name], marks=pytest.mark.gallery) for name in ("looked", "odd")),
    ],
)
def test_answers_are_those_of_one_process(asked: list[str]) -> None:
    """A plan, an overview, a refusal, and a plan of a model that differs at a used size are those of one
    process.
    """
    lines = printed(_PROGRAM, *asked)
    counts = {name: tuple(map(int, numbers)) for name, *numbers in map(str.split, lines)}
    assert counts == {name: COUNTS[name] for name in asked}
