"""The table of runs, and the scores that it and "Learning?" prefer."""

from __future__ import annotations

import time

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from tests.watch.browser.pages import downloaded
from tests.watch.browser.runs import append
from tests.watch.writing import loop, scalars, snapshot, started, write

COLUMNS = (
    "return [...document.querySelectorAll('#runs-table th[data-column]')]"
    ".map((title) => title.dataset.column).slice(4, -1)"
)
# the line below the name of a run; what is not on the screen is not drawn
NOTE = "const note = document.querySelector(`#runs [data-run='${arguments[0]}'] .note`);"
ROWS = "[...document.querySelectorAll('#runs-table tbody tr')].map((row) => row.dataset.run)"


def wait_for_rows(page, *runs):
    page.wait_for([run.name for run in runs], f"return {ROWS}")


@pytest.mark.long
def test_chosen_columns_are_kept_in_the_address(run, place, page, names):
    for folder, rate in ((run, 0.1), (place / next(names), 0.2)):
        settings = {"warmup": rate, "study": "columns"}
        values = {"loss": 1.0, "accuracy": 0.5, "speed": 3.0}
        start = {**started(), "settings": settings}
        append(folder, start, scalars(0, **values), snapshot(1, values["accuracy"]))
    page.open(run.name, tab="table", filter="study=columns")
    scores = ["accuracy", "best accuracy", "loss"]
    page.wait_for([*scores, "best loss", "warmup"], COLUMNS)
    page.element(".columns summary").click()
    for name in ("best loss", "speed"):
        page.run(
            "[...document.querySelectorAll('.columns label')]"
            ".find((one) => one.textContent === arguments[0]).click()",
            name,
        )
    chosen = [*scores, "warmup", "speed"]
    page.wait_for(chosen, COLUMNS)
    page.until("return location.hash.includes('columns=warmup&columns=speed')")
    page.driver.refresh()
    page.wait_for(chosen, COLUMNS)


@pytest.mark.long
def test_runs_are_listed_newest_first_and_sorted_by_duration_and_age(run, page):
    runs = [run.with_name(f"{run.name}-{number}") for number in range(3)]
    for folder, length, age in zip(runs, (50, 5, 500), (1000, 3000, 2000), strict=True):
        events = started(), {"event": "finished", "step": 0}
        write(folder, *events, start=time.time() - age - length, seconds=length)
    first, second, third = runs
    page.open(run.name, tab="table", filter=f"{run.name}-")
    wait_for_rows(page, first, third, second)
    for column, highest_first in {
        "duration": (third, first, second),
        "age": (second, third, first),
    }.items():
        for order, rows in {
            "descending": highest_first,
            "ascending": highest_first[::-1],
        }.items():
            page.element(f"#runs-table [data-column={column}] button").click()
            wait_for_rows(page, *rows)
            title = page.element(f"#runs-table [data-column={column}]")
            assert title.get_attribute("aria-sort") == order


@pytest.mark.long
def test_step_and_duration_come_first_and_places_are_no_columns(run, page):
    runs = [run.with_name(f"{run.name}-{number}") for number in range(2)]
    for number, folder in enumerate(runs):
        config = {"dir": f"/runs/{number}", "sinks": [f"s{number}"], "lanes": 8 + number}
        write(folder, started(config=config), scalars(0, loss=1.0))
    page.open(run.name, tab="table", filter=f"{run.name}-")
    page.element("#runs-table [data-column=lanes]")
    columns = page.run(
        "return [...document.querySelectorAll('#runs-table [data-column]')]"
        ".map((title) => title.dataset.column)"
    )
    assert {"step", "duration", "lanes"} <= set(columns)
    assert {"dir", "sinks"}.isdisjoint(columns)


