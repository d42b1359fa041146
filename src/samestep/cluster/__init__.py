"""This process's rank, world size and addresses, and how it reaches the other hosts."""

from samestep.cluster.network import (
    GLOO_INTERFACE,
    LOOPBACK_INTERFACE,
    OUTSIDE_ADDRESS,
    connect_to_master,
    gloo_address,
    gloo_interface,
    interface_towards,
    listen_at_master,
)
from samestep.cluster.process import STARTED_BY, ProcessInfo, find_process

__all__ = [
    "GLOO_INTERFACE",
    "LOOPBACK_INTERFACE",
    "OUTSIDE_ADDRESS",
    "STARTED_BY",
    "ProcessInfo",
    "connect_to_master",
    "find_process",
    "gloo_address",
    "gloo_interface",
    "interface_towards",
    "listen_at_master",
]
