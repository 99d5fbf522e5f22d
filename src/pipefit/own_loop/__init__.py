"""A memory plan for one rank, in the user's own training loop: their module stays theirs.

    handle = pipefit.apply(model, budget="20 GiB", batch=next(iter(loader)), optimizer=optimizer, loss=loss)
    print(handle)              # technique, bytes saved and seconds lost, by submodule
    for inputs, targets in loader:
        ...                    # the loop as it was
    handle.remove()            # the model is as it was

A plan decides for every submodule of the model: *keep* the tensors that autograd saves in its calls,
*recompute* them (`torch.utils.checkpoint`, non-reentrant, random state preserved), or *offload* them to the
host until its backward. The peak of the whole loop (forward, loss, backward, optimizer; first and later
steps) is at most the budget, and the estimated time lost is least.

Parts, each a module that imports only earlier ones:

1. `schema.plan`: `LoopPlan`, the answer as a document: printed, saved and applied again.
2. `offloading`: saved tensors on the host: one host copy for each storage, returned at the first use; and, on
   request, optimizer state on the host between steps.
3. `known_values`: values of whole numbers, such as masks and positions, beside fake tensors.
4. `loop`: `Loop`, the user's loop. `Loop.over_fakes(target)` runs it over fake tensors: their module, loss
   and optimizers, whose tensors are replaced in place and put back.
5. `trainers`: the steps of Hugging Face's Trainer and of Lightning's.
6. `installing`: `install(module, decisions)`, which gives each planned submodule another `forward`.
7. `recording`: one dry run of the plain loop becomes a `LoopRecording`: calls of submodules, lives of
   storages, and which calls save them.
8. `choice`: an integer programme over a recording. The bytes at each operation are linear in the decisions,
   with one variable for each group of storages that share their savers.
9. `face`: `apply`, which records, chooses, certifies by a dry run with the decisions installed, and chooses
   again with less until the certified peak is within the budget.

The choice may be inexact (a recomputed output is a new storage); the certificate is exact. On a CPU it equals
the allocator's events.
"""

from pipefit.own_loop.face import Handle, apply
from pipefit.own_loop.loop import counted_states
from pipefit.own_loop.offloading import HostTensors
from pipefit.schema.plan import LoopDecision, LoopPlan

__all__ = ["Handle", "HostTensors", "LoopDecision", "LoopPlan", "apply", "counted_states"]
