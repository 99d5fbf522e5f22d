"""Tensor parallelism of any captured stage: its operations are rewritten for ranks that share the weights.

Layers stay ordinary modules over plain tensors, with explicit collectives. Shapes and operators alone
determine which values are divided; an operator without a rule is replicated, which is correct and saves
nothing. (Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019; forms of values after Lepikhin et al., "GShard", 2020, and Xu et al., "GSPMD", 2021.)
"""

from pipefit.schema.profile import Shares
from pipefit.tensor_parallel.collectives import Alone, Collectives, Loan, ProcessGroupCollectives
from pipefit.tensor_parallel.forms import TensorShard, assembled, assembled_state
from pipefit.tensor_parallel.lockstep import LockstepCollectives, in_lockstep
from pipefit.tensor_parallel.search import Prices
from pipefit.tensor_parallel.stage import (
    RankLoss,
    RankStage,
    ShardedChain,
    ShardedStage,
    shard_chain,
    shard_stage,
    shard_traced,
    trace_chain,
)
from pipefit.tensor_parallel.writing import WrittenCollective

__all__ = [
    "Alone",
    "Collectives",
    "Loan",
    "LockstepCollectives",
    "Prices",
    "ProcessGroupCollectives",
    "RankLoss",
    "RankStage",
    "ShardedChain",
    "ShardedStage",
    "Shares",
    "TensorShard",
    "WrittenCollective",
    "assembled",
    "assembled_state",
    "in_lockstep",
    "shard_chain",
    "shard_stage",
    "shard_traced",
    "trace_chain",
]  # fmt: skip
