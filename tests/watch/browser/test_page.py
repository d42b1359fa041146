from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from samestep.record import read_events
from tests.python import start_python
from tests.watch.browser.pages import TIMEOUT_SECONDS, Page, downloaded, serving
from tests.watch.browser.runs import append, losses, paint, shown_color
from tests.watch.writing import histogram, loop, scalars, snapshot, started, timing
from tests.workers import free_port

ROOT = Path(__file__).parents[3]


def test_histograms_are_drawn_by_name_and_step(run, page):
    readout = "return document.getElementById('histogram-readout').textContent === arguments[0]"
    append(run, started(), histogram(0, "a", [-1.0, 1], [0.0, 2], [0.5, 5], nan=3))
    page.open(run.name)
    page.until(readout, "step 0 · 8 values · bins from -1 to 0.5, median near 0.5 · 3 NaN")
    append(run, histogram(10, "a", [2.0, 4], inf=1), histogram(10, "<b>", [0.0, 1]))
    newest = "step 10 · 4 values · bins from 2 to 2, median near 2 · 1 infinite"
    page.until(readout, newest)
    shades = (
        "const map = document.querySelector('#histograms canvas');"
        "const { data } = map.getContext('2d').getImageData(0, 0, map.width, map.height);"
        "const columns = Array.from({ length: map.width }, () => []);"
        "data.forEach((value, index) => { if (index % 4 === 3 && value > arguments[0])"
        " columns[(index >> 2) % map.width].push(Math.floor((index >> 2) / map.width)); });"
        "return columns;"
    )
    # rows: 2 is the first of 129, one power of two takes four, and 0 is in the middle
    assert page.run(shades, 100) == [[8, 64, 124], [0]]
    page.element("#histogram-step").send_keys(Keys.HOME)
    page.until(readout, "step 0 · 8 values · bins from -1 to 0.5, median near 0.5 · 3 NaN")
    page.run(
        "const s = document.querySelector('#histograms select'); s.selectedIndex = 1;"
        "s.dispatchEvent(new Event('change'))"
    )
    page.until(readout, "step 10 · 1 value · bins from 0 to 0, median near 0")
    assert page.text("#histograms select option:last-child") == "<b>"
    assert "histogram=" in page.run("return location.hash")


@pytest.mark.long
@pytest.mark.long
def test_points_that_come_and_go_are_drawn_without_a_reload(run, page):
    append(run, *losses(*range(10)))
    page.open(run.name).points("loss", 10)
    seconds = []
    for step in range(10, 13):
        begin = time.monotonic()
        append(run, *losses(step))
        page.points("loss", step + 1)
        seconds.append(time.monotonic() - begin)
    delays = ", ".join(f"{delay:.2f}" for delay in seconds)
    sys.stdout.write(f"seconds until an appended point was drawn: {delays}\n")
    assert page.newest("loss") == "0.1538"
    append(run, started(5, kind="resumed", workers=1))  # which makes later points void
    page.points("loss", 5)
    append(run, *losses(5, 6))
    page.points("loss", 7)
    page.choose_tab("events")
    row = page.until("return document.querySelector('#events [data-kind=resumed]')?.textContent")
    assert "resumed at step 5 with 1 worker: resized from 2 to 1 worker" in row
    assert page.was_loaded_once()


def test_dragging_zooms_to_exact_data(run, page):
    append(
        run, *(scalars(step, loss=math.sin(step / 500) + (step % 7) / 10) for step in range(20_000))
    )
    page.open(run.name).until(
        "return document.getElementById('overview').textContent.includes('19,999')"
    )
    page.until("return document.querySelector('[data-scalar=loss]')?.dataset.exact === 'false'")
    assert 0 < page.points("loss") < 5000
    page.drag("loss", 0.50, 0.53)
    page.until(
        "return location.hash.includes('from=') && "
        "document.querySelector('[data-scalar=loss]').dataset.exact === 'true'"
    )
    first, last = page.run(
        "const chosen = new URLSearchParams(location.hash.slice(1));"
        "return [+chosen.get('from'), +chosen.get('to')]"
    )
    assert 9000 < first < last < 11000
    assert page.points("loss") == math.floor(last) - math.ceil(first) + 1
    page.element("#zoom-reset").click()
    page.until("return document.querySelector('[data-scalar=loss]').dataset.exact === 'false'")


