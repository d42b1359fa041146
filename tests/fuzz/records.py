"""Targets that read records: damaged ones, and ones that no run writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from samestep.data.plan import array_digest
from samestep.errors import RecordError
from samestep.record import chain
from samestep.record.chain import Chain, ChainFile, origin
from samestep.record.cursor import FILE, Cursor
from samestep.record.events import FILE_NAME, read_events
from samestep.record.files import FOLDER, EventChunk, LocalFiles, Notes
from samestep.record.orders import read_order, write_order
from samestep.record.sinks import SinkAdapter
from samestep.record.source import RunLocation, Source, open_source, read_history
from samestep.tools.receipt import PARTS
from samestep.tools.receipt import read as read_receipt
from samestep.watch.curves import AXES
from samestep.watch.report import make_report
from samestep.watch.view import View
from tests.fuzz import mutate
from tests.fuzz.target import Target
from tests.watch.markup import Markup
from tests.watch.writing import lines, scalars, started, system, timing

PNG = b"\x89PNG\r\n\x1a\n"
SECRET = PNG + b"of another run"
IMAGES = (
    PNG + b"pixels", b"\xff\xd8\xffpixels", b"GIF89apixels", b"RIFF\0\0\0\0WEBPpixels",
    b"<svg onload='alert(1)'/>", b"<script>", b"",
)  # fmt: skip
PATHS = (
    "images/one.png", "images/link.png", "images/folder.png", "images/../../secret.png",
    "../secret.png", "images/one.png\n",
)  # fmt: skip
BREAK_OUT = "</script><script>alert(1)</script><!--<script>"
NAMES = ("loss", "a/b", BREAK_OUT)
LOOP = {
    "event": "loop", "name": "train", "step": 0, "epoch": 0, "done": 0, "steps": 8, "epochs": 2,
    "samples": 20, "batch_size": 8,
}  # fmt: skip
FAILED = {
    "event": "failed", "step": 3, "rank": 1, "host": "here", "error": "lost",
    "traceback": BREAK_OUT,
}  # fmt: skip
EVENTS = (
    started(config={"lanes": 8, "timeout": "inf", "remote": BREAK_OUT}),
    LOOP,
    *[
        scalars(step, **dict.fromkeys(NAMES, 1 / (step + 1)), norm="nan")
        | {"low": {"loss": 0}, "high": {"loss": 9}}
        for step in range(4)
    ],
    system("node1"),
    *[timing(step, (0.1, 0.2, 0.0, 0.1, 0.0), (0.2, 0.1, "inf", 0.1, 0.0)) for step in range(3)],
    {**scalars(2, score=0.5), "between": True},
    *[
        {"event": "image", "step": 1, "name": name, "path": path, "width": 1, "height": 1}
        for name, path in zip("abcdef", PATHS, strict=True)
    ],
    {"event": "images_dropped", "step": 2, "count": 3},
    {"event": "sink", "name": "s3://bucket/run", "behind_bytes": 10, "dropped": 1, "error": "lost"},
    {"event": "snapshot", "step": 3, "score": 0.5},
    {"event": "snapshot_rejected", "path": "step-00000003", "reason": "damaged"},
    FAILED,
    {"event": "restarting", "step": 2, "rank": 1, "reason": "lost"},
    started(2, kind="resumed", workers=4),
    {"event": "stopped", "step": 3, "signal": 15},
    {"event": "evaluated", "step": 3, "score": 0.5},
    {"event": "finished", "step": 4},
)
ODD_NAMES = (
    "\u0660" * 20 + "-" + "\u0661" * 20 + ".jsonl",
    f"{'9' * 20}-{'9' * 20}.jsonl",
    f"{7:020d}-{3:020d}.jsonl",
    "\udcff",
    "part\n",
)


def targets(folder: Path) -> list[Target]:
    """Return the targets that read records; their files are under `folder`."""
    return [
        *_events(folder / "events"),
        *_views(folder / "views"),
        *_parts(folder / "parts"),
        *_sent(folder / "sent"),
        *_chains(folder / "chains"),
        *_receipts(folder / "receipts"),
    ]


def write_run(directory: Path, random: Random | None) -> Path:
    """Write a run's record and its images, some of which are links; damage them if `random`."""
    images = directory / "images"
    if not images.is_dir():
        images.mkdir(parents=True)
        (directory.parent / "secret.png").write_bytes(SECRET)
        (images / "link.png").symlink_to("../../secret.png")
        (images / "folder.png").mkdir()
    image = (
        IMAGES[0]
        if random is None
        else random.choice((*IMAGES, mutate.of_bytes(random, IMAGES[0])))
    )
    (images / "one.png").write_bytes(image)
    (directory / FILE_NAME).write_bytes(lines(*EVENTS) if random is None else record(random))
    return directory


