// One scalar: a heading, its newest value, and a chart that fetches what it shows, when it is on the screen.

import { Chart } from "./chart.js";
import { colourOf, dashOf } from "./colours.js";
import { clockSpan, count, number, splitName } from "./format.js";
import { get, path } from "./get.js";
import { h } from "./dom.js";
import { choose } from "./state.js";

const MANY = 4; // runs, beyond which bands and raw values would only hide each other
const MOST_IN_TIP = 12;

export class Card {
  constructor(name) {
    this.name = name;
    this.answers = new Map(); // by run: the question with the run's version, and the answer
    this.readout = h("span", { class: "readout" });
    this.canvas = h("div", { class: "canvas" });
    this.note = h("p", { class: "note", hidden: true });
    this.enlarge = h(
      "button",
      {
        class: "quiet small",
        type: "button",
        title: "Enlarge",
        "aria-label": `Enlarge ${name}`,
        "aria-pressed": "false",
        on: { click: () => choose({ large: this.large ? "" : name }) },
      },
      "⤢",
    );
    this.element = h(
      "article",
      { class: "card", "data-scalar": name },
      h("header", {}, h("h3", { title: name }, splitName(name)[1]), this.readout, this.enlarge),
      this.canvas,
      this.note,
    );
    this.chart = new Chart(this.canvas, {
      label: name,
      height: () => (this.large ? Math.max(240, Math.min(520, innerHeight - 260)) : 170),
      zoomed: (from, to) => choose({ from, to }),
      reset: () => choose({ from: null, to: null }),
      pointed: (at) => this.tell(at),
      tip: (at) => this.rows(at),
    });
  }

  /** Take over what is to be shown; nothing is fetched or drawn before the card is on the screen. */
  show(view) {
    const large = view.state.large === this.name;
    if (large !== this.large) {
      this.large = large;
      this.element.classList.toggle("large", large);
      this.enlarge.setAttribute("aria-pressed", String(large));
      this.chart.plot?.setSize(this.chart.size());
    }
    this.view = view;
    if (this.visible) this.load();
  }

  setVisible(visible) {
    this.visible = visible;
    if (visible && this.view) this.load();
  }

  /** The question for a run's curve, and a key that changes with the question or the run's news. */
  question(row) {
    const { state, details } = this.view;
    const scalar = details.get(row.id)?.scalars.find((one) => one.name === this.name);
    if (!scalar) return null;
    const shift = state.axis === "time" ? row.started : 0;
    const points = this.view.runs.length > MANY ? 300 : this.large ? 2000 : 800;
    const asked = path("curve", {
      id: row.id,
      name: this.name,
      from: state.from === null ? null : state.from + shift,
      to: state.to === null ? null : state.to + shift,
      points,
      smooth: state.smooth || null,
      x: state.axis,
    });
    return { asked, shift, key: `${asked} ${scalar.points} ${scalar.last} ${details.get(row.id).attempts}` };
  }

  /** Fetch what changed, and draw. What the reader chose takes back what was asked before; a run's news wait for the answer under way. */
  async load() {
    const { view } = this;
    const wanted = view.runs.map((row) => ({ row, ...this.question(row) })).filter(({ asked }) => asked);
    const choice = JSON.stringify(wanted.map(({ asked }) => asked));
    if (this.loading && choice === this.choice) {
      this.again = true;
      return;
    }
    this.abort?.abort();
    const abort = (this.abort = new AbortController());
    Object.assign(this, { choice, loading: true, again: false });
    try {
      await Promise.all(wanted.map((one) => this.fetch(one, abort.signal)));
      this.draw(view, wanted);
    } catch (error) {
      if (!abort.signal.aborted) this.say(error.message);
    }
    if (this.abort !== abort) return;
    this.loading = false;
    if (this.again && this.visible) this.load();
  }

  async fetch({ row, asked, shift, key }, signal) {
    if (this.answers.get(row.id)?.key === key) return;
    const answer = await get(asked, signal);
    this.answers.set(row.id, { key, ...answer, x: shift ? answer.x.map((x) => x - shift) : answer.x });
  }

