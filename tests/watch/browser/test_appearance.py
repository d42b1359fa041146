from __future__ import annotations

import json
import random
import subprocess
import sys
import time

import pytest
from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from samestep.watch.report import make_report
from tests.watch.browser.pages import OWN_SCRIPTS
from tests.watch.browser.runs import append, losses, paint, shown_color
from tests.watch.writing import loop, scalars, snapshot, started, system, timing, write

TABS = ("curves", "images", "time", "workers", "logs", "system", "events", "settings", "table")


EVIL = "<script>alert(1)</script>"


EVIL_IMAGE = "<img src=x onerror=alert(2)>"


def test_the_slider_selects_images_by_step(run, page):
    append(
        run,
        *(paint(run, step, color) for step, color in ((0, "red"), (10, "lime"), (20, "blue"))),
    )
    page.open(run.name, tab="images")
    assert shown_color(page, 20) == [0, 0, 255]
    slider = page.element("#image-step")
    slider.send_keys(Keys.ARROW_LEFT)
    assert shown_color(page, 10) == [0, 255, 0]
    slider.send_keys(Keys.HOME)
    assert shown_color(page, 0) == [255, 0, 0]
    append(run, paint(run, 30, "white"))
    page.until("return document.getElementById('image-step').max === '3'")
    assert shown_color(page, 0) == [255, 0, 0]  # the selected image does not change
    slider.send_keys(Keys.END)
    assert shown_color(page, 30) == [255, 255, 255]


def test_text_of_a_record_is_never_markup(run, page, place):
    config = {EVIL_IMAGE: EVIL, "lanes": EVIL}
    worker = {"rank": 0, "host": EVIL_IMAGE, "pid": 1}
    append(
        run, {**started(config=config, torch=EVIL, devices=[EVIL]), "workers": [worker]}, *losses(0)
    )
    append(
        run,
        scalars(0, **{EVIL: 1.0, f"{EVIL_IMAGE}/{EVIL_IMAGE}": 2.0}),
        timing(0, (1, 1, 1, 1, 1)),
        system(EVIL_IMAGE),
        system(EVIL),
    )
    append(
        run,
        {**paint(run, 0, "red"), "name": EVIL},
        {"event": EVIL, "step": 0, "reason": EVIL_IMAGE},
    )
    append(
        run,
        {
            "event": "failed",
            "step": 0,
            "host": EVIL,
            "rank": 0,
            "error": EVIL,
            "traceback": EVIL_IMAGE,
        },
    )
    evil = place / EVIL_IMAGE
    write(evil, started(config=config), *losses(0), start=time.time())
    page.open(run.name)
    page.points(EVIL, 1)
    page.until(
        "const names = [...document.querySelectorAll('#runs .name')];"
        "return names.some((one) => one.textContent === arguments[0])",
        EVIL_IMAGE,
    )
    for tab in TABS:
        page.choose_tab(tab)
        page.until(
            "return document.getElementById(`panel-${arguments[0]}`).textContent.length", tab
        )
        assert page.run("return document.scripts.length") == OWN_SCRIPTS
        assert (
            page.run(
                "const isForeign = (image) => !image.src.includes('/api/image');"
                "return [...document.images].filter(isForeign).length"
            )
            == 0
        )
    page.choose_tab("workers")
    assert EVIL_IMAGE in page.text("#panel-workers")
    page.choose_tab("settings")
    assert EVIL in page.text("#config")
    page.open(EVIL_IMAGE, versus=run.name, tab="settings")
    assert page.text("#run-name") == EVIL_IMAGE


@pytest.mark.long
def test_a_large_image_is_loaded_on_request(run, page):
    width, height = 5000, 3400
    event = paint(run, 0, "red")
    pixels = random.Random(0).randbytes(width * height * 3)
    Image.frombytes("RGB", (width, height), pixels).save(run / event["path"], compress_level=0)
    size = (run / event["path"]).stat().st_size
    assert size > 50e6
    append(run, {**event, "width": width, "height": height}, *losses(0))
    page.open(run.name, tab="images")
    button = page.until("return document.querySelector('figure button.load')")
    assert not any("/api/image" in url for url in page.requests())
    before = page.server.peak_memory()
    button.click()
    page.choose_tab("curves")  # the page responds while it loads
    append(run, *losses(1))
    page.points("loss", 2)
    page.choose_tab("images")
    page.until("return document.querySelector('figure img')?.naturalWidth === arguments[0]", width)
    assert page.server.peak_memory() - before < size / 2


