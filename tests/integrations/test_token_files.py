"""Files of tokens that megatron-core writes and reads."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

import samestep as ss

pytestmark = pytest.mark.filterwarnings("default")  # of megatron-core, about other packages
DOCUMENTS = [np.arange(size) for size in (5, 0, 33, 1, 7)]


@pytest.fixture(scope="module")
def theirs():
    """Return the module of megatron-core that writes and reads files of tokens."""
    pytest.importorskip("megatron.core", reason="megatron-core is missing: run `make integrations`")
    return importlib.import_module("megatron.core.datasets.indexed_dataset")


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint16"])
def test_files_are_read_by_each_other(dtype, theirs, tmp_path):
    path = tmp_path / "theirs.bin"
    builder = theirs.IndexedDatasetBuilder(str(path), dtype=getattr(np, dtype))
    for document in DOCUMENTS:
        parts = [len(document) // 2, len(document) - len(document) // 2]
        builder.add_document(torch.tensor(document), parts)
    builder.finalize(str(path.with_suffix(".idx")))
    file = ss.TokenFile(path)
    assert [tokens.tolist() for tokens in file] == [document.tolist() for document in DOCUMENTS]
    assert file.dtype == dtype

    ss.TokenFile.write(tmp_path / "own.bin", DOCUMENTS, dtype=dtype)
    read = theirs.IndexedDataset(str(tmp_path / "own"))
    assert [read[number].tolist() for number in range(len(read))] == [
        document.tolist() for document in DOCUMENTS
    ]
    assert read.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))