@pytest.mark.long
def test_the_page_reconnects_to_a_restarted_server(run, page):
    port = free_port()
    append(run, *losses(*range(3)))
    with serving(run.parent, port=port) as server:
        own_page = Page(page.driver, server).open(run.name)
        own_page.points("loss", 3)
        own_page.until("return document.getElementById('connection').dataset.state === 'live'")
    own_page.until("return document.getElementById('connection').dataset.state === 'lost'")
    append(run, *losses(3))
    with serving(run.parent, port=port):
        own_page.until("return document.getElementById('connection').dataset.state === 'live'")
        own_page.points("loss", 4)
        assert own_page.was_loaded_once()
        page.driver.get("about:blank")
    # no connection for a while
    assert all("ERR_" in error for error in page.errors())
    page.open(run.name)


@pytest.mark.long
def test_an_unreadable_location_is_reported_until_it_is_readable(run, page, place):
    append(run, scalars(0, loss=1.0))
    page.open(run.name).points("loss", 1)
    page.until("return document.querySelector('#banner').hidden")
    away = place.rename(place.with_name("away"))
    place.write_bytes(b"no folder")
    try:
        page.until(
            "return document.getElementById('banner').textContent.includes(', will try again: ')"
        )
        assert page.points("loss", 1) == 1
    finally:
        place.unlink()
        away.rename(place)
    page.until("return document.querySelector('#banner').hidden")
    append(run, scalars(1, loss=0.5))
    assert page.points("loss", 2) == 2


@pytest.mark.long
@pytest.mark.long
def test_keyboard_control(run, page, names, place):
    other = place / next(names)
    append(run, *losses(*range(100)), paint(run, 0, "red"), paint(run, 1, "blue"))
    append(other, *losses(*range(50)))
    page.open(run.name)
    page.points("loss", 100)
    page.reach(f"[data-run='{other.name}'] button")
    page.press(Keys.ENTER)
    page.until(
        "return document.getElementById('run-name')?.textContent === arguments[0]", other.name
    )
    page.points("loss", 150)
    page.open(run.name)
    page.points("loss", 100)
    page.reach("[data-scalar=loss] [role=group]")
    page.press(Keys.ARROW_RIGHT)
    assert "step" in page.until("return document.querySelector('.tip:popover-open')?.textContent")
    page.press("+")
    page.until("return Number(document.querySelector('[data-scalar=loss]').dataset.points) < 60")
    page.press(Keys.ESCAPE)
    page.points("loss", 100)
    page.open(run.name)
    page.reach("[role=tab][aria-selected=true]")
    page.press(Keys.ARROW_RIGHT)
    page.until("return !document.getElementById('panel-images').hidden")
    page.reach("#image-step")
    page.press(Keys.HOME)
    assert shown_color(page, 0) == [255, 0, 0]


def test_two_runs_are_overlaid_and_their_configurations_compared(run, page, names, place):
    other = place / next(names)
    append(run, *losses(*range(10)))
    append(other, *losses(*range(20)))
    page.open(run.name, other.name)
    page.points("loss", 30)
    page.choose_tab("settings")
    Select(page.element("#versus")).select_by_visible_text(other.name)
    page.element("#only-differences").click()
    seeds = [str(int(folder.name.removeprefix("run-"))) for folder in (run, other)]
    page.until("return document.querySelectorAll('#config tbody tr').length === 1")
    assert page.text("#config tbody tr").split() == ["seed", "differs", *seeds]


@pytest.mark.long
def test_versions_and_hosts_of_two_runs_are_compared(place, page, names):
    runs = [place / next(names) for _ in range(2)]
    for run, torch, host in zip(runs, ("2.6.0", "2.13.0"), ("one", "two"), strict=True):
        versions = {"torch": torch, "numpy": "2.4.6", "cuda": "None"}
        append(run, {**started(environment=versions), "workers": [{"host": host}] * 2})
    page.open(runs[0].name, tab="settings", versus=runs[1].name)
    page.until("return document.querySelectorAll('#config [data-differs]').length === 2")
    rows = page.run(
        "return [...document.querySelectorAll('#config tbody tr')].map((row) =>"
        " [row.dataset.key, ...[...row.cells].slice(1).map((cell) => cell.textContent)])"
    )
    values = {key: cells for key, *cells in rows}
    assert values["hosts"] == ["one", "two"]
    assert values["environment.torch"] == ["2.6.0", "2.13.0"]
    assert values["environment.numpy"] == ["2.4.6", "2.4.6"]
    assert "environment.cuda" not in values