@pytest.mark.long
def test_a_phone_needs_no_horizontal_scrolling(run, page):
    page.use_phone_screen()
    append(
        run,
        {
            **started(workers=4, lanes=64, config={"name": "x" * 300, "words": "word " * 60}),
            "torch": "2" * 80,
        },
    )
    append(
        run,
        *losses(*range(3)),
        scalars(3, **{f"{'deep/' * 20}{'long' * 30}": 1.0}),
        timing(0, *[(1, 2, 3, 4, 5)] * 4),
        system("h" * 300),
    )
    append(
        run,
        paint(run, 0, "red", (2000, 20)),
        {"event": "failed", "error": "e" * 300, "traceback": "t" * 300, "step": 3},
    )
    page.open(run.name)
    page.points("loss", 3)
    for tab in TABS:
        page.choose_tab(tab)
        page.until(
            "return document.getElementById(`panel-${arguments[0]}`).textContent.length", tab
        )
        widest = page.run(
            "return Math.max(document.scrollingElement.scrollWidth, document.body.scrollWidth)"
        )
        assert (tab, widest) == (tab, 360)


def test_a_failure_is_one_line_with_its_traceback_folded(run, page):
    secondary = {"error": "WorldError: worker 1 left", "is_secondary": True, "traceback": "t0"}
    cause = {"error": "KeyError: 'x'\nmore", "is_secondary": False, "traceback": "in the script"}
    failed = {"event": "failed", "step": 3, "host": "h"}
    append(run, *losses(0, 1), {**failed, "rank": 0, **secondary}, {**failed, "rank": 1, **cause})
    page.open(run.name).points("loss", 2)
    (item,) = page.driver.find_elements(By.CSS_SELECTOR, "#losses li")
    assert item.text.splitlines()[0] == "KeyError: 'x' (worker 1 on h)"
    assert "in the script" not in item.text
    item.find_element(By.TAG_NAME, "summary").click()
    assert "in the script" in item.text


@pytest.mark.long
def test_a_stalled_run_says_who_is_awaited(run, page):
    reason = "worker 0 has waited 30 s at step 2 while exchanging losses, for worker 1"
    append(run, *losses(0, 1), {"event": "stalled", "step": 2, "reason": reason})
    page.open(run.name).points("loss", 2)
    (item,) = page.driver.find_elements(By.CSS_SELECTOR, "#losses li")
    assert item.text == reason
    (state,) = page.driver.find_elements(By.CSS_SELECTOR, "main .state")
    assert state.text == state.get_attribute("data-state") == "stalled"


@pytest.mark.long
def test_values_that_are_not_finite_have_a_badge_in_the_list_as_well(run, page):
    append(run, *losses(0, 1), scalars(2, loss="nan"), {"event": "finished", "step": 3})
    append(run.with_name(f"{run.name}-other"), *losses(0, 1))  # a list of one run is hidden
    page.open(run.name).points("loss", 3)
    for place, text in {
        f"[data-run='{run.name}']": "not finite",
        "#overview": "loss has not been finite since step 2",
    }.items():
        badge = page.element(f"{place} [data-state=nonfinite]")
        assert badge.text == text
        assert badge.value_of_css_property("background-color") == "rgba(179, 38, 30, 1)"
    page.choose_tab("table")
    badge = page.element(f"#runs-table [data-run='{run.name}'] [data-state=nonfinite]")
    assert badge.text == "not finite"


@pytest.mark.long
def test_a_torn_line_is_counted_and_time_between_starts_is_not(run, page):
    file = run / "events.jsonl"
    now = time.time()
    first = started(), loop(0, steps=18, steps_per_epoch=2, epochs=9), scalars(1, loss=1.0)
    write(run, *first, start=now - 9000, seconds=10.0)
    with file.open("a") as record:
        record.write('{"event": "scal\n')
    again = started(2, kind="resumed"), {**scalars(17, loss=0.5), "epoch": 9}
    write(run, *again, {"event": "finished", "step": 18}, start=now - 30, seconds=10.0)
    page.open(run.name).points("loss", 2)
    page.wait_for("skipped 1 line of the record: torn or not events", LOSSES)
    page.wait_for(
        "40 s", "return document.querySelector('[data-figure=elapsed] dd').firstChild.data"
    )
    assert page.text("[data-figure=epoch] dd") == "9of 9"


