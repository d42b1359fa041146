"""How the pages become a site: `make docs`."""  # noqa: INP001  Sphinx reads it by its path

from __future__ import annotations

import contextlib
import inspect
import io
from dataclasses import fields
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING

from sphinx.util.docutils import SphinxDirective

from samestep import cli, errors
from samestep.config import Config

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

project = "samestep"
version = release = version_of("samestep")
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
default_role = "code"  # docstrings name things in single backticks
myst_heading_anchors = 3  # as on a git host
autodoc_class_signature = "separated"  # a Run is made by init
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures are long enough
html_theme = "furo"
html_title = "samestep"
html_copy_source = False
html_show_copyright = html_show_sphinx = False


class Options(SphinxDirective):
    """A table of every option of a run."""

    def run(self) -> list[nodes.Node]:
        rows = [
            f"| `{option.name}` | `{option.default}` | {option.metadata['description']} |"
            for option in fields(Config)
        ]
        return self.parse_text_to_nodes(
            "\n".join(["| option | default | what it is |", "|---|---|---|", *rows])
        )


class Errors(SphinxDirective):
    """The tree of all exceptions."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(f"```text\n{inspect.getdoc(errors)}\n```")


class Commands(SphinxDirective):
    """What every command says of itself by --help."""

    def run(self) -> list[nodes.Node]:
        return [
            node
            for name in cli.COMMANDS
            for node in self.parse_text_to_nodes(
                f"**samestep {name}**\n\n```text\n{_help(name)}\n```"
            )
        ]


def _help(command: str) -> str:
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    return told.getvalue()


def setup(app: Sphinx) -> None:
    """Make the directives of reference.md known."""
    app.add_directive("options", Options)
    app.add_directive("errors", Errors)
    app.add_directive("commands", Commands)
