// Elements without templates: text from a record always becomes a text node.

/** Return an element. `on` has listeners, `vars` CSS properties (set as the policy permits). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    const entries = Object.entries(value);
    if (key === "on") entries.forEach(([kind, action]) => element.addEventListener(kind, action));
    else if (key === "vars") entries.forEach((property) => element.style.setProperty(...property));
    else element.setAttribute(key, value === true ? "" : value);
  }
  const isShown = (child) => child !== null && child !== undefined && child !== false;
  element.append(...children.flat(2).filter(isShown));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Return a function that calls `draw` only with changed values, to keep focus and selection. */
export function onChange(draw) {
  let last;
  return (value, ...others) => {
    const key = JSON.stringify(value);
    if (key !== last) {
      last = key;
      draw(value, ...others);
    }
  };
}

/** Return a text field whose label is for screen readers only. */
export function searchBox(id, label, listener) {
  return h("input", {
    id,
    type: "search",
    placeholder: label,
    "aria-label": label,
    autocomplete: "off",
    spellcheck: "false",
    on: { input: (event) => listener(event.target.value) },
  });
}

/** Return a button that is on or off. */
export function toggle(id, label, title, listener) {
  const state = { class: "toggle", title, "aria-pressed": "false" };
  return h("button", { id, type: "button", ...state, on: { click: listener } }, label);
}

/** Return a small button in the head of a chart. */
export function headButton(title, name, sign, click) {
  const labels = { title, "aria-label": `${title} ${name}`, "aria-pressed": "false" };
  return h("button", { class: "quiet small", type: "button", ...labels, on: { click } }, sign);
}

/** Announce important news to screen readers. */
export function announce(text) {
  byId("announcer").textContent = text;
}
