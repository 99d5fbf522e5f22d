"""Moving saved tensors away and back: what OFFLOAD, RELOAD and their joins do to the residency of a microbatch.

A tensor is named by its layer and its number there, and its whole storage is moved, whatever else lives in it. The
holders of the storage stay; only where its bytes are changes.
"""

from __future__ import annotations

from pipefit.actions import Kind, Subject
from pipefit.cost.residency import Away, Whereabouts
from pipefit.cost.transition import Answer, Transition
from pipefit.errors import UsageError


def offload(transition: Transition) -> Answer:
    """Start copying saved tensors away; nothing is freed yet."""
    for subject, instance in _subjects(transition):
        saver = transition.holders.saved(subject.layer - transition.storages.start)
        if not transition.working.held.get(instance, 0) & saver:
            transition.refuse(
                f"moves what is not there: it belongs between forward and backward of layer {subject.layer}"
            )
        if instance in transition.residency.away:
            transition.refuse(f"moves a storage that is {transition.residency.away[instance].state} already")
        transition.working.away[instance] = Away(Whereabouts.LEAVING, transition.action.place)
    return transition.left()[0], None


def offloaded(transition: Transition) -> Answer:
    """The copies have arrived: the bytes here are freed."""
    for _, instance in _subjects(transition):
        holders = transition.working.held[instance]
        if holders & (transition.holders.value | transition.holders.target):
            transition.refuse(
                f"frees what the forward of layer {transition.layer(transition.residency.at)} still reads"
            )
        if holders & transition.holders.sending:
            transition.refuse(
                f"frees what is still being sent: {transition.waits_for(Kind.SEND_FORWARD)} must come before it"
            )
        transition.working.away[instance] = Away(Whereabouts.AWAY, transition.action.place)
    return transition.left()


def reload(transition: Transition) -> Answer:
    """Start copying saved tensors back, into memory that is allocated now."""
    for _, instance in _subjects(transition):
        found = transition.residency.away.get(instance, Away(Whereabouts.HERE, None))
        if found != Away(Whereabouts.AWAY, transition.action.place):
            where = "" if found.place is None else f" (@{found.place})"
            transition.refuse(f"brings back a storage that is {found.state}{where}")
        transition.working.away[instance] = Away(Whereabouts.RETURNING, transition.action.place)
    return transition.left()


def reloaded(transition: Transition) -> Answer:
    """The tensors are back."""
    for _, instance in _subjects(transition):
        del transition.working.away[instance]
    return transition.left()[0], None


def _subjects(transition: Transition) -> list[tuple[Subject, int]]:
    """The saved tensors that the action moves, with the instance of the storage of each.

    Raises:
        UsageError: it moves something else, a tensor that the stage does not keep, or one storage twice.
    """
    if transition.action.place is None:
        transition.refuse("does not say where: write @host, @device3 or, in shares, @device3*2+device4*1")
    found: dict[int, Subject] = {}
    for subject in transition.moved:
        if not isinstance(subject.what, int):
            transition.refuse("moves something else: only saved tensors move, such as [5.3]")
        try:
            number = transition.storages.storage(subject)
        except UsageError:
            transition.refuse(f"names a tensor that stage {transition.action.stage} does not keep")
        if number in found:
            transition.refuse(f"moves one storage by two names, {found[number]} and {subject}")
        found[number] = subject
    return [(subject, _instance(transition, number, subject)) for number, subject in found.items()]


def _instance(transition: Transition, number: int, subject: Subject) -> int:
    """The instance that the named layer saved, in the first forward or in the second."""
    saver = transition.holders.saved(subject.layer - transition.storages.start)
    again = number + len(transition.storages.sizes)
    return again if transition.working.held.get(again, 0) & saver else number