@pytest.fixture(scope="module")
def family(place, names):
    """The names of a trunk, a fork of it at step 2, and a fork of that at step 3."""
    runs = {"trunk": place / next(names), "fork": place / "decay-from-2"}
    runs["twig"] = place / "decay-from-2-slower"

    def forked(step, of):
        return {"event": "forked", "step": step, "run": of, "trunk": f"/runs/{of}"}

    def resumed(step, run):
        return started(step, kind="resumed", run=run)

    append(runs["trunk"], started(run="trunk"), *losses(0, 1, 2))
    append(runs["fork"], *losses(0, 1), forked(2, "trunk"), resumed(2, "fork"), *losses(2, 3))
    append(runs["twig"], *losses(0, 1, 2), forked(3, "fork"), resumed(3, "twig"), *losses(3))
    return {name: run.name for name, run in runs.items()}


@pytest.mark.long
def test_forks_are_listed_below_the_run_that_they_share_steps_with(family, page):
    page.wait_for_run(family["twig"])
    page.open(family["trunk"])
    depths = page.until(
        "const items = [...document.querySelectorAll('#runs li')];"
        "const found = items.filter(({ dataset }) => arguments[0].includes(dataset.run));"
        "if (!found.some(({ style }) => style.getPropertyValue('--depth') === '2')) return null;"
        "return found.map(({ dataset, style }) =>"
        " [dataset.run, style.getPropertyValue('--depth')])",
        [*family.values()],
    )
    assert depths == [[name, str(depth)] for depth, name in enumerate(family.values())]
    text = "return document.querySelector(`#runs li[data-run='${arguments[0]}']`).textContent"
    texts = {name: page.run(text, run) for name, run in family.items()}
    assert texts["fork"].startswith("decay-from-2 ")
    assert texts["twig"].startswith("…slower ")
    assert texts["twig"].endswith("forked at 3")
    assert "Forked at3from fork" in page.open(family["twig"]).run(
        "return document.getElementById('overview').textContent"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("shown", "points"),
    [
        ("trunk", 3),
        ("twig", 4),
        ("trunk fork", 3 + 3),  # the fork's own two, and the trunk's last one before them
        ("trunk fork twig", 3 + 3 + 2),
        ("twig trunk", 3 + 3),  # the twig left the trunk where the fork did
        ("fork twig", 4 + 2),
    ],
)
def test_curves_of_a_family_are_joined_where_a_fork_begins(family, page, shown, points):
    page.wait_for_run(family["twig"])
    page.open(*(family[name] for name in shown.split()))
    page.points("loss", points)


def test_the_table_of_runs_is_sorted_and_filtered(place, page, names):
    runs = [place / next(names) for _ in range(3)]
    for run, rate, score in zip(runs, (0.1, 0.3, 0.2), (0.7, 0.9, 0.8), strict=True):
        settings = {"lr": rate, "model": {"depth": 2}, "study": "table"}
        append(run, {**started(), "settings": settings}, scalars(0, accuracy=0.5))
        append(run, scalars(1, accuracy=score), {"event": "finished", "step": 2})
    page.open(runs[0].name, tab="table", filter="study=table", sort="-best accuracy")
    rows = "[...document.querySelectorAll('#runs-table tbody tr')].map((row) => row.dataset.run)"
    by_score = [runs[number].name for number in (1, 2, 0)]
    page.until(
        f"return JSON.stringify({rows}) === arguments[0]",
        json.dumps(by_score, separators=(",", ":")),
    )
    page.element("#runs-table [data-column=lr] button").click()
    page.until("return location.hash.includes('sort=-lr')")
    page.element("#runs-table [data-column=lr] button").click()
    by_rate = [runs[number].name for number in (0, 2, 1)]
    page.until(
        f"return JSON.stringify({rows}) === arguments[0]",
        json.dumps(by_rate, separators=(",", ":")),
    )
    page.element("#run-filter").send_keys(" lr=0.2")
    page.until(f"return JSON.stringify({rows}) === arguments[0]", json.dumps([runs[2].name]))
    page.choose_tab("settings")
    page.until(
        "return document.querySelector('[data-key=\"model.depth\"]')?.textContent"
        " === 'model.depth2'"
    )


