"""What an action does to the memory of its device, by category.

How bytes are attributed between actions:

    activations        storages that a forward saved and no backward has consumed
    boundary buffers   inputs, targets, outputs and gradients that wait or travel and that no layer saved; the losses
    gradients          of parameters, from the first backward of a step to its STEP
    optimizer state    from the first STEP on

Within an action, at its peak: a category that grows counts with what the action leaves in it, a category that shrinks
with what it held at the start, and what the peak has above both is temporary. Where the peak is below that sum, because
the action consumed before it produced, the shrinking categories have given way. So categories always add up to the
exact total.
"""

from __future__ import annotations

from typing import NamedTuple


class Effect(NamedTuple):
    """Bytes relative to the entry of an action: at its highest moment, and when it has ended.

    `at_peak` is by category: gradients, optimizer state, activations, boundary buffers, temporary, workspace;
    `after` is the same without the last two, of which nothing stays.
    """

    peak_bytes: int
    after_bytes: int
    at_peak: tuple[int, int, int, int, int, int]
    after: tuple[int, int, int, int]


def effect(
    *,
    peak_bytes: int = 0,
    workspace: int = 0,
    gradients: int = 0,
    optimizer: int = 0,
    activations: int = 0,
    boundary: int = 0,
) -> Effect:
    """The effect of an action that changes the categories by these bytes and reaches `peak_bytes` above its entry, of
    which `workspace` are a kernel's own.
    """
    after = (gradients, optimizer, activations, boundary)
    peak_bytes = max(0, peak_bytes, sum(after))
    at_peak = [max(0, change) for change in after]
    temporary = peak_bytes - sum(at_peak)
    for category, change in sorted(enumerate(after), key=lambda item: item[1]):  # the most consumed gives way first
        if change < 0 and temporary < 0:
            given = min(-change, -temporary)
            at_peak[category] -= given
            temporary += given
    inside = min(workspace, temporary)
    gradients, optimizer, activations, boundary = at_peak
    peak = gradients, optimizer, activations, boundary, temporary - inside, inside
    return Effect(peak_bytes, sum(after), peak, after)
