// A uPlot chart with curves of several runs.

import { resolved } from "./colors.js";
import { clockSpan, tick } from "./format.js";
import { h } from "./dom.js";
import { chartKeys } from "./keys.js";

const uPlot = globalThis.uPlot;
const SECONDS = [
  0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800,
  21600, 43200, 86400, 172800, 432000, 864000,
];
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const FAINT = 0.15;
const GAP = 14; // pixels between a chart and its box
// limits of a logarithmic axis, about those of float32; otherwise it could have hundreds of decades
const SMALLEST = 1e-40;
const LARGEST = 1e40;
const cursors = uPlot.sync("samestep");
export const TIME = "time since the start (h:min:s)"; // the title of an axis

/** Return the height of an enlarged chart. */
export const tall = () => Math.max(240, Math.min(520, innerHeight - 260));

/**
 * A chart in `host`. A curve is {label, color, dash, x, value}, optionally with low, high, smooth,
 * faint, and area (filled down to the previous curve). Calls `zoomed(from, to)` and `reset()` on
 * user actions, and `pointed(at)` with the cursor's x value or null. `tip(at)` returns the elements
 * of the box at the cursor.
 */
export class Chart {
  constructor(host, { label, height, zoomed, reset, pointed, tip }) {
    Object.assign(this, { host, height, zoomed, reset, pointed, tip });
    this.options = {};
    this.curves = [];
    host.setAttribute("role", "group");
    host.setAttribute("aria-roledescription", "chart");
    const keys = "Arrow keys move along the curve, plus and minus zoom, Escape shows all.";
    host.setAttribute("aria-label", `${label}. ${keys}`);
    host.tabIndex = 0;
    this.box = h("div", { class: "tip", popover: "manual" });
    this.resizer = new ResizeObserver(() => this.plot && this.plot.setSize(this.size()));
    this.resizer.observe(host);
    chartKeys(this);
  }

  size() {
    return { width: Math.max(120, this.host.clientWidth), height: this.height() };
  }

  /**
   * Draw curves. Options: time (x is seconds), log, from and to (null: all), marks (x values of
   * vertical lines), zero (y starts at 0), range (of y, null: all), spikes (beyond it,
   * {x, y, color}, to be marked), title and unit (of x and y).
   */
  draw(curves, options) {
    this.curves = curves;
    const { series, bands, data, owners } = layOut(curves, options.log);
    this.owners = owners;
    const { time, log, zero, range, title, unit } = options;
    const looks = curves.map(({ label, color, dash, faint, area }) =>
      [label, color, dash, faint, area]);
    const shape = JSON.stringify([looks, series.length, bands.length, time, log, zero,
      Boolean(range), title, unit]);
    this.options = options;
    if (this.plot && shape === this.shape) return this.plot.setData(data);
    this.shape = shape;
    this.plot?.destroy();
    this.plot = new uPlot({ ...this.size(), ...this.look(), series, bands }, data, this.host);
    this.plot.over.append(this.box);
    touches(this.plot);
  }

  /** Highlight one of the curves; -1 highlights none. */
  emphasize(place) {
    if (!this.plot) return;
    this.plot.series.forEach((series, index) => {
      series.alpha = place < 0 || !index || this.owners[index] === place ? 1 : FAINT;
    });
    this.plot.redraw(false);
  }

  /** Draw again from scratch, because colors on a canvas do not change with the theme. */
  repaint() {
    if (!this.plot) return;
    this.shape = null;
    this.draw(this.curves, this.options);
  }

  destroy() {
    this.resizer.disconnect();
    this.plot?.destroy();
  }

  look() {
    const { time, log, zero, range, title, unit } = this.options;
    const line = { stroke: resolved("--grid"), width: 1 };
    const ticks = { ...line, size: 4 };
    const label = { labelFont: FONT, labelSize: 15, labelGap: 0 };
    const axis = { stroke: resolved("--faint"), font: FONT, grid: line, ticks, gap: 4, ...label };
    const padded = log ? (ends) => uPlot.rangeLog(...ends, 10, false) : (ends) =>
      uPlot.rangeNum(...ends, 0.1, true);
    const given = { range: () => padded(this.options.range) };
    const fromZero = { range: (plot, low, high) => [0, (high || 1) * 1.05] };
    const text = (value) => (value === null ? "" : tick(value));
    return {
      legend: { show: false },
      padding: [8, 10, 0, 0],
      scales: {
        x: { time: false, range: (plot, low, high) => this.range(low, high) },
        y: { distr: log ? 3 : 1, ...(zero && fromZero), ...(range && given) },
      },
      axes: [
        { ...axis, size: 26, space: 64, label: title, incrs: time ? SECONDS : wholeSteps(),
          values: (plot, at) => at.map(time ? clockSpan : tick) },
        { ...axis, label: unit ?? undefined, values: (plot, at) => at.map(text),
          size: (plot, texts) => room(texts) },
      ],
      cursor: {
        y: false,
        points: { size: (plot, index) => (plot.series[index].width ? 6 : 0) },
        drag: { x: true, y: false, setScale: false, dist: 6 },
        sync: { key: cursors.key, scales: ["x", null] },
        bind: { dblclick: () => () => this.reset() },
      },
      hooks: {
        setSelect: [(plot) => this.select(plot)],
        setCursor: [(plot) => this.point(plot)],
        drawAxes: [(plot) => this.mark(plot)],
        draw: [(plot) => this.markSpikes(plot)],
      },
    };
  }

