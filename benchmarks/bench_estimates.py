"""Claim: `accelerate estimate-memory` tells what weights, gradients and Adam need, and pipefit what training needs.

Side by side, for architectures of Hugging Face's as they come: accelerate's figure for training with Adam, which
depends on parameters alone; the peak that pipefit predicts on one device; and the peak of a plain loop that trains the
model, two steps with AdamW, by torch's own record of what its CPU allocator gives and takes. Nothing of pipefit runs in
that loop but the function that builds the model and the one that makes up a batch. accelerate's model is made from its
configuration, as the command does, without asking the hub.

    python benchmarks/bench_estimates.py [--only hf:gpt2] [--json FILE] [--page]

Needs accelerate, in an environment of its own or this one. About two minutes of CPU, and 4 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

import pipefit
from measured_on import machine
from page_tables import markdown, with_tables
from pipefit.models.hugging_face import hf
from pipefit.units import format_bytes

PAGE, TITLE = Path(__file__).parents[1] / "docs" / "fit.md", "compared with accelerate"
ASKED = (
    ("distilbert", 1, 128),
    ("bert", 1, 128),
    ("gpt2", 1, 128),
    ("gpt2", 1, 512),
    ("opt", 1, 128),
    ("vit", 1, 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What three say of one model, in bytes; `tokens` of a sample are 0 for pictures."""

    model: str
    parameters: int
    samples: int
    tokens: int
    accelerate_bytes: int
    predicted_bytes: int
    trained_bytes: int


def row(name: str, samples: int, tokens: int) -> Row:
    """One model, by all three."""
    task = hf(name, sequence=tokens or None)
    profiled = pipefit.profile(task, microbatch_size=samples)
    plan = pipefit.plan(profiled, "emulated:1x64GiB", batch_size=samples, planner="uniform")
    assert plan.prediction is not None
    return Row(
        model=f"hf:{name}",
        parameters=sum(p.numel() for p in empty(name).parameters()),
        samples=samples,
        tokens=tokens,
        accelerate_bytes=by_accelerate(name),
        predicted_bytes=plan.prediction.peak_bytes[0],
        trained_bytes=trained(task, samples),
    )


def by_accelerate(name: str) -> int:
    """What `accelerate estimate-memory` prints as "Training using Adam" in float32."""
    from accelerate.commands import estimate

    asked = Namespace(
        model_name=name, library_name="transformers", trust_remote_code=False, dtypes=["float32"]
    )
    with mock.patch.object(estimate, "create_empty_model", lambda name, **_: empty(name)):
        ((_, _, _, usage),) = estimate.gather_data(asked)
    return int(max(usage.values()))


def empty(name: str) -> torch.nn.Module:
    """The model that the command makes: of its configuration, without bytes and without a head."""
    import transformers
    from accelerate import init_empty_weights

    with init_empty_weights():
        return transformers.AutoModel.from_config(
            transformers.AutoConfig.for_model(name), dtype=torch.float32
        )


def trained(task: pipefit.Task, samples: int, steps: int = 2) -> int:
    """The most that a plain training loop holds, by the allocator's events."""
    gc.collect()
    torch.manual_seed(0)
    with uncollected(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed:
        model = task.module()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            inputs, _ = task.batch(samples)
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    events = observed.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no garbage of before is freed."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def table(rows: Sequence[Row]) -> str:
    """A line for each model; how far both are from what was trained."""
    columns = (
        "model",
        "parameters",
        "batch",
        "accelerate",
        "pipefit",
        "training takes",
        "accelerate is",
        "pipefit is",
    )
    return markdown(columns, [_cells(one) for one in rows])


def _cells(one: Row) -> list[str]:
    batch = f"{one.samples} x {one.tokens} tokens" if one.tokens else f"{one.samples} picture"
    sizes = (one.accelerate_bytes, one.predicted_bytes, one.trained_bytes)
    off = [f"{100 * (nbytes / one.trained_bytes - 1):+.1f} %" for nbytes in sizes[:2]]
    return [f"`{one.model}`", f"{one.parameters:,}", batch, *map(format_bytes, sizes), *off]


def main() -> None:
    """Measure and print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, samples, tokens in ASKED:
        if not given.only or f"hf:{name}" in given.only:
            rows.append(row(name, samples, tokens))
            print(rows[-1], flush=True)
    print(table(rows))
    if given.json:
        used = machine() | {name: version(name) for name in ("accelerate", "transformers")}
        given.json.write_text(json.dumps({"machine": used, "rows": list(map(asdict, rows))}, indent=1) + "\n")
    if given.page:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), {TITLE: table(rows)}), encoding="utf-8")


if __name__ == "__main__":
    main()
