// The resolved configuration of a run, and what differs in another.

import { h, onChange } from "./dom.js";
import { choose, state } from "./state.js";

export function configurationPanel(root) {
  const select = h("select", { id: "versus", on: { change: () => choose({ versus: select.value }) } });
  const only = h("input", { type: "checkbox", id: "only-differences", on: { change: () => again() } });
  const onlyLabel = h("label", { class: "check" }, only, "Only differences");
  const chooser = h("div", { class: "tools" }, h("label", {}, "Compare with ", select), onlyLabel);
  const table = h("table", { class: "config", id: "config" });
  root.append(chooser, table);
  let given;
  const again = () => draw({ ...given, only: only.checked });
  const draw = onChange(({ name, config, other, only: differing }) => table.replaceChildren(...content(name, config, other, differing)));
  const drawChoice = onChange((rows) =>
    select.replaceChildren(h("option", { value: "" }, "no other run"), ...rows.map(({ id, name }) => h("option", { value: id }, name))),
  );
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
      given = { name: run.name, config: run.config, other: other && { name: other.name, config: other.config } };
      again();
    },
  };
}

function content(name, config, other, differing) {
  const mine = flat(config);
  const theirs = other ? flat(other.config) : new Map();
  const keys = [...new Set([...mine.keys(), ...theirs.keys()])].filter((key) => !(other && differing) || mine.get(key) !== theirs.get(key));
  const rows = keys.map((key) => {
    const differs = other && mine.get(key) !== theirs.get(key);
    return h(
      "tr",
      { "data-key": key, "data-differs": differs },
      h("th", { scope: "row" }, key, differs && h("span", { class: "unseen" }, " differs")),
      h("td", {}, mine.get(key) ?? "–"),
      other && h("td", {}, theirs.get(key) ?? "–"),
    );
  });
  const head = h(
    "thead",
    {},
    h("tr", {}, h("th", { scope: "col" }, "Option"), h("th", { scope: "col" }, name), other && h("th", { scope: "col" }, other.name)),
  );
  return [
    head,
    h(
      "tbody",
      {},
      rows.length ? rows : h("tr", {}, h("td", { colspan: 3 }, other ? "Nothing differs." : "No configuration in the record yet.")),
    ),
  ];
}

/** Nested options by their dotted names, each value as JSON has it. */
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
