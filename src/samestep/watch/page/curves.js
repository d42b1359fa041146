// The panel of curves: controls for all charts, and one chart per scalar, grouped by name prefix.

import { Card } from "./card.js";
import { lineKey } from "./colors.js";
import { h, offering, onChange, searchBox, toggle } from "./dom.js";
import { count, several, splitName } from "./format.js";
import { histograms } from "./histograms.js";
import { choose, state } from "./state.js";

const STRONGEST = 0.999;
const MANY = 4; // runs that are named

export function curvesPanel(root) {
  const cards = new Map();
  const tools = toolbar();
  const grid = h("div", { class: "groups" });
  const counts = histograms();
  // of runs where their list is folded away, and of groups
  const legend = h("p", { class: "legend", "aria-label": "Runs" });
  const same = h("p", { class: "note", id: "identical", hidden: true });
  root.append(tools.element, legend, same, grid, counts.element);
  const drawSame = onChange((texts) => {
    same.textContent = texts.join(" ");
    same.hidden = !texts.length;
  });
  const drawLegend = onChange((lines) => {
    legend.classList.toggle("narrow", !lines.some(({ isGroup }) => isGroup));
    legend.replaceChildren(...(lines.length < 2 ? [] : lines).map(({ look, name, count: runs }) =>
      h("span", {}, lineKey(look), name, runs && h("small", {}, runs))));
  });
  const reveal = ({ target, isIntersecting }) =>
    cards.get(target.dataset.scalar)?.setVisible(isIntersecting);
  const watcher = new IntersectionObserver((entries) => entries.forEach(reveal),
    { rootMargin: "200px 0px" });
  const arrange = onChange(({ names, pins }) => place(names, pins, cards, grid, watcher));

  document.addEventListener("emphasize", ({ detail }) =>
    cards.forEach((card) => card.emphasize(detail)));

  return {
    update(view) {
      const scalars = view.runs.flatMap((row) => view.details.get(row.id)?.scalars ?? []);
      const all = [...new Set(scalars.map(({ name }) => name))];
      const names = all.filter((name) => matches(name, state.search));
      tools.update(names.length, all.length, view);
      arrange({ names, pins: state.pins.filter((name) => names.includes(name)) });
      drawLegend(view.lines);
      drawSame(identical(view.runs.flatMap(({ id }) => view.details.get(id) ?? [])));
      cards.forEach((card) => card.show(view));
      counts.update(view);
    },
    repaint() {
      cards.forEach((card) => card.chart.repaint());
      counts.repaint();
    },
  };
}

/** Return a sentence for each set of runs whose loss or score, and most scalars, are the same. */
function identical(runs) {
  const all = runs.flatMap((run) => run.scalars.map(({ name, digest }) => ({ run, name, digest })));
  const groups = [...Map.groupBy(all, ({ name, digest }) => `${digest} ${name}`).values()]
    .map((same) => ({ name: same[0].name, runs: same.map(({ run }) => run) }));
  const sets = new Map(groups.map((one) => [one.runs.map(({ id }) => id).join("\n"), one.runs]));
  return [...sets.values()].flatMap((set) => {
    const [one, ...others] = set;
    const names = groups.filter((group) => set.every((run) => group.runs.includes(run)))
      .map(({ name }) => name);
    const shared = one.scalars.filter(({ name }) =>
      others.every(({ scalars }) => scalars.some((scalar) => scalar.name === name))).length;
    const isMain = Object.values(one.principals).some((name) => names.includes(name));
    if (!others.length || !isMain || 2 * names.length <= shared) return [];
    const part = shared === names.length ? "all" : `${count(names.length)} of`;
    const first = set.slice(0, others.length < MANY ? -1 : MANY);
    const last = others.length < MANY ? others.at(-1).name
      : several(others.length + 1 - MANY, "other run");
    const who = `${first.map(({ name }) => name).join(", ")} and ${last}`;
    return [`${who} have identical values in ${part} ${several(shared, "scalar")}.`];
  });
}

/** Return whether a name contains every word of the search. */
const matches = (name, search) =>
  search.toLowerCase().split(/\s+/).every((word) => name.toLowerCase().includes(word));

/** Arrange cards in groups, pinned ones first. Existing cards keep their data and the focus. */
function place(names, pins, cards, grid, watcher) {
  for (const [name, card] of cards) {
    if (names.includes(name)) continue;
    watcher.unobserve(card.element);
    card.destroy();
    cards.delete(name);
  }
  const { activeElement: active } = document;
  const preventScroll = !active.matches(":focus-visible"); // a mouse stays where it is
  const others = names.filter((name) => !pins.includes(name));
  const groups = [...Map.groupBy(others, (name) => splitName(name)[0])];
  if (pins.length) groups.unshift(["Pinned", pins]);
  const sections = groups.map(([group, members]) => section(group, members, cards, watcher));
  grid.replaceChildren(...sections);
  if (grid.contains(active)) active.focus({ preventScroll });
  const text = state.search ? "No matching scalars." : "No scalars yet.";
  if (!names.length) grid.append(h("p", { class: "empty" }, text));
}

