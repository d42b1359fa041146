// The panel of curves: what to see of all scalars on top, and a chart each below, in groups by what stands before the slash.

import { Card } from "./card.js";
import { h, onChange, searchBox, toggle } from "./dom.js";
import { count, splitName } from "./format.js";
import { choose, state } from "./state.js";

const STRONGEST = 0.999;

export function curvesPanel(root) {
  const cards = new Map();
  const tools = toolbar();
  const grid = h("div", { class: "groups" });
  root.append(tools.element, grid);
  const watcher = new IntersectionObserver(
    (entries) => entries.forEach((entry) => cards.get(entry.target.dataset.scalar)?.setVisible(entry.isIntersecting)),
    { rootMargin: "200px 0px" },
  );
  const arrange = onChange((names) => place(names, cards, grid, watcher));

  document.addEventListener("emphasize", ({ detail }) => cards.forEach((card) => card.emphasize(detail)));

  return {
    update(view) {
      const all = [...new Set(view.runs.flatMap((row) => view.details.get(row.id)?.scalars.map(({ name }) => name) ?? []))];
      const names = all.filter((name) => matches(name, state.search));
      tools.update(names.length, all.length, view);
      arrange(names);
      cards.forEach((card) => card.show(view));
    },
    repaint: () => cards.forEach((card) => card.chart.repaint()),
  };
}

/** Every word must stand somewhere in the name. */
function matches(name, search) {
  return search
    .toLowerCase()
    .split(/\s+/)
    .every((word) => name.toLowerCase().includes(word));
}

/** Bring cards into the groups of their names; those that stay keep what they have fetched. */
function place(names, cards, grid, watcher) {
  for (const [name, card] of cards) {
    if (names.includes(name)) continue;
    watcher.unobserve(card.element);
    card.destroy();
    cards.delete(name);
  }
  const groups = grouped(names);
  grid.replaceChildren(...[...groups].map(([group, members]) => section(group, members, cards, watcher)));
  if (!names.length)
    grid.append(
      h("p", { class: "empty" }, state.search ? "No scalar has that in its name." : "No scalars yet. They come with the first step."),
    );
}

function grouped(names) {
  const groups = new Map();
  for (const name of names) {
    const [group] = splitName(name);
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  return groups;
}

function section(group, members, cards, watcher) {
  const elements = members.map((name) => {
    if (!cards.has(name)) {
      cards.set(name, new Card(name));
      watcher.observe(cards.get(name).element);
    }
    return cards.get(name).element;
  });
  return h(
    "section",
    { class: "group", "data-group": group },
    group && h("h2", {}, group, h("small", {}, ` ${count(members.length)}`)),
    h("div", { class: "grid" }, elements),
  );
}

function toolbar() {
  const search = searchBox("search", "Search scalars", (text) => choose({ search: text.trim() }));
  const tally = h("span", { class: "tally", id: "tally" });
  const axis = h(
    "div",
    { class: "segments", role: "group", "aria-label": "Axis" },
    ["step", "time"].map((kind) =>
      h(
        "button",
        { type: "button", id: `axis-${kind}`, "aria-pressed": "false", on: { click: () => choose({ axis: kind, from: null, to: null }) } },
        kind === "step" ? "Step" : "Time",
      ),
    ),
  );
  const log = toggle("log", "Log", "Logarithmic scale", () => choose({ log: !state.log }));
  const band = toggle("band", "Band", "From the lowest to the highest worker", () => choose({ band: !state.band }));
  const smooth = h("input", {
    id: "smooth",
    type: "range",
    min: 0,
    max: 100,
    step: 1,
    on: { input: (event) => choose({ smooth: toWeight(event.target.value) }) },
  });
  const amount = h("span", { class: "amount" });
  const zoom = zoomButtons();
  const element = h(
    "div",
    { class: "tools", role: "group", "aria-label": "What the curves show" },
    h("div", { class: "find" }, search, tally),
    axis,
    h("div", { class: "segments" }, log, band),
    h("label", { class: "slider" }, "Smoothing", smooth, amount),
    zoom.element,
  );
  return {
    element,
    update(found, all, view) {
      if (document.activeElement !== search) search.value = state.search;
      tally.textContent = found === all ? `${count(all)}` : `${count(found)} of ${count(all)}`;
      axis.childNodes.forEach((button) => button.setAttribute("aria-pressed", String(button.id === `axis-${state.axis}`)));
      log.setAttribute("aria-pressed", String(state.log));
      band.setAttribute("aria-pressed", String(state.band));
      smooth.value = fromWeight(state.smooth);
      smooth.setAttribute("aria-valuetext", state.smooth ? `weight ${state.smooth}` : "off");
      amount.textContent = state.smooth ? String(state.smooth) : "off";
      zoom.update(view);
    },
  };
}

/** The slider is fine where it matters: half of its way is 0.97. */
const toWeight = (place) => Number((place === "0" ? 0 : Math.min(STRONGEST, 1 - 10 ** (-3 * (place / 100)))).toPrecision(3));
const fromWeight = (weight) => (weight ? Math.round((-100 / 3) * Math.log10(1 - weight)) : 0);

/** Zoom without a mouse or keys, for all charts at once. */
function zoomButtons() {
  let whole = [0, 1];
  const act = (change) => () => {
    const [from, to] = [state.from ?? whole[0], state.to ?? whole[1]];
    choose(change(from, to, to - from));
  };
  const button = (id, label, title, change) =>
    h("button", { id, type: "button", title, "aria-label": title, on: { click: act(change) } }, label);
  const buttons = [
    button("earlier", "‹", "Earlier", (from, to, width) => ({ from: from - width / 2, to: to - width / 2 })),
    button("zoom-in", "+", "Zoom in", (from, to, width) => ({ from: from + width / 4, to: to - width / 4 })),
    button("zoom-out", "−", "Zoom out", (from, to, width) =>
      width * 2 > whole[1] - whole[0] ? { from: null, to: null } : { from: from - width / 2, to: to + width / 2 },
    ),
    button("later", "›", "Later", (from, to, width) => ({ from: from + width / 2, to: to + width / 2 })),
    button("zoom-reset", "All", "Show all", () => ({ from: null, to: null })),
  ];
  return {
    element: h("div", { class: "segments zoom", role: "group", "aria-label": "Zoom" }, buttons),
    update(view) {
      const ends = view.runs.map((row) => (state.axis === "time" ? row.updated - row.started : (row.step ?? 0)));
      whole = [0, Math.max(1, ...ends)];
      buttons.forEach((one) => (one.disabled = state.from === null && one.id !== "zoom-in"));
    },
  };
}
