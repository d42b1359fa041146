// What a run is doing, at a glance: state, progress, speed, when it will end, and whether anything of its record was lost.

import { h, onChange } from "./dom.js";
import { ago, count, duration, moment, near, number, several } from "./format.js";

export function overview(root) {
  const age = h("span", { class: "age" });
  const body = h("div", { class: "glance" });
  root.append(body);
  const draw = onChange((run, clock) => body.replaceChildren(...content(run, age, clock).filter(Boolean)));
  return {
    update(view) {
      const { run } = view;
      document.title = run ? `${run.name} – ${run.state} – samestep` : "samestep";
      if (!run) {
        draw(null, view.clock);
        return;
      }
      const { events, scalars, images, config, workers, parts, now, ...told } = run;
      const failure = run.state === "failed" ? events.findLast(({ kind }) => kind === "failed")?.text : null;
      draw({ ...told, count: workers.length, failure }, view.clock);
      this.tick(view);
    },
    tick({ run, clock }) {
      if (run)
        age.textContent =
          run.state === "running" || run.state === "silent" ? `last news ${ago(run.updated, clock)}` : `ended ${moment(run.updated)}`;
    },
  };
}

function content(run, age, clock) {
  if (!run) return [h("p", { class: "empty" }, "No run yet. It appears here as soon as it has written its first event.")];
  const { progress } = run;
  const left = run.state === "running" ? progress.seconds_left : null;
  const ends = left === null ? null : `ends ${near(clock + left, clock)}`;
  // The record counts epochs from 0, and a loop that is begun after its end stands at one more than there are.
  const ordinal = run.epoch === null ? null : Math.min(run.epoch + 1, progress.epochs ?? Infinity);
  const ofSteps = progress.steps === null ? null : `of ${count(progress.steps)}`;
  return [
    h(
      "header",
      { class: "title" },
      h("h1", { id: "run-name" }, run.name),
      h("span", { class: "state", id: "run-state", "data-state": run.state }, run.state),
      age,
    ),
    h(
      "dl",
      { class: "figures" },
      figure(
        "step",
        "Step",
        count(run.step),
        progress.loop && progress.loop !== "train" && progress.steps !== null
          ? `${progress.loop}: ${count(progress.done)} ${ofSteps}`
          : ofSteps,
      ),
      figure("epoch", "Epoch", count(ordinal), progress.epochs === null ? null : `of ${count(progress.epochs)}`),
      progress.samples !== null &&
        figure(
          "samples",
          "Samples",
          count(progress.samples),
          progress.samples_per_second === null ? null : `${number(progress.samples_per_second)} a second`,
        ),
      progress.steps_per_second !== null && figure("speed", "Steps a second", number(progress.steps_per_second), null),
      left !== null && figure("left", "Left", duration(left), ends),
      figure("elapsed", "Elapsed", duration(run.updated - run.started), `since ${near(run.started, clock)}`),
    ),
    bar(progress),
    h(
      "p",
      { class: "facts" },
      [
        several(run.count, "worker"),
        several(run.lanes, "lane"),
        devices(run.devices),
        run.torch && `torch ${run.torch}`,
        run.attempts > 1 && `${run.attempts} starts`,
      ]
        .filter(Boolean)
        .map((fact) => h("span", {}, fact)),
    ),
    ...losses(run),
  ];
}

function figure(key, label, value, note) {
  return h("div", { "data-figure": key }, h("dt", {}, label), h("dd", {}, value, note && h("small", {}, note)));
}

function bar({ done, steps }) {
  if (!steps) return null;
  const share = Math.min(1, done / steps);
  return h(
    "div",
    {
      class: "progress",
      id: "progress",
      role: "progressbar",
      "aria-label": "Progress",
      "aria-valuenow": Math.round(share * 100),
      "aria-valuemin": 0,
      "aria-valuemax": 100,
    },
    h("i", { vars: { width: `${share * 100}%` } }),
  );
}

function devices(given) {
  return [].concat(given ?? []).join(", ");
}

/** Why a run failed, and what its record lacks, which a reader must know before trusting a curve. */
function losses(run) {
  const told = run.sinks
    .filter(({ dropped, error }) => dropped || error)
    .map(({ name, dropped, error }) => (error ? `${name}: ${error}` : `${name} dropped ${count(dropped)} events`));
  if (run.failure) told.unshift(run.failure);
  if (run.dropped_images) told.push(`${count(run.dropped_images)} images were dropped, so that training did not wait`);
  return told.length
    ? [
        h(
          "ul",
          { class: "loss", id: "losses" },
          told.map((text) => h("li", {}, text)),
        ),
      ]
    : [];
}
