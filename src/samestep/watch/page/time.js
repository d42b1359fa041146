// Where a step's time goes: now, as a strip, and over the run, as stacked areas.

import { latest, path } from "./api.js";
import { partBar, partColor, partKey, partName, PARTS, percentages } from "./colors.js";
import { h, onChange } from "./dom.js";
import { count, duration } from "./format.js";
import { framed } from "./frame.js";
import { stepRange } from "./state.js";
import { nearest } from "./tip.js";

const MEANING = {
  data: "waiting for samples",
  compute: "forward and backward",
  exchange: "adding the gradients of all workers, including the wait for the slowest",
  optimizer: "updating parameters",
  snapshot: "copying state for snapshots",
  evaluation: "run.evaluate",
  logging: "run.log, images and histograms",
  other: "the rest of the loop, such as plotting and printing",
};

const TITLES = { title: "step", unit: "seconds per step" };

export function timePanel(root) {
  const strip = h("section", { class: "strip" });
  let shown = { x: [], parts: {} };
  const frame = framed({ key: "time", label: "Seconds per step by part, over the run",
    kind: () => "part", height: 260, axis: "step",
    tip: (at) => rows(shown, nearest(shown.x, at)) });
  const { chart, canvas, buttons } = frame;
  const title = h("h2", {}, "Over the run, mean of all workers");
  root.append(strip, h("section", {}, h("header", { class: "head" }, title, buttons), canvas));
  const draw = onChange((parts) => strip.replaceChildren(...content(parts)));
  const load = latest((response) => {
    shown = response;
    chart.draw(stacked(shown), { ...stepRange(), ...TITLES, zero: true });
  });
  return {
    update({ run }) {
      if (!run) return;
      draw(run.parts);
      frame.resize();
      const request = path("timing", { id: run.id, ...stepRange(), points: 500 });
      load(request, `${run.step} ${run.attempts}`);
    },
    repaint: () => chart.repaint(),
  };
}

function content(parts) {
  const shares = percentages(parts);
  if (!shares) return [h("p", { class: "empty" }, "No step has been timed yet.")];
  const all = PARTS.reduce((sum, part) => sum + (parts[part] ?? 0), 0);
  return [
    h("h2", {}, `A step takes ${duration(all)}`,
      h("small", {}, " from one to the next, mean of all workers and the last 100 steps")),
    partBar("parts tall", shares),
    h("table", { class: "shares" }, h("tbody", {}, shares.map(([part, percent]) =>
      h("tr", { "data-part": part },
        h("th", { scope: "row" }, partKey(part), partName(part)),
        h("td", {}, `${percent.toFixed(1)} %`),
        h("td", {}, duration(parts[part] ?? 0)),
        h("td", { class: "meaning" }, MEANING[part]))))),
  ];
}

/** Return the curves of parts, each the sum of itself and all below. */
function stacked({ x, parts }) {
  const sums = x.map(() => 0);
  return PARTS.map((part, index) => ({
    label: partName(part),
    color: partColor(part),
    area: index ? "stacked" : "base",
    x,
    own: parts[part],
    value: x.map((_, place) => (sums[place] += parts[part]?.[place] ?? 0)),
  }));
}

function rows({ x, parts }, index) {
  if (!x.length) return [];
  const there = PARTS.filter((part) => parts[part]?.[index]).reverse();
  return [
    h("div", { class: "where" }, `step ${count(x[index])}`),
    ...there.map((part) =>
      h("div", {}, partKey(part), h("span", { class: "who" }, partName(part)),
        h("b", {}, duration(parts[part][index])))),
  ];
}

export const legend = () => h("p", { class: "legend" },
  PARTS.map((part) => h("span", {}, partKey(part), partName(part))));
