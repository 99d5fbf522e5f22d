"""The largest that fits, as text: the answer, what limits it, by how much the next one misses, and what was tried."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.decisions import What
from pipefit.fingerprints import samples
from pipefit.fits import Fit, named_value
from pipefit.predictions import fullness, is_tight
from pipefit.report.plan import told_sharing
from pipefit.tables import Block, Table
from pipefit.texts import counted, first_to_last
from pipefit.units import format_bytes


def describe_fit(fit: Fit) -> list[Block]:
    """The answer and how it was asked, what limits it, by how much the next one misses, and all that was tried."""
    return ["\n".join(_head(fit)), _tried(fit), "\n".join(_limits(fit))]


_WORDS = {What.RECOMPUTE: "recomputed", What.OFFLOAD: "moved away", What.UPDATE: "updated on the host"}  # in parts


def _head(fit: Fit) -> Iterator[str]:
    plan = fit.best.plan
    training = plan.training
    nbytes = f" ({fit.best.value} bytes)" if fit.grown == "memory" else ""
    yield (
        f"{fit.named(fit.best.value)}{nbytes} is the {fit.sense} that fits: {plan.profile.model} of "
        f"{fit.best.parameters:,} parameters on {plan.cluster}"
    )
    what = [word for kind, word in _WORDS.items() if any(d.what is kind for d in plan.decisions)]
    done = f", {' and '.join(what)}" if what else ""
    size = samples(training.microbatch_size, plan.profile.fingerprint.lengths)
    yield (
        f"{training.schedule}, {counted(training.microbatches, 'microbatch')} of {size}, "
        f"{training.precision}{done}, kernels of {plan.profile.assumptions.target}"
    )


def _tried(fit: Fit) -> Table:
    """A row for each value, rising; with the number of parameters if it is not always the same."""
    grows = len({attempt.parameters for attempt in fit.tried}) > 1
    rows = tuple(
        (
            named_value(fit.grown, attempt.value),
            *((f"{attempt.parameters:,}",) if grows else ()),
            format_bytes(attempt.need_bytes),
            format_bytes(attempt.budget_bytes),
            fullness(
                attempt.need_bytes / attempt.budget_bytes,
                tight=is_tight(attempt.plan.cluster, attempt.device, attempt.need_bytes),
            ),
            str(attempt.device),
            "yes" if attempt.fits else "no",
            "planned" if attempt.certified_bytes is None else "dry run",
        )
        for attempt in fit.tried
    )
    size = ("parameters",) if grows else ()
    return Table((fit.grown, *size, "peak", "of budget", "full", "device", "fits", "by"), rows)


def _limits(fit: Fit) -> Iterator[str]:
    yield from told_sharing(fit.best.plan.stages)
    best, further = fit.best, "larger" if fit.sense == "largest" else "smaller"
    yield (
        f"Device {best.device} limits: stage {best.stage} ({first_to_last(best.blocks)}) needs "
        f"{format_bytes(best.need_bytes)}, {format_bytes(-best.over_bytes)} below its budget."
    )
    if fit.beyond is not None:
        yield f"{fit.named(fit.beyond.value)} does not fit: {fit.beyond.miss}."
        return
    larger = [value for value in fit.refused if value > best.value]
    if larger and fit.sense == "largest":
        yield f"{fit.named(min(larger))} is refused: {fit.refused[min(larger)]}."
    else:
        yield f"No {further} value was to be tried."
