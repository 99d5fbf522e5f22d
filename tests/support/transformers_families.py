"""Families of Hugging Face transformers as small models, and their results: the table of docs/models.md.

    PYTHONPATH=src:tests python -m support.transformers_families rwkv mpt

This rewrites the rows of the named families; without names, all rows.

Each is traced, cut into a chain, and compared with the module on two microbatches: losses, gradients and
buffers. They have two layers and the sizes of `SMALL`, no dropout, and one more setting for those in
`MORE`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from pipefit.capture import Task
from pipefit.capture.comparison import compare
from pipefit.capture.model import built, capture
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.models.hugging_face import hf

PACKAGES = f"{Path(torch.__file__).parent.parent}/"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = "| family | layers | blocks | as a chain |\n|---|---|---|---|\n"

# fmt: off
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64, "embedding_size": 16,
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "num_decoder_layers": 2, "d_inner": 64, "d_head": 8,
    "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "ffn_hidden_size": 64, "ffn_dim": 64,
    "word_embed_proj_dim": 32, "rotary_dim": 4, "state_size": 8, "sliding_window": 8, "image_size": 32, "patch_size": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "attention_hidden_size": 32,
    "max_source_positions": 32, "max_target_positions": 32, "num_mel_bins": 8, "mamba_d_state": 8,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}
MORE: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "funnel": {"block_sizes": [1, 1]},
    "big_bird": {"attention_type": "original_full"},
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "is_decoder": False,
                 "feed_forward_size": 64, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
}
BY_NAME = (
    "roberta", "distilbert", "albert", "electra", "deberta-v2", "xlnet", "modernbert", "big_bird", "funnel",
    "longformer", "gpt_neo", "gptj", "gpt_neox", "opt", "bloom", "mpt", "falcon", "phi", "qwen3", "gemma", "gemma2",
    "mistral", "starcoder2", "stablelm", "mamba", "rwkv", "jamba", "reformer", "bart", "mbart", "pegasus", "mt5",
    "led", "nllb-moe", "switch_transformers", "deit",
)
# fmt: on


def by_name(name: str) -> Task:
    """Return small `hf:NAME`."""
    transformers = sys.modules.get("transformers") or __import__("transformers")
    plain = transformers.AutoConfig.for_model(name)
    chosen = {plain.attribute_map.get(key, key): value for key, value in SMALL.items()}
    number = int | float | type(None)
    settings = {k: v for k, v in chosen.items() if isinstance(vars(plain).get(k, ()), number)}
    settings |= {k: 0.0 for k, v in vars(plain).items() if "drop" in k and isinstance(v, float)}
    return hf(name, sequence=16, **settings | MORE.get(name, {}))


def of_class(
    name: str,
    config: str,
    batch: Callable[[int], Any],
    loss: Callable[[Any, Any], Any] | None = None,
    **settings: Any,
) -> Task:
    """Build a class of transformers from a configuration with these settings, with its own loss or
    another.
    """
    import transformers

    made = getattr(transformers, config)(**settings)
    return Task(partial(getattr(transformers, name)._from_config, made), batch=batch, loss=loss, name=name)


def becomes(make: Callable[[], Task]) -> str:
    """Return a task's row: layers, blocks and exactness, or the reason for its refusal."""
    try:
        whole = built(make(), seed=0)
        batches = [sample(whole, 2, seed=seed) for seed in (0, 1)]
        chain = capture(whole, *batches[0])
        found = compare(whole, chain, batches)
        found.check()
    except UsageError as error:
        return f"- | - | refused: {str(error).replace(PACKAGES, '')}"
    exact = "bit by bit" if not found.apart else f"to {found.apart:.0e} of the largest value"
    return f"{len(chain.layers)} | {len(chain.blocks)} | equal {exact}"


def split(text: str) -> tuple[str, dict[str, str], str]:
    """Split the page: text before the rows of the table, the rows by family, and the text after them."""
    before, _, rest = text.partition(HEAD)
    lines = list(takewhile(lambda line: line.startswith("| "), rest.splitlines(keepends=True)))
    cells = (line[2:].partition(" | ") for line in lines)
    return (
        before + HEAD,
        {name: row.removesuffix(" |\n") for name, _, row in cells},
        rest[sum(map(len, lines)) :],
    )


def page_with(text: str, rows: Mapping[str, str]) -> str:
    """Return the page with these rows in place of the same families' rows, in the order of `ALL`."""
    before, known, behind = split(text)
    known |= rows
    return before + "".join(f"| {name} | {known[name]} |\n" for name in ALL if name in known) + behind


# -------------------------------------------------------------------- by class


