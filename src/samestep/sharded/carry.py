"""Sums of lanes that arrive in order, along the tree over lanes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

# elements [start, stop) of some lanes in order, [stop - start] each
Piece = tuple[int, int, Sequence[Tensor]]


class Carry:
    """Adds lanes as a binary counter carries, so that few sums are kept: log2 of the lanes.

    Two neighbors are added when both are sums of 2**height lanes; what is left at the end is added
    from the right. That is the tree of `step.layout` over any number of lanes.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Tensor]] = []  # (height, [elements]), of adjacent lanes

    def add(self, size: int, pieces: Iterable[Piece]) -> None:
        """Add the next lanes, of `size` elements each, which come piece by piece.

        They stay as they are, and only sums are kept of them.
        """
        heights, kept, new = [height for height, _ in self._sums], len(self._sums), list[Tensor]()
        for start, stop, lanes in pieces:
            # (height, values, whether they are in the memory of a sum of before)
            sums = [(height, values[start:stop], True) for height, values in self._sums]
            for lane in lanes:
                sums.append((0, lane, False))
                while len(sums) > 1 and sums[-1][0] == sums[-2][0]:
                    _, right, _ = sums.pop()
                    height, left, is_kept = sums.pop()
                    total = left.add_(right) if is_kept else left + right
                    sums.append((height + 1, total, is_kept))
            heights = [height for height, _, _ in sums]
            kept = sum(is_kept for _, _, is_kept in sums)  # the first ones
            for number, (_, values, _) in enumerate(sums[kept:]):
                if number == len(new):
                    new.append(values.new_empty(size))
                new[number][start:stop] = values
        before = [values for _, values in self._sums[:kept]]
        self._sums = list(zip(heights, [*before, *new], strict=True))

    def total(self) -> Tensor | None:
        """Return the sum of all lanes, None without any, and begin anew."""
        sums, self._sums = [values for _, values in self._sums], []
        while len(sums) > 1:
            right = sums.pop()
            sums[-1].add_(right)
        return sums[0] if sums else None
