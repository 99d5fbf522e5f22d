"""Models whose construction would never end are refused; all others are built as without pipefit."""

from __future__ import annotations

from unittest import mock

import pytest
from torch import nn
from torch.nn.modules import module as torch_module

from pipefit import profile
from pipefit.capture import task
from pipefit.cli import main
from pipefit.errors import UsageError
from support.small_tasks import task_of


@pytest.mark.parametrize(
    "model", ["zoo:gpt --set hidden=8 --set heads=1", "hf:gpt2 --set n_embd=8 --set n_head=1"]
)
def test_a_trillion_layers_are_refused_in_words(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands refuse the model too; the message says how far it was built and suggests the likely
    mistake.
    """
    if model.startswith("hf:"):
        pytest.importorskip("transformers")
    layers = "layers" if model.startswith("zoo:") else "n_layer"
    with mock.patch.object(task, "MOST_MODULES", 100):
        assert main(f"plan {model} --set {layers}=10000 -c emulated:1x1GiB --batch-size 1".split()) == 2
    assert "more than 100 modules" in capsys.readouterr().err
    if model.startswith("zoo:"):
        assert main(["plan", *model.split(), "--set", "layers=1000000000000", "-c", "emulated:1x1GiB"]) == 2
        assert "layers must be a whole number, 1 to 10,000, not 1000000000000" in capsys.readouterr().err


def test_a_model_may_have_as_many_modules_as_are_allowed() -> None:
    """A model of two layers, with one container, has three modules; afterwards the limit no longer
    applies.
    """
    with mock.patch.object(task, "MOST_MODULES", 2):
        assert (
            len(profile(task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 4)]), microbatch_size=1).layers) == 2
        )
        with pytest.raises(UsageError, match="more than 2 modules"):
            profile(task_of(lambda: [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)]), microbatch_size=1)
        assert len(nn.Sequential(*(nn.ReLU() for _ in range(9)))) == 9
    assert not torch_module._global_module_registration_hooks
