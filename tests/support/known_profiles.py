"""Profiles that tests share: `profile` has the arguments of pipefit's own, and makes equal ones once in a process.

Tasks are equal if they are made by the same code with the same values. Tests whose subject is the profiler, or that
change what a profile depends on, call pipefit's own function.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from pipefit import profiler
from pipefit.capture import Task
from pipefit.schema.profile import ModelProfile

_KNOWN: dict[Hashable, ModelProfile] = {}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_CODES: dict[int, object] = {}  # every code object in a key, so that its number stays its own


class _UnknownError(Exception):
    """A part of a task whose values cannot be compared, such as a module or a tensor."""


def profile(task: Task, **options: Any) -> ModelProfile:
    """Return `pipefit.profiler.profile(task, **options)`, made before if this process has made it without a warning."""
    try:
        key = _described(task), _described({"threads": 1, **options}), _settings()
    except (_UnknownError, ValueError):  # an empty cell of a closure
        return profiler.profile(task, **options)
    if key not in _KNOWN:
        with warnings.catch_warnings(record=True) as warned:
            result = profiler.profile(task, **options)
        for one in warned:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if warned:
            return result
        _KNOWN[key] = result
    return _KNOWN[key]


def _settings() -> Hashable:
    """Return the settings of torch that profiles follow."""
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
    )


def _described(value: Any) -> Hashable:
    """Return a value that is equal for equal tasks and options.

    Raises:
        _UnknownError: a part cannot be compared.
    """
    match value:
        case _ if isinstance(value, _PLAIN):
            return type(value), value
        case type() | BuiltinFunctionType():
            return value
        case FunctionType():
            _CODES[id(value.__code__)] = value.__code__
            cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
            return (
                FunctionType,
                id(value.__code__),
                _described((cells, value.__defaults__, value.__kwdefaults__)),
            )
        case MethodType():
            return MethodType, _described(value.__func__), _described(value.__self__)
        case partial():
            return partial, _described((value.func, value.args, value.keywords))
        case Mapping():
            return dict, frozenset((_described(key), _described(one)) for key, one in value.items())
        case list() | tuple() | range():
            return type(value), tuple(map(_described, value))
        case _ if is_dataclass(value):
            return type(value), tuple(_described(getattr(value, field.name)) for field in fields(value))
    raise _UnknownError