@pytest.mark.long
def test_tags_and_a_note_are_edited_and_filtered_by(place, page, names):
    first, other = (place / next(names) for _ in range(2))
    append(first, *losses(0, 1))
    append(other, *losses(0, 1))
    page.open(first.name).points("loss", 2)
    page.element("#edit-notes").click()
    page.element("#tags-text").send_keys("base, <b>x</b> base")
    page.element("#note-text").send_keys("<i>diverged</i>")
    append(first, *losses(2))  # news do not close the form
    page.points("loss", 3)
    page.element("#save-notes").click()
    page.until("return document.getElementById('said')?.innerText === '<i>diverged</i>'")
    tags = "return [...document.querySelectorAll('#tags .tag')].map((tag) => tag.textContent)"
    assert page.run(tags) == ["base", "<b>x</b>"]
    written = json.loads((first / "notes.json").read_text())
    assert written == {"format": 1, "tags": ["base", "<b>x</b>"], "note": "<i>diverged</i>"}
    (other / "notes.json").write_text('{"format": 1, "tags": ["baseline"], "note": ""}')
    page.element("#tags .tag").click()
    rows = "return [...document.querySelectorAll('#runs-table tbody tr')].map((r) => r.dataset.run)"
    page.until(
        f"return JSON.stringify((() => {{ {rows} }})()) === arguments[0]", f'["{first.name}"]'
    )
    assert "filter=tag%3Dbase" in page.run("return location.hash")
    page.open(first.name, tab="table", filter="diverged")
    page.until(
        f"return JSON.stringify((() => {{ {rows} }})()) === arguments[0]", f'["{first.name}"]'
    )

    page.open(first.name).points("loss", 3)
    page.element("#edit-notes").click()
    (first / "notes.json").write_text('{"format": 1, "tags": ["theirs"], "note": ""}')
    page.element("#note-text").send_keys(" at step 2")
    page.element("#save-notes").click()
    alert = "return document.querySelector('#note [role=alert]').textContent"
    assert "changed in the meantime" in page.until(alert)
    typed = "return document.getElementById('note-text').value"
    assert page.run(typed) == "<i>diverged</i> at step 2"  # nothing is lost
    assert "theirs" in (first / "notes.json").read_text()
    assert all("409" in error for error in page.errors())
    (other / "notes.json").write_text("{")
    page.open(other.name).points("loss", 2)
    locked = page.until("return document.getElementById('notes-locked')?.textContent")
    assert "notes.json is damaged and was left as it is" in locked
    assert page.run("return document.getElementById('edit-notes')") is None


@pytest.mark.long
def test_a_setting_is_drawn_against_a_score(place, page, names):
    runs = [place / next(names) for _ in range(3)]
    for run, rate, name in zip(runs, (0.01, 0.1, 0.02), ("sgd", "adam", "sgd"), strict=True):
        settings = {"rate": rate, "optimizer": name, "study": "scatter"}
        append(run, {**started(), "settings": settings}, scalars(0, accuracy=10 * rate))
    append(runs[0], scalars(1, accuracy=0.5))
    page.open(runs[0].name, tab="table", filter="study=scatter")
    for key, name in {"setting": "rate", "score": "accuracy"}.items():
        page.element(f"#scatter-{key} option[value='{name}']").click()
    dots = (
        "return [...document.querySelectorAll('#scatter button')].sort((a, b) =>"
        " a.offsetLeft - b.offsetLeft).map((dot) => dot.dataset.run)"
    )
    assert page.run(dots) == [runs[number].name for number in (0, 2, 1)]
    scales = "return document.getElementById('scatter').dataset.scales === arguments[0]"
    assert page.run(scales, "linear linear")
    append(runs[1], {**started(), "settings": {**settings, "rate": 1.0}}, scalars(0, accuracy=1.0))
    page.until(scales, "log linear")  # 0.01 to 1
    assert page.run(
        "return [...document.querySelectorAll('#scatter .below')].map((tick) => tick.textContent)"
    ) == ["0.01", "0.1", "1"]
    page.until("return location.hash.includes('setting=rate') && location.hash.includes('score=')")
    options = {"tab": "table", "filter": "study=scatter", "setting": "optimizer"}
    page.open(runs[0].name, **options, score="best accuracy")
    page.until(scales, "categories linear")
    page.element(f"#scatter [data-run='{runs[1].name}']").click()
    page.until(
        "return document.getElementById('run-name')?.textContent === arguments[0]", runs[1].name
    )
    assert "curves" in page.until("return document.querySelector('[aria-selected=true]').id")


