// Histograms of the chosen run: one name at a time, all steps as columns, one step as bars.

import { latest, path } from "./api.js";
import { resolved } from "./colors.js";
import { h, offering } from "./dom.js";
import { count, number, several } from "./format.js";
import { pictureOfElement, saveMenu } from "./saving.js";
import { choose, state } from "./state.js";

const OCTAVES = 16; // below the largest edge; smaller values are drawn as zeros
const HALF = 4 * OCTAVES; // rows of positive numbers: a power of two has four bins
const ROWS = 2 * HALF + 1;
const BAR = 160; // pixels of the longest bar
const MARGINS = [4, 4, 4, 4]; // pixels around a picture

export function histograms() {
  let items = [];
  let chosen = null; // the index of a step; null: the newest
  let key;
  const change = () => choose({ histogram: select.value });
  const select = h("select", { "aria-label": "Histogram", on: { change } });
  const seek = (event) => {
    const index = Number(event.target.value);
    chosen = index === items.length - 1 ? null : index;
    draw();
  };
  const slider = h("input", { id: "histogram-step", type: "range", min: 0, max: 0,
    "aria-label": "Step of the histogram", on: { input: seek } });
  const readout = h("p", { class: "readout", id: "histogram-readout" });
  const map = h("canvas", { height: ROWS, role: "img" });
  const bars = h("canvas", { height: ROWS, width: BAR, "aria-hidden": "true" });
  const edges = ["+", "+", "0", "−", "−"].map((sign) => h("span", {}, sign));
  const up = h("span", { class: "title-up" });
  const [first, last, most] = ["0", "0", "0"].map((text) => h("span", {}, text));
  const title = (text) => h("span", { class: "axis-title" }, text);
  const figure = h("div", { class: "histogram" },
    up, h("div", { class: "edges" }, edges), map, bars,
    h("div", { class: "across" }, first, title("step"), last),
    h("div", { class: "across" }, h("span", {}, "0"), title("count"), most));
  const save = saveMenu("histogram", () =>
    ({ lines: () => table(items), picture: () => pictureOfElement(figure, MARGINS) }));
  const element = h("section", { class: "group", id: "histograms", hidden: true },
    h("header", { class: "head" }, h("h2", {}, "Histograms"), save),
    h("div", { class: "tools" }, select, h("label", { class: "slider wide" }, "Step", slider)),
    readout, figure);
  const list = offering(select);

  function draw() {
    const at = chosen === null ? items.length - 1 : Math.min(chosen, items.length - 1);
    slider.max = Math.max(0, items.length - 1);
    slider.value = at;
    slider.disabled = items.length < 2;
    if (at < 0) return;
    const tops = items.map(({ bins }) => Math.max(...bins.map(([edge]) => place(edge))));
    const top = Math.max(...tops);
    const columns = items.map(({ bins }) => rows(bins, top));
    map.width = items.length;
    paint(map, columns, at);
    paint(bars, [columns[at]]);
    const label = (steps) => number(2 ** Math.floor((top + 1) / 4 - steps));
    [`${label(0)}`, `${label(8)}`, "0", `−${label(8)}`, `−${label(0)}`].forEach((text, index) => {
      edges[index].textContent = Number.isFinite(top) ? text : "";
    });
    first.textContent = count(items[0].step);
    last.textContent = count(items.at(-1).step);
    most.textContent = count(Math.max(...columns[at]));
    up.textContent = up.title = select.value;
    readout.textContent = described(items[at]);
    slider.setAttribute("aria-valuetext", readout.textContent);
    const range = `steps ${count(items[0].step)} to ${count(items.at(-1).step)}`;
    map.setAttribute("aria-label", `Counts of ${select.value}, ${range}`);
  }
  const load = latest((response) => {
    items = response.items;
    draw();
  });
  return {
    element,
    update({ run }) {
      const names = run?.histograms ?? [];
      element.hidden = !names.length;
      if (!names.length) return;
      list(names.map(({ name }) => name));
      const shown = names.find(({ name }) => name === state.histogram) ?? names[0];
      select.value = shown.name;
      if (key !== `${run.id} ${shown.name}`) chosen = null;
      key = `${run.id} ${shown.name}`;
      load(path("histogram", { id: run.id, name: shown.name }), `${shown.step} ${run.attempts}`);
    },
    repaint: draw,
  };
}

/** Return the lines of a table: each bin of each step, and the values that no bin has. */
function table(items) {
  const lines = items.flatMap(({ step, bins, ...others }) => [
    ...bins.map(([edge, values]) => [step, ...[edge, outer(edge)].sort((a, b) => a - b), values]),
    ...["nan", "inf", "-inf"].filter((name) => others[name])
      .map((name) => [step, name, name, others[name]]),
  ]);
  return [["step", "lower edge", "upper edge", "count"], ...lines];
}

/** Return the edge of a bin that is farther from zero. */
const outer = (edge) =>
  edge && edge + Math.sign(edge) * 2 ** (Math.floor(Math.log2(Math.abs(edge))) - 2);

/** The place of a bin among all positive ones: four per power of two; zeros are below all. */
function place(edge) {
  if (edge === 0) return -Infinity;
  const octave = Math.floor(Math.log2(Math.abs(edge)));
  return 4 * octave + 4 * (Math.abs(edge) / 2 ** octave - 1);
}

/** Counts by row, from the largest positive numbers to the largest negative ones. */
function rows(bins, top) {
  const found = new Array(ROWS).fill(0);
  for (const [edge, values] of bins) {
    const size = Math.max(0, Math.round(place(edge) - top) + HALF);
    found[HALF - Math.sign(edge) * (size || 0)] += values;
  }
  return found;
}

/** Draw counts relative to each column's largest: one column as bars, several as shades. */
function paint(canvas, columns, marked) {
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, ROWS);
  context.fillStyle = resolved("var(--accent)");
  columns.forEach((column, x) => {
    const most = Math.max(1, ...column);
    column.forEach((values, row) => {
      context.globalAlpha = marked === undefined ? 1 : Math.sqrt(values / most);
      context.fillRect(x, row, marked === undefined ? (BAR * values) / most : 1, 1);
    });
  });
  if (marked === undefined || columns.length < 2) return;
  context.globalAlpha = 0.25; // the chosen step
  context.fillStyle = resolved("var(--ink)");
  context.fillRect(marked, 0, 1, ROWS);
}

function described({ step, bins, nan, inf, "-inf": negative }) {
  const total = bins.reduce((sum, [, values]) => sum + values, 0);
  const [low, high] = [bins[0]?.[0], bins.at(-1)?.[0]];
  let left = total / 2;
  const middle = bins.find(([, values]) => (left -= values) <= 0)?.[0];
  return [
    `step ${count(step)}`,
    several(total, "value"),
    total > 0 && `bins from ${number(low)} to ${number(high)}, median near ${number(middle)}`,
    nan > 0 && `${count(nan)} NaN`,
    inf + negative > 0 && `${count(inf + negative)} infinite`,
  ].filter(Boolean).join(" · ");
}
