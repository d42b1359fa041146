from __future__ import annotations

import argparse
import os
import pickle

import numpy as np
import pytest
import torch

from recipes.pretrained import PretrainedError, read_parameters


class ArrayOfPython2:
    """Pickled as Python 2 wrote arrays: with text for the bytes of the data."""

    def __init__(self, array):
        self.array = array

    def __reduce__(self):
        rebuild, arguments, state = self.array.__reduce__()
        return rebuild, arguments, (*state[:-1], state[-1].decode("latin1"))


def test_arrays_of_python_2_are_read(tmp_path):
    array = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"blobs": {"w": ArrayOfPython2(array)}}, 2))
    assert torch.equal(read_parameters(tmp_path / "a.pkl")["w"], torch.from_numpy(array))


def test_training_files_of_timm_are_read(tmp_path):
    """A file of timm's CheckpointSaver has the script's arguments and the optimizer's state."""
    model = torch.nn.Linear(2, 3)
    content = {
        "epoch": 3,
        "arch": "vit_tiny_patch16_224",
        "state_dict": model.state_dict(),
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "version": 2,
        "args": argparse.Namespace(model="vit_tiny_patch16_224", lr=0.1, mean=None, sizes=[3, 2]),
        "metric": 71.5,
    }
    torch.save(content, tmp_path / "model_best.pth.tar")
    read = read_parameters(tmp_path / "model_best.pth.tar")
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }


class Attack:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("suffix", ["pth", "pkl"])
def test_arguments_that_would_run_code_are_refused(suffix, tmp_path):
    file = tmp_path / f"a.{suffix}"
    content = {"state_dict": {}, "args": argparse.Namespace(evil=Attack(tmp_path / "mark"))}
    torch.save(content, file) if suffix == "pth" else file.write_bytes(pickle.dumps(content))
    with pytest.raises(PretrainedError, match=rf"a\.{suffix} cannot be read"):
        read_parameters(file)
    assert not (tmp_path / "mark").exists()
