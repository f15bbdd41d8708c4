"use strict";
// What the page knows: chunks that it carries, or that the server which sent it answers with.

const isLive = document.documentElement.dataset.live === "yes";
const byId = (id) => document.getElementById(id);

/** Makes an element. Texts are put in as text, never as HTML: answers may hold anything. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === false || value === null) continue;
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

async function unpacked(base64) {
  const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** What a live page asks its server for, with the key of its own address. */
const ask = (path, options) => fetch(path + location.search, options);

/** Returns the bytes of a chunk, or null without one. path: of a live page's request. */
async function chunk(name, path) {
  if (!isLive) {
    const holder = byId(`chunk-${name}`);
    return holder ? unpacked(holder.textContent) : null;
  }
  const answer = await ask(path);
  if (answer.status === 204 || answer.status === 404) return null;
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return unpacked(await answer.text());
}

const asJson = (bytes) => JSON.parse(new TextDecoder().decode(bytes));

/** Forgets the values that were asked for longest ago. */
class Remembered {
  constructor(size) { this.size = size; this.values = new Map(); }
  get(key, make) {
    let value = this.values.get(key);
    if (value === undefined) value = make();
    else this.values.delete(key);
    this.values.set(key, value);
    if (this.values.size > this.size) this.values.delete(this.values.keys().next().value);
    return value;
  }
}

const shownNumber = (value, digits = 3) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const isFar = value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6);
  const text = isFar ? value.toExponential(1) : Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(digits);
  return signed(text);
};
/** A number's text with a true minus, and a zero without one. */
const signed = (text) => (/^-[0.]+$/.test(text) ? text.slice(1) : text).replaceAll("-", "−");
const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const shownSeconds = (seconds) => {
  const whole = Math.round(seconds);
  if (whole < 60) return `${seconds.toFixed(1)} s`;
  const parts = [[Math.floor(whole / 3600), "h"], [Math.floor(whole / 60) % 60, "m"], [whole % 60, "s"]];
  return parts.filter(([number]) => number).slice(0, 2).map(([number, unit]) => number + unit).join(" ");
};

/** A metric of a run: {step, time, values}, from the records that have it; null without any. */
function series(run, metric) {
  const table = run.steps[metric] ? run.steps : run.validations;
  if (!table[metric]) return null;
  const rows = table[metric].map((value, row) => [table.step[row], table.time[row], value]).filter((row) => row[2] !== null);
  if (!rows.length) return null;
  return { step: rows.map((row) => row[0]), time: rows.map((row) => row[1]), values: rows.map((row) => row[2]), isHeldOut: table === run.validations };
}

const MAX_REPEATS = 4, MAX_NAME = 80, MAX_MATCH_MS = 300;

/** The names that a regular expression finds. Throws an Error that says why not.
 * In bounded time: without repeated groups, and with few repetitions, a match of a short name takes milliseconds. */
function matchingNames(names, source) {
  const plain = source.replace(/\\.|\[(?:\\.|[^\]\\])*\]/g, "x").replaceAll("(?", "(");
  if (/\)[*+{]/.test(plain)) throw new Error("A group in ( ) cannot be repeated here.");
  if ((plain.match(/[*+?{]/g) ?? []).length > MAX_REPEATS) throw new Error(`At most ${MAX_REPEATS} of * + ? { } are possible.`);
  const pattern = new RegExp(source, "i");
  const end = performance.now() + MAX_MATCH_MS;
  return names.filter((name) => {
    if (performance.now() > end) throw new Error("The expression takes too long.");
    return pattern.test(name.slice(0, MAX_NAME));
  });
}

/** When the run began, in seconds since 1970. */
function beginning(run) {
  const [first] = run.events.filter((event) => event.kind === "start");
  return first ? first.time : run.steps.time?.[0] ?? 0;
}

/** Minutes of short runs, hours of long ones: {seconds, name}. */
function timeUnit() {
  const longest = Math.max(0, ...runs.map((run) => (run.steps.time?.at(-1) ?? 0) - beginning(run)));
  return longest < 7200 ? { seconds: 60, name: "minutes" } : { seconds: 3600, name: "hours" };
}
const elapsed = (run, times) => times.map((time) => (time - beginning(run)) / timeUnit().seconds);

/** An exponential mean that begins unbiased. */
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}
