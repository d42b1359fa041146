"""Collections of bounded length, for what a record may have any number of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Thinned(Generic[Item]):
    """Every first, second, fourth, … of the items that were appended, and the last one.

    At most `limit` + 1 are kept. Most stay the same as items are added.
    """

    def __init__(self, limit: int) -> None:
        self.count = 0  # of all items
        self._limit, self._stride = limit, 1
        self._kept: list[Item] = []
        self._last: list[Item] = []  # unless it is kept anyway

    def __iter__(self) -> Iterator[Item]:
        return iter([*self._kept, *self._last])

    def __len__(self) -> int:
        return len(self._kept) + len(self._last)

    def append(self, item: Item) -> None:
        """Append an item."""
        self._last = [item]
        if self.count % self._stride == 0:
            self._kept.append(item)
            self._last = []
        self.count += 1
        self.bound(self._limit)

    def bound(self, limit: int) -> None:
        """Keep at most `limit` items and the last one from now on."""
        self._limit = limit
        while len(self._kept) > limit:
            last = self._kept[-1:]
            self._kept, self._stride = self._kept[::2], 2 * self._stride
            if not self._last and self._kept[-1] is not last[0]:
                self._last = last

    def filter(self, is_left: Callable[[Item], bool]) -> None:
        """Remove all other items."""
        self._kept, self._last = [item for item in self if is_left(item)], []
        self.count = max(0, len(self._kept) - 1) * self._stride + min(1, len(self._kept))


def newest_of_each(items: Sequence[Item], kinds: Sequence[str], limit: int) -> list[Item]:
    """Return the first item and the newest ones of each kind, at most three quarters of `limit`.

    `kinds` are those of all items. All items of rare kinds stay, and as many of each frequent one.
    """
    number, left = limit, limit
    while number > 1 and left > limit * 3 // 4:
        number //= 2
        left = 1 + sum(min(count, number) for count in Counter(kinds).values())
    seen: Counter[str] = Counter()
    kept: list[Item] = []
    for item, kind in zip(reversed(items[1:]), reversed(kinds[1:]), strict=True):
        seen[kind] += 1
        if seen[kind] <= number and len(kept) < limit * 3 // 4:
            kept.append(item)
    return [*items[:1], *reversed(kept)]
