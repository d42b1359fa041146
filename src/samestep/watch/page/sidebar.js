// The runs: which are laid over each other (box), and which one the rest of the page tells of (name).

import { colourOf, dashOf } from "./colours.js";
import { byId, h, onChange, searchBox } from "./dom.js";
import { count } from "./format.js";
import { choose, state } from "./state.js";

const SEARCHED = 8; // runs, from which on a search box helps

export function sidebar(root) {
  let text = "";
  let last;
  const search = searchBox("run-search", "Search runs", (typed) => {
    text = typed.toLowerCase();
    update(last);
  });
  const list = h("ul", { class: "runs", id: "runs" });
  const all = h("button", { class: "quiet small", id: "show-all", type: "button", on: { click: () => showAll() } });
  root.append(h("header", {}, h("h2", {}, "Runs"), all), search, list);
  const menu = byId("menu");
  const open = (on) => {
    document.body.classList.toggle("menu-open", on);
    menu.setAttribute("aria-expanded", String(on));
  };
  menu.addEventListener("click", () => open(!document.body.classList.contains("menu-open")));
  root.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    open(false);
    menu.focus();
  });

  const fitting = () => last.rows.filter(({ name, id }) => `${name} ${id}`.toLowerCase().includes(text));
  const showAll = () => {
    const ids = fitting().map(({ id }) => id);
    const on = ids.every((id) => state.shown.includes(id));
    choose({ shown: on ? [state.run] : [...new Set([...state.shown, ...ids])] });
  };

  const items = new Map();
  const arrange = onChange((ids) => list.replaceChildren(...ids.map((id) => items.get(id).element)));

  function update(view) {
    last = view;
    byId("frame").classList.toggle("alone", view.rows.length < 2);
    menu.hidden = view.rows.length < 2;
    search.hidden = view.rows.length < SEARCHED;
    view.rows.forEach((row) => {
      if (!items.has(row.id)) items.set(row.id, item(row.id));
      items.get(row.id).update(row);
    });
    const rows = fitting();
    arrange(rows.map(({ id }) => id));
    all.textContent = rows.every(({ id }) => state.shown.includes(id)) ? "Only one" : "Show all";
  }
  return { update };
}

function item(id) {
  const box = h("input", { type: "checkbox", on: { change: () => show(id, box.checked) } });
  const name = h("button", {
    type: "button",
    class: "name",
    on: { click: () => choose({ run: id, shown: state.shown.includes(id) ? state.shown : [...state.shown, id] }) },
  });
  const note = h("span", { class: "note" });
  const key = h("i", { class: "key" });
  const emphasize = (detail) => () => document.dispatchEvent(new CustomEvent("emphasize", { detail }));
  const follow = { pointerenter: emphasize(id), pointerleave: emphasize(null), focusin: emphasize(id), focusout: emphasize(null) };
  const element = h("li", { "data-run": id, on: follow }, h("label", {}, box, key), h("span", { class: "text" }, name, note));
  const draw = onChange((row) => {
    box.setAttribute("aria-label", `Show curves of ${row.name}`);
    name.textContent = row.name;
    name.title = row.id;
    note.replaceChildren(h("span", { class: "state", "data-state": row.state }, row.state), ` step ${count(row.step)}`);
    key.style.setProperty("--colour", colourOf(id));
    key.dataset.dash = dashOf(id).join(" ");
  });
  return {
    element,
    update(row) {
      draw(row);
      box.checked = state.shown.includes(id);
      element.toggleAttribute("data-chosen", id === state.run);
      name.setAttribute("aria-current", String(id === state.run));
    },
  };
}

function show(id, on) {
  const shown = on ? [...state.shown, id] : state.shown.filter((other) => other !== id);
  const left = shown.length ? shown : [id]; // one stays, so that there is something to see
  choose({ shown: left, run: left.includes(state.run) ? state.run : left[0] });
}
