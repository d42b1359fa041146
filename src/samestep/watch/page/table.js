// The table of all runs: their scores, and the settings in which they differ.

import { get, report } from "./api.js";
import { h, keepFocus, onChange, released, searchBox } from "./dom.js";
import { ago, bestOf, count, duration, frequent, number, several } from "./format.js";
import { PLACES } from "./groups.js";
import { tagButtons } from "./notes.js";
import { scatter } from "./scatter.js";
import { flat, ownNames } from "./settings.js";
import { show } from "./sidebar.js";
import { choose, state } from "./state.js";

const MOST_SCORES = 2; // chosen automatically
const MOST_SETTINGS = 6;
const MOST_ROWS = 100; // until "Show all" is pressed
const PAUSE = 3000; // milliseconds between two requests
// a run becomes silent without an event, and has no `elapsed` until its record is read
const NEWS = ["updated", "state", "elapsed", "noted"];

export function tablePanel(root) {
  let runs = [];
  let names = [];
  let usual = { of: null, columns: [] }; // for a filter and an answer
  let lines = new Map(); // rows of the table by run
  let asked = -Infinity;
  let answered = 0;
  let timer; // of news that came too early for a request
  let all = false;
  const search = searchBox("run-filter", "Filter: name, tag=…, lr<0.1", (text) =>
    choose({ filter: text }));
  const columns = h("details", { class: "columns" });
  const table = h("table", { class: "config runs-table", id: "runs-table" });
  const chart = scatter();
  const on = { click: () => ((all = true), draw()) };
  const more = h("button", { class: "quiet", type: "button", hidden: true, on }, "Show all");
  const overlay = h("button", { id: "show-matching", type: "button",
    title: "Show only the runs of this table in Curves",
    on: { click: () => showOnly(runs.filter(matches(runs)).map(({ id }) => id)) } });
  const find = h("span", { class: "find" }, search);
  root.append(h("div", { class: "tools" }, find, h("span", { class: "segments" }, overlay), columns,
    chart.tools), chart.element, table, more);
  const drawChoice = onChange(([chosen, ...found]) =>
    columns.replaceChildren(h("summary", {}, "Columns"),
      ...found.map((name) => choice(name, chosen))));
  const forget = onChange(() => (lines = new Map()));
  const drawTable = onChange(({ look }, rows) => {
    const { chosen, run, tagged } = look;
    rows.forEach((row) => lines.has(row) || lines.set(row, line(row, chosen, run, tagged)));
    keepFocus(table, () => table.replaceChildren(head(chosen, state.sort, tagged),
      h("tbody", {}, rows.map((row) => lines.get(row)))));
  });
  function draw() {
    const matching = runs.filter(matches(runs));
    const of = `${answered} ${state.filter}`;
    if (usual.of !== of) usual = { of, columns: automatic(matching) };
    const chosen = state.columns.length ? state.columns : usual.columns;
    drawChoice([chosen, ...names]);
    const rows = sorted(matching).slice(0, all ? runs.length : MOST_ROWS);
    const clock = report ? report.written : Date.now() / 1000;
    const tagged = runs.some(({ tags }) => tags.length);
    const look = { chosen, tagged, run: state.run, answered };
    forget(look);
    drawTable({ look, sort: state.sort, ids: rows.map(({ id }) => id) }, rows);
    rows.forEach((row) => {
      lines.get(row).querySelector("input").checked = state.shown.includes(row.id);
      lines.get(row).lastChild.textContent = ago(row.updated, clock);
    });
    overlay.textContent = `Show curves of ${several(matching.length, "run")}`;
    overlay.disabled = !matching.length;
    more.hidden = rows.length === matching.length;
    chart.update(matching, names, state.run);
  }
  const panel = {
    async update(view) {
      clearTimeout(timer);
      if (document.activeElement !== search) search.value = state.filter;
      draw();
      const known = new Map(runs.map((run) => [run.id, run]));
      const isOld = view.rows.length !== runs.length || view.rows.some((row) =>
        !known.has(row.id) || NEWS.some((key) => known.get(row.id)[key] !== row[key]));
      if (!isOld) return;
      const early = asked + PAUSE - performance.now();
      if (early > 0) {
        timer = setTimeout(() => panel.update(view), early);
        return;
      }
      asked = performance.now();
      const response = await get("/api/table");
      await released();
      runs = described(response.runs);
      names = namesOf(runs);
      answered += 1;
      draw();
    },
  };
  return panel;
}