@pytest.mark.long
def test_a_phone_has_a_legend_of_the_runs_that_are_overlaid(run, place, page, names):
    runs = [run, place / next(names), place / next(names)]
    for folder in runs:
        append(folder, scalars(0, loss=1.0), scalars(1, loss=0.5))
    page.use_phone_screen()
    page.open(*(folder.name for folder in runs)).points("loss", 6)
    legend = page.element(".curves .legend")
    assert legend.text.split() == [folder.name for folder in runs]
    keys = "return [...document.querySelectorAll('.curves .legend .key')].map((key) =>"
    assert len(set(page.run(f"{keys} getComputedStyle(key).getPropertyValue('--color'))"))) == 3


@pytest.mark.long
def test_a_clock_that_was_set_back_gives_no_negative_duration(run, page):
    other = run.with_name(f"{run.name}-back")
    now = time.time()
    write(other, started(), start=now)
    write(
        other, *(scalars(step, loss=step + 1.0) for step in range(4)), start=now - 2.5, seconds=0.5
    )
    page.wait_for_run(other.name)
    page.open(other.name).points("loss", 4)
    assert page.text("[data-figure=elapsed] dd") == "0 s"
    page.collect_drawn_texts()
    page.element("#axis-time").click()
    page.until("return drawn.some((text) => text.startsWith('time since the start'))")
    assert not [text for text in page.run("return drawn") if text.startswith("-")]
    page.element("[data-scalar=loss] .canvas").send_keys(Keys.HOME)
    page.until(
        "return document.querySelector('.tip:popover-open')?.innerText"
        ".startsWith('after \\u2013 · loss')"
    )
    page.choose_tab("table")
    page.until(f"return {ROWS}.length > 1")
    row = page.text(f"#runs-table [data-run='{other.name}']")
    assert row.split("\t")[3] == "0 s"


@pytest.mark.long
def test_scores_of_snapshots_come_first_whatever_one_run_lacks(run, place, page, names):
    others = [place / next(names) for _ in range(2)]
    for folder in (run, *others):
        append(folder, {**started(), "settings": {"study": "scored"}})
        for step in range(9):
            append(folder, scalars(step, **{"train/accuracy": 0.9, "train/loss": 0.1}))
    for folder, accuracy in ((run, 0.5), (others[0], 0.6)):
        append(folder, scalars(9, **{"val/accuracy": accuracy, "val/loss": 0.6}))
        append(folder, snapshot(10, accuracy))
    answer = "document.querySelector('[data-answer=learning] .answer').innerText"
    words = f"return {answer}.split('\\n').filter(Boolean).map((line) => line.split(/\\s/)[0])"
    columns = ["val/accuracy", "best val/accuracy", "val/loss", "best val/loss"]
    options = {"tab": "table", "filter": "study=scored", "sort": "-val/accuracy"}
    for folder, learns in ((run, ["val/accuracy", "val/loss"]), (others[1], ["train/loss"])):
        page.open(folder.name, **options)
        page.wait_for(columns, f"{COLUMNS}.slice(0, 4)")
        wait_for_rows(page, others[0], run, others[1])
        page.wait_for(learns, words)


@pytest.mark.long
def test_runs_that_are_identical_are_named(run, place, page, names):
    same, noisy, other, *more = (place / next(names) for _ in range(6))
    for folder in (run, same, noisy, other, *more):
        append(folder, started())
        for step in range(5):
            loss = step + 0.5 * (folder == other and step == 3)
            append(folder, scalars(step, lr=0.1, loss=loss, a=0.0, took=float(folder == noisy)))
        page.wait_for_run(folder.name)
    text = "return document.querySelector('#identical').textContent"
    page.open(run.name, same.name)
    page.wait_for(f"{run.name} and {same.name} have identical values in all 4 scalars.", text)
    page.open(run.name, noisy.name)
    page.wait_for(f"{run.name} and {noisy.name} have identical values in 3 of 4 scalars.", text)
    page.open(*[folder.name for folder in (run, same, *more)])
    named = ", ".join(folder.name for folder in (run, same, *more[:2]))
    page.wait_for(f"{named} and 1 other run have identical values in all 4 scalars.", text)
    page.open(run.name, other.name)
    page.wait_for("", text)


