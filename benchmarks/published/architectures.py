"""From a row's model and framework to a `Shape`, a `Style` and `Adapters`: what is public about both.

Shapes that a row does not give are those of the model's public configuration. Styles follow the public code of the
framework in the version that the row names. Nothing here depends on a row's measurement.
"""

from __future__ import annotations

import re
from dataclasses import replace

from models import Adapters, Shape, Style
from rows import Inexpressible, Row

# layers, hidden, heads, key and value heads, MLP, vocabulary, size of a head
PUBLIC_SHAPES: dict[str, tuple[int, int, int, int, int, int, int]] = {
    r"gemma-2b": (18, 2048, 8, 1, 16384, 256000, 256),
    r"gemma-7b": (28, 3072, 16, 16, 24576, 256000, 256),
    r"gemma-2-2b": (26, 2304, 8, 4, 9216, 256000, 256),
    r"gemma-2-9b": (42, 3584, 16, 8, 14336, 256000, 256),
    r"phi-3-mini": (32, 3072, 32, 32, 8192, 32064, 96),
    r"phi-2": (32, 2560, 32, 32, 10240, 51200, 80),
    r"stablelm-base-alpha-3b": (16, 4096, 32, 32, 16384, 50432, 128),
    r"falcon-7b": (32, 4544, 71, 1, 18176, 65024, 64),
    r"mistral-7b": (32, 4096, 32, 8, 14336, 32000, 128),
    r"tiny-?llama": (22, 2048, 32, 4, 5632, 32000, 64),
    r"llama-2-7b": (32, 4096, 32, 32, 11008, 32000, 128),
    r"llama-2-13b": (40, 5120, 40, 40, 13824, 32000, 128),
    r"llama-3(\.1)?-8b": (32, 4096, 32, 8, 14336, 128256, 128),
    r"llama-3\.2-1b": (16, 2048, 32, 8, 8192, 128256, 64),
    r"llama-3\.2-3b": (28, 3072, 24, 8, 8192, 128256, 128),
}

LLAMA = Style(norm="rms-cast", mlp="gated", bias=False, rotary=1.0)
ARCHITECTURES: dict[str, Style] = {
    r"phi-1|phi-2": Style(rotary=0.4, parallel="one norm"),
    r"stablelm": Style(rotary=0.25, parallel="own norms"),
    r"falcon": Style(rotary=1.0, parallel="one norm", bias=False),
    r"gemma-2-": replace(LLAMA, attention="scores", softmax="float32", capped=True),
    r"llama|mistral|gemma|phi-3|qwen": LLAMA,
    r"^gpt": Style(),
    r"^mpt": Style(bias=False, tied=True),
}


def _model(row: Row) -> str:
    """Return a row's model; LitGPT's table calls Gemma 2 2B `gemma-2b`, but names the configuration file."""
    return "gemma-2-2b" if "gemma2-2b/" in row.ref else row.model.lower()


def style_of(row: Row) -> Style:
    """Return the style of a row's architecture in its framework.

    Raises:
        Inexpressible: an architecture or framework whose code is not described here.
    """
    model, framework = _model(row), row.framework.lower()
    style = next((found for pattern, found in ARCHITECTURES.items() if re.search(pattern, model)), None)
    if style is None:
        raise Inexpressible("the architecture is not among those built here")
    if "tied" in row.model_notes and "untied" not in row.model_notes:
        style = replace(style, tied=True)
    if framework.startswith("lit-gpt"):  # October 2023: norms in the dtype of the input
        norm = "rms-plain" if style.norm == "rms-cast" else style.norm
        return replace(style, norm=norm, values="view", loss="pieces")
    if framework.startswith("litgpt"):
        return replace(style, values="view", loss="pieces")
    if framework == "nanotron":  # Triton RMSNorm, flash attention
        mlp = "gated-fused" if row.compile == "yes" else "gated"
        joint = "copy" if (row.kv_heads or row.heads) != row.heads else "joint"
        return replace(style, norm="rms", mlp=mlp, values=joint)
    if framework.startswith(("megatron-lm", "megatron-deepspeed")):
        unfused = "--no-masked-softmax-fusion" in row.remarks
        dropout = 0.0 if "disable-dropout" in row.remarks else 0.1
        softmax = "float32" if unfused else "half"
        return replace(
            style, attention="scores", softmax=softmax, dropout=dropout, tied=True, loss="half",
            normed="norm after embedding" in row.model_notes,
        )  # fmt: skip
    if framework.startswith("llm-foundry"):  # its loss is a fused kernel on logits in half precision
        return replace(style, loss="half")
    if framework.startswith("torchtune"):
        fused = row.compile == "yes"
        loss = "half" if "loss in chunks" in row.class_reason else "float32"
        return replace(
            style, norm="rms" if fused else "rms-cast", mlp="gated-fused" if fused else "gated", loss=loss
        )
    if framework.startswith("torchtitan"):
        return replace(style, norm="rms", mlp="gated-fused" if row.compile == "yes" else "gated")
    raise Inexpressible("the framework's model code is not described here")


