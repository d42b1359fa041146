"""Read a training script and the modules of its folder as syntax trees, without running them."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from samestep.errors import ConfigError
from samestep.host import parse
from samestep.tools.adopt.rules import calls

MOST_BYTES: Final = 5_000_000
MOST_FILES: Final = 40
TRAINING: Final = ("torch", "accelerate", "lightning", "pytorch_lightning", "transformers")
OF_PYTHON_2: Final = ("Missing parentheses in call to", "multiple exception types must be")
MANY: Final = f"only {MOST_FILES} modules of the folder are read"
EXPECTED: Final = "expected a Python script, such as train.py"
INIT: Final = "__init__.py"
ABOVE: Final = 2  # folders above that of the script, of which a package may be imported


@dataclass(frozen=True)
class Import:
    """A name that an import statement binds."""

    name: str
    means: str  # its dotted name, such as torch.nn of nn
    file: Path | None  # of the folder of the script
    statement: ast.stmt
    module: str  # as the statement says it, such as .engine

    def is_absent(self, folder: Path) -> bool:
        """Return whether it is a module of the script's project, but not in its folder."""
        root = self.module.partition(".")[0]  # "" of a relative import
        above = folder.absolute().parents[:ABOVE]
        is_own = not root or calls("own modules").fullmatch(root)
        return not self.file and bool(is_own or any(_find(parent, [root]) for parent in above))


@dataclass(frozen=True, eq=False)
class Source:
    """A file, its tree, its imports, also those in functions, and the names that it reads."""

    path: Path  # as the user would write it
    tree: ast.Module
    imports: tuple[Import, ...]
    reads: frozenset[str]  # without what they are attributes of


def read_sources(script: Path) -> tuple[list[Source], dict[Path, str]]:
    """Return a script and the modules that it imports from its folder, and why some are missing.

    Of the `__init__.py` of a package, only the imports of names that are read are followed.
    Raises `ConfigError` if the script cannot be read or does not train.
    """
    sources, missing = {script: read(script, script.parent)}, dict[Path, str]()
    todo = [script]
    for path in todo:  # which grows
        try:
            if path not in sources and len(sources) == MOST_FILES:
                raise ConfigError(MANY)  # noqa: TRY301  like those of `read`
            sources[path] = sources.get(path) or read(path, script.parent)
        except ConfigError as error:
            missing[path] = str(error)
            continue
        read_names = {"*"}.union(*(each.reads for each in sources.values()))
        for source in sources.values():  # also of earlier packages, for names that only this reads
            is_package = source.path.name == INIT
            for bound in source.imports:
                is_read = not is_package or bound.name in read_names
                if bound.file and is_read and bound.file not in todo:
                    todo.append(bound.file)
    if not sources[script].tree.body:
        raise ConfigError(f"{script} is empty; expected a training script")
    imports = (bound for source in sources.values() for bound in source.imports)
    if not any(bound.means.startswith(TRAINING) for bound in imports):
        raise ConfigError(
            f"neither {script} nor a module of its folder that it imports imports torch; expected a"
            " script that trains with PyTorch"
        )
    return [*sources.values()], missing


def read(path: Path, folder: Path) -> Source:
    """Return the syntax tree of a file. Raises `ConfigError` with what is wrong and where."""
    try:
        wrong = {
            "does not exist": not path.exists(),
            "is a folder": path.is_dir(),
            f"is a notebook: jupyter nbconvert --to script {path}": path.suffix == ".ipynb",
            "is not a regular file": not path.is_file(),
            f"has more than {MOST_BYTES} bytes": path.is_file()
            and path.stat().st_size > MOST_BYTES,
        }
        for what in (what for what, is_so in wrong.items() if is_so):
            raise ConfigError(f"{path} {what}; {EXPECTED}")
        content = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        tree = _parse(path, content.decode(encoding))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {EXPECTED}") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        why = f"{path} is not text in UTF-8, or the encoding that it declares: {error}"
        raise ConfigError(f"{why}; {EXPECTED}") from error
    reads = frozenset(name for node in ast.walk(tree) if (name := _name_read(node)))
    return Source(path, tree, tuple(_imports(path, tree, folder)), reads)


def _name_read(node: ast.AST) -> str:
    """Return the name that a node reads, also one that an import renames, "" of others."""
    match node:
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
            return name
        case ast.alias(name=name, asname=str()):
            return name
    return ""


def _parse(path: Path, text: str) -> ast.Module:
    version = ".".join(map(str, sys.version_info[:2]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the texts of a script
            return parse(text)
    except SyntaxError as error:
        if error.lineno is None:  # a byte 0 in the text
            raise ConfigError(f"{path} is not Python: {error.msg}; {EXPECTED}") from error
        is_old = error.msg.startswith(OF_PYTHON_2)
        what = "is Python 2" if is_old else f"is not Python {version}"
        advice = "convert it to Python 3" if is_old else "correct this line"
        raise ConfigError(f"{path}:{error.lineno} {what}: {error.msg}; {advice}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        why = str(error) or "it is nested too deeply"
        raise ConfigError(f"{path} is not Python: {why}; {EXPECTED}") from error


def _imports(path: Path, tree: ast.Module, folder: Path) -> Iterator[Import]:
    """Yield all names that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                means = alias.name if alias.asname else name
                yield Import(name, means, _find(folder, alias.name.split(".")), node, alias.name)
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            above = [*path.parents]
            start = above[min(node.level, len(above)) - 1] if node.level else folder
            start = start if folder in {start, *start.parents} else folder  # never above it
            for alias in node.names:
                file = _find(start, [*parts, alias.name]) or _find(start, parts)
                module = "." * node.level + (node.module or alias.name)
                means = ".".join([*parts, alias.name])
                yield Import(alias.asname or alias.name, means, file, node, module)


def _find(folder: Path, parts: list[str]) -> Path | None:
    path = folder.joinpath(*parts)
    files = (path.parent / f"{path.name}.py", path / INIT) if parts else (path / INIT,)
    return next((file for file in files if file.is_file()), None)
