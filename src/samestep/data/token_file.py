"""Documents of tokens in a file that is mapped into memory."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from samestep.errors import ConfigError, DataError

Tokens = NDArray[np.integer[Any]]
PIECE: Final = 2**20  # tokens or documents that are looked at together
# magic, version, code of the dtype, numbers of sequences and of boundaries of documents
HEADER: Final = struct.Struct("<9sQBQQ")
START: Final = (b"MMIDIDX\0\0", 1)
CODES: Final = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


class TokenFile:
    """The documents of a file of tokens, as read-only arrays that are views of the mapped file.

    With an index beside it, `data.idx` of `data.bin`, it is in the format of Megatron-LM. Without
    one it only has tokens, as nanoGPT writes them.

    Args:
        path: The file of tokens.
        dtype: Type of the tokens, such as "uint16", if there is no index.
        end: Token that ends each document, as its last one, if there is no index. Without it, the
            file is one document.

    Attributes:
        offsets: Position of each document in `tokens`, and the number of tokens.

    Raises:
        ConfigError: `dtype` is missing or unusable, or an option contradicts the index.
        DataError: The file is empty or truncated, or the index does not fit it.

    Example:
        >>> file = ss.TokenFile.write("data.bin", [[1, 2, 3], [4, 5]], dtype="uint16")
        >>> len(file), file[1].tolist()
        (2, [4, 5])
    """

    def __init__(
        self, path: str | Path, *, dtype: DTypeLike | None = None, end: int | None = None
    ) -> None:
        self.path, index_path = Path(path), Path(path).with_suffix(".idx")
        index = _Index(index_path) if index_path.is_file() else None
        self.dtype = np.dtype(index.dtype if index is not None and dtype is None else dtype)
        contradicts = index is not None and (end is not None or self.dtype != index.dtype)
        if self.dtype.kind not in "iu" or contradicts:  # np.dtype(None) is float64
            name = index_path.name
            has = f"no {name}, so pass both" if index is None else f"{name}, so leave out both"
            raise ConfigError(
                f'{path} has {has}: dtype=, the type of its tokens, such as "uint16", and end=, the'
                f" token that ends a document; got dtype={dtype!r} and end={end!r}"
            )
        size = self.path.stat().st_size
        if size % self.dtype.itemsize or not size:
            raise DataError(
                f"{path} has {size} bytes, expected whole tokens of {self.dtype}; check that it is"
                " complete, and its dtype"
            )
        self.offsets = self._find(end) if index is None else index.checked(size)

    @classmethod
    def write(cls, path: str | Path, documents: Iterable[Any], *, dtype: DTypeLike) -> TokenFile:
        """Write documents to `path` and an index, which Megatron-LM reads, too; return them.

        Args:
            path: The file of tokens, such as "data.bin"; the index is "data.idx".
            documents: Lists, arrays or tensors of tokens; a generator of them needs little memory.
            dtype: "uint8", "uint16", or a signed type up to "int64".

        Raises:
            ConfigError: The format does not have this dtype.
            DataError: A document has other values than tokens of this dtype.
        """
        dtype, lengths = np.dtype(dtype).newbyteorder("<"), array("i")
        if dtype.name not in CODES:
            raise ConfigError(f"dtype must be one of {', '.join(CODES)}, got {dtype}")
        limits, index = np.iinfo(dtype), Path(path).with_suffix(".idx")
        temporary = Path(f"{path}.tmp")  # another process may have mapped the former file
        with temporary.open("wb") as file:
            for number, document in enumerate(documents):
                tokens = checked_tokens(document, number, limits.min, limits.max)
                file.write(tokens.astype(dtype).tobytes())
                lengths.append(len(tokens))
        index.unlink(missing_ok=True)  # it is that of its file, or there is none
        temporary.replace(path)
        _Index.write(index, np.array(lengths), dtype)
        return cls(path)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Tokens:
        number = range(len(self))[number]
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    @cached_property
    def tokens(self) -> Tokens:
        """All tokens, one document after the other."""
        return np.asarray(np.memmap(self.path, self.dtype, "r"))

    def __getstate__(self) -> dict[str, Any]:  # another process maps the file itself
        return {name: value for name, value in vars(self).items() if name != "tokens"}

    def _find(self, end: int | None) -> NDArray[np.int64]:
        """Return the positions of documents in a file without an index."""
        total = len(self.tokens)
        pieces = range(0, 0 if end is None else total, PIECE)
        found = [np.flatnonzero(self.tokens[at : at + PIECE] == end) + at + 1 for at in pieces]
        ends = np.concatenate([[0], *found], dtype=np.int64)
        if end is not None and len(ends) == 1:
            raise DataError(
                f"{self.path} has no token {end}, which should end each document; check end= and"
                f" dtype={self.dtype}"
            )
        return ends if ends[-1] == total else np.append(ends, total)


class _Index:
    """An index of Megatron-LM, as the positions of documents in the file of tokens.

    It has the lengths of sequences, their first bytes, and the first sequence of each document.
    """

    def __init__(self, path: Path) -> None:
        self.path, header = path, np.fromfile(path, np.uint8, HEADER.size).tobytes()
        *start, code, sequences, documents = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
        name = {code: name for name, code in CODES.items()}.get(code)
        if tuple(start) != START or name is None:
            raise self._misfit(
                f"it begins with {start} and the dtype code {code}, expected {[*START]} and one of"
                f" {sorted(CODES.values())}"
            )
        size, expected = path.stat().st_size, HEADER.size + 12 * sequences + 8 * documents
        if size != expected or not sequences or not documents:
            raise self._misfit(
                f"it has {size} bytes, expected {expected} for {sequences} sequences"
            )
        self.dtype, content = np.dtype(name), np.memmap(path, np.uint8, "r")
        self.lengths = np.frombuffer(content, "<i4", sequences, HEADER.size)
        self.starts = np.frombuffer(content, "<i8", sequences, HEADER.size + 4 * sequences)
        self.first = np.frombuffer(content, "<i8", documents, HEADER.size + 12 * sequences)

    @staticmethod
    def write(path: Path, lengths: NDArray[np.integer[Any]], dtype: np.dtype[Any]) -> None:
        """Write the index of documents that are one sequence each."""
        ends, count = np.cumsum(lengths, dtype="<i8") * dtype.itemsize, len(lengths)
        parts = lengths.astype("<i4"), np.append(0, ends)[:-1], np.arange(count + 1)
        header = HEADER.pack(*START, CODES[dtype.name], count, count + 1)
        path.write_bytes(header + b"".join(part.tobytes() for part in parts))

    def checked(self, size: int) -> _Index:
        """Return this; raise `DataError` unless sequences fill a file of `size` bytes in order."""
        count, is_whole = len(self.starts), True
        for at in range(0, max(count, len(self.first)), PIECE):
            sizes = self.lengths[at : at + PIECE].astype(np.int64) * self.dtype.itemsize
            starts = np.append(self.starts[at : at + PIECE + 1], size)[: len(sizes) + 1]
            is_whole &= bool((sizes >= 0).all() and (np.diff(starts) == sizes).all())
            is_whole &= bool((np.diff(self.first[at : at + PIECE + 1]) >= 0).all())
        if not is_whole or (self.starts[0], self.first[0], self.first[-1]) != (0, 0, count):
            raise self._misfit(f"its sequences or documents are not {size} bytes in order")
        return self

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int | slice) -> Any:
        first, last, size = self.first[index], len(self.starts) - 1, self.dtype.itemsize
        if not isinstance(index, slice) and first <= last:  # a bisection asks for many
            return int(self.starts[first]) // size
        inner = np.minimum(first, last)  # the end of all is that of the last sequence
        return self.starts[inner] // size + (first - inner) * self.lengths[inner]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Index, (self.path,)  # mapped again

    def _misfit(self, what: str) -> DataError:
        text = f"the index {self.path} does not fit its file of tokens: {what}; copy both again"
        return DataError(text)


def checked_tokens(document: Any, number: int, lowest: int, highest: int) -> Tokens:
    """Return a document, or a part, as an array; raise `DataError` if it is not one of tokens."""
    tokens: Tokens = np.asarray(document)
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise DataError(
            f"document {number} must be a list, array or tensor of tokens, which are whole numbers,"
            f" got {type(document).__name__} of {tokens.dtype} {list(tokens.shape)}"
        )
    if len(tokens) and (tokens.min() < lowest or tokens.max() > highest):
        wrong = tokens[(tokens < lowest) | (tokens > highest)][0]
        raise DataError(
            f"document {number} has the token {wrong}, expected {lowest} to {highest}; check the"
            " tokenizer, vocabulary= and dtype="
        )
    return tokens
