"""Measurements of layers that are divided between tensor-parallel ranks: those of one rank, which stands for all.

The rank's peers are not there: what it would exchange with them has the right memory, and is told as collectives, for
the simulator to price. Every rank has as much of everything as the first: parts are equal, or padded to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipefit.capture.chain import Chain
from pipefit.capture.shared import Shared
from pipefit.capture.structure import Values
from pipefit.errors import UsageError
from pipefit.layer_costs import LayerCost
from pipefit.profiler.survey import shared_name
from pipefit.profiles import Measurement
from pipefit.sharding import ShardedChain, shard_traced, trace_chain
from pipefit.sharding.forms import Split
from pipefit.sharding.tracing import TracedStage, blocks_begin
from pipefit.work import Collective

_Collectives = tuple[tuple[Collective, ...], tuple[Collective, ...]]  # of a layer's forward, and of its backward


def sharded_chains(
    chain: Chain, degrees: Sequence[int], values: Values, targets: Values, *, sequences: bool = False
) -> list[ShardedChain]:
    """`chain` divided between each of these numbers of ranks, and by `sequences` along positions too; it is traced
    once.

    Raises:
        UsageError: so many ranks divide nothing, or nothing along positions; says why. Or a layer cannot be followed.
    """
    wanted = [degree for degree in dict.fromkeys(degrees) if degree > 1]
    traced = trace_chain(chain, values, targets) if wanted else None
    found = [] if traced is None else [shard_traced(chain, traced, degree) for degree in wanted]
    for sharded in found:
        if sharded.shares.divides_nothing:
            raise UsageError(
                f"{sharded.ranks} tensor-parallel ranks divide nothing of {chain.name}, 0 % of its parameters and of "
                f"its operations: {_why(sharded)}; choose another number, or replicas"
            )
    return [*found, *(_along_positions(traced, one) for one in found if sequences and traced is not None)]


def _along_positions(traced: TracedStage, plain: ShardedChain) -> ShardedChain:
    """The chain divided along positions too.

    Raises:
        UsageError: no sum over ranks is of sequences whose positions they divide.
    """
    found = shard_traced(plain.chain, traced, plain.ranks, sequences=True, like=plain)
    if ("reduce_scatter", "forward") not in {(one.kind, one.phase) for one in found.collectives}:
        raise UsageError(
            f"{plain.ranks} tensor-parallel ranks divide nothing of {plain.chain.name} along positions: it sums "
            "no sequences whose positions they divide, so leave sequence parallelism out, or choose another number"
        )
    return found


def _why(sharded: ShardedChain) -> str:
    """Why the largest operation stays whole."""
    whole = sharded.shares.whole
    return f"{whole[0].operator} of {whole[0].layer} stays whole, since {whole[0].reason}" if whole else "it has none"


def of_rank(measured: Measurement, whole: Measurement, sharded: ShardedChain) -> Measurement:
    """The measurement of a rank's chain, with what its collectives are; `whole` is that of the whole layers.

    Raises:
        UsageError: values between blocks, or shared parameters, are others than those of the whole layers.
    """
    _check_alike(measured, whole, sharded)
    forms = {(shared_name(sharded.chain, one), one.users): _form(sharded, one) for one in sharded.chain.shared}
    numbers: dict[tuple[int, _Collectives], int] = {}
    together = list(_by_layer(sharded, len(measured.layers)))
    layers = tuple(
        numbers.setdefault((kind, exchanged), len(numbers))
        for kind, exchanged in zip(measured.layers, together[:-1], strict=True)
    )
    return replace(
        measured,
        kinds=tuple(_with(measured.kinds[kind], exchanged) for kind, exchanged in numbers),
        layers=layers,
        loss=_with(measured.loss, together[-1]),
        shared=tuple(replace(one, form=forms.get((one.name, one.users), "")) for one in measured.shared),
        tensor=sharded.ranks,
        shares=sharded.shares,
        forms=sharded.digest,
        sequences=sharded.sequences,
    )


def _form(sharded: ShardedChain, shared: Shared) -> str:
    """How the ranks divide a shared parameter, as a text; empty where each has all of it."""
    form = sharded.stage.form(shared.parameter)
    return repr(form) if isinstance(form, Split) else ""


def _by_layer(sharded: ShardedChain, layers: int) -> Iterator[_Collectives]:
    """The collectives of every layer, and of the loss behind the last."""
    for number in range(layers + 1):
        mine = [each for each in sharded.collectives if each.layer == number]
        forward, backward = (
            tuple(Collective(each.kind, each.nbytes) for each in mine if each.phase == phase)
            for phase in ("forward", "backward")
        )
        yield forward, backward


def _with(cost: LayerCost, exchanged: _Collectives) -> LayerCost:
    forward, backward = exchanged
    return replace(
        cost,
        forward=replace(cost.forward, collectives=forward),
        backward=replace(cost.backward, collectives=backward),
    )


def _check_alike(measured: Measurement, whole: Measurement, sharded: ShardedChain) -> None:
    """Check that stages of ranks exchange with others what stages of whole layers do."""
    chain, between = sharded.chain, f"divided between {sharded.ranks} ranks"
    for edge in blocks_begin(chain):
        one, other = whole.costs[edge].inputs, measured.costs[edge].inputs
        if one != other:
            raise UsageError(
                f"{chain.name} {between} hands other values to layer {chain.layers[edge].name} than whole "
                f"({other}, not {one}), so that no stage could end there: choose no tensor-parallel ranks"
            )
    uses = [{(each.name, each.users) for each in one.shared} for one in (whole, measured)]
    if uses[0] != uses[1]:
        names = ", ".join(sorted({name for name, _ in uses[0] ^ uses[1]}))
        raise UsageError(
            f"{chain.name} {between} shares {names} between other layers than whole: let layers hand on no parameters, "
            "or choose no tensor-parallel ranks"
        )
