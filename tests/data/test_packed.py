from __future__ import annotations

import pickle
import tracemalloc
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep as ss
from samestep.data import packed as packed_module
from samestep.data.packed import Packed
from samestep.data.token_file import TokenFile
from samestep.errors import ConfigError, DataError

DOCUMENTS = st.lists(st.lists(st.integers(0, 99), max_size=12), max_size=12).filter(any)
LENGTHS = st.integers(2, 30)


class Own:
    """Documents with offsets of their own."""

    def __init__(self, documents, offsets=None):
        self.documents = documents
        ends = list(accumulate(map(len, documents), initial=0))
        self.offsets = ends if offsets is None else offsets

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, number):
        return self.documents[number]


def with_targets(document):
    """Return the pairs of each token and its successor."""
    return list(zip(document, [*document[1:], -100], strict=False))


def by_hand(documents, length):
    """Return the rows, token by token."""
    entries = [
        (token, target, number)
        for number, document in enumerate(documents)
        for token, target in with_targets(document)
    ]
    rows = []
    for start in range(0, len(entries), length):
        row = {"tokens": [], "targets": [], "positions": [], "documents": []}
        numbers = [number for _, _, number in entries[start : start + length]]
        for place, (token, target, number) in enumerate(entries[start : start + length]):
            row["tokens"].append(token)
            row["targets"].append(target)
            row["positions"].append(place - numbers.index(number))
            row["documents"].append(len(set(numbers[: place + 1])) - 1)
        for name, none in (("tokens", 0), ("targets", -100), ("positions", 0), ("documents", -1)):
            row[name] += [none] * (length - len(row[name]))
        rows.append(row)
    return rows


def lists(rows):
    return [{name: values.tolist() for name, values in row.items()} for row in rows]


def kinds_of(documents, folder):
    """Return the same documents in each form that is taken."""
    yield documents
    yield [np.array(document, np.uint8) for document in documents]
    yield [torch.tensor(document, dtype=torch.int32) for document in documents]
    yield Own(documents)
    yield Own(documents, np.array(Own(documents).offsets))
    yield TokenFile.write(folder / "data.bin", documents, dtype="uint16")


@given(documents=DOCUMENTS, length=LENGTHS)
def test_rows_equal_those_packed_by_hand(documents, length, tmp_path_factory):
    expected = by_hand(documents, length)
    for kind in kinds_of(documents, tmp_path_factory.mktemp("files")):
        packed = Packed(kind, length=length, vocabulary=100)
        rows = [packed[number] for number in range(len(packed))]
        assert lists(rows) == expected
        assert lists([packed[-1]]) == expected[-1:]
        for values in rows[0].values():
            assert (values.dtype, values.shape) == (torch.int64, (length,))
        assert lists([pickle.loads(pickle.dumps(packed))[0]]) == expected[:1]
        with pytest.raises(IndexError):
            packed[len(packed)]


@given(documents=DOCUMENTS, length=LENGTHS)
def test_each_token_is_seen_once_with_its_successor(documents, length):
    packed = Packed(documents, length=length)
    pairs = []
    for row in packed:
        is_token = row["documents"] >= 0
        assert (row["tokens"][~is_token] == 0).all()
        assert (row["targets"][~is_token] == -100).all()
        pairs += zip(
            row["tokens"][is_token].tolist(), row["targets"][is_token].tolist(), strict=True
        )
        starts = row["documents"].diff(prepend=torch.tensor([-2])) != 0
        assert (row["positions"][starts] == 0).all()
        assert (row["positions"].diff()[~starts[1:] & is_token[1:]] == 1).all()
    assert pairs == [pair for document in documents for pair in with_targets(document)]
    assert all((row["documents"] >= 0).all() for row in list(packed)[:-1])


@given(DOCUMENTS, LENGTHS)
def test_the_rows_of_a_document_are_those_with_its_tokens(documents, length):
    numbered = [[number + 1] * len(document) for number, document in enumerate(documents)]
    packed = Packed(numbered, length=length)
    for number in range(len(documents)):
        having = [row for row in range(len(packed)) if number + 1 in packed[row]["tokens"]]
        assert list(packed.rows(number)) == having
    with pytest.raises(IndexError):
        packed.rows(len(documents))


def test_rows_are_new_tensors(tmp_path):
    packed = Packed(TokenFile.write(tmp_path / "data.bin", [[1, 2, 3]], dtype="int64"), length=2)
    packed[0]["tokens"].zero_()
    assert packed[0]["tokens"].tolist() == [1, 2]


def test_its_text_says_what_it_holds(monkeypatch):
    packed = Packed([[1] * 1500, [1], [1] * 3], length=1000)
    text = "2 rows of 1,000: 1,504 tokens, 3 documents, 1 longer than a row, padding of 496"
    assert repr(packed) == f"Packed({text})"
    assert packed.notice == f"Packed({text}); documents that are longer are split"
    assert Packed([[1, 2]], length=2).notice == ""
    monkeypatch.setattr(packed_module, "MOST_COUNTED", 2)
    monkeypatch.setattr(packed_module, "PIECE", 2)
    assert "at least 1 longer than a row" in repr(Packed([[1] * 1500, [1], [1] * 3], length=1000))