CELLS = (
    "return [...document.querySelectorAll(`#runs-table [data-run='${arguments[0]}'] td`)]"
    ".map((cell) => cell.textContent).slice(3, -1)"
)


@pytest.mark.long
def test_a_setting_and_a_score_of_the_same_name_are_two_columns(run, place, page, names):
    other = place / next(names)  # other tests have settings of other names
    for folder, rate in ((run, 0.1), (other, 0.4)):
        settings = {"rate": rate, "step": rate, "study": "collision"}
        append(
            folder, {**started(), "settings": settings}, scalars(0, rate=0.05), scalars(1, rate=0.2)
        )
    append(other, scalars(2, rate=0.01))
    page.open(run.name, tab="table", filter="study=collision", sort="setting rate")
    page.wait_for(["rate", "best rate", "setting rate", "setting step"], COLUMNS)
    wait_for_rows(page, run, other)
    assert page.run(CELLS, run.name) == ["0.2", "0.2", "0.1", "0.1"]
    assert page.run(CELLS, other.name) == ["0.01", "0.2", "0.4", "0.4"]
    offered = "return [...document.querySelectorAll('#scatter-setting option')].map((o) => o.value)"
    assert {"setting rate", "setting step"} < set(page.run(offered))


@pytest.mark.long
def test_a_filter_by_a_setting_compares_its_whole_value_and_a_click_opens_a_row(
    run, place, page, names
):
    other = place / next(names)
    for folder, rate in ((run, 0.1), (other, 0.15)):
        append(folder, {**started(), "settings": {"lr": rate, "study": "whole"}}, scalars(0, a=1))
    page.open(run.name, tab="table", filter="study=whole lr=0.1")
    wait_for_rows(page, run)
    page.open(run.name, tab="table", filter="study=whole LR=0.")
    page.until(f"return {ROWS}.length === 2")
    # the other run is not loaded yet
    page.element(f"#runs-table [data-run='{other.name}'] button").click()
    page.wait_for(other.name, "return document.getElementById('run-name')?.textContent")
    page.until("return document.querySelectorAll('#runs-table tr[data-chosen]').length === 1")
    assert page.text("#runs-table tr[data-chosen] th") == other.name


def test_runs_chosen_by_settings_are_drawn_as_groups(run, place, page, tmp_path):
    runs = {
        f"{run.name}-{rate}-{seed}": (rate, seed) for rate in (0.125, 0.25, 0.5) for seed in (0, 1)
    }
    for name, (rate, seed) in runs.items():
        settings = {"lr": rate, "seed": seed, "study": "groups"}
        values = (scalars(step, loss=8 * rate + seed + step) for step in range(4))
        append(place / name, {**started(), "settings": settings}, loop(0, batch_size=8), *values)
    page.open(run.name, tab="table", filter="study=groups LR<=0.25")
    page.until(f"return {ROWS}.length === 4")
    page.wait_for(
        "Show curves of 4 runs", "return document.getElementById('show-matching').innerText"
    )
    page.element("#show-matching").click()
    box = "document.querySelector(`#runs-table [data-run='${arguments[0]}'] input`)"
    chosen = [name for name, (rate, _) in runs.items() if rate <= 0.25]
    page.until("return new URLSearchParams(location.hash).getAll('shown').length === 4")
    Select(page.element("#group")).select_by_visible_text("lr")
    legend = "return document.querySelector('.curves .legend').innerText.split('\\n')"
    page.wait_for(["lr=0.125", "2 runs", "lr=0.25", "2 runs"], legend)
    page.element("#axis-samples").click()
    page.until("return location.hash.includes('axis=samples&group=lr')")
    page.driver.refresh()  # the address restores it
    page.points("loss", 8)
    page.wait_for(["lr=0.125", "2 runs", "lr=0.25", "2 runs"], legend)
    page.save_downloads_in(tmp_path)
    page.run("document.querySelector('[data-scalar=loss] .save button').click()")
    assert downloaded(tmp_path, "*.csv").read_text().splitlines()[:3] == [
        "group,samples,value,low,high,smoothed,runs",
        "lr=0.125,8,1.5,1,2,,2",
        "lr=0.125,16,2.5,2,3,,2",
    ]
    page.element("#tab-table").click()
    page.until(f"return {box}?.checked", chosen[0])
    page.run(f"{box}.click()", chosen[0])
    page.until("return new URLSearchParams(location.hash).getAll('shown').length === 3")


