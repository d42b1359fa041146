"""Message authentication: proofs of holding a secret, and signed bytes.

All MACs are HMAC-SHA256 (RFC 2104), and are compared in constant time. Each purpose has a key of
its own, derived from the secret and from fresh nonces of the ends that use it.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Mapping
from typing import Any, Final

MAC_BYTES: Final = 32
NONCE_BYTES: Final = 32
_LENGTH: Final = struct.Struct(">I")


def mac(key: bytes, context: str, data: bytes) -> bytes:
    """Return the MAC of bytes in a context: what they are, and which of several messages."""
    start = context.encode(errors="surrogatepass")
    digest = hmac.new(key, _LENGTH.pack(len(start)) + start, "sha256")
    digest.update(data)  # not joined to the context: it may have gigabytes
    return digest.digest()


def derive(secret: str, purpose: str, nonces: bytes = b"") -> bytes:
    """Return the key for a purpose."""
    return mac(secret.encode(), f"samestep {purpose}", nonces)


def sign(key: bytes, context: str, data: bytes) -> bytes:
    """Return the bytes preceded by their MAC."""
    return mac(key, context, data) + data


def verified(key: bytes, context: str, signed: bytes) -> bytes | None:
    """Return the bytes that were signed with this key in this context, None for others."""
    received, data = signed[:MAC_BYTES], signed[MAC_BYTES:]
    return data if hmac.compare_digest(received, mac(key, context, data)) else None


def is_equal(received: str, expected: str) -> bool:
    """Compare with a secret in a time that does not depend on where the texts differ."""
    return hmac.compare_digest(received.encode(errors="surrogatepass"), expected.encode())


def nonce_of(hello: Mapping[str, Any]) -> bytes:
    """Return the nonce of a hello. Raises `ValueError` if it has none."""
    nonce = hello.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != 2 * NONCE_BYTES:
        raise ValueError("expected a hello with a nonce")
    return bytes.fromhex(nonce)


def prove(token: str, purpose: str, nonces: bytes) -> str:
    """Return the proof of holding the token, for the nonces of both ends."""
    return derive(token, purpose, nonces).hex()


def is_proof(hello: Mapping[str, Any], token: str, purpose: str, nonces: bytes) -> bool:
    """Return whether a hello has that proof."""
    proof = hello.get("proof")
    return isinstance(proof, str) and is_equal(proof, prove(token, purpose, nonces))
