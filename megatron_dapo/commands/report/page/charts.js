"use strict";
// Figures: a caption, a chart drawn when it comes into sight, its key, and its numbers as a table.

const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];
const colourOf = (number) => getComputedStyle(document.documentElement).getPropertyValue(`--c${number % 8}`).trim();
const cssValue = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const settings = { smoothing: 0.6, axis: "step", isLog: false, range: null };
const MOST_PARTS = 1000; // of a line: more points are no sharper, and slow
const figures = []; // {chart, draw, isSeen}
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const figure = figures.find((one) => one.chart === entry.target);
    if (!figure) continue;
    figure.isSeen = entry.isIntersecting;
    if (entry.isIntersecting && figure.isStale) drawFigure(figure);
  }
}, { rootMargin: "120px" });

function drawFigure(figure) {
  figure.isStale = false;
  figure.draw(figure);
}
function redraw() {
  for (const figure of figures) {
    figure.isStale = true;
    if (figure.isSeen) drawFigure(figure);
  }
}

/** Shows these steps, or this time, in all charts; null: the whole run. */
function zoom(range) {
  settings.range = range;
  for (const [place, id] of ["from", "to"].entries()) byId(id).value = range ? Number(range[place].toPrecision(5)) : "";
  byId("whole").disabled = !range;
  redraw();
}
/** Zooms to the steps that were typed; an empty field, and one that the other contradicts, is the run's beginning or end. */
function zoomAsTyped({ target }) {
  const last = Math.max(1, ...shownRuns().map((run) => (settings.axis === "step" ? run.steps.step : elapsed(run, run.steps.time ?? []))?.at(-1) ?? 1));
  const typed = (id, none) => (byId(id).value === "" ? none : Math.min(last, Math.max(0, Number(byId(id).value))));
  let [from, to] = [typed("from", 0), typed("to", last)];
  if (from >= to) [from, to] = target.id === "from" ? [from, last] : [0, to];
  zoom(from < to && (from > 0 || to < last) ? [from, to] : null);
}

/** Rows [from, to) of x, ascending, within the zoom and one beside it: at most MOST_PARTS equal parts. */
function partsOf(x) {
  let first = 0, end = x.length;
  const [low, high] = settings.range ?? [-Infinity, Infinity];
  while (first < end - 1 && x[first + 1] < low) first++;
  while (end - 1 > first && x[end - 2] > high) end--;
  const number = Math.min(MOST_PARTS, end - first);
  const bound = (part) => first + Math.floor(part * (end - first) / number);
  return Array.from({ length: number }, (_, part) => [bound(part), bound(part + 1)]);
}
/** The rows with the lowest and the highest value of each part. */
const extremes = (parts, values) => parts.flatMap(([from, to]) => {
  let low = from, high = from;
  for (let row = from + 1; row < to; row++) { if (values[row] < values[low]) low = row; if (values[row] > values[high]) high = row; }
  return low === high ? [low] : [Math.min(low, high), Math.max(low, high)];
});

/** The axis of values. A single value gets a scale of its own size: the library's would be -1 to 1 around it, or show rounding errors. */
function valueAxis(traces) {
  const type = settings.isLog ? "log" : "linear";
  let low = Infinity, high = -Infinity;
  for (const value of traces.flatMap((trace) => trace.y)) if (!settings.isLog || value > 0) { low = Math.min(low, value); high = Math.max(high, value); }
  if (high < low || high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high))) return { type };
  if (settings.isLog) return { type, range: [Math.log10(low) - 1, Math.log10(low) + 1] };
  return { type, range: low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * low)] };
}

// on paper nothing is scrolled into view
addEventListener("beforeprint", () => { for (const figure of figures) { if (figure.isStale) drawFigure(figure); } });

function layout(more = {}) {
  const axis = { gridcolor: cssValue("--line"), zerolinecolor: cssValue("--line"), linecolor: cssValue("--line"), automargin: true, fixedrange: false };
  return {
    margin: { l: 46, r: 10, t: 8, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { family: "system-ui, sans-serif", size: 12, color: cssValue("--soft") }, hovermode: "x unified",
    hoverlabel: { bgcolor: cssValue("--card"), bordercolor: cssValue("--line"), font: { color: cssValue("--text") } },
    ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, exponentformat: "e", nticks: 6, fixedrange: true, ...more.yaxis },
  };
}
const PLOT = { displaylogo: false, responsive: true, displayModeBar: false, doubleClick: false };

