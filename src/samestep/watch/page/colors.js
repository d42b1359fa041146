// Colors of runs and of parts of a step, and the light and dark themes.
// Okabe and Ito 2008, "Color Universal Design": distinct for color-blind readers.

import { byId, h } from "./dom.js";
import { state } from "./state.js";

const DASHES = [[], [8, 4], [2, 4]]; // of lines 1 to 7, 8 to 14, and so on
const COLORS = 7;
const KEY = "samestep-theme";
const ORDER = ["auto", "light", "dark"];
const LABELS = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

/** Return the color, as a CSS variable, and the dash of one of several lines. */
export const lookAt = (place) => ({
  color: `var(--run-${place % COLORS})`,
  dash: DASHES[Math.floor(place / COLORS) % DASHES.length],
});

let groupLooks = new Map(); // by run: the look of its group

/** Show runs in the look of their groups; none without groups. */
export const setGroupLooks = (looks) => (groupLooks = looks);

/** Return those of a run by its place among the shown runs, so that few have distinct colors. */
export function lookOf(id) {
  if (groupLooks.has(id)) return groupLooks.get(id);
  const place = state.shown.indexOf(id);
  return place < 0 ? { color: "var(--line)", dash: [] } : lookAt(place);
}

/** Return a piece of a line, for the place next to its name. */
export const lineKey = ({ color, dash }) =>
  h("i", { class: "key", "data-dash": dash.join(" "), vars: { "--color": color } });

/** Return the value of a CSS variable in the current theme, because a canvas has no variables. */
export function resolved(variable) {
  const name = variable.replace(/^var\(|\)$/g, "");
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export const PARTS = [
  "data", "compute", "exchange", "optimizer", "snapshot", "evaluation", "logging", "other",
];
export const partName = (part) => (part === "other" ? "your code" : part);
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
