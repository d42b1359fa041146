// Images over time, of several runs side by side: one slider for all names; each shows its newest
// image up to that step.

import { h, onChange, searchBox } from "./dom.js";
import { bytes, count } from "./format.js";
import { imageUrl, report } from "./api.js";
import { choose, state } from "./state.js";

const MOST_COMPARED = 4; // runs; of more, only the chosen one is shown
const LARGE_BYTES = 2e6;
const LARGE_PIXELS = 8e6; // a browser decodes them to four bytes each, whatever the file's size

export function imagesPanel(root) {
  let runs = [];
  let text = "";
  const slider = h("input", { id: "image-step", type: "range", min: 0, max: 0, step: 1,
    "aria-label": "Step of the images", on: { input: () => seek() } });
  const shownStep = h("span", { class: "amount", id: "shown-step" });
  const search = searchBox("image-search", "Search images", (typed) => {
    text = typed.toLowerCase();
    draw();
  });
  const tools = h("div", { class: "tools" }, h("div", { class: "find" }, search),
    h("label", { class: "slider wide" }, "Step", slider, shownStep));
  const grid = h("div", { class: "pictures" });
  const enlarged = enlargement();
  root.append(tools, grid, enlarged.element);
  const figures = new Map();

  const steps = () => {
    const all = runs.flatMap(({ images }) => images).flatMap(({ items }) => items);
    return [...new Set(all.map((item) => item.step))].sort((a, b) => a - b);
  };
  const seek = () => {
    const all = steps();
    choose({ image: Number(slider.value) === all.length - 1 ? null : all[slider.value] });
  };
  const none = h("p", { class: "empty" }, "No images. Log them with run.log_image(name, pixels).");
  const arrange = onChange((names) => grid.replaceChildren(
    ...(names.length ? names.map((name) => figures.get(name).element) : [none])));
  const restart = onChange(() => {
    figures.clear();
    arrange([]); // other runs may have the same names
  });

  function draw() {
    const all = steps();
    const { image: step } = state;
    const newest = all.findLastIndex((one) => step === null || one <= step);
    const at = step === null ? newest : Math.max(0, newest);
    slider.max = Math.max(0, all.length - 1);
    slider.value = at;
    slider.disabled = all.length < 2;
    slider.setAttribute("aria-valuetext", `step ${all[at]}`);
    const suffix = step === null ? " (newest)" : "";
    shownStep.textContent = all.length ? `${count(all[at])}${suffix}` : "";
    tools.hidden = !all.length;
    const names = [...new Set(runs.flatMap(({ images }) => images.map(({ name }) => name)))];
    search.parentElement.hidden = names.length < 2;
    grid.classList.toggle("compared", runs.length > 1);
    const found = names.filter((name) => name.toLowerCase().includes(text));
    for (const name of found) {
      if (!figures.has(name)) figures.set(name, figure(name, runs, enlarged.open));
      figures.get(name).update(runs, all[at]);
    }
    arrange(found);
  }
  return {
    update({ run, runs: shown, details }) {
      if (!run) return;
      const compared = shown.map(({ id }) => details.get(id)).filter(Boolean);
      const isSmall = compared.length <= MOST_COMPARED && compared.includes(run);
      runs = isSmall ? compared : [run];
      restart(runs.map(({ id }) => id));
      draw();
    },
  };
}

function figure(name, runs, enlarge) {
  const made = runs.map(() => side(name, () => enlarge(name, sides)));
  const sides = h("div", { class: "sides" }, made.map(({ element }) => element));
  const element = h("figure", { "data-image": name },
    h("figcaption", {}, h("b", { title: name }, name)), sides);
  return {
    element,
    update: (now, step) =>
      made.forEach((one, index) => one.update(now[index], step, now.length > 1)),
  };
}

/** One run's image of a name. */
function side(name, enlarge) {
  const frame = h("div", { class: "frame-of" });
  const who = h("b");
  const note = h("small");
  const element = h("div", { class: "side" }, h("p", {}, who, note), frame);
  const requested = new Set(); // large images that the reader chose to load
  const draw = onChange(({ id, item, alt }) => fill(frame, alt, id, item, requested, enlarge));
  return {
    element,
    update({ id, name: run, images }, step, compared) {
      const items = images.find((one) => one.name === name)?.items ?? [];
      const index = Math.max(0, items.findLastIndex((item) => item.step <= step));
      const item = items[index];
      const place = `${count(index + 1)} of ${count(items.length)}`;
      who.textContent = compared ? run : "";
      const size = `${item?.width}×${item?.height}`;
      note.textContent = item ? `step ${count(item.step)} · ${place} · ${size}` : "";
      const alt = `${name} at step ${item?.step}${compared ? ` of ${run}` : ""}`;
      draw({ id, item, alt });
    },
  };
}

function fill(frame, alt, id, item, requested, enlarge) {
  const say = (...content) => frame.replaceChildren(h("p", { class: "instead" }, ...content));
  if (!item) return say("This run has no image of this name.");
  const address = imageUrl(id, item.number);
  if (!address) return say("left out of this report");
  const isLarge = item.bytes > LARGE_BYTES || item.width * item.height > LARGE_PIXELS;
  if (isLarge && !requested.has(item.number)) {
    const load = () => {
      requested.add(item.number);
      fill(frame, alt, id, item, requested, enlarge);
      frame.querySelector("button")?.focus();
    };
    const text = item.bytes === null ? "Load this large image" : `Load ${bytes(item.bytes)}`;
    return say(h("button", { type: "button", class: "load", on: { click: load } }, text),
      h("span", {}, `${item.width} × ${item.height} pixels`));
  }
  const { width, height } = item;
  const error = () => say("This image cannot be shown: its file is missing or damaged.");
  const image = h("img",
    { src: address, alt, width, height, decoding: "async", on: { error } });
  image.classList.toggle("tiny", width <= 96);
  const button = { type: "button", "aria-label": `Enlarge ${alt}`, on: { click: enlarge } };
  frame.replaceChildren(h("button", button, image));
}

/** A dialog with the images of a name, as large as the window permits. Escape closes it. */
function enlargement() {
  const element = h("dialog", { class: "enlarged",
    on: { click: ({ target }) => target === element && element.close() } });
  const close = () => element.close();
  return {
    element,
    open(name, sides) {
      const copy = sides.cloneNode(true);
      copy.querySelectorAll("button").forEach((button) => {
        const image = button.querySelector("img");
        const link = { href: image?.src, target: "_blank", rel: "noopener" };
        const text = "Open in a new tab";
        if (image && !report) button.closest(".side").firstChild.append(h("a", link, text));
        button.replaceWith(image ?? "");
      });
      element.setAttribute("aria-label", name);
      element.replaceChildren(h("header", {}, h("h2", {}, name),
        h("button", { class: "quiet", type: "button", on: { click: close } }, "Close")), copy);
      element.showModal();
    },
  };
}
