// The tabs, after the pattern that keyboards and screen readers know: arrows move between them, only the open panel is drawn.

import { h, onChange } from "./dom.js";
import { choose, state } from "./state.js";

export function tabs(list, place, panels) {
  const names = Object.keys(panels);
  const made = {};
  for (const [name, [label, make]] of Object.entries(panels)) {
    const tab = h(
      "button",
      { role: "tab", id: `tab-${name}`, type: "button", "aria-controls": `panel-${name}`, on: { click: () => choose({ tab: name }) } },
      label,
    );
    const root = h("div", {
      role: "tabpanel",
      id: `panel-${name}`,
      class: `panel ${name}`,
      "aria-labelledby": `tab-${name}`,
      hidden: true,
    });
    list.append(tab);
    place.append(root);
    made[name] = { tab, root, panel: make(root) };
  }
  list.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = names.indexOf(state.tab);
    const next = by ? (at + by + names.length) % names.length : { Home: 0, End: names.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose({ tab: names[next] });
    made[names[next]].tab.focus();
  });
  const reveal = onChange((name) => {
    const { tab } = made[name]; // on a phone not all tabs fit
    list.scrollLeft = Math.min(
      tab.offsetLeft - list.offsetLeft - 12,
      Math.max(list.scrollLeft, tab.offsetLeft - list.offsetLeft + tab.offsetWidth + 12 - list.clientWidth),
    );
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
