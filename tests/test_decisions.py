"""Meaningless decisions are refused at construction."""

from __future__ import annotations

from typing import Any

import pytest

from pipefit.errors import UsageError
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, State, What
from pipefit.schema.devices import parse_place

RECOMPUTED: dict[str, Any] = {"stage": 0, "subject": Run(start=0, stop=2), "what": What.RECOMPUTE}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Run(start=3, stop=3), "a run holds at least one layer, not layers 3 to 2"),
        (lambda: Run(start=-1, stop=2), "a run holds at least one layer, not layers -1 to 1"),
        (
            lambda: State(start=3, stop=3, kind="gradients"),
            "a state is of at least one layer, not layers 3 to 2",
        ),
        (lambda: SavedTensors(tensors=()), "a decision about saved tensors must name at least one"),
    ],
)
def test_a_subject_without_layers_or_tensors_is_refused(make: Any, message: str) -> None:
    """Recomputing or offloading zero layers or tensors is refused."""
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ahead": -1}, "ahead and behind are numbers of actions, zero or more, not -1 and 1"),
        ({"behind": -2}, "ahead and behind are numbers of actions, zero or more, not 0 and -2"),
        ({"microbatches": Microbatches(taken=3, every=2)}, "it applies to 3 of every 2 microbatches"),
        ({"microbatches": Microbatches(taken=0)}, "it applies to 0 of every 1 microbatches"),
        ({"what": What.OFFLOAD, "place": parse_place("host")}, "runs of layers can be recomputed"),
        ({"place": parse_place("host")}, "recomputation does not take one"),
    ],
)
def test_a_decision_that_cannot_be_carried_out_is_refused(given: dict[str, Any], message: str) -> None:
    """The message begins with the decision and contains the given numbers."""
    with pytest.raises(UsageError, match=message) as refused:
        Decision(**{**RECOMPUTED, **given})
    assert str(refused.value).startswith("stage 0: ")
