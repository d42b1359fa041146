"""Masking of secrets in what a run writes and shows: its record, messages and names of sinks.

A text is a secret because of its name (`password`), or as a part of a URL that gives access
(`user:password@host`, `?X-Amz-Signature=`). The name comes before it: as a key, as a word of a
command (`--token x`), or within a text, with any quotes (`{"token": "x"}`, `Server=y;Password=x`).
Numbers and booleans are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final

MASK: Final = "***"
# words of a name, alone or at the end of one such as PGPASSWORD: max_tokens is none of them
_WORDS: Final = (
    "authorization", "cookie", "cookies", "credential", "credentials", "passcode", "passphrase",
    "passwd", "password", "passwords", "pwd", "secret", "secrets",
)  # fmt: skip
_BEFORE_KEY: Final = (
    "access", "account", "api", "auth", "encryption", "private", "secret", "signing", "ssh",
)  # fmt: skip
_KEYS: Final = tuple(f"{word}key" for word in _BEFORE_KEY)
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
_NAME: Final = r"-{0,2}\w[\w.+-]*"
_NAMED: Final = re.compile(rf"({_NAME}|[+~]+{_NAME})(=|: +)(.+)", re.DOTALL)
# a name within a text, before its value
_NAME_WITHIN: Final = re.compile(
    rf"(?<![\w./-])\\*[\"']?(?P<name>{_NAME})"
    r"(?:\\*[\"']?\s*(?P<sign>[:=])\s*|(?P<space>\s+|\\*[\"'],\s*)(?!\\*[\"']?-))"
)
_QUOTED: Final = r"(?P<quote>\\*[\"'])(?:\\.|(?!(?P=quote))[^\\])*(?P=quote)|[{\[].*"
_VALUES: Final = {  # by the sign before it; a password of a DSN may contain spaces
    "=": re.compile(rf"{_QUOTED}|[^\s,;&{{}}\])\"']+(?:[^;=]*(?=;))?", re.DOTALL),
    ":": re.compile(rf"{_QUOTED}|[^,{{}}\]\n\"']+", re.DOTALL),
    None: re.compile(rf"{_QUOTED}|\S+", re.DOTALL),
}
# the user of a URL; only a password that is no port may contain spaces
_USER: Final = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)([^\s/?#]*@|[^\s/?#:@]*:(?!\d+\b)[^/?#@\n\"']*@)"
)
_PARAMETER: Final = re.compile(r"(?<=[?&;#])([^=&;#\s]+)=[^&;#\s'\"]+")


def is_secret(name: str) -> bool:
    """Return whether a text with this name, such as that of a setting or a flag, is a secret."""
    words = _words(name)
    if name == "-p":
        return True
    if not words or words[-1] in _PLACES:
        return False
    *before, last = words
    if last.endswith("token") and not {*before[-1:], last.removesuffix("token")} & _BEFORE_TEXT:
        return True
    joined = {"".join(pair) for pair in pairwise(words)} | set(words)
    return any(each.endswith((*_WORDS, *_KEYS)) for each in joined)


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def mask(value: Any, name: str = "") -> Any:
    """Return settings, nested mappings and sequences, with the secrets in them masked."""
    if isinstance(value, str):
        return MASK if value and is_secret(name) else mask_text(value)
    if isinstance(value, Mapping):
        is_within = is_secret(name)  # of a secret, such as all of `credentials`
        return {key: mask(inner, name if is_within else str(key)) for key, inner in value.items()}
    if not isinstance(value, list | tuple):
        return value
    return [mask(inner, name) for inner in value] if is_secret(name) else mask_words(value)


def mask_words(words: Iterable[Any]) -> list[Any]:
    """Return the words of a command, with the secrets in them masked."""
    masked: list[Any] = []
    name = ""  # the flag before a word, such as --password
    for word in words:
        named = _NAMED.fullmatch(word) if isinstance(word, str) else None
        if named and is_secret(named[1]):
            masked.append(f"{named[1]}{named[2]}{MASK}")
        else:
            masked.append(mask(word, "" if _is_shown(word) else name))
        name = word if isinstance(word, str) and word.startswith("-") and not named else ""
    return masked


def _is_shown(word: Any) -> bool:
    """Return whether what follows the name of a secret is none: another flag, or a number."""
    return isinstance(word, str) and (word.startswith("-") or word.isdecimal())


def mask_text(text: str) -> str:
    """Return a text in which neither URLs nor values after the names of secrets are readable."""
    parts, end = list[str](), 0
    for named in _NAME_WITHIN.finditer(text):
        is_flag = named["name"].startswith("-")
        if named.start() < end or not is_secret(named["name"]) or (named["space"] and not is_flag):
            continue
        value = _VALUES[named["sign"]].match(text, named.end())
        if value and not _is_shown(value[0]):
            quote = value["quote"] or ""
            parts += text[end : named.end()], f"{quote}{MASK}{quote}"
            end = value.end()
    return mask_urls("".join([*parts, text[end:]]))


def mask_urls(text: str) -> str:
    """Return a text in which the URLs have neither users with passwords, nor secret parameters."""
    # the path of a URL may contain spaces and other URLs, so parameters may be anywhere behind it
    before, sign, after = text.partition("://")
    if not sign:
        return text
    return _USER.sub(_mask_user, before + sign + _PARAMETER.sub(_mask_parameter, after))


def _mask_user(url: re.Match[str]) -> str:
    # a user alone may be a token on the web; elsewhere it names an account or a container
    hides = ":" in url[2] or url[1].lower().startswith(("http", "git", "ws"))
    return f"{url[1]}{MASK}@" if hides else url[0]


def _mask_parameter(parameter: re.Match[str]) -> str:
    name = parameter[1]
    hides = is_secret(name) or not _IN_QUERIES.isdisjoint(_words(name))
    return f"{name}={MASK}" if hides else parameter[0]