/** Return runs with their columns and the text that a filter searches. */
function described(runs) {
  const own = ownNames(runs);
  const scores = runs.flatMap((run) => Object.keys(run.scores));
  const columns = scores.flatMap((name) => [name, `best ${name}`]);
  const taken = new Set([...Object.keys(FIXED), ...columns]);
  return runs.map((run) => describedBy(run, own, taken));
}

/** `own` has the names of the jobs' settings, `taken` those of columns that are no settings. */
function describedBy(run, own, taken) {
  const settings = [...flat({ ...run, command: null }, own)];
  const pairs = settings.map(([name, value]) => `${name}=${value}`.toLowerCase());
  const values = new Map(settings.map(([name, value]) =>
    [taken.has(name) ? `setting ${name}` : name, value]));
  for (const [name, scores] of Object.entries(run.scores)) {
    values.set(name, scores.last);
    values.set(`best ${name}`, bestOf(scores));
  }
  const tags = run.tags.map((tag) => `tag=${tag}`.toLowerCase());
  const text = [run.name, run.id, run.state, ...pairs, ...tags, run.note].join(" ").toLowerCase();
  const { id, name, state: now, step, elapsed, updated, noted, note, nonfinite } = run;
  return { id, name, state: now, step, elapsed, updated, noted, note, text,
    nonfinite: nonfinite.length > 0, words: new Set([...tags, ...pairs]), tags: run.tags,
    columns: new Map([...values].map(([column, value]) => [column.toLowerCase(), value])),
    label: run.tags.join(" ") || null, values: Object.fromEntries(values),
    scores: Object.keys(run.scores), principals: run.principals };
}

function showOnly(ids) {
  choose({ shown: ids, run: ids.includes(state.run) ? state.run : ids[0], tab: "curves" });
}

/**
 * Return whether a run has all words of the filter. A run's tag or setting is one whole word, and
 * "lr<0.1" compares numbers of a column.
 */
function matches(runs) {
  const words = state.filter.toLowerCase().split(/\s+/);
  const isWhole = new Map(words.map((word) => [word, runs.some((run) => run.words.has(word))]));
  const tests = words.map((word) => {
    const [, name, sign, limit] = word.match(COMPARISON) ?? [];
    if (isWhole.get(word)) return (run) => run.words.has(word);
    const isColumn = name && runs.some((run) => run.columns.has(name));
    return (run) =>
      (isColumn ? compares(run.columns.get(name), sign, Number(limit)) : run.text.includes(word));
  });
  return (run) => tests.every((test) => test(run));
}

const COMPARISON = /^(.+?)([<>]=?)(-?[\d.]+(?:e[-+]?\d+)?)$/;

/** Return whether a value is a number that compares so; text and missing values never do. */
function compares(value, sign, limit) {
  const size = value === null || value === "" ? NaN : Number(value);
  return { "<": size < limit, "<=": size <= limit, ">": size > limit, ">=": size >= limit }[sign];
}

/** Return the names of all columns: scores, then settings in which the runs differ. */
function namesOf(runs) {
  const scores = new Set(runs.flatMap(({ scores: names }) => names));
  const seen = new Map();
  for (const [name, value] of runs.flatMap(({ values }) => Object.entries(values))) {
    seen.set(name, (seen.get(name) ?? new Set()).add(value));
  }
  const isScore = (name) => scores.has(name) || scores.has(name.replace(/^best /, ""));
  const differs = ([name, found]) => !isScore(name) && (found.size > 1 || runs.length === 1);
  const settings = [...seen].filter(differs).map(([name]) => name);
  return [...[...scores].flatMap((name) => [name, `best ${name}`]), ...settings];
}

