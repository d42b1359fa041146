"""`samestep report`: write curves, tables and images of runs into one self-contained HTML file."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from samestep.config import is_url
from samestep.errors import ConfigError, RecordError
from samestep.host import counted
from samestep.watch.curves import AXES
from samestep.watch.runs import LOCATIONS, check_locations, open_views, read_all
from samestep.watch.view import View

MOST_POINTS: Final = 1000  # per curve
FEWEST_POINTS: Final = 60
ALL_POINTS: Final = 400_000  # of all curves, about 15 MB
SPANS: Final = 500
DIGITS: Final = 6  # of a value, more than a screen shows

DEFAULT: Final = Path("report.html")
PAGE: Final = Path(__file__).parent / "page"
MAIN: Final = "main.js"
_IMPORT: Final = re.compile(r'^import \{([^}]+)\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)
_STYLE: Final = re.compile(r'<link rel="stylesheet" href="page/([\w.]+)">')
_SCRIPT: Final = re.compile(r'[ ]*<script src="page/([\w.]+)" (?:defer|type="module")></script>\n')
_ICON: Final = re.compile(r'(?<=<link rel="icon" href=")page/([\w.]+)')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep report` to its parser."""
    parser.add_argument("locations", **LOCATIONS)
    out = f"file to write (default: {DEFAULT}, unless that is a report of other runs)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    images = "megabytes of images to include, newest first (default: %(default)s)"
    parser.add_argument("--images", type=float, metavar="MB", default=20, help=images)


def main(options: argparse.Namespace) -> int:
    """Write the report and return 0. Raises `ConfigError`, or `RecordError` if there is no run."""
    if not 0 <= options.images < math.inf:
        raise ConfigError(f"--images must be a number of megabytes from 0, got {options.images}")
    check_locations(options.locations)
    # at the end of the file; a digest, because a report may be shared and paths are private
    places = sorted(path if is_url(path) else os.path.realpath(path) for path in options.locations)
    mark = f"<!-- runs {hashlib.sha256(json.dumps(places).encode()).hexdigest()[:16]} -->\n"
    if options.out is None:
        options.out = DEFAULT
        if DEFAULT.exists() and not DEFAULT.read_bytes().endswith(mark.encode()):
            text = f"{DEFAULT} exists and is no report of these runs; name another file with --out"
            raise ConfigError(text)
    report = make_report(options.locations, image_bytes=round(options.images * 1e6))
    try:
        options.out.write_text(report.page + mark, encoding="utf-8", newline="")
    except OSError as error:
        text = f"--out {options.out} cannot be written: {error.strerror}; use an existing folder"
        raise ConfigError(text) from error
    sys.stdout.write(f"{options.out}: {report.text}\n")
    return 0


@dataclass(frozen=True)
class HtmlReport:
    """A report: the HTML of its file, and a summary of its content as text."""

    page: str
    text: str


def make_report(locations: Iterable[str], *, image_bytes: int) -> HtmlReport:
    """Read all runs at or below `locations` and return their report.

    Curves are downsampled to their extremes, values rounded to 6 digits, and at most `image_bytes`
    of image files included. Raises `RecordError` if there is no run.
    """
    locations = list(locations)
    views = read_all(open_views(*locations))
    if not views:
        raise RecordError(
            f"no run at or below {' or '.join(locations)}; pass a folder with an events.jsonl"
        )
    responses: dict[str, Any] = {_path("runs"): {"runs": [view.row() for view in views]}}
    responses[_path("table")] = {"runs": [view.table_row() for view in views]}
    summaries = {view: view.summary() for view in views}
    axes = {view: AXES if view.samples is not None else AXES[:2] for view in views}
    curves = sum(len(axes[view]) * len(summaries[view]["scalars"]) for view in views)
    points = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(1, curves)))
    for view, summary in summaries.items():
        responses[_path("run", id=view.id)] = summary
        responses[_path("timing", id=view.id)] = _rounded(view.timing(points=SPANS))
        responses[_path("system", id=view.id)] = _rounded(view.system())
        for name in (series["name"] for series in summary["histograms"]):
            responses[_path("histogram", id=view.id, name=name)] = view.histogram(name)
        for scalar in summary["scalars"]:
            for axis in axes[view]:
                curve = view.curve(scalar["name"], points=points, axis=axis)
                responses[_path("curve", id=view.id, name=scalar["name"], x=axis)] = _rounded(curve)
    images: dict[str, str] = {}
    room, left_out = image_bytes, 0
    for view, number in _newest_first(summaries):
        if image := _read_image(view, number, room):
            kind, data = image
            url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
            images[_path("image", id=view.id, number=number)] = url
            room -= len(data)
        else:
            left_out += 1
    now = time.time()
    text = (
        f"Report of {counted(len(views), 'run')}, "
        f"written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(now))}; "
        f"at most {points} points per curve, including its extremes"
    )
    if left_out:
        total = left_out + len(images)
        text += f"; {left_out} of {total} images left out: over --images, missing or damaged"
    report = {"text": text, "written": now}
    page = one_file({"answers": responses | images, "report": report})
    return HtmlReport(page, text)


