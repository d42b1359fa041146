// A chart with buttons that save and enlarge it.

import { Chart, tall } from "./chart.js";
import { h, headButton } from "./dom.js";
import { chartSource, saveMenu } from "./saving.js";
import { choose, state } from "./state.js";

/**
 * Return a chart, its `canvas`, and the `buttons` of its head. It is enlarged if the choice `large`
 * is `key`; `kind()` says what its lines are. A zoom chooses the `axis`, if it has one of its own.
 */
export function framed({ key, label, kind, height, axis, ...actions }) {
  const canvas = h("div", { class: "canvas" });
  const isLarge = () => state.large === key;
  const click = () => choose({ large: isLarge() ? "" : key });
  const enlarge = headButton("Enlarge", label, "⤢", click);
  const chart = new Chart(canvas, {
    label,
    height: () => (isLarge() ? tall() : height),
    zoomed: (from, to) => choose({ from, to, axis: axis ?? state.axis }),
    reset: () => choose({ from: null, to: null }),
    ...actions,
  });
  let large = false;
  return {
    chart,
    canvas,
    buttons: [saveMenu(label, () => chartSource(chart, kind())), enlarge],
    /** Set the size that was chosen, and return whether it is the large one. */
    resize() {
      enlarge.setAttribute("aria-pressed", String(isLarge()));
      if (large !== isLarge()) {
        large = isLarge();
        chart.plot?.setSize(chart.size());
      }
      return large;
    },
  };
}
