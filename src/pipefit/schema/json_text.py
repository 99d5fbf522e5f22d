"""Reading of JSON text as a checked type, piece by piece.

Parsing a whole file before checking it costs up to fifty times its size (`[[],[],...]`), and collecting every
mistake costs more. Therefore the types lead: an object whose type is a dataclass is read key by key, a list
in pieces of 16 KiB, and pydantic checks each piece. Memory is limited to the text, the values that are valid
so far, and one piece; the first mistake ends the reading.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from pipefit.texts import counted, shortened

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")
_Scanner = Callable[[str, int], tuple[Any, int]]
Path = tuple[str | int, ...]

_PIECE = 1 << 14  # bytes; limits the mistakes that pydantic collects
_GLANCE = 1 << 8  # bytes scanned first; most single values are shorter
_MOST_KEYS = 4096  # of one object; objects with free keys hold options, or figures by dtype
_LONGEST_NUMBER = 40  # characters; the largest sensible size has 20
_MOST_POOLED = 1 << 16  # distinct elements of a list that are kept, so that equal ones are one object

_SPACE = re.compile(rb"[ \t\n\r]*")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# After digits are mapped to equal ones, a number that may be infinite or absurdly long contains one of these.
# A regular expression for the same check takes half of the reading time.
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_UNUSUAL = (b"e000", b"0" * _LONGEST_NUMBER)
_KEYS = dict[str, Any]  # type of an object if only its keys are needed
_MEANINGS = {
    "unexpected_keyword_argument": "this key is not known",
    "missing": "this is missing",
    "json_invalid": "a text in it is not Unicode",
}


class Refusal(Exception):
    """An invalid text: the reason and the path.

    If `damage`, the text is not JSON, or is cut off; otherwise the value at `path` is invalid. `more` says
    that other values are invalid too.
    """

    def __init__(self, what: str, path: Path = (), *, more: bool = False, damage: bool = False) -> None:
        super().__init__(what)
        self.what, self.path, self.more, self.damage = what, path, more, damage


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's reader and writer of a type; cached, because building one takes milliseconds."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


class JsonText:
    """The UTF-8 bytes of a JSON text. Positions are in bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._after = 0  # end of the last key's value

    def read(self, kind: type[T], ignored: frozenset[str] = frozenset()) -> T:
        """Read the one object in the text as a dataclass `kind`, without the keys in `ignored`.

        Raises:
            Refusal: the first mistake.
        """
        try:
            value, end = self._object(kind, self._start(), (), ignored)
        except RecursionError:
            raise Refusal("is not valid: it is nested too deeply", damage=True) from None
        if self._skip_space(end) < len(self.content):
            raise self._syntax("Extra data", self._skip_space(end))
        return cast("T", value)

    def header(self, *names: str) -> dict[str, Any]:
        """Return the values of these top-level keys if present and short.

        Reads no further than the last of them.

        Raises:
            Refusal: the text up to there is not JSON, or does not hold an object.
        """
        result: dict[str, Any] = {}
        try:
            for key, at in self._keys(self._start(), ()):
                if key in names:
                    end = self._end(at)
                    result[key] = None if end is None else _loaded(self.content[at:end])
                    if end is None or len(result) == len(names):
                        break
                _, self._after = self._value(Any, at, ())
        except RecursionError:
            raise Refusal("is not a document: it is nested too deeply", damage=True) from None
        return result

    # ---- Values of a type

    def _value(self, kind: Any, at: int, path: Path) -> tuple[Any, int]:
        """Read the value at `at`.

        Returns the value and its end. Small values are read in one piece, others by their parts.
        """
        end = self._end(at)
        if end is not None:
            return (None if kind is Any else _checked(kind, self.content[at:end], path)), end
        first = self.content[at : at + 1]
        kind = self._member(kind, at) if isinstance(kind, UnionType) else kind
        if first == b"{" and (kind is Any or is_dataclass(kind) or get_origin(kind) is dict):
            return self._object(kind, at, path)
        if first == b"[" and (kind is Any or (get_origin(kind) is tuple and get_args(kind)[-1] is ...)):
            return self._array(Any if kind is Any else get_args(kind)[0], at, path)
        if first == b'"':
            return self._string(kind, at, path)
        if first in (b"{", b"["):
            self._refuse_unless(kind, b"{}" if first == b"{" else b"[]", at, path)
        raise self._damaged(at)

    def _object(
        self, kind: Any, at: int, path: Path, ignored: frozenset[str] = frozenset()
    ) -> tuple[Any, int]:
        """Read an object key by key: the fields of a dataclass, or any keys."""
        known, values = (
            _fields(kind) if isinstance(kind, type) and is_dataclass(kind) else None,
            dict[str, Any](),
        )
        free = get_args(kind)[1] if get_origin(kind) is dict else Any
        for key, start in self._keys(at, path):
            here = (*path, key)
            if known is not None and key not in known and key not in ignored:
                raise Refusal(_MEANINGS["unexpected_keyword_argument"], here)
            if key in ignored or kind is Any:
                _, self._after = self._value(Any, start, here)
                continue
            values[key], self._after = self._value(free if known is None else known[key], start, here)
        return (_made(kind, values, path) if known is not None else values), self._after

    def _array(self, kind: Any, at: int, path: Path) -> tuple[tuple[Any, ...], int]:
        """Read a list of one element type, in runs of elements that fit into a piece."""
        result: list[Any] = []
        pool: dict[Any, Any] = {}
        at = self._skip_space(at + 1)
        single_until = at  # no run of elements ends within a piece before this position
        while not (not result and self.content[at : at + 1] == b"]"):
            end = self._run_end(at) if at >= single_until else None
            here = len(result)
            if end is not None and kind is not Any:
                run = _checked(tuple[kind, ...], b"[%b]" % self.content[at:end], path, here)
                pooled = _poolable(kind) and len(pool) < _MOST_POOLED
                result += map(pool.setdefault, run, run) if pooled else run
            elif end is None:
                single_until = max(single_until, at + _PIECE)
                value, end = self._value(kind, at, (*path, here))
                result += () if kind is Any else (value,)
            at = self._skip_space(end)
            if self.content[at : at + 1] != b",":
                break
            at = self._skip_space(at + 1)
        if self.content[at : at + 1] != b"]":
            raise self._syntax("Expecting ',' delimiter", at)
        return tuple(result), at + 1

    def _string(self, kind: Any, at: int, path: Path) -> tuple[Any, int]:
        """Read a text that is longer than a piece, or damaged."""
        match = _STRING.match(self.content, at)
        if match is None:
            raise Refusal(_CUT_OFF, damage=True)
        if kind is Any:
            return None, match.end()
        self._refuse_unless(kind, b'""', at, path)
        try:
            _loaded(match[0])
        except json.JSONDecodeError as error:
            raise self._syntax(error.msg, at + error.pos) from None
        return _checked(kind, match[0], path), match.end()

    def _member(self, kind: UnionType, at: int) -> Any:
        """Choose the union member for the long value at `at`; among several dataclasses, by its keys."""
        several = [
            get_arg for get_arg in get_args(kind) if isinstance(get_arg, type) and is_dataclass(get_arg)
        ]
        if len(several) > 1 and self.content[at : at + 1] == b"{":
            keys = set(self._object(_KEYS, at, ())[0])
            return next((one for one in several if keys <= _fields(one).keys()), several[0])
        others = [get_arg for get_arg in get_args(kind) if get_arg is not NoneType]
        return others[0] if len(others) == 1 else kind

    def _refuse_unless(self, kind: Any, empty: bytes, at: int, path: Path) -> None:
        """Refuse the long value at `at` if the type does not even accept an empty one."""
        from pydantic import ValidationError

        shown = self.content[at : at + _GLANCE].decode(errors="replace")
        if get_origin(kind) is tuple and empty == b"[]":
            raise Refusal(
                f"a list of {counted(len(get_args(kind)), 'value')} is expected, not {shortened(shown)}", path
            )
        try:
            adapter(kind).validate_json(empty, strict=True)
        except ValidationError as refused:
            raise Refusal(_meaning(refused.errors(include_url=False)[0], shown), path) from None

    # ---- Ends of values

    def _end(self, at: int) -> int | None:
        """Return the end of the value at `at`; None if it does not end within a piece."""
        for size in (_GLANCE, _PIECE):
            window = self.content[at : at + size]
            length = _scan(window)
            cut = length == len(window) and at + size < len(self.content)  # perhaps in the middle of a number
            if length is not None and not cut:
                return at + length
        return None

    def _run_end(self, at: int) -> int | None:
        """Return the end of the complete elements from `at` on within a piece; None if not easily found."""
        window = self.content[at : at + _PIECE]
        last = _LAST.get(window[:1], b",")
        stop = window.rfind(last) + len(last) - 1  # without the comma
        if stop <= 0:
            return None
        return at + stop if _scan(b"[%b]" % window[:stop]) == stop + 2 else None

    def _keys(self, at: int, path: Path) -> Iterator[tuple[str, int]]:
        """Yield the keys of the object at `at`, each with the start of its value.

        The caller sets `_after` to the value's end.
        """
        seen = set[str]()
        at = self._skip_space(at + 1)
        while not (not seen and self.content[at : at + 1] == b"}"):
            match = _STRING.match(self.content, at)
            if match is None:
                raise self._damaged(at, "Expecting property name enclosed in double quotes")
            key, at = self._key(match), self._skip_space(match.end())
            if self.content[at : at + 1] != b":":
                raise self._syntax("Expecting ':' delimiter", at)
            if key in seen:
                raise Refusal(_twice(key), path)
            if len(seen) == _MOST_KEYS:
                raise Refusal(f"it has more than {_MOST_KEYS} keys", path)
            seen.add(key)
            yield key, self._skip_space(at + 1)
            at = self._skip_space(self._after)
            if self.content[at : at + 1] != b",":
                break
            at = self._skip_space(at + 1)
        if self.content[at : at + 1] != b"}":
            raise self._syntax("Expecting ',' delimiter", at)
        self._after = at + 1

    def _key(self, match: re.Match[bytes]) -> str:
        try:
            return str(_loaded(match[0]))
        except json.JSONDecodeError as error:
            raise self._syntax(error.msg, match.start() + error.pos) from None

    def _start(self) -> int:
        """Return the start of the one object."""
        at = self._skip_space(3 if self.content.startswith(b"\xef\xbb\xbf") else 0)
        if at == len(self.content):
            raise Refusal("is empty: make it again, or copy it again", damage=True)
        if self.content[at : at + 1] == b"{":
            return at
        if self.content[at : at + 1] != b"[" and self._end(at) is None:
            raise self._damaged(at)
        raise Refusal("is JSON, but not a pipefit document: it holds no object", damage=True)

    def _skip_space(self, at: int) -> int:
        match = _SPACE.match(self.content, at)
        assert match is not None  # the pattern also matches an empty text
        return match.end()

    # ---- Damage

    def _damaged(self, at: int, expected: str = "Expecting value") -> Refusal:
        return self._syntax("Unterminated string" if self.content[at : at + 1] == b'"' else expected, at)

    def _syntax(self, what: str, at: int) -> Refusal:
        """Return the refusal of a text that is not JSON at `at`, or is cut off there."""
        start = self._skip_space(at)
        rest = self.content[start : start + _LONGEST]
        if what.startswith("Unterminated") or any(word.startswith(rest) for word in _WORDS):
            return Refusal(_CUT_OFF, damage=True)
        line = self.content.count(b"\n", 0, at) + 1
        column = at - self.content.rfind(b"\n", 0, at)
        return Refusal(f"is not JSON: {what} at line {line}, column {column}", damage=True)


