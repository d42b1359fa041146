"""The site of several versions: what is built, where links lead, and the menu in a browser."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.docs import versions
from tests.docs.blocks import ROOT
from tests.leaks import nothing_left
from tests.needs import needs
from tests.watch.browser.pages import browsing
from tests.watch.serving import until


def make_site(folder, **pages):
    for name, paths in pages.items():
        for path in paths:
            page = folder / name / path
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(name)
    return folder


def names_of(site):
    return [version["name"] for version in json.loads((site / "versions.json").read_text())]


def targets(site):
    """Return the page that each redirect of a site leads to."""
    redirects = [site / "index.html", *(site / "latest").rglob("*.html")]
    found = {}
    for page in redirects:
        addresses = set(re.findall(r'(?:url=|href="|replace\(")([^"]+)"', page.read_text()))
        (address,) = addresses  # the script, the link, and the page without a script agree
        found[str(page.relative_to(site))] = (page.parent / address).resolve()
    return found


@pytest.mark.parametrize(
    ("there", "names"),
    [
        (["main"], ["main"]),
        (["0.9.0"], ["0.9.0"]),
        (["0.9.0", "0.10.0", "main"], ["0.10.0", "0.9.0", "main"]),
        (["1.0.0", "1.0.1", "0.12.3"], ["1.0.1", "1.0.0", "0.12.3"]),
        (["1.0.0", "1.1.0rc1", "v2", "latest", "images", "1.0"], ["1.0.0"]),
    ],
)
def test_the_newest_release_is_first_and_preferred(tmp_path, there, names):
    site = make_site(tmp_path, **dict.fromkeys(there, ("index.html",)))
    versions.write_index(site)
    listed = json.loads((site / "versions.json").read_text())
    assert [version["name"] for version in listed] == names
    assert [version["preferred"] for version in listed] == [True, *[False] * (len(names) - 1)]
    assert all((site / version["url"] / "index.html").exists() for version in listed)
    assert (site / there[-1] / "index.html").read_text() in {there[-1], versions.REDIRECT}


def test_every_page_of_the_newest_release_has_a_latest_address(tmp_path):
    pages = ["index.html", "gone.html", "recipes/vit.html"]
    site = make_site(tmp_path, **{"0.1.0": [*pages, "_modules/run.html"]})
    versions.write_index(site)
    assert json.loads((site / "versions.json").read_text())[0]["pages"] == sorted(pages)
    make_site(site, **{"0.2.0": ["index.html", "recipes/vit.html"], "main": pages})
    versions.write_index(site)
    assert targets(site) == {
        "index.html": site / "0.2.0/index.html",
        "latest/index.html": site / "0.2.0/index.html",
        "latest/recipes/vit.html": site / "0.2.0/recipes/vit.html",
    }


def git(repository, *arguments):
    values = ("user.name=one", "user.email=one@localhost", "commit.gpgsign=no", "tag.gpgsign=no")
    settings = [word for value in values for word in ("-c", value)]
    command = ["git", "-C", str(repository), *settings, *arguments]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """Return a repository with two releases, a tag that is none, and a later commit on main."""
    folder = tmp_path / "repository"
    docs = folder / "docs"
    (docs / "deep").mkdir(parents=True)
    (folder / "src").mkdir()
    (folder / "link").symlink_to("/elsewhere")
    for name in ("conf.py", "site.css", "versions.js", "llms.txt"):
        shutil.copy(ROOT / "docs" / name, docs)
    with (docs / "conf.py").open("a") as file:
        file.write(
            "from of_this_version import NAME\n"
            'myst_enable_extensions = ["substitution"]\n'
            'myst_substitutions = {"name": NAME}\n'
        )
    (docs / "index.md").write_text(
        "# Start\n\n{{ name }}\n\n```{toctree}\n:glob:\ndeep/*\nonly*\n```\n"
    )
    (docs / "deep" / "page.md").write_text("# Deep page\n\n## Part\n\nlanes\n")
    git(folder, "init", "--initial-branch", "main")
    for name, tag in (("first", "v0.9.0"), ("second", "v0.10.0"), ("later", "v2-broken")):
        (folder / "src" / "of_this_version.py").write_text(f'NAME = "source-{name}"\n')
        if name == "second":
            (docs / "only.md").write_text("# Only here\n\nexponential\n")
        git(folder, "add", ".")
        git(folder, "commit", "--message", name)
        git(folder, "tag", tag)
    return folder


def test_only_what_is_missing_and_main_is_built(tmp_path, repository, monkeypatch):
    built = []

    def build(name, archive, folder):
        built.append(name)
        assert archive
        if name == fails:
            raise subprocess.CalledProcessError(2, "sphinx")
        make_site(folder, html=["index.html"])
        return folder / "html"

    monkeypatch.setattr(versions, "_build", build)
    site = tmp_path / "site"
    fails = "0.9.0"
    with pytest.raises(subprocess.CalledProcessError):
        versions.build_versions(site, repository)
    assert not (site / "0.9.0").exists()
    fails = "main"
    with pytest.raises(subprocess.CalledProcessError):
        versions.build_versions(site, repository)
    fails = None
    built.clear()
    versions.build_versions(site, repository)
    assert built == ["main"]
    assert names_of(site) == ["0.10.0", "0.9.0", "main"]
    shutil.rmtree(site / "0.10.0")
    versions.build_versions(site, repository)
    assert built == ["main", "0.10.0", "main"]
    assert sorted(path.name for path in site.iterdir()) == [
        *("0.10.0", "0.9.0", "index.html", "latest", "main", "versions.json")
    ]
    git(repository, "branch", "--move", "trunk")
    with pytest.raises(subprocess.CalledProcessError, match="archive"):
        versions.build_versions(site, repository)


@contextmanager
def served(folder):
    """Serve files without a log, as any server of files does."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


