"""Typed settings of a recipe, from YAML files and `key=value` arguments, with OmegaConf.

A recipe defines its settings as nested frozen dataclasses with a `setting` for each field. Later
sources override earlier ones: defaults, the file that a file names as its `base`, files, arguments.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from omegaconf import OmegaConf

import samestep as ss
from recipes.replaced import LAUNCH, replacement

S = TypeVar("S")
SETTINGS_FILE = "settings.yaml"
RUN_FILE = "run.json"  # in which samestep keeps the id of the run
ENDINGS = (".yaml", ".yml")
ALIASES = {  # what other programs call a setting
    "lr": "learning_rate",
    "wd": "weight_decay",
    "num_epochs": "epochs",
    "num_workers": "loader_workers",
    "resolution": "image_size",
}
LARGEST = 2**20  # bytes of a file
TEXT_TYPES = ("str", "Path", "one of")  # their values are not parsed as YAML
LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {  # none holds for NaN
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
}
# what samestep raises for options, directories and data that do not fit
USER_ERRORS = (ss.ConfigError, ss.DataError, ss.RecordError, ss.SnapshotError)
_defaults = cache(OmegaConf.structured)  # which compiles every annotation


class SettingsError(ValueError):
    """A setting is unknown or has the wrong type, or a settings file cannot be read."""


def setting(default: Any, description: str, **limits: float) -> Any:
    """Define a field with a default and the description that `--help` prints.

    `limits` are `least`, `above` and `most` of its number or numbers, which `read` checks.
    """
    return field(default=default, metadata={"description": description, **limits})


@dataclass(frozen=True)
class RunSettings:
    """The settings that all recipes share; a recipe's settings extend them."""

    lanes: int | None = setting(
        None, "slices of a batch, at least one per worker; default: one", least=1
    )
    seed: int = setting(0, "determines all random draws")
    precision: Literal["float32", "bfloat16"] = setting("float32", "bfloat16: with autocast")

    def recorded(self) -> dict[str, Any]:
        """Return the settings for the record, which says what changed when a run resumes.

        Without those that the run decides at its first start, which later starts may name.
        """
        plain = asdict(self)
        for name in ("lanes", "seed", "precision"):  # options of the run, which compares them
            del plain[name]
        plain.get("data", {}).pop("class_names", None)  # `write_run_settings` compares them
        return plain


def read(kind: type[S], sources: Iterable[str]) -> S:
    """Read settings from YAML files and then `key=value` texts. Raises `SettingsError`."""
    types, config, recipe = _types(kind), deepcopy(_defaults(kind)), _recipe(kind)
    for key in types:  # a frozen dataclass is read-only
        OmegaConf.set_readonly(OmegaConf.select(config, key.rpartition(".")[0]), False)
    for source in sorted(sources, key=lambda source: not source.endswith(ENDINGS)):  # stable
        key, equals, text = source.partition("=")
        is_file = source.endswith(ENDINGS) and key not in types
        if not equals and not is_file:
            expected = f"expected a file that ends in .yaml or key=value, got {source!r}"
            raise SettingsError(replacement(source, recipe) or expected)
        for place, name, value in _read_file(Path(source)) if is_file else [("", key, text)]:
            _update(config, types, place, name, value, recipe)
    try:
        settings = OmegaConf.to_object(config)
    except Exception as error:  # a value that OmegaConf treats as missing: ???
        raise SettingsError(str(error).partition("\n")[0]) from error
    _check_limits(settings)
    return settings


def write_settings(directory: Path | None, settings: Any) -> None:
    """Write settings as a file that repeats the run, also into the run's remote copy."""
    if directory is not None:
        plain = json.loads(json.dumps(asdict(settings), default=str))  # converts tuples and paths
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(plain), directory / SETTINGS_FILE)
        if remote := _remote():
            files, folder = remote
            target = f"{folder}/{SETTINGS_FILE}"
            try:
                if "file" in files.protocol:  # object stores have no folders
                    Path(folder).mkdir(parents=True, exist_ok=True)
                files.pipe_file(target, (directory / SETTINGS_FILE).read_bytes())
            except Exception as error:  # noqa: BLE001  storages have their own errors
                print(f"{SETTINGS_FILE} was not copied to {target}: {error}", flush=True)


