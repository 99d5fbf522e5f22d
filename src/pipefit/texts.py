"""Texts from outside, made safe and short to print. Names in documents and values in errors may hold anything."""

from __future__ import annotations

_LONGEST = 60  # characters of a refused value that a message repeats


def printable(text: str) -> str:
    """`text` without control characters, which a file could use to rewrite a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def shortened(text: str) -> str:
    """`text`, printable, and cut to the length that a message repeats."""
    text = printable(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
