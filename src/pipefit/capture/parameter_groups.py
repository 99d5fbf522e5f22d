"""The parameter groups of a stage's optimizer, layer by layer: at least one for every layer that is trained.

So an update needs temporary memory for one layer at a time, and what a layer's update costs does not depend on its
stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipefit.capture.chain import ChainLayer
from pipefit.capture.task import ParameterOptions
from pipefit.errors import UsageError, in_one_line
from pipefit.texts import shortened


def parameter_groups(layers: Sequence[ChainLayer], options: ParameterOptions | None) -> list[list[dict[str, Any]]]:
    """The groups of every layer that is trained: one for each set of options.

    A shared parameter is in a group of the first layer that has it.

    Raises:
        UsageError: `options` returns what are no options.
    """
    met: set[int] = set()
    groups: list[list[dict[str, Any]]] = []
    for layer in layers:
        of_layer: list[dict[str, Any]] = []
        for name, parameter in layer.named_parameters:
            if not parameter.requires_grad or id(parameter) in met:
                continue
            met.add(id(parameter))
            wanted = {} if options is None else _wanted(options, name, parameter)
            group = next((g for g in of_layer if {k: v for k, v in g.items() if k != "params"} == wanted), None)
            if group is None:
                of_layer.append({"params": [parameter], **wanted})
            else:
                group["params"].append(parameter)
        groups += [of_layer] if of_layer else []
    return groups


def _wanted(options: ParameterOptions, name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """The options of one parameter.

    Raises:
        UsageError: they are no dictionary of options by their names, or cannot be had.
    """
    try:
        found: object = options(name, parameter)
    except Exception as error:
        raise UsageError(f"groups of a Task fails for {name}: {in_one_line(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) and key != "params" for key in found):
        raise UsageError(
            f"groups of a Task must return the options of a parameter's group, such as {{'weight_decay': 0.0}}, not "
            f"{shortened(repr(found))} as for {name}"
        )
    return found
