"""Plans on torch's own pipelines: `torch.distributed.pipelining` trains them, and its code certifies them.

1. `order`: the schedule of a plan.
2. `stages`: `PipelineStage`s from a plan's chain, with recomputation and moves to the host.
3. `rank`: the stages of one rank, and the update after the schedule.
4. `recording`: peaks and times of the engine's forwards, backwards and update.
5. `training`: `pipeline`, the user's object in each worker, and `train_pipeline`, which starts the workers.
6. `certifying`: the dry run, one rank after the other.
"""

import torch

from pipefit.errors import UsageError

if torch.__version__ < "2.13":
    raise UsageError(
        f"torch {torch.__version__} runs models to find the shapes of messages: pipefit needs torch 2.13 or "
        "newer for torch.distributed.pipelining, or use pipefit's own runtime (pipefit.Trainer)"
    )

from pipefit.torch_engine.certifying import certify_pipeline
from pipefit.torch_engine.training import Pipeline, pipeline, train_pipeline

__all__ = ["Pipeline", "certify_pipeline", "pipeline", "train_pipeline"]
