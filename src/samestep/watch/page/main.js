// Where the page begins: it holds what was fetched, asks again when there is news, and hands all to the parts on the screen.

import { placeRuns } from "./colours.js";
import { configurationPanel } from "./configuration.js";
import { curvesPanel } from "./curves.js";
import { announce, byId } from "./dom.js";
import { eventsPanel } from "./events.js";
import { get, NoAnswer, path, report } from "./get.js";
import { imagesPanel } from "./images.js";
import { listen } from "./live.js";
import { overview } from "./overview.js";
import { sidebar } from "./sidebar.js";
import { choose, onChoice, state } from "./state.js";
import { tabs } from "./tabs.js";
import { startTheme } from "./theme.js";
import { timePanel } from "./time.js";
import { workersPanel } from "./workers.js";

const PANELS = {
  curves: ["Curves", curvesPanel],
  images: ["Images", imagesPanel],
  time: ["Time", timePanel],
  workers: ["Workers", workersPanel],
  events: ["Events", eventsPanel],
  configuration: ["Configuration", configurationPanel],
};
const SILENCE = 10_000; // milliseconds
const PAUSE = 500; // between two rounds of questions, however fast news come

const found = { rows: [], details: new Map() };
const glance = overview(byId("overview"));
const parts = [sidebar(byId("sidebar")), glance, tabs(byId("tabs"), byId("panels"), PANELS)];
let stale = new Set();
let allStale = false;
let busy = false;
let pending = false;

/** What all parts draw from. `runs` are those shown in curves, `run` is the one that the rest tells of. */
function view() {
  const known = new Map(found.rows.map((row) => [row.id, row]));
  const details = new Map([...found.details].filter(([id]) => known.has(id)));
  const restarts = (id) =>
    (details.get(id)?.events ?? [])
      .filter(({ kind }) => kind === "resumed")
      .map((event) => (state.axis === "time" ? event.time - known.get(id).started : event.step));
  return {
    state,
    rows: found.rows,
    runs: state.shown.map((id) => known.get(id)).filter(Boolean),
    run: details.get(state.run),
    details,
    restarts,
    clock: report ? report.written : Date.now() / 1000,
  };
}

function draw() {
  const now = view();
  parts.forEach((part) => part.update(now));
}

/** Ask for what is stale, one round at a time; news that come meanwhile make the next. */
async function ask() {
  if (busy) return;
  [busy, pending] = [true, false];
  const [ids, all] = [stale, allStale];
  [stale, allStale] = [new Set(), false];
  try {
    const { runs, faults } = await get("/api/runs");
    found.rows = runs;
    tellFaults(faults);
    placeRuns(found.rows);
    settle();
    await Promise.all(wanted().map((id) => detail(id, all || ids.has(id))));
    tellEnd();
    draw();
  } catch (error) {
    if (!(error instanceof NoAnswer)) throw error; // `listen` tells of a lost connection, and mends it
  } finally {
    setTimeout(() => {
      busy = false;
      if (pending) ask();
    }, PAUSE);
  }
}

/** The runs of which more is shown than their row. */
function wanted() {
  const ids = new Set([state.run, state.versus, ...state.shown]);
  return found.rows.map(({ id }) => id).filter((id) => ids.has(id));
}

async function detail(id, isStale) {
  if (isStale || !found.details.has(id)) found.details.set(id, await get(path("run", { id })));
}

/** Choose a run where none is chosen, or the chosen one is gone: the one with the newest news. */
function settle() {
  if (!found.rows.length) return;
  const ids = new Set(found.rows.map(({ id }) => id));
  const shown = state.shown.filter((id) => ids.has(id));
  const newest = [...found.rows].sort((a, b) => b.updated - a.updated)[0].id;
  const run = ids.has(state.run) ? state.run : (shown[0] ?? newest);
  if (!shown.length) shown.push(...(report ? ids : [run]));
  if (run !== state.run || shown.length !== state.shown.length) choose({ run, shown });
}

/** Take in which runs have news; null for all. */
function news(ids) {
  if (ids) ids.forEach((id) => stale.add(id));
  else allStale = true;
  pending = true;
  ask();
}

/** Say what cannot be read now; what was read before stays on the screen. */
function tellFaults(faults = []) {
  if (report) return;
  const banner = byId("banner");
  banner.textContent = faults.map(({ location, text }) => `${location} cannot be read now, and is tried again: ${text}`).join("; ");
  banner.hidden = !faults.length;
}

let stateBefore;
function tellEnd() {
  const now = found.details.get(state.run);
  const key = now && `${now.id} ${now.state}`;
  if (stateBefore && now && key !== stateBefore && stateBefore.startsWith(`${now.id} `)) announce(`${now.name}: ${now.state}`);
  stateBefore = key;
}

onChoice(() => {
  draw();
  const missing = wanted().filter((id) => !found.details.has(id));
  if (missing.length) news(missing);
});
startTheme(() => parts.forEach((part) => part.repaint?.()));
listen(news);
if (report) {
  byId("banner").textContent = report.text;
  byId("banner").hidden = false;
  ask();
} else {
  setInterval(() => glance.tick(view()), 1000);
  setInterval(() => news([state.run]), SILENCE); // a run that falls silent sends no news of it
}
