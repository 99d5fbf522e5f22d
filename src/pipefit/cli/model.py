"""MODEL on the command line: `zoo:gpt`, `hf:gpt2`, or `package.module:factory`.

Modules are imported from the current folder or the environment.

`megatron:FILE` and `torchtitan:NAME` are one of the first two, with the shape of another tool's
configuration. A factory is called with the `--set` arguments and returns a `Task`. Its code runs with all
rights of the user.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.schema.validation import DTYPES
from pipefit.texts import meant, printable

if TYPE_CHECKING:
    from pipefit.capture import Task
    from pipefit.models.settings import Setting
    from pipefit.schema.plan import Plan
    from pipefit.schema.training import Precision

_FORMS = "write zoo:NAME, hf:NAME, or package.module:factory for your own model; pipefit models lists them"
_ELSEWHERE = ("megatron", "torchtitan")
_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "intermediate_size", "vocab_size", "n_embd", "n_layer", "n_head",
         "d_model", "num_layers", "num_heads", "sequence", "attention", "optimizer")  # fmt: skip


def resolve(model: str, settings: Sequence[str], precision: Precision | None = None) -> Task:
    """Return the task of MODEL and its `--set` arguments, cast to `precision` if given.

    Output of the user's code is redirected to stderr, because stdout is for results.

    Raises:
        UsageError: no such model, module or factory; it raised; or it returned something else.
    """
    with redirect_stdout(sys.stderr):
        task = _task(model, settings)
    return task if precision is None else replace(task, precision=precision)


def precision_of(plan: Plan) -> Precision | None:
    """Return the precision to which the MODEL of `plan` is cast.

    Returns None if parameters have several dtypes, so no cast was made.
    """
    kinds = (kind for measurement in plan.profile.measurements for kind in measurement.kinds)
    dtypes = {
        parameter.dtype for kind in kinds for parameter in kind.parameters if "float" in parameter.dtype
    }
    is_as_it_is = len(dtypes) > 1 and plan.training.precision in DTYPES
    return None if is_as_it_is else plan.training.precision


class _Raised(UsageError):
    """An error in the model's own code, which is the cause of this error."""


def build(model: str, settings: Sequence[str], precision: Precision | None) -> Task:
    """Return the task of `resolve` in a worker.

    Errors of the model's own code are failures of the worker here, since the same arguments made a task
    before.
    """
    try:
        return resolve(model, settings, precision)
    except _Raised as error:
        raise error.__cause__ or error from None


def check_order(plan: Path, model: str) -> None:
    """Check that a plan's file and a model are given in the right order.

    Raises:
        UsageError: they are swapped.
    """
    if ":" in str(plan) and not os.path.exists(plan) and os.path.exists(model):
        raise UsageError(f"{plan} is a model and {model} is a file: give the plan first, {model} {plan}")


def _task(model: str, settings: Sequence[str]) -> Task:
    source, name, shape = _parts(model)
    arguments = {**shape, **parse_settings(settings)}
    if source == "hf":
        from pipefit.models.hugging_face import hf

        return hf(name, **arguments)
    if source == "zoo":
        from pipefit import models

        return models.build(name, **arguments)
    return _from_factory(source, name, arguments)


def _parts(model: str) -> tuple[str, str, dict[str, Any]]:
    """Return the source of a model, its name there, and the settings of its configuration."""
    source, _, name = model.partition(":")
    if not source or not name:
        from pipefit.models import MODELS

        perhaps = f", but zoo:{model} is" if model in MODELS else ""
        raise UsageError(f"{model!r} is not a model{perhaps}: {_FORMS}")
    if source not in _ELSEWHERE:
        return source, name, {}
    from pipefit.recipes.shapes import CONFIGURATIONS

    ours, shape = CONFIGURATIONS[source](name)
    return (*ours.split(":"), shape)  # type: ignore[return-value]


def settings_of(model: str) -> tuple[Setting, ...]:
    """Return the settings that `--set` takes for MODEL: names, defaults, and rules if known.

    Raises:
        UsageError: no such model, module or factory.
    """
    from pipefit.models import settings

    source, name, shape = _parts(model)
    if source == "hf":
        from pipefit.models.hugging_face import settings_of_architecture

        return _with(settings_of_architecture(name), shape)
    if source == "zoo":
        from pipefit import models

        return _with(settings.settings_of(models.factory(name)), shape)
    with redirect_stdout(sys.stderr):
        factory = _factory(source, name)
    try:
        return settings.settings_of(factory)
    except (TypeError, ValueError):  # written in C, without a signature
        return ()


def _with(settings: tuple[Setting, ...], shape: dict[str, Any]) -> tuple[Setting, ...]:
    """Replace defaults of settings by those of a configuration."""
    return tuple(item._replace(default=shape.get(item.name, item.default)) for item in settings)


