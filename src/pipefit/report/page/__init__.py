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
from pipefit.report.plan import describe_plan, freed, head, predicted_seconds, priced, sentences, stage_table
from pipefit.report.post_mortem import categories, describe_remedies, filled, largest, layers
from pipefit.report.traces import Comparison, compare, describe_comparison, describe_trace
from pipefit.schema.decisions import ALL_MICROBATCHES, Decision, Run, SavedTensors, State
from pipefit.schema.fit import Fit
from pipefit.schema.plan import Plan
from pipefit.schema.post_mortem import PostMortem
from pipefit.schema.trace import CATEGORIES, Trace
from pipefit.simulator import simulate
from pipefit.simulator.simulation import all_contents
from pipefit.tables import Table, html
from pipefit.texts import counted, numbered
from pipefit.units import format_bytes, format_number, format_seconds

_MOST_DECISIONS, _MOST_STRETCHES = 200, 40
_STRETCHES = {"messages": "k6", "copies": "k4", "sums": "k8"}  # traffic on links, by colour


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
    sections = [_section("What fits", html([answer]), chart, html(more)), *_sections(best, trace)]
    return _assembled(
        f"{best.profile.model}: {fit.named(fit.best.value)}", "".join(sections), [_scene(best, trace)]
    )


def _post_mortem_page(found: PostMortem) -> str:
    """Return the page of a post-mortem: the memory's contents, remedies, and the plan."""
    plan, planned = found.plan, _simulated(found.plan)
    moment = replace(found.traced, memory=(found.moment,), events=())
    bar = f'<div class="devices">{markup.peaks(replace(found.trace, devices=(moment,)))}</div>'
    used = [(f"c{n}", name.value) for n, name in enumerate(CATEGORIES) if found.moment.bytes[n]]
    told = f"<p>{markup.text(found.head)}</p>"
    last = () if found.moment in found.traced.memory else (found.moment,)
    ended = replace(found.traced, memory=(*found.traced.memory, *last))
    run = replace(
        found.trace, devices=tuple(ended if one is found.traced else one for one in found.trace.devices)
    )
    sections = [
        markup.head(
            plan.profile.model, f"device {found.device} ran out of memory", told, _lacked(found), fits=False
        ),
        _section(
            "What held the memory",
            f'<div class="legend">{markup.legend(used)}</div>',
            bar,
            html([categories(found)]),
        ),
        _section("Which layers held it", html(layers(found))),
        _section("What would have fitted", html(describe_remedies(found))),
        _section("Over time", _drawing()),
        _section("What if", lesson(plan)),
        _section("The plan in words", html(describe_plan(plan))),
    ]
    title = f"{plan.profile.model}: out of memory on device {found.device}"
    return _assembled(title, "".join(sections), [_scene(plan, run), _scene(plan, planned)])


def _lacked(found: PostMortem) -> list[tuple[str, str, str]]:
    """Return the main figures of a post-mortem."""
    moment = found.moment
    facts = [
        ("ran out at", moment.action, f"step {moment.step}, device {found.device}"),
        ("would have held", format_bytes(moment.total_bytes), f"of {format_bytes(found.budget_bytes)}"),
        (
            "too little by",
            format_bytes(found.lack_bytes),
            "of tensors" if found.lack_bytes else "tensors alone fit",
        ),
    ]
    if found.asked_bytes:
        asked = ("asked for", format_bytes(found.asked_bytes), f"with {format_bytes(found.left_bytes)} left")
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
    bars = f'<div class="devices">{markup.peaks(trace)}</div>'
    names = [(f"c{n}", category.value) for n, category in enumerate(CATEGORIES) if _uses(trace, n)]
    yield _section(
        "What fills each device at its peak", f'<div class="legend">{markup.legend(names)}</div>', bars
    )
    yield _section("Over time", _drawing())
    if comparison is not None:
        yield _section("Predicted beside measured", html(describe_comparison(comparison)))
    if plan is None:
        yield _section("In figures", html(describe_trace(trace)))
        return
    yield _section("Which layers fill a device", *_filled(plan, trace))
    yield _section("What is done about memory", *_decided(plan))
    yield _section("What if", lesson(plan))
    yield _section("What passes over the links in a step", *_links(plan, trace))
    yield _section("Plans that were not chosen", html(priced(plan.alternatives, predicted_seconds(plan))))
    yield _section("The plan in words", html([stage_table(plan), *sentences(plan)]))


def _uses(trace: Trace, category: int) -> bool:
    return any(device.peak and device.peak.bytes[category] for device in trace.devices)


