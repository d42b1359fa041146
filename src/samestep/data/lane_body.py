"""What the body of a loop over lanes hands from one lane to the next.

Each worker runs the body for its own lanes only, so no loss may depend on what an earlier lane of
this worker left behind, nor on how many there were. The source of the body says on which variables
a loss depends (`lane_flow.py`). They are compared before and after each lane.
"""

from __future__ import annotations

import ast
import dis
import linecache
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from inspect import getattr_static
from itertools import islice
from numbers import Number
from types import CodeType, FrameType, FunctionType, ModuleType, NoneType
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from samestep.data.lane_flow import DATA, OF_LOOP, Effects, Flow, Path, is_within, path_of
from samestep.data.search import is_part, own_dict
from samestep.host import parse
from samestep.torch_internals import versions_of
from samestep.user_code import FROZEN, is_users

MOST_FILES: Final = 16
MOST_BODIES: Final = 1024
MOST_ENTRIES: Final = 1024  # of a container that are compared
MOST_BYTES: Final = 2**20  # of an array that is compared
SCALARS: Final = (bool, int, float, complex, str, bytes, NoneType)
CONTAINERS: Final = (list, dict, set, deque, np.ndarray)
RESULTS: Final = (Number, Tensor, np.ndarray)  # that lanes may add up
# functions whose arguments go to an output
OUTPUTS: Final = {("print",), *((f".{n}",) for n in ("print", "log", "info", "set_postfix"))}
MISSING: Final = object()
NOTHING: Final[Mapping[Path, bool]] = {}
# by path, with what changes if one is changed in place
Variables = dict[Path, tuple[Any, list[Any]]]
NO_HOLDERS: Final = (*SCALARS, Tensor, ModuleType)
_kept: dict[tuple[CodeType, int], list[tuple[str, str]]] = {}  # names, and parts of modules
_bodies: dict[tuple[CodeType, int], Body] = {}


class Body(NamedTuple):
    """The body of a loop, whose variables are those of the frames of `code`.

    Losses depend on the `watched` ones, which are looked into if the body changes them in place.
    The values of `sums` depend on their former ones. `counted` are the names of what a loss gets
    beside the lane batch, such as the index of `enumerate`.
    """

    code: CodeType
    watched: Mapping[Path, bool] = NOTHING
    sums: tuple[Path, ...] = ()
    counted: str = ""
    is_last: bool = False  # no body of another loop gets the lanes

    def values(self, frame: FrameType | None) -> Variables:
        """Return the variables of the body, which `frame` or one of its callers runs."""
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        if frame is None:
            return {}
        values = [(path, _value_of(frame, path)) for path in (*self.watched, *self.sums)]
        return {
            path: (value, _contents(value) if self.watched.get(path) else [])
            for path, value in values
        }

    def changed(self, before: Variables, frame: FrameType) -> str:
        """Return the name of a variable that a lane changed for the next one, "" if none."""
        for path, (value, contents) in self.values(frame).items():
            former, former_contents = before.get(path, (value, contents))
            is_kept = _is_same(value, former) and len(contents) == len(former_contents)
            is_kept = is_kept and all(map(_is_same, contents, former_contents))
            is_result = type(value) is not bool and isinstance(value, RESULTS)
            if not is_kept and (path in self.watched or is_result):
                return "".join(path)
        return ""


def bodies_of(frame: FrameType | None, loop: object) -> list[Body]:
    """Return the bodies that get the lanes of `loop`, for whose next lane `frame` asks now.

    They are in user code: a loop, and generators of the user that its iterator goes through. Those
    in which there is nothing to compare are left out.
    """
    bodies = []
    while frame is not None:
        body = _body_of(frame, loop)
        if body.watched or body.sums or body.counted:
            bodies.append(body)
        frame = None if body.is_last else frame.f_back
    return bodies


def values_of(bodies: Iterable[Body], frame: FrameType) -> list[Variables]:
    """Return the variables of bodies, as they are now."""
    return [body.values(frame) for body in bodies]


def _body_of(frame: FrameType, loop: object) -> Body:
    key = frame.f_code, frame.f_lineno
    if (body := _bodies.get(key)) is None:
        if len(_bodies) == MOST_BODIES:  # such as those of a notebook's cells
            _bodies.clear()
        body = _bodies[key] = _read(frame, loop)
    return body


