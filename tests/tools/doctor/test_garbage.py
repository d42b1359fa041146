"""Checks report findings and never raise, whatever the machine's files and commands contain."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from samestep.tools.doctor.command import as_text, default_workers, examine
from samestep.tools.doctor.system import Case, System
from tests.tools.doctor.fake_system import FILES, Interface, Space
from tests.tools.doctor.test_software import TWO_GPUS

WORDS = st.sampled_from(
    [
        *("max", "-1", "0", "9" * 30, "²", "0-", ":", "\0", "[", "1,2", ", "),
        *("MemTotal:", "MemAvailable: 9"),
    ]
)
GARBAGE = st.lists(WORDS | st.text(max_size=5), max_size=8).map(" ".join)
TEXTS = (
    st.none()
    | GARBAGE
    | st.lists(GARBAGE, max_size=4).map("\n".join)
    | st.sampled_from([*FILES.values(), *TWO_GPUS.values()])
)
NAMES = st.text(min_size=1, max_size=4) | st.just("eth0")
SIZES = st.integers(0, 9)
INTERFACES = st.dictionaries(NAMES, st.builds(Interface, st.booleans(), SIZES), max_size=3)
LIMITS = st.none() | st.integers(0, 9)
VARIABLES = [
    *("SAMESTEP_THREADS", "SAMESTEP_LANES", "SAMESTEP_REMOTE", "OMP_NUM_THREADS"),
    *("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "KUBERNETES_SERVICE_HOST"),
    *("GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"),
]


class RandomSystem(System):
    """A machine with random content, which is the same for every query."""

    def __init__(self, draw):
        super().__init__(draw(st.dictionaries(st.sampled_from(VARIABLES), GARBAGE, max_size=4)))
        self._texts = draw(st.lists(TEXTS, min_size=1, max_size=8))
        self._names = draw(st.lists(NAMES, max_size=3))
        self._limits = draw(st.tuples(LIMITS, LIMITS))
        self._interfaces = draw(INTERFACES)
        self._towards = draw(st.none() | st.just("eth0"))
        self._mounts = draw(st.lists(st.tuples(st.just("/") | GARBAGE, GARBAGE), max_size=3))
        self._space = draw(st.none() | st.builds(Space, SIZES, SIZES))

    def text(self, path):
        return self._texts[crc32(path.encode()) % len(self._texts)]

    def names(self, path):
        return self._names

    def run(self, *command):
        return self.text(" ".join(command))

    def process_limits(self, kind):
        return self._limits

    def interfaces(self):
        return self._interfaces

    def interface_towards(self, host):
        return self._towards

    def mounts(self):
        return self._mounts

    def space(self, path):
        return self._space


@given(st.data())
def test_any_machine_is_examined(data):
    system = RandomSystem(data.draw)
    findings = examine(Case(system, Path("/runs/one"), default_workers(system)))
    assert as_text(findings)
    json.dumps([asdict(finding) for finding in findings])
