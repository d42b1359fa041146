"""The tests of the pages find mistakes on a page."""

from __future__ import annotations

import sys

import pytest
import torch._dynamo  # noqa: F401  as in test_pages.py

from tests.docs.blocks import blocks_of, long_lines
from tests.docs.commands import check, commands_of, here
from tests.docs.page import run_page
from tests.workers import WorkerFailedError, run_workers


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A function that writes a page in the folder in which the test runs."""
    monkeypatch.chdir(tmp_path)

    def write(*parts):
        path = tmp_path / "page.md"
        path.write_text(
            "\n".join(part if part.startswith("<!--") else f"```{part}\n```\n" for part in parts)
        )
        return path

    return write


def test_blocks_have_a_language_a_line_and_a_test(page):
    path = page(
        "text\nfree",
        "<!-- test: setup\na = 1\n-->",
        "<!-- test: in a run -->",
        "python\nb = 2\nc = 3",
        "sh\nmake test",
    )
    assert [(block.language, block.line, block.text, block.test) for block in blocks_of(path)] == [
        ("text", 2, "free\n", ""),
        ("python", 6, "a = 1\n", ""),
        ("python", 10, "b = 2\nc = 3\n", "in a run"),
        ("sh", 15, "make test\n", ""),
    ]


def test_lines_of_more_than_100_columns_are_found(page):
    first, second = blocks_of(page(f"text\n{'─' * 100}\n{'─' * 101}", "sh\nmake test"))
    assert long_lines(first) == ["page.md:3"]
    assert long_lines(second) == []


@pytest.mark.parametrize(
    "parts",
    [
        ["pyhton\n1"],
        ["<!-- test: in a rnu -->", "python\n1"],
        ["<!-- test: printed -->", "python\n1"],
        ["<!-- test: in a run -->", "<!-- more -->", "python\n1"],
        ["python\n1", "<!-- test: printed -->"],
    ],
)
def test_an_unknown_language_or_test_is_an_error(page, parts):
    with pytest.raises(ValueError, match=r"unknown test|must be one of|without a block"):
        blocks_of(page(*parts))


def test_blocks_of_a_page_share_variables_and_their_output_is_compared(page):
    run_workers(
        run_page,
        1,
        page(
            "python\nsize = len(train_set)",
            "python\nprint(size, 'samples')",
            "<!-- test: printed -->",
            "text\n101 ...",
            "<!-- test: in a run -->",
            "python\nassert run.lanes == 4 and run.step == 0\nrun.print('here')",
            "<!-- test: in a step -->",
            "python\nprint(run.backward(loss_fn, model, batch)['loss'] > 0)",
            "<!-- test: printed -->",
            "text\nTrue",
        ),
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            ["python\nprint(1)", "<!-- test: printed -->", "text\n2"],
            r"page.md:7: expected this output, got:\n1",
        ),
        (["text\nany", "python\nfirst = 1\nrun.evaluate()"], r'page.md", line 7[^$]*NameError'),
        (
            [
                "<!-- test: in a step -->",
                "python\nrun.backward(loss_fn, model, batch, upadte=model)",
            ],
            "unexpected keyword argument 'upadte'",
        ),
        (
            ["<!-- test: run -->", "sh\nsamestep snapshots list nowhere"],
            "exited with status 2:\n.*got nowhere",
        ),
        (["<!-- test: run, status 1 -->", "sh\nsamestep snapshots --help"], "exited with status 0"),
        (["<!-- test: serve -->", "sh\nsamestep watch nowhere"], "run's folder, .*got .*nowhere"),
        (["<!-- test: serve -->", "sh\nsamestep watch ."], "the page has no runs"),
    ],
)
def test_a_mistake_fails_with_its_line(page, parts, message):
    with pytest.raises(WorkerFailedError, match=message):
        run_workers(run_page, 1, page(*parts))


def test_a_file_is_written_and_run_by_a_command(page):
    parts = (
        "python\nimport sys\nprint(len(test_set), sys.argv[1])",
        "<!-- test: run -->",
        "sh\npython \\\n    job.py once  # a comment\nsrun python job.py elsewhere",
        "<!-- test: printed -->",
        "text\n53 once",
    )
    run_workers(run_page, 1, page("<!-- test: file job.py, given -->", *parts))
    with pytest.raises(WorkerFailedError, match="name 'test_set' is not defined"):
        run_workers(run_page, 1, page("<!-- test: file job.py -->", *parts))


@pytest.mark.parametrize(
    "command",
    [
        "samestep run -n 2 --lanes 8 train.py --any flag",
        "SAMESTEP_LANES=8 samestep run --hosts hosts.txt train.py",
        "samestep run --nodes 1:4 --lanes 16 --master node1:29400 -n 4 train.py",
        "torchrun --nproc-per-node 4 train.py",
        "python -m benchmarks.table --picture docs/benchmarks.svg",
        "python -m venv .venv",
        "pip install 'samestep[images,s3]'",
        "make demo",
        "srun -N 2 -n 8 python train.py --any flag",
        "kubectl exec POD -- samestep doctor --dir /runs/one",
    ],
)
def test_correct_commands_pass(command):
    (words,) = commands_of(command)
    check(words)


@pytest.mark.parametrize(
    "command",
    [
        "samestep rnu train.py",
        "samestep run --lane 8 train.py",
        "samestep run --lanes none-of-them train.py",
        "samestep run --nodes 2 -n 4 train.py",
        "samestep run trian.py",
        "SAMESTEP_LANE=8 python train.py",
        "torchrun --nproc-per-host 4 train.py",
        "python -m benchmarks.tabel",
        "python -m benchmarks.table --pictrue docs/benchmarks.svg",
        "python recipes/vit/trian.py",
        "python recipes/vit/train.py recipes/vit/digit.yaml",
        "pip install 'samestep[image]'",
        "make demos",
        "pytest tests/run/test_same_bit.py",
        "samestpe run train.py",
        "srun -N 2 -n 8 samestep docter",
        "samestep run train.py | head",
    ],
)
def test_wrong_commands_are_found(command):
    with pytest.raises(ValueError, match=r"."):
        check(*commands_of(command))


def test_commands_that_need_other_machines_are_not_run():
    run = [
        here(words)
        for words in commands_of(
            "srun python train.py\nsamestep run --nodes 2 train.py\ntorchrun --nnodes 2 train.py"
        )
    ]
    assert run == [None, None, None]
    (words,) = commands_of("samestep submit slurm --nodes 2 --dir runs/one train.py")
    assert here(words)[-5:] == ["--nodes", "2", "--dir", "runs/one", "train.py"]
    (words,) = commands_of("SAMESTEP_LANES=8 python train.py")
    assert here(words) == ["env", "SAMESTEP_LANES=8", sys.executable, "train.py"]