_CUT_OFF = "is cut off: make it again, or copy it again"
_WORDS = b"true", b"false", b"null", b"-0"
_LONGEST = 6  # bytes, one more than the longest word
_LAST = {
    b"{": b"},",
    b'"': b'",',
    b"[": b"],",
}  # end of an element before the next one, by its first character


def _scan(window: bytes) -> int | None:
    """Return the length of the value at the start of `window`; None if it is incomplete, or not JSON."""
    digits = window.translate(_DIGITS, b"+")
    scan = _scan_carefully if any(unusual in digits for unusual in _UNUSUAL) else _scan_quickly
    try:
        return scan(window.decode("latin-1"), 0)[1]  # one character for each byte, as only the length matters
    except (json.JSONDecodeError, RecursionError):
        return None


def _pairs(pairs: list[tuple[str, Any]]) -> None:
    """Refuse an object with duplicate keys. Returns nothing, because only the length matters here."""
    if len(dict(pairs)) != len(pairs):
        raise Refusal(_twice(Counter(key for key, _ in pairs).most_common(1)[0][0]))


def _loaded(content: bytes) -> Any:
    """Load a JSON text in UTF-8.

    Given bytes, `json` would guess the encoding from zeros among the first of them.
    """
    return json.loads(content.decode())


def _twice(key: str) -> str:
    return f"the key {shortened(key)!r} appears twice in one object"


