"""Snapshots of the state that a process trains, and restoring a checkpoint under any plan.

Every stage reads its own tensors, by the names of the original module. With them come the other values that
decide the next step: the optimizer's options, the scheduler's state, the loss scale, the seed, and the number
of batches trained, on which random draws depend.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from pipefit.capture import stored_entries
from pipefit.checkpoints import (
    DTYPES,
    Checkpoint,
    GroupSettings,
    Manifest,
    ParameterNumbers,
    Part,
    Scalar,
    Setting,
    StoredTensor,
    TrainedStage,
    joined_settings,
    tensor_key,
)
from pipefit.errors import FileError, UsageError
from pipefit.runtime.optim.half_precision import MasterWeights
from pipefit.runtime.state import Names, Ranks, StageState, TrainedPart, gathered, held_by
from pipefit.schema.profile import ModelProfile, differences
from pipefit.texts import dtype_name, kind_of, printable, shortened

# ---- Options of optimizers and state of schedulers as plain settings for JSON and any other plan.
#
# Every stage has its own optimizer and scheduler, with a parameter group for each layer. So settings of a
# group are stored per group: its options, and lists of a scheduler with an entry for each group, such as
# `base_lrs`. All other state of a scheduler does not depend on stages. A setting is named by its path in the
# scheduler's state dict, such as `_schedulers.0.last_epoch`. Types that JSON lacks are restored from the
# object that loads the settings: a tuple if it has a tuple, a tensor if it has a tensor.

# Lists of torch's schedulers with an entry for each group
_BY_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums", "min_lrs"}
_LONGEST = 1000  # elements of a list that is one setting

Settings = dict[str, Setting]


def options_of(group: Mapping[str, Any], what: str) -> Settings:
    """Return the options of a parameter group.

    Raises:
        UsageError: one cannot be written as JSON; names it.
    """
    return {
        name: setting(value, f"{what}'s option {name}") for name, value in group.items() if name != "params"
    }


def take_options(group: dict[str, Any], options: Settings) -> None:
    """Load `options` into a parameter group; its other options stay.

    Raises:
        FileError: one is of another kind than the group's.
    """
    for name, value in options.items():
        group[name] = _like(group.get(name), value, f"the optimizer's {name}")


def state_of(scheduler: Any, groups: int) -> tuple[Settings, list[Settings]]:
    """Return the state of a scheduler over `groups` groups: the common state, and that of each group.

    Raises:
        UsageError: a value cannot be written as JSON; names it.
    """
    common: Settings = {}
    by_group: list[Settings] = [{} for _ in range(groups)]
    _flatten("", scheduler.state_dict(), common, by_group, f"the scheduler {type(scheduler).__name__}")
    return common, by_group


def take_state(scheduler: Any, common: Settings, by_group: Sequence[Settings]) -> None:
    """Load the state that `state_of` returned for the same kind of scheduler over any groups.

    Raises:
        FileError: the state is of another scheduler; says what is missing or of another length.
    """
    rest = dict(common)
    state = _rebuilt("", scheduler.state_dict(), rest, by_group)
    unknown = next((path for path in rest if "." in path), None)
    if unknown is not None:
        raise FileError(
            f"the checkpoint's scheduler stores {unknown}, but the task's scheduler does not: use the same "
            "scheduler"
        )
    scheduler.load_state_dict({**state, **rest})


def setting(value: Any, what: str) -> Setting:
    """Return `value` as a setting: a number, a text, or a list of them.

    Raises:
        UsageError: it is another object, or a number that is not finite; the message names `what`.
    """
    if isinstance(value, list | tuple) and len(value) <= _LONGEST and all(_is_scalar(item) for item in value):
        return tuple(scalar(item, what) for item in value)
    return scalar(value, what)


def scalar(value: Any, what: str) -> Scalar:
    """Return `value` as a number, a text or None; a tensor of one element becomes its number.

    Raises:
        UsageError: it is another object, or a number that is not finite; the message names `what`.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and isfinite(value):
        return float(value)
    raise UsageError(
        f"{what} is {value if isinstance(value, float) else kind_of(value)}, which cannot be saved: "
        "checkpoints hold finite numbers, texts and lists of them"
    )


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _flatten(path: str, value: Any, common: Settings, by_group: Sequence[Settings], what: str) -> None:
    if _is_by_group(path, value, len(by_group)):
        for own, item in zip(by_group, value, strict=True):
            _flatten(path, item, own, (), what)
        return
    parts = _parts(value)
    if parts is None:
        common[path] = setting(value, f"{what}'s {path}")
        return
    for key, part in parts:
        _flatten(f"{path}.{key}".removeprefix("."), part, common, by_group, what)


