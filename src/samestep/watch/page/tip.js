// The box at the cursor of a chart that has several lines.

import { lineKey } from "./colors.js";
import { h } from "./dom.js";

const MOST = 12; // lines

/**
 * Return its content: `where(x)` the cursor is, and the lines by value there, highest first. `text`
 * writes a value, and `others(line, index)` returns what follows it.
 */
export function rowsAt(lines, at, where, text, others = () => []) {
  const found = lines
    .filter(({ x }) => x.length)
    .map((line) => ({ line, index: nearest(line.x, at) }))
    .map(({ line, index }) => ({ line, index, value: (line.smooth ?? line.value)[index] }))
    .sort((a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity));
  const more = found.length - MOST;
  return [
    h("div", { class: "where" }, where(found.length ? found[0].line.x[found[0].index] : at)),
    ...found.slice(0, MOST).map(({ line, index, value }) =>
      h("div", {}, lineKey(line), h("span", { class: "who" }, line.label),
        h("b", {}, text(value)), others(line, index))),
    more > 0 && h("div", { class: "where" }, `and ${more} more`),
  ].filter(Boolean);
}

/** Return the index of the nearest value in a sorted list. */
export function nearest(list, value) {
  let [low, high] = [0, list.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= value) low = middle;
    else high = middle;
  }
  return low === high || value - list[low] <= list[high] - value ? low : high;
}
