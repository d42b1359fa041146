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

/**
 * Call `draw`, which replaces elements within `root`, and give the focus back: to the same control,
 * or to the one at its place in what stands for the same run or column.
 */
export function keepFocus(root, draw) {
  const { activeElement: active } = document;
  const had = root.contains(active);
  const controls = (owner) => [...owner.querySelectorAll("button, input")];
  const owner = had && active.closest("[data-run], [data-column]");
  const place = owner && controls(owner).indexOf(active);
  draw();
  if (!had) return;
  const isSame = ({ dataset: { run, column } }) =>
    run === owner.dataset.run && column === owner.dataset.column;
  const again = () => {
    const found = [...root.querySelectorAll("[data-run], [data-column]")].find(isSame);
    return found && (place < 0 ? found : controls(found)[place]);
  };
  const next = active.isConnected ? active : owner && again();
  next?.focus({ preventScroll: true }); // news do not move the page
}

const LONGEST_PRESS = 5000; // milliseconds; not every press has an end that is reported
let pressed = Promise.resolve();
let release;

/** Wait until no button is pressed: a click is lost if its element is replaced before its end. */
export const released = () => pressed;

addEventListener("pointerdown", () => {
  pressed = new Promise((resolve) => {
    release = resolve;
    setTimeout(resolve, LONGEST_PRESS);
  });
}, true);
for (const kind of ["pointerup", "pointercancel"]) {
  addEventListener(kind, () => setTimeout(() => release?.()), true); // after the click
}

/** Return a text field whose label is for screen readers only. */
export function searchBox(id, label, listener) {
  const labels = { placeholder: label, "aria-label": label };
  const on = { input: (event) => listener(event.target.value) };
  return h("input",
    { id, type: "search", ...labels, autocomplete: "off", spellcheck: "false", on });
}

/** Return a function that offers names in a list, after the words for none of them. */
export const offering = (select, none) => onChange((names) => {
  const option = (name) => h("option", { value: name }, name);
  select.replaceChildren(...(none ? [h("option", { value: "" }, none)] : []), ...names.map(option));
});

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
