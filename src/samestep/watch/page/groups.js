// Groups of the shown runs by a setting, such as all seeds of a learning rate.

import { lookAt, setGroupLooks } from "./colors.js";
import { several } from "./format.js";
import { report } from "./api.js";
import { flat, ownNames } from "./settings.js";
import { state } from "./state.js";

export const PLACES = ["dir", "remote", "sinks"]; // differ in most runs, not in results

/**
 * Return the lines of the charts, a run or a group of runs each: {id, name, ids, look, isGroup};
 * and the settings by which the `runs` can be grouped: they differ, but not in all runs.
 */
export function grouped(runs, details) {
  const settings = report || runs.length < 2 ? new Map() : settingsOf(runs, details);
  const values = new Map(); // by setting: its values
  for (const own of settings.values()) {
    for (const [name, value] of own) values.set(name, (values.get(name) ?? new Set()).add(value));
  }
  const differs = ([name, { size }]) => {
    const count = size + [...settings.values()].some((own) => !own.has(name));
    return count > 1 && count < settings.size && !PLACES.includes(name);
  };
  const names = [...values].filter(differs).map(([name]) => name);
  const isGrouped = names.includes(state.group);
  const groups = isGrouped ? groupsBy(state.group, runs, settings) : [];
  setGroupLooks(new Map(groups.flatMap(({ ids, look }) => ids.map((id) => [id, look]))));
  return { groups, names };
}

function settingsOf(runs, details) {
  const loaded = runs.map(({ id }) => details.get(id)).filter(Boolean);
  const own = ownNames(loaded);
  return new Map(loaded.map((run) => [run.id, flat(run, own)]));
}

function groupsBy(setting, runs, settings) {
  const loaded = runs.map(({ id }) => id).filter((id) => settings.has(id));
  const members = Map.groupBy(loaded, (id) => settings.get(id).get(setting) ?? "–");
  const order = new Intl.Collator("en", { numeric: true });
  const compare = ([one], [other]) =>
    (isNaN(one) || isNaN(other) ? order.compare(one, other) : one - other);
  return [...members].sort(compare).map(([value, ids], place) => {
    const name = `${setting}=${value}`;
    const [runCount, look] = [several(ids.length, "run"), lookAt(place)];
    return { id: name, name, count: runCount, ids, look, isGroup: true };
  });
}
