"""Architectures of transformers, tiny and without dropout."""

from __future__ import annotations

from functools import cache

from gallery.model import TIED, Model
from pipefit.capture import Task
from pipefit.models.hugging_face import hf
from support.huggingface_models import TINY

SPECIAL = {
    "gpt2": "one-dimensional convolutions as linear layers, the embedding as the head",
    "llama": "grouped queries, rotary positions",
    "bert": "masked words, the embedding as the head",
    "t5": "encoder and decoder, one table of position biases for each side",
    "vit": "images in patches",
    "whisper": "frames of sound to words",
    "albert": "one block run three times",
    "bart": "encoder and decoder, one embedding for both",
}
DISTINCT = ("llama", "vit")  # without shared parameters


@cache
def task_of(name: str) -> Task:
    """Return the task of that architecture; late, because importing transformers takes seconds."""
    return hf(name, **TINY[name])


def model_of(name: str) -> Model:
    """Build the tiny model of that architecture."""
    return Model(
        name=f"hf:{name}",
        special=SPECIAL[name],
        module=lambda: task_of(name).build(),
        batch=lambda size: task_of(name).batch(size),
        loss=None,
        rounded="" if name in DISTINCT else TIED,
        is_large=True,
    )


PRETRAINED = tuple(map(model_of, TINY))
