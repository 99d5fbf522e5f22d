"""`pipefit models`: named models, with their settings and defaults."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pipefit.cli.model import check_factory, settings_of
from pipefit.cli.options import Json
from pipefit.cli.progress import progress
from pipefit.tables import Block, Table, write
from pipefit.texts import shortened

EXAMPLE = "pipefit models zoo:gpt"


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="zoo:NAME, hf:NAME, hf: for the names of all architectures, megatron:FILE, "
            "torchtitan:NAME, or package.module:factory.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List models with their settings and defaults.

    Without MODEL, the models of the zoo with the settings of --set; with MODEL, the allowed values of each
    setting.
    """
    with progress("reading the models"):
        result = _found(model)
    if as_json:
        print(json.dumps(result, default=repr))
    else:
        write(_told(model, result), width=80)


def _found(model: str | None) -> dict[str, dict[str, object]]:
    """Return the result as plain data: settings by model, or names by kind of architecture."""
    if model is not None and model != "hf:":
        check_factory(model)
        return {
            model: {
                item.name: {"default": item.default, "must_be": item.words} for item in settings_of(model)
            }
        }
    if model == "hf:":
        from pipefit.models.hugging_face import architectures

        return {"hf": dict(architectures())}
    from pipefit.models import MODELS

    return {
        f"zoo:{name}": {item.name: item.default for item in settings_of(f"zoo:{name}")}
        for name in sorted(MODELS)
    }


def _told(model: str | None, found: dict[str, dict[str, object]]) -> list[Block]:

    if model == "hf:":
        kinds: dict[object, list[str]] = {}
        for name, kind in found["hf"].items():
            kinds.setdefault(kind, []).append(name)
        return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items()]
    if model is not None:
        if not found[model]:
            return [
                f"{model} does not have settings.",
                f"For example: pipefit plan {model} --cluster 4x-titan-rtx",
            ]
        rows = tuple((name, *_cells(item)) for name, item in found[model].items())
        table = Table(("--set", "default", "must be"), rows)
        return [
            table.part((0, 1)) if model.startswith("hf:") else table,
            f"For example: pipefit plan {model} --cluster 4x-titan-rtx",
        ]
    return [*(_paragraph(name, settings) for name, settings in found.items()), _OTHERS]


def _cells(item: object) -> tuple[str, str]:

    assert isinstance(item, dict)
    return shortened(repr(item["default"])), item["must_be"]


def _paragraph(name: str, settings: dict[str, object]) -> str:
    """Describe a model of the zoo: its summary, and its settings in the form of `--set`."""
    from pipefit.models import MODELS

    summary = (MODELS[name.removeprefix("zoo:")].__doc__ or "").partition("\n\n")[0]
    given = ", ".join(f"{key}={value}" for key, value in settings.items())
    return f"{name}\n  {' '.join(summary.split())}\n  {given}"


_OTHERS = (
    "hf:NAME is an architecture of Hugging Face transformers with random weights; pipefit models hf: "
    "lists them. package.module:factory is your own model; megatron:FILE and torchtitan:NAME have the "
    "shape given by a file of Megatron's arguments, or by a configuration of torchtitan. pipefit models "
    "MODEL lists the settings of a model."
)
