from __future__ import annotations

import sysconfig
from itertools import islice
from pathlib import Path

import pytest

from recipes.gpt.config import DataSettings
from recipes.gpt.documents import (
    Document,
    TextError,
    descriptions,
    folder,
    sources_of,
    standard_library,
)


def write(root, **texts):
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def test_files_are_documents_in_the_order_of_their_paths(tmp_path):
    write(tmp_path, b_txt="two\r\n", a__z_md="one", _hidden="no", c__d__e="é")
    assert list(folder(tmp_path, None)) == [
        ("a/z.md", "one"),
        ("b.txt", "two\r\n"),
        ("c/d/e", "é"),
    ]


def test_lines_of_json_are_documents_by_their_numbers(tmp_path):
    write(tmp_path, x_jsonl='{"text": "one\\ntwo", "id": 1}\n\n{"text": ""}\n')
    assert list(folder(tmp_path, None)) == [("x.jsonl:1", "one\ntwo"), ("x.jsonl:3", "")]


def test_only_named_endings_are_read(tmp_path):
    write(tmp_path, a_txt="one", b_bin=b"\xff")
    assert [name for name, _ in folder(tmp_path, (".txt",))] == ["a.txt"]


def test_hashes_follow_from_the_name_alone():
    assert Document("a", "x").hashes == Document("a", "y").hashes != Document("b", "x").hashes


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"a_bin": b"a\xffb"}, r"a\.bin is no text in UTF-8 \(invalid start byte\); convert or"),
        (
            {"a_jsonl": '{"text": "x"}\n{"tex": "y"}'},
            r'a\.jsonl, line 2: expected JSON such as \{"',
        ),
        ({"a_jsonl": "[1]"}, r"a\.jsonl, line 1: expected JSON"),
        ({"a_jsonl": '{"text": 3}'}, r"a\.jsonl, line 1: expected JSON"),
        ({"a_jsonl": '{"text": "\\ud800"}'}, r"a\.jsonl, line 1: expected JSON"),
        ({"a_jsonl": "nothing"}, r"a\.jsonl, line 1: expected JSON .* got 'nothing'"),
    ],
)
def test_a_file_that_is_no_text_is_named(texts, message, tmp_path):
    with pytest.raises(TextError, match=message):
        list(folder(write(tmp_path, **texts), None))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(TextError, match=r"none is no folder; expected one with text files or"):
        list(folder(tmp_path / "none", None))


def test_settings_name_the_sources(tmp_path):
    write(tmp_path, a_txt="one")
    of = lambda **changes: list(sources_of(DataSettings(**changes)))  # noqa: E731
    assert of() == ["code", "prose"]
    assert of(path=tmp_path) == ["text"]
    assert of(sources={"x": tmp_path, "y-2": tmp_path}) == ["x", "y-2"]
    with pytest.raises(TextError, match=r"data\.path and data\.sources are both set; set one"):
        of(path=tmp_path, sources={"x": tmp_path})
    for name in ("a b", "all", "../x"):
        with pytest.raises(TextError, match=r"data\.sources: a name has letters, .* got '"):
            of(sources={name: tmp_path})


def test_without_a_folder_the_installed_python_is_read():
    names = [name for name, _ in islice(standard_library(), 40)]
    assert names == sorted(names)
    assert {"abc.py", "argparse.py"} <= set(names)
    assert not any("test" in Path(name).parts for name in names)
    assert (Path(sysconfig.get_path("stdlib")) / names[0]).exists()
    names = {name for name, text in islice(descriptions(), 400) if text}
    assert {"description/torch", "description/numpy"} <= names