function section(group, members, cards, watcher) {
  const elements = members.map((name) => {
    if (!cards.has(name)) {
      cards.set(name, new Card(name));
      watcher.observe(cards.get(name).element);
    }
    return cards.get(name).element;
  });
  return h("section", { class: "group", "data-group": group },
    group && h("h2", {}, group, h("small", {}, ` ${count(members.length)}`)),
    h("div", { class: "grid" }, elements));
}

function toolbar() {
  const search = searchBox("search", "Search scalars", (text) => choose({ search: text.trim() }));
  const tally = h("span", { class: "tally", id: "tally" });
  const axisButton = (kind, label) => {
    const click = () => choose({ axis: kind, from: null, to: null });
    const id = `axis-${kind}`;
    return h("button", { type: "button", id, "aria-pressed": "false", on: { click } }, label);
  };
  const axis = h("div", { class: "segments", role: "group", "aria-label": "Axis" },
    axisButton("step", "Step"), axisButton("time", "Time"), axisButton("samples", "Samples"));
  const group = h("select", { id: "group", title: "Draw the mean of the runs with the same value",
    on: { change: () => choose({ group: group.value }) } });
  const groups = h("label", {}, "Group by ", group);
  const offer = offering(group, "–");
  const log = toggle("log", "Log", "Logarithmic scale", () => choose({ log: !state.log }));
  const title = "From the lowest to the highest worker, or run of a group";
  const band = toggle("band", "Band", title, () => choose({ band: !state.band }));
  const all = "Mark spikes at the edge, so that they do not flatten the rest";
  const clip = toggle("clip", "Clip spikes", all, () => choose({ clip: !state.clip }));
  const input = (event) => choose({ smooth: toWeight(event.target.value) });
  const smooth = h("input",
    { id: "smooth", type: "range", min: 0, max: 100, step: 1, on: { input } });
  const amount = h("span", { class: "amount" });
  const zoom = zoomButtons();
  const element = h("div", { class: "tools", role: "group", "aria-label": "Curve options" },
    h("div", { class: "find" }, search, tally), axis,
    h("div", { class: "segments" }, log, band, clip),
    h("label", { class: "slider" }, "Smoothing", smooth, amount), groups, zoom.element);
  return {
    element,
    update(found, all, view) {
      if (document.activeElement !== search) search.value = state.search;
      tally.textContent = found === all ? `${count(all)}` : `${count(found)} of ${count(all)}`;
      axis.childNodes.forEach((button) =>
        button.setAttribute("aria-pressed", String(button.id === `axis-${state.axis}`)));
      [log, band, clip].forEach((button) =>
        button.setAttribute("aria-pressed", String(state[button.id])));
      smooth.value = fromWeight(state.smooth);
      smooth.setAttribute("aria-valuetext", state.smooth ? `weight ${state.smooth}` : "off");
      amount.textContent = state.smooth ? String(state.smooth) : "off";
      axis.lastChild.hidden = state.axis !== "samples" && !view.runs.some(({ id }) =>
        (view.details.get(id)?.samples_used ?? null) !== null);
      groups.hidden = !view.groupable.length;
      offer(view.groupable);
      group.value = view.groupable.includes(state.group) ? state.group : "";
      zoom.update(view);
    },
  };
}

/** The slider has a finer scale for large weights: its middle is 0.97. */
const toWeight = (place) =>
  place === "0" ? 0 : Number(Math.min(STRONGEST, 1 - 10 ** (-3 * (place / 100))).toPrecision(3));
const fromWeight = (weight) => (weight ? Math.round((-100 / 3) * Math.log10(1 - weight)) : 0);

/** Buttons that zoom all charts. */
function zoomButtons() {
  let whole = [0, 1];
  const act = (change) => () => {
    const [from, to] = [state.from ?? whole[0], state.to ?? whole[1]];
    choose(change(from, to, to - from));
  };
  const button = (id, label, title, change) => {
    const on = { click: act(change) };
    return h("button", { id, type: "button", title, "aria-label": title, on }, label);
  };
  const all = () => ({ from: null, to: null });
  const shifted = (by) => (from, to, width) => ({ from: from + by * width, to: to + by * width });
  const grown = (by) => (from, to, width) => ({ from: from - by * width, to: to + by * width });
  const isWider = (width) => width * 2 > whole[1] - whole[0];
  const zoomOut = (...range) => (isWider(range[2]) ? all() : grown(0.5)(...range));
  const buttons = [
    button("earlier", "‹", "Earlier", shifted(-0.5)),
    button("zoom-in", "+", "Zoom in", grown(-0.25)),
    button("zoom-out", "−", "Zoom out", zoomOut),
    button("later", "›", "Later", shifted(0.5)),
    button("zoom-reset", "All", "Show all", all),
  ];
  return {
    element: h("div", { class: "segments zoom", role: "group", "aria-label": "Zoom" }, buttons),
    update(view) {
      const length = ({ id, updated, started, step }) => ({ step: step ?? 0,
        time: updated - started, samples: view.details.get(id)?.samples_used ?? 0 })[state.axis];
      const ends = view.runs.map(length);
      whole = [0, Math.max(1, ...ends)];
      buttons.forEach((one) => (one.disabled = state.from === null && one.id !== "zoom-in"));
    },
  };
}
