"use strict";
// What is known of the tokens of a step's answers, and how they are coloured by it.

/** The inverse of `coded` in commands/report/answers.py; NaN for unknown values. */
const decoded = (code) => code === -128 ? NaN : code === 0 ? 0 : Math.sign(code) * 2 ** ((Math.abs(code) - 96) / 4);

/** The tokens of one answer. known: of the step; start: of the answer's tokens in its arrays. */
class AnswerTokens {
  constructor(known, start, size, advantage) { Object.assign(this, { known, start, size, advantage }); }
  text(token) { return this.known.head.texts[this.known.places[this.start + token]]; }
  isRead(token) { return this.known.arrays.log_probs?.[this.start + token] === -128; }
  value(name, token) {
    const array = this.known.arrays[name];
    if (name === "advantages" && this.isRead(token)) return NaN;
    if (name === "versions") return this.known.head.newest - this.known.ages[this.start + token];
    if (array) return decoded(array[this.start + token]);
    return name === "advantages" && typeof this.advantage === "number" ? this.advantage : NaN;
  }
}

/** Reads the bytes that commands/report/answers.py writes. Returns {answers: of AnswerTokens, has(name)}. */
function readTokens(bytes) {
  const headSize = new DataView(bytes).getUint32(0, true);
  const head = asJson(new Uint8Array(bytes, 4, headSize));
  const total = head.lengths.reduce((sum, size) => sum + size, 0);
  let at = 4 + headSize;
  const places = head.wide ? new Uint32Array(bytes, at, total) : new Uint16Array(bytes, at, total);
  at += places.byteLength;
  const ages = new Uint8Array(bytes, at, total);
  at += total;
  const arrays = {};
  for (const name of head.arrays) { arrays[name] = new Int8Array(bytes, at, total); at += total; }
  const known = { head, places, ages, arrays };
  let start = 0;
  const answers = head.lengths.map((size, number) => {
    const answer = new AnswerTokens(known, start, size, head.advantages[number]);
    start += size;
    return answer;
  });
  const has = (name) => name === "versions" || name in arrays || (name === "advantages" && head.advantages.some((one) => one !== ""));
  return { answers, has };
}

const COLOURS = {
  advantages: { title: "Advantage", low: "negative", high: "positive" },
  differences: { title: "Log-prob, trainer − server", low: "server's is higher", high: "trainer's is higher" },
  log_probs: { title: "Log-prob by the server", low: "unlikely", high: "certain" },
  versions: { title: "Weight version", low: "older", high: "newest" },
};

/** The bounds of the shown values, so that colours mean the same in all answers of a step. */
function colourScale(name, answers) {
  let low = Infinity, high = -Infinity;
  for (const answer of answers) {
    for (let token = 0; token < answer.size; token++) {
      const value = answer.value(name, token);
      if (value < low) low = value;
      if (value > high) high = value;
      if (name === "advantages" && !answer.known.arrays.advantages && !Number.isNaN(value)) break; // the same for all its tokens
    }
  }
  if (low > high) return null;
  return { name, low, high, most: Math.max(Math.abs(low), Math.abs(high)) || 1 };
}

/** The background of a token. Text stays readable: no colour is stronger than 60 %. */
function tokenColour(scale, value) {
  if (Number.isNaN(value)) return "";
  if (scale.name === "versions") {
    const age = scale.high > scale.low ? (scale.high - value) / (scale.high - scale.low) : 0;
    return age ? `rgba(var(--age), ${(0.12 + 0.45 * age).toFixed(2)})` : "";
  }
  if (scale.name === "log_probs") return `rgba(var(--minus), ${(0.6 * (1 - Math.exp(value))).toFixed(2)})`;
  const strength = 0.6 * Math.min(1, Math.abs(value) / scale.most);
  return strength < 0.02 ? "" : `rgba(var(--${value > 0 ? "plus" : "minus"}), ${strength.toFixed(2)})`;
}