  range(low, high) {
    const { from, to } = this.options;
    if (from !== null && from !== undefined) return [from, to];
    if (low === null) return [0, 1];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 6) return;
    const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zoomed(from, to);
  }

  /** Show values at the cursor. All charts share it, but only the one in use opens its box. */
  point(plot) {
    const { left } = plot.cursor;
    const at = left === undefined || left < 0 ? null : plot.posToVal(left, "x");
    this.pointed?.(at);
    const isPointed = plot.over.matches(":hover") || plot.over.dataset.touched;
    const mine = isPointed || this.host.matches(":focus-visible");
    if (at === null || !mine || !this.tip) {
      this.box.hidePopover();
      return;
    }
    this.box.replaceChildren(...this.tip(at));
    this.box.showPopover();
    this.placeBox(plot.over.getBoundingClientRect().left + left);
  }

  /** Place the box to the right or left of the chart, or above or below `center` without room. */
  placeBox(center) {
    const chart = this.host.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const { clientWidth, clientHeight } = document.documentElement;
    const within = (place, size, all) => Math.max(0, Math.min(place, all - size));
    const fitting = [chart.right + GAP, chart.left - GAP - width].find(
      (place) => place >= 0 && place + width <= clientWidth);
    const above = chart.top - GAP - height;
    const outside = above >= 0 ? above : chart.bottom + GAP;
    const x = fitting ?? within(center - width / 2, width, clientWidth);
    const y = fitting === undefined ? outside : within(chart.top, height, clientHeight);
    Object.assign(this.box.style, { left: `${x + scrollX}px`, top: `${y + scrollY}px` });
  }

  mark(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = resolved("--faint");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const x of this.options.marks ?? []) {
      const place = Math.round(plot.valToPos(x, "x", true));
      if (place <= bbox.left || place >= bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(place, bbox.top);
      ctx.lineTo(place, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  /** Draw an arrowhead where a value is beyond the upper or lower edge. */
  markSpikes({ ctx, bbox, scales, valToPos }) {
    const size = 5 * devicePixelRatio;
    for (const { x, y, color } of this.options.spikes ?? []) {
      const isAbove = y > scales.y.max;
      const [place, edge] = [valToPos(x, "x", true), bbox.top + (isAbove ? 0 : bbox.height)];
      const base = edge + (isAbove ? 2 : -2) * size;
      ctx.fillStyle = resolved(color);
      ctx.beginPath();
      ctx.moveTo(place, edge);
      ctx.lineTo(place - size, base);
      ctx.lineTo(place + size, base);
      ctx.fill();
    }
  }
}

/** Put curves on one x axis, as uPlot requires. Bands come first, so that lines are on top. */
function layOut(curves, log) {
  const series = [{}];
  const owners = [null]; // the curve that a series belongs to
  const bands = [];
  const tables = curves.map((curve, place) => {
    const stroke = resolved(curve.color);
    const table = [curve.x];
    const add = (values, look) => {
      const valid = (value) => (value > SMALLEST && value < LARGEST ? value : null);
      table.push(log ? values.map(valid) : values);
      owners.push(place);
      series.push({ points: { show: false }, pxAlign: 0, ...look });
    };
    if (curve.high && curve.low) {
      bands.push({ series: [series.length, series.length + 1], fill: withAlpha(stroke, 0.18) });
      add(curve.high, { width: 0, stroke });
      add(curve.low, { width: 0, stroke });
    }
    if (curve.area) {
      const pair = [series.length, series.length - 1];
      if (curve.area === "stacked") bands.push({ series: pair, fill: stroke });
      add(curve.value, { width: 0, stroke, fill: curve.area === "base" ? stroke : undefined });
    } else {
      const lone = (curve.size ?? curve.x.length) < 40; // draw a few points as dots
      add(curve.value, {
        stroke: curve.faint || curve.smooth ? withAlpha(stroke, 0.35) : stroke,
        width: curve.smooth ? 1 : 1.6,
        dash: curve.smooth ? undefined : curve.dash,
        points: { show: lone && !curve.faint, size: 4, fill: stroke, stroke },
      });
      if (curve.smooth) add(curve.smooth, { stroke, width: 1.8, dash: curve.dash });
    }
    return table;
  });
  return { series, bands, owners, data: tables.length ? uPlot.join(tables) : [[]] };
}

function withAlpha(color, alpha) {
  const [red, green, blue] = color.match(/[0-9a-f]{2}/gi).map((pair) => parseInt(pair, 16));
  return `rgba(${red}, ${green}, ${blue}, ${alpha})`;
}

function wholeSteps() {
  const found = [];
  for (let size = 1; size <= 1e12; size *= 10) found.push(size, 2 * size, 5 * size);
  return found;
}

const room = (texts) => 16 + 6.2 * Math.max(2, ...(texts ?? []).map((text) => text.length));

/** Move the cursor with a finger; vertical moves still scroll the page. */
function touches(plot) {
  const follow = (event) => {
    if (event.pointerType === "mouse") return;
    const place = plot.over.getBoundingClientRect();
    plot.over.dataset.touched = "1";
    plot.setCursor({ left: event.clientX - place.left, top: event.clientY - place.top });
  };
  const leave = () => delete plot.over.dataset.touched;
  plot.over.addEventListener("pointerdown", follow);
  plot.over.addEventListener("pointermove", follow);
  plot.over.addEventListener("pointerleave", leave);
}
