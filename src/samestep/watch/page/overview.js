// The state of a run: progress, speed, expected end, and missing parts of its record.

import { h, onChange } from "./dom.js";
import { ago, count, duration, moment, near, number, several } from "./format.js";

export function overview(root) {
  const age = h("span", { class: "age" });
  const body = h("div", { class: "glance" });
  root.append(body);
  const draw = onChange((run, clock) =>
    body.replaceChildren(...content(run, age, clock).filter(Boolean)),
  );
  return {
    update(view) {
      const { run } = view;
      document.title = run ? `${run.name} – ${run.state} – samestep` : "samestep";
      if (!run) {
        draw(null, view.clock);
        return;
      }
      const { events, scalars, histograms, images, config, workers, parts, now, ...shown } = run;
      draw({ ...shown, count: workers.length }, view.clock);
      this.tick(view);
    },
    tick({ run, clock }) {
      if (!run) return;
      const isOpen = ["running", "silent", "stalled"].includes(run.state);
      const [last, end] = [ago(run.updated, clock), moment(run.updated)];
      age.textContent = isOpen ? `last news ${last}` : `ended ${end}`;
    },
  };
}

function content(run, age, clock) {
  if (!run) {
    const text = "No run yet. It appears here once it has written its first event.";
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
  const facts = [
    several(run.count, "worker"), several(run.lanes, "lane"), (run.devices ?? []).join(", "),
    run.torch && `torch ${run.torch}`, run.attempts > 1 && `${run.attempts} starts`,
  ];
  return [
    h("header", { class: "title" },
      h("h1", { id: "run-name" }, run.name),
      h("span", { class: "state", id: "run-state", "data-state": run.state }, run.state),
      nonfiniteBadge(run),
      age),
    h("dl", { class: "figures" },
      figure("step", "Step", count(run.step), ofLoop),
      figure("epoch", "Epoch", count(ordinal), epochs === null ? null : `of ${count(epochs)}`),
      samples !== null && figure("samples", "Samples", count(samples),
        perSecond === null ? null : `${number(perSecond)} per second`),
      speed !== null && figure("speed", "Steps per second", number(speed), null),
      left !== null && figure("left", progress.is_of_epoch ? "Left in epoch" : "Left",
        duration(left), `ends ${near(clock + left, clock)}`),
      figure("elapsed", "Elapsed", duration(run.elapsed),
        `since ${near(run.started, clock)}`)),
    bar(progress),
    h("p", { class: "facts" }, facts.filter(Boolean).map((fact) => h("span", {}, fact))),
    ...losses(run),
  ];
}

function figure(key, label, value, note) {
  const description = h("dd", {}, value, note && h("small", {}, note));
  return h("div", { "data-figure": key }, h("dt", {}, label), description);
}

/** A badge for values that are NaN or infinite now, which a curve cannot show. */
export function nonfiniteBadge({ nonfinite }) {
  if (!nonfinite.length) return null;
  const [{ name, step }] = nonfinite;
  const title = nonfinite.map((one) => `${one.name} since step ${count(one.step)}`).join("\n");
  return h("span", { class: "state", "data-state": "nonfinite", title },
    `${name} has not been finite since step ${count(step)}`);
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
  if (run.stall) items.unshift(h("li", {}, run.stall));
  return items.length ? [h("ul", { class: "loss", id: "losses" }, items)] : [];
}