def run_settings(directory: Path, *, continues: bool = False) -> str:
    """Return the path of the settings file in a run's directory.

    If it is missing and the run has a remote copy (`samestep run --remote URL`), it is fetched; if
    the run `continues` there, with the run's id. Raises `SettingsError` if there is none.
    """
    path = directory / SETTINGS_FILE
    remote = None if path.exists() else _remote()
    if remote is not None:
        files, folder = remote
        for name in (RUN_FILE, SETTINGS_FILE) if continues else (SETTINGS_FILE,):
            if files.exists(f"{folder}/{name}") and not (directory / name).exists():
                directory.mkdir(parents=True, exist_ok=True)
                part = directory / f".{name}.{os.getpid()}"  # several workers may fetch it
                part.write_bytes(files.cat_file(f"{folder}/{name}", 0, LARGEST))
                part.replace(directory / name)
    if not path.exists():
        raise SettingsError(f"expected the --dir of a run, and {path} does not exist")
    return str(path)


def _remote() -> tuple[Any, str] | None:
    """Return the file system of the run's remote copy and its path."""
    url = os.environ.get("SAMESTEP_REMOTE", "")
    if url.lower() in {"", "none"}:
        return None
    import fsspec  # an optional package, which samestep needs for the copy as well

    return fsspec.core.url_to_fs(url.rstrip("/"))


def write_run_settings(run: ss.Run, settings: Any) -> None:
    """Write settings into the run's directory, with the values that the run itself decided.

    Raises `SettingsError` for float16 in a recipe that does not scale its loss, and if the classes
    of a run that resumes are others.
    """
    if run.is_main and run.dir is not None and run.step > 0:
        _check_class_names(run.dir / SETTINGS_FILE, settings)
    precisions = get_args(get_type_hints(type(settings))["precision"])
    if run.config.precision not in precisions:
        raise SettingsError(
            f"precision must be {' or '.join(precisions)} in this recipe, which does not scale its "
            f"loss, got {run.config.precision}"
        )
    decided = {"lanes": run.lanes, "seed": run.config.seed, "precision": run.config.precision}
    write_settings(run.dir if run.is_main else None, replace(settings, **decided))


def _check_class_names(path: Path, settings: Any) -> None:
    names = getattr(getattr(settings, "data", None), "class_names", None)
    before = OmegaConf.select(OmegaConf.load(path), "data.class_names") if path.exists() else None
    if names is not None and before is not None and tuple(before) != tuple(names):
        raise SettingsError(
            f"data.class_names must be {list(before)}, as in {path} of the run that resumes, got "
            f"{list(names)}; start a new run with another --dir"
        )


