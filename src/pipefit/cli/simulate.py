"""`pipefit simulate`: a plan on a virtual clock."""

from __future__ import annotations

from pipefit.cli.options import Engine, Json, Output, PlanFile, PredictedSteps
from pipefit.cli.output import check_output, deliver, used
from pipefit.cli.progress import progress
from pipefit.tables import Block

EXAMPLE = "pipefit simulate plan.json -o predicted.json"


def command(
    plan: PlanFile,
    steps: PredictedSteps = None,
    engine: Engine = "pipefit",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Simulate PLAN: predicted peaks and time.

    The first step differs from the others, because its update allocates the optimizer state. Under pipedream
    and pipedream-2bw the pipeline fills during the first steps, and the last step is typical. With --engine
    torch, memory and messages are those of torch.distributed.pipelining, and the result says what that engine
    holds in addition.
    """
    from pipefit.report.plan import holds_for
    from pipefit.report.traces import describe_engine, describe_trace
    from pipefit.schema.json_io import load
    from pipefit.schema.plan import Plan
    from pipefit.simulator import simulate

    check_output(output, plan)
    document = load(plan, Plan)
    with progress("simulating"), used(plan):
        trace = simulate(document, steps=steps, engine=engine)

    def describe() -> list[Block]:
        more = describe_engine(document, trace) if engine == "torch" else ()
        return [*describe_trace(trace), *filter(None, [holds_for(document)]), *more]

    deliver(trace, output=output, as_json=as_json, describe=describe)
