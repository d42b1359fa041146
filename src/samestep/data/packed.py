"""Documents of tokens as rows of one length, for language models."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset

from samestep.data.plan import check_positive
from samestep.data.token_file import PIECE, TokenFile, Tokens, checked_tokens
from samestep.errors import ConfigError, DataError

# targets of -100 are those that torch's cross_entropy ignores
PADDING: Final = {"tokens": 0, "targets": -100, "positions": 0, "documents": -1}
MOST_COUNTED: Final = 2**24  # documents whose lengths are compared with that of a row


class Packed(Dataset[dict[str, torch.Tensor]]):
    """A map-style data set of rows: the documents one after the other, cut every `length` tokens.

    Each token is in one row. Only the last row may have padding. A document that does not end in
    its row goes on in the next one. Use it with `run.batches`, which shuffles the rows.

    A row is a dict of int64 tensors [length]:

    - `tokens`: the tokens; 0 in padding.
    - `targets`: the next token of the same document, also if that is in the next row; -100 at the
      last token of a document and in padding.
    - `positions`: count from 0 in each document of the row; 0 in padding.
    - `documents`: number of the document within the row, from 0; -1 in padding.

    Args:
        documents: A `TokenFile`, or a sequence of lists, arrays or tensors of tokens; its offsets
            take 8 bytes per document. An object with its own `offsets`, a sequence of len + 1
            positions in the tokens, which is indexed and sliced, needs no memory per document.
        length: Tokens of a row.
        vocabulary: Number of different tokens. All tokens are compared with it now, if their dtype
            has larger ones.

    Raises:
        ConfigError: `length` or `vocabulary` is unusable.
        DataError: There are no tokens, or a document has other values than tokens.

    Example:
        >>> row = ss.Packed([[1, 2, 3], [4, 5]], length=4)[0]
        >>> row["tokens"].tolist(), row["targets"].tolist()
        ([1, 2, 3, 4], [2, 3, -100, 5])
    """

    def __init__(self, documents: Any, *, length: int, vocabulary: int | None = None) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 2:
            raise ConfigError(
                f"length must be a whole number of at least 2 (tokens of a row), got {length!r}"
            )
        if vocabulary is not None:
            check_positive("vocabulary", vocabulary, "different tokens")
        if not (hasattr(documents, "__len__") and hasattr(documents, "__getitem__")):
            kind = type(documents).__name__
            raise DataError(f"documents must be a sequence of lists or arrays, got {kind}")
        self.length, self._documents, count = length, documents, len(documents)
        offsets = getattr(documents, "offsets", None)
        if offsets is not None and (len(offsets) != count + 1 or offsets[0] != 0):
            raise DataError(f"{count} documents need offsets of {count + 1} positions, from 0")
        self._offsets: Any = array("q", [0]) if offsets is None else offsets
        self._highest = (2**63 if vocabulary is None else vocabulary) - 1
        for number in range(count if offsets is None else 0):
            tokens = checked_tokens(documents[number], number, 0, self._highest)
            self._offsets.append(self._offsets[-1] + len(tokens))
        self._size = int(self._offsets[count])
        if self._size < 1:
            raise DataError(f"the {count} documents have no tokens; check their path and filters")
        if offsets is not None and vocabulary is not None:
            self._scan()
        pieces = range(0, min(count, MOST_COUNTED), PIECE)
        lengths = (np.diff(np.asarray(self._offsets[at : at + PIECE + 1])) for at in pieces)
        self._longer = sum(int((piece > length).sum()) for piece in lengths)

    def __len__(self) -> int:
        return -(-self._size // self.length)  # noqa: PLE0303  positive

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        start = range(len(self))[row] * self.length
        stop = min(start + self.length, self._size)
        values = {name: np.full(self.length, none) for name, none in PADDING.items()}
        for number, (document, first, last) in enumerate(self._parts(start, stop)):
            # one token more than is in the row, if the document has it: the last target
            tokens = self._read(document, first, last + 1)
            at, end = first - start, last - start
            values["tokens"][at:end] = tokens[: end - at]
            values["targets"][at : at + len(tokens) - 1] = tokens[1:]
            values["positions"][at:end] = np.arange(end - at)
            values["documents"][at:end] = number
        return {name: torch.from_numpy(array) for name, array in values.items()}

    def rows(self, document: int) -> range:
        """Return the rows that have tokens of a document.

        Example:
            >>> ss.Packed([[1, 2, 3], [4, 5]], length=4).rows(1)
            range(0, 2)
        """
        number = range(len(self._documents))[document]
        start, stop = int(self._offsets[number]), int(self._offsets[number + 1])
        return range(start // self.length, -(-stop // self.length) if stop > start else 0)

    @property
    def notice(self) -> str:
        """What a run says when its first loop over the rows begins; "" if nothing."""
        return f"{self!r}; documents that are longer are split" if self._longer else ""

    def __repr__(self) -> str:
        rows, count = len(self), len(self._documents)
        least = "" if count <= MOST_COUNTED else "at least "
        return (
            f"Packed({rows:,} rows of {self.length:,}: {self._size:,} tokens, {count:,} documents,"
            f" {least}{self._longer:,} longer than a row,"
            f" padding of {rows * self.length - self._size:,})"
        )

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each document with tokens at [start, stop), and their positions."""
        number = bisect_right(self._offsets, start) - 1
        while start < stop:
            end = min(int(self._offsets[number + 1]), stop)
            if end < start:
                raise DataError(f"offsets must not decrease, as they do after document {number}")
            if end > start:
                yield number, start, end
            start, number = end, number + 1

    def _read(self, number: int, first: int, last: int) -> Tokens:
        """Return the tokens of a document at positions [first, last), or up to its end."""
        begin, end = int(self._offsets[number]), int(self._offsets[number + 1])
        part = self._documents[number][first - begin : last - begin]
        tokens = checked_tokens(part, number, 0, self._highest)
        if len(tokens) != min(last, end) - first:
            raise DataError(f"document {number} has fewer tokens than its offsets, {end - begin}")
        return tokens

    def _scan(self) -> None:
        """Raise `DataError` for a token that is not in the vocabulary; read all where needed."""
        documents = self._documents
        is_file = isinstance(documents, TokenFile)
        limits = np.iinfo(documents.dtype if is_file else np.int64)
        if limits.min == 0 and limits.max <= self._highest:
            return
        for at in range(0, self._size, PIECE):
            piece = documents.tokens[at : at + PIECE] if is_file else None
            if piece is None or piece.min() < 0 or piece.max() > self._highest:
                for part in self._parts(at, min(at + PIECE, self._size)):
                    self._read(*part)
