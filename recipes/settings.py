"""Typed settings of a recipe: defaults < base file < file < command line.

A recipe writes its settings as frozen dataclasses, one inside another, with `setting` for each
field. A file is YAML; its key `base` names a file that it extends. On the command line `key=value`
sets one setting and `section.key=value` one inside a section.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import reprlib
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, TYPE_CHECKING, Any, Final, Literal, TypeVar

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import samestep as ss

S = TypeVar("S")
SETTINGS_FILE: Final = "settings.yaml"
LARGEST_BYTES: Final = 2**20  # of a file
SHOWN: Final = 200  # letters of a wrong value
Schema = dict[str, "Leaf"]


class SettingsError(ValueError):
    """A setting is unknown or of the wrong type, or a file cannot be read."""


@dataclass(frozen=True)
class Leaf:
    """One setting, by its dotted key: `kind` is the type it must have."""

    key: str
    kind: Any
    default: Any
    description: str


def setting(default: Any, description: str) -> Any:
    """Make a field that says what it does; `--help` prints `description`."""
    return field(default=default, metadata={"description": description})


class Parser(argparse.ArgumentParser):
    """A parser whose help and errors come once a run, not once a worker."""

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)


def parser(kind: type, description: str) -> Parser:
    """Make a parser whose `settings` takes files and `key=value`, and whose `--help` lists every setting of `kind`."""
    made = Parser(
        description=description,
        epilog=describe(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "settings",
        nargs="*",
        metavar="FILE.yaml|key=value",
        help="files, and settings over them; of each the last wins",
    )
    return made


def read(kind: type[S], given: Iterable[str]) -> S:
    """Read settings from files and then from `key=value` texts; what comes later wins. Raises `SettingsError`."""
    schema = {leaf.key: leaf for leaf in _leaves(kind)}
    values: dict[str, Any] = {}
    for text in sorted(given, key=lambda text: not _is_file(text)):  # the sort is stable
        values |= (
            _from_file(schema, Path(text), extended_by=())
            if _is_file(text)
            else _from_argument(schema, text)
        )
    return _build(kind, values)


def to_yaml(settings: Any) -> str:
    """Write settings as YAML that `read` takes back to an equal value."""
    return yaml.safe_dump(_plain(asdict(settings)), sort_keys=False)


def write_settings(run: ss.Run, settings: Any) -> None:
    """Write settings into the run's directory, as a file that makes the same run again; what the run decided itself is in it."""
    if run.is_main and run.dir is not None:
        as_run = replace(
            settings, lanes=run.lanes, seed=run.config.seed, precision=run.config.precision
        )
        (run.dir / SETTINGS_FILE).write_text(to_yaml(as_run), encoding="utf-8")


def run_script(main: Callable[[], object]) -> None:
    """Call the `main` of a script; a wrong setting ends the process with its message alone."""
    try:
        main()
    except SettingsError as error:
        raise SystemExit(str(error)) from None


def describe(kind: type) -> str:
    """List every setting of `kind` with its default, type and description."""
    lines = ["settings (defaults < base file < file < command line):"]
    for leaf in _leaves(kind):
        default = "none" if leaf.default is None else json.dumps(_plain(leaf.default)).strip('"')
        lines += [f"  {leaf.key}={default}", f"      {leaf.description} ({_words(leaf.kind)})"]
    return "\n".join(lines)


# The settings that exist


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _leaves(kind: Any, prefix: str = "") -> Iterator[Leaf]:
    hints = _hints(kind)
    for one in fields(kind):
        hint = hints[one.name]
        if is_dataclass(hint):
            yield from _leaves(hint, f"{prefix}{one.name}.")
        else:
            yield Leaf(prefix + one.name, hint, one.default, one.metadata["description"])


