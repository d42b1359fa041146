// A scalar: its name, newest value, and a chart that loads its data once it is visible.

import { TIME } from "./chart.js";
import { bestOf, clockSpan, count, number, several, splitName } from "./format.js";
import { get, path } from "./api.js";
import { h, headButton } from "./dom.js";
import { framed } from "./frame.js";
import { nearest, rowsAt } from "./tip.js";
import { choose } from "./state.js";

const MANY = 4; // runs; with more, bands and raw values would hide each other
const MANY_GROUPS = 7;
const MOST_LETTERS = 18; // in the title of a small chart's y axis
const FAR_OUT = 3; // interquartile ranges
const SPIKE = 3; // points at most

export class Card {
  constructor(name) {
    this.name = name;
    this.responses = new Map(); // by run or group: key and response
    this.readout = h("span", { class: "readout" });
    this.best = h("span", { class: "best" });
    this.note = h("p", { class: "note", hidden: true });
    this.pin = headButton("Pin", name, "⚲", () => this.togglePin());
    this.title = h("h3", { title: name });
    this.frame = framed({ key: name, label: name, height: 170,
      kind: () => (this.view.lines[0]?.isGroup ? "group" : "run"),
      pointed: (at) => this.showValue(at), tip: (at) => this.rows(at) });
    const { chart, canvas, buttons: [save, enlarge] } = this.frame;
    this.chart = chart;
    this.element = h("article", { class: "card", "data-scalar": name },
      h("header", {}, this.title, this.best, this.readout, save, this.pin, enlarge),
      canvas, this.note);
  }

  /** Set what to show. Nothing is loaded or drawn before the card is visible. */
  show(view) {
    this.large = this.frame.resize();
    this.element.classList.toggle("large", this.large);
    const pinned = view.state.pins.includes(this.name);
    this.pin.setAttribute("aria-pressed", String(pinned));
    this.title.textContent = pinned ? this.name : splitName(this.name)[1];
    this.view = view;
    if (this.visible) this.load();
  }

  togglePin() {
    const { pins } = this.view.state;
    const others = pins.filter((name) => name !== this.name);
    choose({ pins: others.length < pins.length ? others : [...pins, this.name] });
  }

  setVisible(visible) {
    this.visible = visible;
    if (visible && this.view) this.load();
  }

  /** Return the request for a line's points, and a key that changes with it and with the runs. */
  request({ ids, isGroup }) {
    const { state, details } = this.view;
    const isKnown = (id) => state.axis !== "samples" || details.get(id).samples_used !== null;
    const members = ids.filter((id) => this.scalarOf(id) && isKnown(id));
    if (!members.length) return null;
    const shift = state.axis === "time" && !isGroup ? details.get(ids[0]).started : 0;
    const points = this.view.lines.length > MANY ? 300 : this.large ? 2000 : 800;
    const request = path(isGroup ? "group" : "curve", {
      id: isGroup ? members : ids[0],
      name: this.name,
      from: state.from === null ? null : state.from + shift,
      to: state.to === null ? null : state.to + shift,
      points,
      smooth: state.smooth || null,
      x: state.axis,
    });
    const versions = members.map((id) => {
      const { points: size, last } = this.scalarOf(id);
      return `${size} ${last} ${details.get(id).attempts}`;
    });
    return { request, shift, key: `${request} ${versions}` };
  }

