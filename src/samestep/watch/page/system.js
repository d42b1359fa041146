// The use of each host: CPU, memory, GPUs, disk and network, one line per host or GPU.

import { latest, path } from "./api.js";
import { TIME } from "./chart.js";
import { lookAt } from "./colors.js";
import { h, onChange } from "./dom.js";
import { clockSpan, number } from "./format.js";
import { framed } from "./frame.js";
import { timeRange } from "./state.js";
import { rowsAt } from "./tip.js";

const PERCENT = [["%", 1]];
const THROUGHPUT = [["GB/s", 1e9], ["MB/s", 1e6], ["KB/s", 1e3], ["B/s", 1]];
const CHARTS = {
  cpu: ["CPU, all cores", PERCENT],
  memory: ["Memory", PERCENT],
  gpu: ["GPU", PERCENT],
  gpu_memory: ["GPU memory", PERCENT],
  disk_read: ["Read from disks", THROUGHPUT],
  disk_written: ["Written to disks", THROUGHPUT],
  network_received: ["Received from the network", THROUGHPUT],
  network_sent: ["Sent to the network", THROUGHPUT],
};
const MOST_LINES = 32;

export function systemPanel(root) {
  const grid = h("div", { class: "grid" });
  const empty = h("p", { class: "empty" },
    "No samples yet. The record has one every few seconds, unless system_every is none.");
  root.append(grid, empty);
  const charts = new Map();
  const arrange = onChange((names) => {
    names.filter((name) => !charts.has(name)).forEach((name) => charts.set(name, chartOf(name)));
    grid.replaceChildren(...names.map((name) => charts.get(name).element));
  });
  let started = 0;
  let shown = { curves: [] };
  const draw = () => {
    const kinds = Map.groupBy(shown.curves, ({ name }) => name.split(" ")[0]);
    const names = Object.keys(CHARTS).filter((name) => kinds.has(name));
    empty.hidden = names.length > 0;
    arrange(names);
    names.forEach((name) => charts.get(name).draw(kinds.get(name), started));
    charts.forEach((one) => one.resize());
  };
  const load = latest((response) => {
    shown = response;
    draw();
  });
  return {
    update({ run }) {
      if (!run) return;
      started = run.started;
      charts.forEach((one) => one.resize());
      const { from, to } = timeRange();
      const range = from === null ? {} : { from: from + started, to: to + started };
      load(path("system", { id: run.id, ...range }), run.samples);
    },
    repaint: () => charts.forEach(({ chart }) => chart.repaint()),
  };
}

/** Return a chart of one measure, with a line per host or GPU. */
function chartOf(name) {
  const [title, units] = CHARTS[name];
  let [unit, scale] = units.at(-1);
  let lines = [];
  const frame = framed({ key: `system ${name}`, label: title, kind: () => "host", height: 170,
    axis: "time",
    tip: (at) =>
      rowsAt(lines, at, () => `after ${clockSpan(at)}`, (one) => `${number(one)} ${unit}`) });
  const { chart, canvas, buttons } = frame;
  const readout = h("span", { class: "readout" });
  const heading = h("h3");
  const element = h("article", { class: "card", "data-measure": name },
    h("header", {}, heading, readout, buttons), canvas);
  return {
    element,
    chart,
    resize: () => element.classList.toggle("large", frame.resize()),
    draw(curves, started) {
      const most = curves.reduce((a, { value }) => Math.max(a, ...value), 0);
      [unit, scale] = units.find(([, size]) => most >= size) ?? units.at(-1);
      heading.textContent = `${title}, ${unit}`;
      lines = curves.slice(0, MOST_LINES).map((curve, index) => ({
        label: labelOf(curve),
        ...lookAt(index),
        x: curve.x.map((time) => time - started),
        value: curve.value.map((value) => (value === null ? null : value / scale)),
      }));
      chart.draw(lines, { ...timeRange(), time: true, zero: true, title: TIME, unit });
      const newest = lines.map(({ value }) => value.at(-1));
      const of = curves.length > MOST_LINES ? `, first ${MOST_LINES} of ${curves.length}` : "";
      const text = lines.length === 1 ? number(newest[0]) : `to ${number(Math.max(...newest))}`;
      readout.textContent = text + of;
      element.dataset.lines = lines.length;
    },
  };
}

/** "host", or "host GPU 3" for a measure of a GPU. */
function labelOf({ host, name }) {
  const [, gpu] = name.split(" ");
  return gpu === undefined ? host : `${host} GPU ${gpu}`;
}
