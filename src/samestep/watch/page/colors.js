// Colors of runs and of parts of a step, and the light and dark themes.
// Okabe and Ito 2008, "Color Universal Design": distinct for color-blind readers.

import { byId } from "./dom.js";

const DASHES = [[], [8, 4], [2, 4]]; // of runs 1 to 7, 8 to 14, and so on
const COLORS = 7;
const KEY = "samestep-theme";
const ORDER = ["auto", "light", "dark"];
const LABELS = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
const places = new Map();

/** Number all runs by their start time, so that each keeps its color as others are added. */
export function placeRuns(rows) {
  const order = [...rows].sort((a, b) => a.started - b.started || (a.id < b.id ? -1 : 1));
  order.forEach((row) => places.has(row.id) || places.set(row.id, places.size));
}

const place = (id) => places.get(id) ?? 0;

export const dashOf = (id) => DASHES[Math.floor(place(id) / COLORS) % DASHES.length];

/** The CSS variable of a run's color: "var(--run-3)". */
export const colorOf = (id) => `var(--run-${place(id) % COLORS})`;

/** Return the value of a CSS variable in the current theme, because a canvas has no variables. */
export function resolved(variable) {
  const name = variable.replace(/^var\(|\)$/g, "");
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export const PARTS = ["data", "compute", "exchange", "optimizer", "snapshot", "other"];
export const partColor = (part) => `var(--part-${part})`;

function storedTheme() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // a page from disk, or storage is disabled
  }
}

function storeTheme(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // it lasts until the page is closed
  }
}

/** Apply the stored theme; call `changed` when the button or the system changes colors. */
export function startTheme(changed) {
  const button = byId("theme");
  let theme = ORDER.includes(storedTheme()) ? storedTheme() : "auto";
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = LABELS[theme];
    changed();
  };
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    storeTheme(theme);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  apply();
}
