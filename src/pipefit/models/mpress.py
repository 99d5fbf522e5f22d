"""The Bert and GPT families of the MPress paper by size.

Examples: `mpress_gpt(size="5.3B")`, `mpress_bert(size="0.35B")`.

The paper gives the numbers of parameters of its models, and their memory on 8 devices. The shapes are
inferred from both:

- GPT grows by blocks of hidden size 4096 with 32 heads, 25 at a time, over 1024 tokens of GPT-2's vocabulary;
the head is tied to the embedding. Counts are 0.2 to 1.1 per cent below the names.
- Bert is BERT large and a model of twice its blocks, then hidden size 2048, over 512 tokens. Its head finds a
span of text (SQuAD), since logits over the vocabulary would need more on the last device than the paper says.
Counts are within 1 per cent of the names, except for 0.35B: BERT large has 0.334B.

The paper computes attention by plain operations, and trains GPT in half precision with an optimizer that
keeps float32 copies (`--precision master-float16`), Bert in float32. (Zhou et al., "MPress", HPCA 2023.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pipefit.capture import Task
from pipefit.models.bert import bert
from pipefit.models.gpt import gpt
from pipefit.models.settings import OptimizerName, Rate, Share, checked
from pipefit.models.transformer import AttentionKind

GptSize = Literal["5.3B", "10.3B", "15.4B", "20.4B", "25.5B"]
BertSize = Literal["0.35B", "0.64B", "1.67B", "4.0B", "6.2B"]

GPT_LAYERS: dict[GptSize, int] = {"5.3B": 25, "10.3B": 50, "15.4B": 75, "20.4B": 100, "25.5B": 125}
BERT_SHAPES: dict[BertSize, tuple[int, int, int]] = {  # layers, hidden size, heads
    "0.35B": (24, 1024, 16), "0.64B": (48, 1024, 16),
    "1.67B": (32, 2048, 32), "4.0B": (78, 2048, 32), "6.2B": (122, 2048, 32),
}  # fmt: skip


@checked
def mpress_gpt(
    *,
    size: GptSize = "5.3B",
    dropout: Share = 0.1,
    attention: AttentionKind = "eager",
    optimizer: OptimizerName = "adam",
    lr: Rate | None = None,
) -> Task:
    """A GPT of the family, as `pipefit.models.gpt` describes it.

    Raises:
        UsageError: a setting has a wrong value.
    """
    task = gpt(
        layers=GPT_LAYERS[size],
        hidden=4096,
        heads=32,
        tied=True,
        dropout=dropout,
        attention=attention,
        optimizer=optimizer,
        lr=lr,
    )
    return replace(task, name=f"gpt-{size}")


@checked
def mpress_bert(
    *,
    size: BertSize = "0.35B",
    unfused: bool = False,
    dropout: Share = 0.1,
    attention: AttentionKind = "eager",
    optimizer: OptimizerName = "adam",
    lr: Rate | None = None,
) -> Task:
    """A Bert of the family, as `pipefit.models.bert` describes it; `unfused` with GELU and layer norm of
    plain operations.

    Raises:
        UsageError: a setting has a wrong value.
    """
    layers, hidden, heads = BERT_SHAPES[size]
    task = bert(
        layers=layers,
        hidden=hidden,
        heads=heads,
        head="span",
        unfused=unfused,
        dropout=dropout,
        attention=attention,
        optimizer=optimizer,
        lr=lr,
    )
    return replace(task, name=f"bert-{size}")
