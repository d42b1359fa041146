"""Real runs of the recipe on two small folders."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

import recipes.gpt
from recipes.gpt.config import Settings
from recipes.gpt.data import TOKENIZER_FILE, TextError
from recipes.gpt.train import main
from recipes.scores import SCORES_FILE
from recipes.settings import SETTINGS_FILE, SettingsError, read
from samestep.cli import main as samestep
from samestep.snapshot.read import list_snapshots, load
from tests.jobs import events, fingerprint, logged
from tests.recipes.gpt.small import make_texts, words
from tests.recipes.pictures import pictures
from tests.workers import WorkerFailedError, run_workers

RECIPE = Path(recipes.gpt.__file__).parent
HAS_MUON = hasattr(torch.optim, "Muon")
VARIANTS = {
    "bfloat16": ["precision=bfloat16", "optimizer.clip_norm=none"],
    "loader processes": ["data.loader_workers=1", "data.weights={code: 0.7, prose: 0.3}"],
    "untied": ["model.tied=false", "optimizer.shard=false"],
    **({"muon": ["optimizer.name=muon"]} if HAS_MUON else {}),
}


def train(workers, directory, arguments, **options):
    """Return the scores of a run and all that it left, by name."""
    scores = run_workers(main, workers, [*arguments, "--dir", str(directory)], **options)
    assert all(others == scores[0] for others in scores)
    return {
        **scores[0],
        **fingerprint(load(list_snapshots(directory)[-1]).state),
        **logged(directory),
        **pictures(directory),
    }


@pytest.fixture(scope="module")
def trained(arguments, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "trained"
    return directory, train(1, directory, arguments)


def test_the_number_of_workers_changes_nothing(trained, arguments, tmp_path):
    assert train(2, tmp_path, arguments) == trained[1]


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[pytest.mark.long] * (name != "muon")) for name in VARIANTS],
)
def test_the_number_of_workers_changes_no_variant(variant, arguments, tmp_path):
    arguments = [*arguments, *VARIANTS[variant], "steps=3"]
    assert train(3, tmp_path / "3", arguments) == train(1, tmp_path / "1", arguments)


@pytest.mark.skipif(not HAS_MUON, reason="needs PyTorch 2.9 or newer, which also has Muon")
def test_a_sharded_model_has_the_bits_of_a_replicated_one(trained, arguments, tmp_path):
    sharded = [*arguments, "model.shard=true", f"export={tmp_path / 'llama'}"]
    assert train(2, tmp_path / "run", sharded) == trained[1]
    assert (tmp_path / "llama" / "model.safetensors").exists()


def test_a_run_that_stopped_goes_on_with_other_workers(trained, arguments, tmp_path):
    directory = ["--dir", str(tmp_path)]
    run_workers(main, 2, [*arguments, *directory], environment={"SAMESTEP_STOP_AFTER": "3"})
    assert [event["step"] for event in events(tmp_path, "stopped")] == [3]
    assert train(3, tmp_path, arguments) == trained[1]


def test_the_record_has_the_loss_of_each_source(trained):
    directory, left = trained
    scalars = [event["values"] for event in events(directory, "scalars")]
    names = set().union(*scalars)
    assert {"loss", "code/loss", "prose/loss", "learning_rate", "tokens"} <= names
    assert {"code/rows", "prose/rows", "code/epochs", "prose/epochs"} <= names
    assert {"bits_per_byte/code", "bits_per_byte/prose", "bits_per_byte/all"} <= names
    losses = [values["loss"] for values in scalars if "loss" in values]
    assert losses[0] == pytest.approx(math.log(280), rel=0.05)
    tokens = [values["tokens"] for values in scalars if "tokens" in values]
    assert tokens == [96, 192, 384, 576]  # the batch size doubles at step 2
    assert left["all"] == scalars[-1]["bits_per_byte/all"]


def test_texts_are_sampled_and_shown(arguments, tmp_path, capfd):
    (tmp_path / "run").mkdir()
    run_workers(main, 1, [*arguments, "steps=1", "--dir", str(tmp_path / "run")])
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("> ")]
    assert len(lines) == 2
    assert lines[0].startswith("> 'a")
    assert [event["name"] for event in events(tmp_path / "run", "image")] == ["samples"]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_evaluation_as_a_command_gives_the_same_numbers(workers, trained, tmp_path, capfd):
    directory, left = trained
    command = ["--eval", "--dir", str(directory), "--out", str(tmp_path), "prompts=[ab, the, so]"]
    for scores in run_workers(main, workers, command):
        assert scores.keys() == {"code", "prose", "all"}
        assert scores.items() <= left.items()
    assert json.loads((tmp_path / SCORES_FILE).read_text()) == {"step": 4, "scores": scores}
    assert re.findall(r"^> '(ab|the|so)", capfd.readouterr().out, re.MULTILINE) == [
        "ab",
        "the",
        "so",
    ]


def test_an_exported_checkpoint_has_the_same_scores(trained, arguments, tmp_path):
    directory, left = trained
    export = f"export={tmp_path / 'llama'}"
    out = ["--out", str(tmp_path)]
    (scores,) = run_workers(main, 1, ["--eval", "--dir", str(directory), export, *out])
    assert {path.name for path in (tmp_path / "llama").iterdir()} == {
        *("config.json", "model.safetensors", TOKENIZER_FILE)
    }
    pretrained = ["--eval", "--pretrained", str(tmp_path / "llama"), *out]
    assert run_workers(main, 2, [*arguments, *pretrained]) == [scores] * 2
    assert scores.items() <= left.items()

    # tokens of its own tokenizer, and a run that starts from it
    own = [f"data.tokenizer={tmp_path / 'llama' / TOKENIZER_FILE}", "data.tokens=none"]
    fine = [*arguments, *own, f"pretrained={tmp_path / 'llama'}", "--dir", str(tmp_path / "fine")]
    (tuned,) = run_workers(main, 1, [*fine, "steps=2", "optimizer.learning_rate=0.001"])
    assert tuned["all"] == pytest.approx(scores["all"], rel=0.05)
    assert (tmp_path / "fine" / "text" / TOKENIZER_FILE).exists()


def test_tokens_stay_with_the_run_after_its_texts_are_gone(arguments, tmp_path):
    own = [*arguments, *make_texts(tmp_path), "data.tokens=none", "--dir", str(tmp_path / "run")]
    run_workers(main, 2, [*own, "steps=2"])
    shutil.rmtree(tmp_path / "prose")
    run_workers(main, 1, [*own, "steps=3"])

    make_again = tmp_path / "again"
    make_again.mkdir()
    make_texts(make_again)
    shutil.move(make_again / "prose", tmp_path / "prose")
    (tmp_path / "prose" / "more.txt").write_text(words(5))
    shutil.rmtree(tmp_path / "run" / "text")
    message = r"the tokens are not those that the snapshot of step 3 was trained on; their texts"
    with pytest.raises(WorkerFailedError, match=message):
        run_workers(main, 1, own)
    with pytest.raises(WorkerFailedError, match=message):
        run_workers(main, 1, ["--eval", "--dir", str(tmp_path / "run")])


@pytest.mark.long
def test_verify_finds_the_same_bits_also_after_a_kill(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["-n", "1,2", "--steps", "3", "--kill"]
    assert samestep(["verify", *flags, str(RECIPE / "train.py"), *arguments]) == 0
    assert "the same at every step: n=1, n=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (["data.path=."], TextError, "data.path and data.sources are both set"),
        (["data.weights={code: 1}"], TextError, "data.weights must have a number for each of"),
        (["model.heads=3"], SettingsError, "model.width must be an even multiple of model.heads"),
        (["precision=float16"], SettingsError, "precision=float16: expected one of"),
        (["optimizer.name=sgd"], SettingsError, "optimizer.name=sgd: expected one of"),
        (["optimizer.decay=1.5"], SettingsError, "optimizer.decay must be at most 1, got 1.5"),
        (["data.vocabulary=100"], SettingsError, "data.vocabulary must be at least 257, got 100"),
        (["model.vocabulary=100"], SettingsError, "model.vocabulary must be at least 280"),
        (["model.shard=true", "optimizer.name=muon"], SettingsError, "got muon and true"),
        (["model.shard=true", "optimizer.shard=no"], SettingsError, "got adamw and false"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(changes, error, message, arguments, tmp_path):
    texts = ["data.tokens=none"] if "data.path=." in changes else []
    with pytest.raises(error, match=re.escape(message)):
        main([*arguments, *changes, *texts, "--dir", str(tmp_path)])


def test_evaluation_without_a_snapshot_is_an_error(arguments, tmp_path):
    (tmp_path / SETTINGS_FILE).write_text("")
    with pytest.raises(SettingsError, match="--eval needs the --dir of a run with a snapshot"):
        main([*arguments, "--eval", "--dir", str(tmp_path)])


@pytest.mark.parametrize("path", sorted(RECIPE.glob("*.yaml")), ids=lambda path: path.name)
def test_files_of_settings_are_read(path):
    assert read(Settings, [str(path)]).steps > 100


def test_the_script_reads_top_to_bottom():
    assert len((RECIPE / "train.py").read_text().splitlines()) <= 350
