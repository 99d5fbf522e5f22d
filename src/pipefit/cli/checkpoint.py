"""`pipefit checkpoint`: the contents and integrity of a checkpoint, and its weights as one plain file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipefit.cli.options import Json
from pipefit.cli.output import check_output, on_stderr
from pipefit.cli.progress import cleared_away, progress
from pipefit.tables import Block, write
from pipefit.texts import counted, printable
from pipefit.units import format_bytes

if TYPE_CHECKING:
    from pipefit.checkpoints import Checkpoint
    from pipefit.checkpoints.manifest import Kind

_WORDS: dict[Kind, str] = {
    "model": "parameters and buffers",
    "optimizer": "optimizer state",
    "master": "master weights",
    "held": "other tensors",
}
EXAMPLE = "pipefit checkpoint runs -o model.safetensors"


def command(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A checkpoint, or a folder of checkpoints: its newest complete one."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write the weights to a .safetensors or .pt file, or to a folder.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a checkpoint of train, and show what it holds.

    With -o, writes parameters and buffers under the names of the original module, as one file for plain
    PyTorch or a folder in Hugging Face's layout.
    """
    check_output(output)
    with progress("verifying"):
        from pipefit.checkpoints import export, find

        result = find(checkpoint)
        result.verify()
        if output is not None:
            with cleared_away():
                export(result.folder, output)
    if as_json:
        print(json.dumps(_figures(result)))
        return

    write(_described(result))
    if output is not None:
        on_stderr(f"saved to {output}")


def _figures(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the contents of a checkpoint as JSON."""
    manifest = checkpoint.manifest
    return {
        "folder": str(checkpoint.folder),
        "step": manifest.step,
        "seed": manifest.seed,
        "schedule": manifest.schedule,
        "pipefit": manifest.pipefit_version,
        "torch": manifest.torch_version,
        "shards": [{"file": shard.file, "bytes": shard.nbytes} for shard in manifest.shards],
        "bytes": {kind: manifest.bytes_of(kind) for kind in _WORDS},
    }


def _described(checkpoint: Checkpoint) -> list[Block]:

    manifest = checkpoint.manifest
    shards = counted(len(manifest.shards), "shard")
    stages = counted(len(manifest.stages), "stage")
    made_by = f"pipefit {printable(manifest.pipefit_version)} and torch {printable(manifest.torch_version)}"
    sizes = {what: manifest.bytes_of(kind) for kind, what in _WORDS.items()}
    held = ", ".join(f"{format_bytes(nbytes)} of {what}" for what, nbytes in sizes.items() if nbytes)
    return [
        (f"{printable(checkpoint.folder)}: step {manifest.step}, seed {manifest.seed}, {shards}, all intact"),
        f"trained in {stages} under {printable(manifest.schedule)}, by {made_by}",
        f"{counted(len(manifest.tensors), 'tensor')}: {held}",
    ]
