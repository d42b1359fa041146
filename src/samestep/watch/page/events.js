// Events of a run as marks on a timeline and as a list, and the sinks of its record.

import { h, onChange } from "./dom.js";
import { bytes, count, moment } from "./format.js";

const FIRST = 200; // rows of the list until "Show all" is pressed

export function eventsPanel(root) {
  const hidden = new Set(["snapshot_removed"]); // one for nearly each snapshot
  let all = false;
  let last;
  const again = () => {
    const shown = last.events.filter(({ kind }) => !hidden.has(kind));
    drawLine({ shown, started: last.started, updated: last.updated });
    drawList({ shown, all });
  };
  const line = h("div", { class: "timeline", role: "img" });
  const kinds = h("div", { class: "kinds", role: "group", "aria-label": "Kinds of events" });
  const list = h("ol", { class: "events", id: "events" });
  const on = { click: () => ((all = true), again()) };
  const more = h("button", { class: "quiet", type: "button", hidden: true, on }, "Show all");
  const dropped = h("p", { class: "empty", id: "dropped-events", hidden: true });
  const sinks = h("section", { class: "sinks" });
  root.append(line, kinds, list, more, dropped, sinks);
  const drawLine = onChange(({ shown, started, updated }) => {
    line.replaceChildren(...marks(shown, started, updated));
    const span = `${moment(started)} to ${moment(updated)}`;
    line.setAttribute("aria-label", `${shown.length} events from ${span}, listed below`);
  });
  const drawList = onChange(({ shown }) => {
    const newest = shown.toReversed();
    list.replaceChildren(...newest.slice(0, all ? newest.length : FIRST).map(row));
    more.hidden = all || newest.length <= FIRST;
  });
  const drawDropped = onChange((number) => {
    dropped.hidden = !number;
    dropped.textContent = `${count(number)} older events of frequent kinds are not listed.`;
  });
  const drawKinds = onChange((counts) => {
    const toggles = counts.map(([kind, number]) => kindToggle(kind, number, hidden, again));
    kinds.replaceChildren(...toggles);
  });
  const drawSinks = onChange((shown) => sinks.replaceChildren(...sinkTable(shown)));
  return {
    update({ run }) {
      if (!run) return;
      last = run;
      const kinds = [...Map.groupBy(run.events, ({ kind }) => kind)];
      drawKinds(kinds.map(([kind, events]) => [kind, events.length]).sort());
      drawDropped(run.dropped_events);
      drawSinks({ sinks: run.sinks, images: run.dropped_images });
      again();
    },
  };
}

function marks(events, started, updated) {
  const length = Math.max(1e-6, updated - started);
  const percent = (time) => 100 * Math.min(1, Math.max(0, (time - started) / length));
  const dots = events.map(({ time, kind, severity, text }) =>
    h("i", { "data-severity": severity, title: `${kind}, ${moment(time)}: ${text}`,
      vars: { left: `${percent(time).toFixed(3)}%` } }));
  const ends = [started, updated].map((time) => h("span", {}, moment(time)));
  return [h("div", { class: "rail" }, dots), ...ends];
}

function row({ time, kind, step, text, severity, detail }) {
  const more = detail && [h("summary", {}, "Details"), h("pre", { tabindex: 0 }, detail)];
  const at = step === null || step === undefined ? "" : `step ${count(step)}`;
  return h("li", { "data-kind": kind, "data-severity": severity },
    h("time", { datetime: new Date(time * 1000).toISOString() }, moment(time)),
    h("b", {}, kind.replaceAll("_", " ")), h("span", { class: "at" }, at),
    h("span", { class: "what" }, text, more && h("details", {}, more)));
}

function kindToggle(kind, number, hidden, again) {
  const isShown = () => String(!hidden.has(kind));
  const click = () => {
    if (!hidden.delete(kind)) hidden.add(kind);
    button.setAttribute("aria-pressed", isShown());
    again();
  };
  const state = { "data-kind": kind, "aria-pressed": isShown(), on: { click } };
  const button = h("button", { class: "toggle", type: "button", ...state },
    kind.replaceAll("_", " "), h("small", {}, ` ${count(number)}`));
  return button;
}

function sinkTable({ sinks, images }) {
  if (!sinks.length && !images) return [];
  const line = ({ name, behind_bytes: behind, dropped, error }) =>
    h("li", { "data-sink": name, "data-severity": error || dropped ? "bad" : "good" },
      h("b", {}, name),
      h("span", {}, error ?? (behind ? `${bytes(behind)} behind` : "up to date")),
      h("span", {}, dropped ? `${count(dropped)} dropped` : "nothing dropped"));
  return [
    h("h2", {}, "Sinks of the record"), h("ul", { id: "sinks" }, sinks.map(line)),
    images > 0 && h("p", {}, `${count(images)} images were dropped to keep training from waiting.`),
  ].filter(Boolean);
}