SHOWN = """
const read = (entry) => entry.name.endsWith("/versions.json");
if (location.protocol !== "file:" && !performance.getEntriesByType("resource").some(read)) return;
const banner = document.querySelector(".versions-banner");
return {
  title: document.querySelector(".sidebar-brand-text").textContent,
  links: Object.fromEntries([...document.querySelectorAll(".versions a")].map(
    (link) => [link.textContent, link.getAttribute("href")])),
  current: document.querySelector(".versions a[aria-current]")?.textContent,
  banner: banner && banner.innerText.replace(/\\s+/g, " ").trim(),
};
"""


@pytest.mark.long
def test_readers_see_the_version_and_reach_the_others(tmp_path, repository):
    needs("chromium")
    needs("chromedriver")
    site = tmp_path / "site"
    versions.build_versions(site, repository)
    for name, source in (("0.9.0", "first"), ("0.10.0", "second"), ("main", "later")):
        assert f"source-{source}" in (site / name / "index.html").read_text()
    with nothing_left(), served(site) as address, browsing() as driver:

        def shown(page):
            driver.get(page)
            return until(lambda: driver.execute_script(SHOWN))

        page = shown(f"{address}/0.10.0/deep/page.html?x=1#part")
        assert page == {
            "title": "samestep 0.10.0",
            "links": {
                name: f"{address}/{name}/deep/page.html?x=1#part"
                for name in ("0.10.0", "0.9.0", "main")
            },
            "current": "0.10.0",
            "banner": None,
        }
        page = shown(f"{address}/main/only.html")
        assert page["links"]["0.9.0"] == f"{address}/0.9.0/index.html"  # which lacks the page
        assert page["links"]["0.10.0"] == f"{address}/0.10.0/only.html"
        banner = "Not the newest release This page describes version {}. "
        banner += "The newest release is 0.10.0."
        assert page["banner"] == banner.format("main")
        page = shown(f"{address}/0.9.0/")
        assert page["banner"] == banner.format("0.9.0")
        assert page["links"]["main"] == f"{address}/main/index.html"
        driver.get(f"{address}/latest/deep/page.html#part")
        until(lambda: driver.current_url == f"{address}/0.10.0/deep/page.html#part")
        driver.get(address)
        until(lambda: driver.current_url == f"{address}/0.10.0/index.html")
        driver.get(f"{address}/0.10.0/search.html?q=exponential")
        found = 'return document.querySelector("#search-results li a")?.textContent'
        assert until(lambda: driver.execute_script(found)) == "Only here"
        # without the list, or with files instead of a server: the version alone
        alone = {"title": "samestep 0.9.0", "links": {}, "current": None, "banner": None}
        assert shown((site / "0.9.0" / "index.html").as_uri()) == alone
        for text in (None, "<html>", "{}", '[{"name": "0.9.0"}]', "[]"):
            (site / "versions.json").unlink(missing_ok=True)
            if text is not None:
                (site / "versions.json").write_text(text)
            assert shown(f"{address}/0.9.0/index.html") == alone
            errors = [entry["message"] for entry in driver.get_log("browser")]
            assert [error for error in errors if "versions.js:" in error] == []
