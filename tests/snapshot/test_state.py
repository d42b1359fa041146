from __future__ import annotations

import collections
import enum
import functools
import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler, swa_utils

from samestep.errors import SnapshotError
from samestep.snapshot.state import DEEPEST, DTYPES, canonical, copy_plain, flatten, merge, restore
from samestep.step.layout import TensorSlice
from tests.snapshot.exact import exact, names, states

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
TAGS = [
    "dict", "OrderedDict", "Counter", "list", "tuple", "torch.Size", "set", "frozenset", "int",
    "float", "complex", "str", "bytes",
    "torch.dtype", "torch.device", "numpy", "numpy.ndarray", "tensor", "module",
]  # fmt: skip
tagged_values = st.recursive(
    json_values
    | st.sampled_from(
        ["", "00", "<f4:00000000", "|O:00", "<M8[x]:00", "f4,f4:00", "float32", "cuda:-7"]
    ),
    lambda inner: (
        st.lists(inner) | st.builds(lambda tag, value: {tag: value}, st.sampled_from(TAGS), inner)
    ),
)


def round_trip(state: Any) -> Any:
    plain, tensors = flatten(state)
    return restore(json.loads(canonical(plain)), tensors.__getitem__)


def optimizers_and_schedulers() -> dict[str, Any]:
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    kinds = [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.LBFGS,
    ]
    objects: dict[str, Any] = {kind.__name__: kind(parameters, lr=0.1) for kind in kinds}
    for optimizer in objects.values():
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(lambda: torch.tensor(1.0))
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    schedulers = [
        lr_scheduler.LambdaLR(sgd, lambda _: 1.0),
        lr_scheduler.StepLR(sgd, 3),
        lr_scheduler.MultiStepLR(sgd, [2, 4, 4]),
        lr_scheduler.CosineAnnealingLR(sgd, 10),
        lr_scheduler.CosineAnnealingWarmRestarts(sgd, 10),
        lr_scheduler.ReduceLROnPlateau(sgd),
        lr_scheduler.CyclicLR(sgd, 0.1, 0.2),
        lr_scheduler.OneCycleLR(sgd, 0.1, 10),
        lr_scheduler.PolynomialLR(sgd),
        lr_scheduler.SequentialLR(
            sgd, [lr_scheduler.ConstantLR(sgd), lr_scheduler.ExponentialLR(sgd, 0.9)], [3]
        ),
        lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(sgd), lr_scheduler.StepLR(sgd, 2)], sgd
        ),
        swa_utils.SWALR(sgd, 0.1),
    ]
    objects |= {type(scheduler).__name__: scheduler for scheduler in schedulers}
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    return {
        **objects,
        "model": model,
        "average": swa_utils.AveragedModel(model),
        "scaler": torch.amp.GradScaler("cpu"),
    }


@given(states)
def test_round_trip_is_exact(state):
    assert exact(round_trip(state)) == exact(state)


@pytest.mark.parametrize(("name", "item"), optimizers_and_schedulers().items())
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_states_of_torch_objects_survive(name, item):
    state = item.state_dict()
    assert exact(round_trip(state)) == exact(state)
    item.load_state_dict(round_trip(state))
    assert exact(item.state_dict()) == exact(state)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3)])
def test_tensors_of_every_dtype_survive(dtype, shape):
    tensor = (
        torch.zeros(64 * dtype.itemsize, dtype=torch.uint8)
        .view(dtype)[: torch.Size(shape).numel()]
        .view(shape)
    )
    assert exact(round_trip(tensor)) == exact(tensor)


def test_numbers_that_python_does_not_print_survive():
    assert round_trip(10**5000) == 10**5000


def test_tensors_are_not_copied_and_lose_their_graph():
    parameter = torch.nn.Parameter(torch.ones(3))
    tensors = flatten({"model": {"weight": parameter}})[1]
    assert tensors["model/weight"].data_ptr() == parameter.data_ptr()
    assert not tensors["model/weight"].requires_grad


def test_lazy_conjugates_are_written_out():
    tensor = torch.tensor([1 + 2j]).conj()
    assert flatten({"a": tensor})[1]["a"].numpy().tolist() == [1 - 2j]


def test_names_are_paths():
    state = {
        "model": {"0.weight": torch.ones(1)},
        "optimizer": {"state": {0: {"step": torch.ones(())}}, "list": [torch.ones(2)]},
    }
    assert set(flatten(state)[1]) == {
        "model/0.weight",
        "optimizer/state/0/step",
        "optimizer/list/0",
    }


