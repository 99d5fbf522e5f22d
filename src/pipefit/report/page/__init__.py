"""One self-contained HTML page of a plan, a trace, a post-mortem, or a search for the largest that fits.

`page(document)` draws memory over time and the timeline of every device, and shows the contents of each
device at its peak, the decisions about its memory with their prices, and the traffic on the links. With a
measured trace in addition to a plan, both are drawn. The page needs no network and no other file. Its script
draws at most 3,000 shapes: shapes too narrow to be seen are drawn together until the user zooms in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from typing import Any

from pipefit.report.fit import describe_fit
from pipefit.report.page import markup
from pipefit.report.page.charts import growth, lesson, topology, traffic
from pipefit.report.page.scenes import KINDS, packed, scene
from pipefit.report.plan import (
    describe_plan,
    effect,
    freed,
    head,
    predicted_seconds,
    priced,
    sentences,
    stage_table,
)
from pipefit.report.show import categories, describe_remedies, filled, largest, layers
from pipefit.report.traces import Comparison, compare, describe_comparison, describe_trace
from pipefit.schema.decisions import ALL_MICROBATCHES, Decision, Run, SavedTensors, State
from pipefit.schema.fit import Fit
from pipefit.schema.plan import Plan
from pipefit.schema.post_mortem import PostMortem
from pipefit.schema.trace import CATEGORIES, Trace
from pipefit.simulator import all_contents, simulate
from pipefit.tables import Table, html
from pipefit.texts import counted, numbered
from pipefit.units import format_bytes, format_number, format_seconds

_MOST_DECISIONS, _MOST_STRETCHES = 200, 40
_STRETCHES = {"messages": "k6", "copies": "k4", "collectives": "k8"}  # traffic on links, by colour


def page(document: Plan | Trace | PostMortem, measured: Trace | None = None) -> str:
    """Return the page of a plan, which is simulated, of a trace, or of a post-mortem.

    `measured` is a second trace to draw.

    Raises:
        UsageError: the traces are of different devices.
    """
    if isinstance(document, PostMortem):
        return _post_mortem_page(document)
    trace = _simulated(document) if isinstance(document, Plan) else document
    comparison = None if measured is None else compare(trace, measured)
    plan = document if isinstance(document, Plan) else None
    title = f"{plan.profile.model} on {plan.cluster.name}" if plan else f"{trace.source} trace"
    scenes = [_scene(plan, one) for one in (trace, measured) if one is not None]
    return _assembled(title, "".join(_sections(plan, trace, comparison)), scenes)


def fit_page(fit: Fit) -> str:
    """Return the page of a search: peak over size, all attempts, and the plan of the value that fits."""
    answer, *more = describe_fit(fit)
    best = fit.best.plan
    trace = _simulated(best)
    chart = f'<div class="wide">{growth(fit)}</div>'
    sections = [
        _section("Answer", html([answer]), chart, *map(markup.folded, more)),
        *_sections(best, trace),
    ]
    return _assembled(
        f"{best.profile.model}: {fit.named(fit.best.value)}", "".join(sections), [_scene(best, trace)]
    )


def _post_mortem_page(post_mortem: PostMortem) -> str:
    """Return the page of a post-mortem: the memory's contents, remedies, and the plan."""
    plan, planned = post_mortem.plan, _simulated(post_mortem.plan)
    moment = replace(post_mortem.traced, memory=(post_mortem.moment,), events=())
    bar = f'<div class="devices">{markup.peaks(replace(post_mortem.trace, devices=(moment,)))}</div>'
    used = [(f"c{n}", name.value) for n, name in enumerate(CATEGORIES) if post_mortem.moment.bytes[n]]
    told = f"<p>{markup.text(post_mortem.head)}</p>"
    last = () if post_mortem.moment in post_mortem.traced.memory else (post_mortem.moment,)
    ended = replace(post_mortem.traced, memory=(*post_mortem.traced.memory, *last))
    run = replace(
        post_mortem.trace,
        devices=tuple(ended if trace is post_mortem.traced else trace for trace in post_mortem.trace.devices),
    )
    sections = [
        markup.head(f"Device {post_mortem.device} ran out of memory", told, _lacked(post_mortem), fits=False),
        _section(
            "Memory by category",
            f'<div class="legend">{markup.legend(used)}</div>',
            bar,
            html([categories(post_mortem)]),
        ),
        _section("Plans that would have fitted", html(describe_remedies(post_mortem))),
        _section("Timeline and memory", _drawing()),
        _section("Largest layers", *map(markup.folded, layers(post_mortem))),
        _section("Explore other plans", lesson(plan)),
        _section("Summary", html(describe_plan(plan))),
    ]
    title = f"{plan.profile.model}: out of memory on device {post_mortem.device}"
    return _assembled(title, "".join(sections), [_scene(plan, run), _scene(plan, planned)])


