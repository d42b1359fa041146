"""The page's files as one HTML text that needs no other: for reports, which open from disk."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).parent / "page"
MAIN: Final = "main.js"
_IMPORT: Final = re.compile(r'^import \{([^}]+)\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)
_STYLE: Final = re.compile(r'<link rel="stylesheet" href="page/([\w.]+)">')
_SCRIPT: Final = re.compile(r'[ ]*<script src="page/([\w.]+)" (?:defer|type="module")></script>\n')
_ICON: Final = re.compile(r'(?<=<link rel="icon" href=")page/([\w.]+)')


def one_file(answers: dict[str, Any]) -> str:
    """Return the page with its styles, scripts and `answers` (JSON) in it.

    A content policy lets run and load nothing but these scripts and styles, and images that are in
    the text as well.
    """
    page = _read("index.html")
    scripts = [_script(name) for name in _SCRIPT.findall(page)]
    styles = [_read(name) for name in _STYLE.findall(page)]
    page = _SCRIPT.sub("", page)
    page = _STYLE.sub(lambda found: f"<style>{_read(found[1])}</style>", page)
    page = _ICON.sub(
        lambda found: (
            f"data:image/png;base64,{base64.b64encode((PAGE / found[1]).read_bytes()).decode()}"
        ),
        page,
    )
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts, styles)}">'
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n    {policy}', 1)
    # no text in it can end the element
    data = json.dumps(answers, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    body = [
        f'<script type="application/json" id="answers">{data}</script>',
        *(f"<script>{script}</script>" for script in scripts),
    ]
    head, end, tail = page.rpartition("  </body>")
    return head + "".join(f"    {element}\n" for element in body) + end + tail


def _policy(scripts: list[str], styles: list[str]) -> str:
    return (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _script(name: str) -> str:
    """Return a script as it is, or the main module with all that it imports as one script."""
    if name != MAIN:
        return _read(name)
    sources: dict[str, str] = {}
    found = [MAIN]
    while found:
        module = found.pop()
        if module not in sources:
            sources[module] = _read(module)
            found += [imported for _, imported in _IMPORT.findall(sources[module])]
    order = TopologicalSorter(
        {
            module: [imported for _, imported in _IMPORT.findall(source)]
            for module, source in sources.items()
        }
    )
    return (
        '(() => {\n"use strict";\n'
        + "".join(_module(name, sources[name]) for name in order.static_order())
        + "})();\n"
    )


def _module(name: str, source: str) -> str:
    """Return a module as a call whose value holds its exports. They are never assigned anew, so that a copy of each will do."""
    exports = ", ".join(export for _, export in _EXPORT.findall(source))
    body = _EXPORT.sub(r"\1 \2", source)
    body = _IMPORT.sub(
        lambda found: f"const {{{found[1].replace(' as ', ': ')}}} = {_variable(found[2])};\n", body
    )
    return f"const {_variable(name)} = (() => {{\n{body}return {{ {exports} }};\n}})();\n"


def _variable(name: str) -> str:
    return name.replace(".", "_")


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