  /** Load what changed, and draw. Another choice aborts a load in progress; news wait for it. */
  async load() {
    const { view } = this;
    const requests = view.lines.map((line) => ({ line, ...this.request(line) }));
    const wanted = requests.filter(({ request }) => request);
    const choice = JSON.stringify(wanted.map(({ request }) => request));
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

  async fetch({ line, request, shift, key }, signal) {
    if (this.responses.get(line.id)?.key === key) return;
    const response = await get(request, signal);
    const x = shift ? response.x.map((at) => at - shift) : response.x;
    this.responses.set(line.id, { key, ...response, x });
  }

  draw(view, wanted) {
    const { state } = view;
    const drawnAs = wanted.map(({ key, line }) => [key, line.name, line.look, line.since]);
    const look = JSON.stringify([drawnAs, state.log, state.band, state.run, state.clip]);
    if (look === this.look) return;
    this.look = look;
    const isGrouped = wanted.some(({ line }) => line.isGroup);
    const crowded = wanted.length > (isGrouped ? MANY_GROUPS : MANY);
    this.curves = wanted.map(({ line: { id, ids, name, look: ownLook, isGroup, since } }) => {
      const whole = this.responses.get(id);
      const { x, value, low, high, smooth, runs, spans, points, exact } =
        ownPart(whole, state.axis === "step" ? since : null);
      const banded = state.band && (!crowded || ids.includes(state.run));
      const line = {
        ids, isGroup, label: name, ...ownLook,
        x, value, raw: value, runs, spans, points, exact, edges: [low, high], size: whole.x.length,
      };
      if (smooth && crowded) return { ...line, value: smooth };
      return { ...line, smooth, low: banded ? low : null, high: banded ? high : null };
    });
    const isDrawn = (value) => value !== null && (!state.log || value > 0);
    const isEmpty = !this.curves.some(({ value }) => value.some(isDrawn));
    const reason = state.log ? "No value here is above zero." : "No value here is finite.";
    const clipped = state.clip ? withoutSpikes(this.curves, state, isDrawn) : null;
    this.say(isEmpty ? reason : clipped ? named(clipped.spikes, state.axis) : "");
    const isOneRun = this.curves.length === 1 && !isGrouped && state.axis !== "samples";
    const marks = isOneRun ? view.restarts(this.curves[0].ids[0]) : [];
    const { log, from, to } = state;
    const time = state.axis === "time";
    const title = time ? TIME : state.axis;
    const unit = this.large ? this.name : shortened(splitName(this.name)[1]);
    this.chart.draw(this.curves, { time, log, from, to, marks, title, unit, ...clipped });
    this.showValue(null);
    this.showBest();
    const drawn = this.curves.reduce((sum, curve) => sum + curve.x.length, 0);
    this.element.dataset.points = drawn;
    this.element.dataset.exact = this.curves.every((curve) => curve.exact);
  }

  say(text) {
    this.note.textContent = text;
    this.note.hidden = !text;
  }

  /** Show the value at the cursor next to the name, or the last one of the whole curve. */
  showValue(at) {
    const isChosen = ({ ids }) => ids.includes(this.view.state.run);
    const curve = this.curves?.find(isChosen) ?? this.curves?.[0];
    if (!curve?.x.length) this.readout.textContent = "";
    else if (at === null && curve.isGroup) this.readout.textContent = number(curve.value.at(-1));
    else if (at === null) this.readout.textContent = number(this.scalarOf(curve.ids[0])?.last);
    else this.readout.textContent = number((curve.smooth ?? curve.value)[nearest(curve.x, at)]);
  }

  /** Return the summary of this scalar in a run. */
  scalarOf(id) {
    return this.view.details.get(id)?.scalars.find(({ name }) => name === this.name);
  }

  /** Show the best value of the chosen run's whole curve. */
  showBest() {
    const { state, runs, lines } = this.view;
    const isShown = runs.some(({ id }) => id === state.run);
    const scalar = lines[0]?.isGroup ? null : this.scalarOf(isShown ? state.run : runs[0]?.id);
    const best = scalar ? bestOf(scalar) : null;
    const word = scalar?.goal ? "best" : "highest";
    this.best.textContent = best === null ? "" : `${word} ${number(best)}`;
  }

  /** Return the content of the box at the cursor: one row per line, highest value first. */
  rows(at) {
    const near = ({ x }) => at >= x[0] - 1 && at <= x.at(-1) + 1;
    const where = (x) => h("span", {}, `${placed(x, this.view.state.axis)} · ${this.name}`);
    const edges = (curve, index) => [
      h("span", { class: "edges" }, rangeAt(curve, index)),
      curve.runs && h("span", { class: "edges" }, several(curve.runs[index], "run")),
    ];
    return rowsAt((this.curves ?? []).filter(near), at, where, number, edges);
  }

  /** Highlight one run's curve; null highlights none. */
  emphasize(id) {
    const index = this.curves?.findIndex(({ ids }) => ids.includes(id)) ?? -1;
    if (this.visible) this.chart.emphasize(index);
  }

  destroy() {
    this.abort?.abort();
    this.chart.destroy();
    this.element.remove();
  }
}

const placed = (x, axis) =>
  axis === "step" ? `step ${count(x)}`
    : `after ${axis === "time" ? clockSpan(x) : several(x, "sample")}`;

/** Return the part of a curve from a step on, with the point before it, where the curve begins. */
function ownPart(curve, since) {
  if ((since ?? null) === null) return curve;
  const own = curve.x.findIndex((at) => at >= since);
  const first = Math.max(0, (own < 0 ? curve.x.length : own) - 1);
  return Object.fromEntries(Object.entries(curve).map(([name, value]) =>
    [name, Array.isArray(value) ? value.slice(first) : value]));
}

/** Return a name that fits beside a small chart. */
const shortened = (name) =>
  name.length > MOST_LETTERS ? `${name.slice(0, MOST_LETTERS)}…` : name;

/** Return the range of all steps and workers that a drawn point stands for; empty if it is one. */
function rangeAt({ raw, edges, spans }, index) {
  const isSame = (_, other) => (spans ? spans[other] === spans[index] : other === index);
  const values = [raw, ...edges].flatMap((list) => list?.filter(isSame) ?? []);
  const finite = values.filter((value) => value !== null);
  if (finite.length < 2) return "";
  return `${number(Math.min(...finite))} to ${number(Math.max(...finite))}`;
}

/**
 * Return the `spikes` of the drawn curves, and the `range` of all other values; null without any.
 *
 * A spike is a few points long: it is higher, or lower, than values close before and after it, by
 * more than 3 interquartile ranges of all values ("far out", Tukey 1977). The first values of a
 * curve that descends are none.
 */
function withoutSpikes(curves, { from, to }, isDrawn) {
  const isInside = (x) => from === null || (x >= from && x <= to);
  const points = curves.map(({ x, value, color }) => x.flatMap((at, index) =>
    (isDrawn(value[index]) && isInside(at) ? [{ x: at, y: value[index], color }] : [])));
  const values = points.flat().map(({ y }) => y).sort((a, b) => a - b);
  const quantile = (share) => values[Math.round(share * (values.length - 1))];
  const far = FAR_OUT * (quantile(0.75) - quantile(0.25));
  const isSpike = ({ y }, index, all) => [1, -1].some((sign) => {
    const [before, after] = [Math.max(0, index - SPIKE), index + 1];
    const near = [all.slice(before, index), all.slice(after, after + SPIKE)];
    return near.every((part) => Math.max(...part.map((point) => sign * (y - point.y))) > far);
  });
  const spikes = far > 0 ? points.flatMap((all) => all.filter(isSpike)) : [];
  const rest = new Set(points.flat());
  spikes.forEach((spike) => rest.delete(spike));
  const kept = [...rest].map(({ y }) => y);
  const range = [kept.reduce((a, b) => Math.min(a, b), Infinity),
    kept.reduce((a, b) => Math.max(a, b), -Infinity)];
  const outside = spikes.filter(({ y }) => y < range[0] || y > range[1]);
  return outside.length ? { range, spikes: outside } : null;
}

/** Return a line about the highest of the spikes. */
function named(spikes, axis) {
  const { x, y } = spikes.reduce((a, b) => (Math.abs(b.y) > Math.abs(a.y) ? b : a));
  const at = `${axis === "step" ? "at " : ""}${placed(x, axis)}`;
  const rest = spikes.length > 1 ? `, and ${count(spikes.length - 1)} more points` : "";
  return `Spike beyond the scale: ${number(y)} ${at}${rest}`;
}
