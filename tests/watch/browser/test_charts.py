from __future__ import annotations

import pytest
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.watch.browser.pages import downloaded
from tests.watch.browser.runs import append, losses, paint, shown_color
from tests.watch.writing import histogram, scalars, started, system, timing

TIP = "document.querySelector('.tip:popover-open')"
KEYS = (
    "return Object.fromEntries([...document.querySelectorAll('#runs [data-run]')].map((item) => {"
    "const look = getComputedStyle(item.querySelector('.key'));"
    "return [item.dataset.run, `${look.borderTopColor} ${look.borderTopStyle}`] }))"
)
GROUPS = (
    "return [...document.querySelectorAll('.groups .group')].map((group) => [group.dataset.group,"
    "...[...group.querySelectorAll('h3')].map((title) => title.textContent)])"
)


@pytest.mark.parametrize("screen", [pytest.param("phone", marks=pytest.mark.long), "desktop"])
@pytest.mark.long
def test_the_box_of_values_is_beside_the_curves_with_full_names(run, page, screen):
    getattr(page, f"use_{screen}_screen")()
    other = run.with_name(f"{run.name}-{'long-name-' * 12}end")
    scalar = f"train/{'a-very-long-scalar-' * 8}end"
    for folder in (run, other):
        append(folder, *(scalars(step, **{scalar: step, "loss": 1.0}) for step in range(100)))
    page.wait_for_run(other.name)
    for large in ("", scalar):
        page.open(run.name, other.name, large=large).points(scalar, 200)
        chart = page.element(f"[data-scalar='{scalar}'] .u-over")
        for share in (-0.45, 0.0, 0.45):
            left = round(share * chart.size["width"])
            ActionChains(page.driver, duration=0).move_to_element_with_offset(
                chart, left, 0
            ).perform()
            text = page.until(f"return {TIP}?.innerText")
            assert scalar in text
            assert {run.name, other.name} < set(text.splitlines())
            assert page.run(
                f"const [tip, chart] = [{TIP}, arguments[0]].map((one) =>"
                " one.getBoundingClientRect());"
                "return tip.right <= chart.left || tip.left >= chart.right ||"
                " tip.bottom <= chart.top || tip.top >= chart.bottom",
                chart,
            )
            assert page.run(
                f"const tip = {TIP}; const place = tip.getBoundingClientRect();"
                "return place.left >= 0 && place.right <= innerWidth && place.top >= 0 &&"
                " [tip, ...tip.querySelectorAll('*')].every((one) =>"
                " one.scrollWidth <= one.clientWidth + 1 || !one.clientWidth)"
            )


@pytest.mark.long
def test_the_box_has_the_range_of_the_steps_and_workers_that_a_point_stands_for(run, page):
    append(run, *losses(0, 1), scalars(0, few=1.0), scalars(1, few=2.0))
    append(run, *(scalars(step, many=step % 10) for step in range(20_000)))
    page.open(run.name)
    page.until("return document.querySelector('[data-scalar=many]')?.dataset.exact === 'false'")
    expected = {"many": "0 to 9", "few": "", "loss": "0.95 to 1.05"}
    for scalar, text in expected.items():
        page.points(scalar)
        page.element(f"[data-scalar={scalar}] .canvas").send_keys(Keys.ARROW_RIGHT)
        page.until(f"return {TIP}?.innerText.includes(arguments[0])", scalar)
        assert page.run(f"return {TIP}.querySelector('.edges').textContent") == text
    page.open(run.name, **{"from": 100, "to": 140}).points("many", 41)
    page.element("[data-scalar=many] .canvas").send_keys(Keys.HOME)
    assert page.run(f"return {TIP}.querySelector('.edges').textContent") == ""


@pytest.mark.long
def test_a_chart_has_its_scalar_as_the_title_of_its_y_axis(run, page):
    name = f"val/{'loss-' * 9}"
    append(run, *(scalars(step, **{"val/loss": 1.0 + step, name: 1.0}) for step in range(3)))
    page.open(run.name).points("val/loss", 3)
    page.collect_drawn_texts()
    page.element("#log").click()
    page.until("return drawn.includes('loss') && drawn.includes('loss-loss-loss-los…')")
    assert page.run("return !drawn.includes('val/loss')")
    page.element("[aria-label='Enlarge val/loss']").click()
    page.until("return drawn.includes('val/loss')")


