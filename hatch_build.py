"""Compile the simulator's clock when pipefit is installed; without a C compiler, the one in Python is used."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from hashlib import sha256
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/pipefit/simulator/clock.c")
LIBRARY = SOURCE.with_name("_clock.so")
# Contracted expressions, such as fused multiplications and additions, would give other times than Python's.
OPTIONS = ["-O2", "-std=c11", "-ffp-contract=off", "-fPIC", "-shared"]


class CompiledClock(BuildHookInterface[Any]):
    """Build hook of a wheel, which then is one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library into the source tree, and add it to the wheel."""
        library = Path(self.root, LIBRARY)
        library.unlink(missing_ok=True)
        if not self._compiled(library):
            self.app.display_warning("without a C compiler the clock is not compiled, so plans take longer")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def _compiled(self, library: Path) -> bool:
        """Return whether one of the compilers makes the library, which names its source by a digest."""
        source, unfinished = Path(self.root, SOURCE), library.with_suffix(".unfinished")
        digest = sha256(source.read_bytes()).hexdigest()
        asked, known = os.environ.get("CC"), sysconfig.get_config_var("CC")
        for compiler in filter(None, (asked, known, "cc")):
            command = [
                *shlex.split(compiler),
                *OPTIONS,
                f'-DSOURCE="{digest}"',
                str(source),
                "-o",
                str(unfinished),
            ]
            try:
                subprocess.run(command, check=True, capture_output=True)  # noqa: S603
            except (OSError, subprocess.CalledProcessError) as error:
                self.app.display_warning(f"{compiler}: {error}")
            else:
                unfinished.replace(library)
                return True
        return False
