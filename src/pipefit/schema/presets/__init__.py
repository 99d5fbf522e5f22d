"""Clusters by name, each a TOML file: the form that people write, with the sources of its figures.

Machines as they are sold are beside this file (`dgx1-v100`). In `cards` are single cards, each in a box of its own,
whose name is their number in one box and the card: `4x-rtx-3090`.

Rates are the data sheets' peak figures. A link's `efficiency` is the part of it that copies reach, with its source in
the file; `pipefit.timing` has the parts of a device's figures that kernels reach. The memory of a device is the
total that its driver offers to programs, which is neither the figure in its name nor the larger total that nvidia-smi
shows since driver 510: each file says who reported it. A process's CUDA context is taken from it as well.
"""

from __future__ import annotations

import re
from importlib.resources import files

from pipefit.errors import UsageError
from pipefit.texts import meant

_SIZES = re.compile(r"[0-9]+x[0-9.]+[kKmMgGtT]i?[bB]")  # emulated devices without that word
_CARDS = re.compile(r"([0-9]{1,9})x-(.+)")
_NEARLY = re.compile(r"(?:([0-9]{1,2})x?[- ]?)?(?=.*[a-z])(.+)")  # 4xrtx3090, 2-l40s, t4


def machine_names() -> tuple[str, ...]:
    """The names of machines, in alphabetical order."""
    return _names("")


def card_names() -> tuple[str, ...]:
    """The names of cards, of which a cluster has any number in one box, in alphabetical order."""
    return _names("cards")


def is_preset(name: str) -> bool:
    """Whether a cluster of that name ships with pipefit."""
    return name in machine_names() or _card(name) in card_names()


def cards_asked(name: str) -> int:
    """How many of a card the name of a preset asks for; one of what is a machine."""
    return 1 if name in machine_names() else int(name[: name.index("x")])


def preset_text(name: str) -> str:
    """The TOML of what has that name: a machine, or a box with one card of that kind.

    Raises:
        UsageError: there is none; says which is closest.
    """
    if name in machine_names():
        return _text(f"{name}.toml")
    if (card := _card(name)) in card_names():
        return _text(f"cards/{card}.toml")
    guess = f"{near} " if (near := nearest(name)) else ""
    raise UsageError(
        f"there is no cluster {name!r}: {guess}pipefit clusters lists machines such as dgx1-v100 and cards such as "
        "4x-rtx-3090; or name a .toml file, or emulated devices such as emulated:4x256MiB"
    )


def nearest(name: str) -> str:
    """A question: what may be meant by the name of no cluster; empty where nothing is near."""
    if _SIZES.fullmatch(name):
        return f"did you mean emulated:{name}?"
    asked = _NEARLY.fullmatch(name.lower())
    count, card = (asked[1] or 1, asked[2]) if asked else (1, name)
    known = (*machine_names(), *(f"{count}x-{one}" for one in card_names()))
    bare = re.sub("[^a-z0-9]", "", card)
    found = [one for one in known if bare and bare in one.replace("-", "")]
    return f"did you mean {' or '.join(found[:2])}?" if found else meant(name, known)


def _card(name: str) -> str | None:
    """The card that a name asks for some of, whether there is one or not."""
    return asked[2] if (asked := _CARDS.fullmatch(name)) else None


def _names(folder: str) -> tuple[str, ...]:
    found = (entry.name for entry in (files(__name__) / folder).iterdir() if entry.name.endswith(".toml"))
    return tuple(sorted(name.removesuffix(".toml") for name in found))


def _text(path: str) -> str:
    return (files(__name__) / path).read_text(encoding="utf-8")