LOSSES = "return document.getElementById('losses')?.textContent"


@pytest.mark.long
def test_a_link_to_an_unknown_run_says_so(run, page, tmp_path):
    append(run, *losses(0, 1))
    page.open(run.name).points("loss", 2)  # the server has seen that this run is the newest
    page.open("no-such-run").points("loss", 2)
    page.until("return document.getElementById('banner').textContent.includes('no-such-run')")
    page.run("location.hash = '#run=another'")  # a link in the open page
    page.until("return document.getElementById('banner').textContent.includes('another here')")
    page.points("loss", 2)
    open_report(page, run, tmp_path)
    page.run("location.hash = '#run=third'")
    page.until("return document.getElementById('banner').textContent.includes('third here')")
    assert page.text("#run-name") == run.name


@pytest.mark.long
def test_only_a_loop_with_a_known_end_has_time_left_and_a_bar(run, page):
    """The loop of endless streams has neither; a loop after it is named."""
    left = "return document.querySelector('[data-figure=left] dt')?.textContent ?? null"
    bar = "return Boolean(document.getElementById('progress'))"
    append(run, {**loop(0), "steps": None, "steps_per_epoch": None, "epochs": None})
    for step in range(4):
        append(run, *losses(step))
        time.sleep(0.05)
    page.open(run.name).points("loss", 4)
    page.until(
        "return document.querySelector('[data-figure=step] small')?.innerText.endsWith('/s')"
    )
    assert page.run(left) is None
    assert not page.run(bar)
    append(run, loop(4, name="fine-tuning", steps=1000))
    for step in range(4, 8):
        append(run, *losses(step))
        time.sleep(0.05)
    page.wait_for("Left in fine-tuning", left)
    assert page.run(bar)


@pytest.mark.long
def test_an_epoch_that_may_not_be_the_last_has_its_own_progress(run, page):
    sizes = {"steps": 14, "steps_per_epoch": 7, "samples": 50, "batch_size": 8, "epochs": None}
    train = {"event": "loop", "name": "train", "step": 0, "epoch": 1, "done": 7, **sizes}
    append(run, {**train, "ends_with_epoch": True})
    for step in range(4):
        append(run, *losses(step))
        time.sleep(0.05)
    page.open(run.name).points("loss", 4)
    assert (
        page.until("return document.querySelector('[data-figure=left] dt')?.textContent")
        == "Left in epoch"
    )
    bar = page.element("#progress")
    assert bar.get_attribute("aria-label") == "Progress in this epoch"


@pytest.mark.long
def test_the_theme_follows_the_system_and_the_button(run, page):
    append(run, *losses(0, 1))
    brightness = (
        "const color = getComputedStyle(document.body).backgroundColor;"
        "const channels = color.match(/[0-9.]+/g).slice(0, 3).map(Number);"
        "return channels.reduce((sum, one) => sum + one) / 3"
    )
    seen = {}
    for scheme in ("light", "dark"):
        page.use_color_scheme(scheme)
        page.open(run.name).points("loss", 2)
        seen[scheme] = page.run(brightness)
    assert seen["light"] > 200
    assert seen["dark"] < 60
    page.element("#theme").click()
    assert page.run(brightness) > 200
    page.element("#theme").click()
    assert page.run(brightness) < 60


