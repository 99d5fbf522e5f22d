"""What a loss changes of the tensors that it holds, such as a centre that follows what it has seen.

A loss runs once for each microbatch, on the last stage, in the order of plain training. What it changes is there once:
it is not recomputed, nor are there replicas of it. No copies of its tensors are made, as they are of layers' buffers.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pipefit.capture.as_found import reachable
from pipefit.capture.constants import held_tensors
from pipefit.capture.refusals import Refusal
from pipefit.capture.stand_ins import noticing
from pipefit.capture.storages import storage_key
from pipefit.profiler.backward_state import Reads, Saved
from pipefit.profiler.feedback import Sources


def changed_by_loss(forward: Callable[[], object], loss: object) -> str:
    """What `forward`, which runs `loss` over fake tensors, changes, as words that go on behind "which"; or nothing.

    Raises:
        Refusal: it changes what it has saved for its backward where autograd does not see it.
    """
    saved, before = Saved(), [one for one in reachable(loss) if isinstance(one, Tensor)]
    with noticing() as stood_in, Reads() as reads, Sources(()) as sources, saved:
        forward()
    kept = set(map(id, reachable(loss)))
    held = held_tensors(loss) if isinstance(loss, nn.Module) else {}
    names = {id(tensor): repr(name) for name, tensor in held.items()}
    for real, fake in stood_in.pairs:
        key = storage_key(fake)
        if key in sources.in_place and saved.versions.get(key) == 0:  # a change that autograd sees would be counted
            raise Refusal(
                f"it changes {names.get(id(real), 'a tensor')}, which it saves for its backward, where autograd does "
                "not see it (x.data): with several microbatches in flight it would compute with another one's",
                "compute with a clone",
            )
    replaced = [one for one in before if id(one) not in kept and storage_key(one) in reads.storages]
    changed = [
        *stood_in.replaced,
        *replaced,
        *(real for real, fake in stood_in.pairs if storage_key(fake) in sources.written),
    ]
    return f"changes {names.get(id(changed[0]), 'a tensor')} in every forward" if changed else ""