  draw(view, wanted) {
    const { state } = view;
    const look = JSON.stringify([wanted.map(({ key }) => key), state.log, state.band, state.run]);
    if (look === this.look) return;
    this.look = look;
    const crowded = wanted.length > MANY;
    this.curves = wanted.map(({ row }) => {
      const { x, value, low, high, smooth, points, exact } = this.answers.get(row.id);
      const banded = state.band && (!crowded || row.id === state.run);
      const line = {
        id: row.id,
        label: row.name,
        colour: colourOf(row.id),
        dash: dashOf(row.id),
        x,
        value,
        points,
        exact,
        edges: [low, high],
      };
      if (smooth && crowded) return { ...line, value: smooth };
      return { ...line, smooth, low: banded ? low : null, high: banded ? high : null };
    });
    const isDrawn = (value) => value !== null && (!state.log || value > 0);
    const isEmpty = !this.curves.some(({ value }) => value.some(isDrawn));
    this.say(isEmpty ? (state.log ? "No value here is above zero." : "No value here is a finite number.") : "");
    const marks = this.curves.length === 1 ? view.restarts(this.curves[0].id) : [];
    this.chart.draw(this.curves, { time: state.axis === "time", log: state.log, from: state.from, to: state.to, marks });
    this.tell(null);
    const drawn = this.curves.reduce((sum, curve) => sum + curve.x.length, 0);
    this.element.dataset.points = drawn;
    this.element.dataset.exact = this.curves.every((curve) => curve.exact);
  }

  say(text) {
    this.note.textContent = text;
    this.note.hidden = !text;
  }

  /** Beside the name: the value at the cursor, or the newest. */
  tell(at) {
    const curve = this.curves?.find(({ id }) => id === this.view.state.run) ?? this.curves?.[0];
    const index = curve ? (at === null ? curve.x.length - 1 : nearest(curve.x, at)) : -1;
    this.readout.textContent = index < 0 ? "" : number((curve.smooth ?? curve.value)[index]);
  }

  /** The box at the cursor: a row a run, the highest first, as the curves lie. */
  rows(at) {
    const time = this.view.state.axis === "time";
    const found = (this.curves ?? [])
      .filter(({ x }) => x.length && at >= x[0] - 1 && at <= x.at(-1) + 1)
      .map((curve) => {
        const index = nearest(curve.x, at);
        return { curve, index, value: (curve.smooth ?? curve.value)[index] };
      });
    found.sort((a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity));
    const place = found.length ? found[0].curve.x[found[0].index] : at;
    const rows = found
      .slice(0, MOST_IN_TIP)
      .map(({ curve, index, value }) =>
        h(
          "div",
          {},
          h("i", { class: "key", vars: { background: curve.colour } }),
          found.length > 1 && h("span", { class: "who" }, curve.label),
          h("b", {}, number(value)),
          curve.edges[0] && h("span", { class: "edges" }, `${number(curve.edges[0][index])} to ${number(curve.edges[1][index])}`),
        ),
      );
    return [
      h("div", { class: "where" }, time ? `after ${clockSpan(place)}` : `step ${count(place)}`),
      ...rows,
      found.length > MOST_IN_TIP && h("div", { class: "where" }, `and ${found.length - MOST_IN_TIP} more`),
    ].filter(Boolean);
  }

  /** Draw one run's curve strong and the others faint; null draws all alike. */
  emphasize(id) {
    if (this.visible) this.chart.emphasize(this.curves?.findIndex((curve) => curve.id === id) ?? -1);
  }

  destroy() {
    this.abort?.abort();
    this.chart.destroy();
    this.element.remove();
  }
}

/** The place in a sorted list that is nearest to a value. */
export function nearest(list, value) {
  let [low, high] = [0, list.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= value) low = middle;
    else high = middle;
  }
  return low === high || value - list[low] <= list[high] - value ? low : high;
}
