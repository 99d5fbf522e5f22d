"""`pipefit show`: any document as text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pipefit.cli.options import Json
from pipefit.cli.output import deliver
from pipefit.errors import UsageError
from pipefit.texts import shortened

EXAMPLE = "pipefit show dgx1-v100"


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Any document, or the name of a cluster.")],
    as_json: Json = False,
) -> None:
    """Show any document readably.

    The blocks and layers of a profile, a plan's reasons, a trace's peaks, a program's text, a cluster's
    links.
    """
    from pipefit.schema.json_io import is_cluster, load, load_cluster
    from pipefit.schema.presets import nearest

    is_file = os.path.exists(file) or Path(file).suffix.lower() == ".json"
    if not is_file and not is_cluster(file) and (guess := nearest(file)):
        raise UsageError(f"{shortened(file)} is neither a file nor a known cluster: {guess}")
    deliver(load_cluster(file) if is_cluster(file) else load(file), output=None, as_json=as_json)
