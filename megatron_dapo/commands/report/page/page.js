"use strict";
// The page around the viewer: runs, summary, figures, theme; and a live page's repeated requests.

const POLL_MS = 4000;
let runs = []; // of the summary, each with its number and whether it is shown
const MOST_FOUND = 60; // charts of an expression
let drawnPanels = "";
const shownRuns = () => runs.filter((run) => run.isShown);

function failed(error) {
  byId("failure").hidden = false;
  byId("failure").textContent = `The report cannot be shown: ${error.message ?? error}`;
  throw error;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").setAttribute("aria-pressed", String(theme === "dark"));
  redraw();
}

function showRuns() {
  byId("runs").hidden = runs.length < 2;
  byId("runs").replaceChildren(byId("runs").querySelector("legend"), ...runs.map((run) => {
    const toggle = (event) => {
      run.isShown = event.target.checked;
      if (!shownRuns().length) { run.isShown = true; event.target.checked = true; }
      colourRuns();
      showSummary(shownSummary);
      showTimes();
      redraw();
    };
    return element("label", {}, element("input", { type: "checkbox", checked: run.isShown, onchange: toggle }), element("span", {}, element("i", { class: "dot" }), run.name));
  }));
  colourRuns();
}

/** A run keeps its colour while it is shown; one that is shown anew gets the first that no other has. */
function colourRuns() {
  for (const run of runs) if (!run.isShown) run.colour = undefined;
  for (const run of shownRuns()) {
    const taken = new Set(shownRuns().map((one) => one.colour));
    run.colour ??= [...Array(8).keys()].find((colour) => !taken.has(colour)) ?? run.number % 8;
  }
  for (const [number, dot] of byId("runs").querySelectorAll(".dot").entries()) dot.style.background = runs[number].isShown ? `var(--c${runs[number].colour})` : "var(--line)";
}

