// Tags and the note of a run: shown beside its name, and edited below it.

import { put, report } from "./api.js";
import { h, onChange } from "./dom.js";
import { choose, state } from "./state.js";

/** Return the tags of a run as buttons that filter the table of runs by them. */
export function tagButtons(tags) {
  return tags.map((tag) => {
    const click = () => {
      const words = [...state.filter.split(/\s+/).filter(Boolean), `tag=${tag}`];
      choose({ tab: "table", filter: [...new Set(words)].join(" ") });
    };
    const title = "Show all runs with this tag";
    return h("button", { class: "tag", type: "button", title, on: { click } }, tag);
  });
}

export function notes() {
  const line = h("span", { class: "tags", id: "tags" });
  const said = h("summary");
  const short = h("details", { class: "said", id: "said" }, said); // one line until it is opened
  const text = h("div", { id: "note" });
  const forms = new Map(); // by run, so that no text is lost when another run is chosen
  let last;
  const draw = onChange((run) => {
    const edit = () => {
      forms.set(run.id, form(run));
      update(last);
      forms.get(run.id).querySelector("input").focus();
    };
    const button = h("button", { class: "quiet small", id: "edit-notes", type: "button",
      on: { click: edit } }, "Tags and note");
    const why = run.locked && h("small", { id: "notes-locked" }, `Not editable: ${run.locked}`);
    line.replaceChildren(...tagButtons(run.tags), ...(report ? [] : [why || button]));
    said.textContent = said.title = run.note;
    short.hidden = !run.note;
    const shown = forms.get(run.id) ?? "";
    if (text.firstChild !== shown) text.replaceChildren(shown);
  });

  function form(run) {
    const tags = h("input", { type: "search", id: "tags-text", value: run.tags.join(" ") });
    const note = h("textarea", { id: "note-text", rows: 3 }, run.note);
    const problem = h("p", { role: "alert", "data-severity": "bad" });
    const close = () => (forms.delete(run.id), update(last));
    const save = async (event) => {
      event.preventDefault();
      const words = [...new Set(tags.value.split(/[\s,]+/).filter(Boolean))];
      const given = { tags: words, note: note.value, version: run.noted };
      problem.textContent = await put("notes", { id: run.id }, given);
      if (!problem.textContent) close();
    };
    return h("form", { class: "notes", on: { submit: save } },
      h("label", {}, "Tags, separated by spaces", tags), h("label", {}, "Note", note),
      h("div", {}, h("button", { class: "quiet", id: "save-notes" }, "Save"),
        h("button", { class: "quiet", type: "button", on: { click: close } }, "Cancel")), problem);
  }

  function update(run) {
    last = run;
    const { id, tags, note, locked, noted } = run;
    draw({ id, tags, note, locked, noted, editing: forms.has(id) });
  }
  return { line, short, text, update };
}