def _rebuilt(path: str, template: Any, rest: Settings, by_group: Sequence[Settings]) -> Any:
    """Return `template` with the settings of its paths, which are removed from `rest`."""
    if _is_by_group(path, template, len(by_group)):
        return [_rebuilt(path, item, dict(own), ()) for own, item in zip(by_group, template, strict=True)]
    parts = _parts(template)
    if parts is not None:
        made = [
            (key, _rebuilt(f"{path}.{key}".removeprefix("."), part, rest, by_group)) for key, part in parts
        ]
        return (
            type(template)(dict(made))
            if isinstance(template, dict)
            else type(template)(item for _, item in made)
        )
    if path not in rest:
        raise FileError(
            f"the checkpoint's scheduler does not store {path}, but the task's scheduler does: use the same "
            "scheduler"
        )
    value = rest.pop(path)
    if isinstance(template, list | tuple) and len(template) != len(value if isinstance(value, tuple) else ()):
        raise FileError(
            f"the checkpoint's scheduler has a different number of {path} than the task's scheduler under "
            "this plan: use the same scheduler, or the plan that was trained"
        )
    return _like(template, value, f"the scheduler's {path}")


def _is_by_group(path: str, value: Any, groups: int) -> bool:
    return (
        groups > 0
        and path.rpartition(".")[2] in _BY_GROUP
        and isinstance(value, list)
        and len(value) == groups
    )


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the entries of a dictionary, or of a list with non-scalars, by keys; None for other values."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple) and not all(_is_scalar(item) for item in value):
        return list(enumerate(value))
    return None


def _like(template: Any, value: Setting, what: str) -> Any:
    """Return `value` in the type of `template`.

    Raises:
        FileError: it is of another kind, as in a file that another program has written; names `what`.
    """
    if isinstance(value, tuple) and isinstance(template, list | tuple) and len(template) == len(value):
        items = [_like(one, item, what) for one, item in zip(template, value, strict=True)]
        return tuple(items) if isinstance(template, tuple) else items
    if not _fits(template, value):
        raise FileError(
            f"the checkpoint has {shortened(repr(value))} as {what}, but the task has {template!r}"
        )
    if _is_number(template) and isinstance(value, bool | int | float):
        return template.clone().fill_(value)
    return list(value) if isinstance(value, tuple) else value


