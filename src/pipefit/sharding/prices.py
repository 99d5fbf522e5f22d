"""What a choice of forms costs, in bytes: what a rank sends, and, at a price, what it stores.

Sums send each byte twice, or once where every rank gets its part, and gathers once; a rank sends (ranks - 1) / ranks of
the whole. Computing counts too, so that of two equal choices the divided one is taken. These are proxies of memory: the
exact bytes are a dry run's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, fx

from pipefit.capture.flat import value
from pipefit.sharding.forms import C, Form, R, Split
from pipefit.sharding.operations import Strategy, flops, nbytes

_STATES = 4  # a parameter's gradient and two states of an optimizer are divided with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a byte that a rank stores is worth, in bytes that it sends; and how many operations one of those is."""

    stored: float = 0.3
    flops: float = 1000.0


SEQUENCES = Prices(stored=2.0)  # of sequence parallelism, which is asked for to store less


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of a stage among `ranks`, at these prices.

    `trained` are the values that need a gradient.
    """

    ranks: int
    prices: Prices
    trained: frozenset[fx.Node]

    @property
    def _sent(self) -> float:
        return (self.ranks - 1) / self.ranks

    def conversion(self, node: fx.Node, home: Form, form: Form) -> float:
        """To have a value in another form than that in which it is made."""
        if not isinstance(value(node), Tensor):
            return math.inf  # lists are never converted
        back = node in self.trained
        if not isinstance(home, Split):
            times = 2 * back if form == C else float(back) if isinstance(form, Split) else 0.0
        else:
            times = 1 + (back if form != R else 0.0)
        return times * self._sent * nbytes(node)

    def stored(self, node: fx.Node, form: Form) -> float:
        """To have a parameter or buffer in a form, with all that an optimizer has for it."""
        return _STATES * self.kept(node, form)

    def done(self, node: fx.Node, way: Strategy) -> float:
        """To do an operation."""
        computed = flops(node) / (self.ranks if way.divides else 1) / self.prices.flops
        times = 1 + (node in self.trained) if way.scattered else 2
        return times * self._sent * way.summed + computed

    def kept(self, node: fx.Node, form: Form) -> float:
        """To keep a value in a form until the backward."""
        return self.prices.stored * nbytes(node) / (self.ranks if isinstance(form, Split) else 1)
