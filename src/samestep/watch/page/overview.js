// The state of a run: progress, speed, expected end, and missing parts of its record.

import { answers } from "./answers.js";
import { h, keepFocus, onChange } from "./dom.js";
import { ago, count, duration, moment, near, number, several } from "./format.js";
import { notes } from "./notes.js";

export function overview(root) {
  const age = h("span", { class: "age" });
  const body = h("div", { class: "glance" });
  const noted = notes();
  const three = answers();
  const below = h("div");
  root.append(body, noted.text, three.element, below);
  const draw = onChange((run, clock, isLoading) => {
    const beside = [noted.line, noted.short];
    keepFocus(body, () =>
      body.replaceChildren(...content(run, age, clock, beside, isLoading).filter(Boolean)));
    below.replaceChildren(...(run ? losses(run) : []));
  });
  return {
    update(view) {
      const { run } = view;
      three.element.hidden = noted.text.hidden = !run;
      document.title = run ? `${run.name} – ${run.state} – samestep` : "samestep";
      if (!run) {
        draw(null, view.clock, view.rows.length > 0);
        return;
      }
      const { events, scalars, histograms, images, config, workers, parts, now, ...shown } = run;
      draw({ ...shown, count: workers.length, evaluates: parts.evaluation > 0 }, view.clock);
      noted.update(run);
      three.update(view);
      this.tick(view);
    },
    tick({ run, clock }) {
      if (!run) return;
      const isOpen = ["running", "silent", "stalled"].includes(run.state);
      const [last, end] = [ago(run.updated, clock), moment(run.updated)];
      age.title = age.textContent = isOpen ? `last news ${last}` : `ended ${end}`;
    },
  };
}

function content(run, age, clock, beside, isLoading) {
  if (!run) {
    const text = isLoading ? "Loading…"
      : "No run yet. It appears here once it has written its first event.";
    return [h("p", { class: "empty" }, text)];
  }
  const { progress } = run;
  const { loop, done, steps, epochs, samples } = progress;
  const [perSecond, speed] = [progress.samples_per_second, progress.steps_per_second];
  const left = run.state === "running" ? progress.seconds_left : null;
  // The record counts epochs from 0. A loop that starts after the last epoch is one past the end.
  const ordinal = run.epoch === null ? null : Math.min(run.epoch + 1, epochs ?? Infinity);
  const ofSteps = steps === null ? null : `of ${count(steps)}`;
  const isOther = loop && loop !== "train" && steps !== null;
  const ofLoop = isOther ? `${loop}: ${count(done)} ${ofSteps}` : ofSteps;
  const isPaced = speed !== null && perSecond === null; // the speed in samples says the same
  const paced = [ofLoop, isPaced && `${number(speed)}/s`].filter(Boolean).join(" · ");
  return [
    h("header", { class: "title" },
      h("h1", { id: "run-name", title: run.name }, run.name),
      h("span", { class: "state", id: "run-state", "data-state": run.state }, run.state),
      beside, age,
      h("dl", { class: "figures" },
        left !== null && figure("left", leftIn(progress),
          duration(left), `ends ${near(clock + left, clock)}`),
        figure("epoch", "Epoch", count(ordinal), epochs === null ? null : `of ${count(epochs)}`),
        figure("step", "Step", count(run.step), paced),
        figure("workers", "Workers", count(run.count), several(run.lanes, "lane")),
        samples !== null && figure("samples", "Samples", count(samples),
          perSecond === null ? null
            : `${number(perSecond)}/s${run.evaluates ? " with evaluation" : ""}`),
        figure("elapsed", "Elapsed", duration(run.elapsed),
          run.attempts > 1 && `${run.attempts} starts`),
        run.forked && figure("forked", "Forked at", count(run.forked.step),
          `from ${run.forked.trunk.split("/").at(-1)}`))),
    bar(progress),
  ];
}

const leftIn = ({ is_of_epoch: isOfEpoch, loop, loops }) =>
  isOfEpoch ? "Left in epoch" : loops > 1 ? `Left in ${loop}` : "Left";

function figure(key, label, value, note) {
  const description = h("dd", {}, value, note && h("small", {}, note));
  return h("div", { "data-figure": key }, h("dt", {}, label), description);
}

function bar({ share, is_of_epoch: isOfEpoch }) {
  if (share === null) return null;
  const percent = 100 * share;
  const range = { "aria-valuenow": Math.round(percent), "aria-valuemin": 0, "aria-valuemax": 100 };
  const label = isOfEpoch ? "Progress in this epoch" : "Progress";
  return h("div",
    { class: "progress", id: "progress", role: "progressbar", "aria-label": label, ...range },
    h("i", { vars: { width: `${percent}%` } }));
}

/** Why a run failed, and what its record lacks: a reader must know before trusting a curve. */
function losses(run) {
  const texts = run.sinks
    .filter(({ dropped, error }) => dropped || error)
    .map(({ name, dropped, error }) => {
      return error ? `${name}: ${error}` : `${name} dropped ${count(dropped)} events`;
    });
  if (run.skipped_lines) {
    texts.push(`skipped ${several(run.skipped_lines, "line")} of the record: torn or not events`);
  }
  if (run.dropped_images) texts.push(`${count(run.dropped_images)} images were dropped to keep up`);
  const items = texts.map((text) => h("li", {}, text));
  if (run.failure) {
    const { text, detail } = run.failure;
    const more = detail && h("details", {}, h("summary", {}, "Traceback"), h("pre", {}, detail));
    items.unshift(h("li", {}, text, more));
  }
  if (run.reading !== null) {
    const share = `${Math.floor(100 * run.reading)}%`;
    items.unshift(h("li", { id: "reading" }, `${share} of the record is read; curves end there.`));
  }
  if (run.stall) items.unshift(h("li", {}, run.stall));
  return items.length ? [h("ul", { class: "loss", id: "losses" }, items)] : [];
}