def _fits(template: Any, value: Setting) -> bool:
    """Return whether a setting can replace another; None fits any."""
    if template is None or value is None:
        return True
    if isinstance(template, list | tuple):
        return False  # lists of equal length are compared by element
    if isinstance(template, bool | str):
        return type(value) is type(template)
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- Snapshots
# A snapshot is taken between two steps. `copied` copies its tensors to the host, so that training may go on
# while they are written; the copy takes the bytes of the tensors in host memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of some stages: `tensors` by key; `part` makes the worker's part of the manifest of a `shard`."""

    tensors: dict[str, Tensor]
    part: Callable[..., Part]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def snapshot(
    stages: Sequence[tuple[int, Ranks]], names: Names, devices: Mapping[int, int], rank: int, *, once: bool
) -> Snapshot:
    """Return the present state of the numbered `stages`, without copies.

    `copied` makes it independent of the training. Stages with the same number are replicas. With `once`, a
    tensor of several replicas is included only for the replica that stores it. Workers with ranks of one
    replica call it together; with `once`, the first of them gets the whole state.

    Raises:
        UsageError: a value cannot be written: a tensor's dtype or layout, an option, a scheduler's state.
            Names it.
    """
    result = [(number, ranks[0], gathered([ranks], once=once)) for number, ranks in stages]
    kept = [(number, stage, state) for number, stage, state in result if not once or stage.is_first_rank]
    whole = StageState.joined([state for _, _, state in kept])
    runners = [stage for _, stage, _ in kept]
    telling = [stage for stage in runners if not once or stage.replica == 0 or stage.share is not None]
    first = [(number, stage) for number, stage, _ in kept if not once or stage.replica == 0]
    tensors: dict[str, Tensor] = {}
    stored = []
    for key, tensor in whole.entries().items():
        if key.kind == "held" or _stores(runners, names, key.name):
            tensors[tensor_key(*key)] = _checked(tensor, tensor_key(*key))
            dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
            stored.append(StoredTensor(**key._asdict(), shard=rank, dtype=dtype, shape=shape))
    groups, scheduler = _groups(telling, names)
    part = partial(
        Part,
        tensors=tuple(stored),
        stages=tuple(
            TrainedStage(
                start=stage.start, stop=stage.stop, device=devices[number], batches=stage.batch_number
            )
            for number, stage in first
        ),
        groups=groups,
        numbers=tuple(
            ParameterNumbers(
                name=name,
                values={key: scalar(v, f"the optimizer's {key} of {name}") for key, v in values.items()},
            )
            for name, values in whole.numbers.items()
            if values and _stores(runners, names, name)
        ),
        scheduler=scheduler,
    )
    return Snapshot(tensors=tensors, part=part)


