// Three answers about the run: is it learning, is it healthy, and what is slow?

import { partBar, partKey, partName, percentages } from "./colors.js";
import { h, onChange } from "./dom.js";
import { bestOf, count, number, several } from "./format.js";
import { choose } from "./state.js";

const STEADY = 0.005; // a smaller change is no trend
const MOST_PARTS = 3; // named beside the bar
const TREND =
  "The change between the mean of the newest fifth of the points and that of the fifth before it";

export function answers() {
  const cells = {
    learning: cell("learning", "Learning?", "curves"),
    healthy: cell("healthy", "Healthy?", "workers"),
    slow: cell("slow", "What is slow?", "time"),
  };
  const drawLearning = onChange((lines) => cells.learning.show(
    lines.length ? lines.map(scored) : [h("p", {}, "no score or loss yet")]));
  const drawHealth = onChange((lines) => cells.healthy.show(lines.map(checked)));
  const drawParts = onChange((parts) => cells.slow.show(shares(parts)));
  return {
    element: h("div", { class: "answers" }, Object.values(cells).map(({ element }) => element)),
    update({ run }) {
      drawLearning(learned(run));
      drawHealth(health(run));
      drawParts(run.parts);
    },
  };
}

function cell(key, label, tab) {
  const place = h("div", { class: "answer" });
  const click = () => choose({ tab });
  const question = h("button", { class: "question", type: "button", on: { click } }, label);
  const element = h("section", { "data-answer": key, "aria-label": label }, question, place);
  return { element, show: (lines) => place.replaceChildren(...lines) };
}

function learned(run) {
  return Object.values(run.principals).map((principal) => {
    const scalar = run.scalars.find(({ name }) => name === principal);
    const { name, goal, last, trend } = scalar;
    const [at, done] = [scalar[`${goal}_step`], scalar[`${goal}_done`]];
    return { name, goal, last, trend, best: bestOf(scalar), at, done };
  });
}

function scored({ name, goal, last, best, trend: change, at, done }) {
  const isBetter = change < 0 === (goal === "lowest");
  const percent = Math.min(999, Math.round(100 * Math.abs(change)));
  const severity = Math.abs(change) < STEADY ? null : isBetter ? "good" : "bad";
  const where = at === null ? ""
    : ` at step ${count(at)}, after which ${count(done)} are complete, as in a snapshot's name`;
  const text = `${name} ${number(last)}, best ${number(best)}${where}`;
  return h("p", { title: text }, `${name} `, h("b", {}, number(last)),
    change !== null && h("span", { class: "trend", "data-severity": severity, title: TREND },
      severity ? `${change < 0 ? "↓" : "↑"}${percent}%` : "steady"),
    best !== null &&
      h("small", {}, `best ${number(best)}`, at !== null && `@${count(at)}`));
}

/** Return what is fine and what is not, as pairs of a severity and a text. */
function health({ state, step, scalars, nonfinite, workers }) {
  const lines = [];
  if (["failed", "stalled", "silent"].includes(state)) {
    lines.push(["bad", `${state} at step ${count(step)}`]);
  }
  nonfinite.slice(0, 1).forEach(({ name, step: since }) =>
    lines.push(["bad", `${name} has not been finite since step ${count(since)}`, "nonfinite"]));
  const more = nonfinite.length - 1;
  if (more > 0) lines.push(["bad", `and ${count(more)} more`]);
  if (scalars.length && !nonfinite.length) lines.push(["good", "newest values finite"]);
  const pace = paces(workers);
  if (pace) lines.push(pace);
  if (!lines.length) return [[null, "no values yet"]];
  return lines.length > 2 ? lines.filter(([severity]) => severity !== "good") : lines;
}

function paces(workers) {
  const seconds = workers.map((worker) => worker.seconds).filter((one) => one !== null);
  const slowest = workers.find(({ lag }) => lag !== null);
  if (!slowest) return seconds.length > 1 ? ["good", "no slow worker"] : null;
  const percent = Math.round(100 * slowest.lag);
  const title = `The others wait for worker ${slowest.rank} during ${percent}% of a step`;
  return ["bad", `wait for worker ${slowest.rank}: ${percent}%`, null, title];
}

function checked([severity, text, state, title = text]) {
  const sign = severity === "good" ? "✓" : "⚠";
  const mark = severity && h("i", { class: "sign", "aria-hidden": "true" }, sign);
  const badge = { class: state && "state", "data-state": state };
  return h("p", { "data-severity": severity, title }, mark, h("span", badge, text));
}

function shares(parts) {
  const found = percentages(parts);
  if (!found) return [h("p", {}, "no step has been timed yet")];
  const largest = found.toSorted((a, b) => b[1] - a[1]).slice(0, MOST_PARTS);
  const share = ([part, percent]) =>
    h("span", { "data-part": part },
      partKey(part), `${partName(part)} `, h("b", {}, `${Math.round(percent)}%`));
  return [partBar("parts", found), h("p", { class: "parts-named" }, largest.map(share))];
}
