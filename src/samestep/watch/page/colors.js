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

const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");

/** Return the value of a CSS variable in the current theme, because a canvas has no variables. */
export function resolved(variable) {
  const name = variable.replace(/^var\(|\)$/g, "");
  const colors = getComputedStyle(root).getPropertyValue(name).match(/#\w+/g); // light, dark
  const { theme } = root.dataset;
  return (theme === "auto" ? system.matches : theme === "dark") ? colors.at(-1) : colors[0];
}

export const PARTS = [
  "data", "compute", "exchange", "optimizer", "snapshot", "evaluation", "logging", "other",
];
export const partName = (part) => (part === "other" ? "your code" : part);
export const partColor = (part) => `var(--part-${part})`;
export const partKey = (part) => h("i", { class: "key", vars: { background: partColor(part) } });

/** Return the percentage of each part in the seconds of a step, null without any. */
export function percentages(seconds) {
  const all = PARTS.reduce((sum, part) => sum + (seconds?.[part] ?? 0), 0);
  return all ? PARTS.map((part) => [part, (100 * (seconds[part] ?? 0)) / all]) : null;
}

/** Return shares of the parts as a bar. */
export const partBar = (kind, shares) => h("div", { class: kind, "aria-hidden": "true" },
  shares.filter(([, percent]) => percent > 0).map(([part, percent]) =>
    h("i", { vars: { width: `${percent}%`, background: partColor(part) } })));

/** Return what `act` does with the storage of the browser, null if that is disabled. */
function stored(act) {
  try {
    return act(localStorage);
  } catch {
    return null; // a page from disk: a theme lasts until it is closed
  }
}

/** Apply the stored theme; call `changed` when the button or the system changes colors. */
export function startTheme(changed) {
  const button = byId("theme");
  let theme = stored((storage) => storage.getItem(KEY));
  if (!ORDER.includes(theme)) theme = "auto";
  const apply = () => {
    root.dataset.theme = theme;
    button.textContent = LABELS[theme];
    changed();
  };
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    stored((storage) => storage.setItem(KEY, theme));
    apply();
  });
  system.addEventListener("change", changed);
  apply();
}
