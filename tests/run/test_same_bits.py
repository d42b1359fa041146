"""Many kinds of jobs give the same bits at any number of workers and devices."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import samestep as ss
from tests.jobs import events, image_job, images, left_by
from tests.needs import needs
from tests.run import kinds

# workers, and devices of each; eight lanes are 3, 3 and 2 on three devices
ALL = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 3), (2, 2))
SEVERAL_WORKERS, SEVERAL_DEVICES = ((1, 1), (3, 1)), ((1, 1), (2, 2))
long = pytest.mark.long


def fingerprint_of(job, folder, *, sizes=SEVERAL_WORKERS, **options):
    """Return the fingerprint of a job, which must be equal for all (workers, devices)."""
    first, *others = (
        left_by(
            job,
            folder / f"{workers}x{devices}",
            workers,
            **{"lanes": 8, "devices": ["cpu"] * devices, **options},
        )
        for workers, devices in sizes
    )
    for size, other in zip(sizes[1:], others, strict=True):
        assert other == first, size
    return first


OFTEN = {
    image_job: SEVERAL_DEVICES,
    kinds.three_samples_job: SEVERAL_WORKERS,
    kinds.experts_job: SEVERAL_DEVICES,
    kinds.buffers_job: SEVERAL_WORKERS,
    kinds.streams_job: SEVERAL_DEVICES,
    kinds.mixed_dtypes_job: SEVERAL_WORKERS,
}
SELDOM = [
    kinds.adversarial_job,
    kinds.words_job,
    kinds.grouped_job,
    kinds.accumulating_job,
    kinds.float64_job,
]


@pytest.mark.parametrize(
    ("job", "sizes"),
    [
        *(pytest.param(job, sizes, id=job.__name__) for job, sizes in OFTEN.items()),
        *(
            pytest.param(job, ALL, id=f"{job.__name__}, all sizes", marks=long)
            for job in [*OFTEN, *SELDOM]
        ),
    ],
)
def test_every_number_of_workers_and_devices_gives_the_same_bits(job, sizes, tmp_path):
    assert len(fingerprint_of(job, tmp_path, sizes=sizes)) > 10


@pytest.mark.parametrize(
    "job", [pytest.param(kinds.adversarial_job, marks=long), kinds.mixed_dtypes_job]
)
def test_workers_without_shared_memory_give_the_same_bits(job, tmp_path, monkeypatch):
    sharing = left_by(job, tmp_path / "sharing", 2, lanes=8)
    monkeypatch.delattr("os.memfd_create")
    assert left_by(job, tmp_path / "not sharing", 3, lanes=8) == sharing


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return what one worker leaves of the usual job."""
    return left_by(image_job, tmp_path_factory.mktemp("alone"), 1, lanes=8)


def test_bfloat16_autocast_gives_the_same_bits(alone, tmp_path):
    assert fingerprint_of(image_job, tmp_path, precision="bfloat16") != alone