def _read_image(view: View, number: int, room: int) -> tuple[str, bytes] | None:
    """Return an image's media type and bytes, None if it has more than `room` or is damaged."""
    try:
        kind, size, chunks = view.open_image(number)
        return (kind, b"".join(chunks)) if kind and size <= room else None
    except RecordError:
        return None


def _newest_first(summaries: dict[View, dict[str, Any]]) -> Iterable[tuple[View, int]]:
    """Return the newest image of every name, then the one before of every name, and so on."""
    names = [
        [(view, item["number"]) for item in reversed(images["items"])]
        for view, summary in summaries.items()
        for images in summary["images"]
    ]
    return (image for layer in zip_longest(*names) for image in layer if image)


def _path(endpoint: str, **query: str | int) -> str:
    """Return the path that the page requests, with a query as URLSearchParams encodes it."""
    encoded = urlencode(query, safe="*", errors="replace").replace("~", "%7E")
    return f"/api/{endpoint}" + (f"?{encoded}" if query else "")


def _rounded(value: Any) -> Any:
    """Return JSON with `DIGITS` digits; x values, which may be times, to microseconds."""
    if isinstance(value, dict):
        rounded = {key: _rounded(inner) for key, inner in value.items() if key != "x"}
        return {"x": [round(x, 6) for x in value["x"]], **rounded} if "x" in value else rounded
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def one_file(data: dict[str, Any]) -> str:
    """Return the page with its styles, scripts and `data`; a policy permits nothing else."""
    page = _read("index.html")
    scripts = [_script(name) for name in _SCRIPT.findall(page)]
    hashes = [" ".join(map(_hash, group)) for group in (scripts, map(_read, _STYLE.findall(page)))]
    policy = (
        f"default-src 'none'; script-src {hashes[0]}; style-src {hashes[1]}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _SCRIPT.sub("", page)
    page = _STYLE.sub(lambda match: f"<style>{_read(match[1])}</style>", page)
    page = _ICON.sub(lambda match: f"data:image/png;base64,{_base64(match[1])}", page)
    charset = '<meta charset="utf-8">'
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace(charset, f"{charset}\n    {meta}", 1)
    # "<" is escaped, so that no text in the data can close the element
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    body = [f'<script type="application/json" id="answers">{text}</script>']
    body += [f"<script>{script}</script>" for script in scripts]
    head, end, tail = page.rpartition("  </body>")
    return head + "".join(f"    {element}\n" for element in body) + end + tail


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _script(name: str) -> str:
    """Return a script, or the main module bundled with all its imports into one script."""
    if name != MAIN:
        return _read(name)
    imports: dict[str, list[str]] = {}
    pending = [MAIN]
    while pending:
        if (module := pending.pop()) not in imports:
            imports[module] = [other for _, other in _IMPORT.findall(_read(module))]
            pending += imports[module]
    modules = "".join(map(_module, TopologicalSorter(imports).static_order()))
    return f'(() => {{\n"use strict";\n{modules}}})();\n'


def _module(name: str) -> str:
    """Return a module as a call that returns its exports, which no module reassigns."""
    source = _read(name)
    exports = ", ".join(export for _, export in _EXPORT.findall(source))
    body = _EXPORT.sub(r"\1 \2", source)
    body = _IMPORT.sub(
        lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = {_variable(match[2])};\n", body
    )
    return f"const {_variable(name)} = (() => {{\n{body}return {{ {exports} }};\n}})();\n"


def _variable(name: str) -> str:
    return name.replace(".", "_")


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _base64(name: str) -> str:
    return base64.b64encode((PAGE / name).read_bytes()).decode()