function showLegend(holder, scale) {
  holder.hidden = !scale;
  if (!scale) return;
  const { title, low, high } = COLOURS[scale.name];
  const bar = element("i", { "aria-hidden": "true" });
  const ends = {
    advantages: [-scale.most, scale.most], differences: [-scale.most, scale.most], log_probs: [scale.low, 0], versions: [scale.low, scale.high],
  }[scale.name];
  const stops = scale.name === "versions" ? "rgba(var(--age), .57), transparent"
    : scale.name === "log_probs" ? "rgba(var(--minus), .6), transparent" : "rgba(var(--minus), .6), transparent, rgba(var(--plus), .6)";
  bar.style.background = `linear-gradient(to right, ${stops})`;
  holder.replaceChildren(element("strong", {}, title), `${shownNumber(ends[0])} (${low})`, bar, `${shownNumber(ends[1])} (${high})`);
}

/** What is said of a token when it is pointed at. */
function tokenDetails(answer, token) {
  const parts = [`token ${token + 1} of ${answer.size}: ${JSON.stringify(answer.text(token))}`];
  if (answer.isRead(token)) return `${parts[0]}\nread: by the environment, or of an earlier branch`;
  const logProb = answer.value("log_probs", token);
  if (!Number.isNaN(logProb)) parts.push(`log-prob ≈ ${shownNumber(logProb)} (probability ≈ ${shownNumber(Math.exp(logProb), 2)})`);
  const difference = answer.value("differences", token);
  if (!Number.isNaN(difference)) parts.push(`trainer − server ≈ ${shownNumber(difference)}`);
  const advantage = answer.value("advantages", token);
  if (!Number.isNaN(advantage)) parts.push(`advantage ${shownNumber(advantage)}`);
  parts.push(`weight version ${answer.value("versions", token)}`);
  return parts.join("\n");
}

/** The calls of tools in the tokens [from, to). */
function callTokens(answer, from, to) {
  const starts = [];
  let text = "";
  for (let token = from; token < to; token++) { starts.push(text.length); text += answer.text(token); }
  const end = (at) => { const next = starts.findIndex((start) => start >= at); return next < 0 ? to : from + next; };
  return callsIn(text).map((call) => ({ ...call, from: from + starts.findLastIndex((start) => start <= call.from), to: end(call.to) }));
}

/** The answer's tokens as coloured text, at most `limit` of them; an agent's, with its calls folded. */
function colouredText(answer, scale, limit, words, isAgent) {
  const holder = document.createDocumentFragment();
  const hits = words ? hitTokens(answer, words) : new Set();
  const end = Math.min(answer.size, limit);
  let place = holder, calls = [];
  for (let token = 0; token < end; token++) {
    if (token === 0 || answer.isRead(token) !== answer.isRead(token - 1)) {
      let next = token;
      while (next < end && answer.isRead(next) === answer.isRead(token)) next++;
      place = holder;
      calls = isAgent && !answer.isRead(token) ? callTokens(answer, token, next) : [];
      if (answer.isRead(token) && next - token >= LONG_READ / 4) holder.append(place = folded(`read: ${next - token} tokens`));
    }
    if (calls.some((call) => call.to === token)) place = holder;
    for (const call of calls) if (call.from === token) holder.append(place = folded(call.label));
    const span = element("span", { class: "token", "data-token": token }, answer.text(token));
    if (answer.isRead(token)) span.classList.add("read");
    if (hits.has(token)) span.classList.add("hit");
    const colour = tokenColour(scale, answer.value(scale.name, token));
    if (colour) span.style.background = colour;
    place.append(span);
  }
  return holder;
}

/** The tokens in which the words stand. */
function hitTokens(answer, words) {
  const starts = [];
  let text = "";
  for (let token = 0; token < answer.size; token++) { starts.push(text.length); text += answer.text(token).toLowerCase(); }
  const hits = new Set();
  for (let at = text.indexOf(words); at >= 0; at = text.indexOf(words, at + 1)) {
    for (let token = starts.findLastIndex((start) => start <= at); token < answer.size && starts[token] < at + words.length; token++) hits.add(token);
  }
  return hits;
}
