"""Tiny configurations of transformers' architectures, without dropout."""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

WORDS = 64
SMALL: Settings = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
}
TEXT: Settings = {"vocab_size": WORDS, "max_position_embeddings": 32}
STILL: Settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BOTH_SIDES: Settings = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "d_model": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": WORDS,
}
T5: Settings = {
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_heads": 2,
    "vocab_size": WORDS,
    "dropout_rate": 0.0,
}

TINY: dict[str, Settings] = {
    "gpt2": {
        "n_layer": 3,
        "n_embd": 32,
        "n_head": 2,
        "vocab_size": WORDS,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "llama": {**SMALL, **TEXT, "num_key_value_heads": 1},
    "bert": {**SMALL, **TEXT, **STILL},
    "t5": {**T5, "sequence": 12},
    "vit": {**SMALL, "image_size": 32, "patch_size": 8},
    "whisper": {**BOTH_SIDES, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 12},
    "albert": {**SMALL, **TEXT, **STILL, "embedding_size": 16},
    "bart": {**BOTH_SIDES, "max_position_embeddings": 32, "dropout": 0.0},
}
