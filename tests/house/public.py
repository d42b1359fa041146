"""The public names and the command line of samestep as text, one per line.

`python -m tests.house.public` writes them to `public.txt`, and `test_public.py` compares.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import samestep
from samestep import cli, errors, record

FROZEN = Path(__file__).with_name("public.txt")


def described() -> str:
    """Return one line for each public name and for each flag of each command."""
    modules = {samestep: samestep.__all__, errors: _defined_in(errors), record: record.__all__}
    names = [line for module, names in modules.items() for line in _module(module, names)]
    return "\n".join([*names, *_run(), *_commands()]) + "\n"


def _defined_in(module: ModuleType) -> list[str]:
    return [name for name, member in vars(module).items() if inspect.isclass(member)]


def _module(module: ModuleType, names: list[str]) -> Iterator[str]:
    for name in sorted(names):
        member = getattr(module, name)
        if isinstance(member, type) and issubclass(member, Exception):
            bases = ", ".join(base.__name__ for base in member.__bases__)
            yield f"{module.__name__}.{name}({bases})"
        else:
            parameters = _parameters(member) if inspect.isfunction(member) else ""
            yield f"{module.__name__}.{name}{parameters}"


def _run() -> Iterator[str]:
    with samestep.init() as run:
        for name in sorted(name for name in dir(run) if not name.startswith("_")):
            is_method = inspect.isroutine(inspect.getattr_static(run, name))
            yield f"run.{name}{_parameters(getattr(run, name)) if is_method else ''}"


def _commands() -> Iterator[str]:
    for command in cli.COMMANDS:
        yield f"samestep {command}"
        options = re.findall(r"^ +(-.*?)(?:  |$)", _help(command), re.MULTILINE)
        flags = {
            flag for option in options for flag in re.findall(r"(?<![\w-])--?\w[\w-]*", option)
        }
        yield from (f"samestep {command} {flag}" for flag in sorted(flags - {"-h", "--help"}))


def _parameters(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _help(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    return printed.getvalue()


if __name__ == "__main__":
    FROZEN.write_text(described())
