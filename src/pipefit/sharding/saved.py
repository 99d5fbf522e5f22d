"""What a backward is likely to keep, told by operators: those that most of them keep are known by name.

Sums, copies and views keep nothing of their operands; products, norms and curves do. A guess for a search, whose exact
bytes are a dry run's.
"""

from __future__ import annotations

import operator

from torch import fx

from pipefit.capture.flat import operator_name
from pipefit.sharding.rules.pieces import CUTS
from pipefit.sharding.rules.pointwise import COPIES
from pipefit.sharding.rules.reshaping import VIEWS

_CURVES = frozenset({"softmax", "log_softmax", "relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt"})  # known by results
_LOOKS = VIEWS | CUTS | {"transpose", "permute", "t", "expand", "select", "slice", "alias", "detach"}
_SUMS = frozenset({"add", "sub", "neg", "rsub", "sum", "mean", "cumsum"})
_MOVES = frozenset({"cat", "stack", "repeat", "repeat_interleave", "pad", "roll", "flip", "index", "embedding"})
_KEEPS_NO_OPERAND = COPIES | _CURVES | _LOOKS | _SUMS | _MOVES | {"dropout"}


def keeps_result(node: fx.Node) -> bool:
    """Whether the backward of an operation needs what it made, or something of that size."""
    return operator_name(node) in _CURVES | {"scaled_dot_product_attention", "dropout"}


def keeps_operands(node: fx.Node) -> bool:
    """Whether the backward of an operation needs what went in; that of a product with a number needs nothing."""
    name = operator_name(node)
    if node.target is operator.getitem or name in _KEEPS_NO_OPERAND:
        return False
    return not (name in ("mul", "div") and len(node.all_input_nodes) == 1)
