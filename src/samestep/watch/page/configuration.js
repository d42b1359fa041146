// The resolved configuration of a run, and its differences from another run.

import { h, onChange } from "./dom.js";
import { choose, state } from "./state.js";

export function configurationPanel(root) {
  const change = () => choose({ versus: select.value });
  const select = h("select", { id: "versus", on: { change } });
  const again = () => draw({ ...given, only: only.checked });
  const only = h("input", { type: "checkbox", id: "only-differences", on: { change: again } });
  const onlyLabel = h("label", { class: "check" }, only, "Only differences");
  const chooser = h("div", { class: "tools" }, h("label", {}, "Compare with ", select), onlyLabel);
  const table = h("table", { class: "config", id: "config" });
  root.append(chooser, table);
  let given;
  const draw = onChange((shown) => table.replaceChildren(...content(shown)));
  const drawChoice = onChange((rows) => {
    const options = rows.map(({ id, name }) => h("option", { value: id }, name));
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
      const compared = other && { name: other.name, config: other.config };
      given = { name: run.name, config: run.config, other: compared };
      again();
    },
  };
}

function content({ name, config, other, only }) {
  const mine = flat(config);
  const theirs = other ? flat(other.config) : new Map();
  const isDifferent = (key) => other && mine.get(key) !== theirs.get(key);
  const all = [...new Set([...mine.keys(), ...theirs.keys()])];
  const keys = all.filter((key) => !(other && only) || isDifferent(key));
  const rows = keys.map((key) => {
    const differs = isDifferent(key);
    return h(
      "tr",
      { "data-key": key, "data-differs": differs },
      h("th", { scope: "row" }, key, differs && h("span", { class: "unseen" }, " differs")),
      h("td", {}, mine.get(key) ?? "–"),
      other && h("td", {}, theirs.get(key) ?? "–"),
    );
  });
  const titles = ["Option", name, ...(other ? [other.name] : [])];
  const head = h("tr", {}, titles.map((title) => h("th", { scope: "col" }, title)));
  const empty = other ? "No differences." : "No configuration in the record yet.";
  const none = h("tr", {}, h("td", { colspan: 3 }, empty));
  return [h("thead", {}, head), h("tbody", {}, rows.length ? rows : none)];
}

/** Return nested options by their dotted names, with values as JSON. */
function flat(config, before = "") {
  return new Map(
    Object.entries(config ?? {}).flatMap(([key, value]) => {
      const nested = value !== null && typeof value === "object" && !Array.isArray(value);
      return nested
        ? [...flat(value, `${before}${key}.`)]
        : [[`${before}${key}`, typeof value === "string" ? value : JSON.stringify(value)]];
    }),
  );
}
