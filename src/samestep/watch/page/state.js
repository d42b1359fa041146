// The reader's choices. They are in the URL's fragment, so that a reload or a link shows the same.

const DEFAULTS = {
  run: "", // the run in the overview and in all panels except the curves
  shown: [], // the runs whose curves are drawn
  tab: "curves",
  search: "",
  order: "", // of the list of runs: "score", "shown" ones first, or newest first
  axis: "step", // or "time" or "samples"
  group: "", // the setting whose values are drawn as one line each
  log: false,
  band: true,
  clip: true, // mark spikes at the edge
  smooth: 0,
  from: null, // the zoomed range, in steps or in seconds since a run's start
  to: null,
  large: "", // the enlarged chart
  pins: [], // the charts in the first group
  versus: "", // the run whose settings are compared
  image: null, // the step of the images; null: the newest
  histogram: "", // the name whose histograms are shown
  worker: "", // the worker whose log is shown
  find: "", // words in the lines of the log
  filter: "", // of the table of runs
  sort: "", // its column, with "-" before it for the highest first
  columns: [], // of the table; none: chosen automatically
  setting: "", // of the scatter chart of the table
  score: "",
};

const listeners = [];
export const state = read();

function read() {
  const query = new URLSearchParams(location.hash.slice(1));
  const found = structuredClone(DEFAULTS);
  for (const [key, fallback] of Object.entries(DEFAULTS)) {
    if (Array.isArray(fallback)) found[key] = query.getAll(key);
    else if (query.has(key)) found[key] = parsed(query.get(key), fallback);
  }
  found.smooth = Math.min(0.999, Math.max(0, found.smooth || 0));
  const isRange = found.from !== null && found.to !== null && found.from < found.to;
  if (!isRange) found.from = found.to = null;
  if (!["time", "samples"].includes(found.axis)) found.axis = "step";
  return found;
}

function parsed(text, fallback) {
  if (typeof fallback === "boolean") return text === "1";
  if (typeof fallback === "string") return text;
  return Number.isFinite(Number(text)) ? Number(text) : fallback;
}

const PAUSE = 150; // milliseconds; some browsers reject frequent changes of the URL
let timer;

/** Write immediately, and changes during the pause together at its end. */
function writeSoon() {
  if (timer) return;
  write();
  const written = location.hash;
  timer = setTimeout(() => {
    timer = null;
    if (fragment() !== written) write();
  }, PAUSE);
}

const write = () => history.replaceState(null, "", fragment());

function fragment() {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (Array.isArray(value)) value.forEach((item) => query.append(key, item));
    else if (typeof value === "boolean" && value !== DEFAULTS[key]) query.set(key, Number(value));
    else if (value !== DEFAULTS[key]) query.set(key, value);
  }
  return `#${query}`;
}

/** Apply changes, and call all listeners. */
export function choose(changes) {
  Object.assign(state, changes);
  writeSoon();
  listeners.forEach((listener) => listener());
}

/** Return the zoomed range for charts whose x axis is always steps, or seconds since a start. */
export const stepRange = () => rangeOn("step");
export const timeRange = () => rangeOn("time");

function rangeOn(axis) {
  return state.axis === axis ? { from: state.from, to: state.to } : { from: null, to: null };
}

export const onChoice = (listener) => listeners.push(listener);

addEventListener("hashchange", () => {
  if (location.hash === "#content") return write(); // the skip link, not a choice
  Object.assign(state, read());
  listeners.forEach((listener) => listener());
});