@pytest.mark.long
def test_events_that_are_frequent_bury_no_others(run, page):
    saved = ({"event": "snapshot", "step": step} for step in range(1200))
    removed = ({"event": "snapshot_removed", "step": step} for step in range(1200))
    append(run, *saved, {"event": "loss_alert", "step": 7, "reason": "the loss is nan"}, *removed)
    append(run, {"event": "snapshot", "step": 2000})
    page.open(run.name, tab="events")
    text = page.until("return document.querySelector('#dropped-events:not([hidden])')?.innerText")
    left_out = int(text.split()[0].replace(",", ""))
    assert 500 < left_out < 2403
    assert text.endswith("older events of frequent kinds are not listed.")
    kinds = "return [...document.querySelectorAll('#events li')].map((row) => row.dataset.kind)"
    assert page.run(kinds)[:2] == ["snapshot", "loss_alert"]
    page.element("#panel-events button.quiet").click()
    page.until(f"{kinds}.length > 200")
    assert [*dict.fromkeys(page.run(kinds))] == ["snapshot", "loss_alert", "started"]
    toggle = "#panel-events .toggle[data-kind=snapshot_removed]"
    page.run("document.querySelector(arguments[0]).click()", toggle)
    page.until(f"{kinds}.includes('snapshot_removed')")


def test_a_real_run_with_a_killed_and_replaced_worker(place, page):
    run = place / "real"
    command = [
        "-m",
        "samestep",
        "run",
        "-n",
        "2",
        "--lanes",
        "4",
        "--dir",
        str(run),
        "--hot-every",
        "1",
    ]
    training = start_python(*command, "-m", "tests.watch.browser.job", cwd=ROOT)
    try:
        page.wait_for_run("real")
        page.open("real")
        page.until(
            "return Number(document.querySelector('[data-scalar=loss]')?.dataset.points) > 5"
        )
        # of the run, not of its epoch, of which it has 100,000
        page.wait_for("Left", "return document.querySelector('[data-figure=left] dt')?.innerText")
        left = page.text("[data-figure=left] dd")
        assert re.match(r"\d+ (h|d)( |ends)", left), left
        page.choose_tab("workers")
        page.until("return document.querySelectorAll('[data-worker]').length === 2")
        (event,) = (event for event in read_events(run) if event["event"] == "started")
        victim = event["workers"][1]["pid"]
        os.kill(victim, signal.SIGKILL)
        page.until(
            "const row = document.querySelector('[data-worker=\"1\"]');"
            "return row && !row.textContent.includes(arguments[0])",
            f"process {victim} ",
        )
        page.choose_tab("events")
        assert "worker 1" in page.until(
            "return document.querySelector('#events [data-kind=restarting]')?.textContent"
        )
        assert "with 2 workers" in page.until(
            "return document.querySelector('#events [data-kind=resumed]')?.textContent"
        )
        training.send_signal(signal.SIGTERM)
        page.until("return document.getElementById('run-state')?.textContent === 'stopped'")
        assert page.was_loaded_once()
    finally:
        training.terminate()
        training.wait(timeout=TIMEOUT_SECONDS)


def test_the_first_screen_answers_three_questions_and_shows_a_chart(run, page):
    page.use_desktop_screen()
    append(run, loop(0, steps=9000, steps_per_epoch=300, epochs=30, samples=19_200))
    append(
        run,
        *(
            event
            for step in range(20)
            for event in (
                scalars(
                    step, **{"train/loss": 2 - step / 20, "val/acc": 0.9 - abs(step - 15) / 50}
                ),
                timing(step, (0.0, 0.5, 0.25, 0.25, 0.0), (0.0, 1.5, 0.0, 0.25, 0.0)),
            )
        ),
    )
    append(run, snapshot(20, 0.9 - 4 / 50))
    page.open(run.name).points("train/loss", 20)
    answer = "return document.querySelector(`[data-answer=${arguments[0]}] .answer`).innerText"
    page.until(f"{answer}.includes('@15') && {answer[7:]}.includes('@19')", "learning")
    score, loss = filter(None, page.run(answer, "learning").splitlines())
    assert score == "val/acc 0.82↓2%best 0.9@15"
    assert loss == "train/loss 1.05↓15%best 1.05@19"
    assert list(filter(None, page.run(answer, "healthy").splitlines())) == [
        "✓newest values finite",
        "⚠wait for worker 1: 57%",
    ]
    assert page.run(answer, "slow").split("\n") == [
        "compute 73%",
        "optimizer 18%",
        "exchange 9%",
    ]
    top = "return document.querySelector('[data-scalar]').getBoundingClientRect().top"
    is_cut = (
        "return [...document.querySelectorAll('.answer p')].filter((line) =>"
        " line.scrollWidth > line.clientWidth && line.innerText)"
    )
    for use_screen in (page.use_desktop_screen, page.use_laptop_screen):
        use_screen()
        assert 0 < page.run(top) <= 200
        assert [line.text for line in page.run(is_cut)] == []
    page.use_tablet_screen()
    assert [line.text for line in page.run(is_cut)] == []
    page.use_laptop_screen()
    append(run, scalars(20, **{"val/acc": "nan"}))
    page.until(f"{answer}.startsWith('⚠val/acc has not been finite since step 20')", "healthy")
    page.element("[data-answer=slow] button").click()
    page.until("return !document.getElementById('panel-time').hidden")
    page.choose_tab("workers")
    slowest = "return [...document.querySelectorAll('[data-slowest]')].map((e) => e.dataset.worker)"
    page.wait_for(["1"], slowest)


