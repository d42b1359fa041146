"""The last commit has a short subject, and a body."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = 72


def last_message(repository):
    """Return the message of the last commit that is no merge, or None without a history."""
    if shutil.which("git") is None or not (repository / ".git").exists():
        return None
    command = ["git", "log", "-1", "--no-merges", "--format=%B"]
    completed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    return completed.stdout.strip() or None if completed.returncode == 0 else None


def faults(message):
    """Return what is wrong with the message of a commit."""
    subject, _, body = message.partition("\n\n")
    return [
        *([f"subject of {len(subject)} characters"] if len(subject) > COLUMNS else []),
        *(["subject of several lines"] if "\n" in subject else []),
        *([] if body.strip() else ["no body"]),
    ]


def test_the_last_commit_has_a_short_subject_and_a_body():
    message = last_message(ROOT)
    if message is None:
        pytest.skip("no git history")
    assert faults(message) == [], f"git commit --amend: {message}"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"{'s' * 72}\n\nWhy.", []),
        (f"{'s' * 73}\n\nWhy.", ["subject of 73 characters"]),
        ("Resume at any number of workers", ["no body"]),
        ("Resume at any\nnumber of workers\n\nWhy.", ["subject of several lines"]),
    ],
)
def test_faults_of_messages_are_found(message, expected):
    assert faults(message) == expected


def test_a_source_archive_has_no_history(tmp_path):
    assert last_message(tmp_path) is None
