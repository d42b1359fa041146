"""Data in shards: a local random order, and a bounded cache that the workers of a host share."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import tracemalloc
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import samestep as ss
from samestep import storage
from samestep.data import shards
from samestep.data.orders import ShardOrder, ShardPlan
from samestep.data.shards import ShardCache, ShardedDataset
from samestep.errors import ConfigError, DataError
from samestep.step.layout import lanes_of
from tests.data.test_own_order import read_by
from tests.data.test_permutation import assert_uniform
from tests.data.test_plan import assert_pure, lane_batches, samples
from tests.s3 import s3_server
from tests.workers import run_workers, try_workers

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any)
LANES = st.integers(4, 12)
LINE = 8  # bytes of a sample


def make_plan(sizes, window, batch_size=5, lanes=4, seed=0, **options):
    order = ShardOrder(sizes, window)
    return ShardPlan(sum(sizes), batch_size, lanes, seed, order=order, **options)


PLANS = st.builds(
    lambda *arguments: partial(make_plan, *arguments),
    SIZES,
    st.integers(1, 5),
    st.integers(1, 60),
    LANES,
    st.integers(0, 2**63 - 1),
)


@given(PLANS, st.integers(0, 2**40))
def test_every_sample_is_used_once_an_epoch(make, epoch):
    plan = make()
    batches = lane_batches(plan, epoch)
    assert sorted(samples(batches)) == list(range(plan.size))
    assert [sum(map(len, step)) for step in batches[:-1]] == [plan.batch_size] * (len(batches) - 1)
    assert_pure(plan, make(), batches, epoch)  # any position, as after a resume


@given(PLANS)
def test_a_step_has_the_same_samples_at_any_number_of_workers(make):
    alone = read_by(1, make())
    for workers in (2, 3, 4):
        assert read_by(workers, make()) == alone


@given(PLANS)
def test_drop_last_drops_only_samples_that_fill_no_batch(make):
    plan = make()
    if plan.batch_size > plan.size:
        return
    dropped = lane_batches(make(drop_last=True), 1)
    used = samples(dropped)
    assert len(set(used)) == len(used) == plan.size // plan.batch_size * plan.batch_size


@given(PLANS, st.integers(1, 4))
def test_a_lane_reads_two_windows_at_a_time_and_a_worker_its_share_of_the_shards(make, workers):
    plan = make()
    sizes, window = plan._sizes, plan._window
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    batches = lane_batches(plan, 0)
    read = Counter()
    for lane in range(plan.lanes):
        used = [shard_of[index] for step in batches for index in step[lane]]
        last = {shard: number for number, shard in enumerate(used)}
        first = {shard: number for number, shard in reversed(list(enumerate(used)))}
        for number in range(len(used)):
            in_use = [shard for shard in first if first[shard] <= number <= last[shard]]
            assert len(in_use) <= window
    for rank in range(workers):
        own_lanes = lanes_of(rank, workers, plan.lanes)
        read.update(
            {shard_of[index] for step in batches for lane in own_lanes for index in step[lane]}
        )
    shared = sum(number - 1 for number in read.values())
    assert shared <= workers - 1  # only shards at the ends of the workers' lanes


@pytest.mark.long
def test_each_sample_is_equally_likely_at_each_position():
    plan = make_plan([5] * 32, window=2, batch_size=16)
    counts = np.zeros((plan.size, 10), dtype=np.int64)
    epochs = 1000
    for epoch in range(epochs):
        counts[samples(lane_batches(plan, epoch)), np.arange(plan.size) * 10 // plan.size] += 1
    assert counts.sum() == epochs * plan.size
    for sample in range(plan.size):
        assert_uniform(counts[sample], 9)


def test_epochs_and_seeds_have_other_orders_and_plans_are_told_apart():
    orders = [
        samples(lane_batches(make_plan([4] * 8, 2, seed=seed), epoch))
        for seed in range(2)
        for epoch in range(3)
    ]
    assert len(set(map(tuple, orders))) == 6
    plans = [make_plan([4] * 8, 2), make_plan([4] * 8, 3), make_plan([3, 5] * 4, 2)]
    assert len({str(plan.describe()) for plan in plans}) == 3


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ShardOrder([1, -1]), DataError, "sizes must be at least 0, got -1 for shard 1"),
        (lambda: ShardOrder([0.5]), DataError, "sizes must be .* of whole numbers, got list of"),
        (lambda: ShardOrder([1], 0), ConfigError, "window must be a whole number of at least 1"),
        (
            lambda: ShardPlan(9, 2, 2, 0, order=ShardOrder([4, 4])),
            DataError,
            "order has shards with 8 samples in all for a data set with 9; pass",
        ),
        (lambda: ShardedDataset(["a"], open), DataError, "shards must be a dict of the number"),
        (lambda: ShardedDataset({"a": 1.5}, open), DataError, "sizes must be .* whole numbers"),
        (
            lambda: ShardedDataset({"a": 1}, open, max_open=0),
            ConfigError,
            "max_open must be a whole number of at least 1, got 0",
        ),
        (
            lambda: ShardedDataset({"s3://b/a.tar": 1}, open),
            ConfigError,
            "s3://b/a.tar needs cache_dir, a local folder for copies of shards",
        ),
    ],
)
def test_unusable_arguments_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


class Lines:
    """The lines of a shard, read from an open file; `opened` counts the files that are open."""

    opened = 0

    def __init__(self, path):
        self.file = path.open("rb")
        type(self).opened += 1

    def __len__(self):
        return os.fstat(self.file.fileno()).st_size // LINE

    def __getitem__(self, number):
        self.file.seek(number * LINE)
        return int(self.file.read(LINE))

    def close(self):
        self.file.close()
        type(self).opened -= 1


def write_shards(directory, sizes):
    """Write shards whose samples are their indices; return their sizes by URL."""
    directory.mkdir(parents=True, exist_ok=True)
    start, sizes_by_url = 0, {}
    for number, size in enumerate(sizes):
        path = directory / f"{number:02}.txt"
        path.write_text("".join(f"{start + line:0{LINE}}" for line in range(size)))
        start += size
        sizes_by_url[f"file://{path}"] = size
    return sizes_by_url


def content(cache):
    """Return the bytes of the files in a cache, by name; others may rename and remove them."""
    sizes = {}
    for path in cache.iterdir():
        with suppress(FileNotFoundError):
            if path.is_file():
                sizes[path.name] = path.stat().st_size
    return sizes


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """A function that returns how often each shard was downloaded, by any process."""
    log, read = tmp_path / "downloads", storage.Storage.read

    def logged(self, path, start, stop):
        with log.open("a") as file:
            file.write(f"{path}\n")
        return read(self, path, start, stop)

    monkeypatch.setattr(storage.Storage, "read", logged)
    return lambda: Counter(log.read_text().split())


def close(dataset):
    for lines in dataset._opened.values():
        lines.close()


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 30),
    st.integers(1, 4),
    st.data(),
)
def test_any_access_gives_the_samples_within_the_limits(
    tmp_path_factory, sizes, max_lines, max_open, data
):
    directory = tmp_path_factory.mktemp("shards")
    cache = directory / "cache"
    try:
        dataset = ShardedDataset(
            write_shards(directory / "far", sizes),
            Lines,
            cache_dir=cache,
            max_bytes=max_lines * LINE,
            max_open=max_open,
        )
        indices = st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=9)
        for batch in data.draw(st.lists(indices, max_size=9)):
            assert dataset.__getitems__(batch) == batch
            assert len(dataset._opened) <= max_open
            assert Lines.opened == len(dataset._opened)
            assert sum(content(cache).values()) <= (max_lines + max(sizes)) * LINE
        close(dataset)
    finally:
        shutil.rmtree(directory)


def test_the_least_recently_used_shard_is_removed(tmp_path, downloads):
    urls = write_shards(tmp_path / "far", [2] * 4)
    cache = tmp_path / "cache"
    with closing_all(ShardedDataset(urls, Lines, cache_dir=cache, max_bytes=4 * LINE)) as dataset:
        dataset._max_open = 1
        for index in (0, 2, 0, 4, 0, 6):
            assert dataset[index] == index
        assert downloads() == {f"{number:02}.txt": 1 for number in range(4)}
        assert sorted(name[-6:] for name in content(cache)) == ["00.txt", "03.txt"]


def closing_all(dataset):
    dataset.close = partial(close, dataset)
    return closing(dataset)


def test_local_paths_are_read_in_place_and_other_sequences_work(tmp_path):
    write_shards(tmp_path, [2, 0, 3])
    paths = {path: path.stat().st_size // LINE for path in sorted(tmp_path.iterdir())}
    dataset = ShardedDataset(paths, lambda path: path.read_text().split("\n")[0])
    assert len(dataset.sizes) == 3
    with pytest.raises(DataError, match=r"00.txt has 16 samples, expected 2; it is truncated or"):
        dataset[0]
    with closing_all(ShardedDataset(paths, Lines)) as dataset:
        assert list(dataset) == list(range(5))
        assert dataset[-1] == 4
        with pytest.raises(IndexError):
            dataset[5]
        assert pickle.loads(pickle.dumps(dataset))._opened == {}


def test_workers_that_need_a_shard_at_once_download_it_once(tmp_path, downloads):
    urls = write_shards(tmp_path / "far", [10] * 6)
    cache = tmp_path / "cache"

    def body():
        dataset = ShardedDataset(urls, Lines, cache_dir=cache)
        with ss.init(lanes=4) as run:
            run.barrier("before the first access")
            return dataset.__getitems__(list(range(60)))

    assert run_workers(body, 4) == [list(range(60))] * 4
    assert downloads() == {f"{number:02}.txt": 1 for number in range(6)}


def test_workers_share_a_cache_that_is_smaller_than_what_they_need(tmp_path):
    urls = write_shards(tmp_path / "far", [10] * 6)
    cache = tmp_path / "cache"
    limit = 30 * LINE

    def body():
        rng = np.random.default_rng(os.getpid())
        dataset = ShardedDataset(urls, Lines, cache_dir=cache, max_bytes=limit, max_open=1)
        sizes = []
        for _ in range(30):
            indices = rng.integers(60, size=8).tolist()
            assert dataset.__getitems__(indices) == indices
            with dataset._cache._lock("locks/room", shards.fcntl.LOCK_EX):
                sizes.append(sum(content(cache).values()))
        return max(sizes)

    assert max(run_workers(body, 3)) <= limit + 10 * LINE


def test_a_copy_that_is_renamed_while_the_cache_is_listed_counts(tmp_path, monkeypatch):
    urls = list(write_shards(tmp_path / "far", [10] * 3))
    cache = ShardCache(tmp_path / "cache", 20 * LINE)
    cache.fetch(urls[0])
    (finished,) = content(tmp_path / "cache")
    download = tmp_path / "cache" / f"{finished}.tmp"
    (tmp_path / "cache" / finished).rename(download)
    iterdir = Path.iterdir

    def rename_afterwards(directory):
        paths = list(iterdir(directory))
        if download.exists():
            download.rename(tmp_path / "cache" / finished)
        return paths

    monkeypatch.setattr(Path, "iterdir", rename_afterwards)
    for url in urls[1:]:
        cache.fetch(url)
    assert not download.exists()
    assert len(content(tmp_path / "cache")) == 2


def train(urls, cache, directory, steps=None, loader_workers=0):
    """Return the samples of each step of this process, by step and lane."""
    by_step = {}
    dataset = ShardedDataset(urls, Lines, cache_dir=cache, max_bytes=40 * LINE, max_open=4)
    with ss.init(lanes=4, dir=directory, resume="auto") as run:
        run.track(nothing=Nothing())
        loop = run.batches(
            dataset,
            6,
            epochs=2,
            steps=steps,
            order=ss.ShardOrder(dataset.sizes, window=2),
            loader_workers=loader_workers,
        )
        for batch in loop:
            for lane, data in batch.lane_batches():
                by_step[f"{loop.step} {lane}"] = data.tolist()
    return by_step


class Nothing:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_run_uses_each_sample_once_and_resumes_at_the_exact_sample(tmp_path):
    urls = write_shards(tmp_path / "far", [7, 3, 9, 5, 6, 8, 2, 4, 9, 5])

    def run(workers, name, **options):
        parts = run_workers(
            lambda: train(urls, tmp_path / "cache", tmp_path / name, **options), workers
        )
        return {place: data for part in parts for place, data in part.items()}

    alone = run(1, "alone", steps=None)
    epoch = [
        index for place, data in alone.items() if int(place.split()[0]) <= 10 for index in data
    ]
    assert sorted(epoch) == list(range(58))
    assert run(2, "two", steps=None, loader_workers=2) == alone
    first = run(3, "parts", steps=7)
    second = run(2, "parts", steps=None)
    assert json.dumps({**first, **second}, sort_keys=True) == json.dumps(alone, sort_keys=True)
    assert min(int(place.split()[0]) for place in second) == 8


def send_files(directory, url):
    for path in directory.iterdir():
        storage.Storage(url).send(path, path.name)


@pytest.mark.long
def test_a_real_s3_gives_the_same_samples_as_local_files(tmp_path):
    urls = write_shards(tmp_path / "far", [7, 3, 9, 5, 6, 8, 2, 4, 9, 5])
    folder = "s3://bucket/data"
    remote_urls = {f"{folder}/{url.rpartition('/')[2]}": size for url, size in urls.items()}

    def run(workers, urls, name, **options):
        directory, cache = tmp_path / name, tmp_path / f"{name} cache"
        return run_workers(train, workers, urls, cache, directory, 12, 1, **options)

    (local,) = run(1, urls, "local")
    with s3_server(tmp_path) as server:
        options = {"environment": server.environment}
        run_workers(send_files, 1, tmp_path / "far", folder, **options)
        first, second = run(2, remote_urls, "remote", **options)
        assert {**first, **second} == local
        missing = {f"{folder}/none.txt": 2}
        (refused,) = try_workers(train, 1, missing, tmp_path / "c", tmp_path / "d", 1, **options)
    assert "shard s3://bucket/data/none.txt is missing; check its URL" in str(refused.error)
    copies = content(tmp_path / "remote cache")
    assert 0 < sum(copies.values()) <= 49 * LINE  # the limit and a shard


def test_a_forked_process_opens_its_own_files(tmp_path):
    urls = write_shards(tmp_path / "far", [4])
    with closing_all(ShardedDataset(urls, Lines, cache_dir=tmp_path / "cache")) as dataset:
        assert dataset[1] == 1
        (opened_shard,) = dataset._opened.values()
        position = opened_shard.file.tell()
        assert run_workers(lambda: [dataset[3], dataset[2]], 2) == [[3, 2]] * 2
        assert os.lseek(opened_shard.file.fileno(), 0, os.SEEK_CUR) >= position
        assert dataset[0] == 0


def test_a_shard_that_changed_since_the_first_download_is_refused(tmp_path):
    urls = write_shards(tmp_path / "far", [2, 2])
    cache = tmp_path / "cache"
    dataset = ShardedDataset(urls, Lines, cache_dir=cache, max_bytes=2 * LINE, max_open=1)
    with closing_all(dataset):
        assert [dataset[0], dataset[2]] == [0, 2]  # removes the first shard
        (tmp_path / "far/00.txt").write_text(f"{7:0{LINE}}{8:0{LINE}}")
        with pytest.raises(DataError, match=r"00.txt has changed since it was first fetched; rest"):
            dataset[0]
        assert not list(cache.glob("*.tmp"))


@pytest.mark.parametrize("kept", [0, LINE])
def test_a_truncated_shard_is_refused(tmp_path, kept):
    urls = write_shards(tmp_path / "far", [2])
    os.truncate(tmp_path / "far/00.txt", kept)
    dataset = ShardedDataset(urls, Lines, cache_dir=tmp_path / "cache")
    words = rf"00.txt has {kept // LINE} samples, expected 2; it is truncated or was replaced"
    with pytest.raises(DataError, match=words):
        dataset[1]
    assert Lines.opened == 0


def test_errors_name_the_shard(tmp_path):
    urls = write_shards(tmp_path / "far", [2])
    cached = partial(ShardedDataset, cache_dir=tmp_path / "cache")
    with pytest.raises(
        DataError, match=r"cannot read shard file://.*00.txt: ValueError: odd; check"
    ):
        cached(urls, mock.Mock(side_effect=ValueError("odd")))[0]
    with pytest.raises(DataError, match=r"cannot read sample 1 of shard .*00.txt: TypeError: '<'"):
        cached(urls, lambda path: Broken())[1]
    (url,) = urls
    with pytest.raises(DataError, match=r"shard file://.*none.txt is missing; check its URL"):
        cached({url.replace("00", "none"): 2}, Lines)[0]


class Broken:
    def __len__(self):
        return 2

    def __getitem__(self, number):
        raise TypeError("'<'")


def test_what_a_killed_download_left_is_replaced(tmp_path):
    urls = write_shards(tmp_path / "far", [2, 2])
    cache = tmp_path / "cache"
    dataset = ShardedDataset(urls, Lines, cache_dir=cache, max_bytes=4 * LINE, max_open=1)
    with closing_all(dataset):
        assert [dataset[0], dataset[2]] == [0, 2]
        for path in [path for path in cache.iterdir() if path.is_file()]:
            path.rename(path.with_name(f"{path.name}.tmp"))
        assert [dataset[0], dataset[2]] == [0, 2]
        assert len(content(cache)) == 2
        for path in [path for path in cache.iterdir() if path.is_file()]:
            os.truncate(path, 3)
        assert [dataset[0], dataset[2]] == [0, 2]
        assert sum(content(cache).values()) == 4 * LINE


def test_two_downloads_do_not_wait_for_each_other_to_make_room(tmp_path, monkeypatch):
    first, second = write_shards(tmp_path / "far", [1, 1])
    cache, size, lock = ShardCache(tmp_path / "cache", 1), storage.Storage.size, ShardCache._lock
    cache.fetch(first)
    (copy,) = (path for path in (tmp_path / "cache").iterdir() if path.is_file())
    copy.rename(copy.with_name(f"{copy.name}.tmp"))  # as a killed download leaves it
    asked, is_asked_twice, is_locked = [], threading.Event(), threading.Event()

    def size_later(self, path):
        if first.endswith(path):
            is_locked.set()
            is_asked_twice.wait(300)
        return size(self, path)

    def noted_lock(self, name, how):
        if how != shards.fcntl.LOCK_SH and name == f"locks/{copy.name}":
            asked.append(name)
            if len(asked) == 2:
                is_asked_twice.set()
        return lock(self, name, how)

    monkeypatch.setattr(storage.Storage, "size", size_later)
    monkeypatch.setattr(ShardCache, "_lock", noted_lock)
    downloads = [
        threading.Thread(target=cache.fetch, args=(url,), daemon=True) for url in (first, second)
    ]
    downloads[0].start()
    assert is_locked.wait(300)
    downloads[1].start()
    for download in downloads:
        download.join(300)
        assert not download.is_alive()
    assert is_asked_twice.is_set()


def test_a_full_disk_is_reported(tmp_path):
    urls = write_shards(tmp_path / "far", [2])
    full = OSError(28, "No space left on device")
    dataset = ShardedDataset(urls, Lines, cache_dir=tmp_path / "cache")
    words = r"cannot fetch shard .* into the cache: .*No space left"
    with mock.patch.object(shards, "sync", side_effect=full), pytest.raises(DataError, match=words):
        dataset[0]
    assert not content(tmp_path / "cache")


def test_an_order_of_10_billion_samples_takes_a_few_bytes_per_shard():
    sizes = np.full(10_000, 10**6)
    tracemalloc.start()
    try:
        plan = ShardPlan(10**10, 1024, 8, 0, order=ShardOrder(sizes))
        step = plan.steps_per_epoch // 2
        indices = np.concatenate([plan.indices(3, step, lane) for lane in range(8)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(np.unique(indices)) == 1024
    assert len(np.unique(indices // 10**6)) <= 8 * 16
    assert peak < 8 * 2**20
