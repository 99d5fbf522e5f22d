"""Tensor parallelism of any captured stage: its operations are rewritten for ranks that share the weights.

Layers stay ordinary modules over plain tensors, with explicit collectives. Which values are divided is found from
shapes and operators alone; an operator that no rule knows is replicated, which is right and saves nothing. (Shoeybi et
al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019; forms of values
after Lepikhin et al., "GShard", 2020, and Xu et al., "GSPMD", 2021.)
"""

from pipefit.sharding.chain import RankLoss, ShardedChain, shard_chain, shard_traced, trace_chain
from pipefit.sharding.collectives import Alone, Collectives, ProcessGroupCollectives
from pipefit.sharding.loans import Loan
from pipefit.sharding.lockstep import LockstepCollectives, in_lockstep
from pipefit.sharding.prices import Prices
from pipefit.sharding.shards import Shard, assembled, assembled_state
from pipefit.sharding.stage import RankStage, ShardedStage, shard_stage
from pipefit.sharding.steps import Collective
from pipefit.tensor_shares import Shares

__all__ = [
    "Alone", "Collective", "Collectives", "Loan", "LockstepCollectives", "Prices", "ProcessGroupCollectives",
    "RankLoss", "RankStage", "Shard", "ShardedChain", "ShardedStage", "Shares", "assembled", "assembled_state",
    "in_lockstep", "shard_chain", "shard_stage", "shard_traced", "trace_chain",
]  # fmt: skip