TOP = "return document.querySelector('[data-scalar]').getBoundingClientRect().top"


@pytest.mark.long
def test_a_note_and_tags_leave_the_first_chart_where_it_is(run, page):
    long = run.with_name(f"{run.name}-{'long-name-' * 9}")
    note = "first line of <b>a note</b>, " + "which is long, " * 20 + "\nsecond line"
    tags = ["baseline", "warmup", "three", "a-tag-that-is-longer-than-others"]
    for folder in (run, long):
        append(folder, loop(0, steps=9000, steps_per_epoch=300, epochs=30, samples=19_200))
        append(folder, *losses(*range(9)), timing(0, (0.0, 0.5, 0.25, 0.25, 0.0)))
        written = {"format": 1, "tags": tags, "note": note}
        (folder / "notes.json").write_text(json.dumps(written))
    page.wait_for_run(long.name)
    for folder in (run, long):
        page.open(folder.name).points("loss", 9)
        page.until("return document.getElementById('said').textContent === arguments[0]", note)
        for use_screen in (page.use_desktop_screen, page.use_laptop_screen):
            use_screen()
            assert 0 < page.run(TOP) <= 200
            assert page.run("return document.querySelector('#said').clientHeight") < 24
    page.element("#said").click()
    page.until("return document.querySelector('#said').clientHeight > 60")
    append(folder, *losses(9))  # news do not close it
    page.points("loss", 10)
    assert "second line" in page.text("#said")


@pytest.mark.long
def test_a_chart_is_saved_and_its_spike_is_clipped(run, page, tmp_path):
    page.save_downloads_in(tmp_path)
    spiked = {step: 1e6 if step == 7 else 1 + step % 3 for step in range(20)}
    append(run, *(scalars(step, **{"val/loss": value}) for step, value in spiked.items()))
    page.open(run.name).points("val/loss", 20)
    card = "document.querySelector('[data-scalar]')"
    assert page.text("[data-scalar] .best") == "best 1"
    page.collect_drawn_texts()
    note = f"return {card}.querySelector('.note').textContent"
    page.wait_for("Spike beyond the scale: 1,000,000 at step 7", note)
    page.element("#clip").click()
    page.wait_for("", note)
    page.until("return location.hash.includes('clip=0')")
    page.run("drawn.length = 0")
    page.element("#clip").click()
    page.until("return drawn.includes('step') && drawn.includes('3')")
    assert page.run("return !drawn.some((text) => text.endsWith('k') || text.endsWith('M'))")
    for kind in ("CSV", "PNG"):
        page.run(f"{card}.querySelector('.save summary').click()")
        page.run(
            f"[...{card}.querySelectorAll('.save button')]"
            ".find((one) => one.textContent === arguments[0]).click()",
            kind,
        )
        downloaded(tmp_path, f"val-loss.{kind.lower()}")
    lines = (tmp_path / "val-loss.csv").read_bytes().decode().splitlines()
    assert lines[0] == "run,step,value,low,high,smoothed"
    assert lines[1:] == [f"{run.name},{step},{value:.0f},,," for step, value in spiked.items()]
    with Image.open(tmp_path / "val-loss.png") as picture:
        assert picture.width > 250
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 3
    page.open(run.name, clip=0).points("val/loss", 20)
    assert page.element("#clip").get_attribute("aria-pressed") == "false"
