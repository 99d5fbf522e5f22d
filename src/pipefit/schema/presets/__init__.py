"""Preset clusters by name, each a TOML file with the sources of its figures.

Machines as they are sold are in this folder (`dgx1-v100`). `cards` has single cards; a cluster's name is the
number of cards in one box and the card: `4x-rtx-3090`.

Rates are the data sheets' peak figures. A link's `efficiency` is the share that copies reach, with its source
in the file; `timing` has the shares of a device's figures that kernels reach. The memory of a device is the
total that its driver offers to programs, which is neither the figure in its name nor the larger total that
nvidia-smi shows since driver 510; each file has the source. A process's CUDA context is part of this total.
"""

from __future__ import annotations

import re
from importlib.resources import files

from pipefit.errors import UsageError
from pipefit.texts import meant

_SIZES = re.compile(r"[0-9]+x[0-9.]+[kKmMgGtT]i?[bB]")  # emulated devices without the word `emulated`
_CARDS = re.compile(r"([0-9]{1,9})x-(.+)")
_NEARLY = re.compile(r"(?:([0-9]{1,2})x?[- ]?)?(?=.*[a-z])(.+)")  # 4xrtx3090, 2-l40s, t4


def machine_names() -> tuple[str, ...]:
    """Return the names of machines, in alphabetical order."""
    return _names("")


def card_names() -> tuple[str, ...]:
    """Return the names of cards, in alphabetical order; a cluster may have any number of one card in a
    box.
    """
    return _names("cards")


def is_preset(name: str) -> bool:
    """Return whether pipefit ships a cluster of this name."""
    return name in machine_names() or _card(name) in card_names()


def cards_asked(name: str) -> int:
    """Return the number of cards in the name of a preset; 1 for a machine."""
    return 1 if name in machine_names() else int(name[: name.index("x")])


def preset_text(name: str) -> str:
    """Return the TOML of a machine, or of a box with one card of the named kind.

    Raises:
        UsageError: no preset has this name; names the closest.
    """
    if name in machine_names():
        return _text(f"{name}.toml")
    if (card := _card(name)) in card_names():
        return _text(f"cards/{card}.toml")
    guess = f"{near} " if (near := nearest(name)) else ""
    raise UsageError(
        f"unknown cluster {name!r}: {guess}run pipefit clusters for the list, with machines such as "
        "dgx1-v100 and cards such as 4x-rtx-3090; or name a .toml file, or emulated devices such as "
        "emulated:4x256MiB"
    )


def nearest(name: str) -> str:
    """Return a question that suggests a known name similar to `name`; empty if none is similar."""
    if _SIZES.fullmatch(name):
        return f"did you mean emulated:{name}?"
    asked = _NEARLY.fullmatch(name.lower())
    count, card = (asked[1] or 1, asked[2]) if asked else (1, name)
    known = (*machine_names(), *(f"{count}x-{card_name}" for card_name in card_names()))
    bare = re.sub("[^a-z0-9]", "", card)
    result = [one for one in known if bare and bare in one.replace("-", "")]
    return f"did you mean {' or '.join(result[:2])}?" if result else meant(name, known)


def _card(name: str) -> str | None:
    """Return the card in a name of the form `4x-CARD`, known or not; None for another form."""
    return asked[2] if (asked := _CARDS.fullmatch(name)) else None


def _names(folder: str) -> tuple[str, ...]:
    result = (entry.name for entry in (files(__name__) / folder).iterdir() if entry.name.endswith(".toml"))
    return tuple(sorted(name.removesuffix(".toml") for name in result))


def _text(path: str) -> str:
    return (files(__name__) / path).read_text(encoding="utf-8")
