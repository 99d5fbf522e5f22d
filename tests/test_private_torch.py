"""Canary for torch's private interfaces: this torch still has every private name that pipefit uses.

A new torch that moves one fails here first, by name.
"""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import torch

SOURCE = Path(__file__).parent.parent / "src" / "pipefit"


def private_names(path: Path) -> set[str]:
    """Return dotted names of torch with a private part that a source file imports or reads."""
    found: set[str] = set()
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "torch" in text else ():
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.Attribute):
            name = dotted(node)
            if name.startswith("torch."):
                found.add(name)
    return {
        name
        for name in found
        if ".ops." not in name and any(p.startswith("_") and p[:2] != "__" for p in name.split("."))
    }


def dotted(node: ast.expr) -> str:
    """Return a name with its attributes; an empty text for other expressions."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def uses() -> dict[str, set[str]]:
    """Return private names, with the files that use them."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in private_names(path):
            found[name].add(str(path.relative_to(SOURCE)))
    return found


def has(name: str) -> bool:
    """Return whether a dotted name of torch resolves, by import or by attribute."""
    parts = name.split(".")
    found: object = torch
    for place, part in enumerate(parts[1:], 2):
        try:
            found = importlib.import_module(".".join(parts[:place]))
        except ImportError:
            found = getattr(found, part, None)
    return found is not None


def test_torch_still_has_every_private_name() -> None:
    """Every name resolves."""
    names = sorted(uses())
    assert len(names) > 10
    assert [name for name in names if not has(name)] == []


def test_private_torch_stays_in_one_package() -> None:
    """Only modules of `torch_internals` use private names of torch."""
    assert {
        file for files in uses().values() for file in files if not file.startswith("torch_internals/")
    } == set()