/** isLinked: the chart's x axis is that of the settings, and so is its zoom. */
function plot(figure, traces, more, isLinked = true) {
  figure.chart.setAttribute("aria-label", figure.describe());
  if (isLinked && settings.range) more.xaxis.range = settings.range;
  Plotly.react(figure.chart, traces, layout(more), PLOT);
  if (figure.isLinked === undefined) {
    figure.chart.on("plotly_doubleclick", () => zoom(null));
    figure.chart.on("plotly_relayout", (change) => {
      const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (figure.isLinked && range.every(Number.isFinite)) zoom(range);
    });
  }
  figure.isLinked = isLinked;
}

/** Adds a figure to a grid. parts: draw(figure), describe() for screen readers, table() -> {head, rows}. */
function addFigure(grid, title, note, parts) {
  const chart = element("div", { class: "chart", role: "img" });
  const key = element("ul", { class: "keys-of-chart" });
  const table = element("details", { ontoggle: () => { if (table.open) fillTable(table, title, figure.table()); } }, element("summary", {}, "Numbers"));
  grid.append(element("figure", {}, element("figcaption", {}, element("h3", {}, title), note ? element("p", {}, note) : null), key, chart, table));
  const figure = { chart, key, isStale: true, isSeen: false, ...parts };
  chart.setAttribute("aria-label", title);
  figures.push(figure);
  observer.observe(chart);
  return figure;
}

function clearFigures(grid) {
  for (const chart of grid.querySelectorAll(".chart")) {
    observer.unobserve(chart);
    Plotly.purge(chart);
    figures.splice(figures.findIndex((figure) => figure.chart === chart), 1);
  }
  grid.replaceChildren();
}