def test_a_log_is_followed_and_searched(run, page):
    (run / "logs").mkdir()
    first, second = (run / "logs" / f"worker-{rank}.log" for rank in (0, 1))
    first.write_text("".join(f"line {number}\n" for number in range(2000)))
    second.write_text(f"{EVIL}\n{EVIL_IMAGE}\n")
    append(run, *losses(0))
    page.open(run.name, tab="logs")
    is_shown = "return document.getElementById('log-text').textContent.endsWith(arguments[0])"
    page.until(is_shown, "line 1999")
    at_end = "const log = document.getElementById('log-text');"
    at_end += "return log.scrollTop > 0 && log.scrollTop + log.clientHeight >= log.scrollHeight - 2"
    assert page.run(at_end)
    with first.open("a") as file:
        file.write("Traceback of <b>worker</b> 0\n")
    page.until(is_shown, "Traceback of <b>worker</b> 0")  # without an event in the record
    assert page.run(at_end)
    assert page.text("#log-text").splitlines()[0] == "line 1501"
    page.element("#log-search").send_keys("LINE 1777")
    page.until("return document.getElementById('log-text').textContent === 'line 1777'")
    page.element("#log-search").send_keys(Keys.CONTROL + "a", Keys.DELETE)
    page.element("#log-worker option[value='1']").click()
    page.until(is_shown, EVIL_IMAGE)
    assert page.text("#log-text").splitlines() == [EVIL, EVIL_IMAGE]
    assert page.run("return document.querySelectorAll('#log-text *').length") == 0
    page.until("return location.hash.includes('worker=1')")
    page.open(run.name, tab="logs", worker=1, find="onerror")
    page.until(
        "return document.getElementById('log-text').textContent === arguments[0]", EVIL_IMAGE
    )


def test_the_use_of_hosts_is_drawn_live(run, page):
    append(run, *losses(0), system("a"))
    page.open(run.name, tab="system")
    script = (
        "return [...document.querySelectorAll('[data-measure]')].map((card) =>"
        " `${card.querySelector('h3').textContent} ${card.dataset.lines}"
        " ${card.querySelector('.readout').textContent}`).join(' | ') === arguments[0]"
    )
    titles = ("CPU, all cores, % ", "Memory, % ", "GPU, % ", "GPU memory, % ")
    reads = "Read from disks, MB/s "
    values = ("1 25", "1 50", "1 50", "1 25")
    expected = [*map("".join, zip(titles, values, strict=True)), f"{reads}1 2"]
    page.until(script, " | ".join(expected))
    append(run, system("b", cpu=0.75))
    values = ("2 to 75", "2 to 50", "2 to 50", "2 to 25")
    expected = [*map("".join, zip(titles, values, strict=True)), f"{reads}2 to 2"]
    page.until(script, " | ".join(expected))
    chart = page.element("[data-measure='cpu'] .canvas")
    chart.send_keys(Keys.END)
    tip = page.until("return document.querySelector('[data-measure=cpu] .tip').innerText")
    assert tip.split() == ["after", tip.split()[1], "b", "75", "%", "a", "25", "%"]
    traffic = {"disk_written": 3e6, "network_received": 4e6, "network_sent": 5e6}
    append(run, system("b", cpu=0.75, **traffic))
    titles = ("Written to disks", "Received from the network", "Sent to the network")
    expected += [f"{title}, MB/s 1 {value}" for title, value in zip(titles, (3, 4, 5), strict=True)]
    page.until(script, " | ".join(expected))


def open_report(page, run, folder):
    """Write the report of a run to a folder, and open it."""
    file = folder / "report.html"
    file.write_text(make_report([str(run)], image_bytes=1_000_000).page)
    page.driver.get(file.as_uri())
    page.until("return document.getElementById('run-name')")


def test_a_report_is_self_contained(run, page, tmp_path):
    append(
        run,
        system("a"),
        loop(0, steps=10, steps_per_epoch=5, epochs=2, samples=40),
        *losses(*range(10)),
        timing(0, (0.0, 0.5, 0.25, 0.25, 0.0)),
        paint(run, 4, "lime"),
        {"event": "finished", "step": 10},
    )
    written = {"format": 1, "tags": ["baseline"], "note": "a note of a line or more, " * 20}
    (run / "notes.json").write_text(json.dumps(written))
    file = tmp_path / "report.html"
    command = [sys.executable, "-m", "samestep", "report", str(run), "--out", str(file)]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    page.driver.get(file.as_uri())
    page.points("loss", 10)
    assert page.text("#run-state") == "finished"
    page.choose_tab("images")
    assert shown_color(page, 4) == [0, 255, 0]
    page.choose_tab("system")
    page.until("return document.querySelector('[data-measure=cpu] .readout')?.textContent === '25'")
    about = page.text("#connection")
    assert about.startswith("Report of 1 run, written ")
    assert about.endswith("including its extremes")
    page.choose_tab("curves")
    for use_screen in (page.use_desktop_screen, page.use_laptop_screen):
        use_screen()
        bar = "return document.querySelector('#connection > span').getClientRects()[0].height < 24"
        assert page.run(bar)
        top = "return document.querySelector('[data-scalar]').getBoundingClientRect().top"
        assert 0 < page.run(top) <= 200
        assert page.text("#banner") == ""
    own_addresses = ("data:", "chrome", file.as_uri())  # the browser opens its own pages, too
    assert [url for url in page.requests() if not url.startswith(own_addresses)] == []


