"""Outside data to checked types: what pydantic refuses becomes one sentence that names the file and the place in it.

Types are the frozen dataclasses themselves. Values are taken strictly: `"3"` is not 3 and `true` is not 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pipefit.errors import FileError

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")

_SHOWN = 60  # characters of a refused value that a message repeats
_MEANINGS = {
    "unexpected_keyword_argument": "this key is not known",
    "missing": "this is missing",
    "json_invalid": "a text in it is not Unicode",
}


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Pydantic's reader and writer of a type; built once, because that costs milliseconds."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def validated(kind: type[T], data: object, source: str) -> T:
    """`data`, as JSON or TOML gave it, as a `kind`.

    Raises:
        FileError: naming `source`, the first thing that is wrong, where it is, and how many more there are.
    """
    from pydantic import ValidationError

    reader = adapter(cast("Any", kind))
    try:
        value: T = reader.validate_json(json.dumps(data, allow_nan=False, default=str), strict=True)
    except ValidationError as refused:
        raise FileError(f"{source} is not valid: {_sentence(refused)}") from None
    except ValueError:
        raise FileError(f"{source} is not valid: it holds a number that is not finite") from None
    except RecursionError:
        raise FileError(f"{source} is not valid: it is nested too deeply") from None
    return value


def place(path: Sequence[str | int]) -> str:
    """`stages[1].start` of `("stages", 1, "start")`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{printable(part)}" for part in path)
    return text.removeprefix(".")


def printable(text: str) -> str:
    """`text` without control characters, which a file could use to rewrite a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _sentence(refused: Any) -> str:
    """The first of pydantic's findings in our words."""
    errors = sorted(refused.errors(include_url=False), key=lambda error: error["type"] != "unexpected_keyword_argument")
    first = errors[0]  # an unknown key is often the misspelling of a missing one
    meaning = _MEANINGS.get(first["type"]) or _otherwise(first)
    if "recursion limit" in str(first.get("ctx")):
        meaning = "it is nested too deeply"
    where = place(first["loc"])
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where}: {meaning}{more}" if where else f"{meaning}{more}"


def _otherwise(error: ErrorDetails) -> str:
    if error["type"] == "value_error":  # raised by a noun's own check
        return str(error["ctx"]["error"])
    if error["type"] == "dataclass_type":
        return f"keys and values are expected, not {_shown(error['input'])}"
    expected = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{expected} is expected, not {_shown(error['input'])}"


def _shown(value: Any) -> str:
    text = printable(json.dumps(value, default=str))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
