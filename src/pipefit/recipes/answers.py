"""What a recipe needs on a cluster, and which changes of its file would make it fit.

The recipe becomes the plan that its trainer runs: one or several stages, replicas that divide what the file
says, every block recomputed or none. If that does not fit, the same plan is tried with every combination of
recomputation, division of state, state on hosts, and smaller microbatches with as much more accumulation.
Peaks and seconds are those of `pipefit.simulate`; trainers also keep tensors of their own
(`docs/against_reality.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.fake_cuda.isolation import apart
from pipefit.memory import shortage
from pipefit.models import build
from pipefit.models.hugging_face import hf
from pipefit.planner import PlanOptions, Question, answered, with_slices
from pipefit.planner.common_plans import AWAY, UPDATED, Moves, moved, runs_of, together
from pipefit.profiler import OnDemand, Progress
from pipefit.recipes.readers import Adapters, Change, Recipe
from pipefit.schema.cluster import Cluster
from pipefit.schema.fit import Attempt
from pipefit.schema.plan import Plan
from pipefit.schema.training import Precision
from pipefit.simulator.assembled import assembled
from pipefit.tables import Block
from pipefit.texts import counted
from pipefit.units import format_bytes, format_number

_SHOWN = 6  # changes that fit, the fastest first
_MOVES: dict[str, Moves] = {"none": (), "optimizer": UPDATED, "parameters": AWAY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A recipe with changes of its file: its plan, the fullest device's peak bytes, and seconds of a step."""

    recipe: Recipe
    changes: tuple[str, ...]
    plan: Plan
    need_bytes: int
    budget_bytes: int
    step_seconds: float
    shortage: str

    @property
    def fits(self) -> bool:
        """True if every device and every host has the memory it needs."""
        return self.need_bytes <= self.budget_bytes and not self.shortage

    def as_json(self) -> dict[str, Any]:
        """Return the variant as plain data."""
        return {
            "changes": list(self.changes), "fits": self.fits, "need_bytes": self.need_bytes,
            "budget_bytes": self.budget_bytes, "step_seconds": self.step_seconds, "shortage": self.shortage,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeAnswer:
    """A recipe on a cluster as written, and changes: those that fit first, the fastest of them first."""

    cluster: Cluster
    written: Variant
    changed: tuple[Variant, ...]

    @property
    def fitting(self) -> list[Variant]:
        """The changes that fit, without those that another one beats in both seconds and bytes."""
        result = list[Variant]()
        for variant in self.changed:
            if variant.fits and all(variant.need_bytes < faster.need_bytes for faster in result):
                result.append(variant)
        return result

    def as_json(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        changed = [variant.as_json() for variant in self.changed]
        return {"cluster": self.cluster.name, "written": self.written.as_json(), "changed": changed}


def task_of(recipe: Recipe) -> Task:
    """Return the task that a recipe trains, with random weights.

    Raises:
        UsageError: its settings are refused, or adapters are asked for and `peft` is not installed.
    """
    source, _, name = recipe.model.partition(":")
    make = partial(hf, name) if source == "hf" else partial(build, name)
    task = make(**recipe.settings, sequence=recipe.sequence, optimizer=recipe.optimizer)
    if recipe.adapters is None:
        return replace(task, precision=recipe.precision)
    module = partial(_with_adapters, task.module, recipe.adapters, recipe.precision)
    casts = recipe.precision.startswith("mixed") or recipe.precision == "float32"
    return replace(task, module=module, precision=recipe.precision if casts else None)


def _with_adapters(make: Callable[[], nn.Module], adapters: Adapters, precision: str) -> nn.Module:
    """Return a model with frozen weights and float32 adapters, as `peft` makes it."""
    try:
        import peft
    except ModuleNotFoundError:
        raise UsageError("recipes with adapters need peft: pip install peft") from None
    model: Any = make()
    if precision in ("bfloat16", "float16"):
        model = model.to(getattr(torch, precision))
    names = adapters.targets[0] if adapters.targets == ("all-linear",) else list(adapters.targets) or None
    wrapped: nn.Module = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=adapters.rank, target_modules=names, lora_dropout=adapters.dropout, task_type="CAUSAL_LM"
        ),
    )
    return wrapped


def answer(
    recipe: Recipe, cluster: Cluster, *, threads: int = 1, progress: Progress | None = None
) -> RecipeAnswer:
    """Return what a recipe needs on all devices of a cluster, and changes that fit if it does not.

    Raises:
        UsageError: the cluster has no place for its degrees, or its model cannot be profiled.
    """
    target, replicas = cluster.target, _replicas(recipe, cluster)
    sizes = {size for samples in _halves(recipe.samples) for size in (samples, samples * replicas)}

    @cache
    def profiles(precision: Precision) -> OnDemand:
        task = task_of(replace(recipe, precision=precision))
        return OnDemand(task, target=target, threads=threads, progress=progress, sizes=sizes)

    return apart(target, lambda: _answered(recipe, cluster, profiles, progress))


