"""The site of the documentation is built without a warning."""

from __future__ import annotations

import json
import re

import pytest
import snowballstemmer

from samestep import cli
from samestep.config import Config
from tests.docs.blocks import PAGES, ROOT
from tests.leaks import nothing_left
from tests.needs import needs
from tests.python import run_python
from tests.watch.browser.pages import browsing

pytestmark = pytest.mark.long  # `make docs` builds it, too


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as `make docs` does, and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    (options,) = re.findall(
        r"^\t\$\(BIN\)/sphinx-build (.*) docs docs/_build/html$",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )
    doctrees, html = ["--doctree-dir", folder / "doctrees"], folder / "html"
    # in a fork, which has imported torch, as the reference does
    done = run_python("-m", "sphinx", *options.split(), *doctrees, ROOT / "docs", html, merges=True)
    assert done.returncode == 0, done.stdout
    return html


def test_every_page_exists_with_its_pictures(site):
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists()
    for page in site.rglob("*.html"):
        for picture in re.findall(r'<img [^>]*src="([^":]+)"', page.read_text()):
            assert (page.parent / picture).exists()


def test_the_page_for_coding_assistants_is_at_the_root(site):
    assert (site / "llms.txt").read_bytes() == (ROOT / "docs" / "llms.txt").read_bytes()
    (link,) = re.findall(
        r'href="([^"]+)"[^>]*>(?:<[^>]+>)*llms\.txt', (site / "index.html").read_text()
    )
    assert (site / link).exists()


def test_nothing_is_loaded_from_other_sites(site):
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//'
        r'|<link[^>]*rel="stylesheet"[^>]*href="(?:https?:)?//'
    )
    assert [page for page in site.rglob("*.html") if loaded.search(page.read_text())] == []


@pytest.mark.long
def test_code_fits_its_column(site):
    needs("chromium")
    needs("chromedriver")
    cut = "return [...document.querySelectorAll('pre')].some((e) => e.scrollWidth > e.clientWidth)"
    pages = [page for page in site.rglob("*.html") if page.parent.name != "_modules"]
    with nothing_left(), browsing() as driver:
        size = {"width": 1280, "height": 720, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        cut_pages = []
        for page in pages:
            driver.get(page.as_uri())
            cut_pages += [page.name] if driver.execute_script(cut) else []
    assert len(pages) > len(PAGES) / 2
    assert cut_pages == []


# What the multi-GPU guides of the five systems name
WORDS = {
    "vit": "spawn DistributedBatchSampler CUDA_VISIBLE_DEVICES reduce_dict all_gather AverageMeter",
    "stain": "visdom visualizer remote-transfer-cmd gpu-ids torchrun DataParallel",
    "detect": "init_method DistributedSampler set_epoch reduce_loss_dict find_unused_parameters",
    "gpt": "torchrun nproc_per_node gradient_accumulation_steps init_process_group seed_offset",
    "atari": "DDPContext DistContext to_ddp_config hooks set_pkg_seed",
}


@pytest.mark.parametrize("recipe", WORDS)
def test_the_search_finds_the_words_of_the_replaced_systems(site, recipe):
    index = (site / "searchindex.js").read_text()
    names = json.loads(re.search(r'"?docnames"?: ?(\[[^]]*\])', index)[1])
    terms = json.loads(re.search(r'"?terms"?: ?(\{.*?\})', index)[1])
    page = names.index(f"recipes/{recipe}")
    stem = snowballstemmer.stemmer("english").stemWord
    for word in WORDS[recipe].split():
        # the search splits words at other characters, and stems them
        for part in re.findall(r"\w+", word.lower()):
            pages = terms.get(stem(part), [])
            assert page in (pages if isinstance(pages, list) else [pages]), f"{word}: {part}"


def test_the_reference_has_every_option_and_command(site):
    text = re.sub(r"<[^>]+>", "", (site / "reference.html").read_text())
    names = [
        *Config.__dataclass_fields__,
        *(f"samestep {command}" for command in cli.COMMANDS),
        "clip_grad_norm",
        "NonFiniteLossError",
    ]
    assert [name for name in names if name not in text] == []