def _lacked(post_mortem: PostMortem) -> list[tuple[str, str, str]]:
    """Return the main figures of a post-mortem."""
    moment = post_mortem.moment
    facts = [
        ("ran out at", moment.action, f"step {moment.step}, device {post_mortem.device}"),
        (
            "would have needed",
            format_bytes(moment.total_bytes),
            f"of {format_bytes(post_mortem.budget_bytes)}",
        ),
        (
            "short by",
            format_bytes(post_mortem.lack_bytes),
            "of tensors" if post_mortem.lack_bytes else "tensors alone fit",
        ),
    ]
    if post_mortem.asked_bytes:
        asked = (
            "requested",
            format_bytes(post_mortem.asked_bytes),
            f"with {format_bytes(post_mortem.left_bytes)} free",
        )
        facts.insert(1, asked)
    return facts


def _simulated(plan: Plan) -> Trace:
    """Return the plan's simulated trace, with budgets that exclude the reserves for processes."""
    trace = simulate(plan)
    devices = (replace(one, budget_bytes=plan.cluster.budgets[one.device]) for one in trace.devices)
    return replace(trace, devices=tuple(devices))


def _scene(plan: Plan | None, trace: Trace) -> dict[str, Any]:
    return scene(trace, trace.source, plan.cluster if plan else None)


def _assembled(title: str, body: str, scenes: list[dict[str, Any]]) -> str:
    parts = {
        "TITLE": markup.text(title),
        "STYLE": _asset("page.css"),
        "BODY": body,
        "SCENES": packed(scenes),
        "SCRIPT": _asset("page.js"),
    }
    made = _asset("page.html")
    for name, part in parts.items():
        made = made.replace(f"<!--{name}-->", part, 1)
    return made


