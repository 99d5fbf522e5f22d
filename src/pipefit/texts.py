"""Names and values for messages: printable and short, whatever documents and users put into them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import groupby
from os import PathLike, fspath

_LONGEST = 60  # characters of a refused value that a message repeats
_LONGEST_WORD = 4200  # characters; a path has at most 4,096
_USUAL = {"gpu": "cuda"}  # other common names


def printable(text: str | PathLike[str]) -> str:
    """Return a text or a path without control characters, which a file could use to rewrite a terminal."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in fspath(text)
    )


def shortened(text: str) -> str:
    """Return `text`, printable, and cut to the length that a message repeats."""
    text = printable(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def without_long_words(text: str) -> str:
    """Cut every word that is longer than any path: a name from a damaged document."""
    return re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: f"{word[0][: _LONGEST - 3]}...", text)


def first_to_last(names: Sequence[str]) -> str:
    """Format consecutive names: `conv1`, or `conv1 to fc`."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def layers_text(start: int, stop: int) -> str:
    """Format layers `start` to `stop - 1`: `layer 3`, or `layers 3 to 5`."""
    return f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}"


def numbered(numbers: Sequence[int]) -> str:
    """Format numbers in order, with three or more consecutive ones as a range: `0 1`, `0-3`, `0-3 8`."""
    parts = list[str]()
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        own = [number for _, number in run]
        parts += [f"{own[0]}-{own[-1]}"] if len(own) > 2 else map(str, own)
    return " ".join(parts)


def first_of(items: Sequence[object], most: int = 3) -> str:
    """List items, and count those after the first `most`: `a, b, c, and 4 more`."""
    rest = len(items) - most
    return f"{', '.join(map(str, items[:most]))}{f', and {rest} more' if rest > 0 else ''}"


def counted(count: int, noun: str) -> str:
    """Format a count with the singular `noun`: `1 stage`, `4 stages`, `1,024 microbatches`."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def meant(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return a question that suggests the known names nearest to an unknown one; empty if none is near."""
    names, usual = list(known), _USUAL.get(name.lower())
    result = [usual] if usual in names else get_close_matches(name.lower(), names, n=most, cutoff=0.52)
    return f"did you mean {' or '.join(result)}?" if result else ""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Complete the sentence `what` about an unknown name with the nearest known name, and all known names."""
    names = list(known)
    guess = meant(name, names)
    return f"{what}: {f'{guess} Choose' if guess else 'choose'} one of {', '.join(names)}"


def kind_of(value: object) -> str:
    """Describe a value's type: `None`, or `a` and the name of its class."""
    return "None" if value is None else f"a {type(value).__name__}"


def dtype_name(dtype: object) -> str:
    """Return a dtype's name in documents and messages, such as `float32`."""
    return str(dtype).removeprefix("torch.")