def write_notes(directory: Path, random: Random) -> None:
    """Write a run's notes, damaged in half of all cases."""
    file = directory / Notes.NAME
    file.unlink(missing_ok=True)
    if random.random() < 0.2:
        file.symlink_to("../secret.png")
    else:
        notes = {"format": 1, "tags": ["a", "b"], "note": BREAK_OUT}
        data = mutate.as_json(random, mutate.of_json(random, notes))
        file.write_bytes(mutate.of_bytes(random, data) if random.random() < 0.5 else data)


def record(random: Random) -> bytes:
    """Return the bytes of a record with some unusual events, damaged in half of all cases."""
    events = [json.loads(line) for line in lines(*EVENTS).splitlines()]
    written = [
        mutate.as_json(random, mutate.of_json(random, event) if random.random() < 0.2 else event)
        for event in events
    ]
    if random.random() < 0.2:
        random.shuffle(written)
    data = b"\n".join(written) + b"\n"
    return mutate.of_bytes(random, data) if random.random() < 0.5 else data


def _receipts(folder: Path) -> list[Target]:
    (folder / FOLDER).mkdir(parents=True)
    array = np.arange(9)
    write_order(folder, array, array_digest(array))
    (path,) = (folder / FOLDER).iterdir()
    content = path.read_bytes()
    parts = {part: {"steps": 3, "bytes": 9} for part in PARTS}
    plain = {"format": 1, "samestep": "0", **parts, "digest": "0" * 64}

    def order(random: Random) -> Path:
        path.write_bytes(mutate.of_bytes(random, content))
        return folder

    def receipt(random: Random) -> Path:
        data = mutate.as_json(random, mutate.of_json(random, plain))
        (folder / "receipt").write_bytes(
            mutate.of_bytes(random, data) if random.random() < 0.5 else data
        )
        return folder / "receipt"

    def read_array(directory: Path) -> None:
        assert read_order(directory, array_digest(array)).tolist() == array.tolist()

    return [
        Target("order", order, read_array, (RecordError,)),
        Target("receipt", receipt, read_receipt, (RecordError,)),
    ]


def _events(folder: Path) -> list[Target]:
    def run(random: Random) -> Path:
        return write_run(folder / "one", random)

    return [
        Target("events", run, lambda directory: list(read_events(directory)), (RecordError,)),
        Target("history", run, lambda directory: list(read_history(directory)), (RecordError,)),
    ]


class Growing(LocalFiles):
    """Files of a folder of which only the first `written` bytes are visible."""

    written = 0

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: min(size, self.written) for name, size in super().sizes(folder).items()}


def _views(folder: Path) -> list[Target]:
    def run(random: Random) -> tuple[Path, int, dict[str, Any]]:
        directory = write_run(folder / "all" / "one", random)
        write_notes(directory, random)
        ends = [
            random.choice((None, None, 0.0, 1.0, 2.5, -1e308, 1e308, 2.0**53)) for _ in range(2)
        ]
        asked = {
            "start": ends[0],
            "end": ends[1],
            "points": random.choice((0, 1, 3, 4, 1000)),
            "smooth": random.choice((0.0, 0.9, 0.999)),
            "axis": random.choice(AXES),
        }
        return directory, random.randrange((directory / FILE_NAME).stat().st_size + 1), asked

    def view(case: tuple[Path, int, dict[str, Any]]) -> None:
        directory, half, asked = case
        files = Growing(directory)
        growing, fresh = View(Source(str(directory), files)), View(open_source(directory))
        for files.written in (half, 2**40):
            growing.refresh()
        fresh.refresh()
        assert _shown(growing, asked) == _shown(fresh, asked), (
            "the view differs when read in two parts"
        )

    def report(case: tuple[Path, int, dict[str, Any]]) -> None:
        page = make_report([str(case[0].parent)], image_bytes=1000).page
        page.encode()
        parts = Markup(page)
        assert [tag for tag, _ in parts.elements] == tags, "a text of the record became markup"
        json.loads(parts.texts["script", "answers"][0], parse_constant=_refuse)

    write_run(folder / "plain" / "one", None)
    tags = [
        tag
        for tag, _ in Markup(make_report([str(folder / "plain")], image_bytes=1000).page).elements
    ]
    return [
        Target("view", run, view, (), is_slow=True),
        Target("report", run, report, (), reads_elsewhere=True, is_slow=True),
    ]


