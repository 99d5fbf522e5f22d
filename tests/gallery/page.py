"""The page on the gallery: docs/gallery.md, made from the models and their numbers of blocks and layers.

PYTHONPATH=src:tests python -m gallery.page
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from gallery import COMPARED, FAMILIES, MODELS, SAMPLE
from gallery.model import Model
from pipefit.capture.model import build_chain

Counts = tuple[int, int]  # blocks and layers
PAGE = Path(__file__).parents[2] / "docs" / "gallery.md"
TITLE = f"""# The gallery

{len(MODELS)} small models in {len(FAMILIES)} families. Random plans train each for three steps in one process:
random splits, devices, schedules and numbers of microbatches, with and without recomputation. After each step, every
loss, gradient, parameter and buffer is compared bitwise with a plain training loop that shares no code with pipefit.
In every step, the peak of every device according to the simulator, the dry run and the meter is compared to the byte
with the allocator's events. The last column lists known differences; tests fail when a difference disappears.

A `traced` model is a plain module that pipefit cuts into layers, grouped into blocks; planners cut between blocks. A
`chain` is a sequence of layers, each of which is a block. Every run of the tests trains the
{len(SAMPLE)} models in **bold** and compares the bytes of {len(COMPARED)} of them; `make gallery` does both with
all models. `python -m gallery.page`, with `src` and `tests` in `PYTHONPATH`, writes this page, and a test keeps it up
to date.
"""
HEAD = "| model | form | blocks | layers | parameters | features | known differences |\n|---|---|---|---|---|---|---|\n"


def render(counts: Mapping[str, Counts]) -> str:
    """Render the page, with these blocks and layers of each model."""
    parts = [TITLE]
    for family, models in FAMILIES.items():
        rows = "".join(row(model, counts[model.name]) for model in models)
        parts.append(f"\n## {family[0].upper()}{family[1:]}\n\n{HEAD}{rows}")
    return "".join(parts)


def row(model: Model, counts: Counts) -> str:
    """Return a line of the table."""
    module = model.module()
    form = "chain" if isinstance(module, nn.Sequential) else "traced"
    parameters = sum(parameter.numel() for parameter in module.parameters())
    name = f"**{model.name}**" if model.name in SAMPLE else model.name
    cells = (name, form, *map(str, counts), f"{parameters:,}", model.special, "; ".join(model.differences))
    return f"| {' | '.join(cells)} |\n"


def counts_of(model: Model) -> Counts:
    """Count a model's blocks and layers."""
    found = build_chain(model.task(), model.size)
    return len(found.blocks) or len(found.layers), len(found.layers)


def counts_in(text: str) -> dict[str, Counts]:
    """Read each model's blocks and layers from the page."""
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return {
        name.strip("*"): (int(blocks), int(layers))
        for name, _, blocks, layers, *_ in cells
        if layers.isdecimal()
    }


if __name__ == "__main__":
    PAGE.write_text(render({name: counts_of(model) for name, model in MODELS.items()}))
