"""The public names and the command line of samestep as text, one per line.

`python -m tests.house.public` writes them to `public.txt`, and `test_public.py` compares.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import samestep
from samestep import cli, errors, record
from samestep.data.batch import Batch
from samestep.host import parse
from samestep.record import events, exporter, source
from samestep.snapshot.read import Snapshot

FROZEN = Path(__file__).with_name("public.txt")
# what the documentation imports from modules other than `samestep`
MODULES: dict[ModuleType, list[str]] = {
    record: ["read_events", "read_history"],
    events: ["parse_events"],
    source: ["open_source"],
}
# needs optional packages, so it is read as source
INTEGRATIONS = {"huggingface": ("Trainer", "TrainingArguments"), "lightning": ("fit",)}
ACTIONS = {"submit": ("slurm", "kubernetes"), "receipt": ("make", "check", "replay")}
# of what loops yield; its other attributes are for the run
BATCH = ("backward", "epoch", "lanes", "means")


def described() -> str:
    """Return one line for each public name and for each flag of each command."""
    modules = {samestep: samestep.__all__, errors: _defined_in(errors), **MODULES}
    names = [line for module, names in modules.items() for line in _module(module, names)]
    return "\n".join([*names, *_integrations(), *_run(), *_snapshot(), *_commands()]) + "\n"


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
        loops = {
            "run.batches()": run.batches([0], 1),
            "run.streams()": run.streams(lambda _: iter([0]), steps=1, name="streams"),
        }
        for call, loop in loops.items():
            names = sorted(name for name in dir(loop) if not name.startswith("_"))
            yield from (f"{call}.{name}" for name in names)
    batch = Batch(0, range(0), None, iter(()))
    for name in BATCH:
        is_method = inspect.isroutine(inspect.getattr_static(batch, name))
        yield f"batch.{name}{_parameters(getattr(batch, name)) if is_method else ''}"


def _snapshot() -> Iterator[str]:
    yield from (f"samestep.read_snapshot().{field.name}" for field in dataclasses.fields(Snapshot))


def _integrations() -> Iterator[str]:
    for module, names in INTEGRATIONS.items():
        file = Path(samestep.__file__).parent / "integrations" / f"{module}.py"
        nodes = {getattr(node, "name", ""): node for node in parse(file.read_text()).body}
        for name in names:
            node = nodes[name]
            parameters = ""
            if isinstance(node, ast.FunctionDef):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                for argument in every:
                    argument.annotation = None
                parameters = f"({ast.unparse(node.args)})"
            yield f"samestep.integrations.{module}.{name}{parameters}"


def _commands() -> Iterator[str]:
    for command in cli.COMMANDS:
        yield f"samestep {command}"
        yield from _flags(f"samestep {command}", lambda name=command: cli.main([name, "--help"]))
    for parent, action in [(name, action) for name in ACTIONS for action in ACTIONS[name]]:
        command = f"samestep {parent} {action}"
        yield command
        words = [parent, action, "--help"]
        yield from _flags(command, lambda words=words: cli.main(words))
    command = "python -m samestep.record.exporter"
    yield command
    with patch.object(sys, "argv", [command, "--help"]):
        yield from _flags(command, exporter.main)


def _flags(command: str, print_help: Callable[[], object]) -> Iterator[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        print_help()
    options = re.findall(r"^  (-.*?)(?:  |$)", printed.getvalue(), re.MULTILINE)
    flags = {flag for option in options for flag in re.findall(r"(?<![\w-])--?\w[\w-]*", option)}
    yield from (f"{command} {flag}" for flag in sorted(flags - {"-h", "--help"}))


def _parameters(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


if __name__ == "__main__":
    FROZEN.write_text(described())
