"""Bundles: the subjects that one OFFLOAD or RELOAD moves together, in the table of a program."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.actions import Bundle, Subject
from pipefit.decisions import Decision, Run, SavedTensors, State, StateKind, What
from pipefit.plans import Plan

Bundles = tuple[tuple[Subject, ...], ...]


def bundles_of(plan: Plan) -> Bundles:
    """What moves together, for every decision that moves more than one subject."""
    moved = (subjects for decision in plan.decisions for subjects in _moved(decision))
    return tuple(dict.fromkeys(subjects for subjects in moved if len(subjects) > 1))


def subjects_of(moved: SavedTensors | State) -> tuple[Subject, ...]:
    """Saved tensors, or a state of every layer, as actions name them."""
    if isinstance(moved, SavedTensors):
        return tuple(Subject(layer, index) for layer, index in moved.tensors)
    return of_layers(moved.start, moved.stop, moved.kind)


def of_layers(start: int, stop: int, kind: StateKind) -> tuple[Subject, ...]:
    """A state of layers `start` to `stop - 1`."""
    return tuple(Subject(layer, kind) for layer in range(start, stop))


def moved_states(plan: Plan) -> list[Decision]:
    """The decisions that move parameters or gradients."""
    offloads = (decision for decision in plan.decisions if decision.what is What.OFFLOAD)
    return [d for d in offloads if isinstance(d.subject, State) and d.subject.kind in ("parameters", "gradients")]


def state_edges(plan: Plan, stage: int) -> list[int]:
    """Where parameters, gradients or versions of weights of a stage that move begin and end."""
    states = (d.subject for d in plan.decisions_of(stage, What.OFFLOAD) if isinstance(d.subject, State))
    return sorted({edge for run in states if run.kind != "optimizer" for edge in (run.start, run.stop)})


def named(subjects: tuple[Subject, ...], bundles: Bundles) -> Subject | Bundle:
    """What an action that moves these is about."""
    return subjects[0] if len(subjects) == 1 else Bundle(bundles.index(subjects))


def _moved(decision: Decision) -> Iterator[tuple[Subject, ...]]:
    """What the actions of a decision move: of an update elsewhere, gradients go and parameters come."""
    subject = decision.subject
    if isinstance(subject, Run):
        return
    if decision.what is What.UPDATE and isinstance(subject, State):
        yield of_layers(subject.start, subject.stop, "gradients")
        yield of_layers(subject.start, subject.stop, "parameters")
    else:
        yield subjects_of(subject)