@pytest.mark.long
def test_charts_are_pinned_to_the_top(run, page):
    append(run, scalars(0, **{"train/loss": 1.0, "val/loss": 2.0, "val/top1": 0.5, "Pinned/x": 1}))
    page.open(run.name).points("val/top1", 1)
    unpinned = [["train", "loss"], ["val", "loss", "top1"], ["Pinned", "x"]]
    assert page.run(GROUPS) == unpinned
    page.choose_tab("curves")
    page.reach("[aria-label='Pin val/top1']")
    page.press(Keys.ENTER)
    pinned = [["Pinned", "val/top1"], ["train", "loss"], ["val", "loss"], ["Pinned", "x"]]
    assert page.run(GROUPS) == pinned
    focused = (
        "return document.activeElement.matches(`[aria-label='Pin val/top1'][aria-pressed=true]`)"
    )
    assert page.run(focused)
    page.element("[aria-label='Pin train/loss']").click()
    both = [["Pinned", "val/top1", "train/loss"], ["val", "loss"], ["Pinned", "x"]]
    assert page.run(GROUPS) == both
    page.until("return location.hash.includes('pins=val%2Ftop1&pins=train%2Floss')")
    append(run, scalars(1, **{"val/top1": 0.6}))
    page.points("val/top1", 2)
    assert page.run(GROUPS) == both
    page.driver.refresh()
    page.points("val/top1", 2)
    assert page.run(GROUPS) == both
    for name in ("val/top1", "train/loss"):
        page.element(f"[aria-label='Pin {name}']").click()
    assert page.run(GROUPS) == unpinned


@pytest.mark.long
def test_few_shown_runs_have_distinct_colors_among_many(run, page):
    runs = [run.with_name(f"{run.name}-{number:02d}") for number in range(22)]
    for number, folder in enumerate(runs):
        append(folder, {**started(), "time": 1.0 + number}, *losses(0, 1))
    page.wait_for_run(runs[-1].name)
    for numbers in ((0, 7, 14, 21), (7, 0), (1, 8, 2, 9, 3, 10, 4)):
        names = [runs[number].name for number in numbers]
        page.open(*names).points("loss", 2 * len(names))
        looks = page.run(KEYS)
        assert len({looks[name].split(")")[0] for name in names}) == len(names)
        assert all(looks[name].endswith(" solid") for name in names)
        chart = page.element("[data-scalar=loss] .canvas")
        chart.send_keys(Keys.HOME)
        drawn = page.until(
            f"const rows = [...({TIP}?.querySelectorAll('.key') ?? [])];"
            "return Object.fromEntries(rows.map((key) => [key.nextSibling.textContent,"
            " `${getComputedStyle(key).borderTopColor} ${getComputedStyle(key).borderTopStyle}`]))"
        )
        assert drawn == {name: looks[name] for name in names}
    listed = page.run("return [...document.querySelectorAll('#runs li')].map((i) => i.dataset.run)")
    newest_first = [folder.name for folder in reversed(runs)]
    assert [name for name in listed if name in set(newest_first)] == newest_first
    append(runs[4], *losses(2))
    append(run.with_name(f"{run.name}-new"), {**started(), "time": 0.5}, *losses(0))
    page.until("return document.querySelector(`[data-run='${arguments[0]}']`)", f"{run.name}-new")
    page.points("loss", 15)
    assert {name: page.run(KEYS)[name] for name in names} == drawn
    page.element(f"[data-run='{runs[20].name}'] input").send_keys(" ")
    page.points("loss", 17)
    looks = page.run(KEYS)
    assert {name: looks[name] for name in names} == drawn
    assert looks[runs[20].name] == drawn[names[0]].replace("solid", "dashed")
    assert page.run("return document.activeElement.type") == "checkbox"


