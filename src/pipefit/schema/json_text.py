"""JSON texts as checked types.

A text is read twice. `json` parses it and finds what pydantic overlooks: keys that appear twice, objects with
thousands of keys, and the place of a syntax error. Then pydantic checks it, in strict mode: `"3"` is not 3
and `true` is not 1. Checking ends at the first wrong element of a list, because collecting the mistakes of a
malicious text takes gigabytes. Reading needs at most eighty times the size of the text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pipefit.errors import FileError
from pipefit.texts import printable, shortened

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator, ValidationError

T = TypeVar("T")

_MOST_KEYS = 4096  # of one object; objects with free keys hold options, or figures by dtype
_LARGEST = 10**40  # above every sensible size, and below the largest float
_WORDS = "true", "false", "null", "-0"  # a text may be cut off in one of them
# mistakes that explain others, such as missing keys
_FIRST = "unexpected_keyword_argument", "extra_forbidden", "finite_number"


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's writer of a type; cached, because building one takes milliseconds."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def utf8_text(content: bytes, source: str) -> str:
    """Decode a file's content, without a byte order mark.

    Raises:
        FileError: it is not UTF-8; `source` names it.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{source} is not text: byte {error.start} is not UTF-8") from None


def json_object(content: bytes, source: str) -> dict[str, Any]:
    """Parse a text that holds one object.

    Raises:
        FileError: it holds something else, or is damaged; `source` names it.
    """
    text = utf8_text(content, source).rstrip()
    if not text:
        raise FileError(f"{source} is empty: create it or copy it again")
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise FileError(f"{source} {_damage(text, error)}") from None
    except RecursionError:
        raise FileError(f"{source} is not valid: it is nested too deeply") from None
    except ValueError as error:  # of the two functions above, or a number with thousands of digits
        raise FileError(f"{source} is not valid: {error}") from None
    if not isinstance(data, dict):
        raise FileError(f"{source} is JSON, but not a pipefit document: it is not an object")
    return data


def checked(kind: type[T], data: Mapping[str, Any], source: str) -> T:
    """Convert parsed JSON or TOML to a dataclass `kind`.

    Raises:
        FileError: names `source`, the first mistake and its place.
    """
    from pydantic_core import PydanticSerializationError, ValidationError, to_json

    try:
        text = to_json(data, inf_nan_mode="constants", fallback=str)
        result: T = _reader(cast("Any", kind)).validate_json(text, strict=True)
    except PydanticSerializationError as error:
        reason = "it is nested too deeply" if "depth" in str(error) else "a text in it is not Unicode"
        raise FileError(f"{source} is not valid: {reason}") from None
    except ValidationError as error:
        raise FileError(f"{source} is not valid: {_first_mistake(error, data)}") from None
    return result


# ---- Parsing


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shortened(key)!r} appears twice in one object")
    if len(result) > _MOST_KEYS:
        first = shortened(next(iter(result)))
        raise ValueError(f"the object that begins with {first!r} has more than {_MOST_KEYS} keys")
    return result


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a finite number")


def _damage(text: str, error: json.JSONDecodeError) -> str:
    """Describe a syntax error; a text may also be cut off."""
    rest = text[error.pos :]
    if error.msg.startswith("Unterminated") or any(word.startswith(rest) for word in _WORDS):
        return "is truncated: create it or copy it again"
    return f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"


# ---- Checking


@cache
def _reader(kind: Any) -> SchemaValidator:
    """Return a validator of a type that refuses unknown keys, stops at a list's first mistake and limits
    numbers.
    """
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator

    schema = TypeAdapter(kind).core_schema
    _limit(schema)
    return SchemaValidator(schema)


def _limit(schema: Any) -> None:
    """Add the limits to all parts of a pydantic schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "tuple":
            schema["fail_fast"] = True
        elif schema.get("type") == "dataclass-args":
            schema["extra_behavior"] = "forbid"
        elif schema.get("type") == "float":
            schema["allow_inf_nan"] = False
        elif schema.get("type") == "int":
            schema["gt"], schema["lt"] = -_LARGEST, _LARGEST
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list | tuple):
            _limit(part)


def _first_mistake(refused: ValidationError, data: Any) -> str:
    """Return the place and the meaning of the mistake that explains the most."""
    errors = refused.errors(include_url=False, include_input=False)
    mistakes = [error for kind in _FIRST for error in errors if error["type"] == kind]
    error = (mistakes or errors)[0]
    place, value = _found(error["loc"], data)
    kind = error["type"]
    if kind == "missing":
        place, meaning = place + _part_text(error["loc"][-1]), "this is missing"
    elif kind in ("unexpected_keyword_argument", "extra_forbidden"):
        meaning = "this key is unknown"
    elif kind == "finite_number":
        meaning = "a number must be finite"
    elif kind == "too_long":  # a tuple
        meaning = f"{error['ctx']['max_length']} elements are expected, not {len(value)}"
    elif kind == "json_invalid":  # of a text that `to_json` wrote
        meaning = "it is nested too deeply"
    elif kind == "value_error":  # raised by a dataclass's own check
        meaning = str(error["ctx"]["error"])
    else:
        expected = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
        verb = "keys and values are" if kind == "dataclass_type" else f"{expected} is"
        meaning = f"{verb} expected, not {shortened(json.dumps(value, default=str))}"
    more = " (and more)" if len(errors) > 1 else ""
    return f"{place.removeprefix('.')}{': ' if place else ''}{meaning}{more}"


def _found(location: tuple[int | str, ...], data: Any) -> tuple[str, Any]:
    """Follow a location as far as it names keys and elements, and not types.

    Returns its text, such as `.stages[1].start`, and the value there.
    """
    place = ""
    for part in location:
        is_key = isinstance(data, dict) and part in data
        is_element = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if is_key or is_element:
            place, data = place + _part_text(part), data[part]
    return place, data


def _part_text(part: int | str) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{printable(part)}"
