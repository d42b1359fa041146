from __future__ import annotations

import ast
import gc
from pathlib import Path

from tests.syntax import parse


class Parsing:
    """Garbage whose finalizer parses deeper in the stack."""

    def __init__(self):
        self.cycle = self

    def __del__(self, depth=30):
        if depth:
            self.__del__(depth - 1)
        else:
            parse("1 + 1")


def test_a_finalizer_that_parses_does_not_disturb_another_parser():
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(50)
        for _ in range(20):
            Parsing()
            assert isinstance(parse(Path(__file__).read_text()), ast.Module)
    finally:
        gc.set_threshold(*threshold)
        gc.collect()
    assert gc.isenabled()
