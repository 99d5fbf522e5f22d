"""The canary for torch's private interfaces: what we use of them, where, and that this torch still has it.

A new torch that moves one fails here first, by name. A new use elsewhere fails too: it belongs behind one of these.
"""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parent.parent / "src" / "pipefit"

# Fake tensors and their devices
FAKES = {
    f"fake/{name}.py"
    for name in (
        "target",
        "attention_choice",
        "autocast",
        "cuda_choices",
        "missing_shapes",
        "chain",
        "fingerprint",
        "results",
        "sizes",
    )
}
# Tracing: torch.export's graphs are made of private classes
TRACING = {
    f"capture/{name}.py"
    for name in ("aliases", "binding", "comparison", "constants", "copying", "cuda_autocast", "cuda_casts",
                 "custom_functions", "eager_masks", "endings", "exporting", "flat", "flow", "graph_layer",
                 "known_draws", "plain_training", "records",
                 "refusals", "refused_calls", "sample", "sizes", "stand_ins", "structure", "task", "traced",
                 "whole_calls", "whole_modules")
}  # fmt: skip
# Tensor parallelism reads operators' schemas, and compares blocks under dispatch modes
SHARDING = {f"sharding/{name}.py" for name in ("block", "operations", "rules/pointwise", "shortening", "tracing")}
# Kernels are measured by torch's smaller profiler, below autograd, on trees of arguments; fake results lie as theirs
MEASURING = {f"meter/{name}.py" for name in ("allocator", "kernels", "layouts", "made_up", "measuring")}
# The meter, what follows values, what answers autocast and what an optimizer makes see operations through a dispatch
# mode, outside of which an optimizer is tried; agreement uses what GradScaler uses; NCCL coalesces; a batch is a tree
# of tensors; a storage counts its users
OTHERS = {
    "capture/caller.py",
    "meter/cpu.py",
    "meter/unsaved.py",
    "profiler/backward_state.py",
    "profiler/coupling.py",
    "profiler/feedback.py",
    "profiler/saved.py",
    "profiler/update.py",
    "profiler/writes.py",
    "runtime/agreement.py",
    "runtime/apart.py",
    "runtime/coalescing.py",
    "runtime/comparison.py",
    "capture/coupled_updates.py",
    "runtime/elementwise.py",
    "runtime/gathering.py",
    "runtime/initial_weights.py",
    "runtime/lives.py",
    "runtime/loss_check.py",
    "runtime/made_tensors.py",
    "runtime/plan_comparison.py",
    "runtime/weight_copies.py",
}


def private_names(path: Path) -> set[str]:
    """Dotted names of torch with a private part that a source file imports or reads."""
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
    """A name with its attributes; nothing for those of another expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def uses() -> dict[str, set[str]]:
    """Private names, with the files that use them."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in private_names(path):
            found[name].add(str(path.relative_to(SOURCE)))
    return found


@pytest.mark.parametrize("name", sorted(uses()))
def test_torch_still_has_it(name: str) -> None:
    """The name resolves, by import or by attribute."""
    parts = name.split(".")
    found: object = torch
    for place, part in enumerate(parts[1:], 2):
        try:
            found = importlib.import_module(".".join(parts[:place]))
        except ImportError:
            found = getattr(found, part)
    assert found is not None


def test_private_torch_stays_where_it_is() -> None:
    """No other file touches a private interface of torch."""
    files = {file for places in uses().values() for file in places}
    assert files <= FAKES | TRACING | SHARDING | MEASURING | OTHERS
