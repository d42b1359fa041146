// A report holds whole curves, unsmoothed. Ranges and smoothing, which a server would do, are done here.

/** Answer a question from those that a report holds. */
export async function answerFrom(answers, question) {
  const asked = new URL(question, "samestep:/");
  if (asked.pathname !== "/api/curve" && asked.pathname !== "/api/timing") {
    if (question in answers) return answers[question];
    throw new Error(`the report holds no answer to ${question}`);
  }
  const { from, to, smooth, points, ...kept } = Object.fromEntries(asked.searchParams);
  const whole = answers[`${asked.pathname}?${new URLSearchParams(kept)}`];
  if (!whole) throw new Error(`the report holds no answer to ${question}`);
  const [first, last] = reach(whole.x, Number(from ?? -Infinity), Number(to ?? Infinity));
  const cut = (list) => list && list.slice(first, last);
  if (asked.pathname === "/api/timing") {
    const parts = Object.fromEntries(Object.entries(whole.parts).map(([part, list]) => [part, cut(list)]));
    return { x: cut(whole.x), parts, workers: whole.workers.map(cut) };
  }
  const smoothed = Number(smooth) > 0 ? smoothe(whole, Number(smooth)) : null;
  return { ...whole, x: cut(whole.x), value: cut(whole.value), low: cut(whole.low), high: cut(whole.high), smooth: cut(smoothed) };
}

/** The places of a range in a sorted list, with a neighbour on either side so that lines reach the edge. */
function reach(x, from, to) {
  const inside = (value) => value >= from && value <= to;
  const first = x.findIndex(inside);
  return first < 0 ? [0, 0] : [Math.max(0, first - 1), Math.min(x.length, x.findLastIndex(inside) + 2)];
}

/** A moving average whose weights fall by `weight` a point, debiased at the start. Points that were left out count by the distance. */
function smoothe({ x, value, points }, weight) {
  const spacing = (x.at(-1) - x[0]) / Math.max(1, points - 1) || 1;
  let [sum, total, before] = [0, 0, x[0]];
  return value.map((current, index) => {
    if (current === null) return null;
    const decay = weight ** Math.max(1, (x[index] - before) / spacing);
    before = x[index];
    sum = decay * sum + (1 - decay) * current;
    total = decay * total + (1 - decay);
    return sum / total;
  });
}
