// One setting against one score: each run of the table is a point.

import { lookOf } from "./colors.js";
import { h, keepFocus, offering, onChange } from "./dom.js";
import { number, several, tick } from "./format.js";
import { pictureOfElement, plain, saveMenu } from "./saving.js";
import { choose, state } from "./state.js";

const DECADES = 1.5; // a wider span of values has a logarithmic axis
const MOST_TICKS = 8;
const MARGINS = [14, 14, 44, 80]; // pixels, as in panels.css

export function scatter() {
  const across = select("setting", "Setting");
  const up = select("score", "Score");
  const note = h("p", { class: "note" });
  const place = h("div", { class: "scatter", id: "scatter" });
  let shown = [];
  const save = saveMenu("a setting against a score", () => ({
    lines: () => [["run", state.setting, state.score].map(plain),
      ...shown.map(({ name, x, y }) => [plain(name), plain(String(x)), y])],
    picture: () => pictureOfElement(place, MARGINS),
  }));
  const head = h("header", { class: "head" }, h("span"), save);
  const element = h("div", { hidden: true }, head, place, note);
  const draw = onChange(({ points, hidden, current }) => {
    const [x, y] = ["x", "y"].map((key) => axis(points.map((point) => point[key])));
    const labels = (one, side, key) => one.ticks.map(([text, share]) =>
      h("span", { class: `tick ${side}`, vars: { [key]: `${100 * share}%` } }, text));
    const dots = points.map((point) => h("button", {
      type: "button", "data-run": point.id, "data-chosen": point.id === current,
      title: `${point.name}\n${state.setting}: ${point.x}\n${state.score}: ${number(point.y)}`,
      "aria-label": `${point.name}, ${point.x}, ${number(point.y)}`,
      vars: { left: `${100 * x.at(point.x)}%`, bottom: `${100 * y.at(point.y)}%`,
        background: point.color },
      on: { click: () => open(point.id) },
    }));
    place.dataset.scales = `${x.kind} ${y.kind}`;
    const titles = Object.entries({ across: state.setting, up: state.score })
      .map(([side, text]) => h("span", { class: `title-${side}` }, text));
    keepFocus(place, () => place.replaceChildren(
      ...labels(x, "below", "left"), ...labels(y, "beside", "bottom"), ...dots, ...titles));
    note.textContent = hidden ? `${several(hidden, "run")} without these values not shown` : "";
  });
  return {
    tools: h("span", { class: "axes" }, across.element, up.element),
    element,
    update(runs, names, current) {
      const scores = new Set(runs.flatMap(({ scores: own }) => own));
      const isScore = (name) => scores.has(name.replace(/^best /, ""));
      across.offer(names.filter((name) => !isScore(name)));
      up.offer(names.filter(isScore));
      element.hidden = !state.setting || !state.score;
      if (element.hidden) return;
      const points = runs
        .map(({ id, name, values }) => ({ id, name, x: values[state.setting],
          y: values[state.score],
          color: state.shown.includes(id) ? lookOf(id).color : "var(--faint)" }))
        .filter(({ x, y }) => x !== undefined && typeof y === "number");
      const { setting, score } = state;
      shown = points;
      draw({ points, hidden: runs.length - points.length, current, setting, score });
    },
  };
}

const open = (run) => choose({ run, shown: [...new Set([...state.shown, run])], tab: "curves" });

/** Return a list of names that sets a choice; one that a link names is offered, too. */
function select(key, label) {
  const list = h("select", { id: `scatter-${key}`,
    on: { change: () => choose({ [key]: list.value }) } });
  const draw = offering(list, "–");
  return {
    element: h("label", {}, `${label} `, list),
    offer(names) {
      draw([...new Set([...names, state[key]])].filter(Boolean));
      list.value = state[key];
    },
  };
}

/** Return an axis: its kind, `at` for the place of a value from 0 to 1, and ticks. */
function axis(values) {
  const numbers = values.map(Number);
  const isNumber = (value, index) => value !== "" && Number.isFinite(numbers[index]);
  if (!values.every(isNumber)) return categories(values);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const isLog = low > 0 && high / low > 10 ** DECADES;
  const [scale, back] = isLog ? [Math.log10, (one) => 10 ** one] : [Number, Number];
  const [from, to] = [scale(low), scale(high)];
  const margin = 0.04 * (to - from) || Math.abs(from) || 1;
  const at = (value) => (scale(value) - from + margin) / (to - from + 2 * margin);
  const size = isLog ? Math.ceil((to - from) / MOST_TICKS) : round((to - from) / MOST_TICKS);
  const first = Math.ceil((from - margin / 2) / size);
  const last = Math.floor((to + margin / 2) / size);
  const ticks = size ? range(first, last).map((one) => back(one * size)) : [low];
  return { kind: isLog ? "log" : "linear", at, ticks: ticks.map((one) => [tick(one), at(one)]) };
}

/** Return the next of 1, 2, 5, 10, 20, … times a power of ten. */
function round(size) {
  if (!size) return 0;
  const power = 10 ** Math.floor(Math.log10(size));
  return power * [1, 2, 5, 10].find((one) => one * power >= size);
}

const range = (first, last) =>
  Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => first + index);

function categories(values) {
  const names = [...new Set(values.map(String))].sort();
  const places = new Map(names.map((name, index) => [name, (index + 0.5) / names.length]));
  const at = (value) => places.get(String(value));
  const stride = Math.ceil(names.length / MOST_TICKS);
  const ticks = names.filter((_, index) => index % stride === 0);
  return { kind: "categories", at, ticks: ticks.map((name) => [name, at(name)]) };
}
