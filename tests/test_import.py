"""The Python interface: names are found, and heavy packages are imported only when needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipefit
import pipefit.schema.profile
from pipefit.schema.plan import Plan

HEAVY = ("torch", "numpy", "scipy", "rich")


def loaded_by(code: str) -> set[str]:
    """Return the heavy packages that a fresh interpreter has loaded after running `code`."""
    report = f"import sys\n{code}\nprint(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    environment = os.environ | {"PYTHONPATH": str(Path(pipefit.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", report],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env=environment,
    )
    return set(done.stderr.split())


def test_importing_pipefit_imports_nothing_heavy() -> None:
    """`import pipefit` costs no more than Python itself."""
    assert loaded_by("import pipefit") == set()


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["train", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Help needs only the parser: neither torch nor rich."""
    assert loaded_by(f"from pipefit.cli import main\nassert main({arguments}) == 0") == set()


def test_the_package_runs_as_a_module() -> None:
    """`python -m pipefit` is the command line, for a machine without the script on the path."""
    environment = os.environ | {"PYTHONPATH": str(Path(pipefit.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "pipefit", "--version"],
        capture_output=True, text=True, timeout=300, check=True, env=environment,
    )  # fmt: skip
    assert done.stdout == f"pipefit {pipefit.__version__}\n"


def test_showing_a_cluster_imports_no_torch() -> None:
    """Documents are read without torch."""
    assert "torch" not in loaded_by("from pipefit.cli import main\nassert main(['show', 'dgx1-v100']) == 0")


@pytest.mark.parametrize("name", [name for name in pipefit.__all__ if not name.startswith("__")])
def test_every_public_name_is_there(name: str) -> None:
    """Each public name is found, and is not a module of the same name, unless it is callable."""
    found = getattr(pipefit, name)
    assert callable(found)
    assert type(found) is not type(sys)


def test_a_module_does_not_replace_the_function_of_its_name() -> None:
    """No module of the package has the name of a public function, which its import would replace."""
    assert Plan is pipefit.Plan
    for function, module in (
        (pipefit.plan, "pipefit.largest.task_plans"),
        (pipefit.profile, "pipefit.profiler"),
    ):
        assert callable(function) and function.__module__ == module


def test_an_unknown_name_is_refused_as_usual() -> None:
    """A misspelt name is an AttributeError that names it."""
    with pytest.raises(AttributeError, match="has no attribute 'plann'"):
        _ = pipefit.plann