class Casts(TorchDispatchMode):
    """Counts casts of a tensor of `shape` from float32."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("embeds", [False, True])
def test_lanes_and_blocks_cast_a_parameter_once(embeds):
    assert cast_once(embeds=embeds) == "cpu"


def cast_once(*, embeds):
    """Check the casts of a step and of an evaluation; return the kind of device."""

    def embed(model, batch):
        return model(batch[0].flatten(1))

    def loss_fn(model, batch):
        if torch.rand(()) < 0.5:
            with torch.no_grad():
                model(batch[0].flatten(1))
        return model(batch[0].flatten(1)).float().square().mean()

    def contrast(_, outputs):
        return outputs.float().square().mean()

    with ss.init(lanes=8, precision="bfloat16") as run:
        model = run.replicate(torch.nn.Linear(64, 10))
        (batch,) = run.batches(images(16), 16, steps=1)
        with Casts(model.weight.shape) as casts:
            if embeds:
                run.backward(contrast, model, batch, embed=embed)
            else:
                run.backward(loss_fn, model, batch)
        assert casts.count == 1
        assert model.weight.grad.abs().sum() > 0
        with Casts(model.weight.shape) as casts:
            run.evaluate(loss_fn, model, images(16), 4)
        assert casts.count == 1
        return run.device.type


SHARDS = pytest.mark.parametrize(
    ("unsharded", "sharded"),
    [
        (((1, 1), (3, 1)), ((3, 1), (2, 2))),
        pytest.param(ALL, ALL, id="all sizes", marks=long),
    ],
)


def sharding_changes_nothing(make_job, folder, unsharded, sharded):
    expected = fingerprint_of(make_job(sharded=False), folder / "unsharded", sizes=unsharded)
    assert fingerprint_of(make_job(sharded=True), folder / "sharded", sizes=sharded) == expected


@SHARDS
def test_sharding_gives_the_same_bits_for_a_vit_with_mixup_clipping_and_ema(
    unsharded, sharded, tmp_path
):
    sharding_changes_nothing(kinds.vit_job, tmp_path, unsharded, sharded)


@SHARDS
def test_a_loss_of_the_whole_batch_gives_the_same_bits(unsharded, sharded, tmp_path):
    sharding_changes_nothing(kinds.contrastive_job, tmp_path, unsharded, sharded)


def test_lanes_need_not_be_a_power_of_two(alone, tmp_path):
    assert fingerprint_of(image_job, tmp_path, sizes=((1, 1), (2, 3)), lanes=7) != alone


def test_another_seed_gives_different_bits(alone, tmp_path):
    other = left_by(image_job, tmp_path, 1, lanes=8, seed=1)
    same = {name for name in alone if alone[name] == other[name]}
    assert not any(name.startswith(("/model/head", "loss")) for name in same)


@pytest.mark.long
def test_private_generators_give_the_same_bits(tmp_path):
    without, with_two = (
        fingerprint_of(
            partial(kinds.private_generators_job, loader_workers=n),
            tmp_path / f"{n}-loaders",
            sizes=((1, 1), (2, 1), (1, 3)),
        )
        for n in (0, 2)
    )
    assert with_two == without


@pytest.mark.parametrize(
    ("without", "with_two"),
    [(((1, 1),), ((2, 1),)), pytest.param(ALL, ALL, id="all sizes", marks=long)],
)
def test_loader_processes_give_the_same_bits(without, with_two, tmp_path):
    left = [
        fingerprint_of(
            partial(kinds.augmented_job, loader_workers=n), tmp_path / f"{n}-loaders", sizes=sizes
        )
        for n, sizes in ((0, without), (2, with_two))
    ]
    assert left[0] == left[1]


def test_unused_parameter_is_unchanged(tmp_path):
    left_by(kinds.experts_job, tmp_path, 2, lanes=8)
    with ss.init(dir=tmp_path) as run:
        model, _ = kinds.experts_job(run).values()
        state = run._session.snapshots.tracked.objects["optimizer"].state_dict()["state"]
    updates = {
        name: int(state[number]["step"]) if number in state else 0
        for number, (name, _) in enumerate(model.named_parameters())
    }
    weights = {
        name.removesuffix(".weight"): number
        for name, number in updates.items()
        if name.endswith(".weight")
    }
    by_lane = sum(event["values"]["by_lane"] > 0 for event in events(tmp_path, "scalars"))
    assert weights == {"frozen": 0, "always": 8, "by_lane": by_lane, "by_step": 4, "never": 0}
    assert 0 < by_lane < 8


@pytest.mark.long
@pytest.mark.timeout(600)  # the first compilation takes minutes on a busy machine
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_model_gives_the_same_bits(backend, tmp_path):
    if backend == "inductor":
        needs("g++")
    fingerprint_of(
        kinds.compiled_job(backend), tmp_path, sizes=((1, 1), (2, 1), (1, 2)), timeout=500
    )
