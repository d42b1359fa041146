"""Commands on the documentation pages: check their arguments, and prepare them to run here."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

from torch.distributed.run import get_args_parser

from samestep import cli
from samestep.config import TOKEN, merge
from samestep.launch.cluster_spec import cluster_spec
from samestep.launch.local import given_options
from tests.docs.blocks import ROOT

# Other programs, whose arguments are not checked.
OTHER_PROGRAMS = {
    "cd",
    "cp",
    "git",
    "kubectl",
    "mkdir",
    "mpirun",
    "mv",
    "sbatch",
    "scancel",
    "scontrol",
    "source",
    "squeue",
    "srun",
    "ssh",
    "tail",
}
WRITTEN_BY_READERS = {"train.py", "job.py"}
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each command in a block. Raises `ValueError` for shell operators."""
    commands = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    for words in commands:
        if operators := {"|", "||", "&&", "&", ";", ">", ">>", "<"}.intersection(words):
            raise ValueError(
                f"{' '.join(words)!r} has {operators.pop()!r}; expected one command per line"
            )
    return [words for words in commands if words]


def check(words: list[str]) -> None:
    """Raise `ValueError` for an unknown program, flag, option, file, target or extra."""
    environment, (program, *arguments) = _split(words)
    merge({}, environment)
    if program == "samestep":
        _check_samestep(arguments)
    elif program in {"python", "python3"}:
        _check_python(arguments)
    elif program == "torchrun":
        options = _parsed(get_args_parser(), arguments)
        _check_script(options.training_script, options.training_script_args)
    elif program == "make":
        _expect(
            set(arguments)
            <= set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)),
            words,
            "targets",
        )
    elif program == "pip":
        extras = re.findall(
            r"^(\w+) = \[",
            PYPROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0],
            re.MULTILINE,
        )
        asked = [
            name
            for text in re.findall(r"\[([\w,]+)\]", " ".join(arguments))
            for name in text.split(",")
        ]
        _expect(set(asked) <= set(extras), words, f"extras among {extras}")
    elif program == "pytest":
        _expect(
            all((ROOT / path).exists() for path in arguments if "/" in path),
            words,
            "tests that exist",
        )
    else:
        _expect(
            program in OTHER_PROGRAMS,
            words,
            f"a known program; others are {sorted(OTHER_PROGRAMS)}",
        )
        if ours := [
            number for number, word in enumerate(arguments) if word in {"python", "samestep"}
        ]:
            check(arguments[ours[0] :])  # the command that srun and others start


def here(words: list[str], *, together: bool = False) -> list[str] | None:
    """Return the command to run here, or None if it needs other programs or, alone, machines."""
    environment, (program, *arguments) = _split(words)
    several = any(
        word.partition("=")[0] in {"--hosts", "--nodes", "--nnodes"} for word in arguments
    )
    if program not in {"python", "samestep", "torchrun"}:
        return None
    if several and not together and arguments[0] != "submit":
        return None
    module = {
        "python": [],
        "samestep": ["-m", "samestep"],
        "torchrun": ["-m", "torch.distributed.run"],
    }[program]
    assigned = [f"{name}={value}" for name, value in environment.items()]
    return [
        "env",
        *assigned,
        sys.executable,
        *module,
        *arguments,
    ]


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables before a command, and the command."""
    first = next(number for number, word in enumerate(words) if not re.match(r"\w+=", word))
    return dict(word.split("=", 1) for word in words[:first]), words[first:]


def _check_samestep(arguments: list[str]) -> None:
    name, *rest = arguments
    _expect(
        name in cli.COMMANDS, ["samestep", *arguments], f"a command among {sorted(cli.COMMANDS)}"
    )
    parser = argparse.ArgumentParser(prog=f"samestep {name}", allow_abbrev=False)
    import_module(cli.COMMANDS[name].module).add_arguments(parser)
    options = _parsed(parser, rest)
    if name == "run":
        merge(given_options(options), {})
        if options.nodes is not None and options.hosts is None:
            cluster_spec(
                argparse.Namespace(**{**vars(options), "token_file": None}),
                {TOKEN: "a secret of the hosts"},
            )
    script = getattr(options, "script", None)
    if isinstance(script, str) and not getattr(options, "module", False):
        _check_script(script, options.arguments)


def _check_python(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-m":
        module, *rest = rest
        path = module.replace(".", "/")
        files = [
            folder / f"{path}{end}"
            for folder in (ROOT, ROOT / "src")
            for end in (".py", "/__main__.py")
        ]
        file = next((file for file in files if file.exists()), None)
        _expect(
            file is not None or module in sys.stdlib_module_names,
            ["python", *arguments],
            "a module that exists",
        )
        if file is not None:
            _check_flags(file, rest)
    elif first != "-c":
        _check_script(first, rest)


def _check_script(script: str, arguments: list[str]) -> None:
    if script in WRITTEN_BY_READERS:
        return
    _expect((ROOT / script).is_file(), [script], "a script that exists")
    _check_flags(ROOT / script, arguments)


def _check_flags(script: Path, arguments: list[str]) -> None:
    """Check that a file next to our script or in its parent folder has each flag."""
    folders = (script.parent, script.parent.parent)
    sources = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    for word in arguments:
        if word.startswith("--"):
            _expect(
                f'"{word.partition("=")[0]}"' in sources,
                [str(script), word],
                "a flag of the script",
            )
        elif word.endswith((".py", ".yaml")):
            _expect((ROOT / word).exists(), [str(script), word], "a file that exists")


def _parsed(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return parser.parse_args(arguments)
    except SystemExit:
        raise ValueError(f"{parser.prog} {' '.join(arguments)}: {errors.getvalue()}") from None


def _expect(condition: bool, words: list[str], expected: str) -> None:
    if not condition:
        raise ValueError(f"{' '.join(words)!r} is on a page; expected {expected}")
