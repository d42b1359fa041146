from __future__ import annotations

import hmac
from hashlib import sha256
from itertools import combinations

import pytest

from samestep.comm.signing import (
    NONCE_BYTES,
    derive,
    is_equal,
    is_proof,
    mac,
    nonce_of,
    prove,
    sign,
    verified,
)

KEY, OTHER = b"k" * 32, b"o" * 32
NONCES = bytes(2 * NONCE_BYTES)


def test_a_mac_is_hmac_sha256_of_the_length_of_the_context_the_context_and_the_data():
    expected = hmac.new(KEY, b"\0\0\0\x03" + "aé".encode() + b"data", sha256).digest()
    assert mac(KEY, "aé", b"data") == expected


def test_signed_bytes_are_valid_for_their_key_and_context_only():
    signed = sign(KEY, "first", b"data")
    assert verified(KEY, "first", signed) == b"data"
    changed = [signed[:-1] + b"A", signed + b"a", signed[1:], signed[:31], b""]
    assert [verified(KEY, "first", wrong) for wrong in changed] == [None] * 5
    assert verified(OTHER, "first", signed) is None
    assert verified(KEY, "second", signed) is None
    assert verified(KEY, "firstd", signed[:32] + b"ata") is None


def test_keys_differ_by_secret_purpose_and_nonces():
    keys = [
        derive(secret, purpose, nonces)
        for secret in ("a", "b")
        for purpose in ("objects", "statuses")
        for nonces in (b"", NONCES, NONCES[1:])
    ]
    assert all(left != right for left, right in combinations(keys, 2))


@pytest.mark.parametrize("proof", [None, 7, "", "é\ud800", "0" * 64, prove("a", "b", NONCES[1:])])
def test_anything_but_the_proof_is_refused(proof):
    assert not is_proof({"proof": proof}, "a", "b", NONCES)
    assert is_proof({"proof": prove("a", "b", NONCES)}, "a", "b", NONCES)


@pytest.mark.parametrize("nonce", [None, 7, "00", "z" * 64])
def test_a_hello_needs_a_nonce(nonce):
    with pytest.raises(ValueError, match=r"nonce|non-hexadecimal"):
        nonce_of({"nonce": nonce})
    assert nonce_of({"nonce": "0" * 64}) == bytes(NONCE_BYTES)


def test_texts_are_compared_whatever_they_contain():
    assert is_equal("é", "é")
    assert not is_equal("\ud800", "e")
