// The settings of a run, its options and origin, and their differences from another run.

import { h, onChange } from "./dom.js";
import { choose, state } from "./state.js";

export function settingsPanel(root) {
  const change = () => choose({ versus: select.value });
  const select = h("select", { id: "versus", on: { change } });
  const again = () => draw({ ...given, only: only.checked });
  const only = h("input", { type: "checkbox", id: "only-differences", on: { change: again } });
  const onlyLabel = h("label", { class: "check" }, only, "Only differences");
  const chooser = h("div", { class: "tools" }, h("label", {}, "Compare with ", select), onlyLabel);
  const table = h("table", { class: "config", id: "config" });
  const folded = h("table", { class: "config", id: "defaults" });
  const more = h("details", {}, h("summary", {}, "Options with default values"), folded);
  root.append(chooser, table, more);
  let given;
  const draw = onChange((shown) => {
    const { all, usual } = rows(shown);
    table.replaceChildren(...content(shown, all, shown.other ? "No differences." : EMPTY));
    folded.replaceChildren(...content(shown, usual, ""));
    more.hidden = !usual.length;
  });
  const drawChoice = onChange((others) => {
    const options = others.map(({ id, name }) => h("option", { value: id }, name));
    select.replaceChildren(h("option", { value: "" }, "no other run"), ...options);
  });
  return {
    update(view) {
      const { run } = view;
      if (!run) return;
      const others = view.rows.filter(({ id }) => id !== run.id);
      drawChoice(others.map(({ id, name }) => ({ id, name })));
      const versus = others.some(({ id }) => id === state.versus) ? state.versus : "";
      select.value = versus;
      chooser.hidden = !others.length;
      onlyLabel.hidden = !versus;
      const other = view.details.get(versus);
      const own = ownNames(other ? [run, other] : [run]);
      given = { mine: settingsOf(run, own), other: other && settingsOf(other, own) };
      again();
    },
  };
}

const EMPTY = "No settings in the record yet.";

const settingsOf = ({ name, defaults, ...run }, own) => ({
  name, defaults: defaults.map((option) => distinct(option, own)), values: [...flat(run, own)] });

/** Return the names of the jobs' own settings. */
export const ownNames = (runs) =>
  new Set(runs.flatMap(({ settings }) => dotted(settings).map(([name]) => name)));

/** Return the name of an option or of an origin that differs from those of the jobs' settings. */
const distinct = (name, own) => (own.has(name) ? `samestep.${name}` : name);

/**
 * Return the job's settings, then options, then the origin of a run, by name as text. `own` has the
 * names of the settings of all runs that are compared.
 */
export function flat({ settings, config, command, commit, hosts, environment }, own) {
  const found = { command, commit, hosts: hosts.join(", ") };
  const origin = Object.entries(found).filter(([, value]) => value);
  const versions = dotted(environment, "environment.").filter(([, value]) => value !== "None");
  const others = [...dotted(config), ...origin, ...versions];
  return new Map([...dotted(settings),
    ...others.map(([name, value]) => [distinct(name, own), value])]);
}

/** Return the rows to show, and those of options that have their defaults in all runs. */
function rows({ mine, other, only }) {
  const [values, theirs] = [new Map(mine.values), new Map(other?.values)];
  const found = [...new Set([...values.keys(), ...theirs.keys()])].map((key) => {
    const [value, their] = [values.get(key), theirs.get(key)];
    return { key, value, other: their, differs: Boolean(other) && value !== their };
  });
  const isUsual = ({ key, differs }) => mine.defaults.includes(key) && !differs;
  return {
    all: found.filter((row) => !isUsual(row) && (row.differs || !(other && only))),
    usual: other && only ? [] : found.filter(isUsual),
  };
}

function content({ mine, other }, found, empty) {
  const body = found.map(({ key, value, other: theirs, differs }) =>
    h("tr", { "data-key": key, "data-differs": differs },
      h("th", { scope: "row" }, key, differs && h("span", { class: "unseen" }, " differs")),
      h("td", {}, value ?? "–"), other && h("td", {}, theirs ?? "–")));
  const titles = ["Setting", mine.name, ...(other ? [other.name] : [])];
  const head = h("tr", {}, titles.map((title) => h("th", { scope: "col" }, title)));
  const none = h("tr", {}, h("td", { colspan: 3 }, empty));
  return [h("thead", {}, head), h("tbody", {}, body.length ? body : none)];
}

/** Return nested values by their dotted names, as JSON if they are not text. */
function dotted(values, before = "") {
  return Object.entries(values ?? {}).flatMap(([key, value]) => {
    const nested = value !== null && typeof value === "object" && !Array.isArray(value);
    return nested
      ? dotted(value, `${before}${key}.`)
      : [[`${before}${key}`, typeof value === "string" ? value : JSON.stringify(value)]];
  });
}
