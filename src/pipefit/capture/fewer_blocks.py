"""Copies of models with fewer of their equal blocks, which share the weights of the original.

What a trace does to one of two hundred equal blocks it does to all of them, so that a copy with two of them shows it
for a hundredth of the cost. Blocks are equal by structure: classes, parameters, hooks and settings that are texts or
truth values. Whether a copy can be traced and run is for the caller to find out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from pipefit.capture.copying import copied
from pipefit.capture.flat import plain
from pipefit.capture.task import Task

_COUNTS = ("layer", "block", "depth")  # in the names of settings that say how many blocks there are
_ENOUGH = 2  # blocks of a kind: the second one takes what the first one returns


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A list of blocks of a model, by its path, and the names of the blocks that a copy leaves out."""

    path: str
    blocks: int
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kept} of {self.blocks} blocks{f' of {self.path}' if self.path else ''}"

    @property
    def kept(self) -> int:
        """How many blocks a copy has."""
        return self.blocks - len(self.left_out)

    def leaves_out(self, path: str) -> bool:
        """Whether a module, or a layer of its name, is in a block that a copy leaves out."""
        around, inside = f"{self.path}." if self.path else "", plain(path)
        return inside.startswith(around) and inside[len(around) :].partition(".")[0] in self.left_out


def rows_of(module: nn.Module) -> list[Row]:
    """The lists of blocks of which a copy can leave some out; none in blocks that are left out themselves."""
    found = list[Row]()
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and not any(row.leaves_out(path) for row in found):
            names = tuple(part._modules)
            superfluous = _superfluous([_kind(block) for block in part._modules.values()])
            if superfluous:
                left_out = names[superfluous.start : superfluous.stop]
                found.append(Row(path=path, blocks=len(names), left_out=left_out))
    return found


def with_fewer_blocks(task: Task, rows: Sequence[Row]) -> Task:
    """The task with a copy of its module, which exists, that has fewer blocks in `rows`. The two share their weights.

    Settings around a list that say how many blocks it has, as `config.num_hidden_layers` does, agree with the copy.
    """
    assert isinstance(task.module, nn.Module)
    own = copied(task.module, lambda tensor: tensor.detach())
    for row in rows:
        blocks = own.get_submodule(row.path)._modules
        for name in row.left_out:
            del blocks[name]
        for settings in _settings_around(row.path, task.module, own):
            for name, value in settings.items():
                if type(value) is int and value == row.blocks and any(part in str(name) for part in _COUNTS):
                    settings[name] = row.kept
    return replace(task, module=own, name=f"{task.name} with {' and '.join(map(str, rows))}")


def _settings_around(path: str, original: nn.Module, own: nn.Module) -> Iterator[dict[Any, Any]]:
    """The attributes of the modules around `path` in `own`, and of objects in them that the original does not share."""
    parts = path.split(".") if path else []
    for around in (".".join(parts[:depth]) for depth in range(len(parts) + 1)):
        held, before = vars(own.get_submodule(around)), vars(original.get_submodule(around))
        yield held
        for name, value in held.items():
            settings = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            if isinstance(settings, dict) and value is not before.get(name):
                yield settings


def _superfluous(kinds: Sequence[object]) -> range:
    """The longest run of blocks with enough blocks of their kinds before it; empty where there is none.

    It is one run, and a late one, because models also look blocks up by number.
    """
    found, before = range(0), Counter[object]()
    for start, kind in enumerate(kinds):
        stop = start
        while stop < len(kinds) and before[kinds[stop]] >= _ENOUGH:
            stop += 1
        found = max(found, range(start, stop), key=len)
        before[kind] += 1
    return found


def _kind(block: nn.Module | None) -> object:
    """What is the same for blocks that compute alike."""
    return block and tuple((name, *_structure(part)) for name, part in block.named_modules())


def _structure(part: nn.Module) -> Iterator[object]:
    yield type(part)
    yield tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in part.named_parameters(recurse=False))
    yield tuple((name, b.shape, b.dtype) for name, b in part.named_buffers(recurse=False))
    yield tuple((name, value) for name, value in vars(part).items() if isinstance(value, str | bool))
    yield bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)
