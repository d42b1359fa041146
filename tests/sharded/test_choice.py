import pytest
import torch
from torch import nn

from samestep.errors import ModelError
from samestep.sharded.choice import units_of
from tests.sharded.jobs import Block, Words

LARGE = 300  # a block of this width has more than 1 MiB


def names(model, units):
    return [name for name, _ in units_of(model, units)]


@pytest.mark.parametrize(
    ("model", "units", "expected"),
    [
        (Words(LARGE, 2), None, ["blocks.1", "blocks.0", "Words"]),
        (Words(), None, ["Words"]),  # its blocks are small
        (nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600)), None, ["1", "0", "Sequential"]),
        (nn.Sequential(nn.Linear(600, 600), nn.Tanh()), None, ["Sequential"]),  # no repeated ones
        (Words(blocks=2), (Block,), ["blocks.1", "blocks.0", "Words"]),
        (Words(blocks=1), (Block, nn.LayerNorm), ["blocks.0.norm", "blocks.0", "Words"]),
        (Words(), lambda name, _: name == "blocks.2", ["blocks.2", "Words"]),
    ],
)
def test_units_are_repeated_blocks_or_those_that_are_named(model, units, expected):
    assert names(model, units) == expected


def test_a_compiled_block_is_a_unit_with_its_wrapper():
    model = Words(blocks=2)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="eager")
    assert names(model, (Block,)) == ["blocks.1", "blocks.0", "Words"]


def tied(first, second):
    model = Words()
    parts = dict(model.named_modules())
    parts[second].weight = parts[first].weight
    return model


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("blocks.0.up", "blocks.1.up", "in 'blocks.0' and the second in 'blocks.1'"),
        ("head", "blocks.2.down", "in no unit and the second in 'blocks.2'"),
    ],
)
def test_a_parameter_in_two_units_is_refused(first, second, message):
    with pytest.raises(ModelError, match=message):
        names(tied(first, second), (Block,))


def test_a_parameter_may_have_two_names_in_a_unit():
    assert len(names(tied("blocks.0.up", "blocks.0.down"), (Block,))) == 4
