from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from recipes.gpt.config import Settings
from recipes.gpt.data import (
    CONTENTS_FILE,
    PARTS,
    TOKENIZER_FILE,
    Split,
    TextError,
    open_text,
    weights_of,
)
from recipes.gpt.documents import Document, sources_of
from recipes.settings import read
from tests.recipes.gpt.small import words


def opened(settings, folder):
    said = []
    return open_text(settings, folder, lambda prepare: prepare(), said.append), said


@pytest.fixture(scope="module")
def made(arguments, tmp_path_factory):
    settings = read(Settings, arguments).data
    folder = tmp_path_factory.mktemp("data") / "text"
    return settings, folder, *opened(settings, folder)


def documents_in(rows):
    """Return the tokens of each document of packed rows."""
    found = []
    for row in (rows[number] for number in range(len(rows))):
        columns = (row[name].tolist() for name in ("tokens", "targets", "documents"))
        for token, target, document in zip(*columns, strict=True):
            if document >= 0:
                found.append(token)
                if target == -100:
                    yield found
                    found = []


def test_each_document_is_in_one_part_and_read_back_from_its_tokens(made):
    settings, _, text, _ = made
    for name, documents in sources_of(settings).items():
        source = text.sources[name]
        parts = [list(documents_in(getattr(source, part))) for part in PARTS]
        assert all(parts)
        for tokens in (tokens for part in parts for tokens in part):
            assert (tokens[0], tokens[-1]) == text.around
        decoded = [text.decode(tokens[1:]) for part in parts for tokens in part]
        assert sorted(decoded) == sorted(document.text for document in documents())
        held_out = [text.decode(tokens[1:]) for tokens in parts[1]]
        assert source.held_out_bytes == sum(len(each.encode()) for each in held_out)
        assert source.held_out_targets == sum(len(tokens) - 1 for tokens in parts[1])
        assert source.train_tokens == sum(map(len, parts[0]))


def test_tokens_are_written_once_and_said(made, monkeypatch):
    settings, folder, text, said = made
    assert said[0] == "training a tokenizer of 280 tokens"
    assert [line.partition(":")[0] for line in said[1:]] == ["code", "prose"]
    monkeypatch.setattr("recipes.gpt.data.write_tokens", None)
    again, said = opened(settings, folder)
    assert not said
    assert again.digest == text.digest


def test_tokens_are_the_same_in_another_folder(made, tmp_path):
    settings, folder, _, _ = made
    opened(settings, tmp_path / "text")
    for path in folder.iterdir():
        assert (tmp_path / "text" / path.name).read_bytes() == path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_the_name_of_a_special_token_in_a_text_is_text(made):
    _, _, text, _ = made
    begin, *tokens = text.encode("a <|endoftext|> b")
    assert begin == text.around[0]
    assert not {*tokens} & {*text.around}
    assert text.decode([*tokens, text.around[1], 5]) == "a <|endoftext|> b"


def test_an_existing_tokenizer_is_used_as_it_is(made, tmp_path):
    settings, folder, text, _ = made
    path = shutil.copy(folder / TOKENIZER_FILE, tmp_path / "own.json")
    changed = replace(settings, tokenizer=path, vocabulary=4096)
    other, said = opened(changed, tmp_path / "text")
    assert len(said) == 2
    assert other.digest == text.digest


def test_numbers_that_a_tokenizer_leaves_out_count(made, tmp_path):
    settings, folder, text, _ = made
    content = json.loads((folder / TOKENIZER_FILE).read_text())
    vocabulary, unused = content["model"]["vocab"], 400
    vocabulary[max(vocabulary, key=vocabulary.get)] = unused
    (tmp_path / "own.json").write_text(json.dumps(content))
    other, _ = opened(replace(settings, tokenizer=tmp_path / "own.json"), tmp_path / "text")
    assert (text.vocabulary, other.vocabulary) == (280, unused + 1)


def split_of(count, settings, size=10):
    documents = [Document(f"{number}.txt", f"{number:0{size}}") for number in range(count)]
    documents += [Document("copy.txt", documents[0].text)] if documents else []
    return Split.of("s", lambda: iter(documents), settings).names


