// Images through time: a slider for all names together, each name showing its newest image up to that step.

import { h, onChange, searchBox } from "./dom.js";
import { bytes, count } from "./format.js";
import { imageAddress } from "./get.js";

const LARGE_BYTES = 2e6;
const LARGE_PIXELS = 8e6; // what a browser unpacks, four bytes a pixel, whatever the file's size

export function imagesPanel(root) {
  let step = null; // null: the newest, and what comes after
  let last;
  let text = "";
  const slider = h("input", {
    id: "image-step",
    type: "range",
    min: 0,
    max: 0,
    step: 1,
    "aria-label": "Step of the images",
    on: { input: () => seek() },
  });
  const told = h("span", { class: "amount", id: "image-told" });
  const search = searchBox("image-search", "Search images", (typed) => ((text = typed.toLowerCase()), draw()));
  const tools = h(
    "div",
    { class: "tools" },
    h("div", { class: "find" }, search),
    h("label", { class: "slider wide" }, "Step", slider, told),
  );
  const grid = h("div", { class: "pictures" });
  root.append(tools, grid);
  const figures = new Map();

  const steps = () => [...new Set(last.images.flatMap(({ items }) => items.map((item) => item.step)))].sort((a, b) => a - b);
  const seek = () => {
    const all = steps();
    step = Number(slider.value) === all.length - 1 ? null : all[slider.value];
    draw();
  };
  const arrange = onChange((names) =>
    grid.replaceChildren(
      ...(names.length
        ? names.map((name) => figures.get(name).element)
        : [h("p", { class: "empty" }, "No images. A run logs them with run.log_image(name, pixels).")]),
    ),
  );

  function draw() {
    const all = steps();
    const at =
      step === null
        ? all.length - 1
        : Math.max(
            0,
            all.findLastIndex((one) => one <= step),
          );
    slider.max = Math.max(0, all.length - 1);
    slider.value = at;
    slider.disabled = all.length < 2;
    slider.setAttribute("aria-valuetext", `step ${all[at]}`);
    told.textContent = all.length ? `${count(all[at])}${step === null ? " (newest)" : ""}` : "";
    tools.hidden = !all.length;
    search.parentElement.hidden = last.images.length < 2;
    const found = last.images.filter(({ name }) => name.toLowerCase().includes(text));
    for (const { name, items } of found) {
      if (!figures.has(name)) figures.set(name, figure(name));
      const index = Math.max(
        0,
        items.findLastIndex((item) => item.step <= all[at]),
      );
      figures.get(name).update(last.id, items[index], `${count(index + 1)} of ${count(items.length)}`);
    }
    arrange(found.map(({ name }) => name));
  }
  return {
    update({ run }) {
      if (!run) return;
      if (last?.id !== run.id) {
        figures.clear();
        arrange([]); // the same names may come again, as other figures
        step = null;
      }
      last = run;
      draw();
    },
  };
}

function figure(name) {
  const frame = h("div", { class: "frame-of" });
  const note = h("small", {});
  const element = h("figure", { "data-image": name }, h("figcaption", {}, h("b", { title: name }, name), note), frame);
  const asked = new Set(); // large images that the reader wants to see
  const draw = onChange(({ id, item }) => fill(frame, name, id, item, asked));
  return {
    element,
    update(id, item, place) {
      note.textContent = `step ${count(item.step)} · ${place} · ${item.width}×${item.height}`;
      draw({ id, item });
    },
  };
}

function fill(frame, name, id, item, asked) {
  const address = imageAddress(id, item.number);
  const say = (...content) => frame.replaceChildren(h("p", { class: "instead" }, ...content));
  if (!address) return say("left out of this report");
  const isLarge = item.bytes > LARGE_BYTES || item.width * item.height > LARGE_PIXELS;
  if (isLarge && !asked.has(item.number)) {
    const load = () => {
      asked.add(item.number);
      fill(frame, name, id, item, asked);
      frame.querySelector("a")?.focus();
    };
    return say(
      h(
        "button",
        { type: "button", class: "load", on: { click: load } },
        item.bytes === null ? "Load this large image" : `Load ${bytes(item.bytes)}`,
      ),
      h("span", {}, `${item.width} × ${item.height} pixels`),
    );
  }
  const image = h("img", {
    src: address,
    alt: `${name} at step ${item.step}`,
    width: item.width,
    height: item.height,
    decoding: "async",
    on: { error: () => say("This image cannot be shown: its file is gone or damaged.") },
  });
  image.classList.toggle("tiny", item.width <= 96);
  frame.replaceChildren(
    h("a", { href: address, target: "_blank", rel: "noopener", "aria-label": `Open ${name} at step ${item.step} by itself` }, image),
  );
}
