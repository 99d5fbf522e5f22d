"""Why a layer, the loss or the optimizer cannot be run over fake tensors, and the way out, by kinds of exceptions."""

from __future__ import annotations

import contextlib
import re
import traceback
from pathlib import Path

import torch

from pipefit.capture.refusals import PADDED
from pipefit.errors import in_one_line

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), contextlib.__file__, "<")
_OPERATOR = "make that a torch.library.custom_op with a register_fake, which says what shapes it returns"
_REMEDIES = (
    (
        r"SparseTensorImpl|SparseCPU|[Ss]parse layout",
        "no plan knows the memory of sparse tensors and gradients: use dense ones (sparse=False)",
    ),
    (r"a product of", "give the data, the module and all its parts one dtype, as Task(..., precision='float32') does"),
    (
        r"saves nothing has no backward|support saved tensor hooks",
        "no plan holds gradients inside a forward: write them out as operations, or in a torch.autograd.Function",
    ),
    (r"without an end", "let the loop make a fixed number of steps"),
    (r"closure", "use an optimizer that steps without a closure, such as AdamW or SGD"),
    (
        r"only supports 2D parameters",
        "let a class of your own step matrices with it and the rest with another, by options that groups=... gives",
    ),
    (r"does not support dense gradients", "use Adam or AdamW"),
    (r"capturable=True", "leave capturable out: it is for steps that a GPU records"),
    (
        r"differentiated Tensors?",
        "a loss cannot differentiate one output by another: let the module return that gradient, written as operations",
    ),
    (r"_pack_padded_sequence", PADDED),
    (r"_ctc_loss\.default", "give the lengths of ctc_loss as tensors, not as numbers"),
    (
        r"convert all Tensors to FakeTensors",
        "it computes with a tensor from outside, which no device would have: make that a buffer or a parameter of it",
    ),
    (
        r"DynamicOutputShape|DataDependent",
        f"what it returns depends on values, and nothing can be assumed of it: {_OPERATOR}",
    ),
    (r"[Uu]nsupported ?[Oo]perator|no fake impl", f"its shapes are not known: {_OPERATOR}"),
    (r"numpy|FakeTensor|unpack the object", f"it needs values, and a profile has none: use torch, or {_OPERATOR}"),
)


def why(error: BaseException) -> str:
    """The line of the user's own code at which `error` was raised, what it says, and the way out, if one is known."""
    said = in_one_line(error)
    remedy = next((words for pattern, words in _REMEDIES if re.search(pattern, said)), "")
    line = own_line(error)
    return f"{f'({line}) ' if line else ''}{said}{f'; {remedy}' if remedy else ''}"


def own_line(error: BaseException) -> str:
    """The innermost line of the user's own code at which `error` was raised; empty if there is none."""
    lines = [
        f"{frame.f_code.co_filename}:{number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS)
    ]
    return lines[-1] if lines else ""
