"""Checkpoints of torch.distributed.checkpoint are read without running their code.

That torch reads what samestep writes is in test_export.py.
"""

from __future__ import annotations

import io
import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.fsdp import fully_shard

import samestep as ss
from samestep.errors import SnapshotError
from samestep.snapshot import export
from samestep.snapshot.dcp import METADATA
from tests.faults import flip_byte
from tests.snapshot.exact import exact, tensors
from tests.snapshot.saving import save_once
from tests.workers import run_workers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state, folder):
    checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.last = nn.Linear(5, 7, bias=False)


def test_a_training_state_keeps_its_names_and_bits(tmp_path):
    model = Model().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    restored = ss.read_dcp(save(state, tmp_path / "checkpoint"))
    assert sorted(restored) == ["model", "optimizer"]  # a number is no tensor
    assert exact(restored["model"]) == exact(dict(model.state_dict()))
    expected = {str(key): value for key, value in state["optimizer"]["state"].items()}
    assert exact(restored["optimizer"]) == exact({"state": expected})


@settings(max_examples=10, deadline=None)
@given(st.dictionaries(st.text("ab.-", min_size=1, max_size=5), tensors(), min_size=1))
def test_any_tensor_is_read(tmp_path_factory, state):
    folder = save(state, tmp_path_factory.mktemp("any"))
    restored = ss.read_dcp(folder)
    assert {key: exact(restored[key]) for key in state} == {
        key: exact(value) for key, value in state.items()
    }


def test_a_checkpoint_of_python_3_11_2_is_read(tmp_path, monkeypatch):
    kind = _MEM_FORMAT_ENCODING
    monkeypatch.setattr(kind, "__reduce_ex__", lambda self, _: (getattr, (kind, self._name_)))
    folder = save({"weight": torch.ones(2)}, tmp_path / "checkpoint")
    assert b"getattr" in (folder / METADATA).read_bytes()
    assert ss.read_dcp(folder)["weight"].tolist() == [1.0, 1.0]


def test_what_samestep_writes_is_read(tmp_path):
    model = Model()
    save_once(tmp_path, 1, {"model": model.state_dict()}, 2)
    export(tmp_path / "step-00000001", tmp_path / "out", dcp=True)
    restored = ss.read_dcp(tmp_path / "out")["model"]
    assert exact(dict(sorted(restored.items()))) == exact(dict(sorted(model.state_dict().items())))


def sharded(folder):
    """Save a model that is sharded over the processes; return the whole parameters."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    parameters = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    dist.destroy_process_group()
    return parameters


def test_shards_of_several_processes_are_put_together(tmp_path):
    parameters = run_workers(sharded, 2, tmp_path / "checkpoint")[0]
    assert len(list((tmp_path / "checkpoint").glob("*.distcp"))) == 2
    restored = ss.read_dcp(tmp_path / "checkpoint")["model"]
    assert exact(dict(sorted(restored.items()))) == exact(dict(sorted(parameters.items())))


class Evil:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_of_the_metadata_runs(tmp_path):
    folder = save({"x": torch.ones(1)}, tmp_path / "checkpoint")
    evil = Metadata({}, planner_data=Evil(tmp_path / "made"))
    (folder / METADATA).write_bytes(pickle.dumps(evil))
    with pytest.raises(
        SnapshotError, match=r"names posix\.mkdir, which torch does not write there"
    ):
        ss.read_dcp(folder)
    assert not (tmp_path / "made").exists()
    pickle.loads((folder / METADATA).read_bytes())
    assert (tmp_path / "made").exists()  # so it was an attack


def test_no_code_of_the_data_runs(tmp_path):
    folder = save({"x": torch.ones(1)}, tmp_path / "checkpoint")
    file, data = next(folder.glob("*.distcp")), io.BytesIO()
    torch.save(Evil(tmp_path / "made"), data)
    size = file.stat().st_size
    assert len(data.getvalue()) <= size
    file.write_bytes(data.getvalue().ljust(size, b"\0"))
    with pytest.raises(SnapshotError):
        ss.read_dcp(folder)
    assert not (tmp_path / "made").exists()


def changed(folder, change):
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def stored(**fields):
    def change(metadata):
        for info in metadata.storage_data.values():
            vars(info).update(fields)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (stored(relative_path="../other"), r"names a file outside of it, \.\./other"),
        (stored(relative_path="/etc/passwd"), r"names a file outside of it, /etc/passwd"),
        (stored(relative_path="none"), r"No such file .*none"),
        (stored(length=10**6), r"\.distcp is truncated"),
        (stored(transform_descriptors=["zstd"]), r"is compressed \(zstd\); save it without"),
        (lambda metadata: metadata.storage_data.clear(), r"parts of 'x' are missing"),
        (
            lambda metadata: vars(metadata.state_dict_metadata["x"]).update(size=torch.Size([3])),
            r"parts of 'x' are missing",
        ),
        (
            lambda metadata: vars(metadata.state_dict_metadata["x"]).update(size=torch.Size([1])),
            r"a part of shape \[2\] at \[0\] does not fit",
        ),
        (
            lambda metadata: vars(metadata.state_dict_metadata["x"]).update(size=[2**40]),
            r"its tensors have 4398046511104 bytes, but its files only \d+",
        ),
    ],
)
def test_a_fault_is_named(tmp_path, change, message):
    folder = save({"x": torch.ones(2)}, tmp_path / "checkpoint")
    changed(folder, change)
    with pytest.raises(
        SnapshotError, match=rf"checkpoint .*checkpoint cannot be read: .*{message}"
    ):
        ss.read_dcp(folder)


def test_other_directories_are_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(SnapshotError, match=r"there is no checkpoint .*expected its file"):
            ss.read_dcp(folder)
    (tmp_path / METADATA).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(SnapshotError, match="cannot be read"):
        ss.read_dcp(tmp_path)


def test_metadata_that_would_take_gigabytes_is_refused(tmp_path):
    number = (2**28).to_bytes(4, "little")  # of an entry in a table that is as long
    (tmp_path / METADATA).write_bytes(b"\x80\x02]r" + number + b".")
    with pytest.raises(SnapshotError, match="its metadata is damaged"):
        ss.read_dcp(tmp_path)


def test_damaged_metadata_is_an_error_or_harmless(tmp_path):
    folder = save({"x": torch.arange(6.0).view(2, 3)}, tmp_path / "checkpoint")
    content, refused = (folder / METADATA).read_bytes(), 0
    for index in range(0, len(content), 5):
        (folder / METADATA).write_bytes(content)
        flip_byte(folder / METADATA, index)
        try:
            ss.read_dcp(folder)
        except SnapshotError:
            refused += 1
    assert refused > len(content) / 10
