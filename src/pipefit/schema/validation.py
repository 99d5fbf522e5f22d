"""Checks of Python values: fields of frozen dataclasses, and arguments.

An error is one sentence that names the mistake. `check_types(self)` in `__post_init__` takes about a
microsecond and imports nothing; `whole`, `number` and `instance` check arguments. (`schema.json_text` checks
files.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from re import search
from types import UnionType
from typing import Any, ClassVar, Literal, Union, cast, get_args, get_origin, get_type_hints

from pipefit.errors import UsageError
from pipefit.texts import shortened, unknown

# ---- Names of torch's dtypes, for use without torch

_FLOATS = "float64 float32 float16 bfloat16 complex128 complex64 complex32 bcomplex32"
_SMALL_FLOATS = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
_INTEGERS = "bool int64 int32 int16 int8 uint64 uint32 uint16 uint8"
_SMALL_INTEGERS = "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"
_OTHERS = "qint8 qint32 quint8 quint2x4 quint4x2 bits8 bits16 bits1x8 bits2x4 bits4x2"
DTYPES = frozenset(" ".join((_FLOATS, _SMALL_FLOATS, _INTEGERS, _SMALL_INTEGERS, _OTHERS)).split())
_USUAL = ("float32", "bfloat16", "float16", "float64", "int64")


def check_dtype(name: str) -> None:
    """Check that torch has a dtype of this name.

    Raises:
        UsageError: torch does not have it.
    """
    if name not in DTYPES:
        raise UsageError(unknown(f"{shortened(repr(name))} is not a dtype of torch", name, _USUAL))


def itemsize(dtype: str) -> int:
    """Return the bytes of an element of the dtype of this name."""
    bits = search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


# ----------------------------------------------------------------------------------------------------

LONGEST_SECONDS = 1e9  # longer waits do not fit torch's clocks


def check_types(instance: Any) -> None:
    """Check that every field of a dataclass has its annotated type.

    An int is accepted as a float; a bool is not accepted as a number.

    Raises:
        UsageError: a field has another type; names the field, its type and the value.
    """
    for name, fits, meant in _annotated(cast("Any", type(instance))):
        if not fits(value := getattr(instance, name)):
            raise UsageError(f"{type(instance).__name__}.{name} must be {meant}, not {_repeated(value)}")


def check_arguments(kind: Any, given: Mapping[str, object]) -> None:
    """Check named arguments against the types of a TypedDict or function; names that it lacks are ignored.

    Raises:
        UsageError: an argument has another type; names it, its type and the value.
    """
    for name, fits, meant in _annotated(kind):
        if name in given and not fits(given[name]):
            raise UsageError(f"{name} must be {meant}, not {_repeated(given[name])}")


def check_names(function: str, given: Mapping[str, object], kind: Any, elsewhere: Mapping[str, str]) -> None:
    """Check that a TypedDict has all of a function's named arguments.

    Raises:
        UsageError: an argument is unknown; says where it belongs if `elsewhere` does, or else the known
            names.
    """
    known = [name for name, *_ in _annotated(kind)]
    for name in given:
        if name in elsewhere:
            raise UsageError(f"{function} does not take the argument {name!r}: {elsewhere[name]}")
        if name not in known:
            raise UsageError(unknown(f"{function} does not take the argument {name!r}", name, known))


def whole(name: str, value: int, least: int, most: int | None = None) -> int:
    """Return `value` if it is a whole number from `least` to `most`, without upper limit if `most` is None.

    Raises:
        UsageError: any other value; names the argument.
    """
    if type(value) is not int or value < least or (most is not None and value > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} must be a whole number {span}, not {_repeated(value)}")
    return value


def instance(name: str, value: object, kind: Any, hint: str = "") -> Any:
    """Return `value` if it is a `kind`; `hint` says how to get one.

    Raises:
        UsageError: any other value; names the argument.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        from_where = f": {hint}" if hint else ""
        raise UsageError(f"{name} must be {article} {kind.__name__}, not {_repeated(value)}{from_where}")
    return value