@given(st.lists(st.lists(names, min_size=1, max_size=3), unique_by=repr))
def test_no_two_places_share_a_name(paths):
    tensor = torch.ones(1)
    used = set()
    for path in paths:
        used |= set(
            flatten(functools.reduce(lambda inner, key: {key: inner}, reversed(path), tensor))[1]
        )
    assert len(used) == len({canonical(flatten(path)[0]) for path in paths})


class Point(NamedTuple):
    x: int


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda _: 1, "function"),
        (object(), "object"),
        (Colour.RED, "Colour"),
        (collections.defaultdict(int), "defaultdict"),
        (Point(1), "Point"),
        (np.array([object()]), "ndarray"),
        (np.zeros(2, dtype="f4,f4"), "ndarray"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.empty(2, dtype=torch.uint3), "uint3"),
    ],
)
def test_unsupported_values_are_named_by_path(value, kind):
    with pytest.raises(
        SnapshotError, match=rf"^scheduler/lr_lambdas/0 is a .*{kind}.*give the object a state_dict"
    ):
        flatten({"scheduler": {"lr_lambdas": [value]}})


@pytest.mark.parametrize("state", [{"a": {torch.ones(1): 1}}, {"a": {torch.ones(1)}}])
def test_tensors_cannot_be_keys(state):
    with pytest.raises(SnapshotError, match=r"^a/(key|item) is a tensor in a key"):
        flatten(state)


def test_plain_information_has_no_tensors():
    with pytest.raises(SnapshotError, match="info/a is a tensor"):
        copy_plain({"a": torch.ones(1)}, "info")
    info = {"a": [1, {2: (3,)}]}
    assert exact(copy_plain(info, "info")) == exact(info)
    assert copy_plain(info, "info")["a"] is not info["a"]


def test_a_state_that_contains_itself_is_rejected():
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(
        SnapshotError, match=f"self/self/self/... must be nested at most {DEEPEST} levels"
    ):
        flatten(state)


def test_the_deepest_state_survives():
    state: Any = torch.ones(1)
    for _ in range(DEEPEST):
        state = {"a": (state, frozenset())}
    with pytest.raises(SnapshotError, match="must be nested at most"):
        flatten(state)
    state = functools.reduce(lambda inner, _: {"a": inner}, range(DEEPEST), torch.ones(1))
    assert exact(round_trip(state)) == exact(state)


def test_slices_must_lie_inside_their_tensor():
    for values, start in [(torch.ones(3), 4), (torch.ones(3), -1), (torch.ones(1, 3), 0)]:
        with pytest.raises(SnapshotError, match="must be a 1-D slice inside of shape"):
            flatten({"a": TensorSlice(values, (2, 3), start, (0, 1))})


@given(tagged_values | json_values)
def test_restoring_garbage_raises_snapshot_errors_only(plain):
    def tensor(name):
        return {"": torch.zeros(4, dtype=torch.uint8)}[name]

    try:
        restore(plain, tensor)
    except SnapshotError as error:
        # no other error may occur, but garbage may also be valid
        assert str(error)  # noqa: PT017


def test_duplicate_keys_are_rejected():
    with pytest.raises(SnapshotError, match="duplicate key"):
        restore({"dict": [[1, "a"], [True, "b"]]}, {}.__getitem__)


@given(
    st.dictionaries(st.integers(0, 9), st.dictionaries(st.text(max_size=2), st.integers())),
    st.data(),
)
def test_merge_combines_parts(state, data):
    parts = [{key: {} for key in state}, {key: {} for key in state}]
    for key, inner in state.items():
        for name, value in inner.items():
            for part in data.draw(st.sampled_from([parts[:1], parts[1:], parts])):
                part[key][name] = value
    merged = restore(merge(*(flatten(part)[0] for part in parts)), {}.__getitem__)
    assert merged == state
    assert type(merged) is dict


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": [1]}, {"a": [2]}),
        ({"a": {}}, {"a": []}),
        ({"a": 1}, {"a": True}),
        ({"a": 0.0}, {"a": -0.0}),
    ],
)
def test_merge_rejects_different_values(first, second):
    with pytest.raises(SnapshotError, match=r"top/a must be equal on all workers"):
        merge(flatten({"top": first})[0], flatten({"top": second})[0])
