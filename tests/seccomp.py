"""A sandbox like that of containers: a filter that makes the kernel refuse system calls."""

from __future__ import annotations

import ctypes
import platform
import struct

from tests.needs import needs

NUMBERS = {
    "x86_64": {"memfd_create": 319, "pidfd_open": 434},
    "aarch64": {"memfd_create": 279, "pidfd_open": 434},
}
# from <linux/prctl.h> and <linux/seccomp.h>
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
# The filter is a BPF program of (code, jump if true, jump if false, value).
LOAD_NUMBER = struct.pack("=HBBI", 0x20, 0, 0, 0)
REFUSE = struct.pack("=HBBI", 0x06, 0, 0, 0x00050000 | 1)  # with EPERM
ALLOW = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)


class Program(ctypes.Structure):
    """A filter in the layout that the kernel expects."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse(*calls: str) -> None:
    """Make system calls fail in this process and its children. This cannot be undone."""
    needs("seccomp", is_present=platform.machine() in NUMBERS)
    numbers = [NUMBERS[platform.machine()][call] for call in calls]
    jumps = [
        struct.pack("=HBBI", 0x15, len(calls) - index, 0, number)
        for index, number in enumerate(numbers)
    ]
    program = b"".join([LOAD_NUMBER, *jumps, ALLOW, REFUSE])
    kernel = ctypes.CDLL(None, use_errno=True)
    packed = ctypes.byref(Program(len(program) // len(ALLOW), program))
    if kernel.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or kernel.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, packed, 0, 0
    ):
        raise OSError(ctypes.get_errno(), f"cannot install a filter against {', '.join(calls)}")
