"""Rows of published measurements: `rows.csv`, one measurement a row, facts as their sources print them.

An empty cell was not said by the source. Classes: A is eager torch, or nearly; B differs by fused kernels or
`torch.compile`; C needs context or expert parallelism, Transformer Engine, FP8 or another optimizer; D says too
little. Memory is in bytes of the rank that the source names; `step_s` is of a step of the global batch unless
`time_kind` says otherwise.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

ROWS = Path(__file__).with_name("rows.csv")

Half = Literal["calibration", "unseen"]


class Inexpressible(Exception):
    """A row that cannot become a task, cluster and plan; the text is the reason, equal for rows alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published measurement: the text of every column, and the numbers in some."""

    id: str
    source: str
    ref: str
    kind: str  # column `class`
    class_reason: str
    gpu: str
    gpu_mem_nominal: str
    interconnect: str
    framework: str
    version: str
    model: str
    family: str
    layers: str
    model_notes: str
    micro_batch: str
    schedule: str
    seq_parallel: str
    precision: str
    state_bytes: str
    optimizer: str
    recompute: str
    offload: str
    attention: str
    compile: str
    mem_kind: str
    mem_rank: str
    fits: str
    oom_at: str
    time_kind: str
    trust: str
    remarks: str
    gpus: int | None
    nodes: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    vocab: int | None
    seq: int | None
    global_batch: int | None
    accumulation: int | None
    pp: int | None
    dp: int | None
    tp: int | None
    cp: int | None
    ep: int | None
    zero: int | None
    virtual_stages: int | None
    mem_allocated_bytes: int | None
    mem_reserved_bytes: int | None
    mem_used_bytes: int | None
    step_s: float | None
    step_s_derived: float | None

    @property
    def half(self) -> Half:
        """The half of the rows to which this one belongs: by the first digit of the hash of its id."""
        digest = hashlib.sha256(self.id.encode()).digest()
        return "calibration" if digest[0] % 2 == 0 else "unseen"

    @property
    def samples(self) -> int:
        """The samples of a forward on one rank.

        Raises:
            Inexpressible: not said as a number of samples.
        """
        if not re.fullmatch(r"\d+", self.micro_batch):
            raise Inexpressible("the microbatch is not a number of samples")
        return int(self.micro_batch)

    @property
    def step_seconds(self) -> float | None:
        """The measured seconds of a step, given or by its throughput."""
        return self.step_s or self.step_s_derived

    @property
    def oom_samples(self) -> int | None:
        """The next larger microbatch, with which training ran out of memory; None if not said."""
        failed = re.search(r"micro-batch (\d+)", self.oom_at)
        return int(failed[1]) if failed else None


def read(path: Path = ROWS) -> Iterator[Row]:
    """Yield the rows of a file.

    Raises:
        ValueError: a column is missing.
    """
    names = {field.name: str(field.type) for field in fields(Row)}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = {name: "class" if name == "kind" else name for name in names}
        if missing := set(columns.values()) - set(reader.fieldnames or ()):
            raise ValueError(f"{path} lacks the columns {', '.join(sorted(missing))}")
        for cells in reader:
            yield Row(**{name: _cell(cells[columns[name]].strip(), hint) for name, hint in names.items()})


def _cell(text: str, hint: str) -> str | int | float | None:
    """Return the value of a cell; None for a number that is empty or only described in words."""
    if hint == "str":
        return text
    number = int if hint.startswith("int") else float
    try:
        return number(text)
    except ValueError:
        return None
