// What happened to a run, as marks along its time and as a list, and where its record went.

import { h, onChange } from "./dom.js";
import { bytes, count, moment } from "./format.js";

const FIRST = 200; // rows of the list before the reader asks for all

export function eventsPanel(root) {
  const hidden = new Set();
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
  const more = h("button", { class: "quiet", type: "button", hidden: true, on: { click: () => ((all = true), again()) } }, "Show all");
  const sinks = h("section", { class: "sinks" });
  root.append(line, kinds, list, more, sinks);
  const drawLine = onChange(({ shown, started, updated }) => {
    line.replaceChildren(...marks(shown, started, updated));
    line.setAttribute("aria-label", `${shown.length} events from ${moment(started)} to ${moment(updated)}; the list below has them.`);
  });
  const drawList = onChange(({ shown }) => {
    const newest = shown.toReversed();
    list.replaceChildren(...newest.slice(0, all ? newest.length : FIRST).map(row));
    more.hidden = all || newest.length <= FIRST;
  });
  const drawKinds = onChange((counts) => kinds.replaceChildren(...counts.map(([kind, number]) => kindToggle(kind, number, hidden, again))));
  const drawSinks = onChange((told) => sinks.replaceChildren(...sinkTable(told)));
  return {
    update({ run }) {
      if (!run) return;
      last = run;
      const counts = new Map();
      run.events.forEach(({ kind }) => counts.set(kind, (counts.get(kind) ?? 0) + 1));
      drawKinds([...counts].sort(([a], [b]) => (a < b ? -1 : 1)));
      drawSinks({ sinks: run.sinks, images: run.dropped_images });
      again();
    },
  };
}

function marks(events, started, updated) {
  const length = Math.max(1e-6, updated - started);
  const dots = events.map(({ time, kind, tone, text }) =>
    h("i", {
      "data-tone": tone,
      title: `${kind}, ${moment(time)}: ${text}`,
      vars: { left: `${(100 * Math.min(1, Math.max(0, (time - started) / length))).toFixed(3)}%` },
    }),
  );
  return [h("div", { class: "rail" }, dots), h("span", {}, moment(started)), h("span", {}, moment(updated))];
}

function row({ time, kind, step, text, tone, detail }) {
  return h(
    "li",
    { "data-kind": kind, "data-tone": tone },
    h("time", { datetime: new Date(time * 1000).toISOString() }, moment(time)),
    h("b", {}, kind.replaceAll("_", " ")),
    h("span", { class: "at" }, step === null || step === undefined ? "" : `step ${count(step)}`),
    h("span", { class: "what" }, text, detail && h("details", {}, h("summary", {}, "Details"), h("pre", { tabindex: 0 }, detail))),
  );
}

function kindToggle(kind, number, hidden, again) {
  const button = h(
    "button",
    {
      class: "toggle",
      type: "button",
      "data-kind": kind,
      "aria-pressed": String(!hidden.has(kind)),
      on: {
        click: () => {
          if (!hidden.delete(kind)) hidden.add(kind);
          button.setAttribute("aria-pressed", String(!hidden.has(kind)));
          again();
        },
      },
    },
    kind.replaceAll("_", " "),
    h("small", {}, ` ${count(number)}`),
  );
  return button;
}

function sinkTable({ sinks, images }) {
  if (!sinks.length && !images) return [];
  return [
    h("h2", {}, "Where the record goes"),
    h(
      "ul",
      { id: "sinks" },
      sinks.map(({ name, behind_bytes: behind, dropped, error }) =>
        h(
          "li",
          { "data-sink": name, "data-tone": error ? "bad" : dropped ? "bad" : "good" },
          h("b", {}, name),
          h("span", {}, error ?? (behind ? `${bytes(behind)} to go` : "up to date")),
          h("span", {}, dropped ? `${count(dropped)} dropped` : "nothing dropped"),
        ),
      ),
    ),
    images > 0 && h("p", {}, `${count(images)} images were dropped, so that training did not wait for them.`),
  ].filter(Boolean);
}
