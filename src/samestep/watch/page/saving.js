// A chart as a file: the points that are drawn as CSV, and the picture as PNG.

import { resolved } from "./colors.js";
import { h } from "./dom.js";

const TITLE = 30; // pixels of the screen
const MARGIN = 10;

/** Return a menu that saves a chart. `source()` returns its `lines` of text and its `picture`. */
export function saveMenu(name, source) {
  const menu = h("details", { class: "save" });
  const item = (label, save) =>
    h("button", { class: "quiet small", type: "button",
      on: { click: () => ((menu.open = false), save(source())) } }, label);
  const summary = { class: "quiet small", title: "Save", "aria-label": `Save ${name}` };
  const saveTable = ({ lines }) => {
    const text = lines().map((line) => `${line.map(quoted).join(",")}\r\n`).join("");
    download(new Blob([text], { type: "text/csv" }), `${name}.csv`);
  };
  const savePicture = ({ picture }) =>
    picture(name)?.toBlob((blob) => download(blob, `${name}.png`));
  menu.append(h("summary", summary, "⤓"),
    h("div", {}, item("CSV", saveTable), item("PNG", savePicture)));
  menu.addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget && !menu.contains(relatedTarget)) menu.open = false;
  });
  return menu;
}

/** Return what to save of a chart; `kind` says what its lines are, such as "run". */
export function chartSource(chart, kind) {
  const { curves, options } = chart;
  const lines = () => {
    const hasEdges = curves.some(({ edges }) => edges);
    const values = hasEdges ? ["value", "low", "high", "smoothed"] : [options.unit ?? "value"];
    const hasRuns = curves.some(({ runs }) => runs);
    const axis = options.time ? "seconds" : options.title;
    const found = [[kind, axis, ...values, ...(hasRuns ? ["runs"] : [])]];
    for (const { label, x, value, own, edges, smooth, runs } of curves) {
      const columns = [x, own ?? value, ...(hasEdges ? [...edges, smooth] : []), runs];
      x.forEach((_, index) =>
        found.push([plain(label), ...columns.map((column) => column?.[index])]
          .slice(0, found[0].length)));
    }
    return found;
  };
  return { lines, picture: (name) => pictureOf(chart, name) };
}

/** Return text that a spreadsheet does not take for a formula. */
export const plain = (text) => (/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);

function quoted(value) {
  const text = String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Return a picture of the chart on its background, below its name and those of the lines. */
function pictureOf({ curves, plot }, name) {
  if (!plot) return null;
  const { canvas } = plot.ctx;
  const scale = canvas.width / plot.width;
  const { picture, pen } = sheet(plot.width, canvas.height / scale + TITLE, scale);
  pen.drawImage(canvas, 0, TITLE, plot.width, canvas.height / scale);
  pen.font = "600 13px system-ui, sans-serif";
  let left = MARGIN;
  for (const [text, color] of [[name, "--ink"], ...curves.map((one) => [one.label, one.color])]) {
    pen.fillStyle = resolved(color);
    pen.fillText(text, left, TITLE - MARGIN);
    left += pen.measureText(text).width + 2 * MARGIN;
  }
  return picture;
}

/** Return a picture of an element of texts, canvases and round buttons, with margins. */
export function pictureOfElement(place, [top, right, bottom, left]) {
  const frame = place.getBoundingClientRect();
  const size = [frame.width + left + right, frame.height + top + bottom];
  const { picture, pen } = sheet(...size, devicePixelRatio);
  pen.translate(left - frame.left, top - frame.top);
  pen.strokeStyle = resolved("--line");
  pen.strokeRect(frame.left, frame.top, frame.width, frame.height);
  Object.assign(pen, { font: "11px system-ui, sans-serif", textAlign: "center" });
  pen.textBaseline = "middle";
  pen.imageSmoothingEnabled = false; // the canvas of a histogram has a pixel per bin
  for (const one of place.querySelectorAll("button, canvas, span")) {
    const box = one.getBoundingClientRect();
    const look = getComputedStyle(one);
    pen.save();
    pen.translate(box.left + box.width / 2, box.top + box.height / 2);
    if (one.matches("button")) {
      pen.fillStyle = look.backgroundColor;
      pen.beginPath();
      pen.arc(0, 0, 4, 0, 2 * Math.PI);
      pen.fill();
    } else if (one.matches("canvas")) {
      const area = [-box.width / 2, -box.height / 2, box.width, box.height];
      pen.fillStyle = look.backgroundColor;
      pen.fillRect(...area);
      if (one.width) pen.drawImage(one, ...area);
    } else {
      pen.fillStyle = look.color;
      if (look.writingMode !== "horizontal-tb") pen.rotate(-Math.PI / 2);
      pen.fillText(one.textContent, 0, 0);
    }
    pen.restore();
  }
  return picture;
}

function sheet(width, height, scale) {
  const picture = h("canvas", { width: Math.round(width * scale),
    height: Math.round(height * scale) });
  const pen = picture.getContext("2d");
  pen.fillStyle = resolved("--sheet");
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.scale(scale, scale);
  return { picture, pen };
}

function download(blob, name) {
  const href = URL.createObjectURL(blob);
  h("a", { href, download: name.replace(/[^\w.-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}