def _head(plan: Plan | None, trace: Trace) -> str:
    over = [one.device for one in trace.devices if one.budget_bytes and one.peak_bytes > one.budget_bytes]
    tight = (
        plan
        and plan.prediction
        and any(plan.prediction.is_tight(plan.cluster, worker) for worker in plan.workers)
    )
    room = "fits, tightly" if tight else "fits"
    verdict = (
        f"device{'s' * (len(over) > 1)} {', '.join(map(str, over))} would run out of memory" if over else room
    )
    title = plan.profile.model if plan else f"A {trace.source} trace"
    where = html([head(plan)]) if plan else ""
    return markup.head(title, verdict, where, list(_facts(plan, trace)), fits=not over)


def _facts(plan: Plan | None, trace: Trace) -> Iterator[tuple[str, str, str]]:
    """Yield the main figures."""
    fullest = max(
        trace.devices, key=lambda device: device.peak_bytes / (device.budget_bytes or 1), default=None
    )
    if fullest is not None and fullest.budget_bytes:
        share = f"{100 * fullest.peak_bytes / fullest.budget_bytes:.1f} %"
        sizes = f"{format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.budget_bytes)}"
        yield "fullest device", share, f"device {fullest.device}: {sizes}"
    if not (seconds := trace.last_seconds):
        return
    yield "a step takes", format_seconds(seconds), "estimated" if trace.estimated else trace.source
    if plan is not None:
        yield "samples per second", format_number(plan.training.batch_size / seconds), _of_batch(plan)
    waiting = [
        1 - busy for device, busy in zip(trace.devices, trace.utilisation(), strict=True) if device.events
    ]
    if waiting:
        yield "devices wait", f"{100 * max(0.0, sum(waiting) / len(waiting)):.0f} %", "of a step, on average"
    made = plan.provenance if plan else None
    if made and made.bound and made.objective.unit == "seconds":
        yield (
            "above the bound",
            f"{100 * (made.value / made.bound - 1):.1f} %",
            "no plan can be faster by more",
        )


def _of_batch(plan: Plan) -> str:
    return f"a batch of {plan.training.batch_size} in {counted(plan.training.microbatches, 'microbatch')}"


def _drawing() -> str:
    """Return the element that the script fills, and its controls."""
    kinds = markup.legend([(f"k{n}", name) for n, name in enumerate(KINDS)])
    return _asset("drawing.html").replace("<!--KINDS-->", kinds)


def _filled(plan: Plan, trace: Trace) -> Iterator[str]:
    """Yield the layers with the most bytes at the start of each device's fullest action.

    Equal devices share a table.
    """
    yield (
        "<p>What each layer has as the action begins at which its device is fullest, and what that adds.</p>"
    )
    shares = [device.peak_bytes / (device.budget_bytes or 1) for device in trace.devices]
    alike: dict[tuple[str, str], list[int]] = {}
    for device, result in enumerate(all_contents(plan, trace)):
        if result is not None:
            peak = f"{format_bytes(result.peak.total_bytes)} at {result.peak.action}"
            table = html([filled(plan, result), *([largest(plan, result)] if result.tensors else [])])
            alike.setdefault((peak, table), []).append(device)
    for (peak, table), devices in alike.items():
        told = f"device{'s' * (len(devices) > 1)} {numbered(devices)}, {peak}"
        opened = " open" if any(shares[device] == max(shares) for device in devices) else ""
        yield f"<details{opened}><summary>{markup.text(told)}</summary>{table}</details>"


def _decided(plan: Plan) -> Iterator[str]:
    """Yield every decision with its reason, after its effects on its stage."""
    yield html(freed(plan))
    if not plan.decisions:
        yield "<p>Nothing is recomputed or moved away.</p>"
        return
    shown = plan.decisions[:_MOST_DECISIONS]
    rows = tuple((str(decision.stage), *_decision(plan, decision)) for decision in shown)
    left = len(plan.decisions) - len(shown)
    yield f"<details{' open' if len(rows) <= 12 else ''}><summary>{counted(len(plan.decisions), 'decision')}</summary>"
    columns = ("stage", "what", "of what", "where to", "why")
    told = [place for place in range(len(columns)) if any(row[place] != "-" for row in rows)]
    yield html([Table(tuple(columns[n] for n in told), tuple(tuple(row[n] for n in told) for row in rows))])
    yield f"<p>and {left} more</p></details>" if left else "</details>"


def _decision(plan: Plan, decision: Decision) -> tuple[str, str, str, str]:
    what = (
        decision.what.value
        if decision.microbatches == ALL_MICROBATCHES
        else f"{decision.what.value}, of some"
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
    yield html([Table(("from", "to", "what", "bytes", "of a step"), tuple(rows))])
    if len(flows) > len(rows):
        yield f"<p>and {len(flows) - len(rows)} more, of fewer bytes</p>"