def _curve(view: View, name: str, asked: dict[str, Any]) -> Any:
    try:
        return view.curve(name, **asked)
    except KeyError:
        assert asked["axis"] == "samples", asked  # which the record may not say
        return None


def _shown(view: View, asked: dict[str, Any]) -> str:
    """Return everything that the view shows, except what depends on the clock, as JSON."""
    json.dumps(view.row(), allow_nan=False)
    summary = {
        name: value
        for name, value in view.summary().items()
        if name not in {"now", "progress", "state"}
    }
    summary["curves"] = [_curve(view, scalar["name"], asked) for scalar in summary["scalars"]]
    summary["system"] = view.system(asked["start"], asked["end"])
    summary["timing"] = view.timing(asked["start"], asked["end"], asked["points"])
    for number in range(len(PATHS)):
        with suppress(KeyError, RecordError):
            assert b"".join(view.open_image(number)[2]) != SECRET, "it read an image of another run"
    return json.dumps(summary, allow_nan=False)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _parts(folder: Path) -> list[Target]:
    directory = folder / "one" / FOLDER
    directory.mkdir(parents=True)

    def parts(random: Random) -> Path:
        for path in directory.iterdir():
            path.unlink()
        data = record(random)
        places = [0, *(place + 1 for place, byte in enumerate(data) if byte == ord("\n"))]
        chosen = sorted({0, places[-1], *random.choices(places, k=4)})
        for first, end in pairwise(chosen):
            part = EventChunk(random.choice((first, first, random.choice(places))), end)
            content = data[part.start : part.end]
            name = (
                random.choice(ODD_NAMES) if random.random() < 0.2 else part.path.rpartition("/")[2]
            )
            (directory / name).write_bytes(
                mutate.of_bytes(random, content) if random.random() < 0.3 else content
            )
        return directory.parent

    def read(run_directory: Path) -> None:
        source, offset = open_source(run_directory), 0
        while chunk := source.read(offset):
            assert chunk.endswith(b"\n")
            offset += len(chunk)
        assert RunLocation(run_directory.parent).find() in ([], ["one"])
        View(source).refresh()

    return [Target("parts", parts, read, (RecordError,))]


class Taker:
    """A sink that accepts everything."""

    def __init__(self, directory: Path) -> None:
        self._images = directory / "images"

    def take(self, event: Mapping[str, Any]) -> None:
        json.dumps(event)

    def image(self, event: Mapping[str, Any], data: bytes) -> None:
        assert event["event"] == "image"
        if data == SECRET:
            raise RuntimeError(f"an image of another run was sent from {self._images}")

    def flush(self) -> None:
        pass


class Unkept(Cursor):
    """Stores nothing, since a reader must not write."""

    def save(self, name: str, value: int) -> None:
        pass


def _sent(folder: Path) -> list[Target]:
    sink = f"{Taker.__module__}:{Taker.__name__}"

    def progress(random: Random) -> Path:
        directory = write_run(folder / "one", random)
        size = (directory / FILE_NAME).stat().st_size
        (directory / FOLDER).mkdir(exist_ok=True)
        kept = mutate.as_json(
            random, mutate.of_json(random, {sink: random.randrange(size + 1), "s3://bucket/run": 0})
        )
        (directory / FILE).write_bytes(
            mutate.of_bytes(random, kept) if random.random() < 0.3 else kept
        )
        return directory

    def forward(directory: Path) -> None:
        source = open_source(directory)
        feed = SinkAdapter(sink, directory, source, Unkept(directory))
        offset = feed.open()
        assert offset >= 0
        while chunk := source.read(offset):
            feed.send(offset, chunk)
            offset += len(chunk)

    return [Target("forwarded", progress, forward, ())]


def _chains(folder: Path) -> list[Target]:
    folder.mkdir()
    written = ChainFile(folder, 0, 7, origin(7))
    for step in range(5):
        written.append((bytes([step] * 8),) * 4)
    written.close()
    data = (folder / chain.FILE).read_bytes()

    def damaged(random: Random) -> Path:
        (folder / chain.FILE).write_bytes(mutate.of_bytes(random, data))
        return folder

    def read(directory: Path) -> None:
        with closing(Chain.open(directory)) as opened:
            for step in (0, opened.first, opened.first + len(opened) - 1):
                with suppress(IndexError):
                    assert opened.head_after(step + 1) == opened[step].head
            opened.check()

    return [Target("chain", damaged, read, (RecordError,))]
