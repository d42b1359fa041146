"""Tokens of the sources, which one worker writes once, and rows of them.

A folder has the tokenizer, two token files of each source, for training and held out, and
`text.json`, which says what they are and is written last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import samestep as ss
from recipes.gpt.config import DataSettings
from recipes.gpt.documents import Document, Documents, TextError, sources_of

CONTENTS_FILE = "text.json"
TOKENIZER_FILE = "tokenizer.json"
PARTS = ("train", "held_out")
# what decides the tokens
DECIDING = ("endings", "held_out", "most_bytes", "vocabulary", "tokenizer", "begin", "end")
ENCODED_TOGETHER = 256  # documents


@dataclass(frozen=True)
class Source:
    """Rows of a source to train on and held-out ones, and what the held-out ones are made of."""

    train: ss.Packed
    held_out: ss.Packed
    train_tokens: int
    held_out_bytes: int
    held_out_targets: int  # tokens that are predicted: all but the first of each document


@dataclass(frozen=True)
class Text:
    """The sources by name, the tokenizer, and the tokens before and after each document."""

    sources: dict[str, Source]
    tokenizer: Tokenizer
    around: tuple[int, int]
    digest: str

    @property
    def vocabulary(self) -> int:
        """The number of different tokens."""
        return size_of(self.tokenizer)

    def encode(self, beginning: str) -> list[int]:
        """Return the tokens of a document that begins with a text."""
        return [self.around[0], *self.tokenizer.encode(beginning, add_special_tokens=False).ids]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, up to the end of a document."""
        ends = (at for at, token in enumerate(tokens) if token in self.around)
        return self.tokenizer.decode(tokens[: next(ends, None)])


def open_text(
    settings: DataSettings,
    folder: Path,
    once: Callable[[Callable[[], None]], Any],
    say: Callable[[str], object],
) -> Text:
    """Open the rows of all sources, whose tokens `once` writes if the folder has none.

    Raises `TextError` for texts, a tokenizer or a folder that cannot be used.
    """

    def prepare() -> None:
        if not (folder / CONTENTS_FILE).exists():
            write_tokens(settings, folder, say)
            # processes that are forked later lack the threads of the tokenizer, and would wait
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    once(prepare)
    contents = read_contents(folder, settings)
    tokenizer = read_tokenizer(folder / TOKENIZER_FILE)
    sources = {}
    for name, parts in contents["sources"].items():
        rows = {
            part: ss.Packed(
                ss.TokenFile(folder / f"{name}.{part}.bin"),
                length=settings.length,
                vocabulary=size_of(tokenizer),
            )
            for part in PARTS
        }
        held_out = parts["held_out"]
        sources[name] = Source(
            **rows,
            train_tokens=parts["train"]["tokens"],
            held_out_bytes=held_out["bytes"],
            held_out_targets=held_out["tokens"] - held_out["documents"],
        )
    return Text(sources, tokenizer, special_tokens(tokenizer, settings), contents["digest"])


def read_contents(folder: Path, settings: DataSettings) -> dict[str, Any]:
    """Return what is in a folder of tokens. Raises `TextError` if settings need other tokens."""
    path = folder / CONTENTS_FILE
    if not path.exists():  # one worker has written it
        raise TextError(
            f"{path} does not exist on this host; tokens must be where all hosts see them: set "
            "data.tokens=DIR or --dir DIR to a folder on shared storage"
        )
    try:
        contents: dict[str, Any] = json.loads(path.read_text())
        written = contents["settings"]
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise TextError(
            f"{path} cannot be read: {error}; remove the folder to write it again"
        ) from None
    for name, value in deciding(settings).items():
        if written.get(name) != value:
            raise TextError(
                f"{folder} has tokens of data.{name}={written.get(name)}, not of {value}; set the "
                "same, or choose another folder with data.tokens=DIR or --dir DIR"
            )
    return contents


def deciding(settings: DataSettings) -> dict[str, Any]:
    """Return the settings that decide the tokens, as JSON has them."""
    chosen = {"path": settings.path, "sources": settings.sources}
    chosen |= {name: getattr(settings, name) for name in DECIDING}
    plain: dict[str, Any] = json.loads(json.dumps(chosen, default=lambda path: str(path.resolve())))
    return plain


def weights_of(settings: DataSettings, text: Text) -> dict[str, float]:
    """Return the share of each source. Raises `TextError` if its name is no source."""
    if settings.weights is None:
        return {name: float(source.train_tokens) for name, source in text.sources.items()}
    if settings.weights.keys() != text.sources.keys():
        raise TextError(
            f"data.weights must have a number for each of {', '.join(text.sources)}, got "
            f"{', '.join(settings.weights)}"
        )
    return dict(settings.weights)


# Preparation, on one worker


