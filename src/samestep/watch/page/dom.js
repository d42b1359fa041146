// Elements without templates: text from a record only ever becomes a text node, whatever it says.

/** Make an element. `on` holds listeners, `vars` CSS properties (by CSSOM, which a strict content policy allows). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [kind, listener] of Object.entries(value)) element.addEventListener(kind, listener);
    else if (key === "vars") for (const [name, text] of Object.entries(value)) element.style.setProperty(name, text);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Return a function that calls `draw(value)` only when the value differs from the last, so that what a reader holds is left alone. */
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

/** A text field with a label that only screen readers meet. */
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

/** A button that is on or off. */
export function toggle(id, label, title, listener) {
  return h("button", { id, type: "button", class: "toggle", title, "aria-pressed": "false", on: { click: listener } }, label);
}

/** Tell those who do not see the page; said once, and only for what matters. */
export function announce(text) {
  byId("announcer").textContent = text;
}
