"""Damaged and hostile variants of the bytes and JSON that readers expect."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

DEEP = "a value nested more deeply than Python recurses"
TEXTS = (
    "", "\0", "a\0b", "../../../../etc/passwd", "/etc/passwd", "/dev/zero", "~root", "..", "\ud800",
    "\u202e", "é" * 50, "a" * 10_000,
    "nan", "inf", "none", "true", "1e999", "-1", "0x7f", "1_000", "9" * 5_000, " 7 ", "%s%n",
    "${HOME}", "$(touch x)", "__class__",
    "os.system", "!!python/object/apply:os.system [id]", "cpu", "cuda:0", "dict", "tensor", "numpy",
    "torch.device", "complex64",
    "float8_e5m2", "object", "0x" + "f" * 5_000, DEEP,
)  # fmt: skip
NUMBERS = (
    -1, 0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
    -(2**63) - 1, 10**400, 0.5, -0.0, 1e308,
)  # fmt: skip
OTHERS = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    {"": {}},
    [None] * 100,
    float("nan"),
    float("inf"),
    -float("inf"),
)
PARTS = (
    b"\0", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"[" * 3_000, b"{" * 3_000, b"\n", b"\r",
    b"\xef\xbb\xbf", b"\xc3", b"/../",
    b"- &a [*a]\n", b"c",
)  # fmt: skip


def value(random: Random) -> Any:
    """Return a value that readers rarely expect."""
    return copy.deepcopy(random.choice(random.choice((TEXTS, NUMBERS, OTHERS))))


def text(random: Random, *expected: str) -> str:
    """Return an unusual text, or an expected one, possibly changed a little."""
    chosen = random.choice((*TEXTS, *map(str, NUMBERS), *expected, *expected))
    for _ in range(random.choice((0, 0, 1, 2))):
        place = random.randrange(len(chosen) + 1)
        chosen = (
            chosen[:place]
            + random.choice((*"0123456789.,:;=-+_ /\\\n\t\"'{}[]", "é", ""))
            + chosen[place + random.randrange(2) :]
        )
    return chosen


def of_bytes(random: Random, data: bytes) -> bytes:
    """Return bytes with one to four parts flipped, overwritten, deleted, repeated or cut off."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(changed) + 1)
        stop = min(start + random.choice((1, 1, 2, 8, 50)), len(changed))
        what = random.randrange(6)
        if what == 0 and start < stop:
            changed[start] ^= 1 << random.randrange(8)
        elif what == 1:
            changed[start:stop] = random.choice((*PARTS, random.randbytes(stop - start)))
        elif what == 2:
            del changed[start:stop]
        elif what == 3:
            changed[start:start] = changed[start:stop] * random.choice((1, 2, 100))
        elif what == 4:
            changed[start:stop] = random.choice(TEXTS).encode(errors="surrogatepass")
        elif random.random() < 0.2:
            del changed[start:]
    return bytes(changed)


def of_json(random: Random, plain: Any) -> Any:
    """Return JSON with one to three values replaced, deleted, doubled, wrapped or renamed."""
    root = [copy.deepcopy(plain)]
    for _ in range(random.randint(1, 3)):
        container, key = random.choice(list(_places(root)))
        other, other_key = random.choice(list(_places(root)))
        what = random.randrange(7)
        if what <= 1:
            container[key] = value(random)
        elif what == 2 and container is not root:
            del container[key]
        elif what == 3 and isinstance(container, list) and container is not root:
            container.insert(key, copy.deepcopy(container[key]))
        elif what == 4:
            container[key] = random.choice(
                ([container[key]], {random.choice(TEXTS): container[key]})
            )
        elif what == 5:
            container[key] = copy.deepcopy(other[other_key])
        elif isinstance(container, dict):
            container[random.choice((*TEXTS, *container))] = container.pop(key)
    return root[0]


def as_json(random: Random, plain: Any) -> bytes:
    """Write JSON, sometimes with a repeated key, and nested deeper than Python's writer can."""
    written = json.dumps(
        plain,
        ensure_ascii=random.random() < 0.5,
        separators=random.choice(((",", ":"), (", ", ": "))),
    )
    if random.random() < 0.1:
        written = written.replace("{", '{"step":1,"step":2,', 1)
    deep = random.choice((200, 900, 1_200, 50_000))
    return written.replace(json.dumps(DEEP), "[" * deep + "]" * deep).encode(errors="surrogatepass")


def _places(plain: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value inside JSON."""
    for key, inner in (
        list(plain.items())
        if isinstance(plain, dict)
        else list(enumerate(plain))
        if isinstance(plain, list)
        else []
    ):
        yield plain, key
        yield from _places(inner)
