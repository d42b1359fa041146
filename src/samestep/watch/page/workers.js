// Each worker's lanes, host, and seconds per step.

import { latest, path } from "./api.js";
import { Chart } from "./chart.js";
import { partColor, PARTS } from "./colors.js";
import { h, onChange } from "./dom.js";
import { duration, several } from "./format.js";
import { choose, stepRange } from "./state.js";
import { legend } from "./time.js";

const MOST_LINES = 32;
const MOST_TIMED = 64; // of more workers, the record has quantiles instead of each worker's seconds
const QUANTILES = [
  "fastest worker", "lower quartile", "median", "upper quartile", "slowest worker",
];

const TITLES = { title: "step", unit: "seconds per step" };

export function workersPanel(root) {
  const map = h("div", { class: "map" });
  const canvas = h("div", { class: "canvas" });
  const note = h("p", { class: "note" }, "The slowest worker is highlighted, others are faint.");
  const chartPlace = h("section", {}, h("h2", {}, "Seconds per step, by worker"), canvas, note);
  root.append(map, chartPlace);
  const chart = new Chart(canvas, {
    label: "Seconds per step, by worker",
    height: () => 220,
    zoomed: (from, to) => choose({ from, to, axis: "step" }),
    reset: () => choose({ from: null, to: null }),
  });
  const draw = onChange((run) => map.replaceChildren(...content(run)));
  let slowest;
  const load = latest(({ x, workers, quantiles }) => {
    const spread = quantiles.map((value, index) => ({
      label: QUANTILES[index],
      x,
      value,
      dash: index === 2 ? [] : [4, 4],
      color: index === 4 ? "--bad" : "--faint",
    }));
    const faint = { color: "--faint", faint: slowest !== undefined };
    const curves = workers
      .map((value, rank) => ({ rank, value }))
      .filter(({ rank }) => rank < MOST_LINES || rank === slowest)
      .sort((a, b) => (a.rank === slowest) - (b.rank === slowest)) // the last is drawn on top
      .map(({ rank, value }) => {
        const look = rank === slowest ? { color: "--bad" } : faint;
        return { label: `worker ${rank}`, x, value, dash: [], ...look };
      });
    chart.draw([...curves, ...spread], { ...stepRange(), ...TITLES, zero: true });
  });
  return {
    update({ run }) {
      if (!run) return;
      draw({ workers: run.workers, lanes: run.lanes });
      chartPlace.hidden = run.workers.length < 2;
      slowest = run.workers.find((worker) => worker.slowest)?.rank;
      note.hidden = slowest === undefined;
      const request = path("timing", { id: run.id, ...stepRange(), points: 500 });
      load(request, `${run.step} ${run.attempts} ${slowest}`);
    },
    repaint: () => chart.repaint(),
  };
}

function content({ workers, lanes }) {
  const longest = Math.max(...workers.map(({ seconds }) => seconds ?? 0), 1e-9);
  const timed = workers.length <= MOST_TIMED;
  const hosts = new Map();
  workers.forEach((worker) => hosts.set(worker.host, [...(hosts.get(worker.host) ?? []), worker]));
  const title = `${several(workers.length, "worker")}, ${several(lanes, "lane")}`;
  const sections = [...hosts].map(([host, members]) => hostOf(host, members, longest, timed));
  return [h("section", {}, h("h2", {}, title), legend(), ...sections)];
}

function hostOf(host, members, longest, timed) {
  return h("section", { class: "host", "data-host": host },
    h("h3", {}, host, h("small", {}, ` ${several(members.length, "worker")}`)),
    h("ul", { class: "workers" }, members.map((worker) => row(worker, longest, timed))));
}

function row(worker, longest, timed) {
  const [first, end] = worker.lanes;
  const lanes = end - first === 1 ? `lane ${first}` : `lanes ${first} to ${end - 1}`;
  const none = timed ? "no step yet" : "";
  const time = worker.seconds === null ? none : `${duration(worker.seconds)} per step`;
  const total = PARTS.reduce((sum, part) => sum + (worker.parts[part] ?? 0), 0) || 1;
  const parts = PARTS.filter((part) => worker.parts[part]).map((part) => {
    const width = `${(100 * worker.parts[part]) / total}%`;
    const title = `${part}: ${duration(worker.parts[part])}`;
    return h("i", { vars: { width, background: partColor(part) }, title });
  });
  const where = [`process ${worker.pid}`, (worker.devices ?? []).join(", ")];
  const width = `${(100 * (worker.seconds ?? 0)) / longest}%`;
  return h("li", { "data-worker": worker.rank, "data-slowest": worker.slowest },
    h("span", { class: "rank" },
      h("b", {}, `worker ${worker.rank}`), h("small", {}, where.filter(Boolean).join(" · "))),
    h("span", { class: "lanes", role: "img", "aria-label": lanes }, cells(first, end)),
    h("span", { class: "pace" },
      h("span", { class: "parts", "aria-hidden": "true", vars: { width } }, parts)),
    h("span", { class: "seconds" }, time, worker.slowest && h("em", {}, "slowest")));
}

/** Return a box per lane, or one box with their range if they do not fit in a row. */
function cells(first, end) {
  if (end - first > 16) return [h("i", {}, `${first}–${end - 1}`)];
  return Array.from({ length: end - first }, (_, index) => h("i", {}, String(first + index)));
}
