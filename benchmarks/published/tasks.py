"""The task of a row: decoders by their sizes, BERT and torchgpipe's models from pipefit's own, images by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import detection
import encoder_decoder
import images
import torch
from architectures import adapters_of, shape_of, style_of
from models import Shape, decoder_task
from rows import Inexpressible, Row

from pipefit import ModelProfile, Task, profile
from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.schema.training import Precision

MakeTask = Callable[[], Task]


@dataclass(frozen=True, slots=True)
class Subject:
    """What a row trains: a key that equal tasks share, the function that makes the task, and a decoder's sizes."""

    key: object
    make: MakeTask
    shape: Shape | None = None


def subject_of(
    row: Row, optimizer: Callable[..., torch.optim.Optimizer], *, divided: bool = False
) -> Subject:
    """Return the subject of a row, or one whose seconds are those of ranks that divide dropout.

    Raises:
        Inexpressible: a model that is not built here, or one whose sizes are not said.
    """
    name = row.model.lower()
    if "bert" in name:
        return _bert(row, optimizer)
    if name.startswith(("u-net", "amoebanet")):
        return _torchgpipe(row, optimizer)
    if name.startswith("ssd300"):  # its scripts for V100 in float32 alone set channels_first
        form = torch.contiguous_format if row.precision == "float32" else torch.channels_last
        return Subject(("ssd300", form), partial(detection.task, form, optimizer))
    if row.family == "llm" or row.layers.isdigit():
        shape, style, by = shape_of(row), style_of(row), adapters_of(row)
        style = replace(style, draws=not (divided and style.dropout))
        return Subject((shape, style, by), partial(decoder_task, shape, style, by, optimizer), shape)
    if row.layers:
        return Subject(*encoder_decoder.task_of(row, optimizer))
    plain, notes = images.named(re.split(r"[ (]", name)[0]), row.model_notes
    staged = (row.pp or 1) > 1
    return Subject((plain, notes, staged), partial(images.task, plain, notes, optimizer, staged=staged))


def _bert(row: Row, optimizer: Callable[..., torch.optim.Optimizer]) -> Subject:
    """Return BERT with the head of SQuAD, which also stands for heads that read few tokens."""
    if not row.layers.isdigit() or row.seq is None:
        raise Inexpressible("sizes of the model are not said")
    settings = {
        "layers": int(row.layers),
        "hidden": row.hidden or 1024,
        "heads": row.heads or 16,
        "vocabulary": row.vocab or 30522,
        "sequence": row.seq,
        "head": "span",
        "attention": "eager",
    }

    def make() -> Task:
        return replace(build("bert", **settings), optimizer=optimizer)

    return Subject(("bert", *settings.values()), make)


def _torchgpipe(row: Row, optimizer: Callable[..., torch.optim.Optimizer]) -> Subject:
    """Return a model of the torchgpipe paper, which pipefit has too."""
    numbers = [int(number) for number in re.findall(r"\d+", row.model)]
    if row.model.lower().startswith("u-net"):
        settings = {"convolutions": numbers[0], "width": numbers[1], "channels": 3, "num_classes": 1}
        settings |= {
            "num_classes": 2
        }  # a loss over one class is not among pipefit's; two channels in a layer of 3e8
        return Subject(("unet", *numbers), lambda: replace(build("unet", **settings), optimizer=optimizer))
    layers, filters = numbers[-2:]

    def make() -> Task:
        return replace(
            build("amoebanet", layers=layers, filters=filters, pooling="average"), optimizer=optimizer
        )

    return Subject(("amoebanet", layers, filters), make)


_CACHE: dict[object, tuple[Task, ModelProfile]] = {}


def profiled(
    subject: Subject, optimizer: object, precision: Precision, micro: int, dp: int, tp: int, *, along: bool
) -> tuple[Task, ModelProfile]:
    """Return a subject's task and its profile at the sizes that a plan needs; made once for equal arguments.

    Raises:
        Inexpressible: pipefit refuses the model.
    """
    key = (subject.key, optimizer, precision, micro, dp, tp, along)
    if key not in _CACHE:
        task = replace(subject.make(), precision=precision)
        sizes = (micro * dp, micro) if dp > 1 else (micro,)
        ranks = (tp,) if tp > 1 else ()
        try:
            found = profile(task, microbatch_size=sizes, target="cuda", tensor=ranks, sequences=along)
        except UsageError as error:
            raise Inexpressible(f"pipefit refuses it: {str(error)[:100]}") from error
        _CACHE[key] = task, found
    return _CACHE[key]
