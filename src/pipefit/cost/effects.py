"""What an action does to the memory of its device, by category.

Between actions, every byte belongs to one category:

    activations        storages that a forward saved and no backward has used up
    weight versions    weights that are not the newest ones, for microbatches in flight and coming forwards
    boundary buffers   inputs, targets, outputs and gradients that wait or travel and that no layer saved; the losses
    gradients          of parameters, from the first backward of a step to its STEP
    optimizer state    from the first STEP on
    parameters         and buffers, which change where parameters are moved away

At the peak of an action, a category that grows counts as large as after the action, and one that shrinks as large as
before it; the bytes of the peak above this sum are temporary. The sum may also exceed the peak, because the action
freed before it allocated. The categories that shrink then count as smaller. So the categories always add up to the
exact total.
"""

from __future__ import annotations

from typing import NamedTuple


class Effect(NamedTuple):
    """Bytes relative to the start of an action: at its peak, and when it has ended.

    `at_peak` is by category: gradients, optimizer state, activations, weight versions, boundary buffers, parameters,
    temporary, workspace.
    `after` is the same without the last two, because none of their bytes outlive the action.
    """

    peak_bytes: int
    after_bytes: int
    at_peak: tuple[int, int, int, int, int, int, int, int]
    after: tuple[int, int, int, int, int, int]


def effect(
    *,
    peak_bytes: int = 0,
    workspace: int = 0,
    gradients: int = 0,
    optimizer: int = 0,
    activations: int = 0,
    versions: int = 0,
    boundary: int = 0,
    parameters: int = 0,
) -> Effect:
    """The effect of an action that changes the categories by these bytes and peaks at `peak_bytes` above its start.

    `workspace` bytes of the peak are the workspace of a kernel.
    """
    after = (gradients, optimizer, activations, versions, boundary, parameters)
    peak_bytes = max(0, peak_bytes, sum(after))
    at_peak = [max(0, change) for change in after]
    temporary = peak_bytes - sum(at_peak)
    most_shrinking_first = sorted(enumerate(after), key=lambda item: item[1])
    for category, change in most_shrinking_first:
        if change < 0 and temporary < 0:
            given = min(-change, -temporary)
            at_peak[category] -= given
            temporary += given
    inside = min(workspace, temporary)
    gradients, optimizer, activations, versions, boundary, parameters = at_peak
    peak = gradients, optimizer, activations, versions, boundary, parameters, temporary - inside, inside
    return Effect(peak_bytes, sum(after), peak, after)


def freeing_versions(before: Effect, nbytes: int) -> Effect:
    """The effect of an action that, when it has ended, also frees `nbytes` of weight versions."""
    gradients, optimizer, activations, versions, boundary, parameters = before.after
    after = gradients, optimizer, activations, versions - nbytes, boundary, parameters
    return before._replace(after_bytes=before.after_bytes - nbytes, after=after)
