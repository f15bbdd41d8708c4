"use strict";
// Formulas in texts, as MathML by Temml. A model may write anything between the marks of a formula.

const MAX_FORMULA = 2000, MAX_BRACES = 10, MAX_NESTED = 100; // of a formula: characters, nested braces and elements
const MAX_FORMULAS = 1000, MAX_FORMULAS_MS = 2000; // of a text
const TEXTS = ".text, .prompt, .note.mono";
const FOREIGN = `a, img, [href], [src], ${"* > ".repeat(MAX_NESTED)}*`; // in MathML
// commands that define commands, hide braces, or take exponential time when they are nested
const REFUSED = /^(?:%|\\(?:verb|[egx]?def|let|futurelet|(?:re)?newcommand|providecommand|cancelto|equilibrium(?:Left|Right)|(?:math)?llap))$/;
// code has no formulas, a formula no empty line; `$ $` is read as pandoc does: "$5 and $10" is none
const FORMULA = new RegExp([/```[^]*?(?:```|$)|`[^`\n]+`|\\[\\$]/,
  /\$\$(?<dollars>(?:[^$\\\n]|\$(?!\$)|\\[^]|\n(?![ \t]*\n))+?)\$\$\n?/, /\\\[(?<brackets>(?:[^\\\n]|\\[^()[\]]|\n(?![ \t]*\n))+?)\\\]\n?/,
  /\\\((?<parentheses>(?:[^\\\n]|\\[^()[\]]|\n(?![ \t]*\n))+?)\\\)/, /\$(?!\s)(?<dollar>(?:[^$`\\\n]|\\[^]|\n(?![ \t]*\n))+?)(?<!\s)\$(?!\d)/,
].map((part) => part.source).join("|"), "g");

/** Whether the time and size of a formula are proportional to its length. */
const isTame = (tex, depth = 0) => (tex.match(/\\(?:[a-zA-Z@]+|[^])|[{}%]/g) ?? []).every((token) => (depth += (token === "{") - (token === "}")) <= MAX_BRACES && !REFUSED.test(token));

/** The element of a formula, or its source if it is none that can be drawn. */
function drawnFormula(source, tex, displayMode) {
  const drawn = element("span", { class: "formula", title: source });
  try { temml.render(tex.length <= MAX_FORMULA && isTame(tex) ? tex : "", drawn, { displayMode, throwOnError: true, trust: false, maxExpand: 1000, maxSize: [20, 200], wrap: "tex" }); } catch { return source; }
  for (const named of drawn.querySelectorAll("[id]")) named.removeAttribute("id"); // another part of the page may have it
  return drawn.textContent && !drawn.querySelector(FOREIGN) ? drawn : source;
}

/** Draws the formulas of a text, but not in tokens, calls and results of tools, and beside words that are searched. */
function drawFormulas(holder) {
  const parts = holder.querySelector("mark") ? [] : [holder, ...holder.querySelectorAll(":scope > .by-model")];
  let left = MAX_FORMULAS, end = performance.now() + MAX_FORMULAS_MS;
  for (const text of parts.flatMap((part) => [...part.childNodes]).filter((node) => node.nodeType === Node.TEXT_NODE)) {
    let nodes = [], at = 0;
    for (const { 0: source, index, groups: { dollars, brackets, parentheses, dollar } } of text.data.matchAll(FORMULA)) {
      const tex = dollars ?? brackets ?? parentheses ?? dollar;
      if (tex === undefined || left-- <= 0 || performance.now() > end) continue;
      nodes.push(text.data.slice(at, index), drawnFormula(source, tex, tex === dollars || tex === brackets));
      at = index + source.length;
    }
    text.replaceWith(...nodes, text.data.slice(at));
  }
}

const textObserver = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) { textObserver.unobserve(target); drawFormulas(target); }
}, { rootMargin: "120px" });

/** Draws the formulas of a part's texts as they come in sight, or shows their sources again. */
function showFormulas(part) {
  for (const formula of part.querySelectorAll(".formula")) formula.replaceWith(formula.title);
  part.normalize();
  for (const text of part.querySelectorAll(TEXTS)) { textObserver.unobserve(text); if (view.formulas) textObserver.observe(text); }
}
addEventListener("beforeprint", () => { if (view.formulas) byId("list").querySelectorAll(TEXTS).forEach(drawFormulas); });
