"""MODEL on the command line: from the zoo or from a user's module, with settings."""

from __future__ import annotations

import ast
import pickle
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.cli.model import parse_settings, resolve
from pipefit.errors import UsageError

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner),
    max_leaves=5,
)


@given(LITERALS)
def test_a_setting_is_the_literal_that_it_looks_like(value: object) -> None:
    """Any Python literal arrives as that value."""
    assert parse_settings([f"name={value!r}"]) == {"name": value}


@given(st.text())
def test_any_text_is_a_setting(text: str) -> None:
    """Other text arrives as text, without being executed and without a warning."""
    found = parse_settings([f"name={text}"])["name"]
    assert found == text.strip() or found == ast.literal_eval(text.strip())


@pytest.mark.parametrize(
    "text", ["adamw", "1__0", "0x", "1if", "[" * 5000, "__import__('os')", "true", "a=b"]
)
def test_what_is_nearly_a_literal_stays_text(text: str) -> None:
    """Words, broken numbers, deep nesting and calls arrive as text."""
    assert parse_settings([f"name={text}"]) == {"name": text}


def test_the_zoo_gets_the_settings() -> None:
    """`zoo:mlp --set widths=(4,3)` is a perceptron of these widths."""
    task = resolve("zoo:mlp", ["widths=(4,3)", "inputs=5"])
    assert [tuple(p.shape) for p in task.build().parameters()][::2] == [(4, 5), (3, 4), (10, 3)]


def test_a_factory_of_ones_own_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`package.module:factory` is imported from the current folder, and its settings are passed by name."""
    package = tmp_path / "ownpackage"
    package.mkdir()
    (package / "inner.py").write_text(
        "from pipefit import models as zoo\n"
        "class Models:\n"
        "    make = staticmethod(lambda width: zoo.build('mlp', widths=(width,)))\n"
    )
    monkeypatch.chdir(tmp_path)
    task = resolve("ownpackage.inner:Models.make", ["width=7"])
    assert next(task.build().parameters()).shape[0] == 7


def test_a_module_in_the_place_of_a_factory_is_told_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of a model lacks batches, loss and optimizer; a training function is not a factory,
    either.
    """
    (tmp_path / "ownscript.py").write_text(
        "from torch import nn\nclass Net(nn.Linear): ...\ndef main():\n    raise RuntimeError('no GPU')\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"Net is a module.* returns pipefit\.Task\(Net, batch=\.\.\., loss"):
        resolve("ownscript:Net", [])
    with pytest.raises(UsageError, match=r"no GPU.*it should only return a pipefit\.Task"):
        resolve("ownscript:main", [])


def test_a_model_can_be_sent_to_a_worker() -> None:
    """Workers receive the words of the command line, not the model."""
    again = pickle.loads(pickle.dumps(partial(resolve, "zoo:mlp", ["widths=(4,3)"])))
    assert again().name == "mlp"
