"""A small budget of the fuzzer: `make fuzz` has a long one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipefit.cli import main
from pipefit.errors import UsageError
from pipefit.schema.devices import DeviceKind
from pipefit.schema.presets import preset_text
from pipefit.schema.validation import DTYPES
from support.fuzz import documents, fuzz, fuzz_processes, wrong


def test_mutated_documents_and_lines_are_refused_or_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ends in a sentence and an exit code of ours, in time, without unrequested files and without
    running code.
    """
    monkeypatch.chdir(tmp_path)
    assert fuzz(tmp_path, files=20, command_lines=20, seed=0) == []


def test_made_up_lines_end_in_a_sentence_as_processes_too(tmp_path: Path) -> None:
    """Each ends with an exit code of ours and without a traceback, also at interpreter exit; the documents
    are unchanged.
    """
    documents(tmp_path)
    assert fuzz_processes(tmp_path, command_lines=3, seed=1) == []


def test_what_the_fuzzer_found_stays_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A non-text manifest, a trace with an invalid action, programs with a stage on no device and with starts
    carried over on one device of two, and a key with a zero byte, which suggests UTF-16: each is refused in a
    sentence.
    """
    monkeypatch.chdir(tmp_path)
    documents(tmp_path)
    manifest = tmp_path / "checkpoints" / "step-00000004" / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:8] + b"\xff" + content[9:])
    assert main(["checkpoint", "checkpoints"]) == 6
    assert "manifest.json is not text: byte 8 is not UTF-8" in capsys.readouterr().err
    trace = json.loads(Path("trace.json").read_text())
    trace["devices"][0]["events"][0]["action"] = "1e9LOAD3"
    Path("trace.json").write_text(json.dumps(trace))
    assert main(["report", "trace.json", "-o", "page.html"]) == 6
    assert "'1e9LOAD3' is not an action" in capsys.readouterr().err
    program = json.loads(Path("program.json").read_text())
    for change, words in (
        ({"placement": [program["placement"][0], []]}, "stage 1 is not on any device"),
        (
            {"lines": [*program["lines"], "carried in 0:"]},
            "starts are carried over on 1 device, but the program has 2",
        ),
    ):
        Path("program.json").write_text(json.dumps(program | change))
        assert main(["show", "program.json"]) == 6
        assert words in capsys.readouterr().err
    for text in ('{"\0": 1}', '{"pipefit": "\0"}', '{"pipefit": "plan", "version": 2, "\0": 0}'):
        Path("plan.json").write_text(text)
        assert main(["show", "plan.json"]) == 6
        assert capsys.readouterr().err.startswith("pipefit: plan.json is ")


def test_every_dtype_of_torch_is_one_in_documents() -> None:
    """Documents accept exactly torch's dtypes."""
    assert {
        str(one).removeprefix("torch.") for one in vars(torch).values() if isinstance(one, torch.dtype)
    } <= DTYPES


def dtypes_in(data: Any) -> Iterator[dict[str, Any]]:
    """Return all parts of a document that name a dtype."""
    if isinstance(data, dict) and "dtype" in data:
        yield data
    for part in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from dtypes_in(part)


@pytest.mark.parametrize("name", ["plan", "profile"])
def test_a_document_with_an_unknown_dtype_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that reads the document refuses it, before looking up a name of torch."""
    monkeypatch.chdir(tmp_path)
    documents(tmp_path)
    path = tmp_path / f"{name}.json"
    data = json.loads(path.read_text())
    kinds = {tuple(part): part for part in dtypes_in(data)}
    assert {
        "saved" if "origin" in kind else "parameter" if "trainable" in kind else "value" for kind in kinds
    } == {
        "saved",
        "parameter",
        "value",
    }
    for number, part in enumerate(kinds.values()):
        before, part["dtype"] = part["dtype"], ("/etc/passwd", "nn", "bfloat")[number]
        path.write_text(json.dumps(data))
        part["dtype"] = before
        for words in (["show", path.name], ["certify", path.name, "zoo:mlp"]):
            assert main(words if name == "plan" else ["show", path.name]) == 6
            told = capsys.readouterr().err
            assert (
                told.startswith(f"pipefit: {path.name} is not valid: ") and "is not a dtype of torch" in told
            )


def test_a_rate_for_no_dtype_of_torch_is_refused() -> None:
    """Without the refusal, products of that dtype would be timed at the rate of float32."""
    with pytest.raises(UsageError, match="'bf16' is not a dtype of torch"):
        DeviceKind(name="one", flops={"float32": 1e12, "bf16": 2e12}, memory_bandwidth=1e9)


def test_a_folder_that_was_asked_for_is_no_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a suffix makes `checkpoint` create a folder; it is removed before the next line."""
    monkeypatch.chdir(tmp_path)
    documents(tmp_path)
    before = set(tmp_path.rglob("*"))
    assert wrong(["checkpoint", "checkpoints", "-o", "--output"], tmp_path) == ""
    assert set(tmp_path.rglob("*")) == before


def test_no_word_of_a_document_rewrites_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cluster of GPUs whose name is a control sequence is printed safely, also in the sentence next to the
    plan.
    """
    monkeypatch.chdir(tmp_path)
    documents(tmp_path)
    text = preset_text("1x-titan-rtx")
    Path("given.toml").write_text(text.replace('name = "1x-titan-rtx"', r'name = "\u001b[2J"'))
    assert main(["plan", "profile.json", "--cluster", "given.toml", "--planner", "uniform"]) == 0
    out, err = capsys.readouterr()
    assert "than those of \ufffd[2J: profile again with --target cuda" in err
    assert "\x1b" not in out + err