@pytest.mark.long
def test_an_image_is_enlarged_by_mouse_and_keyboard(run, page):
    append(run, paint(run, 0, "red", (200, 100)), *losses(0))
    for screen in (page.use_desktop_screen, page.use_phone_screen):
        screen()
        page.open(run.name, tab="images")
        shown_color(page, 0)
        button = page.element("[data-image=cells] button")
        width = button.find_element(By.TAG_NAME, "img").size["width"]
        button.click()
        page.until("return document.querySelector('dialog[open] img')?.naturalWidth === 200")
        assert page.run("return document.querySelector('dialog img').clientWidth") > width
        page.press(Keys.ESCAPE)
        page.until("return !document.querySelector('dialog[open]')")
        page.choose_tab("images")
        page.reach("[aria-label='Enlarge cells at step 0']")
        page.press(Keys.ENTER)
        page.until("return document.querySelector('dialog[open] img')")
        assert page.run("return document.activeElement.textContent") == "Close"
        page.press(Keys.ESCAPE)
        page.until("return !document.querySelector('dialog[open]')")
        assert page.run("return document.activeElement.ariaLabel") == "Enlarge cells at step 0"


def test_images_of_two_runs_are_side_by_side_at_the_step_of_the_address(run, page, place, names):
    other = place / next(names)
    for folder, colors in ((run, ("red", "lime")), (other, ("blue", "white"))):
        append(folder, *(paint(folder, step, color) for step, color in enumerate(colors)))
    append(run, {**paint(run, 1, "lime"), "name": "alone"})
    page.use_phone_screen()
    page.open(run.name, other.name, tab="images")
    alts = (
        "return JSON.stringify([...document.querySelectorAll(`${arguments[0]} img`)]"
        ".filter((one) => one.naturalWidth).map((one) => one.alt)) === JSON.stringify(arguments[1])"
    )
    cells = "[data-image=cells]"
    page.until(alts, cells, [f"cells at step 1 of {folder.name}" for folder in (run, other)])
    page.until(alts, "[data-image=alone]", [f"alone at step 1 of {run.name}"])
    assert "no image of this name" in page.text("[data-image=alone]")
    page.element("#image-step").send_keys(Keys.HOME)
    first = [f"cells at step 0 of {folder.name}" for folder in (run, other)]
    page.until(alts, cells, first)
    page.until("return location.hash.includes('image=0')")
    page.driver.refresh()
    page.until(alts, cells, first)
    beside = (
        "const [one, other] = [...document.querySelectorAll(`${arguments[0]} img`)]"
        ".map((image) => image.getBoundingClientRect());"
        "return one.right <= other.left && one.bottom === other.bottom"
    )
    assert page.run(beside, cells)
    assert page.run("return document.scrollingElement.scrollWidth") == 360
    page.use_desktop_screen()
    page.element(f"{cells} button").click()
    page.until(alts, "dialog[open]", first)
    assert page.run(beside, "dialog")


@pytest.mark.long
def test_the_value_beside_a_name_is_the_last_one_without_smoothing_or_zoom(run, page):
    append(run, *(scalars(step, loss=float(step % 2)) for step in range(30)))
    for chosen in ({"smooth": 0.9}, {"from": 4, "to": 8}):
        page.open(run.name, **chosen).points("loss")
        assert page.newest("loss") == "1"
        page.element("[data-scalar=loss] .canvas").send_keys(Keys.HOME)
        page.until(
            "return document.querySelector('[data-scalar=loss] .readout').textContent !== '1'"
        )


SEGMENTS = (
    "return [...document.querySelectorAll('[data-worker] .parts')].map((bar) =>"
    " [bar.style.width, ...[...bar.children].map((one) => `${one.title} ${one.style.width}`)])"
)
LEGEND = "return [...document.querySelectorAll('#worker-names span')].map((o) => o.textContent)"


@pytest.mark.long
def test_bars_of_workers_do_not_include_their_waits_for_others(run, page):
    # worker 0 waits 2 s in the exchange, of which it needs none itself
    append(run, timing(0, (0.5, 0.5, 2.0, 0.0, 0.0), (0.0, 4.0, 0.0, 0.0, 0.0)))
    page.open(run.name, tab="workers")
    bars = [
        ["25%", "data: 500 ms 50%", "compute: 500 ms 50%"],
        ["100%", "compute: 4 s 100%"],
    ]
    page.wait_for(bars, SEGMENTS)
    event = timing(1, (0.0, 1.0, 3.0, 0.0, 0.0), (0.0, 4.0, 0.0, 0.0, 0.0))
    event["workers"][0]["own"] = 2.0  # one second of work is in the exchange
    append(run, started(1, kind="resumed"), event)
    page.wait_for([["50%", "compute: 1 s 50%", "exchange: 1 s 50%"], bars[1]], SEGMENTS)


