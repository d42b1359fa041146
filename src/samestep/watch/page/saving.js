// A chart as a file: the points that are drawn as CSV, and the picture as PNG.

import { resolved } from "./colors.js";
import { h } from "./dom.js";

const TITLE = 30; // pixels of the screen
const MARGIN = 10;

/** Return a menu that saves a card's chart. */
export function saveMenu(card) {
  const menu = h("details", { class: "save" });
  const item = (label, save) =>
    h("button", { class: "quiet small", type: "button",
      on: { click: () => ((menu.open = false), save(card)) } }, label);
  const summary = { class: "quiet small", title: "Save", "aria-label": `Save ${card.name}` };
  menu.append(h("summary", summary, "⤓"),
    h("div", {}, item("CSV", saveTable), item("PNG", savePicture)));
  menu.addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget && !menu.contains(relatedTarget)) menu.open = false;
  });
  return menu;
}

function saveTable({ name, curves, view }) {
  if (!curves) return;
  const x = view.state.axis === "time" ? "seconds" : "step";
  const lines = [["run", x, "value", "low", "high", "smoothed"]];
  for (const { label, x: places, value, edges, smooth } of curves) {
    const columns = [places, value, ...edges, smooth];
    places.forEach((_, index) =>
      lines.push([plain(label), ...columns.map((column) => column?.[index])]));
  }
  const text = lines.map((line) => `${line.map(quoted).join(",")}\r\n`).join("");
  download(new Blob([text], { type: "text/csv" }), `${name}.csv`);
}

/** Return text that a spreadsheet does not take for a formula. */
const plain = (text) => (/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);

function quoted(value) {
  const text = String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Save the chart on its background, below its name and those of the runs. */
function savePicture({ name, curves, chart }) {
  if (!chart.plot) return;
  const { canvas } = chart.plot.ctx;
  const scale = canvas.width / chart.plot.width;
  const picture = h("canvas", { width: canvas.width, height: canvas.height + TITLE * scale });
  const pen = picture.getContext("2d");
  pen.fillStyle = resolved("--sheet");
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.drawImage(canvas, 0, TITLE * scale);
  pen.scale(scale, scale);
  pen.font = "600 13px system-ui, sans-serif";
  let left = MARGIN;
  for (const [text, color] of [[name, "--ink"], ...curves.map((one) => [one.label, one.color])]) {
    pen.fillStyle = resolved(color);
    pen.fillText(text, left, TITLE - MARGIN);
    left += pen.measureText(text).width + 2 * MARGIN;
  }
  picture.toBlob((blob) => download(blob, `${name}.png`));
}

function download(blob, name) {
  const href = URL.createObjectURL(blob);
  h("a", { href, download: name.replace(/[^\w.-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}
