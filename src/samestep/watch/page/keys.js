// Keyboard control of a chart, equivalent to the mouse.

import { announce } from "./dom.js";

const FACTOR = 0.5;

/** Handle keys of a chart. Arrows move the cursor, or with Shift the range; plus and minus zoom. */
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
  const { left, idx } = plot.cursor;
  place(chart, left < 0 || idx === null ? plot.data[0].length >> 1 : idx + by);
}

function place(chart, index) {
  const { plot } = chart;
  const x = plot.data[0];
  const [low, high] = [plot.scales.x.min, plot.scales.x.max];
  let within = Math.max(0, Math.min(x.length - 1, index));
  while (within < x.length - 1 && x[within] < low) within += 1;
  while (within > 0 && x[within] > high) within -= 1;
  plot.setCursor({ left: plot.valToPos(x[within], "x"), top: plot.over.clientHeight / 2 });
  const text = (row) => [...row.childNodes].map((part) => part.textContent).join(" ");
  announce([...chart.box.children].map(text).join(", "));
}

function zoom(chart, factor) {
  const { min, max } = chart.plot.scales.x;
  const { left } = chart.plot.cursor;
  const center = left >= 0 ? chart.plot.posToVal(left, "x") : (min + max) / 2;
  if (factor > 1 && chart.options.from === null) return;
  chart.zoomed(center - (center - min) * factor, center + (max - center) * factor);
}

function pan(chart, share) {
  const { min, max } = chart.plot.scales.x;
  const shift = (max - min) * share;
  if (chart.options.from !== null) chart.zoomed(min + shift, max + shift);
}
