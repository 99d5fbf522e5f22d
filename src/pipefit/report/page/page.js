"use strict";
// Draws the traces of this page. Everything visible is a function of `state`; whatever changes it calls `draw`.
(async () => {
  const MOST_BARS = 2400, LABELS = 84, MARGIN = 8, MEMORY = 270;
  const byId = (id) => document.getElementById(id);
  const [timeline, memory, readout] = ["timeline", "memory", "readout"].map(byId);
  const peaks = [...document.querySelectorAll(".device")];
  const scenes = (await unpacked(byId("scenes").textContent)).map(decoded);
  const state = { scene: scenes[0], device: 0, from: 0, to: scenes[0].end, cursor: null };

  // ------------------------------------------------------------------ data

  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  function sums(differences) {
    let total = 0;
    return differences.map((difference) => (total += difference));
  }

  function decoded(scene) {
    let end = 1;
    for (const device of scene.devices) {
      for (const lane of device.lanes) {
        lane.starts = sums(lane.starts);
        lane.starts.forEach((start, n) => { end = Math.max(end, start + lane.lengths[n]); });
      }
      device.memory.times = sums(device.memory.times);
      device.memory.bytes = device.memory.bytes.map(sums);
      device.memory.totals = device.memory.times.map((_, n) => device.memory.bytes.reduce((sum, row) => sum + row[n], 0));
    }
    return { ...scene, end };
  }

  const action = (row, n) => state.scene.words[row.words[n]].replace("*", row.microbatches[n]);
  const kindOf = (row, n) => state.scene.wordKinds[row.words[n]];
  const escaped = (text) => String(text).replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`);

  function after(numbers, value) {  // how many of the sorted numbers are at most `value`
    let low = 0, high = numbers.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (numbers[middle] <= value) low = middle + 1; else high = middle;
    }
    return low;
  }

  function bytesText(count) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (count >= 1024 && unit < 4) { count /= 1024; unit += 1; }
    return `${unit ? count.toFixed(2) : count} ${units[unit]}`;
  }

  function timeText(ticks) {
    if (!state.scene.clock) return `position ${Math.round(ticks * state.scene.tick)}`;
    return secondsText(ticks * state.scene.tick);
  }

  function secondsText(seconds) {
    if (seconds === 0) return "0 s";
    const [factor, unit] = seconds < 1e-3 ? [1e6, "us"] : seconds < 1 ? [1e3, "ms"] : [1, "s"];
    return `${Number((seconds * factor).toPrecision(4))} ${unit}`;
  }

  const stepBegin = (tick) => state.scene.steps[Math.max(0, after(state.scene.steps, tick) - 1)] || 0;  // of the step at a moment

  // ------------------------------------------------------------------ scales

  const width = () => Math.max(280, timeline.clientWidth);
  const plot = () => width() - LABELS - MARGIN;
  const place = (tick) => LABELS + (tick - state.from) / (state.to - state.from) * plot();
  const tickAt = (x) => state.from + (x - LABELS) / plot() * (state.to - state.from);

  function marks() {  // round times in view, about one for every 110 pixels
    const span = (state.to - state.from) * (state.scene.clock ? state.scene.tick : 1);
    const rough = span / Math.max(2, plot() / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= rough) / (state.scene.clock ? state.scene.tick : 1);
    const found = [], start = stepBegin(state.from + 1e-6 * (state.to - state.from));
    for (let n = Math.ceil((state.from - start) / step - 1e-9); start + n * step <= state.to; n += 1) found.push(start + n * step);
    return found;
  }

  const mark = (tick) => timeText(tick - stepBegin(state.from + 1e-6 * (state.to - state.from)));  // since the step in view began

  function rules(height) {
    const lines = marks().map((tick) => `<line class="rule" x1="${place(tick)}" x2="${place(tick)}" y1="16" y2="${height}"/>` +
      (place(tick) < LABELS + plot() - 40 ? `<text class="soft" x="${place(tick) + 3}" y="11">${mark(tick)}</text>` :
        `<text class="soft" x="${place(tick) - 3}" y="11" text-anchor="end">${mark(tick)}</text>`));
    const steps = state.scene.steps.slice(1).filter((tick) => tick > state.from && tick < state.to)
      .map((tick) => `<line class="cap" x1="${place(tick)}" x2="${place(tick)}" y1="16" y2="${height}"/>`);
    return lines.join("") + steps.join("");
  }

  const cursorLine = (height) => state.cursor === null || state.cursor < state.from || state.cursor > state.to ? "" :
    `<line class="cursor" x1="${place(state.cursor)}" x2="${place(state.cursor)}" y1="16" y2="${height}"/>`;

  // ------------------------------------------------------------------ timeline

  function rows() {  // where every lane is, of the devices that do anything
    const busy = (device) => device.lanes.some((lane) => lane.starts.length), found = [];
    const count = state.scene.devices.filter(busy).length, crowded = count > 16, roomy = count <= 4;
    let y = 20;
    state.scene.devices.forEach((device, number) => {
      if (!busy(device)) return;
      const top = y;
      device.lanes.forEach((lane, n) => {
        const height = n === 0 ? (crowded ? 9 : roomy ? 30 : 19) : (crowded ? 3 : roomy ? 9 : 6);
        found.push({ device: number, lane, y, height, main: n === 0 });
        y += height + 1;
      });
      found[found.length - device.lanes.length].span = y - top;
      y += crowded ? 3 : 7;
    });
    return { found, height: y };
  }

  function bars(row, quantum) {  // actions in view; neighbours of one microbatch and kind are one bar, and so is what is narrow
    const { lane } = row, found = [];
    let n = Math.max(0, after(lane.starts, state.from) - 1), last = null;
    for (; n < lane.starts.length && lane.starts[n] < state.to; n += 1) {
      const start = Math.max(LABELS, place(lane.starts[n]));
      const end = Math.min(LABELS + plot(), place(lane.starts[n] + lane.lengths[n]));
      if (end < LABELS) continue;
      const kind = kindOf(lane, n), microbatch = lane.microbatches[n];
      const alike = last && last.kind === kind && last.microbatch === microbatch && start - last.end < 1;
      const narrow = last && end - start < quantum && start - last.end < quantum &&
        (last.microbatch === microbatch || last.end - last.start < 4 * quantum);
      if (alike || narrow) {
        last.end = Math.max(last.end, end);
        if (last.microbatch !== microbatch) last.microbatch = -1;
        last.shares.set(kind, (last.shares.get(kind) || 0) + end - start);
      } else found.push(last = { row, start, end, kind, microbatch, shares: new Map([[kind, end - start]]) });
    }
    return found;
  }

  function allBars(found) {  // narrow ones are joined to wider ones until there are few enough
    for (let quantum = 1; ; quantum *= 1.5) {
      const drawn = found.flatMap((row) => bars(row, quantum));
      if (drawn.reduce((count, bar) => count + bar.shares.size, 0) <= MOST_BARS || quantum > plot()) return drawn;
    }
  }

  function bar({ row, start, end, shares, microbatch }) {  // of several kinds, each has its share of the height
    const wide = end - start, whole = [...shares.values()].reduce((sum, share) => sum + share, 0) || 1;
    let y = row.y;
    const parts = [...shares].map(([kind, share]) => {
      const height = row.height * (shares.size > 1 ? share / whole : 1), top = y;
      y += height;
      return `<rect class="k${kind}" x="${start.toFixed(2)}" y="${top.toFixed(1)}" width="${Math.max(.4, wide - (wide > 3)).toFixed(2)}" height="${height.toFixed(1)}"/>`;
    });
    const label = row.main && row.height > 12 && microbatch >= 0 && wide > 6.5 * String(microbatch).length + 2;
    return parts.join("") + (label ? `<text class="on" x="${((start + end) / 2).toFixed(1)}" y="${row.y + row.height / 2 + 4}">${microbatch}</text>` : "");
  }

  function drawTimeline() {
    const { found, height } = rows();
    const labels = found.filter((row) => row.main).map((row) => (row.device === state.device ?
      `<rect class="chosen" x="0" y="${row.y - 2}" width="${width()}" height="${row.span + 3}"/>` : "") +
      `<text x="2" y="${row.y + (row.height > 12 ? row.height / 2 + 4 : 9)}">device ${state.scene.devices[row.device].number}</text>`);
    timeline.innerHTML = `<svg width="${width()}" height="${height}">${labels.join("")}${rules(height)}` +
      `${allBars(found).map(bar).join("")}${cursorLine(height)}</svg>`;
  }

  // ------------------------------------------------------------------ memory

  function samples(device) {  // in view, of those in one pixel the highest, and which category holds what
    const { times, totals } = device.memory, found = [];
    let pixel = null;
    for (let n = Math.max(0, after(times, state.from) - 1); n < times.length && times[n] <= state.to; n += 1) {
      const x = Math.max(LABELS, place(times[n])), column = Math.floor(x);
      if (column === pixel && totals[n] <= totals[found[found.length - 1].n]) continue;
      if (column === pixel) found.pop();
      found.push({ x, n });
      pixel = column;
    }
    return found;
  }

  function levels(most) {  // about five round sizes up to `most`, in units of 1024
    const power = 1024 ** Math.max(0, Math.floor(Math.log(most / 2) / Math.log(1024))), found = [];
    const step = [.5, 1, 2, 5, 10, 20, 50, 100, 200, 500].map((n) => n * power).find((size) => most / size <= 6) || 1024 * power;
    for (let n = 0; n * step <= most; n += 1) found.push(n * step);
    return found;
  }

  function drawMemory() {
    const device = state.scene.devices[state.device], height = MEMORY, low = height - 8, shown = samples(device);
    const capped = device.budget && device.budget <= state.scene.scale;
    const most = 1.06 * Math.max(capped ? device.budget : 1, ...shown.map(({ n }) => device.memory.totals[n]));
    const level = (count) => low - count / most * (low - 22), right = LABELS + plot();
    const floor = shown.map(() => 0);
    const areas = device.memory.bytes.map((row, category) => {
      if (!shown.some(({ n }) => row[n])) return "";
      const below = floor.slice();
      shown.forEach(({ n }, k) => { floor[k] += row[n]; });
      const line = (values) => shown.map(({ x }, k) => [[x, values[k]], [k + 1 < shown.length ? shown[k + 1].x : right, values[k]]]).flat();
      const points = [...line(floor), ...line(below).reverse()].map(([x, y]) => `${x.toFixed(1)},${level(y).toFixed(1)}`);
      return `<polygon class="c${category}" points="${points.join(" ")}"><title>${escaped(state.scene.categories[category])}</title></polygon>`;
    });
    const cap = capped ? `<line class="cap" x1="${LABELS}" x2="${right}" y1="${level(device.budget)}" y2="${level(device.budget)}"/>` +
      `<text class="soft" x="${LABELS + 6}" y="${level(device.budget) - 5}">budget ${bytesText(device.budget)}</text>` : device.budget ? `<text class="soft" x="${right}" y="26" text-anchor="end">budget ${bytesText(device.budget)}</text>` : "";
    const sizes = levels(most).filter((count) => !capped || Math.abs(level(count) - level(device.budget)) > 14).map((count) =>
      `<line class="rule" x1="${LABELS}" x2="${right}" y1="${level(count)}" y2="${level(count)}"/>` +
      `<text class="soft" x="${LABELS - 6}" y="${level(count) + 4}" text-anchor="end">${bytesText(count).replace(/\.0+ /, " ")}</text>`);
    memory.innerHTML = `<svg width="${width()}" height="${height}"><text x="2" y="11">device ${device.number}</text>` +
      `${sizes.join("")}${areas.join("")}${rules(height)}${cap}${cursorLine(height)}</svg>`;
    const used = device.memory.bytes.map((row) => row.some((count) => count));
    [...byId("categories").children].forEach((entry, n) => { entry.hidden = !used[n]; });
  }

  // ------------------------------------------------------------------ reading off

  function running(lane, tick) {  // the number of the action at a moment
    const n = after(lane.starts, tick) - 1;
    return n >= 0 && tick <= lane.starts[n] + lane.lengths[n] ? n : -1;
  }

  function read(lane) {
    if (state.cursor === null) return;
    const device = state.scene.devices[state.device], parts = [`device ${device.number}${device.name ? `, ${device.name}` : ""}`, timeText(state.cursor - stepBegin(state.cursor))];
    for (const one of lane ? [lane] : device.lanes) {
      const n = running(one, state.cursor);
      if (n >= 0) parts.push(`${action(one, n)} (${state.scene.kinds[kindOf(one, n)]}, ${timeText(one.lengths[n])})`);
    }
    const n = after(device.memory.times, state.cursor) - 1;
    if (n >= 0) {
      const held = device.memory.bytes.map((row, category) => [row[n], state.scene.categories[category]]).filter(([count]) => count)
        .sort((one, other) => other[0] - one[0]).slice(0, 3).map(([count, name]) => `${name} ${bytesText(count)}`);
      parts.push(`${bytesText(device.memory.totals[n])} at ${action(device.memory, n)}: ${held.join(", ")}`);
    }
    readout.textContent = parts.join(" \u00b7 ");
  }

  // ------------------------------------------------------------------ controls

  function draw() {
    drawTimeline();
    drawMemory();
    read();
    const { number } = state.scene.devices[state.device];
    byId("device").value = number;
    peaks.forEach((row) => row.setAttribute("aria-pressed", Number(row.dataset.device) === number));
  }

  function view(from, to) {
    const span = Math.min(state.scene.end, Math.max(20, to - from));
    state.from = Math.min(Math.max(0, from), state.scene.end - span);
    state.to = state.from + span;
    draw();
  }

  function zoom(factor, around = state.cursor !== null && state.cursor >= state.from && state.cursor <= state.to ? state.cursor : (state.from + state.to) / 2) {
    view(around - (around - state.from) * factor, around + (state.to - around) * factor);
  }

  function choose(place) { state.device = place; draw(); }

  const placeOf = (number, { devices } = state.scene) => devices.findIndex((device) => device.number === Number(number));

  function chooseNumber(number) { if (placeOf(number) >= 0) choose(placeOf(number)); }

  function toPeak() {
    const { times, totals } = state.scene.devices[state.device].memory;
    if (!times.length) return;
    state.cursor = times[totals.reduce((best, total, n) => (total > totals[best] ? n : best), 0)];
    const span = Math.min(state.to - state.from, state.scene.end / 8);
    view(state.cursor - span / 2, state.cursor + span / 2);
  }

  function walk(direction) {  // to the next or last action of the device
    const lane = state.scene.devices[state.device].lanes[0];
    if (!lane.starts.length) return;
    const at = state.cursor === null ? -1 : after(lane.starts, state.cursor) - 1;
    const next = Math.min(lane.starts.length - 1, Math.max(0, at + direction));
    state.cursor = lane.starts[next];
    const span = state.to - state.from;
    if (state.cursor < state.from || state.cursor > state.to) view(state.cursor - span / 2, state.cursor + span / 2); else draw();
  }

  function show(scene) {  // of the device that was chosen, if the scene has it
    const place = placeOf(state.scene.devices[state.device].number, scene);
    Object.assign(state, { scene, device: place < 0 ? fullest(scene) : place, from: 0, to: scene.end, cursor: null });
    const kinds = new Set(scene.devices.flatMap((device) => device.lanes.flatMap((lane) => lane.words.map((word) => scene.wordKinds[word]))));
    [...byId("kinds").children].forEach((entry, n) => { entry.hidden = !kinds.has(n); });
    byId("device").innerHTML = scene.devices.map((device) => `<option value="${device.number}">${device.number}${device.name ? ` (${escaped(device.name)})` : ""}</option>`).join("");
    lastStep();
  }

  // What if: each position of the controls is a row of the grid that was computed with the page.
  function whatIf() {
    const data = byId("grid");
    if (!data) return;
    const grid = JSON.parse(data.textContent), controls = [...document.querySelectorAll("[data-axis]")];
    const text = (seconds) => (seconds >= 1 ? `${seconds.toPrecision(3)} s` : `${(1e3 * seconds).toPrecision(3)} ms`);
    const tell = () => {
      let place = 0;
      controls.forEach((control, n) => {
        place = place * grid.axes[n].length + Number(control.value);
        control.nextElementSibling.textContent = grid.axes[n][control.value];
        control.setAttribute("aria-valuetext", grid.axes[n][control.value]);
      });
      const [peak, budget, seconds, rate, waiting] = grid.rows[place], over = peak > budget;
      const most = Math.max(...grid.rows.map((row) => Math.max(row[0], row[1])));
      byId("whatif-bar").style.width = `${100 * peak / most}%`;
      byId("whatif-cap").style.left = `${100 * budget / most}%`;
      byId("whatif-peak").textContent = `${bytesText(peak)} of ${bytesText(budget)}`;
      byId("whatif-peak").className = over ? "figure over" : "figure";
      byId("whatif").textContent = `${over ? "This plan does not fit. " : "Fits. "}A step takes ${text(seconds)}: `
        + `${rate >= 100 ? Math.round(rate).toLocaleString("en") : rate.toPrecision(3)} samples per second; devices are idle ${Math.round(100 * waiting)} % of the step.`;
    };
    controls.forEach((control) => control.addEventListener("input", tell));
    tell();
  }

  function lastStep() { view(state.scene.steps[state.scene.steps.length - 1] || 0, state.scene.end); }

  function fullest({ devices }) {  // of those that have a bar: a run that ran out has one for the device that did
    const share = (device) => device.peak / (device.budget || 1);
    const barred = devices.filter(({ number }) => peaks.some((row) => Number(row.dataset.device) === number));
    return devices.indexOf((barred.length ? barred : devices).reduce((best, one) => (share(one) > share(best) ? one : best)));
  }

  // ------------------------------------------------------------------ a film of what is in view

  const SECONDS = 8;  // that it takes, however long the step is
  let end = null;  // ends the film that runs

  function play() {
    if (end) { end(); return; }
    const { from, to, scene } = state, begun = performance.now();
    const found = peaks.filter((row) => placeOf(row.dataset.device) >= 0), before = found.map((row) => row.innerHTML);
    const heading = found.length ? found[0].closest("section").querySelector("h2") : document.createElement("h2"), told = heading.textContent;
    let next = 0;
    end = () => {
      heading.textContent = told;
      cancelAnimationFrame(next);
      found.forEach((row, n) => { row.innerHTML = before[n]; });
      byId("play").textContent = "play";
      end = null;
      draw();
    };
    const frame = (now) => {
      const share = (now - begun) / SECONDS / 1e3;
      if (share >= 1 || state.from !== from || state.to !== to || state.scene !== scene) { end(); return; }
      state.cursor = from + Math.max(0, share) * (to - from);
      document.querySelectorAll("line.cursor").forEach((line) => ["x1", "x2"].forEach((x) => line.setAttribute(x, place(state.cursor))));
      found.forEach((row) => holding(row, scene.devices[placeOf(row.dataset.device)], state.cursor));
      heading.textContent = `Memory of each device at ${timeText(state.cursor - stepBegin(state.cursor))}`;
      next = requestAnimationFrame(frame);
    };
    byId("play").textContent = "stop";
    state.cursor = from;
    draw();
    readout.textContent = "The space bar stops the playback.";
    next = requestAnimationFrame(frame);
  }

  function holding(row, { memory: { times, bytes, totals }, budget }, tick) {  // a device's bar at a moment
    const n = after(times, tick) - 1, most = state.scene.scale;
    const parts = bytes.map((levels, category) => (n >= 0 && levels[n] ? `<i class="c${category}" style="width:${100 * levels[n] / most}%"></i>` : ""));
    row.querySelector(".bar").innerHTML = parts.join("") + (budget && budget <= most ? `<u style="left:${100 * budget / most}%"></u>` : "");
    row.querySelector(".figure").innerHTML = `${bytesText(n >= 0 ? totals[n] : 0)} <small>${budget ? `${(100 * (n >= 0 ? totals[n] : 0) / budget).toFixed(1)} %` : ""}</small>`;
  }

  const pressed = {
    " ": play,
    ArrowLeft: () => walk(-1), ArrowRight: () => walk(1), "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), 0: () => view(0, state.scene.end), p: toPeak,
    ArrowUp: () => choose(Math.max(0, state.device - 1)), ArrowDown: () => choose(Math.min(state.scene.devices.length - 1, state.device + 1)),
  };
  timeline.addEventListener("keydown", (event) => {
    if (!pressed[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    pressed[event.key]();
  });

  let held = null;  // a drag: where it began, and what was in view
  function rowAt(event) {
    const y = event.clientY - timeline.getBoundingClientRect().top, { found } = rows();
    return found.reduce((best, row) => (row.y <= y + 1 ? row : best), found[0]);
  }
  for (const box of [timeline, memory]) {
    box.addEventListener("pointerdown", (event) => { held = { x: event.clientX, from: state.from, to: state.to, moved: false }; });
    box.addEventListener("pointermove", (event) => {
      const x = event.clientX - box.getBoundingClientRect().left;
      if (held && event.buttons) {
        const shift = (held.x - event.clientX) / plot() * (held.to - held.from);
        held.moved = held.moved || Math.abs(held.x - event.clientX) > 3;
        if (held.moved) view(held.from + shift, held.to + shift);
        return;
      }
      if (x < LABELS || x > LABELS + plot()) return;
      state.cursor = tickAt(x);
      if (box === timeline) state.device = rowAt(event).device;
      draw();
    });
    box.addEventListener("click", (event) => { if (box === timeline && !(held && held.moved)) choose(rowAt(event).device); });
    box.addEventListener("dblclick", () => zoom(.35));
    box.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : .8);
    }, { passive: false });
  }
  window.addEventListener("pointerup", () => { setTimeout(() => { held = null; }); });
  byId("device").addEventListener("change", (event) => chooseNumber(event.target.value));
  byId("source").innerHTML = scenes.map((scene, n) => `<option value="${n}">${escaped(scene.name)}</option>`).join("");
  byId("sources").hidden = scenes.length < 2;
  byId("source").addEventListener("change", (event) => show(scenes[event.target.value]));
  byId("nearer").addEventListener("click", () => zoom(.5));
  byId("farther").addEventListener("click", () => zoom(2));
  byId("whole").addEventListener("click", () => view(0, state.scene.end));
  byId("step").addEventListener("click", lastStep);
  byId("peak").addEventListener("click", toPeak);
  byId("play").addEventListener("click", play);
  peaks.forEach((row) => row.addEventListener("click", () => chooseNumber(row.dataset.device)));
  window.addEventListener("resize", draw);
  window.addEventListener("beforeprint", draw);
  whatIf();
  state.device = fullest(scenes[0]);
  show(scenes[0]);
  document.documentElement.dataset.ready = "yes";
})();
