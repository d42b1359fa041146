"""Time to read and draw a record of many points, and a folder of many runs, including in Chromium.

usage: python -m benchmarks.watching [--points 1000000] [--runs 1000] [--rounds 3]
       python -m benchmarks.watching --long 1000000 [--folder FOLDER]

`--long 1000000` measures instead a folder with a run of that many steps of two workers, 50 scalars,
1,000 images, 10,000 histograms and 20,000 events about snapshots, and 199 shorter runs, which it
writes (2.3 GB) unless they are there: answers, memory and scrolling.

The page of many runs needs /usr/bin/chromium and /usr/bin/chromedriver.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from PIL import Image

from benchmarks.measure import spread
from samestep.watch.runs import open_views
from tests.watch.browser.pages import Page, Server, browsing, serving
from tests.watch.writing import histogram, loop, scalars, started, timing
from tests.watch.writing import write as write_events

SMOOTH, SPAN = 0.9, 900
STEPS = 100  # of each of many runs
SCALARS = ("train/loss", "train/top1", "val/loss", "val/top1")
OPTIONS = {f"option{number}": number for number in range(40)}
SHOWN = "return document.querySelectorAll('#runs-table tbody tr').length > 0"
FILTER = """
const done = arguments[arguments.length - 1], field = document.getElementById("run-filter");
field.value = arguments[0];
const began = performance.now();
field.dispatchEvent(new Event("input"));
requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
"""
SCROLL = """
const done = arguments[arguments.length - 1], gaps = [];
let last = performance.now();
const frame = (now) => {
  gaps.push(now - last);
  last = now;
  scrollBy(0, 60);
  if (gaps.length < 150) requestAnimationFrame(frame);
  else done(gaps.slice(1).sort((a, b) => a - b)[74]);
};
requestAnimationFrame(frame);
"""
MANY_SCALARS = tuple(
    f"{group}/{n}" for group in ("loss", "top1", "norm", "lr", "aux") for n in range(10)
)
IMAGES, LONG_RUNS, SHORT_STEPS = 1000, 200, 1000
HISTOGRAMS, SNAPSHOTS = 10, 10  # of layers for each image, and for each 1,000 steps
PAUSE = 10.0  # seconds between two questions while records are read
POOL = 997  # different lines of a kind


def write(directory: Path, points: int) -> float:
    """Write the record of a run with one scalar; return its megabytes."""
    file = directory / "events.jsonl"
    with file.open("w") as lines:
        started = {
            "time": 0.0,
            "event": "started",
            "step": 0,
            "lanes": 8,
            "workers": [{"rank": 0, "host": "here", "pid": 1}],
            "config": {},
        }
        lines.write(f"{json.dumps(started)}\n")
        for step in range(points):
            value = 1 / (step + 1)
            parts = {
                "values": {"loss": value},
                "low": {"loss": 0.9 * value},
                "high": {"loss": 1.1 * value},
            }
            lines.write(
                json.dumps(
                    {"time": 0.01 * step, "event": "scalars", "step": step, "epoch": 0, **parts}
                )
                + "\n"
            )
    return file.stat().st_size / 1e6


def measure(directory: Path, points: int) -> dict[str, float]:
    """Return the seconds of each request, by name."""
    (view,) = open_views(directory).values()
    middle = points // 2
    asked: dict[str, Callable[[], object]] = {
        "read": view.refresh,
        "the whole curve": lambda: view.curve("loss"),
        "smoothed, the first time": lambda: view.curve("loss", smooth=SMOOTH),
        "smoothed again": lambda: view.curve("loss", smooth=SMOOTH),
        f"{SPAN + 1} points, exact": lambda: view.curve("loss", start=middle, end=middle + SPAN),
    }
    seconds = {}
    for what, ask in asked.items():
        began = time.perf_counter()
        ask()
        seconds[what] = time.perf_counter() - began
    return seconds


def write_many(directory: Path, runs: int) -> None:
    """Write the records of many finished runs with 4 workers, 4 scalars and their own settings."""
    chance = random.Random(0)
    for number in range(runs):
        settings = {
            "lr": round(10 ** chance.uniform(-4, -1), 6),
            "optimizer": chance.choice(("sgd", "adam")),
            "model": {"depth": chance.choice((2, 4, 8)), "width": 256},
            "seed": number,
        }
        events = [started(workers=4, config=OPTIONS, settings=settings)]
        for step in range(STEPS):
            events.append(scalars(step, **{name: chance.random() for name in SCALARS}))
            events.append(timing(step, *[(0.1, 0.2, 0.1, 0.1, 0.0)] * 4))
        end = {"event": "finished", "step": STEPS}
        write_events(directory / f"run-{number:04d}", *events, end, start=1.7e9 + 100 * number)


def measure_many(directory: Path) -> dict[str, float]:
    """Return the seconds of a server and of the page, by name."""
    seconds: dict[str, float] = {}

    def rows(server: Server, name: str, endpoint: str) -> list[dict[str, object]]:
        asked = time.perf_counter()
        answer = httpx.get(f"{server.address}api/{endpoint}", timeout=600, trust_env=False).json()
        seconds[name] = time.perf_counter() - asked
        return answer["runs"]

    def show(page: Page, name: str) -> None:
        asked = time.perf_counter()
        page.driver.get(f"{page.server.address}#tab=table")
        page.until(SHOWN)
        seconds[name] = time.perf_counter() - asked
        page.driver.get("about:blank")

    with browsing() as driver:
        driver.get("about:blank")
        began = time.perf_counter()
        with serving(directory) as server:
            seconds["server starts"] = time.perf_counter() - began
            page = Page(driver, server)
            rows(server, "list, while records are read", "runs")
            show(page, "page, while records are read")
            while any(row["state"] != "finished" for row in rows(server, "list", "runs")):
                time.sleep(0.1)
            seconds["all rows known"] = time.perf_counter() - began
            while any(row["elapsed"] is None for row in rows(server, "list", "runs")):
                time.sleep(0.1)
            seconds["all records read"] = time.perf_counter() - began
            rows(server, "list", "runs")
            rows(server, "table", "table")
            show(page, "page")
            driver.get(f"{server.address}#tab=table")
            page.until(SHOWN)
            for text in ("optimizer=adam", "optimizer=adam model.depth=4", "run-0777", ""):
                milliseconds = driver.execute_async_script(FILTER, text)
                seconds[f"filter {text or 'removed'}"] = milliseconds / 1000
            driver.get("about:blank")
    return seconds


def write_long(directory: Path, steps: int) -> None:
    """Write the record of a long run, and of many shorter ones."""
    chance = random.Random(0)
    values = [json.dumps({name: chance.random() for name in MANY_SCALARS}) for _ in range(POOL)]
    seconds = [[[chance.uniform(0.001, 0.01) for _ in range(5)] for _ in "ab"] for _ in range(POOL)]
    timings = [json.dumps(timing(0, *workers)["workers"]) for workers in seconds]
    for number in range(LONG_RUNS):
        folder, count = directory / f"run-{number:03d}", SHORT_STEPS if number else steps
        settings = {"lr": 0.1 * (1 + number % 4), "seed": number}
        begin = 1.7e9 + (0 if number == 0 else number)
        write_events(folder, started(settings=settings), loop(0, batch_size=64), start=begin)
        with (folder / "events.jsonl").open("a") as lines:
            for step in range(count):
                now, row = f"{begin + 0.05 * step:.2f}", (31 * step + number) % POOL
                event = f'{{"time": {now}, "event": "scalars", "step": {step}, '
                lines.write(f'{event}"values": {values[row]}}}\n')
                event = f'{{"time": {now}, "event": "timing", "step": {step}, '
                lines.write(f'{event}"workers": {timings[row]}}}\n')
                if number == 0:
                    for other in rare_events(folder, step, count):
                        lines.write(json.dumps({"time": float(now), **other}) + "\n")
        write_events(folder, {"event": "finished", "step": count}, start=begin + 0.05 * count)


def rare_events(folder: Path, step: int, steps: int) -> Iterator[dict[str, object]]:
    """Yield the events of some steps of the long run."""
    if step % max(1, steps // IMAGES) == 0:
        yield image(folder, step)
        for layer in range(HISTOGRAMS):
            bins = [(0.01 * edge, 64 - edge) for edge in range(64)]
            yield histogram(step, f"layer {layer}", *bins)
    if step % (1000 // SNAPSHOTS) == 0:
        yield {"event": "snapshot", "step": step, "path": f"step-{step:08d}", "score": None}
        yield {"event": "snapshot_removed", "step": step, "path": f"step-{step:08d}"}


def image(folder: Path, step: int) -> dict[str, object]:
    """Write an image, and return its event."""
    path = f"images/sample-{step:08d}.png"
    (folder / "images").mkdir(exist_ok=True)
    Image.new("RGB", (32, 32), (step % 256, 128, 0)).save(folder / path)
    size = {"width": 32, "height": 32}
    return {"event": "image", "name": "sample", "step": step, "path": path, **size}


def measure_long(directory: Path) -> None:
    """Print the seconds of first answers, the memory of the server and the page, and frames."""
    every = [f"shown=run-{number:03d}" for number in range(LONG_RUNS)]
    with browsing() as driver, serving(directory) as server:
        page, began = Page(driver, server), time.perf_counter()

        def ask(endpoint: str) -> tuple[dict[str, Any], float]:
            asked = time.perf_counter()
            url = f"{server.address}api/{endpoint}"
            return httpx.get(url, timeout=600, trust_env=False).json(), time.perf_counter() - asked

        driver.get(f"{server.address}#run=run-000&shown=run-000")
        page.points(MANY_SCALARS[0])
        print(f"  first curve of the long run after {time.perf_counter() - began:.2f} s")
        driver.get("about:blank")  # each answer takes time from reading on a busy machine
        longest = 0.0
        while any(row["elapsed"] is None for row in ask("runs")[0]["runs"]):
            longest = max(longest, ask("run?id=run-000")[1])
            time.sleep(PAUSE)
        print(f"  longest answer meanwhile: {longest:.2f} s")
        process = next(p for p in psutil.Process().children() if "watch" in p.cmdline())
        used = sum(process.cpu_times()[:2])
        spent = f"{time.perf_counter() - began:.0f} s, {used:.0f} s of CPU"
        print(f"  all records read after {spent}")
        for endpoint in ("runs", "run?id=run-000", f"curve?id=run-000&name={MANY_SCALARS[0]}"):
            print(f"  {endpoint}: {1000 * ask(endpoint)[1]:.0f} ms")
        print(f"  server: at most {server.peak_memory() / 1e6:.0f} MB")
        for name, hash_ in {
            "long run": "shown=run-000",
            "20 runs": "&".join(every[:20]),
            "all runs in groups": "&".join([*every, "group=lr"]),
            "images": "tab=images",
            "table": "tab=table",
        }.items():
            driver.get("about:blank")
            driver.get(f"{server.address}#run=run-000&{hash_}")
            page.until("return document.querySelector('.panel:not([hidden]) :is(canvas, img, td)')")
            frame = driver.execute_async_script(SCROLL)
            driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
            driver.execute_cdp_cmd("Performance.enable", {})
            metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
            heap = next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize")
            print(f"  {name}: heap {heap / 1e6:.0f} MB, median frame {frame:.0f} ms")


def main() -> None:
    """Measure, and print medians with their range."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--points", type=int, default=1_000_000, help="points of the curve (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=1000, help="of a folder, default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--long", type=int, default=0, help="steps of the long run, 0 for none")
    parser.add_argument("--folder", type=Path, help="where the long run is kept for other calls")
    options = parser.parse_args()
    if options.long:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.folder or Path(temporary)
            folder.mkdir(exist_ok=True)
            if not any(folder.iterdir()):
                write_long(folder, options.long)
            measure_long(folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        size = write(Path(folder), options.points)
        print(f"{options.points} points, {size:.0f} MB, {options.rounds} rounds; milliseconds")
        _print(options.rounds, lambda: measure(Path(folder), options.points))
    with tempfile.TemporaryDirectory() as folder:
        write_many(Path(folder), options.runs)
        print(f"{options.runs} runs of {STEPS} steps, {options.rounds} rounds; milliseconds")
        _print(options.rounds, lambda: measure_many(Path(folder)))


def _print(rounds: int, ask: Callable[[], dict[str, float]]) -> None:
    durations = defaultdict(list)
    for _ in range(rounds):
        for what, seconds in ask().items():
            durations[what].append(1000 * seconds)
    for what, milliseconds in durations.items():
        print(f"  {what:36} {spread(milliseconds)}")


if __name__ == "__main__":
    main()
