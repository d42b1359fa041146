"""The formats and libraries of docs/data.md and docs/streams.md, with the code of these pages."""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import chain, islice
from types import ModuleType

import fsspec
import pytest
import torch

import samestep as ss
from tests.docs.blocks import ROOT, blocks_of
from tests.jobs import fingerprint
from tests.workers import run_workers

pytestmark = pytest.mark.filterwarnings("default")

SHARDS, SIZE = 6, 8
TOTAL = SHARDS * SIZE
BATCH = 4  # of the page
MISSING = "{} is missing: run `make integrations`"


def code(test):
    """Return the names that the pages' block with a test comment defines."""
    names = {"ss": ss}
    pages = (ROOT / "docs" / name for name in ("data.md", "streams.md"))
    for block in chain.from_iterable(map(blocks_of, pages)):
        if block.test == test:
            exec(block.text, names)
    return names


@pytest.fixture
def streaming():
    # a stand-in for its image data sets, because there is no torchvision for this torch
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    return pytest.importorskip("streaming", reason=MISSING.format("mosaicml-streaming"))


def used(dataset, sizes, column, workers):
    """Return the sorted samples of an epoch that workers use."""

    def body():
        values = []
        with ss.init(lanes=4) as run:
            order = ss.ShardOrder(sizes, window=2)
            for batch in run.batches(dataset, 10, epochs=1, order=order):
                for samples in batch:
                    values += [int(value) for value in samples[column]]
        return values

    return sorted(chain(*run_workers(body, workers)))


def test_parquet(tmp_path):
    pytest.importorskip("pyarrow", reason=MISSING.format("pyarrow"))
    import pyarrow as pa
    from pyarrow import parquet

    for number in range(SHARDS):
        rows = range(number * SIZE, (number + 1) * SIZE)
        table = pa.table({"x": list(rows), "text": [str(row) for row in rows]})
        parquet.write_table(table, tmp_path / f"{number}.parquet")
    page = code("not run: needs pyarrow")
    names = [f"{number}.parquet" for number in range(SHARDS)]
    sizes = page["sizes_of_parquet"](tmp_path.as_uri(), names, fsspec.filesystem("file"))
    dataset = ss.ShardedDataset(sizes, page["Rows"], cache_dir=tmp_path / "cache")
    assert dataset[9] == {"x": 9, "text": "9"}
    assert used(dataset, dataset.sizes, "x", 2) == list(range(TOTAL))


def write_mds(streaming, directory):
    sample_bytes = 8 + 4 + 4 + 3
    columns = {"x": "int", "text": "str"}
    limit = SIZE * sample_bytes + 200
    with streaming.MDSWriter(out=str(directory), columns=columns, size_limit=limit) as writer:
        for number in range(TOTAL):
            writer.write({"x": number, "text": f"{number:03}"})


def test_mds(streaming, tmp_path):
    write_mds(streaming, tmp_path / "far")
    index = (tmp_path / "far" / "index.json").read_text()
    url = (tmp_path / "far").as_uri()
    dataset = code("not run: needs mosaicml-streaming")["mds"](
        url, index, cache_dir=tmp_path / "cache"
    )
    assert len(dataset.sizes) > 1
    assert dataset[9] == {"x": 9, "text": "009"}
    assert used(dataset, dataset.sizes, "x", 2) == list(range(TOTAL))


def test_streaming_dataset(streaming, tmp_path):
    write_mds(streaming, tmp_path / "far")
    options = {"remote": str(tmp_path / "far"), "local": str(tmp_path / "near")}

    def body():
        dataset = streaming.StreamingDataset(**options, batch_size=1)
        sizes = dataset.samples_per_shard
        values = []
        with ss.init(lanes=4) as run:
            for batch in run.batches(dataset, 10, epochs=1, order=ss.ShardOrder(sizes, window=2)):
                for samples in batch:
                    values += samples["x"].tolist()
        return values, len(sizes)

    ((values, shards),) = run_workers(body, 1)
    assert shards > 1
    assert sorted(values) == list(range(TOTAL))