function showSummary(summary) {
  byId("made").textContent = isLive ? `live, ${summary.made}` : `made ${summary.made}`;
  byId("cards").replaceChildren(...runs.map((run) => element("article", { class: "card" },
    element("h3", {}, run.name, element("span", { class: `badge ${run.state}` }, run.state)),
    element("p", {}, `${run.sentence}.`),
    run.isShown && element("dl", {}, ...run.facts.flatMap(([what, value]) => [element("dt", {}, what), element("dd", {}, value)])))));
  const rows = summary.config;
  const differing = rows.filter((row) => row.differs);
  const config = byId("config");
  config.querySelector("summary").textContent = runs.length > 1
    ? `Config: the runs differ in ${differing.length} keys; ${rows.length} are not the default` : `Config: ${rows.length} keys are not the default`;
  byId("only-differences").parentElement.hidden = runs.length < 2;
  const fill = () => {
    const shown = byId("only-differences").checked ? differing : rows;
    config.querySelector("table").replaceChildren(
      element("thead", {}, element("tr", {}, ...["key", "default", ...runs.map((run) => run.name)].map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, ...shown.map((row) => element("tr", { class: row.differs ? "differs" : undefined },
        element("td", {}, element("code", {}, row.key)), element("td", { class: "mono" }, row.default), ...row.values.map((value) => element("td", { class: "mono" }, value))))));
  };
  byId("only-differences").onchange = fill;
  fill();
}

/** Fills in the attempts of the runs that are shown, when they are opened. */
async function showAttempts() {
  if (!byId("attempts").open) return;
  const known = await Promise.all(shownRuns().map(async (run) => [run, asJson(await chunk(`logs-${run.number}`, `logs/${run.at}`))]));
  byId("attempts").lastElementChild.replaceChildren(...known.flatMap(([run, attempts]) => [
    element("h3", {}, attempts.length ? run.name : `${run.name} has no logs`),
    ...attempts.map(({ name, changes, logs }) => element("details", {}, element("summary", {}, name),
      element("p", {}, changes.length ? "Changed since the attempt before:" : "No key is known to have changed."),
      element("dl", {}, ...changes.flatMap(([key, before, now]) => [element("dt", { class: "mono" }, key), element("dd", { class: "mono" }, `${before} → ${now}`)])),
      ...logs.map(([log, end]) => element("details", {}, element("summary", {}, log), element("pre", { class: "scroll", tabindex: "0" }, end)))))]));
}

function showTimes() {
  clearFigures(byId("time-figures"));
  for (const run of shownRuns()) if (Object.keys(run.phases).length) addTime(byId("time-figures"), run, phaseTitles);
  for (const run of shownRuns()) addServers(byId("time-figures"), run);
}

/** The panels of curves; with an expression, one for each metric that it finds. */
function chosenCurves(summary, names) {
  const source = byId("pattern").value, said = byId("found");
  said.value = "";
  if (!source) return summary.curves;
  try {
    const found = matchingNames(names, source);
    said.value = counted(found.length, "metric") + (found.length > MOST_FOUND ? `, the first ${MOST_FOUND} are shown` : "");
    return found.slice(0, MOST_FOUND).map((name) => ({ title: name, note: "", series: [[name, name]] }));
  } catch (error) { said.value = error.message; return summary.curves; }
}

let phaseTitles = [];
let shownSummary = null;
function showFigures(summary) {
  shownSummary = summary;
  phaseTitles = summary.phases;
  const names = [...new Set(runs.flatMap((run) => [...Object.keys(run.steps), ...Object.keys(run.validations)]))].filter((name) => !["step", "time"].includes(name)).sort();
  const curves = chosenCurves(summary, names);
  const panels = JSON.stringify([curves, summary.utilisation, runs.map((run) => run.name)]);
  if (panels !== drawnPanels) {
    drawnPanels = panels;
    for (const [id, list] of [["curve-figures", curves], ["utilisation-figures", summary.utilisation]]) {
      clearFigures(byId(id));
      for (const panel of list) addCurves(byId(id), panel, shownRuns);
    }
    clearFigures(byId("event-figures"));
    addEvents(byId("event-figures"), shownRuns);
    byId("metrics").replaceChildren(...names.map((name) => element("option", { value: name })));
  }
  showTimes();
  redraw();
  showEventList();
}

function showEventList() {
  const all = runs.flatMap((run) => run.events.map((event) => ({ ...event, run })));
  const failures = all.filter((event) => event.kind === "failure").length;
  byId("event-list").querySelector("summary").textContent = counted(all.length, "event") + (failures ? `, ${counted(failures, "failure")}` : "");
  const row = (event) => [signed(elapsed(event.run, [event.time])[0].toFixed(2)), event.run.name, EVENTS[event.kind][0], event.text].map((text) => element("td", {}, text));
  byId("event-list").querySelector("table").replaceChildren(
    element("thead", {}, element("tr", {}, ...[timeUnit().name, "run", "kind", "what"].map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, ...all.map((event) => element("tr", {}, ...row(event)))));
}

function listen() {
  byId("smoothing").addEventListener("input", (event) => {
    settings.smoothing = Number(event.target.value);
    event.target.nextElementSibling.value = settings.smoothing.toFixed(2);
    redraw();
  });
  byId("axis").addEventListener("change", (event) => { settings.axis = event.target.value; zoom(null); });
  byId("scale").addEventListener("change", (event) => { settings.isLog = event.target.value === "log"; redraw(); });
  for (const id of ["from", "to"]) byId(id).addEventListener("change", zoomAsTyped);
  byId("whole").addEventListener("click", () => zoom(null));
  byId("pattern").addEventListener("change", () => { if (shownSummary) showFigures(shownSummary); });
  byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  byId("attempts").addEventListener("toggle", () => showAttempts().catch(failed));
  listenToViewer();
}

function take(summary) {
  const before = new Map(runs.map((run) => [run.folder, run]));
  const viewed = runs[view.run]?.folder;
  const newest = [...summary.runs].sort((a, b) => (b.steps.time?.at(-1) ?? 0) - (a.steps.time?.at(-1) ?? 0)).slice(0, 5); // shown at first
  callMarks = summary.calls;
  runs = summary.runs.map((run, number) => ({ ...run, number, colour: before.get(run.folder)?.colour, isShown: before.get(run.folder)?.isShown ?? newest.includes(run) }));
  view.run = Math.max(0, runs.findIndex((run) => run.folder === viewed));
  showRuns();
  showSummary(summary);
  showFigures(summary);
}

/** Asks the server for changes. */
async function follow(tag) {
  let next = tag;
  try {
    const answer = await ask("summary", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      next = answer.headers.get("ETag");
      take(asJson(await unpacked(await answer.text())));
      if (byId("viewer").hidden) startViewer();
      else refreshViewer();
    } else if (answer.status !== 304) throw new Error(`${answer.status}: open the address that it prints`);
    byId("failure").hidden = true;
  } catch (error) {
    byId("failure").hidden = false;
    byId("failure").textContent = `The server of this page does not answer (${error.message}); it is asked again.`;
  }
  setTimeout(() => follow(next), POLL_MS);
}

async function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  listen();
  if (isLive) return follow("");
  take(asJson(await chunk("summary")));
  startViewer();
  document.documentElement.dataset.ready = "yes";
}

start().catch(failed);