@pytest.mark.long
def test_an_idle_table_is_loaded_once_and_keeps_the_focus(run, place, page, names):
    ended = {"event": "finished", "step": 1}
    for folder in (run, place / next(names)):  # the second is newer, and listed first
        append(folder, {**started(), "settings": {"study": "idle"}}, scalars(0, a=1), ended)
    page.open(run.name, tab="table", filter="study=idle")
    page.until(f"return {ROWS}.length === 2")
    page.run("document.querySelector('#runs-table tbody button').focus()")

    def is_loaded(number):
        page.run("window.row = document.activeElement")
        page.requests()
        time.sleep(11)  # a table is loaded at most every 3 s; ages change
        # updates all parts
        page.run(f"location.hash = `${{location.hash.split('&smooth')[0]}}&smooth=0.{number}`")
        page.until(f"return location.hash.includes('smooth=0.{number}')")
        time.sleep(0.5)
        return any("/api/table" in url for url in page.requests())

    # runs of earlier tests may become silent meanwhile
    assert not all(is_loaded(number) for number in (3, 4, 5, 6))
    assert page.run("return document.activeElement === window.row && row.isConnected")


def test_the_list_of_runs_has_scores_and_progress_and_sorts_by_score(run, page):
    runs = [run.with_name(f"{run.name}-{number}") for number in range(4)]
    now = time.time()
    for number, (folder, score) in enumerate(zip(runs, (0.7, 0.9, None, 0.8), strict=True)):
        values = {"loss": 1.0 + number} if score is None else {"loss": 1.0, "val/acc": score}
        train = loop(0, steps=40, epochs=4, steps_per_epoch=10)
        stopped = {"event": "stopped", "step": 10}
        events = started(), train, scalars(9, **values), snapshot(10, score), stopped
        write(folder, *events, start=now - 90 + 10 * number)
    write(runs[0], {"event": "finished", "step": 40}, start=now)
    page.open(run.name)
    listed = (
        "return [...document.querySelectorAll('#runs li')].map((item) => item.dataset.run)"
        ".filter((name) => name.startsWith(`${arguments[0]}-`))"
    )
    newest = [folder.name for folder in reversed(runs)]
    page.wait_for(newest, listed, run.name)
    note = f"{NOTE} note?.scrollIntoView(); return note?.innerText"
    page.wait_for("finished 0.7", note, runs[0].name)
    page.wait_for("stopped 0.9 25%", note, runs[1].name)
    page.wait_for("stopped 3 25%", note, runs[2].name)
    Select(page.element("#run-order")).select_by_value("score")
    by_score = [runs[number].name for number in (1, 3, 0, 2)]
    page.wait_for(by_score, listed, run.name)
    page.until("return location.hash.includes('order=score')")
    page.driver.refresh()
    page.wait_for(by_score, listed, run.name)
    append(runs[3], scalars(10, **{"val/acc": 0.95}))
    page.wait_for([by_score[1], by_score[0], *by_score[2:]], listed, run.name)


