"""Claim: what pipefit predicts without a GPU, others measured on theirs.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/published [--source NAME ...] [--json FILE] [--page FILE]

Every row of `rows.csv` of the classes A and B becomes a task, a cluster and the plan that its authors ran, by its
columns alone (`setups`); pipefit predicts peak bytes, whether it fits, and seconds. No constant is tuned to a row.
Rows that cannot be expressed are counted by reason. `explained` is the prediction with the bytes that a framework is
known to add (`setups.Setup`): gradients in float32, a loss in float32, an output that the loop holds.
Image classifiers are built by timm: python -m pip install --no-deps timm==0.6.7
Most of an hour of a core, and as much for bigscience's rows on more than 128 GPUs; no network.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import calibration  # noqa: E402
import page  # noqa: E402
import predictions  # noqa: E402
import scores  # noqa: E402
from clusters import gpu_of  # noqa: E402
from rows import ROWS, Inexpressible, Row, read  # noqa: E402
from setups import Setup, setup_of  # noqa: E402

from measured_on import machine  # noqa: E402
from pipefit.errors import PipefitError  # noqa: E402

MOST_DEVICES = 128  # of rows whose memory is predicted; that of a larger grid takes minutes
PICTURES = HERE.parents[1] / "docs" / "pictures"
_UNTIMED = ("varying lengths", "lengths vary")  # in `trust`: seconds of samples whose length is not said
_BINNED = "BERT-large pre-training"  # of DeepLearningExamples, whose loader (LDDL) makes batches by length
_DISTURBED = (
    "not to be trusted",
    "slow link suspected",
    "in the heading",
)  # in `remarks`; two batches are said


def record(row: Row) -> dict[str, Any]:
    """Return a row's measured and predicted figures; `refused` is the reason if there is no prediction."""
    result: dict[str, Any] = {
        "id": row.id, "source": row.source, "class": row.kind, "half": row.half, "model": row.model,
        "plan": plan_text(row), "job": job_of(row), "rates": "", "measured": measured(row), "predicted": {},
        "refused": "",
    }  # fmt: skip
    try:
        setup = setup_of(row)
        result["rates"] = (
            f"{gpu_of(row)}, {arithmetic(row)}, {'images' if row.family in ('cnn', 'unet') else 'tokens'}"
        )
        if contradicts(setup, result["measured"]):
            result["apart"] = "less than weights, gradients and optimizer state"
            for what in (*scores.MEMORY, "fits"):
                result["measured"].pop(what, None)
        result["predicted"] = predicted(row, setup, result["measured"])
    except Inexpressible as reason:
        result["refused"] = str(reason)
    except PipefitError as refusal:
        result["refused"] = f"pipefit refuses it: {str(refusal)[:80]}"
    return result


def measured(row: Row) -> dict[str, Any]:
    """Return the measured figures of a row: bytes, seconds, and whether it and the next batch fit."""
    figures: dict[str, Any] = {
        "allocated": row.mem_allocated_bytes,
        "reserved": row.mem_reserved_bytes,
        "used": row.mem_used_bytes,
    }
    untimed = any(words in row.trust for words in _UNTIMED) or any(
        words in row.remarks for words in _DISTURBED
    )
    untimed |= row.source == "dle" and row.model == _BINNED
    figures["seconds"] = None if untimed else row.step_seconds
    if row.fits in ("yes", "oom"):
        figures["fits"] = row.fits == "yes"
    if row.oom_samples:
        figures["next"] = False
    return {name: figure for name, figure in figures.items() if figure is not None}


def contradicts(setup: Setup, said: dict[str, Any]) -> bool:
    """Return whether a figure of one device is below the bytes that exist at once in any update."""
    if len(setup.plan.workers) > 1:
        return False
    measurement = setup.plan.profile.measurements[0]
    least = sum(cost.parameter_bytes + cost.gradient_bytes + cost.state_bytes for cost in measurement.costs)
    for each in measurement.shared:
        least -= len(each.pairs) * (each.nbytes + each.gradient_bytes + each.state_bytes)
    return any(said[what] < least for what in scores.MEMORY if what in said)


