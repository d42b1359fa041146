"""Typed settings of a recipe, from YAML files and `key=value` arguments, with OmegaConf.

A recipe defines its settings as nested frozen dataclasses with a `setting` for each field. Later
sources override earlier ones: defaults, the file that a file names as its `base`, files, arguments.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, get_args, get_type_hints

from omegaconf import OmegaConf

import samestep as ss

S = TypeVar("S")
SETTINGS_FILE = "settings.yaml"
LARGEST = 2**20  # characters of a file
TEXT_TYPES = ("str", "Path", "one of")  # their values are not parsed as YAML


class SettingsError(ValueError):
    """A setting is unknown or has the wrong type, or a settings file cannot be read."""


def setting(default: Any, description: str) -> Any:
    """Define a field with a default and the description that `--help` prints."""
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True)
class RunSettings:
    """The settings that all recipes share; a recipe's settings extend them."""

    lanes: int | None = setting(
        None,
        "number of slices of a batch, at least the number of workers (default: number of workers)",
    )
    seed: int = setting(0, "determines all random draws")
    precision: Literal["float32", "bfloat16"] = setting("float32", "bfloat16: with autocast")


def read(kind: type[S], sources: Iterable[str]) -> S:
    """Read settings from YAML files and then `key=value` texts. Raises `SettingsError`."""
    known, config = dict(_settings_of(kind)), deepcopy(_defaults(kind))
    for source in sorted(sources, key=lambda source: not _is_file(source)):  # stable: files first
        key, equals, text = source.partition("=")
        if not equals and not _is_file(source):
            raise SettingsError(f"expected a file that ends in .yaml or key=value, got {source!r}")
        values = _read_file(Path(source)) if _is_file(source) else [(source, key, text)]
        for origin, name, value in values:
            _update(config, known, origin, name, value)
    try:
        return OmegaConf.to_object(config)
    except Exception as error:  # a value that OmegaConf treats as missing: ???
        raise SettingsError(str(error).partition("\n")[0]) from error