function fillTable(holder, title, { head, rows }) {
  holder.querySelector(".scroll")?.remove();
  const cells = (name, values) => values.map((value, place) => element(name, { class: place ? "number" : undefined }, String(value)));
  holder.append(element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Numbers of ${title}` }, element("table", {},
    element("thead", {}, element("tr", {}, ...cells("th", head))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row)))))));
}

function keyEntry(colour, dash, text) {
  const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  line.setAttribute("width", "22"); line.setAttribute("height", "8"); line.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", "M0 4H22"); path.setAttribute("stroke", colour); path.setAttribute("stroke-width", "2.5");
  if (dash !== "solid") path.setAttribute("stroke-dasharray", { dot: "2 3", dash: "6 3", dashdot: "6 3 2 3", longdash: "10 3" }[dash]);
  line.append(path);
  return element("li", {}, line, text);
}

/** Of one run the colour of every metric; of several, how each metric is dashed, and which run has which colour. */
function keyOf(lines) {
  if (shownRuns().length < 2) return lines.map(({ label, colour, dash }) => keyEntry(colour, dash, label));
  const metrics = new Map(lines.map((line) => [line.label, line.dash]));
  const ofRuns = new Map(lines.map((line) => [line.run.name, line.colour]));
  const dashes = metrics.size > 1 ? [...metrics].map(([label, dash]) => keyEntry(cssValue("--soft"), dash, label)) : [];
  return [...[...ofRuns].map(([name, colour]) => keyEntry(colour, "solid", name)), ...dashes];
}
const axisTitle = () => ({ text: settings.axis === "step" ? "step" : `${timeUnit().name} since the start`, standoff: 6 });

/** A chart of metrics of all runs that are shown: colours tell the metrics of one run, or several runs apart. */
function addCurves(grid, panel, shownRuns) {
  const lines = () => {
    const runs = shownRuns();
    return panel.series.flatMap(([metric, label], place) => runs.map((run) => {
      const data = series(run, metric);
      const colour = colourOf(runs.length > 1 ? run.colour : place);
      const dash = runs.length > 1 ? DASHES[place % DASHES.length] : "solid";
      return data && { data, run, metric, label, colour, dash, isMain: place === 0 };
    })).filter(Boolean);
  };
  const describe = () => `${panel.title}. ` + lines().map(({ data, run, label }) =>
    `${run.name}, ${label}: ${shownNumber(data.values[0])} at step ${data.step[0]}, ${shownNumber(data.values.at(-1))} at step ${data.step.at(-1)}`).join("; ");
  const table = () => {
    const all = lines();
    const steps = [...new Set(all.flatMap((line) => line.data.step))].sort((a, b) => a - b);
    const values = all.map((line) => new Map(line.data.step.map((step, place) => [step, line.data.values[place]])));
    return { head: ["step", ...all.map((line) => (shownRuns().length > 1 ? `${line.run.name}: ` : "") + line.label)],
      rows: steps.map((step) => [step, ...values.map((value) => shownNumber(value.get(step)))]) };
  };
  const draw = (figure) => {
    const traces = [];
    const all = lines();
    const hidden = settings.isLog ? all.reduce((sum, { data }) => sum + data.values.filter((value) => value <= 0).length, 0) : 0;
    for (const { data, run, label, colour, dash } of all) {
      const x = settings.axis === "step" ? data.step : elapsed(run, data.time);
      const name = shownRuns().length > 1 ? `${run.name}: ${label}` : label;
      const isSmooth = settings.smoothing > 0 && !data.isHeldOut && data.values.length > 2;
      const line = { color: colour, width: 2, dash };
      const parts = partsOf(x);
      const sharp = extremes(parts, data.values);
      const at = (rows, values) => rows.map((row) => values[row]);
      if (isSmooth) traces.push({ x: at(sharp, x), y: at(sharp, data.values), mode: "lines", line: { color: colour, width: 1 }, opacity: 0.25, hoverinfo: "skip" });
      const rows = isSmooth ? parts.map(([, to]) => to - 1) : sharp; // the same ones of all metrics
      traces.push({ x: at(rows, x), y: at(rows, isSmooth ? smoothed(data.values, settings.smoothing) : data.values), name, line, customdata: at(rows, data.values),
        mode: data.isHeldOut || data.values.length < 3 ? "lines+markers" : "lines", hovertemplate: isSmooth ? "%{customdata:.4g}" : "%{y:.4g}" });
    }
    figure.key.replaceChildren(...keyOf(all), ...(hidden ? [element("li", {}, `${counted(hidden, "value")} of 0 or below: not on a log axis`)] : []));
    plot(figure, traces, { xaxis: { title: axisTitle(), rangemode: "tozero" }, yaxis: valueAxis(traces) });
  };
  return addFigure(grid, panel.title, panel.note, { draw, describe, table });
}

/** Seconds of every phase in every step, one on top of the other. */
function addTime(grid, run, phases) {
  const known = phases.filter(([name]) => run.phases[name]);
  const others = Object.keys(run.phases).filter((name) => !phases.some(([phase]) => phase === name)).map((name) => [name, name]);
  const shares = [...known.filter(([name]) => name !== "other"), ...others, ...known.filter(([name]) => name === "other")].map(([name, title]) =>
    ({ name, title, values: run.phases[name], sum: run.phases[name].reduce((sum, value) => sum + (value ?? 0), 0) }));
  const total = shares.reduce((sum, phase) => sum + phase.sum, 0) || 1;
  const visible = shares.filter((phase) => phase.sum / total >= 0.002);
  const describe = () => `Seconds per step of ${run.name}. ` + [...shares].sort((a, b) => b.sum - a.sum).map((phase) =>
    `${phase.title} ${shownSeconds(phase.sum)}, ${(100 * phase.sum / total).toFixed(0)} %`).join("; ");
  const table = () => ({ head: ["phase", "together", "share", "per step"], rows: [...shares].sort((a, b) => b.sum - a.sum).map((phase) =>
    [phase.title, shownSeconds(phase.sum), `${(100 * phase.sum / total).toFixed(1)} %`, `${(phase.sum / phase.values.length).toFixed(2)} s`]) });
  const draw = (figure) => {
    const x = settings.axis === "step" ? run.steps.step : elapsed(run, run.steps.time);
    const parts = partsOf(x);
    const mean = (values, [from, to]) => values.slice(from, to).reduce((sum, value) => sum + (value ?? 0), 0) / (to - from);
    const traces = visible.map((phase, place) => ({ x: parts.map(([, to]) => x[to - 1]), y: parts.map((part) => mean(phase.values, part)), name: phase.title, stackgroup: "time", mode: "lines",
      line: { width: 0.5, color: colourOf(place), shape: "hvh" }, fillcolor: colourOf(place), hovertemplate: "%{y:.2f} s" }));
    figure.key.replaceChildren(...visible.map((phase, place) => keyEntry(colourOf(place), "solid", `${phase.title} ${(100 * phase.sum / total).toFixed(0)} %`)));
    plot(figure, traces, { xaxis: { title: axisTitle() }, yaxis: { ticksuffix: " s", rangemode: "tozero" } });
  };
  return addFigure(grid, run.name, `${shownSeconds(total)} in ${counted(run.steps.step?.length ?? 0, "step")}`, { draw, describe, table });
}

/** How slow each server was in each step: the darker, the slower. */
function addServers(grid, run) {
  const of = (what, server) => run.steps[`rollout/${what}/${server}`] ?? [];
  const servers = Object.keys(run.steps).filter((name) => name.startsWith("rollout/factor/")).map((name) => name.slice("rollout/factor/".length)).sort();
  const largest = (server) => of("factor", server).reduce((most, value) => Math.max(most, value ?? 1), 1);
  const fewest = (server) => of("seats", server).reduce((least, value) => Math.min(least, value ?? least), Infinity);
  const describe = () => `Speed of the servers of ${run.name}. ` + servers.map((server) => `${server}: at most ${shownNumber(largest(server))} times as long for a token`).join("; ");
  const table = () => ({ head: ["server", "largest factor", "fewest seats"], rows: servers.map((server) => [server, shownNumber(largest(server)), shownNumber(fewest(server))]) });
  const draw = (figure) => {
    const x = settings.axis === "step" ? run.steps.step : elapsed(run, run.steps.time);
    const trace = { type: "heatmap", x, y: servers, z: servers.map((server) => of("factor", server)), customdata: servers.map((server) => of("seats", server)),
      colorscale: [[0, cssValue("--line")], [1, colourOf(1)]], zmin: 1, zmax: Math.max(4, ...servers.map(largest)), colorbar: { thickness: 10, outlinewidth: 0 },
      hovertemplate: "%{y}<br>%{z:.2f} times as long, %{customdata} seats<extra></extra>" };
    plot(figure, [trace], { hovermode: "closest", xaxis: { title: axisTitle() }, yaxis: { type: "category" } });
  };
  if (servers.length) addFigure(grid, `Servers of ${run.name}`, "Seconds per token over the usual server's.", { draw, describe, table });
}

const EVENTS = { // title, symbol of the chart, the same as a letter, colour
  start: ["started", "triangle-right", "▶", 2], resume: ["resumed", "triangle-right-open", "▷", 0], servers: ["servers away", "x", "✖", 1],
  rejoin: ["servers joined", "circle", "●", 5], checkpoint: ["checkpoint", "diamond", "◆", 7], failure: ["failed", "cross", "✚", 6], end: ["ended", "square", "■", 3],
};
function eventKey(kind) {
  const [title, , letter, colour] = EVENTS[kind];
  const symbol = element("span", { "aria-hidden": "true" }, letter);
  symbol.style.color = colourOf(colour);
  return element("li", {}, symbol, title);
}

function addEvents(grid, shownRuns) {
  const describe = () => shownRuns().map((run) => `${run.name}: ${counted(run.events.length, "event")}`).join("; ");
  const table = () => ({ head: [timeUnit().name, "run", "what"], rows: shownRuns().flatMap((run) =>
    run.events.map((event) => [signed(elapsed(run, [event.time])[0].toFixed(2)), run.name, event.text])) });
  const draw = (figure) => {
    const runs = shownRuns();
    const kinds = Object.keys(EVENTS).filter((kind) => runs.some((run) => run.events.some((event) => event.kind === kind)));
    const traces = kinds.map((kind) => {
      const all = runs.flatMap((run) => run.events.filter((event) => event.kind === kind).map((event) => [run, event]));
      return { x: all.map(([run, event]) => elapsed(run, [event.time])[0]), y: all.map(([run]) => run.name), mode: "markers", name: EVENTS[kind][0],
        marker: { symbol: EVENTS[kind][1], size: 11, color: colourOf(EVENTS[kind][3]), line: { width: 1.5, color: colourOf(EVENTS[kind][3]) } },
        customdata: all.map(([, event]) => hoverText(event.text)), hovertemplate: "%{customdata}<extra></extra>" };
    });
    figure.key.replaceChildren(...kinds.map(eventKey));
    plot(figure, traces, { hovermode: "closest", xaxis: { title: { text: `${timeUnit().name} since the start`, standoff: 6 } },
      yaxis: { type: "category", categoryorder: "array", categoryarray: runs.map((run) => run.name).reverse(), range: [-0.6, runs.length - 0.4] } }, settings.axis === "time");
  };
  return addFigure(grid, "On the time axis", "", { draw, describe, table });
}

/** The library reads some tags in its texts. */
const hoverText = (text) => text.slice(0, 120).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