def predicted(row: Row, setup: Setup, said: dict[str, Any]) -> dict[str, Any]:
    """Return the predictions of the figures that a row has."""
    figures: dict[str, Any] = {}
    # grids take longer to run dry, which only the allocator's figures need
    dry = len(setup.plan.workers) == len(setup.plan.stages) or "allocated" in said or "reserved" in said
    small = len(setup.plan.workers) <= MOST_DEVICES
    if not small and "seconds" not in said:
        raise Inexpressible(f"the memory of more than {MOST_DEVICES} devices takes minutes to predict")
    if small and ("fits" in said or any(what in said for what in scores.MEMORY)):
        memory = predictions.memory(setup, reserved=dry)
        figures["default"] = memory.default_bytes
        figures["allocated"], figures["reserved"] = memory.allocated_bytes, memory.reserved_bytes
        figures["used"] = memory.used_bytes
        figures["fits"] = memory.fits
    if "seconds" in said:
        figures["seconds"] = predictions.seconds(setup)
    if row.oom_samples:
        figures["next"] = predictions.memory(setup_of(row, row.oom_samples), reserved=dry).fits
    return {name: figure for name, figure in figures.items() if figure is not None}


def plan_text(row: Row) -> str:
    """Return the degrees, the microbatch, what replicas divide and what is recomputed of a row."""
    degrees = f"pp {row.pp or 1} dp {row.dp or 1} tp {row.tp or 1}"
    zero = f", ZeRO {row.zero}" if row.zero else ""
    return (
        f"{degrees}, {row.micro_batch} x {row.accumulation or '?'}"
        + zero
        + (", recompute" if row.recompute.startswith(("full", "except")) else "")
    )


def job_of(row: Row) -> list[object]:
    """Return what rows share that compare plans of one job: model, data, batch, devices and their state."""
    return [
        row.source,
        row.gpu,
        row.gpus,
        row.model,
        row.layers,
        row.hidden,
        row.heads,
        row.seq,
        row.global_batch,
        row.precision,
        renewed(row),
    ]


def renewed(row: Row) -> bool:
    """Return whether bigscience's A100 nodes were faster already: it says not to compare days before and after."""
    day = re.search(r"note (\d\d-\d\d)", row.remarks)
    return bool(day) and day[1] >= "02-25"


def arithmetic(row: Row) -> str:
    """Return the arithmetic of products: `half`, `tf32` or `float32`."""
    text = row.precision.lower()
    return "tf32" if "tf32" in text else "float32" if text == "float32" else "half"


def progress(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the records, and print each."""
    for row in rows:
        found = record(row)
        parts = [
            f"{what} {scores.percent(error)}"
            for what in (*scores.MEMORY, "seconds")
            if (error := scores.over(found, what)) is not None
        ]
        print(
            f"{row.id:18} {found['plan']:28} {', '.join(parts) or found['refused'] or 'fits only'}",
            flush=True,
        )
        yield found


def save(file: Path, records: list[dict[str, Any]]) -> None:
    """Write records, and the factors that follow from them."""
    document = {"machine": machine(), "factors": calibration.factors(records), "rows": records}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Predict, print, and write the results, the page and its pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--source", nargs="*", default=[])
    parser.add_argument(
        "--saved", type=Path, nargs="*", default=[], help="Take these results and predict nothing."
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    if asked.saved:
        records = [saved for file in asked.saved for saved in json.loads(file.read_text())["rows"]]
    else:
        records = []
        for found in progress(
            [row for row in read(asked.rows) if row.source in (asked.source or (row.source,))]
        ):
            records.append(found)
            if asked.json:
                save(asked.json, records)  # a run that is cut off has written what it had
    table = calibration.factors(records)
    print(page.tables(records, table))
    print(f"{time.process_time():.0f} s of CPU")
    if asked.json:
        save(asked.json, records)
    if asked.page:
        page.write(asked.page, PICTURES, records, table)


if __name__ == "__main__":
    main()
