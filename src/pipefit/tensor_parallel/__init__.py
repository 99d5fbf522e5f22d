"""Tensor parallelism of any captured stage: its operations are rewritten for ranks that share the weights.

Layers stay ordinary modules over plain tensors, with explicit collectives. Shapes and operators alone
determine which values are divided; an operator without a rule is replicated, which is correct and saves
nothing. (Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019; forms of values after Lepikhin et al., "GShard", 2020, and Xu et al., "GSPMD", 2021.)
"""

from pipefit.schema.profile import Shares
from pipefit.tensor_parallel.collectives import Alone, Collectives, Loan, ProcessGroupCollectives, lent
from pipefit.tensor_parallel.comparison import (
    LONGEST_SECONDS,
    LockstepCollectives,
    Meeting,
    Turn,
    at_each_turn,
    compare_blocks,
    in_lockstep,
    pause,
)
from pipefit.tensor_parallel.forms import DimSplit, TensorShard, assembled
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
from pipefit.tensor_parallel.tracing import TracedStage, blocks_begin
from pipefit.tensor_parallel.writing import WrittenCollective

__all__ = [
    "LONGEST_SECONDS",
    "Alone",
    "Collectives",
    "DimSplit",
    "Loan",
    "LockstepCollectives",
    "Meeting",
    "Prices",
    "ProcessGroupCollectives",
    "RankLoss",
    "RankStage",
    "ShardedChain",
    "ShardedStage",
    "Shares",
    "TensorShard",
    "TracedStage",
    "Turn",
    "WrittenCollective",
    "assembled",
    "at_each_turn",
    "blocks_begin",
    "compare_blocks",
    "in_lockstep",
    "lent",
    "pause",
    "shard_chain",
    "shard_stage",
    "shard_traced",
    "trace_chain",
]
