// Tabs, following the ARIA pattern: arrow keys move between them. Only the open panel is drawn.

import { h, onChange } from "./dom.js";
import { choose, state } from "./state.js";

export function tabs(list, place, panels) {
  const names = Object.keys(panels);
  const made = {};
  for (const [name, [label, make]] of Object.entries(panels)) {
    const [click, panel] = [() => choose({ tab: name }), `panel-${name}`];
    const button = { role: "tab", id: `tab-${name}`, type: "button", "aria-controls": panel };
    const tab = h("button", { ...button, on: { click } }, label);
    const root = h("div", { role: "tabpanel", id: panel, class: `panel ${name}`,
      "aria-labelledby": `tab-${name}`, hidden: true });
    list.append(tab);
    place.append(root);
    made[name] = { tab, root, panel: make(root) };
  }
  list.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = names.indexOf(state.tab);
    const end = { Home: 0, End: names.length - 1 }[event.key];
    const next = by ? (at + by + names.length) % names.length : end;
    if (next === undefined) return;
    event.preventDefault();
    choose({ tab: names[next] });
    made[names[next]].tab.focus();
  });
  const reveal = onChange((name) => {
    const { tab } = made[name]; // scroll to it, because not all tabs fit on a phone
    const left = tab.offsetLeft - list.offsetLeft;
    const right = left + tab.offsetWidth + 12 - list.clientWidth;
    list.scrollLeft = Math.min(left - 12, Math.max(list.scrollLeft, right));
  });
  return {
    update(view) {
      list.hidden = place.hidden = !view.run;
      const open = made[state.tab] ? state.tab : names[0];
      for (const name of names) {
        const { tab, root } = made[name];
        tab.setAttribute("aria-selected", String(name === open));
        tab.tabIndex = name === open ? 0 : -1;
        root.hidden = name !== open;
      }
      reveal(open);
      made[open].panel.update(view);
    },
    repaint: () => Object.values(made).forEach(({ panel }) => panel.repaint?.()),
  };
}
