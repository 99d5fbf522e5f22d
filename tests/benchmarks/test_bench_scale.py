"""The benchmark of large questions, on a small one."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

import bench_scale
from bench_scale import Row, called, differing
from pipefit import models
from pipefit.profiler import profile as profiled
from support.synthetic_models import plain, profile


def test_a_row_has_what_the_plan_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row has the figures of a call in a process, and so does the written table."""
    monkeypatch.setattr(bench_scale, "build", lambda *_, **settings: settings["layers"])
    monkeypatch.setattr(bench_scale, "profile", lambda layers, **_: profile(plain(Random(0), layers + 3)))
    row = called(4, 2)
    assert (row.layers, row.devices) == (4, 2)
    assert row.seconds > 0 <= row.gap < 10
    assert 0.01 < row.gib < 100
    monkeypatch.setattr(bench_scale, "measured", lambda sizes, **_: [row for _ in sizes])
    bench_scale.main(["4x2", "--json", str(tmp_path / "scale.json")])
    assert [Row(**one) for one in json.loads((tmp_path / "scale.json").read_text())["rows"]] == [row]


def test_layers_that_differ_are_of_as_many_kinds() -> None:
    """Each layer has different work and peak, at every size; saved bytes are unchanged."""
    same = profiled(
        models.build("gpt", layers=4, hidden=8, heads=1, sequence=4), microbatch_size=[1, 2], target="cuda"
    )
    assert len(same.measurements[0].kinds) < len(same.layers)
    for before, after in zip(same.measurements, differing(same).measurements, strict=True):
        assert len(after.kinds) == len(after.layers)
        assert [one.saved for one in after.costs] == [one.saved for one in before.costs]
        both = zip(before.costs, after.costs, strict=True)
        parts = {b.forward.flops / a.forward.flops for a, b in both if a.forward.flops}
        assert len(parts) > 4
        assert all(0.4 < part < 1.6 for part in parts)
