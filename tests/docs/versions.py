"""Build the documentation of each release, and of the main branch, into one folder of a web site.

usage: python -m tests.docs.versions FOLDER

A release is a tag such as v0.2.0. Those that FOLDER has are left as they are: to build one again,
remove its folder. The main branch is always built. Any server of files can serve FOLDER:

| in FOLDER | contents |
|---|---|
| `0.2.0/`, `main/` | the site of that version |
| `versions.json` | all versions and their pages, for the menu in the sidebar (docs/versions.js) |
| `index.html`, `latest/` | redirects to the newest release, from `latest/` for each of its pages |

Sphinx runs in this environment, with the samestep of each version.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.docs.blocks import ROOT

MAIN = "main"
RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
# A script keeps the query and the place in the page.
REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>samestep</title>
<script>location.replace("{target}" + location.search + location.hash)</script>
<noscript><meta http-equiv="refresh" content="0; url={target}"></noscript>
<a href="{target}">The newest version</a>
</html>
"""


def build_versions(site: Path, repository: Path = ROOT) -> None:
    """Build what `site` lacks of the releases of a repository, and its main branch again.

    Raises `subprocess.CalledProcessError` if git or Sphinx fails; `site` then has no part of that
    version.
    """
    tags = _git(repository, "tag", "--list", "v*").decode().split()
    missing = {tag[1:]: tag for tag in tags if RELEASE.fullmatch(tag[1:])}
    missing = {name: tag for name, tag in missing.items() if not (site / name).exists()}
    site.mkdir(parents=True, exist_ok=True)
    for name, revision in (missing | {MAIN: MAIN}).items():
        with tempfile.TemporaryDirectory(dir=site, prefix=".building-") as folder:
            built = _build(name, _git(repository, "archive", revision), Path(folder))
            shutil.rmtree(site / name, ignore_errors=True)
            built.rename(site / name)
    write_index(site)


def write_index(site: Path) -> None:
    """Write `versions.json` and the redirects for the versions that `site` has."""
    names = [path.name for path in site.iterdir() if RELEASE.fullmatch(path.name)]
    names.sort(key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    names += [MAIN] if (site / MAIN).exists() else []
    newest = names[0]
    versions = [
        {
            "name": name,
            "url": f"{name}/",
            "preferred": name == newest,
            "pages": _pages(site / name),
        }
        for name in names
    ]
    (site / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    (site / "index.html").write_text(REDIRECT.format(target=f"{newest}/index.html"))
    shutil.rmtree(site / "latest", ignore_errors=True)
    for page in _pages(site / newest):
        path = site / "latest" / page
        path.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (1 + page.count("/"))
        path.write_text(REDIRECT.format(target=f"{up}{newest}/{page}"))


def _pages(folder: Path) -> list[str]:
    """Return the pages of a version, without source code."""
    paths = (path.relative_to(folder) for path in folder.rglob("*.html"))
    return sorted(path.as_posix() for path in paths if not path.parts[0].startswith("_"))


def _build(name: str, archive: bytes, folder: Path) -> Path:
    """Return the folder with the pages of a version, whose files are in a tar archive."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder / "source", filter="tar")  # links may lead anywhere
    # docs/conf.py knows the installed version only
    settings = (f"version={name}", f"release={name}", f"html_title=samestep {name}")
    options = [word for setting in settings for word in ("-D", setting)]
    environment = {**os.environ, "PYTHONPATH": str(folder / "source" / "src")}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "--quiet",
            "-d",
            "../doctrees",
            *options,
            "docs",
            "../html",
        ],
        cwd=folder / "source",
        env=environment,
        check=True,
    )
    return folder / "html"


def _git(repository: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(repository), *arguments], stdout=subprocess.PIPE, check=True
    ).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    build_versions(parser.parse_args().folder)