def shape_of(row: Row) -> Shape:
    """Return the sizes of a row's decoder, with the vocabulary padded as its framework pads it.

    Raises:
        Inexpressible: the row does not give the sizes, and no public configuration is known here.
    """
    name = _model(row).replace(" ", "-")
    known = next((found for pattern, found in PUBLIC_SHAPES.items() if re.search(pattern, name)), None)
    vocab = row.vocab
    if vocab is None and "GPT: 50,257" in row.model_notes and row.model.startswith("gpt"):
        vocab = 50257
    given = (_whole(row.layers), row.hidden, row.heads, row.kv_heads or row.heads, row.ffn, vocab)
    if None in given and known is None:
        raise Inexpressible("sizes of the model are not said")
    sizes = [one if one is not None else other for one, other in zip(given, known or given, strict=False)]
    layers, hidden, heads, kv_heads, ffn, words = (int(size or 0) for size in sizes)
    if row.seq is None:
        raise Inexpressible("tokens of a sample are not said")
    head_size = known[6] if known and None in given else hidden // heads
    return Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, seq=row.seq,
        vocab=_padded(row, words), head_size=head_size,
    )  # fmt: skip


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _padded(row: Row, vocab: int) -> int:
    """Return the rows of the embedding: Megatron pads to a multiple of 128 for every tensor-parallel rank."""
    if not row.framework.lower().startswith(("megatron-lm", "megatron-deepspeed")):
        return vocab
    each = 128 * (row.tp or 1)
    return -(-vocab // each) * each


# ---- Adapters: ranks and targets of LitGPT's configurations, by model

_LITGPT: dict[str, tuple[int, str, float]] = {
    r"gemma-2-9b": (16, "qkvomh", 0.1),
    r"gemma|falcon": (8, "qkvomh", 0.1),
    r"phi": (8, "qkvomh", 0.05),
    r"tiny-?llama": (32, "qkvomh", 0.05),
    r".": (32, "qv", 0.05),
}


def adapters_of(row: Row) -> Adapters | None:
    """Return the low-rank adapters of a row; None if all weights are trained.

    Raises:
        Inexpressible: other adapters, or those of a recipe that is not known here.
    """
    notes = row.model_notes.lower()
    if re.search(r"adapter|qlora|ia3|ln_tuning|dora", notes):
        raise Inexpressible("adapters other than LoRA")
    if "lora" not in notes:
        return None
    if row.framework.startswith("lit-gpt"):
        return Adapters(rank=8, targets="qv")
    if row.framework == "LitGPT":
        rank, targets, dropout = next(
            found for pattern, found in _LITGPT.items() if re.search(pattern, _model(row))
        )
        return Adapters(rank=rank, targets=targets, dropout=dropout)
    if row.framework.startswith("torchtune"):
        return Adapters(rank=8 if "8b" in row.model.lower() else 16, targets="qvom", dropout=0.0)
    raise Inexpressible("ranks and targets of the adapters are not said")