def to_yaml(settings: Any) -> str:
    """Return settings as YAML that `read` converts back to an equal value."""
    plain = json.loads(json.dumps(asdict(settings), default=str))  # converts tuples and paths
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def write_settings(directory: Path | None, settings: Any) -> None:
    """Write settings as a file that repeats the run."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / SETTINGS_FILE).write_text(to_yaml(settings), encoding="utf-8")


def write_run_settings(run: ss.Run, settings: Any) -> None:
    """Write settings into the run's directory, with the values that the run itself decided.

    Raises `SettingsError` for float16 in a recipe that does not scale its loss.
    """
    precisions = get_args(get_type_hints(type(settings))["precision"])
    if run.config.precision not in precisions:
        raise SettingsError(
            f"precision must be {' or '.join(precisions)} in this recipe, which does not scale its "
            f"loss, got {run.config.precision}"
        )
    decided = {"lanes": run.lanes, "seed": run.config.seed, "precision": run.config.precision}
    write_settings(run.dir if run.is_main else None, replace(settings, **decided))


class Parser(argparse.ArgumentParser):
    """A parser whose help and errors are printed by rank 0 only."""

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)

    def parse_intermixed_args(self, *given: Any) -> argparse.Namespace:  # type: ignore[override]
        """Parse; a `--dir` of `samestep run`, before the script, counts wherever flags do."""
        flags = super().parse_intermixed_args(*given)
        directory = os.environ.get("SAMESTEP_DIR", "")
        if directory.lower() not in {"", "none"}:
            flags.dir = Path(directory)
        return flags


def parser(kind: type, description: str) -> Parser:
    """Make a parser with `settings` and `--dir`, whose `--help` lists every setting of `kind`."""
    lines = ["settings (defaults < base file < file < command line):"]
    for key, one in _settings_of(kind):
        default = "none" if one.default is None else json.dumps(one.default, default=str).strip('"')
        lines += [f"  {key}={default}", f"      {one.metadata['description']} ({_type_of(one)})"]
    style = argparse.RawDescriptionHelpFormatter
    made = Parser(description=description, epilog="\n".join(lines), formatter_class=style)
    files = "files and settings; settings override files, later ones override earlier ones"
    made.add_argument("settings", nargs="*", metavar="FILE.yaml|key=value", help=files)
    made.add_argument("--dir", type=Path, help="directory of the run; an existing run is resumed")
    # torch.distributed.launch and DeepSpeed's launcher pass it, and also set LOCAL_RANK
    made.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    return made


def read_arguments(
    kind: type[S], description: str, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, S]:
    """Return the flags and the settings of a command line with `--dir` and `--eval`."""
    flags_parser = parser(kind, description)
    flags_parser.add_argument(
        "--eval", action="store_true", help="evaluate the newest state in DIR"
    )
    flags = flags_parser.parse_intermixed_args(arguments)
    if flags.eval and not flags.dir:
        flags_parser.error("--eval needs --dir, the directory of a run")
    from_run = [str(flags.dir / SETTINGS_FILE)] if flags.eval else []
    return flags, read(kind, [*from_run, *flags.settings])


def run_script(main: Callable[[], object]) -> None:
    """Call the `main` of a script; a `SettingsError` ends the process with its message only.

    So does one that a data set raised while a batch was loaded. The run's record has the traceback.
    """
    try:
        main()
    except (SettingsError, ss.DataError) as error:
        cause = error if isinstance(error, SettingsError) else error.__cause__
        if not isinstance(cause, SettingsError):
            raise
        raise SystemExit(str(cause)) from None


def _settings_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    for one in fields(kind):
        if one.default_factory is MISSING:
            yield prefix + one.name, one
        else:
            yield from _settings_of(one.default_factory, f"{prefix}{one.name}.")


@cache
def _defaults(kind: type) -> Any:
    config = OmegaConf.structured(kind)
    for key, _ in _settings_of(kind):  # a frozen dataclass is read-only
        OmegaConf.set_readonly(OmegaConf.select(config, key.rpartition(".")[0]), False)
    return config


def _type_of(one: Field[Any]) -> str:
    return str(one.type).replace("Literal[", "one of [").replace('"', "'")


def _is_file(source: str) -> bool:
    return source.endswith((".yaml", ".yml"))


def _read_file(path: Path, extended_by: tuple[Path, ...] = ()) -> Iterator[tuple[str, str, Any]]:
    """Yield the source, key and value of each setting in a file, after those of its base."""
    try:
        path = path.resolve()
        content = OmegaConf.to_container(OmegaConf.create(_text_of(path)))
    except Exception as error:  # OmegaConf and its YAML parser raise errors of many types
        reason = str(error).partition("\n")[0]
        raise SettingsError(f"{path} cannot be read as YAML: {reason}") from error
    if path in extended_by:
        cycle = " -> ".join(map(str, (*extended_by, path)))
        raise SettingsError(f"base files form a cycle: {cycle}")
    if not isinstance(content, dict):
        got = _short(content)
        raise SettingsError(f"{path}: expected settings such as 'epochs: 10', got {got}")
    base = content.pop("base", None)
    if base is not None:
        yield from _read_file(path.parent / str(base), (*extended_by, path))
    for key, value in _flatten(content):
        yield f"{path}: {key}={_short(value)}", key, value


def _text_of(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} characters")
    return text


def _short(value: Any) -> str:
    try:
        return reprlib.repr(value)[:200]
    except ValueError:  # Python does not print integers of thousands of digits
        return "a long number"


def _flatten(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _update(
    config: Any, known: Mapping[str, Field[Any]], source: str, key: str, value: Any
) -> None:
    if key not in known:
        raise SettingsError(f"{source}: unknown setting {key}; {_hint(known, key)}")
    if "${" in _short(value):  # OmegaConf would replace it
        raise SettingsError(f"{source}: references such as ${{key}} are not supported")
    expected = _type_of(known[key])
    try:
        if value == "none" and expected.endswith("None"):
            value = None
        elif isinstance(value, str) and not expected.startswith(TEXT_TYPES):
            value = OmegaConf.create(f"value: {value}").value
        OmegaConf.update(config, key, value)
    except Exception as error:  # OmegaConf and its YAML parser raise errors of many types
        choices = re.findall(r"'(\w+)'", expected)
        near = difflib.get_close_matches(_short(value).strip("'"), choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise SettingsError(f"{source}: expected {expected} for {key}{hint}") from error


def _hint(known: Mapping[str, Any], key: str) -> str:
    inside = [other for other in known if other.startswith(f"{key}.")]
    if inside:
        return f"it is a section with {', '.join(inside)}"
    # The last part of a key matters as much as all of it: depth=6 means model.depth=6.
    last_parts = {other.rpartition(".")[2]: other for other in reversed(known)}
    near = difflib.get_close_matches(key, known, n=1) or [
        last_parts[part] for part in difflib.get_close_matches(key.rpartition(".")[2], last_parts)
    ]
    return f"did you mean {near[0]}?" if near else "--help lists every setting"
