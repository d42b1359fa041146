from __future__ import annotations

import torch

from samestep.step import hashing
from samestep.step.hashing import begin_hashes, device_hashes, hash_of, hashes_of


def test_hash_on_a_device_depends_on_every_byte_and_its_place(monkeypatch):
    values = [torch.arange(size).to(torch.uint8) for size in (3, 0, 40, 8)]
    expected = hash_of(values)
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 16)
    assert hash_of([value.clone() for value in values]) == expected
    hashes = {int(expected)}
    for value in values:
        for index in range(len(value)):
            for bit in (1, 128):
                value[index] ^= bit
                hashes.add(int(hash_of(values)))
                value[index] ^= bit
    assert len(hashes) == 1 + 2 * 51
    floats = torch.randn(8, generator=torch.Generator().manual_seed(1))
    signs = {int(hash_of([(floats * sign).view(torch.uint8)])) for sign in (1, -1)}
    assert len({*signs, int(hash_of([floats.roll(2).view(torch.uint8)]))}) == 3


def test_each_tensor_has_a_hash_of_its_own(monkeypatch):
    values = [torch.arange(size).to(torch.uint8) for size in (3, 0, 40, 8)]
    expected = device_hashes(values).tolist()
    assert begin_hashes(values)() == hashes_of([value.clone() for value in values])
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 16)
    assert device_hashes(values).tolist() == expected
    before = begin_hashes(values)()
    for number in (0, 2, 3):
        values[number][-1] ^= 1
        for hashes, equal in (
            (device_hashes(values).tolist(), expected),
            (
                begin_hashes(values)(),
                before,
            ),
        ):
            assert [n for n in range(4) if hashes[n] != equal[n]] == [number]
        values[number][-1] ^= 1


def test_a_conjugated_tensor_has_the_hash_of_its_values():
    value = torch.randn(3, dtype=torch.complex64)
    assert begin_hashes([value.conj()])() == begin_hashes([value.conj().resolve_conj()])()
