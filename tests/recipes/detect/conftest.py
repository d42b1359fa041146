"""A small set of digits in COCO format, made once."""

from __future__ import annotations

import pytest

from recipes.detect import make_data


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    directory = tmp_path_factory.mktemp("digits-coco")
    make_data.main([str(directory), "--train", "13", "--val", "5"])
    return directory