def _number(text: str) -> float:
    if not isfinite(float(text)):
        raise Refusal(f"{text[:_LONGEST_NUMBER]} is not a finite number")
    return 0.0


def _whole_number(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise Refusal(f"{text[:_LONGEST_NUMBER]}... is not a number that anything here can have")
    return 0


_scan_quickly: _Scanner = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_number).raw_decode
_scan_carefully: _Scanner = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_constant=_number, parse_float=_number, parse_int=_whole_number
).raw_decode


# ---- Types


@cache
def _poolable(kind: Any) -> bool:
    """Return whether equal elements of a list of this type may be one object: numbers, and tuples of
    numbers.
    """
    return kind in (int, float) or (get_origin(kind) is tuple and set(get_args(kind)) <= {int, float})


@cache
def _fields(kind: type) -> dict[str, Any]:
    """Return the type of every field of a dataclass."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def _made(kind: Any, values: dict[str, Any], path: Path) -> Any:
    """Construct a dataclass from valid values; its own checks may still refuse them together."""
    required = (f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
    missing = [name for name in required if name not in values]
    if missing:
        raise Refusal(_MEANINGS["missing"], (*path, missing[0]), more=len(missing) > 1)
    try:
        return kind(**values)
    except ValueError as error:  # raised by the dataclass's own check
        raise Refusal(str(error), path) from None


def _checked(kind: Any, text: bytes, path: Path, first: int = 0) -> Any:
    """Parse and check a small text as a `kind`. `first` is the number of the first element of a run."""
    from pydantic import ValidationError

    try:
        return adapter(kind).validate_json(text, strict=True)
    except ValidationError as refused:
        raise _first(refused, path, first) from None


def _first(refused: Any, path: Path, first: int) -> Refusal:
    """Return the first of pydantic's errors as a refusal.

    Unknown keys come first, because they often misspell missing ones.
    """
    errors = sorted(
        refused.errors(include_url=False), key=lambda error: error["type"] != "unexpected_keyword_argument"
    )
    error, place = errors[0], errors[0]["loc"]
    if first and place:
        place = (place[0] + first, *place[1:])
    return Refusal(_meaning(error), (*path, *place), more=len(errors) > 1)


def _meaning(error: ErrorDetails, shown: str | None = None) -> str:
    if "recursion limit" in str(error.get("ctx")):
        return "it is nested too deeply"
    if error["type"] in _MEANINGS:
        return _MEANINGS[error["type"]]
    if error["type"] == "value_error":  # raised by a dataclass's own check
        return str(error["ctx"]["error"])
    given = shortened(json.dumps(error["input"], default=str) if shown is None else shown)
    if error["type"] == "dataclass_type":
        return f"keys and values are expected, not {given}"
    expected = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{expected} is expected, not {given}"
