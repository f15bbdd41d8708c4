"use strict";
// The viewer of answers: one step at a time, filtered, sorted, searched, as a list or group by group.

const FIRST = { list: 40, groups: 12 }; // cards that are made at once
const LONG_TEXT = 2500; // characters, or tokens / 4, that are shown before "all of it"
const LONG_READ = 400; // characters, or tokens / 4, read between two turns: from here they are folded
const CALL_NAME = /(?:"name"\s*:\s*"|functions\.|<function=|<tool_call>\s*|begin[|｜]>(?:functions\.)?)([\w.-]{1,60})/; // in the families' forms of a call
const MAX_HITS = 300; // of a search in all steps

const steps = new Remembered(60); // parsed texts of a step, and its tokens
const view = { run: 0, kind: "trained", place: 0, verdict: "all", sort: "drawn", as: "groups", colour: "", words: "", everywhere: false, formulas: true, only: null, limit: 0, turn: 0 };
let callMarks = []; // [start, end] of a call of a tool; no end: it ends with the turn
let files = []; // of the run and kind that are chosen: {step, groups, answers, tokens, place, key}
const allFiles = new Map(); // by key, each once: answers that are shown hold theirs

const MIN_LOOP = 40; // repeated characters at the end of a text

const isCut = (answer) => answer.finish_reason !== "stop";
const isSolved = ({ right, total }) => right > total / 2; // as `eval --compare` says it
const VERDICTS = {
  all: () => true, right: (answer) => answer.correct, wrong: (answer) => !answer.correct, cut: isCut, loops: isLoop,
  gained: ({ group }) => group.before && !isSolved(group.before) && isSolved(countOf(group)),
  lost: ({ group }) => group.before && isSolved(group.before) && !isSolved(countOf(group)),
};
const CHANGES = ["gained", "lost"];
const ORDERS = {
  drawn: null, long: (a, b) => b.num_tokens - a.num_tokens, short: (a, b) => a.num_tokens - b.num_tokens,
  high: (a, b) => b.reward_ - a.reward_, low: (a, b) => a.reward_ - b.reward_,
};

/** The parts of an answer that have tokens of their own: an agent's branches, or only itself. */
const rowsOf = (answer) => answer.branches ?? [answer];

/** The groups of a step, with every answer's first row, group and reward. */
function groupsOf(file) {
  return steps.get(`texts ${file.key}`, async () => {
    const bytes = await chunk(`texts-${view.run}-${file.place}`, `texts/${runs[view.run].at}/${file.kind}/${file.step}`);
    const groups = bytes ? asJson(bytes) : [];
    let row = 0;
    for (const [place, group] of groups.entries()) {
      for (const [member, answer] of group.responses.entries()) {
        Object.assign(answer, { group, member, file, row, reward_: answer.reward ?? answer.raw_reward ?? 0, groupPlace: place });
        row += rowsOf(answer).length;
      }
    }
    return groups;
  });
}
function tokensOf(file) {
  return steps.get(`tokens ${file.key}`, async () => {
    const bytes = await chunk(`tokens-${view.run}-${file.place}`, `tokens/${runs[view.run].at}/${file.kind}/${file.step}`);
    return bytes ? readTokens(bytes) : null;
  });
}

/** Whether an answer ends by saying the same thing at least four times, the last time perhaps not to its end. */
function isLoop(answer) {
  if (answer.loops === undefined) {
    const tail = (answer.text ?? "").slice(-2000);
    answer.loops = false;
    for (let period = 1; 4 * period <= tail.length && !answer.loops; period++) {
      let same = 0;
      while (same < tail.length - period && tail[tail.length - 1 - same] === tail[tail.length - 1 - same - period]) same++;
      answer.loops = same >= Math.max(MIN_LOOP, 3 * period);
    }
  }
  return answer.loops;
}

const countOf = (group) => ({ right: group.responses.filter((answer) => answer.correct).length, total: group.responses.length });

/** Notes how many answers to the same held-out prompt were right in the first evaluation that the page has. */
async function noteBefore(groups) {
  const [first] = files;
  if (view.kind !== "held-out" || files.length < 2) return;
  const before = new Map((await groupsOf(first)).map((group) => [group.uid, group]));
  for (const group of groups) {
    const same = before.get(group.uid);
    if (same && same !== group && same.prompt === group.prompt) group.before = { step: first.step, answers: same.responses, ...countOf(same) };
  }
}

function matches(answer) {
  if (!VERDICTS[view.verdict](answer)) return false;
  if (!view.words) return true;
  return [answer.text, answer.group.prompt, answer.group.ground_truth, answer.prompt].some((text) => text?.toLowerCase().includes(view.words));
}

/** Shows the selection of the controls. Later calls overtake earlier ones that wait for a chunk. */
async function showAnswers(keepLimit = false) {
  const turn = ++view.turn;
  if (!keepLimit) view.limit = FIRST[view.as];
  const file = files[view.place];
  byId("step-number").value = file ? String(file.step) : "";
  byId("step").setAttribute("aria-valuetext", file ? `step ${file.step}` : "");
  byId("previous").disabled = view.place <= 0;
  byId("next").disabled = view.place >= files.length - 1;
  if (!file) return emptied("There are no such answers.");
  const isSearch = view.everywhere && view.words !== "";
  const found = [];
  let total = 0, numRight = 0, numCut = 0, numLoops = 0, numGroups = 0;
  for (const one of isSearch ? files : [file]) {
    const groups = await groupsOf(one);
    await noteBefore(groups);
    if (turn !== view.turn) return;
    numGroups += groups.length;
    for (const group of groups) {
      for (const answer of group.responses) {
        total++; numRight += Boolean(answer.correct); numCut += isCut(answer); numLoops += isLoop(answer);
        if (matches(answer) && (!isSearch || found.length < MAX_HITS) && (view.only === null || isSearch || group === view.only)) found.push(answer);
      }
    }
    if (found.length >= MAX_HITS && isSearch) break;
  }
  const needed = view.colour ? [...new Set(found.slice(0, 4 * view.limit).map((answer) => answer.file))] : [];
  const known = new Map();
  for (const one of needed) { known.set(one, await tokensOf(one)); if (turn !== view.turn) return; }
  const of = isSearch ? `Steps ${files[0].step} to ${files.at(-1).step}` : `Step ${file.step}`;
  const share = total ? `, ${numRight} right (${Number((100 * numRight / total).toFixed(1))} %), ${numCut} cut, ${numLoops} in a loop` : "";
  const most = isSearch && found.length >= MAX_HITS ? ` The first ${MAX_HITS} that match are shown.` : found.length < total ? ` ${found.length} match.` : "";
  byId("status").textContent = `${of}: ${counted(total, "answer")} in ${counted(numGroups, "group")}${share}.${most}${carriedNote()}`;
  present(found, known);
}

/** Which answers the page does not have. */
function carriedNote() {
  const run = runs[view.run];
  const isPart = run.num_answer_files > run.answers.length;
  return isPart ? ` The page has the answers of ${run.answers.length} of ${counted(run.num_answer_files, "step")}; report --watch shows all.` : "";
}

function emptied(text) {
  byId("status").textContent = text;
  byId("list").replaceChildren();
  byId("more").hidden = true;
  showLegend(byId("legend"), null);
}

function present(found, known) {
  const list = byId("list");
  const kept = [...known.values()].filter(Boolean);
  const tokens = (answer) => known.get(answer.file)?.answers.slice(answer.row, answer.row + rowsOf(answer).length) ?? [];
  const isKnown = view.colour && kept.some((tokens) => tokens.has(view.colour));
  const scale = isKnown ? colourScale(view.colour, found.flatMap(tokens)) : null;
  showLegend(byId("legend"), scale);
  if (view.colour && !scale && found.length) byId("status").textContent += " Nothing is known of their tokens by which they could be coloured.";
  const context = { scale, tokens: (answer) => scale ? tokens(answer) : [] };
  const order = ORDERS[view.sort];
  let items;
  list.className = view.as;
  if (view.as === "list") {
    items = (order ? [...found].sort(order) : found).map((answer) => () => answerCard(answer, context, true));
  } else {
    const groups = new Map();
    for (const answer of found) { if (!groups.has(answer.group)) groups.set(answer.group, []); groups.get(answer.group).push(answer); }
    const rows = [...groups].map(([group, answers]) => [group, order ? [...answers].sort(order) : answers]);
    if (order) rows.sort(([, a], [, b]) => order(a[0], b[0]));
    items = rows.map(([group, answers]) => () => groupCard(group, answers, context));
  }
  list.replaceChildren(...items.slice(0, view.limit).map((make) => make()));
  showFormulas(list);
  const rest = items.length - view.limit;
  byId("more").hidden = rest <= 0;
  byId("more").textContent = `Show ${Math.min(rest, FIRST[view.as])} more of ${rest}`;
}

function groupCard(group, answers, context) {
  const step = view.everywhere && view.words ? `step ${answers[0].file.step} · ` : "";
  const labels = [element("strong", {}, `${step}${group.uid ?? "group"}`), shareOf(group)];
  if (answers.length < group.responses.length) labels.push(`${answers.length} shown`);
  if (group.data_source) labels.push(group.data_source);
  if (group.ground_truth !== undefined) labels.push(`answer: ${group.ground_truth}`);
  if (group.masked) labels.push("masked: trained on with advantages of 0");
  const earlier = CHANGES.includes(view.verdict) ? group.before.answers : [];
  const back = view.only ? element("button", { type: "button", onclick: () => showOnly(null) }, "All groups") : null;
  return element("article", { class: "group", "aria-label": `Group ${group.uid ?? ""}` },
    element("header", {}, ...labels.map((label) => typeof label === "string" ? element("span", {}, label) : label), back),
    element("div", { class: "prompt" }, ...marked(group.prompt ?? "")),
    element("div", { class: "side", tabindex: "0", role: "region", "aria-label": `Answers of ${group.uid ?? "the group"}` },
      ...[...answers, ...earlier].map((answer) => answerCard(answer, context, false, answer.file !== answers[0].file))));
}

/** How many answers are right, and were in the first evaluation. */
function shareOf(group) {
  const { right, total } = countOf(group);
  const { before } = group;
  return `${right} of ${total} right${before ? ` (${before.right} of ${before.total} after step ${before.step})` : ""}`;
}

function answerCard(answer, context, hasPrompt, isEarlier = false) {
  const tokens = context.tokens(answer);
  const verdict = answer.correct ? ["right", "✓ right"] : ["wrong", "✗ wrong"];
  const figures = [`reward ${shownNumber(answer.reward_, 2)}`, counted(answer.num_tokens ?? 0, "token")];
  if (!answer.branches) figures.push(...advantageOf(tokens[0]));
  const header = element("header", {},
    element("span", { class: `badge ${verdict[0]}` }, verdict[1]),
    isCut(answer) ? element("span", { class: "badge cut" }, `✂ ${answer.finish_reason}`) : null,
    isLoop(answer) ? element("span", { class: "badge cut" }, "↻ loop") : null,
    element("span", { class: "figures-of" }, figures.join(" · ")),
    answer.replayed ? element("span", {}, "replayed") : null,
    isEarlier || (hasPrompt && view.everywhere && view.words) ? element("span", {}, `${isEarlier ? "after " : ""}step ${answer.file.step}`) : null,
    hasPrompt ? element("button", { type: "button", onclick: () => showOnly(answer.group, answer.file) }, "Group") : null);
  const card = element("article", { class: "answer", tabindex: "-1", "aria-label": `${verdict[0]} answer, ${figures.join(", ")}` }, header);
  card.answer = answer;
  if (hasPrompt) card.append(element("div", { class: "note mono" }, ...marked(answer.prompt ?? answer.group.prompt ?? "")));
  card.append(...rowsOf(answer).map((row, at) => answer.branches ? branchOf(answer, at, tokens[at], context.scale) : textOf(row, tokens[at], context.scale)));
  if (answer.reward_error) card.append(element("p", { class: "note" }, `no verdict: ${answer.reward_error}`));
  if (answer.answer !== undefined && answer.answer !== answer.text) card.append(element("p", { class: "note" }, `says: ${answer.answer}`));
  return card;
}

const advantageOf = (tokens) => typeof tokens?.advantage === "number" ? [`A\u00a0${shownNumber(tokens.advantage, 2)}`] : [];

/** Text that is closed at first, but not while words are searched. */
const folded = (label, ...nodes) => element("details", { class: "folded", open: view.words !== "" }, element("summary", {}, label), ...nodes);

const escaped = (mark) => mark.replace(/[\\|.*+?^$()[\]{}]/g, "\\$&");

/** The calls of tools in a turn: {from, to, label}, by the marks of the models' families. */
function callsIn(text) {
  const forms = callMarks.map(([start, end]) => `${escaped(start)}[^]*?(?:${end ? `${escaped(end)}|` : ""}$)`);
  return [...text.matchAll(new RegExp(forms.join("|"), "g"))].map(({ 0: call, index }) =>
    ({ from: index, to: index + call.length, label: `call: ${CALL_NAME.exec(call.slice(0, 300))?.[1] ?? "a tool"}` }));
}

/** The text of a turn, its calls folded. */
function withCalls(text) {
  const nodes = [];
  let at = 0;
  for (const { from, to, label } of callsIn(text)) nodes.push(...marked(text.slice(at, from)), folded(label, ...marked(text.slice(from, at = to))));
  return [...nodes, ...marked(text.slice(at))];
}

/** A branch of an agent's trajectory; the first one is open. */
function branchOf(answer, at, tokens, scale) {
  const branch = answer.branches[at];
  const figures = [`branch ${at + 1} of ${answer.branches.length}`, counted(branch.num_tokens ?? 0, "token"), ...advantageOf(tokens)];
  const prompt = element("div", { class: "text" }, ...marked(branch.prompt ?? ""));
  return element("details", { class: "branch", open: at === 0 || view.words !== "" },
    element("summary", {}, figures.join(" · ")), folded("prompt", prompt), textOf(branch, tokens, scale));
}

function textOf(answer, tokens, scale) {
  const holder = element("div", { class: "text" });
  const fill = (isWhole) => {
    holder.replaceChildren();
    if (tokens) {
      holder.tabIndex = 0;
      holder.tokens = tokens;
      holder.append(colouredText(tokens, scale, isWhole ? Infinity : LONG_TEXT / 4, view.words, Boolean(answer.turns)));
    } else if (answer.turns) {
      for (const { by, text } of answer.turns) {
        const isModel = by === "model";
        const span = element("span", { class: `by-${isModel ? "model" : "environment"}` }, ...(isModel ? withCalls(text) : marked(text)));
        holder.append(isModel || text.length < LONG_READ ? span : folded(`read: ${text.length} characters`, span));
      }
    } else {
      holder.append(...marked(isWhole ? answer.text ?? "" : (answer.text ?? "").slice(0, LONG_TEXT)));
    }
    const rest = tokens ? tokens.size - LONG_TEXT / 4 : answer.turns ? 0 : (answer.text ?? "").length - LONG_TEXT;
    if (!isWhole && rest > 0) holder.append(" … ", element("button", { type: "button", onclick: () => { fill(true); showFormulas(holder.parentElement); } }, `all of it: ${rest} more ${tokens ? "tokens" : "characters"}`));
  };
  fill(false);
  return holder;
}

/** A text with the searched words marked, as nodes. */
function marked(text) {
  if (!view.words) return [text];
  const nodes = [];
  const lower = text.toLowerCase();
  if (lower.length !== text.length) return [text]; // some letters change their length
  let from = 0;
  for (let at = lower.indexOf(view.words); at >= 0; at = lower.indexOf(view.words, from)) {
    nodes.push(text.slice(from, at), element("mark", {}, text.slice(at, at + view.words.length)));
    from = at + view.words.length;
  }
  nodes.push(text.slice(from));
  return nodes;
}

function chooseVerdict(verdict) {
  view.verdict = verdict;
  document.querySelector(`input[name=verdict][value=${verdict}]`).checked = true;
}

/** Shows one group with all its answers, or all groups again. */
function showOnly(group, file) {
  if (group && file && files[view.place] !== file) { view.place = files.indexOf(file); byId("step").value = view.place; }
  view.only = group;
  view.as = group ? "groups" : byId("view").value;
  if (group) {
    view.words = "";
    byId("search").value = "";
    chooseVerdict("all");
  }
  showAnswers().then(() => { if (group) byId("list").querySelector(".side")?.focus(); });
}

/** The one object of a file and its content so far. */
function fileOf(entry, place) {
  const key = `${runs[view.run].folder} ${entry.kind} ${entry.step} ${entry.version ?? ""}`;
  if (!allFiles.has(key)) allFiles.set(key, { ...entry, key });
  return Object.assign(allFiles.get(key), { place });
}

/** Chooses the answers of a run and kind, at the step that was shown, or the nearest. */
function chooseFiles() {
  const run = runs[view.run];
  const step = files[view.place]?.step;
  const kinds = new Set(run.answers.map((file) => file.kind));
  if (!kinds.has(view.kind)) view.kind = kinds.has("trained") ? "trained" : [...kinds][0] ?? "trained";
  byId("kind").value = view.kind;
  byId("kind").parentElement.hidden = kinds.size < 2;
  files = run.answers.map(fileOf).filter((file) => file.kind === view.kind);
  const hasBefore = view.kind === "held-out" && files.length > 1;
  for (const chip of document.querySelectorAll("#verdict .changed")) chip.hidden = !hasBefore;
  if (!hasBefore && CHANGES.includes(view.verdict)) chooseVerdict("all");
  const nearest = files.reduce((best, file, place) => Math.abs(file.step - step) < Math.abs(files[best].step - step) ? place : best, 0);
  view.place = step === undefined ? files.length - 1 : nearest;
  byId("step").max = Math.max(0, files.length - 1);
  byId("step").value = view.place;
  view.only = null;
}

function toStep(place) {
  if (place < 0 || place >= files.length) return;
  view.place = place;
  view.only = null;
  byId("step").value = place;
  showAnswers();
}

function startViewer() {
  const any = runs.findIndex((run) => run.answers.length);
  byId("viewer").hidden = any < 0;
  byId("no-answers").hidden = any >= 0;
  byId("no-answers").textContent = isLive ? "There are no answers yet." : "The runs kept no answers: actor_rollout_ref.rollout.dump_samples is 0.";
  if (any < 0) return;
  view.run = runs[view.run].answers.length ? view.run : any;
  showRunOptions();
  chooseFiles();
  showAnswers();
}

function showRunOptions() {
  const name = (run) => run.answers.length ? run.name : `${run.name} (no answers${isLive ? " yet" : ""})`;
  byId("answer-run").replaceChildren(...runs.map((run) => element("option", { value: run.number, disabled: !run.answers.length }, name(run))));
  byId("answer-run").value = view.run;
  byId("answer-run").parentElement.hidden = runs.length < 2;
}

/** Takes the changes of the runs. The viewer stays at its step, or follows the run if it showed all groups of the
 * last step. */
async function refreshViewer() {
  showRunOptions();
  const shown = files[view.place], only = view.only, turn = view.turn;
  const wasLast = view.place >= files.length - 1;
  chooseFiles();
  if (wasLast && !view.words && !only) { view.place = files.length - 1; byId("step").value = view.place; }
  byId("next").disabled = view.place >= files.length - 1;
  const file = files[view.place];
  view.only = only;
  if (file === shown) return;
  if (only) {
    const groups = await groupsOf(file);
    if (turn !== view.turn) return;
    view.only = groups.find((group) => group.uid === only.uid) ?? null;
  }
  showAnswers(file?.step === shown?.step);
}

function listenToViewer() {
  const change = (id, set) => byId(id).addEventListener("change", (event) => { set(event.target); showAnswers(); });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  change("answer-run", (select) => { view.run = Number(select.value); chooseFiles(); });
  change("kind", (select) => { view.kind = select.value; chooseFiles(); });
  change("view", (select) => { view.as = select.value; view.only = null; });
  change("sort", (select) => { view.sort = select.value; });
  change("colour", (select) => { view.colour = select.value; });
  change("everywhere", (box) => { view.everywhere = box.checked; view.only = null; });
  change("verdict", (radio) => { view.verdict = radio.value; });
  byId("formulas").addEventListener("change", (event) => { view.formulas = event.target.checked; showFormulas(byId("list")); });
  byId("step").addEventListener("input", (event) => toStep(Number(event.target.value)));
  byId("previous").addEventListener("click", () => toStep(view.place - 1));
  byId("next").addEventListener("click", () => toStep(view.place + 1));
  let wait = 0;
  byId("search").addEventListener("input", (event) => {
    clearTimeout(wait);
    wait = setTimeout(() => { view.words = event.target.value.toLowerCase(); view.only = null; showAnswers(); }, 200);
  });
  byId("more").addEventListener("click", () => { view.limit += FIRST[view.as]; showAnswers(true); });
  listenToTokens(byId("list"));
  document.addEventListener("keydown", onKey);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("viewer").hidden) return;
  if (event.target.closest("input:not([type=range]):not([type=radio]):not([type=checkbox]), select, textarea")) return;
  const cards = [...byId("list").querySelectorAll(".answer")];
  const at = cards.indexOf(document.activeElement?.closest(".answer"));
  const focus = (card) => { if (card) { card.focus({ preventScroll: true }); card.scrollIntoView({ block: "nearest", inline: "nearest" }); } };
  const keys = {
    j: () => focus(cards[at + 1] ?? cards[at]), k: () => focus(cards[Math.max(0, at - 1)]),
    "[": () => toStep(view.place - 1), "]": () => toStep(view.place + 1), "/": () => byId("search").focus(), f: () => byId("formulas").click(),
    g: () => { if (view.only) showOnly(null); else if (cards[at]) showOnly(cards[at].answer.group, cards[at].answer.file); },
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
}

/** Describes the token under the pointer, or chosen with the arrow keys. */
function listenToTokens(list) {
  const tip = byId("tip");
  const hide = () => { tip.hidden = true; list.querySelector(".token.current")?.classList.remove("current"); };
  const show = (span) => {
    hide();
    const tokens = span.closest(".text").tokens;
    tip.textContent = tokenDetails(tokens, Number(span.dataset.token));
    tip.hidden = false;
    span.classList.add("current");
    const box = span.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${box.bottom + tip.offsetHeight + 12 > innerHeight ? box.top - tip.offsetHeight - 6 : box.bottom + 6}px`;
  };
  list.addEventListener("pointerover", (event) => { const span = event.target.closest(".token"); if (span) show(span); else hide(); });
  list.addEventListener("pointerleave", hide);
  list.addEventListener("focusout", hide);
  list.addEventListener("keydown", (event) => {
    const holder = event.target.closest(".text");
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!holder?.tokens || !by) return;
    const spans = [...holder.querySelectorAll(".token")].filter((span) => span.checkVisibility());
    const at = spans.findIndex((span) => span.classList.contains("current"));
    const next = spans[Math.max(0, Math.min(spans.length - 1, at < 0 ? 0 : at + by))];
    event.preventDefault();
    next.scrollIntoView({ block: "nearest" });
    show(next);
  });
}