class Parser(argparse.ArgumentParser):
    """A parser whose help and errors are printed by rank 0 only; `kind` has the settings."""

    kind: type = RunSettings

    def _print_message(self, *message_and_file: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(*message_and_file)

    def parse_intermixed_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse arguments, after an error for flags of other programs that says what to write."""
        arguments = sys.argv[1:] if args is None else list(args)
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
            if argument.startswith("-") and (instead := self._instead(argument, following)):
                self.error(instead)
        flags = super().parse_intermixed_args(arguments, namespace)
        if flags.local_rank is not None and "LOCAL_RANK" not in os.environ:
            self.error(f"--local-rank is for launchers, which also set LOCAL_RANK; write {LAUNCH}")
        return flags

    def _instead(self, argument: str, following: str) -> str | None:
        """Return what to write instead of a flag that is none of this parser's, None if unknown."""
        flag, _, value = argument.partition("=")
        if any(own.startswith(flag) for own in self._option_string_actions):  # or its beginning
            return None
        if instead := replacement(flag, _recipe(self.kind)):
            return instead
        types = _types(self.kind)
        key = _nearest(types, flag.strip("-").lower().replace("-", "_"), cutoff=0.85)
        if key is None:
            return None
        given = "" if following.startswith("-") or "=" in following else following
        value = value or given or ("true" if types[key] == "bool" else "…")
        return f"{flag} is no flag, but a setting; write {key}={value}"

    def check_output(self, directory: Path | None) -> None:
        """Make the directory for results; an error if that is not possible, before the work."""
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
                if not os.access(directory, os.W_OK):
                    raise PermissionError(f"{directory} cannot be written")
        except OSError as error:
            self.error(f"{error}; choose a directory for the results with --out DIR")


def parser(kind: type, description: str) -> Parser:
    """Make a parser with `settings` and `--dir`, whose `--help` lists every setting of `kind`."""
    lines = ["settings (defaults < base file < file < command line):"]
    for key, words, option in _settings_of(kind):
        default = (
            "none" if option.default is None else json.dumps(option.default, default=str).strip('"')
        )
        lines += [f"  {key}={default}", f"      {option.metadata['description']} ({words})"]
    style = argparse.RawDescriptionHelpFormatter
    made = Parser(description=description, epilog="\n".join(lines), formatter_class=style)
    made.kind = kind
    files = "files and settings; settings override files, later ones override earlier ones"
    made.add_argument("settings", nargs="*", metavar="FILE.yaml|key=value", help=files)
    above = os.environ.get("SAMESTEP_DIR", "")  # the --dir of `samestep run`, which wins
    above = None if above.lower() in {"", "none"} else above
    run = "directory of the run; an existing run is resumed"
    made.add_argument("--dir", type=lambda path: Path(above or path), default=above, help=run)
    # torch.distributed.launch and DeepSpeed's launcher pass it, and also set LOCAL_RANK
    made.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    return made


def read_arguments(
    kind: type[S], description: str, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, S]:
    """Return the flags and the settings of a command line with `--eval` and `--pretrained`."""
    made = parser(kind, description)
    evaluated = "evaluate the newest state in DIR, or the pretrained FILE"
    made.add_argument("--eval", action="store_true", help=evaluated)
    made.add_argument("--pretrained", metavar="FILE", help="same as pretrained=FILE")
    out = "directory for scores.json of --eval; default: the run's directory"
    made.add_argument("--out", type=Path, metavar="DIR", help=out)
    flags = made.parse_intermixed_args(arguments)
    if flags.eval and flags.dir and flags.pretrained:
        made.error("--eval takes --dir or --pretrained, not both")
    if flags.out and not flags.eval:
        made.error("--out is for --eval; training writes into --dir")
    from_run = [run_settings(flags.dir)] if flags.eval and flags.dir else []
    from_flags = [f"pretrained={flags.pretrained}"] if flags.pretrained else []
    settings = read(kind, [*from_run, *flags.settings, *from_flags])
    if flags.eval and not flags.dir and settings.pretrained is None:
        made.error("--eval needs --dir, the directory of a run, or --pretrained")
    flags.out = flags.out or flags.dir
    if flags.eval:
        made.check_output(flags.out)
    return flags, settings


def run_script(main: Callable[[], object]) -> None:
    """Call the `main` of a script; a mistake of its user ends the process with its message only.

    So does a `SettingsError` that a data set raised while a batch was loaded. The run's record has
    the traceback.
    """
    try:
        main()
    except (SettingsError, *USER_ERRORS) as error:
        cause = error.__cause__ if isinstance(error.__cause__, SettingsError) else error
        if isinstance(cause, ss.LoaderError):
            raise
        raise SystemExit(str(cause)) from None


def _check_limits(settings: Any) -> None:
    """Raise `SettingsError` for a number that is out of the limits of its setting."""
    for key, _, option in _settings_of(type(settings)):
        value = attrgetter(key)(settings)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        for name, (words, holds) in LIMITS.items():
            limit = option.metadata.get(name)
            if limit is not None and not all(holds(number, limit) for number in numbers):
                raise SettingsError(f"{key} must be {words} {limit:g}, got {value}")


def _settings_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, str, Field[Any]]]:
    """Yield the key of each setting, its type in words and its field."""
    for option in fields(kind):
        if option.default_factory is MISSING:
            words = str(option.type).replace("Literal[", "one of [").replace('"', "'")
            yield prefix + option.name, words, option
        else:
            yield from _settings_of(option.default_factory, f"{prefix}{option.name}.")


