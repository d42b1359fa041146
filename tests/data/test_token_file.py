from __future__ import annotations

import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.data import token_file
from samestep.data.token_file import TokenFile
from samestep.errors import ConfigError, DataError
from tests.workers import run_workers

DTYPES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
DOCUMENTS = st.lists(st.lists(st.integers(0, 127), max_size=9), min_size=1, max_size=9).filter(any)


def megatron(sequences, first, dtype):
    """Return the index that Megatron-LM writes for sequences of `first[n]` to `first[n + 1]`."""
    lengths = [len(sequence) for sequence in sequences]
    size = np.dtype(dtype).itemsize
    starts = [size * sum(lengths[:number]) for number in range(len(lengths))]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, DTYPES[dtype], len(lengths), len(first))
    return header + struct.pack(
        f"<{len(lengths)}i{len(starts)}q{len(first)}q", *lengths, *starts, *first
    )


def written(folder, sequences, first=None, dtype="uint16"):
    """Write a file of tokens and its index, without `TokenFile`; return its path."""
    path = folder / "data.bin"
    tokens = [token for sequence in sequences for token in sequence]
    path.write_bytes(np.array(tokens, dtype).tobytes())
    first = range(len(sequences) + 1) if first is None else first
    path.with_suffix(".idx").write_bytes(megatron(sequences, first, dtype))
    return path


@given(documents=DOCUMENTS, dtype=st.sampled_from(list(DTYPES)), piece=st.sampled_from([2, 2**20]))
def test_a_written_file_has_the_bytes_of_megatron_and_is_read_again(
    documents, dtype, piece, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("files")
    theirs, own = written(folder, documents, dtype=dtype), folder / "own.bin"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_file, "PIECE", piece)
        file = TokenFile.write(
            own, (np.array(document, int) for document in documents), dtype=dtype
        )
        for ending in (".bin", ".idx"):
            assert own.with_suffix(ending).read_bytes() == theirs.with_suffix(ending).read_bytes()
        for read in (file, TokenFile(theirs, dtype=dtype), pickle.loads(pickle.dumps(file))):
            assert [tokens.tolist() for tokens in read] == documents
            assert read.dtype == dtype
            ends = np.cumsum([0, *map(len, documents)]).tolist()
            assert [*read.offsets] == read.offsets[:].tolist() == ends
            assert read[-1].tolist() == documents[-1]
            with pytest.raises(IndexError):
                read[len(documents)]


def test_a_document_of_several_sequences_is_one(tmp_path):
    path = written(tmp_path, [[1], [2, 3], [], [4]], first=[0, 2, 2, 4])
    assert [tokens.tolist() for tokens in TokenFile(path)] == [[1, 2, 3], [], [4]]


@given(documents=DOCUMENTS, ends=st.booleans(), piece=st.sampled_from([3, 2**20]))
def test_a_file_without_an_index_has_documents_that_end_with_a_token(
    documents, ends, piece, tmp_path_factory
):
    path = tmp_path_factory.mktemp("files") / "flat.bin"
    documents = [[*document, 200] for document in documents]
    if not ends:
        documents.append([1, 2])
    tokens = [token for document in documents for token in document]
    path.write_bytes(np.array(tokens, "uint32").tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_file, "PIECE", piece)
        file = TokenFile(path, dtype=np.uint32, end=200)
    assert [document.tolist() for document in file] == documents
    assert [document.tolist() for document in pickle.loads(pickle.dumps(file))] == documents
    assert [document.tolist() for document in TokenFile(path, dtype="uint32")] == [tokens]


def test_nothing_is_copied_and_nothing_can_be_written(tmp_path):
    file = TokenFile.write(tmp_path / "data.bin", [[1, 2], torch.tensor([3])], dtype="int32")
    assert np.shares_memory(file[0], file.tokens)
    assert not file[0].flags.writeable
    assert len(pickle.dumps(file)) < 1000


def test_another_process_maps_the_file_again(tmp_path):
    data = pickle.dumps(TokenFile.write(tmp_path / "data.bin", [[1, 2], [3]], dtype="int32"))

    def body():
        return pickle.loads(data)[1].tolist()

    assert run_workers(body, 1) == [[3]]


def changed(position, new):
    def change(path):
        content = bytearray(path.with_suffix(".idx").read_bytes())
        content[position : position + len(new)] = new
        path.with_suffix(".idx").write_bytes(content)

    return change


def cut(ending, size):
    def change(path):
        content = path.with_suffix(ending).read_bytes()
        path.with_suffix(ending).write_bytes(
            content[:size] if size > 0 else content + b"\0" * -size
        )

    return change


