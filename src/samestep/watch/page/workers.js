// Who carries which lanes, on which host, and how long a step takes each.

import { Chart } from "./chart.js";
import { partColour, PARTS } from "./colours.js";
import { h, onChange } from "./dom.js";
import { duration, several } from "./format.js";
import { following, path } from "./get.js";
import { legend } from "./time.js";
import { choose, stepRange } from "./state.js";

const MOST_LINES = 32;

export function workersPanel(root) {
  const map = h("div", { class: "map" });
  const canvas = h("div", { class: "canvas" });
  const note = h("p", { class: "note" }, "The slowest worker is drawn strong, all others faint.");
  const chartPlace = h("section", {}, h("h2", {}, "Seconds a step, by worker"), canvas, note);
  root.append(map, chartPlace);
  const chart = new Chart(canvas, {
    label: "Seconds a step, by worker",
    height: () => 220,
    zoomed: (from, to) => choose({ from, to, axis: "step" }),
    reset: () => choose({ from: null, to: null }),
  });
  const draw = onChange((run) => map.replaceChildren(...content(run)));
  let slowest;
  const load = following(({ x, workers }) => {
    const order = workers
      .map((value, rank) => ({ rank, value }))
      .filter(({ rank }) => rank < MOST_LINES || rank === slowest)
      .sort((a, b) => (a.rank === slowest) - (b.rank === slowest)); // the last is drawn on top
    const look = (rank) => (rank === slowest ? { colour: "--bad" } : { colour: "--faint", faint: slowest !== undefined });
    chart.draw(
      order.map(({ rank, value }) => ({ label: `worker ${rank}`, x, value, dash: [], ...look(rank) })),
      { ...stepRange(), zero: true },
    );
  });
  return {
    update({ run }) {
      if (!run) return;
      draw({ workers: run.workers, lanes: run.lanes });
      chartPlace.hidden = run.workers.length < 2;
      slowest = run.workers.find((worker) => worker.slowest)?.rank;
      note.hidden = slowest === undefined;
      load(path("timing", { id: run.id, ...stepRange(), points: 500 }), `${run.step} ${run.attempts} ${slowest}`);
    },
    repaint: () => chart.repaint(),
  };
}

function content({ workers, lanes }) {
  const longest = Math.max(...workers.map(({ seconds }) => seconds ?? 0), 1e-9);
  const hosts = new Map();
  workers.forEach((worker) => hosts.set(worker.host, [...(hosts.get(worker.host) ?? []), worker]));
  return [
    h(
      "section",
      {},
      h("h2", {}, `${several(workers.length, "worker")}, ${several(lanes, "lane")}`),
      legend(),
      ...[...hosts].map(([host, members]) => hostOf(host, members, longest)),
    ),
  ];
}

function hostOf(host, members, longest) {
  return h(
    "section",
    { class: "host", "data-host": host },
    h("h3", {}, host, h("small", {}, ` ${several(members.length, "worker")}`)),
    h(
      "ul",
      { class: "workers" },
      members.map((worker) => row(worker, longest)),
    ),
  );
}

function row(worker, longest) {
  const [first, end] = worker.lanes;
  const time = worker.seconds === null ? "no step yet" : `${duration(worker.seconds)} a step`;
  const parts = PARTS.filter((part) => worker.parts?.[part]).map((part) =>
    h("i", {
      vars: { width: `${(100 * worker.parts[part]) / total(worker.parts)}%`, background: partColour(part) },
      title: `${part}: ${duration(worker.parts[part])}`,
    }),
  );
  return h(
    "li",
    { "data-worker": worker.rank, "data-slowest": worker.slowest },
    h(
      "span",
      { class: "rank" },
      h("b", {}, `worker ${worker.rank}`),
      h("small", {}, [`process ${worker.pid}`, [].concat(worker.devices ?? []).join(", ")].filter(Boolean).join(" · ")),
    ),
    h(
      "span",
      { class: "lanes", role: "img", "aria-label": end - first === 1 ? `lane ${first}` : `lanes ${first} to ${end - 1}` },
      cells(first, end),
    ),
    h(
      "span",
      { class: "pace" },
      h("span", { class: "parts", "aria-hidden": "true", vars: { width: `${(100 * (worker.seconds ?? 0)) / longest}%` } }, parts),
    ),
    h("span", { class: "seconds" }, time, worker.slowest && h("em", {}, "slowest")),
  );
}

/** A box a lane; beyond what a row holds, the range says it. */
function cells(first, end) {
  if (end - first > 16) return [h("i", {}, `${first}–${end - 1}`)];
  return Array.from({ length: end - first }, (_, index) => h("i", {}, String(first + index)));
}

const total = (parts) => PARTS.reduce((sum, part) => sum + (parts[part] ?? 0), 0) || 1;
