"""What samestep guarantees, on a real GPU: about five minutes on one.

Several workers share it: they exchange through host memory, or over NCCL that takes each of them
for a host of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep as ss
from recipes.detect import make_data as detect_data
from recipes.stain import make_data as stain_data
from tests.gpu.test_deterministic import VERIFIED_LOSSES, verified_script
from tests.jobs import classify, images
from tests.plugins.test_kernels import CASES, compare_on

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
JOB = str(Path(__file__).with_name("job.py"))


def samestep(*arguments, directory):
    """Run a command of samestep; return its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "samestep", *map(str, arguments)]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def fingerprint(output):
    [digest] = re.findall(r"hash (\w{64})", output)
    return digest


@pytest.mark.parametrize("exchange", ["host memory", "NCCL"])
@pytest.mark.parametrize("job", ["vision", "text"])
def test_one_two_and_three_workers_take_the_same_steps(job, exchange, device, tmp_path):
    flags = ["--nccl"] if exchange == "NCCL" else []
    output = samestep(
        "verify",
        "-n",
        "1,2,3",
        "--steps",
        "3",
        JOB,
        job,
        "--device",
        device,
        *flags,
        directory=tmp_path,
    )
    assert "the same at every step" in output


@pytest.mark.parametrize("flags", [[], ["--nccl"]], ids=["host memory", "NCCL"])
def test_matrices_with_one_owner_take_the_same_steps(flags, device, tmp_path):
    options = ["--steps", "3", "--kill", JOB, "text", "--muon", "--device", device, *flags]
    output = samestep("verify", "-n", "1,2,3", *options, directory=tmp_path)
    assert "the same at every step" in output


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_sharded_parameters_have_the_bits_of_replicated_ones(precision, device, tmp_path):
    cases = [
        (1, []),
        (2, ["--sharded"]),
        (2, ["--sharded", "--nccl"]),
        (3, ["--sharded", "--nccl"]),
    ]
    prints = [
        fingerprint(
            samestep(
                "run", "-n", workers, "--dir", tmp_path / str(number), JOB, "blocks", "--device",
                device, "--precision", precision, *flags, directory=tmp_path,
            )
        )
        for number, (workers, flags) in enumerate(cases)
    ]  # fmt: skip
    assert len(set(prints)) == 1


@pytest.mark.parametrize("flags", [[], ["--nccl"]], ids=["host memory", "NCCL"])
def test_sharded_parameters_take_the_same_steps_after_a_kill(flags, device, tmp_path):
    options = ["--steps", "3", "--kill", JOB, "blocks", "--sharded", "--device", device, *flags]
    output = samestep("verify", "-n", "1,2,3", *options, directory=tmp_path)
    assert "the same at every step" in output


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_fails_over_nccl_is_replaced(name, device, tmp_path):
    options = ["run", "-n", "2", "--timeout", "20", "--max-restarts", "1", "--dir"]
    flags = [JOB, "vision", "--device", device, "--nccl"]
    undisturbed = samestep(*options, tmp_path / "a", *flags, directory=tmp_path)
    disturbed = samestep(
        *options, tmp_path / "b", *flags, "--signal", name, "7", directory=tmp_path
    )
    assert "worker 1" in disturbed
    assert fingerprint(disturbed) == fingerprint(undisturbed)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_16_bits_take_the_same_steps(precision, device, tmp_path):
    if (device, precision) == ("cpu", "float16"):
        pytest.skip("float16 needs a GPU")
    output = samestep(
        "verify",
        "-n",
        "1,2",
        "--steps",
        "3",
        "--kill",
        JOB,
        "vision",
        "--device",
        device,
        "--precision",
        precision,
        directory=tmp_path,
    )
    assert "the same at every step" in output