LANES = (
    "return [...document.querySelectorAll('.workers .lanes')].map((row) =>"
    " [row.ariaLabel, ...[...row.children].map((one) => one.textContent)])"
)


def test_workers_show_their_lanes_however_many(run, page):
    page.open(run.name, tab="workers")
    shard, many = {"event": "sharded_model"}, 10**12  # no list of which would fit
    append(run, started(lanes=4))
    page.wait_for([["lanes 0 to 1", "0", "1"], ["lanes 2 to 3", "2", "3"]], LANES)
    append(run, started(lanes=3), shard)
    page.wait_for([["lanes 0 to 2, every 2", "0", "2"], ["lane 1", "1"]], LANES)
    append(run, started(lanes=many, workers=1))
    page.wait_for([[f"lanes 0 to {many - 1}", f"0\u2013{many - 1}"]], LANES)
    append(run, started(lanes=many), shard)
    first, second = [f"{rank}, {rank + 2} … {many - 2 + rank}" for rank in range(2)]
    labels = [f"lanes {rank} to {many - 2 + rank}, every 2" for rank in range(2)]
    page.wait_for([[labels[0], first], [labels[1], second]], LANES)


def test_the_chart_of_workers_has_names_colors_and_a_box(run, page):
    for count in (3, 9):
        workers = [(0.0, 1.0 + (rank == 1), 0.0, 0.0, 0.0) for rank in range(count)]
        append(run, started(workers=count), *(timing(step, *workers) for step in range(3)))
        page.open(run.name, tab="workers")
        few = ["worker 0", "worker 1, slowest", "worker 2"]
        page.wait_for(few if count == 3 else ["worker 1, slowest", "other workers"], LEGEND)
        page.element("#panel-workers .canvas").send_keys(Keys.HOME)
        box = page.until(f"return {TIP}?.innerText").splitlines()
        assert box[:3] == ["step 0", "worker 1, slowest", "2 s"]
        assert len(box) == 1 + 2 * count
        looks = page.run(
            "return [...document.querySelectorAll('.workers .tip .key')]"
            ".map((one) => getComputedStyle(one).borderTopColor)"
        )
        assert len(set(looks)) == (3 if count == 3 else 2)


def saved(page, folder, label):
    """Save a chart in both formats, and return the lines of one and the picture of the other."""
    page.save_downloads_in(folder)
    for kind in ("CSV", "PNG"):
        page.run(
            "const menu = document.querySelector(`[aria-label='Save ${arguments[0]}']`);"
            "menu.click(); [...menu.parentElement.querySelectorAll('button')]"
            ".find((one) => one.textContent === arguments[1]).click()",
            label,
            kind,
        )
        file = downloaded(folder, f"*.{kind.lower()}")
    (table,) = folder.glob("*.csv")
    with Image.open(file) as picture:
        return table.read_text().splitlines(), picture.convert("RGB")


def colors(picture):
    return {color for _, color in picture.getcolors(1 << 20)}


@pytest.mark.long
def test_charts_of_time_workers_and_hosts_are_saved_and_enlarged(run, page, tmp_path):
    parts = (0.5, 1.0, 0.25, 0.0, 0.0), (0.5, 2.0, 0.25, 0.0, 0.0)
    append(run, started(), timing(0, *parts), timing(1, *parts), system("a"))
    page.open(run.name, tab="workers")
    page.until("return document.querySelector('.seconds')?.textContent.endsWith('s')")
    labels = {
        "time": "Seconds per step by part, over the run",
        "workers": "Own seconds per step, without waiting for other workers",
        "system": "CPU, all cores",
    }
    orange = (213, 94, 0)  # of the exchange, of the second worker
    for tab, label in labels.items():
        (folder := tmp_path / tab).mkdir()
        page.open(run.name, tab=tab)
        page.element(f"#panel-{tab} .u-over")
        lines, picture = saved(page, folder, label)
        if tab == "time":
            assert lines[:4] == [
                "part,step,seconds per step",
                "data,0,0.5",
                "data,1,0.5",
                "compute,0,1.5",
            ]
        elif tab == "workers":
            assert lines[0] == "worker,step,seconds per step"
            assert lines[1:3] == ["worker 0,0,1.5", "worker 0,1,1.5"]
        else:
            assert lines[0] == "host,seconds,%"
            assert lines[1].startswith("a,")
            assert lines[1].endswith(",25")
        assert len(colors(picture)) > 10
        assert tab == "system" or orange in colors(picture)
        height = "return document.querySelector(`#panel-${arguments[0]} .u-over`).clientHeight"
        before = page.run(height, tab)
        page.element(f"[aria-label='Enlarge {label}']").click()
        page.until(f"{height} > arguments[1]", tab, before)
        page.until("return location.hash.includes('large=')")
        page.driver.refresh()
        page.until(f"return document.querySelector(`#panel-{tab} .u-over`)")
        assert page.run(height, tab) > before