def _read_file(path: Path, *extended_by: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield the place, key and value of each setting in a file, after those of its base."""
    try:
        path = path.resolve()
        content = _load(path)
    except FileNotFoundError:
        needed = f", the base of {extended_by[-1]}," if extended_by else ""
        raise SettingsError(f"{path}{needed} does not exist: expected a settings file") from None
    except Exception as error:  # OmegaConf and its YAML parser raise errors of many types
        reason = str(error).partition("\n")[0]
        raise SettingsError(f"{path} cannot be read as YAML: {reason}") from error
    if path in extended_by:
        cycle = " -> ".join(map(str, (*extended_by, path)))
        raise SettingsError(f"base files form a cycle: {cycle}")
    if (base := content.pop("base", None)) is not None:
        yield from _read_file(path.parent / str(base), *extended_by, path)
    for key, value in content.items():
        yield f"{path}: ", str(key), value


def _load(path: Path) -> dict[Any, Any]:
    if path.stat().st_size > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    content = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(content, dict):
        raise TypeError("expected settings such as 'epochs: 10', got a list")
    return content


def _types(kind: type) -> dict[str, str]:
    """Return the type of each setting in words."""
    return {key: words for key, words, _ in _settings_of(kind)}


def _recipe(kind: type) -> str:
    """Return the name of the recipe that has these settings."""
    return kind.__module__.split(".")[-2]


def _update(
    config: Any, types: Mapping[str, str], place: str, key: str, value: Any, recipe: str
) -> None:
    if isinstance(value, dict) and value and not types.get(key, "").startswith("dict["):
        for name in value:
            _update(config, types, place, f"{key}.{name}", value[name], recipe)
        return
    text = _short(value)
    source = f"{place}{key}={text}"
    if key not in types:
        hint = replacement(key, recipe) or f"unknown setting {key}; {_hint(types, key)}"
        raise SettingsError(f"{source}: {hint}")
    if "${" in (value if isinstance(value, str) else text):  # OmegaConf would replace it
        raise SettingsError(f"{source}: references such as ${{key}} are not supported")
    try:
        if value == "none" and types[key].endswith("None"):
            value = None
        elif isinstance(value, str) and not types[key].startswith(TEXT_TYPES):
            value = OmegaConf.create(f"value: {value}").value
        if isinstance(value, str) and types[key].startswith("tuple[str"):
            value = [value]
        OmegaConf.update(config, key, value, merge=False)
    except Exception as error:  # OmegaConf and its YAML parser raise errors of many types
        near = get_close_matches(text, types[key].split("'")[1::2], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise SettingsError(f"{source}: expected {types[key]} for {key}{hint}") from error


def _short(value: Any) -> str:
    try:
        return reprlib.repr(value)[:200].strip("'")
    except ValueError:  # Python does not print integers of thousands of digits
        return "a long number"


def _hint(types: Mapping[str, str], key: str) -> str:
    if inside := [other for other in types if other.startswith(f"{key}.")]:
        return f"it is a section with {', '.join(inside)}"
    near = _nearest(types, key)
    return f"did you mean {near}?" if near else "--help lists every setting"


def _nearest(types: Iterable[str], name: str, cutoff: float = 0.6) -> str | None:
    """Return the key that is meant by a similar one, by an alias, or by the last part of either."""
    types = list(types)
    section, dot, last = name.rpartition(".")
    last = ALIASES.get(last, last)
    name = section + dot + last
    # The last part of a key matters as much as all of it: depth=6 means model.depth=6.
    keys = {key.rpartition(".")[2]: key for key in reversed(types)} | {key: key for key in types}
    near = get_close_matches(name, keys, 1, cutoff) or get_close_matches(last, keys, 1, cutoff)
    return keys[near[0]] if near else None
