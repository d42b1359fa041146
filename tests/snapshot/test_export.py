from __future__ import annotations

import json
import os
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.swa_utils import AveragedModel

from samestep.errors import SnapshotError
from samestep.snapshot import export, read
from tests.faults import flip_byte
from tests.snapshot.exact import exact, tensors
from tests.snapshot.saving import save_once


def is_known(tensor):
    """Return whether safetensors can write and read the dtype, which depends on its version."""
    with suppress(KeyError, SafetensorError, ValueError):
        return bool(load(save({"one": torch.empty(1, dtype=tensor.dtype)})))
    return False


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


@pytest.mark.parametrize(
    "options", [{}, {"shard_bytes": 100}, {"shard_bytes": 10**9}, {"dcp": True}], ids=str
)
def test_the_umask_says_who_may_read_an_export(tmp_path, options):
    save_once(tmp_path, 5, {"model": Tied().state_dict()})
    before = os.umask(0o027)
    try:
        export(tmp_path / "step-00000005", tmp_path / "made", **options)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "made", *tmp_path.glob("made/*")) if path.is_file()]
    assert files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


@given(tensor=tensors().filter(is_known))
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
            r"cannot export .*: safetensors does not know torch\.complex128",
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


INDEX = "model.safetensors.index.json"
TIED_BYTES = {"embedding.weight": 60, "head.weight": 60, "convolution.weight": 432}


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("workers", [1, 3])
def test_shards_and_their_index(tmp_path, workers):
    model = Tied()
    save_once(tmp_path, 5, {"model": model.state_dict(), "ema": {"x": torch.ones(9)}}, workers)
    snapshot = tmp_path / "step-00000005"
    assert export(snapshot, tmp_path / "out", shard_bytes=130) == []
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    sizes = {key: value.nbytes for key, value in model.state_dict().items()}
    assert sizes.items() >= TIED_BYTES.items()
    assert index["metadata"] == {"total_size": sum(sizes.values())}
    assert index["weight_map"].keys() == model.state_dict().keys()
    files = sorted(set(index["weight_map"].values()))
    # [embedding, head], [convolution.weight: too large], [its bias, all of norm]
    assert files == [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(content(tmp_path / "out")) == [*files, INDEX]
    loaded = {}
    for file in files:
        shard = load_file(tmp_path / "out" / file)
        assert all(index["weight_map"][key] == file for key in shard)
        assert len(shard) == 1 or sum(value.nbytes for value in shard.values()) <= 130
        loaded |= shard
    assert exact(dict(sorted(loaded.items()))) == exact(dict(sorted(model.state_dict().items())))


STATE = {"weight": torch.arange(250.0), "bias": torch.arange(200.0)}


def test_shards_of_the_same_state_have_the_same_bytes(tmp_path):
    for workers in (1, 2):
        run = tmp_path / f"run-{workers}"
        save_once(run, 1, {"model": STATE}, workers)
        export(run / "step-00000001", tmp_path / f"out-{workers}", shard_bytes=1000)
        export(run / "step-00000001", tmp_path / f"dcp-{workers}", dcp=True)
    assert len(content(tmp_path / "out-1")) == 3
    assert content(tmp_path / "out-1") == content(tmp_path / "out-2")
    assert content(tmp_path / "dcp-1") == content(tmp_path / "dcp-2")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("workers", [1, 3])
def test_torch_loads_a_distributed_checkpoint(tmp_path, workers):
    model, other = Tied(), Tied()
    save_once(tmp_path, 5, {"model": model.state_dict()}, workers)
    assert export(tmp_path / "step-00000005", tmp_path / "dcp", dcp=True) == []
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert exact(state["model"]) == exact(model.state_dict())
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    assert {key: exact(value) for key, value in loaded.items()} == {
        key: exact(value) for key, value in model.state_dict().items()
    }


def test_export_reads_only_what_it_writes(tmp_path):
    # several segments of 4 MiB; the first has only `model`, the last only `other`
    state = {"model": {"x": torch.ones(2**21)}, "other": {"y": torch.zeros(2**21)}}
    save_once(tmp_path, 1, state | {"array": {"z": torch.ones(1), "numbers": np.ones(3)}})
    snapshot = tmp_path / "step-00000001"
    assert export(snapshot, tmp_path / "array.safetensors", "array") == ["numbers"]
    flip_byte(next(snapshot.glob("tensors*")), -1)
    export(snapshot, tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], torch.ones(2**21))
    for options in ({}, {"shard_bytes": 10}, {"dcp": True}):
        with pytest.raises(SnapshotError, match=r"step-00000001: tensors.* is damaged"):
            export(snapshot, tmp_path / "damaged", "other", **options)
    assert not list(tmp_path.glob("*damaged*"))


def test_export_holds_one_file_or_one_tensor_at_a_time(tmp_path, monkeypatch):
    save_once(tmp_path, 1, {"model": STATE})
    held = []

    class Memory(read.StateMemory):
        def __init__(self, manifest):
            super().__init__(manifest)
            held.append([*manifest.specs])

    monkeypatch.setattr(read, "StateMemory", Memory)
    for number, options in enumerate([{"shard_bytes": 1000}, {"dcp": True}]):
        export(tmp_path / "step-00000001", tmp_path / f"{number}", **options)
    assert held == [["model/weight"], ["model/bias"]] * 2
    # torch keeps the tensors of a file until it is written
    assert len(list((tmp_path / "1").glob("*.distcp"))) == len(STATE)


def test_directories_that_exist_are_not_overwritten(tmp_path):
    save_once(tmp_path, 1, {"model": STATE})
    folder = tmp_path / "out"
    folder.mkdir()
    for options in ({"shard_bytes": 1000}, {"dcp": True}):
        (folder / "config.json").write_text("{}")
        with pytest.raises(SnapshotError, match="is not empty; choose a new one"):
            export(tmp_path / "step-00000001", folder, **options)
        (folder / "config.json").unlink()
    with pytest.raises(SnapshotError, match=r"cannot export .*none/out"):
        export(tmp_path / "step-00000001", tmp_path / "none" / "out", dcp=True)
    export(tmp_path / "step-00000001", folder, shard_bytes=1000)
    assert INDEX in content(folder)
