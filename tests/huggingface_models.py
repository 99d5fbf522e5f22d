"""Tiny configurations of transformers' architectures, without dropout."""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 3}
_WORDS: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 32}
_ATTENTION: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BOTH_SIDES: dict[str, Any] = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "d_model": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 64,
}

TINY: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_layer": 3,
        "n_embd": 32,
        "n_head": 2,
        "vocab_size": 64,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "llama": {**_SMALL, **_WORDS, "num_key_value_heads": 1},
    "bert": {**_SMALL, **_WORDS, **_ATTENTION},
    "t5": {
        "num_layers": 2,
        "num_decoder_layers": 2,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_heads": 2,
        "vocab_size": 64,
        "dropout_rate": 0.0,
        "sequence": 12,
    },
    "vit": {**_SMALL, "image_size": 32, "patch_size": 8},
    "whisper": {**_BOTH_SIDES, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 12},
    "albert": {**_SMALL, **_WORDS, **_ATTENTION, "embedding_size": 16},
    "bart": {**_BOTH_SIDES, "max_position_embeddings": 32, "dropout": 0.0},
}