def check_factory(model: str) -> None:
    """Check by its signature that MODEL can be called with named settings; it is not called.

    Raises:
        UsageError: its arguments have no defaults, or its signature is unknown.
    """
    source, name, _ = _parts(model)
    if source in ("hf", "zoo"):
        return
    with redirect_stdout(sys.stderr):
        factory = _factory(source, name)
    try:
        takes = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C
        raise UsageError(
            f"the signature of {model} is unknown: name a function that returns a pipefit.Task"
        ) from None
    if takes.parameters and all(item.default is item.empty for item in takes.parameters.values()):
        raise UsageError(
            f"{model} takes {takes}, but a factory must return a pipefit.Task and have only arguments with "
            "defaults"
        )


def built_with(model: str, settings: Sequence[str]) -> str:
    """Describe all settings of a model, including defaults.

    For Hugging Face's configurations only those that determine the shape. Empty if a factory's settings are
    unknown.
    """
    given = parse_settings(settings)
    known = {item.name: item.default for item in settings_of(model)}
    of_transformers = _parts(model)[0] == "hf"
    shown = {key: value for key, value in known.items() if key in _SHAPE or not of_transformers}
    texts = [f"{key}={value}" for key, value in {**shown, **given}.items()]
    return f"Built with {', '.join(texts)}." if texts else ""


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse `["layers=4", "optimizer=adamw"]` to `{"layers": 4, "optimizer": "adamw"}`.

    Values are Python literals, or else text.

    Raises:
        UsageError: not of this form, or a name given twice.
    """
    result: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(
                f"--set {setting} is not a setting: write --set name=value, such as --set layers=4"
            )
        if key in result:
            raise UsageError(f"--set {key} is given twice: remove one")
        result[key] = _value(text.strip())
    return result


def _value(text: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about text that resembles a number
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _from_factory(source: str, name: str, arguments: dict[str, Any]) -> Task:
    from pipefit.capture import Task

    factory = _factory(source, name)
    if isinstance(factory, type) and hasattr(factory, "forward"):
        raise UsageError(
            f"{source}:{name} is a module, but a task also needs batches, a loss and an optimizer: name a "
            f"function that returns pipefit.Task({name}, batch=..., loss=..., optimizer=...)"
        )
    try:
        task = factory(**arguments)
    except PipefitError:
        raise
    except (Exception, SystemExit) as error:
        raise _Raised(
            f"{source}:{name} raised {in_one_line(error)}: it should only return a pipefit.Task, without "
            "training; run again with --debug for the traceback"
        ) from error
    if not isinstance(task, Task):
        raise UsageError(
            f"{source}:{name} returned a {type(task).__name__}, but must return a pipefit.Task, which "
            "describes how a module is trained: pipefit.Task(module, batch=..., loss=...)"
        )
    return task


def _factory(source: str, name: str) -> Callable[..., object]:
    result = _attribute(_module(source), source, name)
    if not callable(result):
        raise UsageError(f"{source}:{name} is a {type(result).__name__}, not a function that returns a Task")
    return cast("Callable[..., object]", result)


def _as_module(file: str) -> str:
    """Return advice about a file given instead of a module.

    The advice names its module, relative to the current folder if all folders between can be packages, else
    to the file's folder; or it says that the file cannot be a module.
    """
    folder, name = os.path.split(os.path.abspath(file))
    if not name[:-3].isidentifier():
        return (
            "a module cannot have this name: rename it to "
            f"{re.sub(r'^(?=[0-9])|[^0-9A-Za-z]', '_', name[:-3])}.py"
        )
    within = os.path.relpath(folder, os.getcwd()).split(os.sep)
    packages = [] if within == ["."] else within
    if all(part.isidentifier() for part in packages):
        return f"write {'.'.join([*packages, name[:-3]])}:factory without .py"
    return f"write {name[:-3]}:factory without .py, in the folder {printable(folder)}"


def _module(source: str) -> Any:
    """Import the module of this name; the current folder comes first, as with `python -m`."""
    if source.endswith(".py"):
        raise UsageError(f"{source!r} is a file: {_as_module(source)}")
    if not all(part.isidentifier() for part in source.split(".")):
        raise UsageError(f"{source!r} is not the name of a module: {_FORMS}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is not None and (source == error.name or source.startswith(f"{error.name}.")):
            raise UsageError(
                f"module {error.name!r} was not found here or in the environment: {_FORMS}"
            ) from error
        raise _Raised(f"module {source} cannot be imported: {in_one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise _Raised(
            f"module {source} raised {in_one_line(error)} on import: run again with --debug for the traceback"
        ) from error


def _attribute(module: Any, source: str, name: str) -> Any:
    result = module
    for part in name.split("."):
        if not hasattr(result, part):
            guess = meant(part, [other for other in dir(result) if not other.startswith("_")])
            raise UsageError(f"module {source} does not define {name!r}{f'; {guess}' if guess else ''}")
        result = getattr(result, part)
    return result
