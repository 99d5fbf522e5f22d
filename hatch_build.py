"""Compile the simulator's clock when pipefit is installed; without a C compiler, the one in Python is used."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/pipefit/simulator/clock.c")
LIBRARY = SOURCE.with_name("_clock.so")


class CompiledClock(BuildHookInterface[Any]):
    """Build hook of a wheel, which then is one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library into the source tree, and add it to the wheel."""
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        options = ["-O2", "-std=c11", "-ffp-contract=off", "-fPIC", "-shared"]
        command = [compiler, *options, str(SOURCE), "-o", str(LIBRARY)]
        try:
            subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True)  # noqa: S603
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"the clock is not compiled, so plans take longer: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
