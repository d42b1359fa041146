"""The arrays from which the orders of samples are computed, in a run's folder `record`.

Weights, lengths, groups or indices: with the plan in the events, they tell which samples every step
has used, without the script and its data.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import RecordError
from samestep.record.files import FOLDER
from samestep.storage import read_regular, write_atomically

if TYPE_CHECKING:  # readers of events need no numpy
    from numpy.typing import NDArray

ORDER_BYTES: Final = 2**30  # of all arrays of a record
HEADER_BYTES: Final = 8  # the kind of numbers; they follow, little endian
KINDS: Final = {b"|u1", b"<u2", b"<u4", b"<u8", b"<i8", b"<f8"}


def write_order(directory: Path, array: NDArray[Any], digest: str) -> bool:
    """Write an array, unless the record has it; return whether it has it then.

    Raises `RecordError` if it cannot be written.
    """
    import numpy as np

    path = _path(directory, digest)
    if path.exists():
        return True
    if array.dtype.kind in "iu" and array.min() >= 0:
        array = array.astype(np.min_scalar_type(array.max()))  # the values take 1 to 8 bytes
    others = sum(other.stat().st_size for other in order_files(directory))
    if others + array.nbytes > ORDER_BYTES:
        return False
    array = array.astype(array.dtype.newbyteorder("<"))
    content = array.dtype.str.encode().ljust(HEADER_BYTES) + array.tobytes()
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from error
    return True


def read_order(directory: Path, digest: str) -> NDArray[Any]:
    """Return an array of a record: float64, or int64 if it has whole numbers.

    Raises `RecordError` if it is missing or damaged.
    """
    import numpy as np

    path = _path(directory, digest)
    try:
        content = read_regular(path, 2 * ORDER_BYTES)
    except OSError as error:
        raise RecordError(f"cannot read the order of samples in {path}: {error}") from error
    kind, nbytes = content[:HEADER_BYTES].strip(), len(content) - HEADER_BYTES
    if kind not in KINDS or nbytes <= 0 or nbytes % int(kind[-1:]):
        raise RecordError(f"{path} is damaged: it does not begin with a kind of numbers")
    array = np.frombuffer(content, kind.decode(), offset=HEADER_BYTES)
    array = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    if hashlib.blake2b(array.data, digest_size=8).hexdigest() != digest:
        raise RecordError(f"{path} is damaged: its content does not have the digest of its name")
    return array


def order_files(directory: Path) -> list[Path]:
    """Return the files of all arrays of a record."""
    return sorted((directory / FOLDER).glob("order-*.bin"))


def _path(directory: Path, digest: str) -> Path:
    return directory / FOLDER / f"order-{digest}.bin"
