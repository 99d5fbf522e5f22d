"""The optimizers that every model of the zoo offers, by name and learning rate.

Per float32 parameter, AdamW and Adam keep 8 bytes of state and SGD with momentum keeps 4: the optimizer alone can
decide whether a model fits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import optim

OptimizerName = Literal["adamw", "adam", "sgd"]


def optimizer_of(
    name: OptimizerName, lr: float | None, *, sgd_rate: float = 0.03, sgd_decay: float = 0.0
) -> Callable[..., optim.Optimizer]:
    """Bind a rate: the result goes from parameters, or parameter groups, to the optimizer.

    `lr` None is the usual rate: 3e-4 for AdamW and Adam, the model's own `sgd_rate` for SGD, whose momentum is 0.9 and
    whose weight decay is the model's own `sgd_decay`.
    """
    match name:
        case "adamw":
            return partial(optim.AdamW, lr=lr or 3e-4)
        case "adam":
            return partial(optim.Adam, lr=lr or 3e-4)
        case "sgd":
            return partial(optim.SGD, lr=lr or sgd_rate, momentum=0.9, weight_decay=sgd_decay)
