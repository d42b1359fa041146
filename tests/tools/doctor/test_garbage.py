"""Whatever the files and commands of a machine say, the examination ends with findings, not with a stack trace."""

from __future__ import annotations

import json
from dataclasses import asdict
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from samestep.tools.doctor import gpus, show
from samestep.tools.doctor.case import Case
from samestep.tools.doctor.command import examine, usual_workers
from samestep.tools.doctor.system import Folder, Space, System
from tests.tools.doctor.fabricated import DIRECTORY, HEALTHY
from tests.tools.doctor.test_gpus import TWO

WORDS = st.sampled_from(
    [
        "max",
        "-1",
        "0",
        "9" * 30,
        "²",
        "0-",
        ":",
        "|--",
        "/32 host LOCAL",
        "\0",
        "MemTotal:",
        "SwapTotal: 9",
        "GPU0",
        "[",
        "1,2",
        ", ",
    ]
)
GARBAGE = st.lists(WORDS | st.text(max_size=5), max_size=8).map(" ".join)
TEXTS = (
    st.none()
    | GARBAGE
    | st.lists(GARBAGE, max_size=4).map("\n".join)
    | st.sampled_from([*HEALTHY.values(), *TWO.values()])
)
NAMES = st.lists(st.text(min_size=1, max_size=4) | st.just("eth0"), max_size=3)


class Drawn(System):
    """A machine that says anything, but the same each time it is asked."""

    def __init__(self, draw):
        super().__init__(draw(st.dictionaries(st.sampled_from(VARIABLES), GARBAGE, max_size=4)))
        self._texts = draw(st.lists(TEXTS, min_size=1, max_size=8))
        self._names = draw(NAMES)
        self._space = draw(
            st.none()
            | st.builds(Space, st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 9))
        )
        self._way = draw(st.none() | st.just("eth0"))

    def text(self, path):
        return self._texts[crc32(path.encode()) % len(self._texts)]

    def names(self, path):
        return self._names

    def space(self, path):
        return self._space

    def run(self, *command):
        return self.text(" ".join(command))

    def interface_towards(self, host):
        return self._way

    def folder(self, path):
        return Folder(path, writable=self._space is not None, locks=None)


VARIABLES = [
    *(
        "SAMESTEP_THREADS",
        "SAMESTEP_LANES",
        "SAMESTEP_REMOTE",
        "OMP_NUM_THREADS",
        "RANK",
        "WORLD_SIZE",
        "SLURM_JOB_ID",
    ),
    *(
        "SLURM_STEP_NUM_TASKS",
        "KUBERNETES_SERVICE_HOST",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "CUDA_VISIBLE_DEVICES",
    ),
]


@given(st.data())
def test_any_machine_is_examined(data):
    system = Drawn(data.draw)
    found = gpus.find_gpus(system)
    sections = examine(Case(system, DIRECTORY, usual_workers(system, len(found)), found))
    assert "\n" in show.as_text(sections)
    assert json.loads(json.dumps([asdict(section) for section in sections]))