def copied(tensors: dict[str, Tensor], progress: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """Copy tensors to host memory; `progress` is called before each.

    Each tensor is removed from `tensors`, so that an offloaded tensor that was read for the snapshot is freed
    after its copy.
    """
    result = dict[str, Tensor]()
    for key in list(tensors):
        progress()
        result[key] = tensors.pop(key).detach().to("cpu", copy=True)
    return result


def named_parameters(stage: TrainedPart, names: Names) -> dict[Tensor, str]:
    """Map the tensors that a stage's optimizer updates to their stored names.

    These tensors are parameters or their float32 copies.
    """
    result = dict[Tensor, str]()
    for layer in stage.layers:
        for local, tensor in stored_entries(layer.module).items():
            result[stage.updates.worked_on(tensor)] = names.stored[layer.originals[local]]
    return result


def _stores(stages: Sequence[TrainedPart], names: Names, name: str) -> bool:
    return any(names.are_of(name, stage.start, stage.stop) for stage in stages)


def _groups(
    stages: Sequence[TrainedPart], names: Names
) -> tuple[tuple[GroupSettings, ...], dict[str, Setting] | None]:
    """Return the settings of every parameter group, and the scheduler settings common to all groups."""
    result: list[GroupSettings] = []
    known: list[dict[str, Setting]] = []
    for stage in stages:
        if stage.optimizer is None:
            continue
        groups, named = stage.optimizer.param_groups, named_parameters(stage, names)
        scheduled: list[dict[str, Setting]] = [{} for _ in groups]
        if stage.scheduler is not None:
            common, scheduled = state_of(stage.scheduler, len(groups))
            known.append(common)
        for group, own in zip(groups, scheduled, strict=True):
            parameters = tuple(named[parameter] for parameter in group["params"])
            options = options_of(group, f"the optimizer {_optimizer_name(stage)}")
            result.append(GroupSettings(parameters=parameters, options=options, scheduled=own))
    return tuple(result), joined_settings(known)


def _optimizer_name(stage: TrainedPart) -> str:
    optimizer = stage.optimizer
    return type(optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer).__name__


def _checked(tensor: Tensor, key: str) -> Tensor:
    """Return the tensor if a shard can hold it.

    Raises:
        UsageError: it cannot.
    """
    dtype = dtype_name(tensor.dtype)
    if tensor.layout != torch.strided or dtype not in DTYPES or tensor.is_quantized:
        raise UsageError(
            f"{key} is a tensor of {tensor.dtype} and layout {tensor.layout}, which cannot be saved: "
            f"checkpoints hold dense tensors of {', '.join(DTYPES)}"
        )
    return tensor


# ---- Restoring


def check_task(checkpoint: Checkpoint, profile: ModelProfile) -> None:
    """Check that a checkpoint is of the task of `profile`.

    Raises:
        FileError: it is of another; says what differs.
    """
    result = differences(checkpoint.manifest.model, profile.fingerprint, profile.layers)
    if result:
        raise FileError(
            f"{_named(checkpoint)} does not belong to this task of {profile.model}: it was made for "
            f"{'; '.join(result)}. Load it into its own task, or load only its weights (load_state_dict)"
        )


def read_for(checkpoint: Checkpoint, stages: Sequence[TrainedPart], names: Names) -> dict[str, Tensor]:
    """Read the tensors of `checkpoint` that `stages` need, by their keys.

    Raises:
        DamagedCheckpoint: a shard is missing or damaged.
    """
    own = {
        names.stored[name] for stage in stages for layer in stage.layers for name in layer.originals.values()
    }
    held = {name for stage in stages for name in _held_likes(stage)}
    return checkpoint.read(
        [t for t in checkpoint.manifest.tensors if t.name in (held if t.kind == "held" else own)]
    )


def restore(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], stages: Sequence[TrainedPart], names: Names
) -> None:
    """Restore `stages` from `checkpoint`, whose task was checked, and its `tensors` from `read_for`.

    Tensors and settings are checked before any tensor is changed.

    Raises:
        FileError: the checkpoint lacks a value that the stages need; names it.
    """
    manifest = checkpoint.manifest
    for stage in stages:
        _check_batches(checkpoint, stage)
        _check_scale(checkpoint, stage)
    held = {name: like for stage in stages for name, like in _held_likes(stage).items()}
    state = stage_state_of(tensors, names, {entry.name: entry.values for entry in manifest.numbers})
    for stage in stages:
        _check_tensors(checkpoint, stage, state)
    for name, into in held.items():
        _check_like(checkpoint, name, tensors.get(tensor_key("held", name)), into)
    for stage in stages:
        _check_constants(checkpoint, stage, tensors)
        _take_groups(checkpoint, stage, names)
    state.load_into(stages, replace=True)
    for stage in stages:
        _take_held(stage, tensors)
        _take_rest(manifest, stage)


def stage_state_of(
    tensors: Mapping[str, Tensor], names: Names, numbers: Mapping[str, Mapping[str, Scalar]] | None = None
) -> StageState:
    """Return the state of tensors with checkpoint keys, under all names that the tensors have in the
    model.
    """
    masters, kept, model = dict[str, Tensor](), dict[str, dict[str, Tensor]](), dict[str, Tensor]()
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        if key in names.stored:
            model[key] = tensor
        elif kind == "master":
            masters[rest] = tensor
        elif kind == "optimizer":
            name, _, state = rest.rpartition("/")
            kept.setdefault(name, {})[state] = tensor
    for name in numbers or {}:
        kept.setdefault(name, {})

    def under_all_names(found: Mapping[str, Any]) -> dict[str, Any]:
        of_stored = {names.stored[name]: value for name, value in found.items() if name in names.stored}
        return {name: of_stored[stored] for name, stored in names.stored.items() if stored in of_stored}

    return StageState(
        tensors=under_all_names(model),
        optimizer=under_all_names(kept),
        master_weights=under_all_names(masters),
        numbers=under_all_names(numbers or {}),
    )