@pytest.mark.long
def test_the_unit_of_a_throughput_fits_its_values(run, page):
    append(run, system("a", disk_read=20.0, disk_written=3e3, network_sent=5e9))
    page.open(run.name, tab="system")
    titles = "return [...document.querySelectorAll('.card h3')].map((one) => one.textContent)"
    units = ["Read from disks, B/s", "Written to disks, KB/s", "Sent to the network, GB/s"]
    page.until(f"return ({titles[7:]}).includes(arguments[0])", units[0])
    assert page.run(titles)[-3:] == units
    page.element("[data-measure=disk_written] .canvas").send_keys(Keys.END)
    page.until(f"return {TIP}?.innerText.endsWith('3 KB/s')")


def test_a_setting_against_a_score_is_saved(run, place, page, names, tmp_path):
    for folder, rate, score in ((run, 0.1, 0.5), (place / next(names), 0.2, 0.75)):
        settings = {"rate": rate, "study": "saved"}
        append(folder, {**started(), "settings": settings}, scalars(0, accuracy=score))
    options = {"filter": "study=saved", "setting": "rate", "score": "accuracy"}
    page.open(run.name, tab="table", **options)
    page.until("return document.querySelectorAll('#scatter button').length === 2")
    lines, picture = saved(page, tmp_path, "a setting against a score")
    assert lines[0] == "run,rate,accuracy"
    assert {line.split(",", 1)[1] for line in lines[1:]} == {"0.1,0.5", "0.2,0.75"}
    assert (0, 114, 178) in colors(picture)  # of the chosen run


@pytest.mark.long
def test_histograms_have_titles_of_their_axes_and_are_saved(run, page, tmp_path):
    bins = [-1.25, 1], [0.0, 2], [0.5, 5]
    append(run, histogram(7, "w<b>", *bins, nan=3), histogram(1500, "w<b>", [2.0, 4]))
    page.open(run.name)
    page.until("return document.getElementById('histogram-readout').textContent.includes('1,500')")
    texts = "return [...document.querySelectorAll('.histogram span')].map((one) => one.textContent)"
    assert page.run(texts)[:1] + page.run(texts)[6:] == [
        "w<b>",
        "7",
        "step",
        "1,500",
        "0",
        "count",
        "4",
    ]
    below = (
        "const [map, bars, ...axes] = [...document.querySelectorAll("
        "'.histogram > :is(canvas, .across)')].map((one) => one.getBoundingClientRect());"
        "return axes.every((axis, index) => { const over = [map, bars][index];"
        " return axis.top >= over.bottom && axis.left === over.left && axis.width === over.width })"
    )
    assert page.run(below)
    lines, picture = saved(page, tmp_path, "histogram")
    assert lines == [
        "step,lower edge,upper edge,count",
        "7,-1.5,-1.25,1",
        "7,0,0,2",
        "7,0.5,0.625,5",
        "7,nan,nan,3",
        "1500,2,2.5,4",
    ]
    assert picture.width > 300
    assert picture.height > 250
    assert len(colors(picture)) > 10


@pytest.mark.long
def test_charts_of_time_workers_and_hosts_have_titles_of_their_axes(run, page):
    parts = (0.5, 1.0, 0.25, 0.0, 0.0), (0.5, 2.0, 0.25, 0.0, 0.0)
    append(run, started(), timing(0, *parts), timing(1, *parts), system("a"))
    titles = {
        "time": ["step", "seconds per step"],
        "workers": ["step", "seconds per step"],
        "system": ["time since the start (h:min:s)", "%", "MB/s"],
    }
    page.open(run.name)
    page.collect_drawn_texts()
    for tab, expected in titles.items():
        page.run("drawn.length = 0")
        page.choose_tab(tab)
        page.until("return arguments[0].every((title) => drawn.includes(title))", expected)