def _build(kind: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    hints = _hints(kind)
    sections = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    arguments = {name: values[prefix + name] for name in hints if prefix + name in values}
    return kind(
        **arguments,
        **{name: _build(hint, values, f"{prefix}{name}.") for name, hint in sections.items()},
    )


# Reading a file or an argument


def _is_file(text: str) -> bool:
    return text.endswith((".yaml", ".yml"))


def _from_argument(schema: Schema, text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"{text!r} was given; expected a file that ends in .yaml, or key=value")
    leaf = _known(schema, key, source=text)
    try:
        # A text stays as it was typed: YAML would make a number of name=5.
        return {key: _convert(value if _takes_text(leaf.kind) else _yaml(value), leaf.kind)}
    except ValueError:
        raise SettingsError(
            f"{text}: expected {_words(leaf.kind)} for {key}{_near_choice(value, leaf.kind)}"
        ) from None


def _from_file(schema: Schema, path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    try:
        path = path.resolve()
        content = _yaml(_text(path)) or {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read as YAML: {error}") from None
    if path in extended_by:
        raise SettingsError(
            "base files form a cycle: " + " -> ".join(str(p) for p in (*extended_by, path))
        )
    if not isinstance(content, dict):
        raise SettingsError(
            f"{path} holds {_short(content)}; expected settings such as 'epochs: 10'"
        )
    base = content.pop("base", None)
    values = (
        {} if base is None else _from_file(schema, path.parent / str(base), (*extended_by, path))
    )
    for key, value in _flat(schema, content):
        leaf = _known(schema, key, source=f"{path}: {key}")
        try:
            values[key] = _convert(value, leaf.kind)
        except ValueError:
            near = _near_choice(value, leaf.kind) if isinstance(value, str) else ""
            raise SettingsError(
                f"{path}: {key}={_short(value)}: expected {_words(leaf.kind)}{near}"
            ) from None
    return values


def _text(path: Path) -> str:
    """Return the text of a regular file: what others hold may never end."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    if path.stat().st_size > LARGEST_BYTES:
        raise ValueError(f"it has more than {LARGEST_BYTES} bytes")
    return path.read_text(encoding="utf-8")


def _yaml(text: str) -> Any:
    """Return what YAML says. Raises `ValueError` for what is none."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _flat(
    schema: Schema, content: Mapping[Any, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and any(known.startswith(key + ".") for known in schema):
            yield from _flat(schema, value, key + ".")
        else:
            yield key, value


def _known(schema: Schema, key: str, source: str) -> Leaf:
    if key in schema:
        return schema[key]
    inside = [known for known in schema if known.startswith(key + ".")]
    if inside:
        raise SettingsError(f"{source}: {key} is a section; set one of {', '.join(inside)}")
    # depth=6 means model.depth=6: the last part of a key counts as much as the whole.
    last_parts = {known.rpartition(".")[2]: known for known in reversed(schema)}
    near = difflib.get_close_matches(key, schema, n=1) or [
        last_parts[part]
        for part in difflib.get_close_matches(key.rpartition(".")[2], last_parts, n=1)
    ]
    hint = f"did you mean {near[0]}?" if near else "--help lists every setting"
    raise SettingsError(f"{source}: {key} is no setting; {hint}")


# Types


def _convert(value: Any, kind: Any) -> Any:
    """Return `value` as `kind`, or raise `ValueError`."""
    if isinstance(kind, UnionType):
        if value in (None, "none", "null"):
            value, kind = None, NoneType
        else:
            (kind,) = (one for one in typing.get_args(kind) if one is not NoneType)
    if typing.get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(one, typing.get_args(kind)[0]) for one in value)
    if typing.get_origin(kind) is Literal and value in typing.get_args(kind):
        return value
    if kind is Path and isinstance(value, str):
        return Path(value)
    # YAML 1.1 reads 1e-3 as text: its numbers with an exponent need a point.
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        return float(str(value))  # of a long int itself, Python raises OverflowError
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(value)


def _takes_text(kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_takes_text(one) for one in typing.get_args(kind))
    return kind in {str, Path} or typing.get_origin(kind) is Literal


def _words(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(_words(one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list, each {_words(typing.get_args(kind)[0])}"
    return {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        Path: "a path",
        NoneType: "none",
    }[kind]


def _near_choice(text: str, kind: Any) -> str:
    kinds = typing.get_args(kind) if isinstance(kind, UnionType) else (kind,)
    choices = [
        choice
        for one in kinds
        if typing.get_origin(one) is Literal
        for choice in typing.get_args(one)
    ]
    near = difflib.get_close_matches(text, choices, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _short(value: Any) -> str:
    """Print the beginning of a value: a few lines of YAML can stand for billions of them."""
    try:
        return reprlib.repr(value)[:SHOWN]
    except ValueError:  # Python prints no more than some thousand digits
        return "a long number"


def _plain(value: Any) -> Any:
    """Return `value` in YAML's own types."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