@pytest.mark.long
def test_a_table_has_what_changes_without_an_event(run, page):
    """A row gets its best scores once the record is read, and a run becomes silent in time."""
    ended = {"event": "finished", "step": 2}
    append(run, started(settings={"study": "still"}), scalars(0, loss=1), scalars(1, loss=2), ended)
    page.open(run.name, filter="study=still").points("loss", 2)
    page.run(  # what the server sends before the record is read, and when the run is silent
        "const [real, id] = [window.fetch, arguments[0]];"
        "const changes = { peeked: (row) => { row.elapsed = null;"
        " if (row.scores) row.scores.loss = { last: 2 } }, read: () => {},"
        " silent: (row) => { row.state = 'silent' } };"
        "window.now = 'peeked';"
        "window.fetch = async (...given) => { const response = await real(...given);"
        " if (!/runs|table/.test(given[0])) return response;"
        " const found = await response.json();"
        " found.runs.filter((row) => row.id === id).forEach(changes[window.now]);"
        " return Response.json(found) }",
        run.name,
    )
    page.element("#tab-table").click()
    cells = (
        "return [...document.querySelectorAll(`#runs-table [data-run='${arguments[0]}'] td`)]"
        ".map((cell) => cell.textContent.trim())"
        ".filter((cell, index, all) => index < 3 || index === all.length - 2)"
    )
    page.wait_for(["finished", "2", "\N{EN DASH}", "\N{EN DASH}"], cells, run.name)
    page.run("window.now = 'read'")
    page.until(f"return (() => {{ {cells} }})()[2] === '1'", run.name)
    assert page.run(cells, run.name)[-1] != "\N{EN DASH}"
    page.run("window.now = 'silent'")
    page.until(f"return (() => {{ {cells} }})()[0] === 'silent'", run.name)


@pytest.mark.long
def test_the_state_score_and_place_of_a_run_are_one_line(run, page):
    values = {"finished": 0.9078, "running": 0.9078, "failed": 0.9078}
    runs = {name: run.with_name(f"{run.name}-{name}") for name in values}
    for name, folder in runs.items():
        ended = [] if name == "running" else [{"event": name, "step": 12_345}]
        scored = scalars(12_344, **{"val/acc": values[name]}), snapshot(12_345, values[name])
        append(folder, started(), *scored, *ended)
        page.wait_for_run(folder.name)
    page.open(run.name)
    expected = {name: f"{name} 0.9078 @12,345" for name in values} | {"finished": "finished 0.9078"}
    for name, folder in runs.items():
        note = f"{NOTE} note?.scrollIntoView(); return note?.innerText"
        page.wait_for(expected[name], note, folder.name)
        assert page.run(f"{NOTE} return note.clientHeight", folder.name) < 24  # pixels
        line = f"{NOTE} const line = note.firstElementChild;"
        widths = page.run(f"{line} return [line.scrollWidth, line.clientWidth]", folder.name)
        assert widths[0] <= widths[1]


@pytest.mark.long
def test_a_table_with_live_runs_keeps_the_focus(run, place, page, names):
    other = place / next(names)
    for folder in (run, other):
        append(folder, started(settings={"study": "live"}), scalars(0, a=1))
    page.open(run.name, tab="table", filter="study=live", sort="-a")
    page.until(f"return {ROWS}.length === 2")
    controls = f"tr[data-run='{run.name}'] th button", "th[data-column=a] button"
    for step, control in enumerate(controls, 1):
        selector = f"#runs-table {control}"
        page.run("document.querySelector(arguments[0]).focus()", selector)
        append(run, scalars(step, a=1 + step))  # which also changes the order of the rows
        append(other, scalars(step, a=2.5 - step))
        cells = f"document.querySelector(`#runs-table tr[data-run='{run.name}']`).textContent"
        page.until(f"return {cells}.includes(arguments[0])", f"{1 + step}")
        page.until("return document.activeElement.matches(arguments[0])", selector)


@pytest.mark.long
def test_the_list_of_runs_keeps_the_focus_when_its_order_changes(run, page):
    runs = [run.with_name(f"{run.name}-{number}") for number in range(2)]
    for folder, score in zip(runs, (0.5, 0.7), strict=True):
        append(folder, started(), scalars(0, **{"val/acc": score}), snapshot(1, score))
    page.wait_for_run(runs[1].name)
    page.open(run.name, order="score")
    name = page.element(f"#runs [data-run='{runs[0].name}'] .name")
    page.run("arguments[0].focus()", name)
    append(runs[0], scalars(1, **{"val/acc": 0.9}))
    listed = (
        "return [...document.querySelectorAll('#runs li')].map((item) => item.dataset.run)"
        ".filter((name) => name.startsWith(`${arguments[0]}-`))"
    )
    page.wait_for([folder.name for folder in runs], listed, run.name)
    assert page.run("return document.activeElement === arguments[0]", name)


