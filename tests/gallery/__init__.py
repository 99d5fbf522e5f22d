"""The gallery: small models of all kinds, by families, with plain training loops that do not use pipefit."""

from __future__ import annotations

from functools import cache

from gallery.adapters import ADAPTERS
from gallery.detection import DETECTION
from gallery.experts import EXPERT_MODELS
from gallery.generative import GENERATIVE
from gallery.graphs import GRAPHS
from gallery.language import LANGUAGE
from gallery.masked import MASKED
from gallery.multi_task import MULTI_TASK
from gallery.oddities import ODDITIES
from gallery.pretrained import PRETRAINED
from gallery.recommendation import RECOMMENDATION
from gallery.recurrent import RECURRENT
from gallery.residual import RESIDUAL
from gallery.speech import SPEECH
from gallery.state_space import STATE_SPACE
from gallery.vision import VISION
from pipefit.capture import Task

FAMILIES = {
    "vision": (*RESIDUAL, *VISION),
    "language": (*MASKED, *LANGUAGE),
    "speech": SPEECH,
    "recommendation": RECOMMENDATION,
    "graphs": GRAPHS,
    "generative": GENERATIVE,
    "state space": STATE_SPACE,
    "experts": EXPERT_MODELS,
    "detection": DETECTION,
    "multi-task": MULTI_TASK,
    "adapters": ADAPTERS,
    "recurrent": RECURRENT,
    "oddities": ODDITIES,
    "transformers": PRETRAINED,
}
MODELS = {model.name: model for models in FAMILIES.values() for model in models}
SAMPLE = (  # for every run of the tests: one of each family
    "resnet", "masked", "keywords", "two towers", "graph convolutions", "adversaries", "diagonal", "soft experts",
    "segments", "domains", "probe", "time major", "centring", "hf:vit",
)  # fmt: skip
# Every run compares the bytes of these as well; the others take longer
COMPARED = ("keywords", "two towers", "graph convolutions", "domains", "probe", "time major", "centring")
CHAINS = ("strided", "skips", "time major", "encoder")  # models with layers outside the zoo, for other tests


@cache
def task(name: str) -> Task:
    """Return the task of training the model with this name."""
    return MODELS[name].task()