def test_webdataset(tmp_path):
    webdataset = pytest.importorskip("webdataset", reason=MISSING.format("webdataset"))
    urls = [str(tmp_path / f"{number}.tar") for number in range(SHARDS)]
    for number, url in enumerate(urls):
        with webdataset.TarWriter(url) as writer:
            for row in range(number * SIZE, (number + 1) * SIZE):
                writer.write({"__key__": f"{row:03}", "cls": row})
    pipeline = code("not run: needs webdataset")["pipeline"]
    steps = TOTAL // 2 // BATCH  # an epoch of each of two lanes

    def body():
        classes = {}
        with ss.init(lanes=2) as run:
            loop = run.streams(lambda lane: pipeline(urls, 2, lane), steps=steps, name="tars")
            for batch in loop:
                for lane, samples in batch.lane_batches():
                    classes[loop.step, lane] = [int(sample["cls"]) for sample in samples]
        return classes

    (alone,) = run_workers(body, 1)
    first, second = run_workers(body, 2)
    assert {**first, **second} == alone
    assert sorted(chain(*alone.values())) == list(range(TOTAL))

    dataset = ss.ShardedDataset(dict.fromkeys(urls, SIZE), code("file tars.py")["Tar"])
    assert used(dataset, dataset.sizes, "cls", 2) == list(range(TOTAL))


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason=MISSING.format("datasets"))
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # its progress bars start no thread
    rows = {"x": list(range(TOTAL)), "text": [str(row) for row in range(TOTAL)]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "arrow", num_shards=SHARDS)
    return datasets.load_from_disk(str(tmp_path / "arrow"))


def left_by(make_loop, workers, directory):
    """Return the hashes of a trained model, after a start for each number of workers."""

    def loss_fn(model, samples):
        return model(torch.as_tensor(samples["x"])[:, None] / TOTAL).square().mean()

    def body(stop_after):
        with suppress(SystemExit), ss.init(lanes=2, dir=directory, stop_after=stop_after) as run:
            model = run.replicate(torch.nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            run.track(model=model, optimizer=optimizer)
            for batch in make_loop(run):
                run.backward(loss_fn, model, batch)
                optimizer.step()
                optimizer.zero_grad()
            return fingerprint(model.state_dict())
        return None

    for number, stop_after in zip(workers, [*range(5, 5 * len(workers), 5), None], strict=True):
        left = run_workers(body, number, stop_after)
    assert all(hashes == left[0] for hashes in left)
    return left[0]


def test_a_dataset_of_hugging_face(dataset, tmp_path):
    assert used(dataset, [SIZE] * SHARDS, "x", 2) == list(range(TOTAL))

    def loop(run):
        return run.batches(dataset, 10, epochs=3, loader_workers=1)

    alone = left_by(loop, [1], tmp_path / "alone")
    assert left_by(loop, [2], tmp_path / "both") == alone
    assert left_by(loop, [2, 1, 2], tmp_path / "resumed") == alone


@pytest.mark.parametrize("shuffled", [True, False])
def test_an_iterable_dataset_of_hugging_face(dataset, shuffled, tmp_path):
    rows = dataset.to_iterable_dataset(num_shards=SHARDS)
    passes = code("not run: needs datasets")["passes"]

    def make_stream(lane):
        return passes(rows, 2, lane) if shuffled else rows.shard(2, lane).repeat(None).batch(4)

    def loop(run):
        return run.streams(make_stream, steps=15, name="rows")

    alone = left_by(loop, [1], tmp_path / "alone")
    assert left_by(loop, [2], tmp_path / "both") == alone
    assert left_by(loop, [2, 1, 2], tmp_path / "resumed") == alone
    first_pass = [islice(make_stream(lane), TOTAL // 2 // BATCH) for lane in range(2)]
    samples = [sample for batch in chain(*first_pass) for sample in batch["x"]]
    assert sorted(samples) == list(range(TOTAL))
