// The entry point: loads data, reloads what has news, and passes it to the visible parts.

import { lookOf, startTheme } from "./colors.js";
import { curvesPanel } from "./curves.js";
import { announce, byId, released } from "./dom.js";
import { eventsPanel } from "./events.js";
import { leftAt } from "./family.js";
import { get, listen, NoResponse, path, report } from "./api.js";
import { imagesPanel } from "./images.js";
import { logsPanel } from "./logs.js";
import { grouped } from "./groups.js";
import { overview } from "./overview.js";
import { settingsPanel } from "./settings.js";
import { systemPanel } from "./system.js";
import { sidebar } from "./sidebar.js";
import { choose, onChoice, state } from "./state.js";
import { tablePanel } from "./table.js";
import { tabs } from "./tabs.js";
import { timePanel } from "./time.js";
import { workersPanel } from "./workers.js";

const PANELS = {
  curves: ["Curves", curvesPanel],
  images: ["Images", imagesPanel],
  time: ["Time", timePanel],
  workers: ["Workers", workersPanel],
  logs: ["Logs", logsPanel],
  system: ["System", systemPanel],
  events: ["Events", eventsPanel],
  settings: ["Settings", settingsPanel],
  table: ["All runs", tablePanel],
};
const SILENCE = 10_000; // milliseconds
const PAUSE = 500; // milliseconds between two rounds of requests

// `missing`: a run that a link names
const found = { rows: [], faults: [], details: new Map(), missing: "" };
const glance = overview(byId("overview"));
const parts = [sidebar(byId("sidebar")), glance, tabs(byId("tabs"), byId("panels"), PANELS)];
let stale = new Set();
let allStale = false;
let busy = false;
let pending = false;

/** Return the data of all parts. `runs` have visible curves as `lines`; all else shows `run`. */
function view() {
  const known = new Map(found.rows.map((row) => [row.id, row]));
  const details = new Map([...found.details].filter(([id]) => known.has(id)));
  const restarts = (id) =>
    (details.get(id)?.events ?? [])
      .filter(({ kind }) => kind === "resumed")
      .map((event) => (state.axis === "time" ? event.time - known.get(id).started : event.step));
  const runs = state.shown.map((id) => known.get(id)).filter(Boolean);
  const { groups, names } = grouped(runs, details);
  const { rows } = found;
  const alone = runs.map((row) => ({ id: row.id, name: row.name, ids: [row.id],
    look: lookOf(row.id), since: leftAt(row, rows, state.shown) }));
  const lines = groups.length ? groups : alone;
  const clock = report ? report.written : Date.now() / 1000;
  const run = details.get(state.run);
  return { state, rows, runs, lines, groupable: names, run, details, restarts, clock };
}

function draw() {
  const now = view();
  parts.forEach((part) => part.update(now));
}

/** Load what is stale, one round at a time; news in the meantime start the next round. */
async function load() {
  if (busy) return;
  [busy, pending] = [true, false];
  const [ids, all] = [stale, allStale];
  [stale, allStale] = [new Set(), false];
  try {
    const { runs, faults } = await get("/api/runs");
    found.faults = faults ?? [];
    found.rows = runs.toSorted((a, b) => (b.started ?? 0) - (a.started ?? 0)); // newest first
    settle();
    showFaults();
    await Promise.all(wanted().map((id) => detail(id, all || ids.has(id))));
    await released();
    announceEnd();
    draw();
  } catch (error) {
    // `listen` shows a lost connection and reconnects
    if (!(error instanceof NoResponse)) throw error;
  } finally {
    setTimeout(() => {
      busy = false;
      if (pending) load();
    }, PAUSE);
  }
}

const listed = () => new Set(found.rows.map(({ id }) => id));

/** Return the runs that need more data than their row. */
function wanted() {
  const ids = new Set([state.run, state.versus, ...state.shown]);
  return found.rows.map(({ id }) => id).filter((id) => ids.has(id));
}

async function detail(id, isStale) {
  if (isStale || !found.details.has(id)) found.details.set(id, await get(path("run", { id })));
}

/** Choose the run with the latest news if none is chosen or the chosen one was removed. */
function settle() {
  if (!found.rows.length) return;
  const ids = listed();
  const missing = state.run && !ids.has(state.run) ? state.run : found.missing;
  const shown = state.shown.filter((id) => ids.has(id));
  const newest = [...found.rows].sort((a, b) => b.updated - a.updated)[0].id;
  const run = ids.has(state.run) ? state.run : (shown[0] ?? newest);
  if (!shown.length) shown.push(...(report ? ids : [run]));
  if (run !== state.run || shown.length !== state.shown.length) choose({ run, shown });
  found.missing = missing;
}

/** Note which runs have news (null: all), and load them. */
function news(ids) {
  if (ids) ids.forEach((id) => stale.add(id));
  else allStale = true;
  pending = true;
  load();
}

/** Show what cannot be read now. Data that was read before stays visible. */
function showFaults() {
  const banner = byId("banner");
  const message = ({ location, text }) => `cannot read ${location}, will try again: ${text}`;
  const texts = found.faults.map(message);
  if (found.missing) texts.push(`there is no run ${found.missing} here; the newest is shown`);
  banner.textContent = texts.join("; ");
  banner.hidden = !texts.length;
}

let stateBefore;
function announceEnd() {
  const now = found.details.get(state.run);
  const key = now && `${now.id} ${now.state}`;
  const isSameRun = stateBefore && now && stateBefore.startsWith(`${now.id} `);
  if (isSameRun && key !== stateBefore) announce(`${now.name}: ${now.state}`);
  stateBefore = key;
}

onChoice(() => {
  found.missing = "";
  const ids = listed();
  // the table may have a run that is newer than the rows: `load` settles it with new ones
  const unknown = [state.run, ...state.shown].filter((id) => id && !ids.has(id));
  if (!unknown.length) settle();
  showFaults();
  draw();
  const missing = [...unknown, ...wanted().filter((id) => !found.details.has(id))];
  if (missing.length) news(missing);
});
startTheme(() => parts.forEach((part) => part.repaint?.()));
listen(news);
if (report) load();
else {
  setInterval(() => glance.tick(view()), 1000);
  setInterval(() => news([state.run]), SILENCE); // a run that becomes silent sends no news
}
