"""What tests of the language model recipe share."""

from __future__ import annotations

import pytest

from tests.recipes.gpt.small import SMALL, make_texts


@pytest.fixture(autouse=True, scope="module")  # before those that train
def _no_threads_of_tokenizers():
    """Let the tokenizers start no threads in a process that forks workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield


@pytest.fixture(scope="session")
def arguments(tmp_path_factory):
    """The settings of a small job, whose tokens are written by its first run."""
    root = tmp_path_factory.mktemp("texts")
    return [*SMALL, *make_texts(root), f"data.tokens={root / 'tokens'}"]
