"""Hugging Face models in their usual form: small, built from their configurations, with their caches and
defaults.

Only dropout is off, so that a plain loop without draws can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from support.huggingface_models import BOTH_SIDES, SMALL, STILL, T5, TEXT, TINY, WORDS

Inputs = dict[str, Any]

_SMALL: Inputs = {**SMALL, "num_hidden_layers": 2}
_TEXT: Inputs = {**_SMALL, **TEXT}
_TOKENS: Inputs = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA: Inputs = {**_TEXT, **_TOKENS, "num_key_value_heads": 1}
_BOTH_SIDES: Inputs = {**BOTH_SIDES, "dropout": 0.0}
_SPEECH: Inputs = {
    **_SMALL,
    "vocab_size": 32,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "classifier_proj_size": 16,
}
_NEITHER: Inputs = {"layerdrop": 0.0, "apply_spec_augment": False}
_GPT2: Inputs = {**TINY["gpt2"], "n_layer": 2, "bos_token_id": 1, "eos_token_id": 2}


class Pretrained(NamedTuple):
    """A class of transformers, the settings of its configuration, and its keyword arguments for a number of
    samples.
    """

    kind: str
    settings: Inputs
    inputs: Callable[[int], Inputs]

    def build(self) -> nn.Module:
        """Build the model with its class."""
        torch.manual_seed(0)
        kind: Any = getattr(transformers, self.kind)
        model: nn.Module = kind(kind.config_class(**self.settings))
        return model.train()


def tokens(samples: int, length: int = 12) -> Tensor:
    """Return made-up tokens without special ones."""
    return torch.randint(3, WORDS, (samples, length))


def language(samples: int) -> Inputs:
    """Return tokens that are also the labels."""
    found = tokens(samples)
    return {"input_ids": found, "labels": found.clone()}


def padded(samples: int) -> Inputs:
    """Return tokens; in every sample except the first the last three are padding."""
    found = language(samples)
    mask = torch.ones_like(found["input_ids"])
    mask[1:, -3:] = 0
    found["labels"][mask == 0] = -100
    return {**found, "attention_mask": mask}


def classes(samples: int) -> Inputs:
    """Return tokens with a class."""
    return {"input_ids": tokens(samples), "labels": torch.randint(2, (samples,))}


def translation(samples: int) -> Inputs:
    """Return tokens of two lengths."""
    return {"input_ids": tokens(samples), "labels": tokens(samples, 8)}


def images(samples: int) -> Inputs:
    """Return images with a class."""
    return {"pixel_values": torch.randn(samples, 3, 32, 32), "labels": torch.randint(2, (samples,))}


def segmented(samples: int) -> Inputs:
    """Return images with a class for every pixel."""
    return {"pixel_values": torch.randn(samples, 3, 32, 32), "labels": torch.randint(4, (samples, 32, 32))}


def captions(samples: int) -> Inputs:
    """Return images with texts, and a flag that requests the loss."""
    images = torch.randn(samples, 3, 32, 32)
    return {"input_ids": tokens(samples, 10), "pixel_values": images, "return_loss": True}


def spectra(samples: int) -> Inputs:
    """Return speech as spectrograms, with tokens."""
    return {"input_features": torch.randn(samples, 8, 32), "labels": tokens(samples, 8)}


def waves(samples: int) -> Inputs:
    """Return raw speech with a class."""
    return {"input_values": torch.randn(samples, 400), "labels": torch.randint(2, (samples,))}


def transcribed(samples: int) -> Inputs:
    """Return raw speech with letters."""
    return {"input_values": torch.randn(samples, 400), "labels": torch.randint(1, 32, (samples, 5))}


_EXPERTS: Inputs = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WIDE: Inputs = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS, **_TOKENS}

PRETRAINED: dict[str, Pretrained] = {
    "gpt2": Pretrained("GPT2LMHeadModel", _GPT2, language),
    "gpt2-padded": Pretrained("GPT2LMHeadModel", _GPT2, padded),
    "bert": Pretrained("BertForMaskedLM", {**_TEXT, **STILL}, padded),
    "bert-classes": Pretrained("BertForSequenceClassification", {**_TEXT, **STILL}, classes),
    "t5": Pretrained("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, translation),
    "llama": Pretrained("LlamaForCausalLM", _LLAMA, padded),
    "mistral": Pretrained("MistralForCausalLM", {**_LLAMA, "sliding_window": 4}, language),
    "mixtral": Pretrained(
        "MixtralForCausalLM",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        language,
    ),
    "opt": Pretrained(
        "OPTForCausalLM",
        {**_TEXT, **_TOKENS, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
        language,
    ),
    "bloom": Pretrained(
        "BloomForCausalLM",
        {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "hidden_dropout": 0.0},
        language,
    ),
    "mamba": Pretrained(
        "MambaForCausalLM",
        {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS, "state_size": 4},
        language,
    ),
    "bart": Pretrained(
        "BartForConditionalGeneration",
        {**_BOTH_SIDES, **_TOKENS, "max_position_embeddings": 32, "decoder_start_token_id": 2},
        translation,
    ),
    "deberta": Pretrained(
        "DebertaV2ForMaskedLM",
        {**_TEXT, **STILL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        padded,
    ),
    "vit": Pretrained("ViTForImageClassification", {**_SMALL, "image_size": 32, "patch_size": 8}, images),
    "swin": Pretrained(
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
        images,
    ),
    "convnext": Pretrained(
        "ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2}, images
    ),
    "segformer": Pretrained(
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "num_attention_heads": [1, 2],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "drop_path_rate": 0.0,
            "classifier_dropout_prob": 0.0,
            "num_labels": 4,
        },
        segmented,
    ),
    "clip": Pretrained(
        "CLIPModel",
        {
            "text_config": {**_TEXT, **_TOKENS},
            "vision_config": {**_SMALL, "image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
        captions,
    ),
    "whisper": Pretrained(
        "WhisperForConditionalGeneration",
        {
            **_BOTH_SIDES,
            **_TOKENS,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 12,
            "decoder_start_token_id": 1,
        },
        spectra,
    ),
    "wav2vec2": Pretrained("Wav2Vec2ForSequenceClassification", {**_SPEECH, **_NEITHER}, waves),
    "hubert": Pretrained("HubertForSequenceClassification", {**_SPEECH, **_NEITHER}, waves),
    "siglip": Pretrained(
        "SiglipModel",
        {"text_config": {**_TEXT, **_TOKENS}, "vision_config": {**_SMALL, "image_size": 32, "patch_size": 8}},
        captions,
    ),
    "gemma2": Pretrained("Gemma2ForCausalLM", {**_LLAMA, "head_dim": 16}, language),
    "falcon": Pretrained("FalconForCausalLM", {**_WIDE, "num_attention_heads": 2, "alibi": True}, language),
    "xlnet": Pretrained(
        "XLNetLMHeadModel",
        {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "dropout": 0.0},
        language,
    ),
    "mamba2": Pretrained(
        "Mamba2ForCausalLM",
        {**_WIDE, "state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4},
        language,
    ),
    "jamba": Pretrained(
        "JambaForCausalLM",
        {
            **_LLAMA,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
        language,
    ),
    "qwen2-moe": Pretrained(
        "Qwen2MoeForCausalLM",
        {**_LLAMA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
        language,
    ),
    "gpt-oss": Pretrained(
        "GptOssForCausalLM",
        {**_LLAMA, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        language,
    ),
    "deepseek": Pretrained(
        "DeepseekV3ForCausalLM",
        {
            **_LLAMA,
            **_EXPERTS,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
        language,
    ),
}
REFUSED: dict[str, Pretrained] = {
    "wav2vec2": Pretrained("Wav2Vec2ForSequenceClassification", _SPEECH, waves),
    "augmented": Pretrained(
        "Wav2Vec2ForSequenceClassification",
        {**_SPEECH, "layerdrop": 0.0, "mask_time_prob": 0.5, "mask_time_length": 2},
        waves,
    ),
    "ctc": Pretrained("Wav2Vec2ForCTC", {**_SPEECH, **_NEITHER}, transcribed),
}
