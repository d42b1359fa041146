// A chart by keyboard: everything that the mouse does.

import { announce } from "./dom.js";

const FACTOR = 0.5;

/** Listen for keys on a chart: arrows move the cursor (with Shift the range), plus and minus zoom around it, Escape or 0 shows all. */
export function chartKeys(chart) {
  chart.host.addEventListener("keydown", (event) => {
    if (!chart.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const action = ACTIONS[event.key];
    if (!action) return;
    event.preventDefault();
    action(chart, event.shiftKey);
  });
  chart.host.addEventListener("blur", () => chart.plot?.setCursor({ left: -10, top: -10 }));
}

const ACTIONS = {
  ArrowLeft: (chart, shift) => (shift ? pan(chart, -0.25) : move(chart, -1)),
  ArrowRight: (chart, shift) => (shift ? pan(chart, 0.25) : move(chart, 1)),
  Home: (chart) => place(chart, 0),
  End: (chart) => place(chart, Infinity),
  "+": (chart) => zoom(chart, FACTOR),
  "=": (chart) => zoom(chart, FACTOR),
  "-": (chart) => zoom(chart, 1 / FACTOR),
  0: (chart) => chart.reset(),
  Escape: (chart) => chart.reset(),
};

function move(chart, by) {
  const { plot } = chart;
  place(chart, plot.cursor.left < 0 || plot.cursor.idx === null ? plot.data[0].length >> 1 : plot.cursor.idx + by);
}

function place(chart, index) {
  const { plot } = chart;
  const x = plot.data[0];
  const [low, high] = [plot.scales.x.min, plot.scales.x.max];
  let within = Math.max(0, Math.min(x.length - 1, index));
  while (within < x.length - 1 && x[within] < low) within += 1;
  while (within > 0 && x[within] > high) within -= 1;
  plot.setCursor({ left: plot.valToPos(x[within], "x"), top: plot.over.clientHeight / 2 });
  announce([...chart.box.children].map((row) => [...row.childNodes].map((part) => part.textContent).join(" ")).join(", "));
}

function zoom(chart, factor) {
  const { min, max } = chart.plot.scales.x;
  const { left } = chart.plot.cursor;
  const centre = left >= 0 ? chart.plot.posToVal(left, "x") : (min + max) / 2;
  if (factor > 1 && chart.options.from === null) return;
  chart.zoomed(centre - (centre - min) * factor, centre + (max - centre) * factor);
}

function pan(chart, share) {
  const { min, max } = chart.plot.scales.x;
  if (chart.options.from !== null) chart.zoomed(min + (max - min) * share, max + (max - min) * share);
}
