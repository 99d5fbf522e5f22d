"""A traced model as a chain: pieces of the program become modules, with the model's own parameters in them.

Every layer holds, under local names, the parameters and buffers that it uses: the same objects as the model's, so that
training the chain trains the model. What the program does not use goes along with the layer nearest by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from pipefit.capture.chain import Chain, ChainLayer
from pipefit.capture.cuts import pieces
from pipefit.capture.exporting import arguments, export
from pipefit.capture.flat import Role, flatten, role, sweep
from pipefit.capture.flow import Flow
from pipefit.capture.graph_layer import GraphLayer, write
from pipefit.capture.structure import Tree
from pipefit.capture.task import Task
from pipefit.errors import UsageError


def traced_chain(task: Task, module: nn.Module, inputs: Any, targets: Tree | None) -> Chain:
    """The chain of `module`, traced on `inputs`.

    Raises:
        UsageError: it cannot be traced, or returns no loss where it should.
    """
    program = export(module, task.name, inputs)
    graph = flatten(program)
    outputs = _outputs(task, program, graph)
    flow = Flow(graph)
    if not flow.order:
        raise UsageError(f"{task.name} computes nothing: there is no layer to make")
    model = _Model(module, program)
    layers, crossing = [], [node for node in graph.nodes if (r := role(node)) and r.kind == "input" and node.users]
    taken = tuple(_role(node).index for node in crossing)
    for piece in (cut := pieces(flow, module, task.granularity)):
        after = flow.outputs if piece is cut[-1] else flow.values(piece.stop - 1)
        layers.append(model.layer(flow, piece.name, flow.order[piece.start : piece.stop], crossing, after))
        crossing = list(after)
    model.give_the_rest(layers)
    return Chain(
        task.name,
        tuple(ChainLayer(layer.name, layer.module, layer.originals) for layer in layers),
        inputs=_inputs(program, inputs, taken),
        outputs=outputs,
        targets=targets,
        criterion=task.loss,
    )


class _Layer:
    """A layer in the making."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.module: GraphLayer = None  # type: ignore[assignment]
        self.originals: dict[str, str] = {}
