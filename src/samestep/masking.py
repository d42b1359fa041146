"""Masking of secrets in what a run writes and shows: its record, messages and names of sinks.

A text is a secret because of its name (`password`, `--api-key=`), or as a part of a URL that gives
access (`user:password@host`, `?X-Amz-Signature=`). Numbers and booleans are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final

MASK: Final = "***"
# whole words of a name: max_tokens is none of them
_WORDS: Final = frozenset(
    {
        "apikey", "authorization", "credential", "credentials", "passphrase", "passwd", "password",
        "secret", "secrets",
    }
)  # fmt: skip
_BEFORE_KEY: Final = frozenset({"access", "account", "api", "private", "secret"})
# of a token that is a text for a tokenizer
_BEFORE_TEXT: Final = frozenset(
    {
        "bos", "cls", "end", "eos", "image", "mask", "next", "pad", "prefix", "prompt", "sep",
        "special", "start", "stop", "unk",
    }
)  # fmt: skip
_PLACES: Final = frozenset({"dir", "env", "file", "folder", "path", "variable"})  # of a secret
_IN_QUERIES: Final = frozenset({"auth", "code", "key", "sig", "signature"})
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NAMED: Final = re.compile(r"(-{0,2}[\w.+-]+)(=|: +)(.+)", re.DOTALL)
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)([^\s/?#]*@)?(\S*)")
_PARAMETER: Final = re.compile(r"(?<=[?&;#])([^=&;#\s]+)=[^&;#\s'\"]+")


def is_secret(name: str) -> bool:
    """Return whether a text with this name, such as that of a setting or a flag, is a secret."""
    words = _words(name)
    if not words or words[-1] in _PLACES:
        return False
    if words[-1] == "token" and not _BEFORE_TEXT.intersection(words[-2:-1]):
        return True
    is_key = any(word in _BEFORE_KEY and after == "key" for word, after in pairwise(words))
    return is_key or not _WORDS.isdisjoint(words)


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def mask(value: Any, name: str = "") -> Any:
    """Return settings, nested mappings and sequences, with the secrets in them masked."""
    if isinstance(value, str):
        return MASK if value and is_secret(name) else mask_urls(value)
    if isinstance(value, Mapping):
        is_within = is_secret(name)  # of a secret, such as all of `credentials`
        return {key: mask(inner, name if is_within else str(key)) for key, inner in value.items()}
    return [mask(inner, name) for inner in value] if isinstance(value, list | tuple) else value


def mask_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command, with the secrets in them masked."""
    masked: list[str] = []
    follows = False  # the name of a secret, such as --password
    for word in words:
        named = _NAMED.fullmatch(word)
        if follows and not word.startswith("-"):
            masked.append(MASK)
        elif named and is_secret(named[1]):
            masked.append(f"{named[1]}{named[2]}{MASK}")
        else:
            masked.append(mask_urls(word))
        follows = word.startswith("-") and not named and is_secret(word)
    return masked


def mask_urls(text: str) -> str:
    """Return a text in which the URLs have neither users with passwords, nor secret parameters."""
    return _URL.sub(_mask_url, text) if "://" in text else text


def _mask_url(url: re.Match[str]) -> str:
    user = url[2] or ""
    # a user alone may be a token on the web; elsewhere it names an account or a container
    if ":" in user or url[1].lower().startswith(("http", "git", "ws")):
        user = f"{MASK}@" * bool(user)
    return url[1] + user + _PARAMETER.sub(_mask_parameter, url[3])


def _mask_parameter(parameter: re.Match[str]) -> str:
    name = parameter[1]
    hides = is_secret(name) or not _IN_QUERIES.isdisjoint(_words(name))
    return f"{name}={MASK}" if hides else parameter[0]
