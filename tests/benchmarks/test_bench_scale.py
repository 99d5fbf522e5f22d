"""The benchmark of large questions, on a small one."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

import bench_scale
from bench_scale import Row, called
from made_up import plain, profile


def test_a_row_has_what_the_plan_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a call in a process, and the table that is written of it."""
    monkeypatch.setattr(bench_scale, "build", lambda *_, **settings: settings["layers"])
    monkeypatch.setattr(bench_scale, "profile", lambda layers, **_: profile(plain(Random(0), layers + 3)))
    row = called(4, 2)
    assert (row.layers, row.devices) == (4, 2)
    assert row.seconds > 0 <= row.gap < 10
    assert 0.01 < row.gib < 100
    monkeypatch.setattr(bench_scale, "measured", lambda sizes: [row for _ in sizes])
    bench_scale.main(["4x2", "--json", str(tmp_path / "scale.json")])
    assert [Row(**one) for one in json.loads((tmp_path / "scale.json").read_text())["rows"]] == [row]
