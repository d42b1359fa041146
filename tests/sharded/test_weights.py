"""A model of which no worker ever has all parameters starts from files."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import samestep as ss
from samestep.errors import ConfigError, ModelError
from samestep.sharded.weights import INDEX, Weights
from tests.sharded.jobs import Block, Words, adamw, digest, train
from tests.workers import run_workers

CPU = torch.device("cpu")


class Normed(Words):
    """Also has buffers of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(20)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, words):
        x = self.embedding(words)
        x = self.norm(x.flatten(0, 1)).view_as(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def values():
    torch.manual_seed(5)
    net = Normed()
    nn.init.normal_(net.norm.running_mean)
    return net


def saved(folder, net, *, files=1):
    """Write the state of a model, one name per tied tensor; return its path."""
    state = {name: t for name, t in net.state_dict().items() if name != "head.weight"}
    if files == 1:
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    names = {name: f"part-{number % files}.safetensors" for number, name in enumerate(state)}
    for file in {*names.values()}:
        save_file({n: t for n, t in state.items() if names[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return folder


def trained(path, *, is_meta):
    torch.set_num_threads(1)
    with ss.init(lanes=4, progress=False) as run:
        if path is None:
            model = run.replicate(values())
        else:
            with torch.device("meta" if is_meta else "cpu"):
                net = Normed()
            model = run.replicate(net, shard="full", units=(Block,), weights=path)
            assert model.head.weight is model.embedding.weight
        train(run, model, adamw(run, model), steps=3)
        return digest(run, model)


@pytest.fixture(scope="module")
def expected():
    return run_workers(lambda: trained(None, is_meta=False), 1)


@pytest.mark.parametrize(
    ("workers", "is_meta"),
    [
        (3, True),
        pytest.param(1, True, marks=pytest.mark.long),
        pytest.param(2, False, marks=pytest.mark.long),
    ],
)
def test_a_model_on_the_meta_device_trains_as_its_values(workers, is_meta, tmp_path, expected):
    path = saved(tmp_path, values(), files=3)
    results = run_workers(lambda: trained(path, is_meta=is_meta), workers)
    assert results == expected * workers


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_rows_are_those_of_the_tensor(tmp_path_factory, shape, data):
    folder = tmp_path_factory.mktemp("rows")
    net = nn.ParameterDict({"w": nn.Parameter(torch.randn(shape, dtype=torch.float64))})
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    save_file(dict(net.state_dict()), folder / "w.safetensors")
    found = Weights(folder / "w.safetensors", net, CPU).rows("w", start, stop)
    assert torch.equal(found, net["w"].detach().reshape(-1)[start:stop])


def without(name):
    def write(folder):
        state = {n: t.clone() for n, t in Words().state_dict().items() if n != name}
        state.pop("head.weight", None)
        save_file(state, folder / "model.safetensors")

    return write


def with_one(name, tensor):
    def write(folder):
        state = {n: t.clone() for n, t in Words().state_dict().items()}
        save_file(state | {name: tensor}, folder / "model.safetensors")

    return write


def index(content):
    return lambda folder: (folder / INDEX).write_text(content)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (without("blocks.1.up.bias"), "it has no 'blocks.1.up.bias'"),
        (without("embedding.weight"), "it has no 'embedding.weight', 'head.weight'"),
        (with_one("more", torch.zeros(1)), "the model has no 'more'"),
        (with_one("blocks.0.up.bias", torch.zeros(3)), r"has shape \[3\] there, and \[41\]"),
        (with_one("blocks.0.up.bias", torch.zeros(41, 1)), r"has shape \[41, 1\] there"),
        (lambda _: None, "must be a safetensors file, or a directory"),
        (index("{"), "must have JSON"),
        (index("[" * 100_000), "must have JSON"),
        (index('{"weight_map": {"a": 1}}'), "must have JSON"),
        (index('{"weight_map": {"a": "../model.safetensors"}}'), "in other directories"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, write, message):
    write(tmp_path)
    with pytest.raises(ModelError, match=message):
        Weights(tmp_path, Words(), CPU)


class Angles(Words):
    """Has a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def refused(make, error, **options):
    with ss.init(lanes=4, progress=False) as run, pytest.raises(error) as caught:
        run.replicate(make(), **options)
    return str(caught.value)


def on_meta(kind):
    def make():
        with torch.device("meta"):
            return kind()

    return make


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (on_meta(Words), {}, ModelError, "is on the meta device, so it has no values"),
        (on_meta(Words), {"shard": "full"}, ModelError, "pass shard='full' and weights="),
        (Words, {"weights": "FILE"}, ConfigError, "weights= are those of a sharded model"),
        (on_meta(Angles), {"shard": "full", "weights": "FILE"}, ModelError, "buffer 'angles'"),
        (Words, {"shard": "full", "weights": "no/file"}, ModelError, "must be a safetensors file"),
        (Words, {"shard": "full", "weights": __file__}, ModelError, "worker 0: weights="),
    ],
)
def test_models_without_values_are_refused(tmp_path, make, options, error, message):
    if options.get("weights") == "FILE":
        options = {**options, "weights": saved(tmp_path, Words())}
    (text,) = run_workers(lambda: refused(make, error, **options), 1)
    assert message in text


def other_files(folder):
    with ss.init(lanes=4, progress=False) as run:
        path = folder / str(run.rank)
        path.mkdir()
        net = Words(blocks=3)
        saved(path, net)
        if run.rank == 1:
            path = path.parent / "missing"
        with pytest.raises(ModelError) as caught:
            run.replicate(net, shard="full", units=(Block,), weights=path)
        return str(caught.value)


def test_a_file_that_one_worker_lacks_is_an_error_on_all(tmp_path):
    first, second = run_workers(other_files, 2, tmp_path)
    assert first == second
    assert first.startswith("worker 1: weights=")