def check_weight(path: str | os.PathLike[str], name: str, tensor: Tensor | None, into: Tensor) -> None:
    """Check that a tensor of a file fits the model's tensor `into`.

    Floating-point dtypes may differ and are cast.

    Raises:
        FileError: it is missing, or has another shape or kind of numbers.
    """
    source = printable(path)
    if tensor is None:
        raise FileError(f"{source} does not fit the model: it lacks {name} of shape {tuple(into.shape)}")
    if tensor.shape != into.shape or (tensor.dtype != into.dtype and not _both_floating(tensor, into)):
        raise FileError(
            f"{source} does not fit the model: {name} has dtype {tensor.dtype} and shape "
            f"{tuple(tensor.shape)}, but the model needs {into.dtype} and {tuple(into.shape)}"
        )


def _both_floating(tensor: Tensor, other: Tensor) -> bool:
    return tensor.is_floating_point() and other.is_floating_point()


def whole_likes(stage: TrainedPart) -> StageState:
    """Return the state of a stage as meta tensors with the stage's dtypes and whole shapes."""
    present = StageState.of([stage])
    return present.of_tensors(
        {entry: _restoring_like(stage, entry.name, own) for entry, own in present.entries().items()}
    )


def _held_likes(stage: TrainedPart) -> dict[str, Tensor]:
    """Return meta tensors for the stage's layer tensors that are in no state dict."""
    held = {name: own for layer in stage.layers for name, own in held_by(stage, layer).items()}
    return {name: _restoring_like(stage, name, own) for name, own in held.items()} | _constants(stage)


def _restoring_like(stage: TrainedPart, name: str, own: Tensor) -> Tensor:
    shape = own.shape if stage.shards is None else stage.shards.whole_shape(name, own)
    return torch.empty(shape, dtype=own.dtype, device="meta")


def _constants(stage: TrainedPart) -> dict[str, Tensor]:
    """Return plain-attribute tensors of whole layers that a tensor-parallel rank has compiled into its
    code.
    """
    known = {} if stage.shards is None else stage.shards.constants
    return {name: tensor for layer in stage.layers for name, tensor in known.get(layer.name, {}).items()}


def _check_tensors(checkpoint: Checkpoint, stage: TrainedPart, state: StageState) -> None:
    """Check that every tensor that a stage needs is there, with its dtype and shape, before any is
    changed.
    """
    present = whole_likes(stage)
    for kind, have, need in (
        ("", state.tensors, present.tensors),
        ("the master copy of ", state.master_weights, present.master_weights),
    ):
        for name, into in need.items():
            _check_like(checkpoint, f"{kind}{name}", have.get(name), into)


def _check_like(checkpoint: Checkpoint, what: str, tensor: Tensor | None, into: Tensor) -> None:
    if tensor is None:
        raise FileError(f"{_named(checkpoint)} does not fit the model: {what} is missing")
    if tensor.shape != into.shape or tensor.dtype != into.dtype:
        raise FileError(
            f"{_named(checkpoint)} does not fit the model: {what} has dtype {tensor.dtype} and shape "
            f"{tuple(tensor.shape)}, but the model needs {into.dtype} and {tuple(into.shape)}"
        )


def _take_held(stage: TrainedPart, tensors: Mapping[str, Tensor]) -> None:
    """Load layer tensors that are in no state dict; equal ones are not written."""
    for name, into in ((name, own) for layer in stage.layers for name, own in held_by(stage, layer).items()):
        result = tensors[tensor_key("held", name)]
        result = result if stage.shards is None else stage.shards.part(name, result)
        if not torch.equal(into, result.to(into.device)):
            with torch.no_grad():
                into.copy_(result)


