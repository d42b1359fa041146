// What the reader chose. It lives in the address's fragment, so that a reload or a link shows the same.

const DEFAULTS = {
  run: "", // the run that the overview and all panels but the curves tell of
  shown: [], // the runs whose curves are laid over each other
  tab: "curves",
  search: "",
  axis: "step",
  log: false,
  band: true,
  smooth: 0,
  from: null, // the zoomed range, in steps or in seconds since a run's start
  to: null,
  large: "", // the chart over the whole width
  versus: "", // the run whose configuration is compared
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
  if (found.from === null || found.to === null || !(found.from < found.to)) found.from = found.to = null;
  if (found.axis !== "time") found.axis = "step";
  return found;
}

function parsed(text, fallback) {
  if (typeof fallback === "boolean") return text === "1";
  if (typeof fallback === "string") return text;
  return Number.isFinite(Number(text)) ? Number(text) : fallback;
}

const PAUSE = 150; // milliseconds; some browsers refuse more than a few changes of the address a second
let timer;

/** Write at once, and what comes within the pause together at its end. */
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
    else if (value !== DEFAULTS[key]) query.set(key, typeof value === "boolean" ? Number(value) : value);
  }
  return `#${query}`;
}

/** Take over what was chosen, and tell all who listen. */
export function choose(changes) {
  Object.assign(state, changes);
  writeSoon();
  listeners.forEach((listener) => listener());
}

/** The zoomed range for charts whose axis can only be steps. */
export function stepRange() {
  return state.axis === "step" ? { from: state.from, to: state.to } : { from: null, to: null };
}

export function onChoice(listener) {
  listeners.push(listener);
}

addEventListener("hashchange", () => {
  if (location.hash === "#content") return write(); // the skip link: a place in the page, no choice
  Object.assign(state, read());
  listeners.forEach((listener) => listener());
});