def _asset(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>" if any(parts) else ""


def _sections(plan: Plan | None, trace: Trace, comparison: Comparison | None = None) -> Iterator[str]:
    yield _head(plan, trace)
    yield _section("Timeline and memory", _drawing())
    bars = f'<div class="devices">{markup.peaks(trace)}</div>'
    names = [(f"c{n}", category.value) for n, category in enumerate(CATEGORIES) if _uses(trace, n)]
    legend = f'<div class="legend">{markup.legend(names)}</div>'
    yield _section("Peak memory of each device", legend, bars)
    if comparison is not None:
        yield _section("Predicted and measured", *map(markup.folded, describe_comparison(comparison)))
    if plan is None:
        yield _section("Figures", *map(markup.folded, describe_trace(trace)))
        return
    yield _section("Stages", *_stages(plan))
    yield _section("Largest layers and activations", *_filled(plan, trace))
    yield _section("Communication in a step", *_links(plan, trace))
    alternatives = priced(plan.alternatives, predicted_seconds(plan))
    yield _section("Alternatives", *map(markup.folded, alternatives))
    yield _section("Explore other plans", lesson(plan))
    yield _section("Summary", html(sentences(plan)))


def _uses(trace: Trace, category: int) -> bool:
    return any(device.peak and device.peak.bytes[category] for device in trace.devices)


def _head(plan: Plan | None, trace: Trace) -> str:
    """Return the answer: whether the training fits, by how much, what limits it, and how fast it is."""
    where = html([head(plan)]) if plan else f"<p>A {markup.text(trace.source)} trace.</p>"
    over = [device for device in trace.devices if 0 < device.budget_bytes < device.peak_bytes]
    return markup.head(_verdict(plan, trace), where, list(_facts(plan, trace)), fits=not over)


def _verdict(plan: Plan | None, trace: Trace) -> str:
    """Say whether every device has room, and how much room the fullest has or lacks."""
    known = [device for device in trace.devices if device.budget_bytes]
    if not known:
        return f"A {trace.source} trace"
    fullest = max(known, key=lambda device: device.peak_bytes / device.budget_bytes)
    room = fullest.budget_bytes - fullest.peak_bytes
    if room < 0:
        return f"This plan does not fit: device {fullest.device} lacks {format_bytes(-room)}"
    prediction = plan.prediction if plan else None
    tight = plan and prediction and any(prediction.is_tight(plan.cluster, device) for device in plan.workers)
    return f"Fits{' tightly' if tight else ''}, with {format_bytes(room)} to spare on device {fullest.device}"


def _facts(plan: Plan | None, trace: Trace) -> Iterator[tuple[str, str, str]]:
    """Yield the main figures: name, figure, explanation."""
    fullest = max(
        trace.devices, key=lambda device: device.peak_bytes / (device.budget_bytes or 1), default=None
    )
    if fullest is not None and fullest.budget_bytes:
        share = f"{100 * fullest.peak_bytes / fullest.budget_bytes:.1f} %"
        sizes = f"of the {format_bytes(fullest.budget_bytes)} of device {fullest.device}, which limits"
        yield "highest peak", format_bytes(fullest.peak_bytes), f"{share} {sizes}"
    if not (seconds := trace.last_seconds):
        return
    yield "step", format_seconds(seconds), "estimated" if trace.estimated else trace.source
    if plan is not None:
        yield "samples per second", format_number(plan.training.batch_size / seconds), _of_batch(plan)
    idle = [
        1 - busy for device, busy in zip(trace.devices, trace.utilisation(), strict=True) if device.events
    ]
    if idle:
        yield "idle", f"{100 * max(0.0, sum(idle) / len(idle)):.0f} %", "of the step, mean of the devices"
    provenance = plan.provenance if plan else None
    if provenance and provenance.bound and provenance.objective.unit == "seconds":
        gap = f"{100 * (provenance.value / provenance.bound - 1):.1f} %"
        yield "gap to the lower bound", gap, "no plan has a step below the bound"


def _of_batch(plan: Plan) -> str:
    return f"a batch of {plan.training.batch_size} in {counted(plan.training.microbatches, 'microbatch')}"


def _drawing() -> str:
    """Return the element that the script fills, its controls and its legends."""
    kinds = markup.legend([(f"k{n}", name) for n, name in enumerate(KINDS)])
    categories = markup.legend([(f"c{n}", category.value) for n, category in enumerate(CATEGORIES)])
    drawing = _asset("drawing.html").replace("<!--KINDS-->", kinds)
    return drawing.replace("<!--CATEGORIES-->", categories)


def _filled(plan: Plan, trace: Trace) -> Iterator[str]:
    """Yield the layers with the most bytes at the start of each device's fullest action.

    Equal devices share a table.
    """
    begins = "The memory of each layer when the fullest action of its device begins"
    yield f"<p>{begins}, and the memory that this action adds.</p>"
    alike: dict[tuple[str, str], list[int]] = {}
    for device, result in enumerate(all_contents(plan, trace)):
        if result is not None:
            peak = f"{format_bytes(result.peak.total_bytes)} at {result.peak.action}"
            table = html([filled(plan, result), *([largest(plan, result)] if result.tensors else [])])
            alike.setdefault((peak, table), []).append(device)
    for (peak, table), devices in alike.items():
        summary = f"device{'s' * (len(devices) > 1)} {numbered(devices)}, {peak}"
        yield f'<details><summary>{markup.text(summary)}</summary><div class="wide">{table}</div></details>'


def _stages(plan: Plan) -> Iterator[str]:
    """Yield the table of stages, a sentence for each stage that saves memory, and all decisions in a fold."""
    yield markup.folded(stage_table(plan))
    lines = list(_savings(plan))
    yield f"<ul>{''.join(f'<li>{markup.sentence(line)}</li>' for line in lines)}</ul>" if lines else ""
    if not plan.decisions:
        yield "<p>Every stage keeps all tensors on its devices; no stage recomputes.</p>"
        return
    shown = plan.decisions[:_MOST_DECISIONS]
    rows = tuple((str(decision.stage), *_decision(plan, decision)) for decision in shown)
    columns = ("stage", "technique", "layers", "target", "reason")
    used = [place for place in range(len(columns)) if any(row[place] != "-" for row in rows)]
    table = Table(columns, rows).part(used)
    left = len(plan.decisions) - len(shown)
    more = f"<p>and {left} more</p>" if left else ""
    summary = counted(len(plan.decisions), "decision")
    body = f'<div class="wide">{html([*freed(plan), table])}</div>{more}'
    yield f"<details><summary>{summary}</summary>{body}</details>"


def _savings(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each stage with techniques: what they free and what they cost."""
    compactions = plan.prediction.compactions if plan.prediction else ()
    step = predicted_seconds(plan)
    for stage in range(len(plan.stages)):
        own = [compaction for compaction in compactions if compaction.stage == stage]
        if own:
            yield f"Stage {stage}: {'; '.join(effect(one, step) for one in own)}."


def _decision(plan: Plan, decision: Decision) -> tuple[str, str, str, str]:
    what = (
        decision.what.value
        if decision.microbatches == ALL_MICROBATCHES
        else f"{decision.what.value} in some microbatches"
    )
    return what, _subject(plan, decision), str(decision.place or "-"), decision.why or "-"


def _subject(plan: Plan, decision: Decision) -> str:
    """Describe a decision's subject by the names of layers."""
    layers = decision.layers
    names = [plan.profile.layers[layer] for layer in (min(layers), max(layers))]
    span = names[0] if names[0] == names[1] else f"{names[0]} .. {names[1]}"
    match decision.subject:
        case Run():
            return span
        case SavedTensors(tensors=tensors):
            return f"{counted(len(tensors), 'saved tensor')} of {span}"
        case State(kind=kind):
            return f"{kind} of {span}"


def _links(plan: Plan, trace: Trace) -> Iterator[str]:
    """Yield a picture of the cluster and a row for every stretch with traffic."""
    flows = traffic(plan)
    if not flows:
        return
    names = [
        (_STRETCHES[what], what) for what in _STRETCHES if any(stretch.what == what for stretch in flows)
    ]
    yield f'<div class="legend">{markup.legend(names)}</div><div class="wide">{topology(plan, flows)}</div>'
    seconds = trace.last_seconds or 0.0
    rows = []
    for stretch, nbytes in sorted(flows.items(), key=lambda item: -item[1])[:_MOST_STRETCHES]:
        taken = plan.cluster.route(stretch.source, stretch.target).seconds(nbytes)
        share = f"{100 * taken / seconds:.1f} %" if seconds else "-"
        rows.append((str(stretch.source), str(stretch.target), stretch.what, format_bytes(nbytes), share))
    yield markup.folded(
        Table(("from", "to", "traffic", "bytes", "share of the step"), tuple(rows), title="traffic by link")
    )
    if len(flows) > len(rows):
        yield f"<p>and {len(flows) - len(rows)} more with fewer bytes</p>"
