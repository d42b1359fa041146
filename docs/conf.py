"""Sphinx configuration of the site: `make docs`."""  # noqa: INP001  Sphinx reads it by its path

from __future__ import annotations

import contextlib
import inspect
import io
from dataclasses import fields
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from samestep import Run, cli, errors
from samestep.config import PREFIX, Config

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

project = "samestep"
version = release = version_of("samestep")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
default_role = "code"  # docstrings name things in single backticks
myst_heading_anchors = 3  # as on a git host
autodoc_class_signature = "separated"  # a Run is made by init
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80  # longer signatures have one line per parameter
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
html_theme = "furo"
html_static_path = ["site.css", "versions.js"]
html_css_files = ["site.css"]
html_js_files = [("versions.js", {"defer": "defer"})]
html_extra_path = ["llms.txt"]  # for coding assistants
html_title = f"samestep {version}"
html_copy_source = False
html_show_copyright = html_show_sphinx = False


class Options(SphinxDirective):
    """A table of every option of a run."""

    def run(self) -> list[nodes.Node]:
        rows = [
            "| option and type | default | flag and variable | description |",
            "|---|---|---|---|",
        ]
        for option in fields(Config):
            name, default = option.name, option.default
            flag, variable = f"--{name.replace('_', '-')}", f"{PREFIX}{name.upper()}"
            value = f'"{default}"' if isinstance(default, str) else default
            kind = str(option.type).replace("|", "or")
            text = option.metadata["description"]
            rows.append(f"| `{name}`<br>{kind} | `{value}` | `{flag}`<br>`{variable}` | {text} |")
        return self.parse_text_to_nodes("\n".join(rows))


class Errors(SphinxDirective):
    """The tree of all exceptions, and each of them."""

    def run(self) -> list[nodes.Node]:
        names = [name for name, member in vars(errors).items() if inspect.isclass(member)]
        entries = "\n".join(
            f".. autoexception:: samestep.{name}\n   :exclude-members: __init__, __new__\n"
            for name in names
        )
        tree = inspect.getdoc(errors)
        return self.parse_text_to_nodes(f"```text\n{tree}\n```\n\n```{{eval-rst}}\n{entries}\n```")


class Commands(SphinxDirective):
    """The --help of every command."""

    def run(self) -> list[nodes.Node]:
        return [
            node
            for name in cli.COMMANDS
            for node in self.parse_text_to_nodes(
                f"**samestep {name}**\n\n```text\n{_help(name)}\n```"
            )
        ]


def _help(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    return printed.getvalue()


def _find_source(_: Sphinx, module: str) -> tuple[str, dict[str, Any]] | None:
    """Return the source of a module and its tags: methods that Run inherits are also Run's."""
    bases = {base.__name__: base.__module__ for base in Run.__mro__[1:-1]}
    if module not in bases.values():
        return None
    analyzer = ModuleAnalyzer.for_module(module)
    tags = analyzer.find_tags()
    of_run = {
        f"Run.{name.partition('.')[2]}": tag
        for name, tag in tags.items()
        if name.partition(".")[0] in bases
    }
    return analyzer.code, {**tags, **of_run}


def setup(app: Sphinx) -> None:
    """Register the directives of reference.md."""
    app.connect("viewcode-find-source", _find_source)
    app.add_directive("options", Options)
    app.add_directive("errors", Errors)
    app.add_directive("commands", Commands)
