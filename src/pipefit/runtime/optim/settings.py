"""Options of optimizers and state of schedulers as plain settings for JSON and any other plan.

Every stage has its own optimizer and scheduler, with a parameter group for each layer. So settings of a group
are stored per group: its options, and lists of a scheduler with an entry for each group, such as `base_lrs`.
All other state of a scheduler does not depend on stages. A setting is named by its path in the scheduler's
state dict, such as `_schedulers.0.last_epoch`. Types that JSON lacks are restored from the object that loads
the settings: a tuple if it has a tuple, a tensor if it has a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from torch import Tensor

from pipefit.checkpoints.manifest import Scalar, Setting
from pipefit.errors import FileError, UsageError
from pipefit.texts import kind_of, shortened

# Lists of torch's schedulers with an entry for each group
_BY_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums", "min_lrs"}
_LONGEST = 1000  # elements of a list that is one setting

Settings = dict[str, Setting]


def options_of(group: Mapping[str, Any], what: str) -> Settings:
    """Return the options of a parameter group.

    Raises:
        UsageError: one cannot be written as JSON; names it.
    """
    return {name: setting(value, f"{what}'s option {name}") for name, value in group.items() if name != "params"}


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
        raise FileError(f"the checkpoint's scheduler keeps {unknown}, which the task's has not: use the same scheduler")
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
        f"{what} is {value if isinstance(value, float) else kind_of(value)}, which no checkpoint can hold: it takes "
        "finite numbers, texts and lists of them"
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
        made = [(key, _rebuilt(f"{path}.{key}".removeprefix("."), part, rest, by_group)) for key, part in parts]
        return type(template)(dict(made)) if isinstance(template, dict) else type(template)(item for _, item in made)
    if path not in rest:
        raise FileError(f"the checkpoint's scheduler has no {path}, which the task's keeps: use the same scheduler")
    value = rest.pop(path)
    if isinstance(template, list | tuple) and len(template) != len(value if isinstance(value, tuple) else ()):
        raise FileError(
            f"the checkpoint's scheduler has another number of {path} than the task's under this plan: use the same "
            "scheduler, or the plan that was trained"
        )
    return _like(template, value, f"the scheduler's {path}")


def _is_by_group(path: str, value: Any, groups: int) -> bool:
    return groups > 0 and path.rpartition(".")[2] in _BY_GROUP and isinstance(value, list) and len(value) == groups


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
        raise FileError(f"the checkpoint has {shortened(repr(value))} as {what}, where the task has {template!r}")
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
