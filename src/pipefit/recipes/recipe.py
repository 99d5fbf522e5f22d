"""What a configuration file of another trainer asks for, in pipefit's terms, and how the file says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipefit.schema.grids import Sharding
from pipefit.schema.training import Precision

Offload = Literal["none", "optimizer", "parameters"]  # parameters: these and the optimizer state
Change = Literal["samples", "accumulation", "global_batch", "recompute", "shard", "offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters (LoRA) of a rank on the linear layers of these names.

    `all-linear` is all but the head; without a name, `peft` chooses by the architecture.
    """

    rank: int
    targets: tuple[str, ...]
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a file: a key, its new value (None for a number that is chosen), and the line that says so."""

    key: str
    value: Any
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training as a configuration file describes it.

    `model` is a name as on the command line, such as `hf:llama`, and `settings` are its settings. A forward of a
    device has `samples` samples of `sequence` tokens. A step accumulates `accumulation` of them, or has `global_batch`
    samples on all devices. `replicas` is the number of data-parallel replicas, None for as many as the devices
    allow; they divide `shard`. `copies` is the number of such groups of replicas, None for one on every host. `edits`
    are the changes that the file can express, and `reread` returns the recipe of the file with other values of some
    keys. `notes` say how the file was read where it leaves something open.
    """

    tool: str
    model: str
    settings: Mapping[str, Any]
    sequence: int
    samples: int  # in a forward of a device
    accumulation: int | None = None
    global_batch: int | None = None
    precision: Precision
    unshared: Precision | None = None  # of a replica without others, if it differs
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    adapters: Adapters | None = None
    recompute: bool = False
    shard: Sharding = "none"
    sequences: bool = False  # whether tensor-parallel ranks divide positions too
    offload: Offload = "none"
    replicas: int | None = None
    copies: int | None = 1
    tensor: int = 1
    stages: int = 1
    schedule: str = "1f1b"
    edits: Mapping[Change, Edit] = field(default_factory=dict)
    reread: Callable[[Mapping[str, Any]], Recipe] = field(compare=False, repr=False)
    notes: tuple[str, ...] = ()