def _read(frame: FrameType, loop: object) -> Body:
    """Read the body of the loop whose iterator a frame advances, if there is one."""
    code, line = frame.f_code, frame.f_lineno
    if not is_users(code.co_filename):
        return Body(code)
    loops = _loops_of("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    if loops is None:
        logging.getLogger("samestep").warning(
            "the source of %s cannot be read, so that what the body of its loop over batch.lanes"
            " hands from one lane to the next is not seen; `samestep verify` compares results",
            code.co_filename,
        )
        return Body(code, is_last=True)
    at_line = [each for each in loops if each.lineno <= line <= (each.iter.end_lineno or 0)]
    if not at_line:
        return Body(code)
    statement = max(at_line, key=lambda each: each.lineno)
    flow = Flow(partial(_effects_of, frame))
    _begin(flow, frame, statement.target, statement.iter, loop)
    flow.run(statement.body)
    counted = sorted("".join(origin) for origin in flow.loss - DATA if origin[0] == OF_LOOP)
    watched = _watched(flow, frame)
    sums = tuple(sorted(flow.continued - watched.keys()))
    is_last = not any(isinstance(node, ast.Yield) for node in ast.walk(statement))
    return Body(code, watched, sums, ", ".join(counted), is_last=is_last)


def _watched(flow: Flow, frame: FrameType) -> dict[Path, bool]:
    """Return the variables on which losses depend, and whether each is changed in place."""
    changed = {*flow.stored, *flow.changed}
    places = {_place(frame, path) for path in flow.loss if path[0] != OF_LOOP}
    return {
        path: any(is_within(part, path) for part in changed)
        for path in sorted(places)
        if any(is_within(path, owner) for owner in changed)
        or isinstance(_value_of(frame, path), (*SCALARS, *CONTAINERS))
    }


def counter_of(frame: FrameType | None) -> str:
    """Return the index of `enumerate` with which the body of the frame's loop computes, or "".

    The loop is in the first frame of user code. The test of an `if`, and what is printed or logged,
    only go to an output.
    """
    while frame is not None and not is_users(frame.f_code.co_filename):  # such as that of tqdm
        frame = frame.f_back
    if frame is None:
        return ""
    code, line = frame.f_code, frame.f_lineno
    source = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    for statement in _loops_of(source) or ():
        call, target = statement.iter, statement.target
        if (
            statement.lineno <= line <= (call.end_lineno or 0)
            and isinstance(call, ast.Call)
            and path_of(call.func) == ("enumerate",)
            and isinstance(target, ast.Tuple)
            and isinstance(target.elts[0], ast.Name)
            and not any(path_of(node)[-1:] == (".step",) for node in ast.walk(call))
            and any(_computes_with(each, target.elts[0].id) for each in statement.body)
        ):
            return target.elts[0].id
    return ""


def _computes_with(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id == name
    if isinstance(node, ast.Call) and path_of(node.func)[-1:] in OUTPUTS:
        return False
    skipped = node.test if isinstance(node, ast.If) else None
    parts = (part for part in ast.iter_child_nodes(node) if part is not skipped)
    return any(_computes_with(part, name) for part in parts)


@lru_cache(maxsize=MOST_FILES)
def _loops_of(source: str) -> list[ast.For] | None:
    """Return the loops of a file, None if its source is missing or cannot be parsed."""
    try:
        tree = parse(source)
    except (SyntaxError, ValueError, RecursionError, SystemError):  # if another thread parses
        return None
    return [node for node in ast.walk(tree) if isinstance(node, ast.For)] if source else None


def kept_by(frame: FrameType, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return those variables that the body of the loop in a frame reads and does not set itself.

    Without numbers, texts and tensors, and without packages. Of modules of the user, their parts.
    """
    key = frame.f_code, frame.f_lineno
    if (paths := _kept.get(key)) is None:
        if len(_kept) == MOST_BODIES:
            _kept.clear()
        paths = _kept[key] = [
            path for name in _kept_names(frame) for path in _paths_in(name, variables.get(name))
        ]
    kept = {}
    for name, part in paths:
        value = variables.get(name)
        value = vars(value).get(part) if isinstance(value, ModuleType) else value
        # a batch of samestep would keep its loader processes alive
        if not (isinstance(value, NO_HOLDERS) or type(value).__module__.startswith("samestep.")):
            kept[f"{name}.{part}" if part else name] = value
    return kept


def _paths_in(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield a variable, or all parts of a module of the user."""
    if not isinstance(value, ModuleType):
        yield name, ""
    elif is_users(getattr(value, "__file__", None) or FROZEN):
        yield from ((name, part) for part, each in vars(value).items() if is_part(each))


def _kept_names(frame: FrameType) -> list[str]:
    """Return the names that a loop reads and does not set; all names if `frame` is at no loop."""
    loops = _loops_of("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    line, code = frame.f_lineno, frame.f_code
    at_line = [each for each in loops or [] if each.lineno <= line <= (each.iter.end_lineno or 0)]
    if not at_line:  # such as `lanes = batch.lanes(model)`
        return [*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars]
    statement = max(at_line, key=lambda each: each.lineno)
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return sorted({node.id for node in names} - stored)


def _begin(flow: Flow, frame: FrameType, target: ast.expr, source: ast.expr, loop: object) -> None:
    """Set the variables of the loop's target: parts of the lane batch, or of what goes beside it.

    The latter have other values for the same lane on another number of workers.
    """
    function, *parts = (source.func, *source.args) if isinstance(source, ast.Call) else (source,)
    name = path_of(function)
    if name == ("enumerate",):
        parts = [ast.Constant(0), *parts[:1]]
    elif name != ("zip",):  # such as tqdm(batch.lanes(model))
        parts = [part for part in parts if _has_lanes(frame, part, loop)]
        if parts:
            _begin(flow, frame, target, parts[0], loop)
        else:
            flow.bind(target, DATA)
        return
    of_lanes = [_has_lanes(frame, part, loop) for part in parts]
    if not any(of_lanes):
        of_lanes = [not isinstance(part, ast.Constant) for part in parts]
    for number, (part, is_batch) in enumerate(zip(parts, of_lanes, strict=True)):
        element: ast.expr = ast.Subscript(target, ast.Constant(number), ast.Store())
        if isinstance(target, ast.Tuple | ast.List) and len(target.elts) == len(parts):
            element = target.elts[number]
        if is_batch:
            _begin(flow, frame, element, part, loop)
        else:
            flow.bind(element, frozenset({(OF_LOOP, ast.unparse(element))}))


def _has_lanes(frame: FrameType, node: ast.expr, loop: object) -> bool:
    """Return whether an expression makes or names the loop over lanes."""
    return any(
        path[-1] == ".lanes" or _value_of(frame, path) is loop
        for path in map(path_of, ast.walk(node))
        if path
    )


def _effects_of(frame: FrameType, path: Path) -> Effects:
    """Return what the user's function at a path reads and changes, in globals or its object."""
    *owner, name = path
    value = _value_of(frame, tuple(owner) or path)
    if owner:
        if isinstance(value, (*CONTAINERS, Tensor)) or value is MISSING:
            return Effects(changes=frozenset({tuple(owner)}))
        function = getattr(type(value), name.removeprefix("."), None)
    else:
        function = value
    if not isinstance(function, FunctionType) or not is_users(function.__code__.co_filename):
        return Effects()
    reads, changes, code = set[Path](), set[Path](), function.__code__
    for instruction in dis.get_instructions(code):
        kind, _, scope = instruction.opname.partition("_")
        argument = str(instruction.argval)
        if owner and scope in {"ATTR", "METHOD"}:
            place = (*owner, f".{argument}")
        elif scope in {"GLOBAL", "DEREF"} and argument not in frame.f_code.co_varnames:
            place = (argument,)
        else:
            continue
        if kind == "LOAD":
            reads.add(place)
        elif kind == "STORE":
            changes.add(place)
    return Effects(frozenset(reads), frozenset(changes), "backward" in code.co_names)


def _place(frame: FrameType, path: Path) -> Path:
    """Return the path of the part of a variable that can be compared, such as that of an array."""
    while len(path) > 1 and _value_of(frame, path) is MISSING:
        path = path[:-1]
    return path


def _value_of(frame: FrameType, path: Path) -> Any:
    """Return the value of a variable, `MISSING` if it has none or needs code of its owner."""
    name, *keys = path
    value = frame.f_locals.get(name, frame.f_globals.get(name, MISSING))
    for key in keys:
        if key.startswith("."):
            attributes, attribute = own_dict(value), key[1:]
            value = (
                attributes[attribute] if attribute in attributes else _of_class(value, attribute)
            )
        elif type(value) in {list, tuple, dict}:
            try:
                value = value[ast.literal_eval(key[1:-1])]
            except (LookupError, TypeError):
                return MISSING
        else:
            return MISSING
    return value


def _of_class(owner: Any, name: str) -> Any:
    """Return an attribute that all objects of a class have, such as a default; not a method."""
    value = getattr_static(owner if isinstance(owner, type) else type(owner), name, MISSING)
    return value if isinstance(value, (*SCALARS, *CONTAINERS, Tensor)) else MISSING


def _contents(value: Any) -> list[Any]:
    """Return what changes if a container, an array or a tensor is changed in place."""
    if isinstance(value, Tensor):
        return versions_of([value])
    if isinstance(value, np.ndarray):
        return [value.tobytes()] if value.nbytes <= MOST_BYTES else []
    if not isinstance(value, CONTAINERS):
        return []
    entries = list(islice(value, MOST_ENTRIES))
    entries += islice(value.values(), MOST_ENTRIES) if isinstance(value, dict) else ()
    return [len(value), *entries]


def _is_same(value: Any, former: Any) -> bool:
    """Return whether a variable kept its value; other objects may be equal, but are not kept."""
    return value is former or (
        isinstance(value, SCALARS) and type(value) is type(former) and value == former
    )
