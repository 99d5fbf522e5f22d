"""Clusters by name, each a TOML file beside this one: the form that people write, with the sources of its figures.

Rates are the data sheets' peak figures. A link's `efficiency` is the part of it that copies reach, with its source in
the file; `pipefit.cost.time` has the parts of a device's figures that kernels reach. The memory of a device is the
total that its driver offers to programs, which is neither the figure in its name nor the larger total that nvidia-smi
shows since driver 510: each file says who reported it. A process's CUDA context is taken from it as well.
"""

from __future__ import annotations

import re
from importlib.resources import files

from pipefit.errors import UsageError
from pipefit.texts import meant

_SIZES = re.compile(r"[0-9]+x[0-9.]+[kKmMgGtT]i?[bB]")  # emulated devices without that word


def preset_names() -> tuple[str, ...]:
    """The names that `preset_text` knows, in alphabetical order."""
    found = (entry.name for entry in files(__name__).iterdir() if entry.name.endswith(".toml"))
    return tuple(sorted(name.removesuffix(".toml") for name in found))


def preset_text(name: str) -> str:
    """The TOML of the cluster of that name.

    Raises:
        UsageError: there is none; says which exist and which is closest.
    """
    if name not in preset_names():
        near = f"did you mean emulated:{name}?" if _SIZES.fullmatch(name) else meant(name, preset_names())
        guess = f"{near} " if near else ""
        raise UsageError(
            f"there is no cluster {name!r}: {guess}Presets are {', '.join(preset_names())}; "
            f"or name a .toml file, or emulated devices such as emulated:4x256MiB"
        )
    return (files(__name__) / f"{name}.toml").read_text(encoding="utf-8")
