// Light, dark, or as the system has it; kept in the browser where that is allowed.

import { byId } from "./dom.js";

const KEY = "samestep-theme";
const ORDER = ["auto", "light", "dark"];
const LABELS = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // a page from disk, or storage switched off
  }
}

function keep(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // it lasts until the page is left
  }
}

/** Start with the kept theme; call `changed` whenever colours change, by the button or by the system. */
export function startTheme(changed) {
  const button = byId("theme");
  let theme = ORDER.includes(stored()) ? stored() : "auto";
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = LABELS[theme];
    changed();
  };
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    keep(theme);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  apply();
}