def test_a_share_of_documents_is_held_out_and_new_ones_move_none():
    settings = replace(Settings().data, held_out=10)
    few, many = split_of(500, settings), split_of(1000, settings)
    assert 70 < len(many["held_out"]) < 130
    assert few["held_out"] < many["held_out"]
    assert few["train"] < many["train"]


def test_at_least_one_document_is_in_each_part():
    assert [len(part) for part in split_of(2, Settings().data).values()] == [1, 1]
    assert [len(part) for part in split_of(5, Settings().data).values()] == [4, 1]


def test_a_limit_of_bytes_takes_documents_by_a_hash():
    few = split_of(100, replace(Settings().data, most_bytes=95))
    more = split_of(100, replace(Settings().data, most_bytes=500))
    assert sum(map(len, few.values())) == 10
    assert few["train"] | few["held_out"] < more["train"] | more["held_out"]


@pytest.mark.parametrize("count", [0, 1])
def test_a_source_needs_two_documents(count):
    with pytest.raises(TextError, match=rf"the source s has {count} documents with text, expected"):
        split_of(count, Settings().data)


def test_weights_are_those_of_the_tokens_or_of_the_settings(made):
    settings, _, text, _ = made
    tokens = {name: source.train_tokens for name, source in text.sources.items()}
    assert weights_of(settings, text) == tokens
    weights = {"code": 3.0, "prose": 1.0}
    assert weights_of(replace(settings, weights=weights), text) == weights
    message = r"data\.weights must have a number for each of code, prose, got code"
    with pytest.raises(TextError, match=message):
        weights_of(replace(settings, weights={"code": 1.0}), text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 300}, r"text has tokens of data\.vocabulary=280, not of 300; set the same"),
        ({"held_out": 7}, r"text has tokens of data\.held_out=5, not of 7"),
    ],
)
def test_a_folder_with_other_tokens_is_refused(changes, message, made):
    settings, folder, _, _ = made
    with pytest.raises(TextError, match=message):
        opened(replace(settings, **changes), folder)


def test_damaged_contents_are_refused(made, tmp_path):
    settings, folder, _, _ = made
    shutil.copytree(folder, tmp_path / "text")
    (tmp_path / "text" / CONTENTS_FILE).write_text("{")
    with pytest.raises(TextError, match=r"text\.json cannot be read: .*; remove the folder to"):
        opened(settings, tmp_path / "text")


def test_a_host_that_does_not_see_the_tokens_says_so(made, tmp_path):
    settings, *_ = made
    with pytest.raises(TextError, match=r"text\.json does not exist on this host; tokens must be"):
        open_text(settings, tmp_path / "text", lambda prepare: None, print)


def with_tokenizer(content):
    def change(settings, root):
        (root / "own.json").write_text(content)
        return replace(settings, tokenizer=root / "own.json")

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda settings, root: replace(settings, tokenizer=root / "none.json"),
            r"none\.json does not exist; expected a tokenizer\.json",
        ),
        (with_tokenizer("{}"), r"own\.json cannot be read as a tokenizer\.json: "),
        (
            with_tokenizer(
                json.dumps(
                    json.loads(
                        Tokenizer.from_str(
                            '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
                        ).to_str()
                    )
                )
            ),
            r"the tokenizer has no token <\|endoftext\|>; set data\.begin to one of .*: none",
        ),
        (
            lambda settings, _: replace(settings, vocabulary=4000),
            r"the texts are enough for \d+ tokens; set data\.vocabulary to at most that",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit_leaves_no_folder(change, message, made, tmp_path):
    settings, *_ = made
    with pytest.raises(TextError, match=message):
        opened(change(settings, tmp_path), tmp_path / "text")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_folder_with_other_files_is_refused_before_the_work(made, tmp_path):
    settings, *_ = made
    (tmp_path / "notes.txt").write_text("mine")
    message = r" has files, but no text\.json; choose an empty folder for tokens with data\.tokens="
    with pytest.raises(TextError, match=message):
        opened(settings, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_written_is_named(made, tmp_path):
    settings, *_ = made
    (tmp_path / "file").write_text(words(0))
    with pytest.raises(TextError, match=r"tokens cannot be written to .*file/text: "):
        opened(settings, tmp_path / "file" / "text")
