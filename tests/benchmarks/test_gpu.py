"""Run the GPU benchmark on the CPU with a tiny model: the logic is the same."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from benchmarks import gpu
from benchmarks.gpu_results import BEGIN, END, ProofResult, Speeds, insert, markdown
from tests.python import run_python


@pytest.fixture
def place(tmp_path):
    """Return a file with old results."""
    page = tmp_path / "gpu.md"
    page.write_text(f"# GPUs\n\n{BEGIN}nothing yet\n{END}\nThe end.\n")
    return page


@pytest.mark.long
def test_proofs_and_speeds_are_inserted_into_a_file(place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--quick", "--into", str(place)])
    assert gpu.main() == 0
    page = place.read_text()
    before, results, after = re.split(f"{BEGIN}|{END}", page)
    assert (before, after) == ("# GPUs\n\n", "\nThe end.\n")
    assert results in capsys.readouterr().out
    assert "| two workers share a GPU, 4 lanes | the same at every step: n=1, n=2 |" in results
    speeds = re.findall(
        r"^\| ([a-z].*?) \| (\d+) \((\d+) to (\d+)\) \| ", results, re.MULTILINE | re.IGNORECASE
    )
    assert [name for name, *_ in speeds] == [
        "plain PyTorch",
        "samestep, 4 lanes",
        "samestep, 4 lanes, CUDA graphs",
    ]
    assert all(int(value) > 0 for _, *values in speeds for value in values)


def test_without_a_gpu_the_error_is_one_line():
    done = run_python("-m", "benchmarks.gpu")
    assert done.returncode == 1
    assert re.fullmatch(r"no GPU: torch found none; .*\n", done.stderr)
    assert done.stdout == ""


def test_the_batch_is_halved_until_it_fits(monkeypatch):
    def plain_loop(command):
        size = int(command[-1])
        said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" if size > 64 else ""
        return subprocess.CompletedProcess(command, int(size > 64), "", said)

    monkeypatch.setattr(gpu, "run", plain_loop)
    assert gpu.largest_batch([], 512) == 64


def test_a_command_that_takes_too_long_fails(monkeypatch):
    monkeypatch.setattr(gpu, "LIMIT_SECONDS", 0.5)
    done = gpu.run([sys.executable, "-c", "import threading; threading.Event().wait()"])
    assert done.returncode != 0
    assert gpu.last_line(done) == "still ran after 0.5 seconds"


def test_ratios_compare_adjacent_runs_and_failures_are_listed():
    speeds = Speeds("a model", "plain PyTorch")
    for plain, ours in ((100, 110), (200, 180), (50, 60)):
        speeds.add("plain PyTorch", f"samples_a_second={plain} gigabytes=1.5", "")
        speeds.add("samestep", f"samples_a_second={ours} gigabytes=2.5 launch_ms=4", "")
        speeds.add("Accelerate", "", "lost | found")
    text = markdown(
        "a machine", [ProofResult("a proof", "DIFFERENT, first at step 2", failed=True)], [speeds]
    )
    assert "| a proof | **failed**: DIFFERENT, first at step 2 |" in text
    assert (
        "| samestep | 110 (60 to 180) | 1.10 (0.90 to 1.20) | 4.0 (4.0 to 4.0) |  |  | 2.50 |"
        in text
    )
    assert "| Accelerate | failed: lost / found | | | | | |" in text
    assert speeds.failed


def test_a_file_without_a_place_for_results_is_rejected(tmp_path):
    (tmp_path / "page.md").write_text("# GPUs\n")
    with pytest.raises(SystemExit, match=r"page\.md has no place for results"):
        insert("", tmp_path / "page.md")