def write_tokens(settings: DataSettings, folder: Path, say: Callable[[str], object]) -> None:
    """Train a tokenizer, if none is given, and write it and all tokens into a new folder."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CONTENTS_FILE).exists():
        raise TextError(
            f"{folder} has files, but no {CONTENTS_FILE}; choose an empty folder for tokens with "
            "data.tokens=DIR"
        )
    part = folder.with_name(f".{folder.name}.{os.getpid()}")  # complete, or not there
    try:
        part.mkdir(parents=True)
        splits = {
            name: Split.of(name, documents, settings)
            for name, documents in sources_of(settings).items()
        }
        if settings.tokenizer is None:
            tokenizer = train_tokenizer(splits, settings, say)
        else:
            tokenizer = read_tokenizer(settings.tokenizer)
        around = special_tokens(tokenizer, settings)
        tokenizer.save(str(part / TOKENIZER_FILE))
        digest, sources = sha256((part / TOKENIZER_FILE).read_bytes()), {}
        for name, split in splits.items():
            sources[name] = {
                kind: write_part(
                    split, kind, tokenizer, around, part / f"{name}.{kind}.bin", digest
                )
                for kind in PARTS
            }
            say(describe(name, sources[name]))
        contents = {
            "settings": deciding(settings),
            "digest": digest.hexdigest(),
            "sources": sources,
        }
        (part / CONTENTS_FILE).write_text(json.dumps(contents, indent=2) + "\n")
        part.rename(folder)
    except OSError as error:
        if not (folder / CONTENTS_FILE).exists():  # another run was first
            raise TextError(f"tokens cannot be written to {folder}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@dataclass(frozen=True)
class Split:
    """The documents of a source, and the names of those to train on and of held-out ones."""

    documents: Documents
    names: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, source: str, documents: Documents, settings: DataSettings) -> Split:
        """Hold out one document in `data.held_out`, by a hash of its name, and at least one.

        Of documents with the same text, only the first counts: a copy would be in both parts.
        """
        found, seen = [], set[bytes]()
        for document in documents():
            content = document.text.encode()
            text = sha256(content).digest()
            if content and text not in seen:
                found.append((*document.hashes, document.name, len(content)))
                seen.add(text)
        if settings.most_bytes is not None:
            found.sort(key=lambda entry: entry[1])
            total = 0
            for count, (*_, size) in enumerate(found, 1):
                total += size
                if total >= settings.most_bytes:
                    found = found[: max(2, count)]
                    break
        if len(found) < 2:
            raise TextError(
                f"the source {source} has {len(found)} documents with text, expected at least 2: "
                "one to train on and one that is held out"
            )
        held_out = {name for split, _, name, _ in found if split % settings.held_out == 0}
        if not held_out or len(held_out) == len(found):
            held_out = {min(found)[2]}
        rest = {name for _, _, name, _ in found} - held_out
        return cls(documents, {"train": frozenset(rest), "held_out": frozenset(held_out)})

    def __getitem__(self, kind: str) -> Iterator[Document]:
        names = self.names[kind]
        return (document for document in self.documents() if document.name in names)


def train_tokenizer(
    splits: Mapping[str, Split], settings: DataSettings, say: Callable[[str], object]
) -> Tokenizer:
    """Train byte-level pairs (Sennrich et al. 2016, arXiv 1508.07909) on the documents to train on.

    Raises `TextError` if there are not enough different pairs.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        special_tokens=sorted({settings.begin, settings.end}),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    say(f"training a tokenizer of {settings.vocabulary:,} tokens")
    texts = (document.text for split in splits.values() for document in split["train"])
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < settings.vocabulary:
        raise TextError(
            f"the texts are enough for {tokenizer.get_vocab_size()} tokens; set data.vocabulary to "
            f"at most that, or give more text, got data.vocabulary={settings.vocabulary}"
        )
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json, which then takes special tokens in texts as texts."""
    if not path.is_file():
        raise TextError(f"{path} does not exist; expected a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  the library raises plain exceptions
        raise TextError(f"{path} cannot be read as a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def size_of(tokenizer: Tokenizer) -> int:
    """Return one more than the largest token, some of which may be unused."""
    return 1 + max(tokenizer.get_vocab().values())


def special_tokens(tokenizer: Tokenizer, settings: DataSettings) -> tuple[int, int]:
    """Return the tokens before and after each document. Raises `TextError` if one is missing."""
    found = []
    for key in ("begin", "end"):
        name = getattr(settings, key)
        token = tokenizer.token_to_id(name)
        if token is None:
            special = tokenizer.get_added_tokens_decoder().values()
            known = ", ".join(each.content for each in special if each.special) or "none"
            raise TextError(
                f"the tokenizer has no token {name}; set data.{key} to one of its special tokens: "
                f"{known}"
            )
        found.append(token)
    return found[0], found[1]


def write_part(
    split: Split,
    kind: str,
    tokenizer: Tokenizer,
    around: tuple[int, int],
    path: Path,
    digest: Any,
) -> dict[str, int]:
    """Write the tokens of a part, add them to a digest, and return what was counted."""
    begin, end = around
    dtype = "uint16" if size_of(tokenizer) <= 2**16 else "int32"
    counts = dict.fromkeys(("documents", "bytes", "tokens"), 0)

    def encoded() -> Iterator[np.ndarray]:
        documents = split[kind]
        while batch := [document.text for document in islice(documents, ENCODED_TOGETHER)]:
            encodings = tokenizer.encode_batch(batch, add_special_tokens=False)
            for text, encoding in zip(batch, encodings, strict=True):
                tokens = np.array([begin, *encoding.ids, end], dtype)
                digest.update(tokens.tobytes())
                counts["documents"] += 1
                counts["bytes"] += len(text.encode())
                counts["tokens"] += len(tokens)
                yield tokens

    ss.TokenFile.write(path, encoded(), dtype=dtype)
    return counts


def describe(name: str, parts: Mapping[str, Mapping[str, int]]) -> str:
    """Describe the parts of a source for people."""
    texts = (
        f"{part['documents']:,} documents, {part['bytes']:,} bytes, {part['tokens']:,} tokens"
        for part in (parts[kind] for kind in PARTS)
    )
    return f"{name}: {'; held out: '.join(texts)}"