ANSWERS = (
    "return [...document.querySelectorAll('.answer')].map((answer) => answer.innerText.trim())"
)
PACES = "return [...document.querySelectorAll('.seconds')].map((pace) => pace.innerText)"


@pytest.mark.long
def test_a_run_without_a_step_says_so_on_the_page_and_in_a_report(run, page, tmp_path):
    page.open(run.name, tab="workers")
    for is_report in (False, True):
        if is_report:
            open_report(page, run, tmp_path)
            page.choose_tab("workers")
        page.wait_for("no score or loss yet", f"{ANSWERS}[0]")
        page.wait_for("no step has been timed yet", f"{ANSWERS}[2]")
        # silent if this test had to wait for long
        assert page.run(f"{ANSWERS}[1]").endswith(("no values yet", "silent at step 0"))
        page.wait_for(["no step yet"] * 2, PACES)
    seconds = [(0.0, 2.0, 0.0, 0.0, 0.0)] * 2
    step = scalars(0, accuracy=0.5), timing(0, *seconds), snapshot(1, 0.5)
    finished = {"event": "finished", "step": 1}
    again = started(1, kind="resumed")  # only evaluates
    append(run, started(), loop(0, steps=1), *step, finished, again, finished)
    open_report(page, run, tmp_path)
    page.until("return document.querySelector('.answer').innerText.startsWith('accuracy 0.5')")
    _, healthy, slow = page.run(ANSWERS)
    assert healthy.splitlines()[-1].endswith("no slow worker")
    assert slow.startswith("compute 100%")
    page.choose_tab("workers")
    page.wait_for(["2 s"] * 2, PACES)
    page.choose_tab("time")
    assert page.text("#panel-time").startswith("A step takes 2 s")


def test_page_and_report_agree_about_a_run_that_was_resumed(run, page, tmp_path):
    values = {0: 1.0, 1: 0.5, 2: 0.123456, 3: 0.8, 4: 0.7}
    before = [scalars(step, loss=value) for step, value in {**values, 3: 0.01, 5: 0.02}.items()]
    after = [scalars(step, loss=value) for step, value in values.items() if step >= 3]
    append(run, *before, started(3, kind="resumed"), *after, {"event": "finished", "step": 5})

    def read_page():
        page.points("loss", len(values))
        page.until("return document.querySelector('.answer').innerText.includes('@2')")
        places = "[data-figure=step] dd", "[data-scalar=loss] .readout", "[data-scalar=loss] .best"
        return (*map(page.text, places), page.run(ANSWERS)[0])

    page.open(run.name)
    on_page = read_page()
    assert on_page == ("5", "0.7", "best 0.1235", "loss 0.7↓13%best 0.1235@2")
    open_report(page, run, tmp_path)
    assert read_page() == on_page


@pytest.mark.long
def test_settings_have_the_origin_of_a_run_and_fold_options_with_default_values(run, page):
    origin = {"command": "python train.py --lr 0.1", "commit": "0a1b2c3d" * 5}
    config = {"lanes": 8, "seed": 7, "timeout": 120.0}
    append(run, {**started(config=config), **origin, "dirty": True})
    page.open(run.name, tab="settings")
    has_commit = (
        "return document.querySelector('[data-key=commit] td')?.textContent === arguments[0]"
    )
    page.until(has_commit, f"{origin['commit']}, with changes")
    names = (
        "return [...document.querySelectorAll(`#${arguments[0]} [data-key]`)]"
        ".map((row) => row.dataset.key)"
    )
    assert page.run(names, "config") == ["lanes", "seed", "command", "commit", "hosts"]
    assert page.text("#config [data-key=command] td") == origin["command"]
    assert page.run(names, "defaults") == ["timeout"]
    is_open = "return document.getElementById('defaults').checkVisibility()"
    assert not page.run(is_open)
    page.element("#panel-settings summary").click()
    page.until(is_open)
    append(run, {**started(config=config, kind="resumed"), **origin, "dirty": False})
    page.until(has_commit, origin["commit"])


