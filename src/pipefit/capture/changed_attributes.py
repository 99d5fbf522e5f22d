"""Attributes that a forward changes in every call, such as a count or a temperature, refused in a traced model.

A trace would repeat the first call for ever. Changes are seen by comparing the numbers and texts among the attributes
of all modules, and of their classes, before and after a call. Where one has changed, the module is called twice more.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pipefit.capture.refusals import REMEDY, Refusal

_PLAIN = (bool, int, float, str)
Attributes = dict[str, bool | int | float | str]


class ChangedAttributes:
    """The numbers and texts in attributes that the last forward of `module` has changed."""

    def __init__(self, module: nn.Module) -> None:
        self._before: Attributes = {}
        self._changes: dict[str, tuple[object, object]] = {}  # what the last forward has changed, from what to what
        module.register_forward_pre_hook(lambda *_: self._begin(module))
        module.register_forward_hook(lambda *_: self._end(module))

    def refuse(self, again: Callable[[], object]) -> None:
        """Check that a trace loses none of these changes; `again` calls the module.

        Raises:
            Refusal: an attribute changes in every call. One that a forward sets to the same in each call does not.
        """
        if self._changes:
            again()  # the first call once more, because a trace puts attributes back
            again()
        for name, (was, now) in self._changes.items():
            raise Refusal(
                f"its forward changes the attribute {name!r} in every call (the second from {was!r} to {now!r}), and a "
                "trace would repeat the first",
                f"keep it in a buffer and compute with that as a tensor, or {REMEDY}",
            )

    def _begin(self, module: nn.Module) -> None:
        self._before = _numbers_and_texts(module)

    def _end(self, module: nn.Module) -> None:
        now, before = _numbers_and_texts(module), self._before
        both = {name: (was, now[name]) for name, was in before.items() if name in now}
        self._changes = {name: (was, new) for name, (was, new) in both.items() if was is not new and was != new}


def _numbers_and_texts(module: nn.Module) -> Attributes:
    """The numbers and texts among the attributes of a module and its parts, and of their classes."""
    found: Attributes = {}
    for path, part in module.named_modules():
        classes = [each for each in type(part).__mro__ if issubclass(each, nn.Module) and each is not nn.Module]
        for owner in (*reversed(classes), part):
            numbers = {name: value for name, value in vars(owner).items() if isinstance(value, _PLAIN)}
            found.update({f"{path}.{name}".removeprefix("."): value for name, value in numbers.items()})
    return found
