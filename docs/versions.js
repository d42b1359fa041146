// The versions of the site, from versions.json beside their folders (`make docs-versions`). Without
// that file, as after `make docs`, the title in the sidebar says which version a page describes.
(async () => {
  const start = new URL(document.documentElement.dataset.content_root, location.href);
  const list = new URL("../versions.json", start);
  let versions, shown;
  try {
    versions = await (await fetch(list)).json();
    shown = versions.find((version) => new URL(version.url, list).href === start.href);
  } catch {
    // no list, another file of that name, or pages that are opened without a server
  }
  if (!shown) return;
  const newest = versions.find((version) => version.preferred);
  const page = decodeURI(location.pathname.slice(start.pathname.length)) || "index.html";

  const link = (version) => {
    const element = document.createElement("a");
    element.textContent = version.name;
    const same = version.pages.includes(page);
    const address = new URL(same ? page : "index.html", new URL(version.url, list));
    element.href = same ? address.href + location.search + location.hash : address.href;
    if (version === shown) element.setAttribute("aria-current", "true");
    return element;
  };

  const menu = document.createElement("details");
  menu.className = "versions";
  const summary = document.createElement("summary");
  summary.textContent = `Version ${shown.name}`;
  const entries = document.createElement("ul");
  for (const version of versions) {
    const entry = document.createElement("li");
    entry.append(link(version));
    entries.append(entry);
  }
  menu.append(summary, entries);
  document.querySelector(".sidebar-brand").after(menu);

  if (shown === newest) return;
  const banner = document.createElement("div");
  banner.className = "admonition warning versions-banner";
  banner.setAttribute("role", "note");
  const title = document.createElement("p");
  title.className = "admonition-title";
  title.textContent = "Not the newest release";
  const text = document.createElement("p");
  text.append(`This page describes version ${shown.name}. The newest release is `, link(newest), ".");
  banner.append(title, text);
  document.querySelector("#furo-main-content").prepend(banner);
})();
