// Images over time: one slider for all names; each shows its newest image up to that step.

import { h, onChange, searchBox } from "./dom.js";
import { bytes, count } from "./format.js";
import { imageUrl } from "./api.js";

const LARGE_BYTES = 2e6;
const LARGE_PIXELS = 8e6; // a browser decodes them to four bytes each, whatever the file's size

export function imagesPanel(root) {
  let step = null; // null: follow the newest
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
  const shownStep = h("span", { class: "amount", id: "shown-step" });
  const search = searchBox("image-search", "Search images", (typed) => {
    text = typed.toLowerCase();
    draw();
  });
  const tools = h(
    "div",
    { class: "tools" },
    h("div", { class: "find" }, search),
    h("label", { class: "slider wide" }, "Step", slider, shownStep),
  );
  const grid = h("div", { class: "pictures" });
  root.append(tools, grid);
  const figures = new Map();

  const steps = () => {
    const all = last.images.flatMap(({ items }) => items.map((item) => item.step));
    return [...new Set(all)].sort((a, b) => a - b);
  };
  const seek = () => {
    const all = steps();
    step = Number(slider.value) === all.length - 1 ? null : all[slider.value];
    draw();
  };
  const arrange = onChange((names) =>
    grid.replaceChildren(
      ...(names.length
        ? names.map((name) => figures.get(name).element)
        : [h("p", { class: "empty" }, "No images. Log them with run.log_image(name, pixels).")]),
    ),
  );

  function draw() {
    const all = steps();
    const newest = all.findLastIndex((one) => step === null || one <= step);
    const at = step === null ? newest : Math.max(0, newest);
    slider.max = Math.max(0, all.length - 1);
    slider.value = at;
    slider.disabled = all.length < 2;
    slider.setAttribute("aria-valuetext", `step ${all[at]}`);
    const suffix = step === null ? " (newest)" : "";
    shownStep.textContent = all.length ? `${count(all[at])}${suffix}` : "";
    tools.hidden = !all.length;
    search.parentElement.hidden = last.images.length < 2;
    const found = last.images.filter(({ name }) => name.toLowerCase().includes(text));
    for (const { name, items } of found) {
      if (!figures.has(name)) figures.set(name, figure(name));
      const index = Math.max(0, items.findLastIndex((item) => item.step <= all[at]));
      const place = `${count(index + 1)} of ${count(items.length)}`;
      figures.get(name).update(last.id, items[index], place);
    }
    arrange(found.map(({ name }) => name));
  }
  return {
    update({ run }) {
      if (!run) return;
      if (last?.id !== run.id) {
        figures.clear();
        arrange([]); // the new run may have the same names
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
  const caption = h("figcaption", {}, h("b", { title: name }, name), note);
  const element = h("figure", { "data-image": name }, caption, frame);
  const requested = new Set(); // large images that the reader chose to load
  const draw = onChange(({ id, item }) => fill(frame, name, id, item, requested));
  return {
    element,
    update(id, item, place) {
      note.textContent = `step ${count(item.step)} · ${place} · ${item.width}×${item.height}`;
      draw({ id, item });
    },
  };
}

function fill(frame, name, id, item, requested) {
  const address = imageUrl(id, item.number);
  const say = (...content) => frame.replaceChildren(h("p", { class: "instead" }, ...content));
  if (!address) return say("left out of this report");
  const isLarge = item.bytes > LARGE_BYTES || item.width * item.height > LARGE_PIXELS;
  if (isLarge && !requested.has(item.number)) {
    const load = () => {
      requested.add(item.number);
      fill(frame, name, id, item, requested);
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
    on: { error: () => say("This image cannot be shown: its file is missing or damaged.") },
  });
  image.classList.toggle("tiny", item.width <= 96);
  const label = `Open ${name} at step ${item.step} in a new tab`;
  frame.replaceChildren(
    h("a", { href: address, target: "_blank", rel: "noopener", "aria-label": label }, image),
  );
}