def _check_constants(checkpoint: Checkpoint, stage: TrainedPart, tensors: Mapping[str, Tensor]) -> None:
    """Check that the constants in a tensor-parallel rank's code equal those of the checkpoint."""
    for name, constant in _constants(stage).items():
        if not torch.equal(constant, tensors[tensor_key("held", name)].to(constant.device)):
            raise FileError(
                f"{_named(checkpoint)} and the model differ in {name}, a plain attribute of its layer, "
                "which tensor-parallel ranks cannot load: make it a buffer, or load under a plan without "
                "tensor parallelism"
            )


def _take_groups(checkpoint: Checkpoint, stage: TrainedPart, names: Names) -> None:
    """Load the scheduler's state and the options of the optimizer's groups."""
    if stage.optimizer is None:
        return
    known = {name: group for group in checkpoint.manifest.groups for name in group.parameters}
    named, groups = named_parameters(stage, names), stage.optimizer.param_groups
    result = [
        _one_group(checkpoint, [named[parameter] for parameter in group["params"]], known) for group in groups
    ]
    common = checkpoint.manifest.scheduler
    if (stage.scheduler is None) != (common is None):
        have, has = ("no", "one") if common is None else ("a", "none")
        raise FileError(
            f"{_named(checkpoint)} has {have} scheduler, but the task has {has}: use the same task"
        )
    if stage.scheduler is not None and common is not None:
        take_state(stage.scheduler, common, [group.scheduled for group in result])
    for group, settings in zip(groups, result, strict=True):
        take_options(group, settings.options)


def _one_group(
    checkpoint: Checkpoint, parameters: Sequence[str], known: Mapping[str, GroupSettings]
) -> GroupSettings:
    """Return the settings that the parameters of a group had in the checkpoint, which must be equal."""
    missing = next((name for name in parameters if name not in known), None)
    if missing is not None:
        raise FileError(
            f"{_named(checkpoint)} does not fit the optimizer: {missing} is missing in its parameter groups"
        )
    first, *others = (known[name] for name in parameters)
    for name, other in zip(parameters[1:], others, strict=True):
        if (other.options, other.scheduled) != (first.options, first.scheduled):
            raise FileError(
                f"{_named(checkpoint)} does not fit the optimizer: {parameters[0]} and {name} are now in "
                "one parameter group, but had different options when it was saved"
            )
    return first


def _check_batches(checkpoint: Checkpoint, stage: TrainedPart) -> None:
    if _batches(checkpoint.manifest, stage) is None:
        raise FileError(
            f"{_named(checkpoint)} was saved by stages that had taken different numbers of batches, as "
            "after a failed step, so other plans cannot continue its random draws: load it under the plan "
            "that saved it"
        )


def _batches(manifest: Manifest, stage: TrainedPart) -> int | None:
    """Return the batches that a stage has trained: those of the same stage, or of all if equal.

    Return None if unknown.
    """
    same = [old.batches for old in manifest.stages if (old.start, old.stop) == (stage.start, stage.stop)]
    every = {old.batches for old in manifest.stages}
    return same[0] if same else every.pop() if len(every) == 1 else None


def _check_scale(checkpoint: Checkpoint, stage: TrainedPart) -> None:
    scales = stage.agreement is not None and stage.agreement.scale is not None
    if scales != (checkpoint.manifest.loss_scale is not None):
        raise FileError(f"{_named(checkpoint)} does not fit the plan: only one of them uses loss scaling")


def _take_rest(manifest: Manifest, stage: TrainedPart) -> None:
    """Load the loss scale, the seed and the number of batches, on which random draws depend."""
    batches = _batches(manifest, stage)
    assert batches is not None
    stage.seed, stage.batch_number = manifest.seed, batches
    scale = None if stage.agreement is None else stage.agreement.scale
    if scale is not None and manifest.loss_scale is not None:
        scale.value, scale.quiet = manifest.loss_scale.value, manifest.loss_scale.quiet


def _named(checkpoint: Checkpoint) -> str:
    return printable(checkpoint.folder)
