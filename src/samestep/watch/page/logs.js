// What a worker printed last, followed while the panel is open, with a search.

import { latest, path, report } from "./api.js";
import { h, onChange, searchBox } from "./dom.js";
import { bytes } from "./format.js";
import { choose, state } from "./state.js";

const PAUSE = 2000; // milliseconds between two requests
const AT_END = 40; // pixels from the end, within which the panel follows new lines

export function logsPanel(root) {
  const change = () => choose({ worker: select.value });
  const select = h("select", { id: "log-worker", on: { change } });
  const search = searchBox("log-search", "Search lines", (text) => choose({ find: text }));
  const note = h("p", { class: "note", id: "log-note" });
  const text = h("pre", { class: "log", id: "log-text", tabindex: 0, "aria-label": "Log" });
  const tools = h("div", { class: "tools" },
    h("label", {}, "Log of ", select), h("span", { class: "find" }, search));
  root.append(tools, note, text);
  let run = null;
  let shown = { of: "", size: 0 }; // what the text is: its run, worker and search
  let polls = 0;

  const drawChoice = onChange((workers) => {
    const option = (rank) => h("option", { value: String(rank) }, `worker ${rank}`);
    select.replaceChildren(...workers.map(option));
  });
  const load = latest(({ workers, size, cut, lines }) => {
    const worker = chosen();
    drawChoice(workers);
    select.value = worker;
    tools.hidden = !workers.length;
    if (!workers.length) {
      say(NONE);
    } else if (!workers.includes(Number(worker))) {
      choose({ worker: String(workers[0]) });
    } else if (lines) {
      const isAtEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - AT_END;
      const isOther = shown.of !== key();
      text.textContent = lines.join("\n");
      text.hidden = !lines.length;
      if (isAtEnd || isOther) text.scrollTop = text.scrollHeight;
      shown = { of: key(), size };
      note.textContent = summary(lines, worker, size, cut);
    }
  });
  const chosen = () => state.worker || "0";
  const key = () => JSON.stringify([run?.id, chosen(), state.find]);
  function say(what) {
    note.textContent = what;
    text.hidden = true;
  }
  function poll() {
    if (!run || root.hidden || document.hidden) return;
    const have = shown.of === key() ? shown.size : null;
    const query = { id: run.id, worker: chosen(), search: state.find || null, have };
    load(path("log", query), (polls += 1));
  }
  if (report) {
    tools.hidden = true;
    say("A report has no logs. They are in logs/ of the run's directory.");
  } else {
    setInterval(poll, PAUSE);
  }
  return {
    update(view) {
      run = view.run ?? null;
      if (document.activeElement !== search) search.value = state.find;
      if (!report) poll();
    },
  };
}

const NONE =
  "No logs. `samestep run` and `ss.launch` write worker output to logs/ in the run's directory.";

function summary(lines, worker, size, cut) {
  const where = `logs/worker-${worker}.log (${bytes(size)})`;
  if (!lines.length) return state.find ? `No matching line at the end of ${where}.` : where;
  return cut ? `The end of ${where}` : where;
}