/** Return a few scores, those that most runs have first, and settings in which the runs differ. */
function automatic(runs) {
  const names = namesOf(runs);
  const scores = new Set(runs.flatMap(({ scores: found }) => found));
  const isBest = (name) => name.startsWith("best ") && scores.has(name.slice(5));
  const principal = (role) => frequent(runs.flatMap(({ principals }) => principals[role] ?? []));
  const others = frequent(runs.flatMap(({ scores: found }) => found));
  const first = new Set([...principal("score"), ...principal("loss"), ...others]);
  const some = [...first].slice(0, MOST_SCORES);
  const isSetting = (name) => !scores.has(name) && !isBest(name) && !PLACES.includes(name);
  const settings = names.filter(isSetting);
  return [...some.flatMap((name) => [name, `best ${name}`]), ...settings.slice(0, MOST_SETTINGS)];
}

const FIXED = { run: "name", state: "state", step: "step", duration: "elapsed", age: "updated",
  tags: "label" };

/** Return runs in the chosen order, or newest first. Runs without a value come last. */
function sorted(runs) {
  const name = state.sort.replace(/^-/, "") || "age";
  const isDown = state.sort.startsWith("-") !== (name === "age"); // the newest has the lowest age
  const value = (run) => {
    const found = name in FIXED ? run[FIXED[name]] : run.values[name];
    return typeof found === "string" && found !== "" && !isNaN(found) ? Number(found) : found;
  };
  const isMissing = (one) => one === null || one === undefined;
  return runs.toSorted((a, b) => {
    const [one, other] = [value(a), value(b)];
    if (isMissing(one) || isMissing(other)) return isMissing(one) - isMissing(other);
    const order = one < other ? -1 : one > other ? 1 : 0;
    return isDown ? -order : order;
  });
}

function head(chosen, sort, tagged) {
  const first = tagged ? ["run", "tags"] : ["run"];
  const titles = [...first, "state", "step", "duration", ...chosen, "age"];
  const cells = titles.map((title) => {
    const order = sort === title ? "ascending" : sort === `-${title}` ? "descending" : "none";
    const click = () => choose({ sort: sort === `-${title}` ? title : `-${title}` });
    const button = h("button", { class: "quiet small", type: "button", on: { click } }, title);
    const arrow = { ascending: " ↑", descending: " ↓", none: "" }[order];
    return h("th", { scope: "col", "aria-sort": order, "data-column": title }, button, arrow);
  });
  return h("thead", {}, h("tr", {}, cells));
}

function line(run, chosen, current, tagged) {
  const click = () => choose({ run: run.id, shown: [...new Set([...state.shown, run.id])] });
  const name = h("button", { class: "quiet small", type: "button", on: { click } }, run.name);
  const box = h("input", { type: "checkbox", "aria-label": `Show curves of ${run.name}`,
    on: { change: () => show(run.id, box.checked) } });
  const shown = (value) => (typeof value === "number" ? number(value) : value ?? "–");
  return h("tr", { "data-run": run.id, "data-chosen": run.id === current },
    h("th", { scope: "row", title: run.note },
      h("span", { class: "check" }, box, name)),
    tagged && h("td", {}, tagButtons(run.tags)),
    h("td", {}, h("span", { class: "state", "data-state": run.state }, run.state), " ",
      run.nonfinite && h("span", { class: "state", "data-state": "nonfinite" }, "not finite")),
    h("td", {}, count(run.step)), h("td", {}, duration(run.elapsed)),
    chosen.map((column) => h("td", {}, shown(run.values[column]))), h("td", {}));
}

function choice(name, chosen) {
  const change = () => {
    const isShown = chosen.includes(name);
    choose({ columns: isShown ? chosen.filter((one) => one !== name) : [...chosen, name] });
  };
  const box = h("input", { type: "checkbox", checked: chosen.includes(name), on: { change } });
  return h("label", { class: "check" }, box, name);
}