def seed_number(seed: int) -> int:
    """Return `seed` if it is a signed 64-bit integer.

    Torch's generators take such seeds, and step numbers can be added.

    Raises:
        UsageError: any other value.
    """
    return whole("seed", seed, -(1 << 63), (1 << 63) - 1)


def number(name: str, value: float, *, below: float) -> float:
    """Return `value` if it is a number above 0 and below `below`.

    Raises:
        UsageError: any other value; names the argument.
    """
    if not _is_float(value) or not 0 < value < below:
        raise UsageError(f"{name} must be a number above 0 and below {below:g}, not {_repeated(value)}")
    return value


# ---- Annotations to checks

_Fits = Callable[[Any], bool]


@cache
def _annotated(kind: Any) -> tuple[tuple[str, _Fits, str], ...]:
    """Return for every annotation of a class: its name, its check, and its type in words."""
    hints = get_type_hints(kind).items()
    return tuple(
        (name, _fits(hint), _meant(hint)) for name, hint in hints if get_origin(hint) is not ClassVar
    )


def _fits(hint: Any) -> _Fits:
    """Return a check for an annotated type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return lambda value: type(value) is str and value in parts
    if origin in (Union, UnionType):
        choices = tuple(map(_fits, parts))
        return lambda value: any(fits(value) for fits in choices)
    if origin is tuple:
        return _fits_tuple(parts)
    if origin is Callable:
        return callable
    if origin is dict:
        key, entry = map(_fits, parts)
        return lambda value: (
            isinstance(value, dict) and all(map(key, value)) and all(map(entry, value.values()))
        )
    if hint is int:
        return lambda value: type(value) is int
    if hint is float:
        return _is_float
    return lambda value: isinstance(value, hint)


def _fits_tuple(parts: tuple[Any, ...]) -> _Fits:
    if parts[-1] is Ellipsis:
        each, quick = _fits(parts[0]), _quick(parts[0])
        return lambda value: isinstance(value, tuple) and (quick(value) or all(map(each, value)))
    of = tuple(map(_fits, parts))
    return lambda value: (
        isinstance(value, tuple)
        and len(value) == len(of)
        and all(fits(part) for fits, part in zip(of, value, strict=True))
    )


def _quick(hint: Any) -> _Fits:
    """Return a fast check for tuples of ints, or of int tuples of one length.

    False means that the slow check must decide. Files may have millions of elements, for which the fast check
    takes a tenth of the time.
    """
    parts = get_args(hint)
    if hint is int:
        return lambda values: set(map(type, values)) == {int}
    if get_origin(hint) is tuple and set(parts) == {int}:
        return lambda values: (
            set(map(type, values)) == {tuple}
            and set(map(len, values)) == {len(parts)}
            and set(map(type, chain.from_iterable(values))) == {int}
        )
    return lambda _: False


def _is_float(value: Any) -> bool:
    return isinstance(value, float | int) and value is not True and value is not False


def _meant(hint: Any) -> str:
    """Format an annotation in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in (Union, UnionType):
        return " or ".join(map(_meant, parts))
    if origin is tuple:
        return f"a tuple of {_plural(parts)}"
    if origin is Callable:
        return "a function"
    if origin is dict:
        return f"a dictionary of {getattr(parts[1], '__name__', parts[1])} by {parts[0].__name__}"
    if hint is type(None):
        return "None"
    name = getattr(hint, "__name__", str(hint))
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"


def _plural(parts: tuple[Any, ...]) -> str:
    kinds = parts[:-1] if parts[-1] is Ellipsis else parts
    return ", ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)


def _repeated(value: Any) -> str:
    """Format a refused value for a message, with its type if that says more."""
    shown = shortened(repr(value))
    return shown if value is None or isinstance(value, bool | str) else f"{shown} ({type(value).__name__})"
