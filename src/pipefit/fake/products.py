"""Products of tensors of different dtypes, refused over fake tensors as the real kernels refuse them.

torch's rules for the shapes of products do not look at dtypes, so that a float32 batch would pass through a float64
model in a profile, and fail when it is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipefit.texts import dtype_name

aten = torch.ops.aten

_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.convolution.default,
    }
)


def check_product(func: Any, args: tuple[Any, ...]) -> None:
    """Check that the tensors in a product have one dtype.

    Raises:
        TypeError: they have several.
    """
    if func in _PRODUCTS:
        dtypes = dict.fromkeys(dtype_name(arg.dtype) for arg in args if isinstance(arg, Tensor))
        if len(dtypes) > 1:
            raise TypeError(f"a product of {' and '.join(dtypes)}")
