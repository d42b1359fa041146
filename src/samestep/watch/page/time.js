// Where a step's time goes: now, as a strip, and over the run, as areas on top of each other.

import { Chart } from "./chart.js";
import { partColour, PARTS } from "./colours.js";
import { h, onChange } from "./dom.js";
import { count, duration } from "./format.js";
import { following, path } from "./get.js";
import { choose, stepRange } from "./state.js";
import { nearest } from "./card.js";

const MEANING = {
  data: "waiting for samples",
  compute: "forward and backward",
  exchange: "adding gradients of all workers, with the wait for the slowest",
  optimizer: "updating parameters",
  snapshot: "copying state for snapshots",
  other: "the rest of the step: logging, evaluation, your own code",
};

export function timePanel(root) {
  const strip = h("section", { class: "strip" });
  const canvas = h("div", { class: "canvas" });
  root.append(strip, h("section", {}, h("h2", {}, "Over the run, mean of all workers"), canvas));
  let shown = { x: [], parts: {} };
  const chart = new Chart(canvas, {
    label: "Seconds a step by part, over the run",
    height: () => 260,
    zoomed: (from, to) => choose({ from, to, axis: "step" }),
    reset: () => choose({ from: null, to: null }),
    tip: (at) => rows(shown, nearest(shown.x, at)),
  });
  const draw = onChange((parts) => strip.replaceChildren(...content(parts)));
  const load = following((answer) => {
    shown = answer;
    chart.draw(stacked(shown), { ...stepRange(), zero: true });
  });
  return {
    update({ run }) {
      if (!run) return;
      draw(run.parts);
      load(path("timing", { id: run.id, ...stepRange(), points: 500 }), `${run.step} ${run.attempts}`);
    },
    repaint: () => chart.repaint(),
  };
}

function content(parts) {
  const all = PARTS.reduce((sum, part) => sum + (parts?.[part] ?? 0), 0);
  if (!all) return [h("p", { class: "empty" }, "No step has been timed yet.")];
  return [
    h("h2", {}, `A step takes ${duration(all)}`, h("small", {}, " mean of all workers and the last 100 steps")),
    h(
      "div",
      { class: "parts tall", "aria-hidden": "true" },
      PARTS.filter((part) => parts[part] > 0).map((part) =>
        h("i", { "data-part": part, vars: { width: `${(100 * parts[part]) / all}%`, background: partColour(part) } }),
      ),
    ),
    h(
      "table",
      { class: "shares" },
      h(
        "tbody",
        {},
        PARTS.map((part) =>
          h(
            "tr",
            { "data-part": part },
            h("th", { scope: "row" }, h("i", { class: "key", vars: { background: partColour(part) } }), part),
            h("td", {}, `${((100 * (parts[part] ?? 0)) / all).toFixed(1)} %`),
            h("td", {}, duration(parts[part] ?? 0)),
            h("td", { class: "meaning" }, MEANING[part]),
          ),
        ),
      ),
    ),
  ];
}

/** Each part's curve is the sum of itself and all below. */
function stacked({ x, parts }) {
  const sums = x.map(() => 0);
  return PARTS.map((part, index) => ({
    label: part,
    colour: partColour(part),
    area: index ? "stacked" : "base",
    x,
    value: x.map((_, place) => (sums[place] += parts[part]?.[place] ?? 0)),
  }));
}

function rows({ x, parts }, index) {
  if (!x.length) return [];
  return [
    h("div", { class: "where" }, `step ${count(x[index])}`),
    ...[...PARTS]
      .reverse()
      .filter((part) => parts[part]?.[index])
      .map((part) =>
        h(
          "div",
          {},
          h("i", { class: "key", vars: { background: partColour(part) } }),
          h("span", { class: "who" }, part),
          h("b", {}, duration(parts[part][index])),
        ),
      ),
  ];
}

export function legend() {
  return h(
    "p",
    { class: "legend" },
    PARTS.map((part) => h("span", {}, h("i", { class: "key", vars: { background: partColour(part) } }), part)),
  );
}