def _answered(
    recipe: Recipe, cluster: Cluster, profiles: Callable[[Precision], OnDemand], progress: Progress | None
) -> RecipeAnswer:
    """Return the answer by profiles of the recipe's task in the precisions of its changes."""

    def profiled(of: Recipe) -> OnDemand:
        alone = of.unshared if _replicas(of, cluster) == 1 else None
        return profiles(alone or of.precision)

    written = _variant(recipe, cluster, profiled(recipe))
    changed = list[Variant]()
    if not written.fits:
        for changes, other in _changes(recipe, _replicas(recipe, cluster) * _copies(recipe, cluster)):
            if progress is not None:
                progress(len(changed), 0, f"trying {', '.join(changes)}")
            with suppress(UsageError):  # state that cannot be divided or moved
                changed.append(_variant(other, cluster, profiled(other), changes))
    changed.sort(
        key=lambda variant: (not variant.fits, variant.step_seconds if variant.fits else variant.need_bytes)
    )
    return RecipeAnswer(cluster=cluster, written=written, changed=tuple(changed))


def _changes(recipe: Recipe, replicas: int) -> Iterator[tuple[tuple[str, ...], Recipe]]:
    """Yield combinations of changes with the recipes of the changed file, the largest microbatches first."""
    useful: dict[Change, bool] = {
        "recompute": not recipe.recompute,
        "shard": replicas > 1 and recipe.shard != "parameters",
        "offload": recipe.offload == "none",
    }
    possible = [change for change, helps in useful.items() if helps and change in recipe.edits]
    for chosen in chain.from_iterable(combinations(possible, count) for count in range(len(possible) + 1)):
        for samples in _halves(recipe.samples) if "samples" in recipe.edits else [recipe.samples]:
            numbers: dict[Change, int] = {}
            if samples != recipe.samples:
                numbers["samples"] = samples
                if recipe.accumulation is not None and "accumulation" in recipe.edits:
                    numbers["accumulation"] = recipe.accumulation * (recipe.samples // samples)
                elif (
                    recipe.accumulation is None
                    and recipe.global_batch is None
                    and "global_batch" in recipe.edits
                ):
                    numbers["global_batch"] = recipe.samples * replicas  # its default follows `samples`
            if not chosen and not numbers:
                continue
            edits = [(recipe.edits[change], numbers.get(change)) for change in (*chosen, *numbers)]
            values = {edit.key: edit.value if number is None else number for edit, number in edits}
            yield tuple(edit.line.format(number) for edit, number in edits), recipe.reread(values)


def _halves(samples: int) -> Sequence[int]:
    """Return the number of samples and its halves, as far as they are whole."""
    result = [samples]
    while result[-1] % 2 == 0:
        result.append(result[-1] // 2)
    return result


def _replicas(recipe: Recipe, cluster: Cluster) -> int:
    """Return the number of data-parallel replicas, of one of the recipe's copies."""
    devices, each = len(cluster.devices), recipe.tensor * recipe.stages * _copies(recipe, cluster)
    replicas = recipe.replicas or devices // each
    if replicas * each > devices or replicas == 0:
        raise UsageError(
            f"the configuration needs {counted(max(1, replicas) * each, 'device')}, "
            f"but {cluster.name} has {devices}"
        )
    return replicas


def _copies(recipe: Recipe, cluster: Cluster) -> int:
    """Return the number of groups of replicas that divide state each."""
    return recipe.copies or len({device.host for device in cluster.devices})


def _variant(recipe: Recipe, cluster: Cluster, profiles: OnDemand, changes: tuple[str, ...] = ()) -> Variant:
    """Return the plan of a recipe, and what it needs."""
    replicas = _replicas(recipe, cluster)
    size, copies = recipe.samples * replicas, _copies(recipe, cluster)
    count = recipe.accumulation or -(-(recipe.global_batch or size * copies) // (size * copies))
    ranks = (recipe.tensor,) if recipe.tensor > 1 else ()
    profile = with_slices(
        lambda samples: profiles(samples, ranks, sequences=recipe.sequences),
        replicas,
        PlanOptions(data=replicas),
        opens_sizes=True,
    )(size)
    options = PlanOptions(
        batch_size=size * count,
        microbatches=count,
        schedule=recipe.schedule,
        planner="uniform",
        stages=recipe.stages,
        data=replicas,
        tensor=recipe.tensor,
        sequences=recipe.sequences,
        shard=recipe.shard if replicas > 1 else None,
        recompute="always" if recipe.recompute else "never",
        allow_infeasible=True,
    )
    made = answered(profile, cluster, options=options).plan
    plan = _with_state(made, recipe)
    result = assembled(plan)
    device = max(plan.workers, key=lambda one: result.peak_bytes[one] / cluster.budgets[one])
    return Variant(
        recipe=recipe,
        changes=changes,
        plan=plan,
        need_bytes=result.peak_bytes[device],
        budget_bytes=cluster.budgets[device],
        step_seconds=result.seconds,
        shortage=shortage(plan, result.arenas),
    )


def _with_state(plan: Plan, recipe: Recipe) -> Plan:
    """Return the plan with the state that its recipe keeps on hosts."""
    question = Question(
        profile=plan.profile, cluster=plan.cluster, training=plan.training, options=PlanOptions()
    )
    decisions = list(plan.decisions)
    for number, stage in enumerate(plan.stages):
        runs = runs_of(question, plan, number, in_buckets=stage.grid.shard in ("gradients", "parameters"))
        decisions += moved(number, together(question, runs), _MOVES[recipe.offload], ahead=1)
    return replace(plan, decisions=tuple(decisions))


# ---- As text


def describe(found: RecipeAnswer, file: str) -> list[Block]:
    """Describe an answer: the training as read, whether it fits, and the lines that would make it fit."""
    written, recipe = found.written, found.written.recipe
    count = Attempt(value=recipe.samples, plan=written.plan).parameters
    model = f"{written.plan.profile.model} of {count:,} parameters"
    room = written.budget_bytes - written.need_bytes
    peak = f"a device needs {format_bytes(written.need_bytes)} of {format_bytes(written.budget_bytes)}"
    if written.fits:
        verdict = f"Fits as written: {peak}, so {format_bytes(room)} are left; {_rate(written)} samples/s."
    else:
        lack = f", {format_bytes(-room)} more than it has" if room < 0 else f"; {written.shortage}"
        verdict = f"Does not fit as written: {peak}{lack}."
    what = f"{file}, a configuration of {recipe.tool}: {model} on {found.cluster}"
    blocks: list[Block] = [f"{what}\n{_read(recipe, written.plan)}", verdict]
    if found.fitting:
        blocks += ["Changes that fit, the fastest first:", *map(_lines, found.fitting[:_SHOWN])]
    elif not written.fits:
        tried = f", of {len(found.changed)} tried" if found.changed else ""
        least = min((*found.changed, written), key=lambda variant: variant.need_bytes)
        blocks.append(
            f"No change of this file was found that fits{tried}: the least is "
            f"{format_bytes(least.need_bytes)}{f' with {_joined(least)}' if least.changes else ''}. pipefit "
            "plan searches all techniques."
        )
    notes = recipe.notes
    if _copies(recipe, found.cluster) > 1:
        notes += ("the rate leaves out the sum of gradients between groups",)
    return [*blocks, *(f"Note: {note}." for note in notes)]


def _lines(variant: Variant) -> str:
    """Return what a change brings, and its lines."""
    needed = f"{_rate(variant)} samples/s, a device needs {format_bytes(variant.need_bytes)}:"
    return "\n".join([needed, *(f"  {change}" for change in variant.changes)])


def _joined(variant: Variant) -> str:
    return ", ".join(variant.changes)


def _rate(variant: Variant) -> str:
    samples = variant.plan.training.batch_size * _copies(variant.recipe, variant.plan.cluster)
    return format_number(samples / variant.step_seconds)


def _read(recipe: Recipe, plan: Plan) -> str:
    """Say how a configuration was read."""
    grid, training, copies = plan.stages[0].grid, plan.training, _copies(recipe, plan.cluster)
    parts = [
        f"{counted(len(plan.stages), 'stage')}, {counted(grid.data, 'replica')}"
        + (f" that divide {_DIVIDED[grid.shard]}" if grid.shard != "none" else "")
        + (f", in {copies} such groups" if copies > 1 else "")
        + (f", {grid.tensor} tensor-parallel ranks" if grid.tensor > 1 else ""),
        (
            f"{counted(recipe.samples, 'sample')} of {recipe.sequence:,} tokens, "
            f"{training.microbatches} accumulated"
        ),
        f"{training.precision}, {recipe.optimizer}",
        "every block recomputed" if recipe.recompute else "nothing recomputed",
    ]
    if recipe.adapters is not None:
        names = ", ".join(recipe.adapters.targets) or "layers that peft chooses"
        parts.append(f"adapters of rank {recipe.adapters.rank} on {names}")
    if recipe.offload != "none":
        parts.append("optimizer state on hosts" if recipe.offload == "optimizer" else "all state on hosts")
    return "; ".join(parts)


_DIVIDED = {
    "optimizer": "optimizer state",
    "gradients": "gradients and optimizer state",
    "parameters": "all state",
}