@pytest.mark.long
def test_a_run_that_only_the_table_has_yet_can_be_chosen(run, page):
    old, new = run, run.with_name(f"{run.name}-newer")
    append(old, {**started(), "settings": {"study": "newer"}}, scalars(0, a=1))
    page.wait_for_run(old.name)
    page.open(old.name, tab="table", filter="study=newer")
    wait_for_rows(page, old)
    page.run(  # leaves a run out of the lists that the page gets
        "const [real, hidden] = [window.fetch, arguments[0]];"
        "window.fetch = async (...request) => { const response = await real(...request);"
        " if (window.isFree || !request[0].includes('api/runs')) return response;"
        " const { runs, ...others } = await response.json();"
        " const answer = { ...others, runs: runs.filter(({ id }) => id !== hidden) };"
        " return new Response(JSON.stringify(answer)) }",
        new.name,
    )
    append(new, {**started(), "settings": {"study": "newer"}}, scalars(0, a=2))
    page.wait_for_run(new.name)
    append(old, scalars(1, a=1))  # the table asks again
    page.until(f"return {ROWS}.length === 2")
    page.run("window.isFree = true; document.getElementById('show-matching').click()")
    page.until(f"return document.querySelector('#runs [data-run=\"{new.name}\"]')")
    shown = "return new URLSearchParams(location.hash).getAll('shown').toSorted()"
    page.wait_for(sorted([old.name, new.name]), shown)
    assert "there is no run" not in page.text("body")


@pytest.mark.parametrize(
    ("answer", "selector", "chosen"),
    [
        pytest.param(
            "api/table", "#runs-table [data-column=a] button", "sort=-a", marks=pytest.mark.long
        ),
        ("api/runs", "#runs [data-run='{}'] .name", "run={}&"),
    ],
)
@pytest.mark.long
def test_news_while_a_button_is_pressed_lose_no_click(answer, selector, chosen, run, page):
    risen, other = (run.with_name(f"{run.name}-{number}") for number in range(2))
    append(risen, started(), scalars(0, a=0, accuracy=0.1))
    append(other, started(), scalars(0, a=0, accuracy=0.2))
    page.wait_for_run(other.name)
    page.open(other.name, tab="table", filter=f"{run.name}-", order="score")
    wait_for_rows(page, other, risen)
    page.run(  # keeps the next answer until the button is pressed
        "const [real, answer] = [window.fetch, arguments[0]];"
        "const isPressed = new Promise((resolve) => addEventListener('pointerdown', resolve));"
        "window.fetch = async (...request) => { const response = await real(...request);"
        " if (!request[0].includes(answer)) return response;"
        " window.isHeld = true; await isPressed; setTimeout(() => (window.hasArrived = true), 200);"
        " return response }",
        answer,
    )
    append(risen, scalars(1, a=1, accuracy=0.9))  # which changes the order of table and list
    page.until("return window.isHeld")
    middle = page.run(
        "arguments[0].scrollIntoView({ block: 'center' });"
        "const { x, y, width, height } = arguments[0].getBoundingClientRect();"
        "return { x: x + width / 2, y: y + height / 2 }",
        page.element(selector.format(risen.name)),
    )
    for kind in ("mousePressed", "mouseReleased"):
        event = {**middle, "type": kind, "button": "left", "clickCount": 1}
        page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)
        page.until("return window.hasArrived")
    page.until("return location.hash.includes(arguments[0])", chosen.format(risen.name))
    wait_for_rows(page, risen, other)  # what has arrived is shown