LENGTHS = 34  # where they begin in an index
STARTS = LENGTHS + 4 * 3
FIRST = STARTS + 8 * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut(".bin", 8), "its sequences or documents are not 8 bytes in order"),
        (cut(".bin", -2), "its sequences or documents are not 14 bytes in order"),
        (cut(".bin", 7), "has 7 bytes, expected whole tokens of uint16"),
        (cut(".idx", 20), "it has 20 bytes, expected 70 for 3 sequences"),
        (cut(".idx", -1), "it has 103 bytes, expected 102 for 3 sequences"),
        (cut(".idx", 90), "it has 90 bytes, expected 102 for 3 sequences"),
        (changed(0, b"TNTIDX"), r"begins with \[b'TNTIDX.*, expected \[b'MMIDIDX"),
        (changed(9, b"\2"), "begins with .*2.* and the dtype code 8, expected"),
        (changed(17, b"\7"), r"the dtype code 7, expected .* and one of \[1, 2, 3, 4, 5, 8\]"),
        (changed(18, b"\xff" * 8), "it has 102 bytes, .* for 18446744073709551615 sequences"),
        (changed(18, b"\0"), "it has 102 bytes, .* for 0 sequences"),
        (changed(LENGTHS, b"\2"), "its sequences or documents are not 12 bytes in order"),
        (changed(LENGTHS + 3, b"\xff"), "its sequences or documents are not 12 bytes in order"),
        (changed(STARTS, b"\2"), "its sequences or documents are not 12 bytes in order"),
        (changed(STARTS + 8, b"\0"), "its sequences or documents are not 12 bytes in order"),
        (changed(FIRST, b"\1"), "its sequences or documents are not 12 bytes in order"),
        (changed(FIRST + 8, b"\4"), "its sequences or documents are not 12 bytes in order"),
        (changed(FIRST + 24, b"\2"), "its sequences or documents are not 12 bytes in order"),
    ],
)
def test_an_index_or_file_that_was_damaged_is_refused(change, words, tmp_path):
    path = written(tmp_path, [[1, 2, 3], [4], [5, 6]])
    assert len(TokenFile(path)) == 3
    change(path)
    with pytest.raises(DataError, match=words):
        TokenFile(path)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ConfigError, "has no flat.idx, so pass both: dtype=, .* got dtype=None and end=None"),
        ({"dtype": "float32"}, ConfigError, "has no flat.idx.* got dtype='float32'"),
        (
            {"dtype": "uint16", "end": 7},
            DataError,
            "has no token 7, which should end each document",
        ),
        ({"dtype": "uint64"}, DataError, "has 6 bytes, expected whole tokens of uint64"),
    ],
)
def test_a_file_without_an_index_needs_the_right_options(options, error, words, tmp_path):
    path = tmp_path / "flat.bin"
    path.write_bytes(np.array([1, 2, 3], "uint16").tobytes())
    with pytest.raises(error, match=words):
        TokenFile(path, **options)


@pytest.mark.parametrize("options", [{"dtype": "int32"}, {"end": 2}])
def test_a_file_with_an_index_takes_no_other_options(options, tmp_path):
    with pytest.raises(ConfigError, match=r"has data\.idx, so leave out both: dtype="):
        TokenFile(written(tmp_path, [[1, 2]]), **options)


def test_an_empty_or_missing_file_is_refused(tmp_path):
    (tmp_path / "empty.bin").touch()
    with pytest.raises(DataError, match="has 0 bytes, expected whole tokens of uint16"):
        TokenFile(tmp_path / "empty.bin", dtype="uint16")
    with pytest.raises(FileNotFoundError, match=r"missing\.bin"):
        TokenFile(tmp_path / "missing.bin", dtype="uint16")
    with pytest.raises(DataError, match="for 0 sequences"):
        TokenFile.write(tmp_path / "none.bin", [], dtype="uint16")


@pytest.mark.parametrize(
    ("document", "dtype", "error", "words"),
    [
        ([1], "uint32", ConfigError, "dtype must be one of uint8, .*, uint16, got uint32"),
        ([1], "float32", ConfigError, "dtype must be one of uint8, .*, uint16, got float32"),
        ([70000], "uint16", DataError, "document 1 has the token 70000, expected 0 to 65535"),
        ([1, -1], "uint8", DataError, "document 1 has the token -1, expected 0 to 255"),
        ([0.5], "int32", DataError, "document 1 must be a list.* of tokens.*, got list of float64"),
        (
            [[1]],
            "int32",
            DataError,
            r"document 1 must be a list.* of tokens.*, got list .*\[1, 1\]",
        ),
    ],
)
def test_unusable_documents_are_not_written(document, dtype, error, words, tmp_path):
    with pytest.raises(error, match=words):
        TokenFile.write(tmp_path / "data.bin", [[1, 2], document], dtype=dtype)
    assert not (tmp_path / "data.idx").exists()


def test_a_file_that_is_written_again_does_not_change_under_its_readers(tmp_path):
    path = tmp_path / "data.bin"
    first = TokenFile.write(path, [[1, 2], [3]], dtype="uint16")
    assert first[0].tolist() == [1, 2]
    with pytest.raises(DataError, match="document 0 must be"):
        TokenFile.write(path, [["a"]], dtype="uint16")
    assert [tokens.tolist() for tokens in TokenFile(path)] == [[1, 2], [3]]
    second = TokenFile.write(path, [[4]], dtype=">u2")
    assert (first[1].tolist(), second[0].tolist()) == ([3], [4])
    assert path.read_bytes() == b"\4\0"
