"""`pipefit models`, `pipefit clusters`, and help: users need not know names or defaults beforehand."""

from __future__ import annotations

import inspect
import json
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from pipefit.cli import app, main
from pipefit.cli.model import built_with
from pipefit.models import MODELS
from pipefit.schema.presets import card_names, machine_names, preset_text
from pipefit.units import format_bytes, parse_bytes

COMMANDS = [str(known.name) for known in app.registered_commands]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the stdout of a command."""
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


def test_every_model_of_the_zoo_is_listed_with_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """The settings are the factory's arguments, in text and in JSON, and a model can be built with all of
    them set.
    """
    text = printed(capsys, "models")
    assert "and, for each, the next one.\n" in text.replace("\n    ", " ")  # whole sentences
    found = json.loads(printed(capsys, "models", "--json"))
    for name, factory in MODELS.items():
        arguments = {item.name: item.default for item in inspect.signature(factory).parameters.values()}
        assert found[f"zoo:{name}"] == json.loads(json.dumps(arguments))
        assert f"zoo:{name}\n" in text
        assert factory(**arguments).name
    assert "hf:NAME" in text and "package.module:factory" in text


def test_one_model_tells_what_every_setting_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    """The rule of a setting has the words of its refusal."""
    found = json.loads(printed(capsys, "models", "zoo:gpt", "--json"))["zoo:gpt"]
    assert "sequence" in printed(capsys, "models", "zoo:gpt")
    assert main(["plan", "zoo:gpt", "-c", "emulated:1x1GiB", "--set", "sequence=0"]) == 2
    assert found["sequence"]["must_be"] in capsys.readouterr().err


def test_architectures_of_hugging_face_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """The names are valid for `hf:`, and an architecture's settings are its configuration's and pipefit's."""
    pytest.importorskip("transformers")
    names = json.loads(printed(capsys, "models", "hf:", "--json"))["hf"]
    assert {
        "gpt2": "causal",
        "bert": "masked",
        "t5": "seq2seq",
        "vit": "image",
        "whisper": "speech",
    }.items() <= (names.items())
    found = json.loads(printed(capsys, "models", "hf:gpt2", "--json"))["hf:gpt2"]
    assert found["n_layer"]["default"] == 12
    assert found["sequence"]["default"] == 512
    assert main(["models", "hf:gpt22"]) == 2


def test_a_model_of_ones_own_tells_its_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings are the defaults of the function; an argument without one is left out."""
    (tmp_path / "listed_model.py").write_text("def build(path, layers=3, *, width=8): ...\n")
    monkeypatch.chdir(tmp_path)
    found = json.loads(printed(capsys, "models", "listed_model:build", "--json"))["listed_model:build"]
    assert {name: item["default"] for name, item in found.items()} == {"layers": 3, "width": 8}


def test_every_cluster_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has the number of devices and the memory of its file; a card is one device; the list fits one
    screen.
    """
    text, found = printed(capsys, "clusters"), json.loads(printed(capsys, "clusters", "--json"))
    assert [*found] == [*machine_names(), *(f"1x-{name}" for name in card_names())]
    assert len(text.splitlines()) < 35 and max(map(len, text.splitlines())) <= 80
    for name in found:
        groups = tomllib.loads(preset_text(name))["devices"]
        sizes = [parse_bytes(group["memory"]) for group in groups for _ in range(group.get("count", 1))]
        assert found[name]["memory_bytes"] == sizes
        row = (
            [name, str(len(sizes))]
            if name in machine_names()
            else [f"N{name[1:]}", *format_bytes(sizes[0]).split()]
        )
        assert any(line.split()[: len(row)] == row for line in text.splitlines())


def test_settings_that_were_not_given_are_told_where_a_model_is_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All settings are printed, given values replacing defaults; JSON is unchanged."""
    line = ["plan", "zoo:mlp", "-c", "emulated:1x64MiB", "--batch-size", "2", "--set", "widths=(8, 4)"]
    text = " ".join(printed(capsys, *line).split())
    assert (
        "Built with widths=(8, 4), inputs=784, classes=10, activation=relu, dropout=0.0, optimizer=sgd"
        in text
    )
    assert "Built" not in printed(capsys, *line, "--json")


def test_a_sentence_of_settings_names_the_shape_of_an_architecture() -> None:
    """The sentence has the parts of the configuration that set the model's size, and the length of its
    samples.
    """
    pytest.importorskip("transformers")
    assert built_with("hf:gpt2", ["n_layer=3"]).startswith(
        "Built with sequence=512, attention=sdpa, optimizer=adamw"
    )
    assert "n_layer=3" in built_with("hf:gpt2", ["n_layer=3"])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_the_command_takes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The example has a separate line; all of its options and arguments exist."""
    text = printed(capsys, command, "--help")
    (example,) = (line.strip() for line in text.splitlines() if line.startswith(f"    pipefit {command}"))
    parser = get_command(app).commands[command]  # type: ignore[attr-defined]
    parser.make_context(command, shlex.split(example)[2:])


@pytest.mark.parametrize("command", ["profile", "plan", "fit", "certify", "train", "models"])
def test_help_names_the_three_forms_of_a_model(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The forms are: the zoo, Hugging Face, and a user's module."""
    text = printed(capsys, command, "--help")
    assert all(form in text for form in ("zoo:NAME", "hf:NAME", "package.module:factory"))
