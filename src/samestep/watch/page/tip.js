// The box at the cursor of a chart that has several lines.

import { lineKey } from "./colors.js";
import { h } from "./dom.js";

export const MOST_IN_TIP = 12; // lines

/** Return its content: `where` the cursor is, and the lines by value there, highest first. */
export function rowsAt(lines, at, where, text) {
  const found = lines
    .filter(({ x }) => x.length)
    .map((line) => ({ ...line, at: line.value[nearest(line.x, at)] }))
    .sort((a, b) => (b.at ?? -Infinity) - (a.at ?? -Infinity));
  const more = found.length - MOST_IN_TIP;
  return [
    h("div", { class: "where" }, where),
    ...found.slice(0, MOST_IN_TIP).map((line) =>
      h("div", {}, lineKey(line), h("span", { class: "who" }, line.label),
        h("b", {}, text(line.at)))),
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