def _noise(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda size: torch.randn(size, *shape)


def _whole(most: int, *shape: int) -> Callable[[int], torch.Tensor]:
    return lambda size: torch.randint(most, (size, *shape))


def _batch(**parts: Callable[[int], torch.Tensor]) -> Callable[[int], Any]:
    return lambda size: ({name: make(size) for name, make in parts.items()}, None)


# fmt: off
_BODY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SOUND: dict[str, Any] = {
    **_BODY, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "final_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False,
    "classifier_proj_size": 16, "num_feat_extract_layers": 2,
}
_IMAGE: dict[str, Any] = {**_BODY, **_STILL, "image_size": 16, "patch_size": 8}
_TEXT: dict[str, Any] = {**_BODY, "vocab_size": 64, "max_position_embeddings": 16}
_TWO: dict[str, Any] = {"text_config": {**_TEXT, "eos_token_id": 2, "projection_dim": 16},
                        "vision_config": {**_BODY, "image_size": 16, "patch_size": 8, "projection_dim": 16}}
_SERIES: dict[str, Any] = {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "d_model": 16, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "num_time_features": 1,
}
_PAST = _batch(
    past_values=_noise(10), past_time_features=_noise(10, 1), past_observed_mask=lambda size: torch.ones(size, 10),
    future_values=_noise(4), future_time_features=_noise(4, 1),
)
_PAIR = _batch(input_ids=_whole(64, 8), pixel_values=_noise(3, 16, 16), return_loss=lambda size: True)  # type: ignore[arg-type,return-value]
BY_CLASS: dict[str, Callable[[], Task]] = {
    "wav2vec2": partial(of_class, "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
                        _batch(input_values=_noise(400), labels=_whole(2)), **_SOUND),
    "hubert": partial(of_class, "HubertForSequenceClassification", "HubertConfig",
                      _batch(input_values=_noise(400), labels=_whole(2)), **_SOUND),
    "audio-spectrogram-transformer": partial(
        of_class, "ASTForAudioClassification", "ASTConfig", _batch(input_values=_noise(24, 16), labels=_whole(2)),
        **_BODY, **_STILL, patch_size=8, frequency_stride=8, time_stride=8, max_length=24, num_mel_bins=16),
    "clip": partial(of_class, "CLIPModel", "CLIPConfig", _PAIR, **_TWO, projection_dim=16),
    "blip": partial(of_class, "BlipModel", "BlipConfig", _PAIR, **_TWO, projection_dim=16),
    "vit_mae": partial(of_class, "ViTMAEForPreTraining", "ViTMAEConfig", _batch(pixel_values=_noise(3, 16, 16)),
                       **_IMAGE, decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
                       decoder_intermediate_size=32),
    "videomae": partial(of_class, "VideoMAEForVideoClassification", "VideoMAEConfig",
                        _batch(pixel_values=_noise(4, 3, 16, 16), labels=_whole(2)), **_IMAGE, num_frames=4),
    "timesformer": partial(of_class, "TimesformerForVideoClassification", "TimesformerConfig",
                           _batch(pixel_values=_noise(4, 3, 16, 16), labels=_whole(2)), **_IMAGE, num_frames=4),
    "patchtst": partial(of_class, "PatchTSTForPrediction", "PatchTSTConfig",
                        _batch(past_values=_noise(16, 2), future_values=_noise(4, 2)), num_input_channels=2,
                        context_length=16, patch_length=4, patch_stride=4, prediction_length=4, d_model=16,
                        num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, attention_dropout=0.0),
    "time_series_transformer": partial(of_class, "TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig",
                                       _PAST, **_SERIES),
    "autoformer": partial(of_class, "AutoformerForPrediction", "AutoformerConfig", _PAST, **_SERIES, label_length=4),
    "detr": partial(of_class, "DetrForObjectDetection", "DetrConfig", _batch(pixel_values=_noise(3, 32, 32)),
                    lambda found, _: found.logits.sin().mean() + found.pred_boxes.mean(),
                    use_timm_backbone=False, use_pretrained_backbone=False, d_model=32, encoder_layers=2,
                    decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2,
                    decoder_attention_heads=2, num_queries=4, dropout=0.0),
    "speecht5": partial(of_class, "SpeechT5ForTextToSpeech", "SpeechT5Config",
                        _batch(input_ids=_whole(64, 8), labels=_noise(6, 8), speaker_embeddings=_noise(16)),
                        vocab_size=64, hidden_size=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64,
                        decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64, num_mel_bins=8,
                        reduction_factor=2, speaker_embedding_dim=16, speech_decoder_prenet_units=16,
                        speech_decoder_postnet_units=16, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
                        positional_dropout=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
                        speech_decoder_prenet_dropout=0.0, speech_decoder_postnet_dropout=0.0),
}
# fmt: on
ALL: dict[str, Callable[[], Task]] = {name: partial(by_name, name) for name in BY_NAME} | BY_CLASS


if __name__ == "__main__":
    for family in sys.argv[1:] or ALL:
        PAGE.write_text(page_with(PAGE.read_text(), {family: becomes(ALL[family])}))
