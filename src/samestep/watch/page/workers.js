// Each worker's lanes, host, and seconds per step.

import { latest, path } from "./api.js";
import { lineKey, lookAt, partColor, partName, PARTS } from "./colors.js";
import { h, onChange } from "./dom.js";
import { count, duration, several } from "./format.js";
import { framed } from "./frame.js";
import { stepRange } from "./state.js";
import { legend } from "./time.js";
import { rowsAt } from "./tip.js";

const MOST_COLORED = 7;
const MOST_LINES = 32;
const MOST_TIMED = 64; // of more workers, the record has quantiles instead of each worker's seconds
const QUANTILES = [
  "fastest worker", "lower quartile", "median", "upper quartile", "slowest worker",
];

const OWN = " seconds of a step, without waiting for other workers";
const SLOWEST = { color: "var(--bad)", faint: false };
const TITLES = { title: "step", unit: "seconds per step" };

export function workersPanel(root) {
  const map = h("div", { class: "map" });
  const title = "Own seconds per step, without waiting for other workers";
  const frame = framed({ key: "workers", label: title, kind: () => "worker", height: 220,
    axis: "step", tip: (at) => rowsAt(lines, at, () => `step ${count(at)}`, duration) });
  const { chart, canvas, buttons } = frame;
  const head = h("header", { class: "head" }, h("h2", {}, title), buttons);
  const names = h("p", { class: "legend", id: "worker-names" });
  const chartPlace = h("section", {}, head, canvas, names);
  root.append(map, chartPlace);
  const draw = onChange((run) => map.replaceChildren(...content(run)));
  const drawNames = onChange((looks) => names.replaceChildren(...looks.map((look) =>
    h("span", {}, lineKey(look), look.label))));
  let lines = [];
  let slowest;
  const load = latest(({ x, workers, quantiles }) => {
    const spread = quantiles.map((value, index) => ({
      label: QUANTILES[index],
      x,
      value,
      dash: index === 2 ? [] : index % 4 ? [8, 4] : [2, 4],
      color: index === 4 ? SLOWEST.color : "var(--faint)",
    }));
    const isMany = workers.length > MOST_COLORED;
    const other = { color: "var(--faint)", dash: [], faint: slowest !== undefined };
    const lookOf = (rank) =>
      !isMany ? lookAt(rank) : rank === slowest ? { ...other, ...SLOWEST } : other;
    const curves = workers
      .map((value, rank) => ({ rank, x, value, ...lookOf(rank),
        label: `worker ${rank}${rank === slowest ? ", slowest" : ""}` }))
      .filter(({ rank }) => rank < MOST_LINES || rank === slowest);
    const rest = isMany ? [{ ...other, label: "other workers" }] : [];
    const named = [...curves.filter(({ rank }) => !isMany || rank === slowest), ...rest, ...spread];
    drawNames(named.map(({ label, color, dash }) => ({ label, color, dash })));
    const isSlowest = ({ rank }) => Number(rank === slowest);
    lines = [...curves.sort((a, b) => isSlowest(a) - isSlowest(b)), ...spread]; // it is on top
    chart.draw(lines, { ...stepRange(), ...TITLES, zero: true });
  });
  return {
    update({ run }) {
      if (!run) return;
      draw({ workers: run.workers, lanes: run.lanes });
      frame.resize();
      chartPlace.hidden = run.workers.length < 2;
      slowest = run.workers.find(({ lag }) => lag !== null)?.rank;
      const request = path("timing", { id: run.id, ...stepRange(), points: 500 });
      load(request, `${run.step} ${run.attempts} ${slowest}`);
    },
    repaint: () => chart.repaint(),
  };
}

function content({ workers, lanes }) {
  const longest = Math.max(...workers.map(({ seconds }) => seconds ?? 0), 1e-9);
  const timed = workers.length <= MOST_TIMED;
  const hosts = Map.groupBy(workers, ({ host }) => host);
  const title = `${several(workers.length, "worker")}, ${several(lanes, "lane")}`;
  const sections = [...hosts].map(([host, members]) => hostOf(host, members, longest, timed));
  return [h("section", {}, h("h2", {}, title, h("small", {}, OWN)), legend(), ...sections)];
}

function hostOf(host, members, longest, timed) {
  return h("section", { class: "host", "data-host": host },
    h("h3", {}, host, h("small", {}, ` ${several(members.length, "worker")}`)),
    h("ul", { class: "workers" }, members.map((worker) => row(worker, longest, timed))));
}

function row(worker, longest, timed) {
  const [first, end, stride] = worker.lanes;
  const count = Math.max(0, Math.ceil((end - first) / stride));
  const last = first + (count - 1) * stride;
  const every = stride === 1 ? "" : `, every ${stride}`;
  const lanes = count === 1 ? `lane ${first}` : `lanes ${first} to ${last}${every}`;
  const none = timed ? "no step yet" : "";
  const step = PARTS.reduce((sum, part) => sum + (worker.parts[part] ?? 0), 0);
  const ofStep = worker.parts.other === null ? "" : ` of ${duration(step)}`;
  const time = worker.seconds === null ? none : `${duration(worker.seconds)}${ofStep}`;
  const own = ownParts(worker);
  const total = PARTS.reduce((sum, part) => sum + own[part], 0) || 1;
  const parts = PARTS.filter((part) => own[part]).map((part) => {
    const width = `${(100 * own[part]) / total}%`;
    const title = `${partName(part)}: ${duration(own[part])}`;
    return h("i", { vars: { width, background: partColor(part) }, title });
  });
  const where = [`process ${worker.pid}`, (worker.devices ?? []).join(", ")];
  const width = `${(100 * (worker.seconds ?? 0)) / longest}%`;
  return h("li", { "data-worker": worker.rank, "data-slowest": worker.lag !== null },
    h("span", { class: "rank" },
      h("b", {}, `worker ${worker.rank}`), h("small", {}, where.filter(Boolean).join(" · "))),
    h("span", { class: "lanes", role: "img", "aria-label": lanes }, cells(first, count, stride)),
    h("span", { class: "pace" },
      h("span", { class: "parts", "aria-hidden": "true", vars: { width } }, parts)),
    h("span", { class: "seconds" }, time, worker.lag !== null && h("em", {}, "slowest")));
}

/** Return a worker's own seconds by part: in `exchange`, what it did not wait for others. */
function ownParts({ seconds, parts }) {
  const own = Object.fromEntries(PARTS.map((part) => [part, parts[part] ?? 0]));
  const rest = PARTS.reduce((sum, part) => sum + own[part], 0) - own.exchange;
  return { ...own, exchange: Math.max(0, Math.min(own.exchange, (seconds ?? 0) - rest)) };
}

/** Return a box per lane, or one box with their range if they do not fit in a row. */
function cells(first, count, stride) {
  const lane = (index) => String(first + index * stride);
  const to = stride === 1 ? "–" : `, ${lane(1)} … `;
  if (count > 16) return [h("i", {}, `${first}${to}${lane(count - 1)}`)];
  return Array.from({ length: count }, (_, index) => h("i", {}, lane(index)));
}
