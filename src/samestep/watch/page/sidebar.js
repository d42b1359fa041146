// The list of runs: checkboxes select curves to overlay, names the run shown elsewhere on the page.

import { lineKey, lookOf } from "./colors.js";
import { byId, h, keepFocus, onChange, searchBox } from "./dom.js";
import { family } from "./family.js";
import { count, frequent, number } from "./format.js";
import { choose, state } from "./state.js";

const SEARCHED = 8; // runs, from which a search box is shown

export function sidebar(root) {
  let text = "";
  let last;
  const search = searchBox("run-search", "Search runs", (typed) => {
    text = typed.toLowerCase();
    update(last);
  });
  const list = h("ul", { class: "runs", id: "runs" });
  const click = () => showAll();
  const all = h("button", { class: "quiet small", id: "show-all", type: "button", on: { click } });
  const change = () => choose({ order: order.value });
  const order = h("select", { id: "run-order", "aria-label": "Sort runs", on: { change } },
    ["newest", "score", "shown"].map((name) =>
      h("option", { value: name === "newest" ? "" : name }, name)));
  root.append(h("header", {}, h("h2", {}, "Runs"), order, all), search, list);
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

  const matches = ({ name, id }) => `${name} ${id}`.toLowerCase().includes(text);
  const fitting = () => last.rows.filter(matches);
  const showAll = () => {
    const ids = fitting().map(({ id }) => id);
    const on = ids.every((id) => state.shown.includes(id));
    choose({ shown: on ? [state.run] : [...new Set([...state.shown, ...ids])] });
  };

  const items = new Map();
  const arrange = onChange((ids) => keepFocus(list, () =>
    list.replaceChildren(...ids.map((id) => items.get(id).element))));

  function update(view) {
    last = view;
    byId("frame").classList.toggle("alone", view.rows.length < 2);
    menu.hidden = view.rows.length < 2;
    search.hidden = view.rows.length < SEARCHED;
    view.rows.forEach((row) => {
      if (!items.has(row.id)) items.set(row.id, item(row.id));
      items.get(row.id).update(row);
    });
    order.value = state.order in ORDERS ? state.order : "";
    const rows = (ORDERS[order.value] ?? ((all) => all))(fitting());
    const tree = family(rows);
    arrange(tree.map(([{ id }]) => id));
    tree.forEach(([{ id }, depth, name]) => {
      items.get(id).element.style.setProperty("--depth", String(depth));
      items.get(id).rename(name);
    });
    all.textContent = rows.every(({ id }) => state.shown.includes(id)) ? "Only one" : "Show all";
  }
  return { update };
}

/**
 * Return runs with the best scores first, then those that only have a loss, then others. Values of
 * different names are not compared: the name that most runs have comes first.
 */
function byScore(rows) {
  const named = rows.flatMap(({ principal }) => principal ?? []);
  const names = ["score", "loss"].flatMap((role) =>
    frequent(named.filter((one) => one.role === role).map(({ name }) => name)));
  const place = ({ principal }) => {
    if (!principal || principal.last === null) return [names.length, 0];
    const { name, last, goal } = principal;
    return [names.indexOf(name), goal === "lowest" ? last : -last];
  };
  return rows.toSorted((one, other) => {
    const [a, b] = [place(one), place(other)];
    return a[0] - b[0] || a[1] - b[1];
  });
}

const isHidden = ({ id }) => !state.shown.includes(id);
const byShown = (rows) => rows.toSorted((one, other) => isHidden(one) - isHidden(other));
const ORDERS = { score: byScore, shown: byShown };

function item(id) {
  const box = h("input", { type: "checkbox", on: { change: () => show(id, box.checked) } });
  const click = () => choose({ run: id, shown: [...new Set([...state.shown, id])] });
  const name = h("button", { type: "button", class: "name", on: { click } });
  const note = h("span", { class: "note" });
  const label = h("label", {}, box, lineKey(lookOf(id)));
  const emphasize = (detail) => () =>
    document.dispatchEvent(new CustomEvent("emphasize", { detail }));
  const [enter, leave] = [emphasize(id), emphasize(null)];
  const on = { pointerenter: enter, pointerleave: leave, focusin: enter, focusout: leave };
  const element = h("li", { "data-run": id, on },
    label, h("span", { class: "text" }, name, note));
  const draw = onChange((row) => {
    box.setAttribute("aria-label", `Show curves of ${row.name}`);
    name.title = row.id;
    const badge = h("span", { class: "state", "data-state": row.state }, row.state);
    const { name: scored, last: value } = row.principal ?? {};
    const score = scored && h("b", { title: scored }, number(value));
    const step = `${score ? "@" : "step "}${count(row.step)}`; // as in "best 0.9@15"
    const at = row.share === null ? step : `${Math.floor(100 * row.share)}%`;
    const parts = [badge, score, row.state !== "finished" && at].filter(Boolean);
    const line = h("span", { class: "line" }, parts.flatMap((one) => [" ", one]));
    line.title = line.textContent.trim().replace("@", "at step ");
    note.replaceChildren(line);
    if (row.forked) {
      const title = `from ${row.forked.trunk}`;
      note.append(" ", h("span", { title }, `forked at ${count(row.forked.step)}`));
    }
    if (row.nonfinite.length) {
      note.append(" ", h("span", { class: "state", "data-state": "nonfinite" }, "not finite"));
    }
  });
  const drawKey = onChange((look) => label.lastChild.replaceWith(lineKey(look)));
  return {
    element,
    rename: onChange((text) => (name.textContent = text)),
    update(row) {
      draw(row);
      drawKey(lookOf(id));
      box.checked = state.shown.includes(id);
      element.toggleAttribute("data-chosen", id === state.run);
      name.setAttribute("aria-current", String(id === state.run));
    },
  };
}

/** Show or hide the curves of a run. */
export function show(id, on) {
  const shown = on ? [...state.shown, id] : state.shown.filter((other) => other !== id);
  const left = shown.length ? shown : [id]; // always show at least one
  choose({ shown: left, run: left.includes(state.run) ? state.run : left[0] });
}
