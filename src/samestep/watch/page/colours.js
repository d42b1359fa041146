// Colours that the colour-blind tell apart (Okabe and Ito 2008, "Color Universal Design"). Runs beyond the seventh get a dash, too.

const DASHES = [[], [8, 4], [2, 4]];
const COLOURS = 7;
const places = new Map();

/** Give every run a place among all by the time it started, so that a colour stays a run's own as others come and go. */
export function placeRuns(rows) {
  const order = [...rows].sort((a, b) => a.started - b.started || (a.id < b.id ? -1 : 1));
  order.forEach((row) => places.has(row.id) || places.set(row.id, places.size));
}

const place = (id) => places.get(id) ?? 0;

export const dashOf = (id) => DASHES[Math.floor(place(id) / COLOURS) % DASHES.length];

/** The CSS variable of a run's colour: "var(--run-3)". */
export const colourOf = (id) => `var(--run-${place(id) % COLOURS})`;

/** What a CSS variable stands for in the theme in use; a canvas knows no variables. */
export function resolved(variable) {
  return getComputedStyle(document.documentElement)
    .getPropertyValue(variable.replace(/^var\(|\)$/g, ""))
    .trim();
}

export const PARTS = ["data", "compute", "exchange", "optimizer", "snapshot", "other"];
export const partColour = (part) => `var(--part-${part})`;