RECIPES = {
    "vit": ["recipes/vit/digits.yaml"],
    "stain": ["recipes/stain/tissue.yaml", "data.path={data}"],
    "detect": ["recipes/detect/digits.yaml", "data.path={data}"],
    "gpt": ["recipes/gpt/tiny.yaml", "precision=bfloat16"],
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_take_the_same_steps(recipe, device, tmp_path):
    if device == "cpu":
        pytest.skip("tests/recipes verify it on CPUs")
    if recipe == "stain":
        stain_data.main([str(tmp_path), "--size", "64"])
    elif recipe == "detect":
        detect_data.main([str(tmp_path), "--train", "13", "--val", "5"])
    arguments = [argument.format(data=tmp_path) for argument in RECIPES[recipe]]
    options = ["-n", "1,2", "--steps", "3", f"recipes/{recipe}/train.py"]
    output = samestep("verify", *options, *arguments, directory=ROOT)
    assert "the same at every step" in output


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_one_lane_equals_the_plain_loop(make, device):
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10)
        )
        return model.to(device), torch.utils.data.TensorDataset(
            torch.randn(48, 3, 8, 8), torch.arange(48) % 10
        )

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    with ss.init(device=device, lanes=1) as run:
        model, samples = made()
        run.replicate(model)
        optimizer = make(model.parameters(), lr=0.01)
        for batch in run.batches(samples, 16, steps=3, order=range(48)):
            run.backward(loss, model, batch)
            optimizer.step()
            optimizer.zero_grad()
        plain, samples = made()
        plain_optimizer = make(plain.parameters(), lr=0.01)
        for start in range(0, 48, 16):
            loss(plain, [part.to(device) for part in samples[start : start + 16]]).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
    for value, expected in zip(
        model.state_dict().values(), plain.state_dict().values(), strict=True
    ):
        assert value.equal(expected)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("deterministic")
def test_replaced_operations_agree_with_cpus_and_repeat_their_bits(case, device):
    compare_on(device, case)


@pytest.mark.parametrize("model", VERIFIED_LOSSES)
def test_models_with_replaced_operations_take_the_same_steps(model, device, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(verified_script(model, device))
    output = samestep("verify", "-n", "1,2", script, directory=tmp_path)
    assert "the same at every step" in output


def trained(graphs, device, mode=None):
    """Train with four lanes; return the parameters and buffers, and the losses.

    With a `mode`, the model is compiled.
    """
    with ss.init(lanes=4, device=device, graphs=graphs, timeout=60) as run:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()]
        model = run.replicate(nn.Sequential(*layers, nn.Linear(288, 10)))
        if mode is not None:
            model.compile(mode=mode)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        losses = []
        for batch in run.batches(images(64), 16, steps=20):
            losses.append(run.backward(classify, model, batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        return [*(value.cpu() for value in model.state_dict().values()), torch.tensor(losses)]


def test_lanes_as_graphs_have_the_bits_of_eager_lanes(device):
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    # "on" is an error if lanes are eager
    for graphed, eager in zip(trained("on", device), trained("off", device), strict=True):
        assert torch.equal(graphed, eager)


def test_compiled_lanes_with_graphs_have_the_bits_of_those_without(device):
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    with_graphs, without = (trained("off", device, mode) for mode in ("reduce-overhead", "default"))
    for graphed, compiled in zip(with_graphs, without, strict=True):
        assert torch.equal(graphed, compiled)


@pytest.mark.parametrize("job", ["blocks", "text"])
def test_jobs_have_the_same_bits_with_graphs(job, device, tmp_path):
    # two workers exchange gradients between the graphs of their last lanes
    cases = [("off", 1, []), ("on", 1, []), ("on", 2, ["--nccl"])]
    prints = [
        fingerprint(
            samestep(
                "run", "-n", workers, "--graphs", graphs, "--dir", tmp_path / f"{graphs}-{workers}",
                JOB, job, "--device", device, *flags, directory=tmp_path,
            )
        )
        for graphs, workers, flags in cases
    ]  # fmt: skip
    assert len(set(prints)) == 1
