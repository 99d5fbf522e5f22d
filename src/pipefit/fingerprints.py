"""A fingerprint: what the costs of a task depend on, so that a profile or a plan is used for its own task alone.

Short texts and digests of the model, its data, its loss and its optimizer. They are equal for the same task in every
process and on every machine, whether its tensors are real, fake or on the `meta` device, and for every microbatch size.
Weights, the learning rate and random states are no part of it: no cost depends on them. `pipefit.fake.fingerprint`
makes one from a task; `differences` compares two, and says in words what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from hashlib import sha256
from itertools import zip_longest

from pipefit.texts import counted

_NAMED = 3  # layers that are named in an error; more are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What the costs of a task depend on. Tuples about layers have one digest for every layer, in the model's order."""

    __pydantic_config__ = {"extra": "forbid"}

    layers: tuple[str, ...]  # name, class, settings or traced operations
    parameters: tuple[str, ...]  # names, shapes, dtypes of parameters and buffers, and which of them are trained
    shared: tuple[str, ...]  # places of every parameter that several layers use, in words
    inputs: tuple[str, ...]  # every leaf of a batch's inputs, in words; shapes are those of one sample
    targets: tuple[str, ...]
    loss: str  # the operations of the loss
    precision: str
    optimizer: str  # its class
    options: tuple[str, ...]  # of the optimizer, in words; numbers as zero or not
    groups: str  # which parameters have options of their own; empty where all are alike
    lengths: tuple[int, ...] = ()  # of the sequences of whole numbers among a sample's inputs, such as its tokens

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits for all of it."""
        return digest(repr(astuple(self)))


def samples(count: int, lengths: Sequence[int]) -> str:
    """So many samples in words, with the lengths of their sequences, if they have any."""
    return f"{counted(count, 'sample')} of {_length(lengths)}" if lengths else str(count)


def digest(text: str, digits: int = 16) -> str:
    """A short text that is the same for the same `text`, everywhere."""
    return sha256(text.encode()).hexdigest()[:digits]


def differences(made: Fingerprint, now: Fingerprint, names: Sequence[str]) -> list[str]:
    """What differs between two tasks, as phrases that continue "it was made for ..."; empty if nothing does.

    A loss is compared only where all else is equal, because it is run on the shapes of what the model returns.

    Args:
        made: of the task that the profile, plan or run was made for.
        now: of the task that it is to be used for.
        names: of the layers of `made`.
    """
    found = [*_layers(made, now, names), *_data(made, now), *_optimizer(made, now)]
    return found or (["another loss"] if made.loss != now.loss else [])


def _layers(made: Fingerprint, now: Fingerprint, names: Sequence[str]) -> Iterator[str]:
    if len(made.layers) != len(now.layers):
        yield f"{counted(len(made.layers), 'layer')}, not {len(now.layers)}"
        return
    tensors = _unlike(names, made.parameters, now.parameters)
    settings = [name for name in _unlike(names, made.layers, now.layers) if name not in tensors]
    if tensors:
        yield f"other parameters or buffers in {_listed(tensors)}"
    if settings:
        yield f"another class, other settings or other operations in {_listed(settings)}"
    if made.shared != now.shared:
        yield f"{_texts('shared parameters', made.shared)}, not {_texts('', now.shared)}"


def _data(made: Fingerprint, now: Fingerprint) -> Iterator[str]:
    if made.lengths != now.lengths:  # the shapes of inputs and targets follow
        yield f"samples of {_length(made.lengths)}, not {_length(now.lengths)}"
    else:
        if made.inputs != now.inputs:
            yield f"{_texts('inputs of', made.inputs)}, not {_texts('', now.inputs)}"
        if made.targets != now.targets:
            yield f"{_texts('targets of', made.targets)}, not {_texts('', now.targets)}"
    if made.precision != now.precision:
        yield f"{made.precision}, not {now.precision}"


def _optimizer(made: Fingerprint, now: Fingerprint) -> Iterator[str]:
    if made.optimizer != now.optimizer:
        yield f"{made.optimizer}, not {now.optimizer}"
    elif made.options != now.options:
        had = [option for option in made.options if option not in now.options]
        has = [option for option in now.options if option not in made.options]
        yield f"{_texts(f'{made.optimizer} with', had)}, not {_texts('', has)}"
    if made.groups != now.groups:
        yield "other parameter groups"


def _unlike(names: Sequence[str], made: Sequence[str], now: Sequence[str]) -> list[str]:
    """Names of the layers, or their numbers where they have none, for which the two differ."""
    unlike = [number for number, (one, other) in enumerate(zip_longest(made, now)) if one != other]
    return [names[number] if number < len(names) else str(number) for number in unlike]


def _listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"layer{'s' * (len(names) > 1)} {', '.join(names[:_NAMED])}{more}"


def _length(lengths: Sequence[int]) -> str:
    """The lengths of a sample's sequences in words."""
    return f"length{'s' * (len(lengths) > 1)} {' and '.join(map(str, lengths))}" if lengths else "no length"


def _texts(what: str, texts: Sequence[str]) -> str:
    return f"{what} {', '.join(texts) or 'none'}".strip()