@pytest.mark.long
def test_an_option_and_a_setting_of_the_same_name_are_both_shown(run, page):
    settings = {"seed": 3, "timeout": 5, "command": "go"}
    origin = {"command": "python train.py", "settings": settings}
    append(run, {**started(config={"seed": 7, "timeout": 120.0}), **origin})
    other = run.with_name(f"{run.name}-other")
    append(other, started(config={"seed": 3, "timeout": 120.0}))
    page.wait_for_run(other.name)
    page.open(run.name, tab="settings")
    values = (
        "return Object.fromEntries([...document.querySelectorAll(`#${arguments[0]} [data-key]`)]"
        ".map((row) => [row.dataset.key, row.cells[1].textContent]))"
    )
    own_settings = {"seed": "3", "timeout": "5", "command": "go"}
    options = {"samestep.seed": "7", "samestep.command": "python train.py"}
    page.wait_for({**own_settings, **options, "hosts": "here"}, values, "config")
    assert page.run(values, "defaults") == {"samestep.timeout": "120"}
    page.open(run.name, tab="settings", versus=other.name)
    rows = "[...document.querySelectorAll('#config [data-differs]')]"
    differing = f"return {rows}.map((one) => one.dataset.key)"
    page.wait_for([*own_settings, *options], differing)


OUTSIDE = (
    "return [...document.querySelectorAll('[data-figure], .answers [data-part]')].filter((one) => {"
    "const inner = one.getBoundingClientRect();"
    "const isInside = (place) => inner.left >= place.left - 1 && inner.right <= place.right + 1 &&"
    " inner.top >= place.top - 1 && inner.bottom <= place.bottom + 1;"
    "for (let at = one.parentElement; at; at = at.parentElement)"
    " if (at.getClientRects().length && !isInside(at.getBoundingClientRect())) return true;"
    "return false }).map((one) => one.innerText)"
)


@pytest.mark.long
def test_no_figure_is_cut_off_beside_a_long_name_and_many_tags(run, page):
    long = run.with_name(f"{run.name}-{'vit-large-' * 12}end")
    loops = {"steps": 18_000, "steps_per_epoch": 450, "epochs": 40, "samples": 57_600}
    train = loop(12_000, done=12_000, batch_size=128, **loops)
    now = time.time()
    write(long, started(workers=16, lanes=64), train, start=now - 9000)
    write(long, started(12_000, kind="resumed", workers=16, lanes=64), train, start=now - 60)
    parts = (0.1, 0.1, 0.4, 0.3, 0.5)
    steps = [(scalars(step, loss=1.0), timing(step, parts)) for step in range(12_000, 12_040)]
    write(long, *(event for pair in steps for event in pair), start=now - 8, seconds=0.1)
    tags = [f"a-long-tag-{number}" for number in range(9)]
    (long / "notes.json").write_text(json.dumps({"format": 1, "tags": tags, "note": ""}))
    page.wait_for_run(long.name)
    for use_screen in (page.use_laptop_screen, page.use_desktop_screen):
        use_screen()
        page.open(long.name).points("loss", 40)
        page.until("return document.querySelector('[data-figure=samples] small')")
        figures = ["left", "epoch", "step", "workers", "samples", "elapsed"]
        script = (
            "return [...document.querySelectorAll('[data-figure]')].map((o) => o.dataset.figure)"
        )
        assert page.run(script) == figures
        page.wait_for(3, "return document.querySelectorAll('.answers [data-part]').length")
        assert page.run(OUTSIDE) == []
        assert page.element("#edit-notes").is_displayed()
        top = "return document.querySelector('[data-scalar]').getBoundingClientRect().top"
        assert 0 < page.run(top) <= 200