@pytest.mark.parametrize(
    ("documents", "options", "error", "words"),
    [
        (
            [[1, 2]],
            {"length": 1},
            ConfigError,
            "length must be a whole number of at least 2 .* got 1",
        ),
        ([[1, 2]], {"length": 2.0}, ConfigError, "length must be a whole number .* got 2.0"),
        ([[1, 2]], {"length": True}, ConfigError, "length must be a whole number .* got True"),
        ([[1]], {"length": 2, "vocabulary": 0}, ConfigError, "vocabulary must be .* got 0"),
        (iter([[1]]), {"length": 2}, DataError, "documents must be a sequence.* got list_iterator"),
        ([], {"length": 2}, DataError, "the 0 documents have no tokens; check their path"),
        ([[], []], {"length": 2}, DataError, "the 2 documents have no tokens; check their path"),
        (Own([[]]), {"length": 2}, DataError, "the 1 documents have no tokens; check their path"),
        (
            "text",
            {"length": 2},
            DataError,
            "document 0 must be a list, array or .*, got str of <U1",
        ),
        ([1, 2], {"length": 2}, DataError, r"document 0 must be a list.*, got int of int64 \[\]"),
        ([[1], [0.5]], {"length": 2}, DataError, "document 1 must be a .* got list of float64"),
        ([[1], [-1]], {"length": 2}, DataError, "document 1 has the token -1, expected 0 to "),
        (
            [[], [1, 5], [7, 8]],
            {"length": 2, "vocabulary": 8},
            DataError,
            "document 2 has the token 8, expected 0 to 7; check the tokenizer, vocabulary= and",
        ),
        (
            Own([[], [1, 5], [7, 8]]),
            {"length": 2, "vocabulary": 8},
            DataError,
            "document 2 has the token 8, expected 0 to 7",
        ),
        (
            Own([[1], [2]], [0, 1]),
            {"length": 2},
            DataError,
            "2 documents need offsets of 3 positions",
        ),
        (
            Own([[1], [2]], [1, 1, 2]),
            {"length": 2},
            DataError,
            "2 documents need offsets of 3 posi",
        ),
    ],
)
def test_unusable_documents_are_refused(documents, options, error, words):
    with pytest.raises(error, match=words):
        Packed(documents, **options)


@pytest.mark.parametrize(
    ("documents", "offsets", "words"),
    [
        ([[1], [-2]], [0, 1, 2], "document 1 has the token -2, expected 0 to"),
        ([[1, 2], [3]], [0, 3, 4], "document 0 has fewer tokens than its offsets, 3"),
        ([[1, 2, 3], [4]], [0, 3, 2, 4], "offsets must not decrease, as they do after document 1"),
    ],
)
def test_documents_that_contradict_their_offsets_are_refused_when_they_are_read(
    documents, offsets, words
):
    packed = Packed(Own([*documents, []][: len(offsets) - 1], offsets), length=4)
    with pytest.raises(DataError, match=words):
        packed[0]


@pytest.mark.parametrize("piece", [2, 2**20])
def test_files_are_compared_with_the_vocabulary_before_the_first_step(piece, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_module, "PIECE", piece)
    for dtype in ("uint16", "int32"):
        file = TokenFile.write(tmp_path / "data.bin", [[1, 2], [], [3, 9], [4]], dtype=dtype)
        Packed(file, length=2, vocabulary=10)
        with pytest.raises(DataError, match="document 2 has the token 9, expected 0 to 8"):
            Packed(file, length=2, vocabulary=9)
    negative = TokenFile.write(tmp_path / "data.bin", [[1, 2], [-3]], dtype="int32")
    with pytest.raises(DataError, match="document 1 has the token -3, expected 0 to 8"):
        Packed(negative, length=2, vocabulary=9)


def test_a_file_whose_dtype_cannot_exceed_the_vocabulary_is_not_read(tmp_path):
    file = TokenFile.write(tmp_path / "data.bin", [[1, 2]], dtype="uint16")
    file.tokens = None
    assert len(Packed(file, length=2, vocabulary=2**16)) == 1
    with pytest.raises(TypeError):
        Packed(file, length=2, vocabulary=2**16 - 1)


class Computed:
    """Positions in the tokens of documents with 700 and 1,300 tokens in turn."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if isinstance(index, slice):
            index = np.arange(*index.indices(self.count))
        return 1000 * index - 300 * (index % 2)


class Simulated:
    def __init__(self, count):
        self.count, self.offsets = count, Computed(count + 1)

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return np.full(1300 if number % 2 else 700, number % 1000)


def test_memory_does_not_grow_with_a_billion_documents():
    """The loop, its plan and its steps, whose rows are anywhere in 977 million."""
    count = 10**9
    with ss.init(lanes=2) as run:
        Packed(Simulated(8), length=1024)
        tracemalloc.start()
        try:
            packed = Packed(Simulated(count), length=1024)
            first = []
            for batch in run.batches(packed, 4, steps=3):
                for row in batch:
                    first += row["tokens"][:, 0].tolist()
            rows = list(run.batches(packed, 2, steps=1, shuffle=False, name="ordered"))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert len(packed) == -(-count * 1000 // 1024)
    assert len(first) == 12
    assert len(rows) == 1
    row = packed[len(packed) // 2]
    assert row["tokens"].tolist() == [0] * 700 + [1] * 324  # of document 500,000,000 and the next
    assert row["targets"].tolist() == [0] * 699 + [-100] + [1] * 324
    assert peak < 40e6
