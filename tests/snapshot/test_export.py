from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel

from samestep.errors import SnapshotError
from samestep.snapshot import export
from tests.snapshot.exact import exact, tensors
from tests.snapshot.saving import save_once

UNKNOWN_TO_SAFETENSORS = {torch.complex128, torch.float4_e2m1fn_x2}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.convolution = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_model_is_exported_under_its_usual_names(tmp_path, workers):
    model = Tied()
    save_once(
        tmp_path,
        5,
        {"model": model.state_dict(), "ema": AveragedModel(model).state_dict()},
        workers,
    )
    assert export(tmp_path / "step-00000005", tmp_path / "model.safetensors") == []
    assert exact(dict(sorted(load_file(tmp_path / "model.safetensors").items()))) == exact(
        dict(sorted(model.state_dict().items()))
    )
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "samestep.step": "5", "samestep.object": "model"}
    export(tmp_path / "step-00000005", tmp_path / "model.safetensors", "ema")
    assert "module.head.weight" in load_file(tmp_path / "model.safetensors")


@given(tensor=tensors().filter(lambda tensor: tensor.dtype not in UNKNOWN_TO_SAFETENSORS))
@settings(max_examples=50)
def test_tensors_are_exported_exactly(tmp_path_factory, tensor):
    directory = tmp_path_factory.mktemp("run")
    save_once(directory, 1, {"model": {"weight": tensor}})
    export(directory / "step-00000001", directory / "x.safetensors")
    assert exact(load_file(directory / "x.safetensors")) == exact({"weight": tensor})


def test_exports_of_the_same_state_have_the_same_bytes(tmp_path):
    names = ["b", "a", "ü", 'a "name"', "line\n\x7f"]
    state = {name: torch.arange(3 * number) for number, name in enumerate(names)}
    for workers, step in ((1, 1), (3, 1), (1, 2)):
        save_once(tmp_path / f"run-{workers}-{step}", step, {"model": state}, workers)
    files = [tmp_path / f"{number}.safetensors" for number in range(12)]
    for number, file in enumerate(files):
        export(tmp_path / f"run-{1 + 2 * (number % 2)}-1" / "step-00000001", file)
    # the library writes three entries of metadata in one of six orders
    assert len({file.read_bytes() for file in files}) == 1
    assert exact(load_file(files[0])) == exact(dict(sorted(state.items())))
    other = tmp_path / "other.safetensors"
    export(tmp_path / "run-1-2" / "step-00000002", other)
    assert other.stat().st_size == files[0].stat().st_size
    assert other.read_bytes() != files[0].read_bytes()  # the step is part of the metadata


def test_nested_states_are_joined_by_dots_and_the_rest_is_left_out(tmp_path):
    state = {
        "state": {0: {"step": torch.ones(()), "note": "x"}},
        "groups": [{"lr": 0.1, "scale": torch.ones(2)}],
        "none": None,
    }
    save_once(tmp_path, 1, {"optimizer": state})
    left_out = export(tmp_path / "step-00000001", tmp_path / "x.safetensors", "optimizer")
    assert set(load_file(tmp_path / "x.safetensors")) == {"state.0.step", "groups.0.scale"}
    assert left_out == ["state.0.note", "groups.0.lr", "none"]


@pytest.mark.parametrize(
    ("state", "name", "message"),
    [
        ({"model": {"a": 1}}, "model", "'model' of snapshot .* has no tensors to export"),
        ({"model": {}}, "ema", "it has no ema; it has model"),
        (
            {"model": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}},
            "model",
            "has two tensors with the same name",
        ),
        (
            {"model": {"a": torch.ones(1, dtype=torch.complex128)}},
            "model",
            "cannot export .*complex128",
        ),
    ],
)
def test_states_that_cannot_be_exported_are_rejected(tmp_path, state, name, message):
    save_once(tmp_path, 1, state)
    with pytest.raises(SnapshotError, match=message):
        export(tmp_path / "step-00000001", tmp_path / "x.safetensors", name)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_write_error_of_export_is_raised(tmp_path):
    save_once(tmp_path, 1, {"model": {"a": torch.ones(1)}})
    with pytest.raises(SnapshotError, match=r"cannot export .*none/x.safetensors"):
        export(tmp_path / "step-00000001", tmp_path / "none" / "x.safetensors")
