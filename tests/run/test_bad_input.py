"""Bad input raises the right exception, with a message that names the value and the fix."""

from __future__ import annotations

import os
import re
import time
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import samestep as ss
from samestep.cli import main
from samestep.record import files
from tests.jobs import Net, classify, images
from tests.workers import run_workers, try_workers


def one_step(
    run,
    loss_fn=classify,
    model=None,
    dataset=None,
    *,
    batch_size=4,
    update=None,
    count=None,
    **batches,
):
    """Run the first step of a loop over a data set."""
    model = run.replicate(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)) if model is None else model
    )
    for batch in run.batches(images(8) if dataset is None else dataset, batch_size, **batches):
        run.backward(loss_fn, model, batch, update=update, count=count)
        break


def fails_with(error, words, body):
    with pytest.raises(error, match=words), ss.init(lanes=2) as run:
        body(run)


def step_fails_with(error, words, *args, **options):
    fails_with(error, words, lambda run: one_step(run, *args, **options))


def errors_of(workers, body, **options):
    """Return the error of each worker."""

    def work():
        with ss.init(**{"lanes": 4, **options}) as run:
            body(run)

    return [outcome.error for outcome in try_workers(work, workers)]


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda loss: loss.repeat(3), r"a scalar tensor, got a tensor of shape \(3,\) in lane 0"),
        (lambda loss: loss.detach(), "lane 0 has no gradient"),
        (lambda loss: loss.item(), "got float in lane 0"),
        (lambda loss: None, "got NoneType in lane 0"),
        (lambda loss: (loss, 3), "dict of scalars by name.*got int"),
        (
            lambda loss: (loss, {}, {}),
            r"returned 3 values in lane 0, but must return a loss or \(loss, dict of scalars",
        ),
        (
            lambda loss: (loss, {"scores": torch.zeros(2)}),
            r"metric 'scores' must be a scalar, got a tensor of shape \(2,\)",
        ),
        (lambda loss: (loss, {"best": "cat"}), "metric 'best' must be a scalar, got str"),
    ],
)
def test_loss_function_must_return_a_scalar_with_gradient_and_a_dict_of_scalars(returned, words):
    step_fails_with(
        ss.errors.LossError, words, lambda model, batch: returned(classify(model, batch)[0])
    )


@pytest.mark.parametrize("batch_size", [0, -1, "32", 2.0, True, None])
def test_batch_size_must_be_a_positive_integer(batch_size):
    step_fails_with(
        ss.ConfigError,
        f"batch_size must be a whole number of at least 1 .*, got {batch_size!r}",
        batch_size=batch_size,
    )


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (images(0), "has no samples"),
        (Endless(), "Endless.*use run.streams"),
        (DataLoader(images(8)), "expected a data set, got a DataLoader; pass the data set"),
        (iter([]), "must have __len__ and __getitem__, got list_iterator"),
    ],
)
def test_data_set_must_be_map_style_and_not_empty(dataset, words):
    step_fails_with(ss.DataError, words, dataset=dataset)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"steps": -1},
            ss.ConfigError,
            "steps must be a whole number of at least 0 or None, got -1",
        ),
        ({"batch_size": 9, "drop_last": True}, ss.ConfigError, "leaves none of 8 samples"),
        ({"group_by": [0, 1]}, ss.DataError, "2 entries for 8 samples"),
        (
            {"group_by": [0] * 8, "drop_last": True},
            ss.ConfigError,
            "drop_last cannot be used with group_by",
        ),
        (
            {"group_by": [0] * 8, "order": [1]},
            ss.ConfigError,
            "group_by cannot be used with order, because both",
        ),
        (
            {"order": ss.Weighted([1] * 8), "shuffle": False},
            ss.ConfigError,
            "shuffle=False cannot be used with Weighted",
        ),
        ({"order": ss.Weighted([1])}, ss.DataError, "weights has 1 entries for 8 samples"),
        ({"order": [8]}, ss.DataError, "order must have indices from 0 to 7, got 8 at position 0"),
        ({"batch_size": None}, ss.ConfigError, "got None; pass it, or order=ss.ByLength"),
        (
            {"order": ss.ByLength([1] * 8, max_tokens=8)},
            ss.ConfigError,
            "batch_size cannot be used with ByLength, because max_tokens",
        ),
        (
            {"batch_size": None, "order": ss.ByLength([1], max_tokens=8), "drop_last": True},
            ss.ConfigError,
            "drop_last cannot be used with ByLength",
        ),
        (
            {"batch_size": None, "order": ss.ByLength([1], max_tokens=8)},
            ss.DataError,
            "lengths has 1 entries for 8 samples",
        ),
        ({"count": lambda batch: -0.5}, ss.DataError, "count must return .* got -0.5 for lane 0"),
        ({"count": lambda batch: -1}, ss.DataError, "count must return .* got -1 for lane 0"),
        ({"update": "head"}, ss.errors.ModelError, "must update a torch.nn.Module, got str"),
        (
            {"update": nn.Linear(2, 2)},
            ss.errors.ModelError,
            "Linear has parameters that are not replicated",
        ),
        (
            {"model": Net().requires_grad_(requires_grad=False)},
            ss.errors.ModelError,
            "Net has no parameter that requires a gradient",
        ),
        ({"model": nn.LazyLinear(2)}, ss.errors.ModelError, "'weight' has no shape yet"),
        (
            {"model": "a model"},
            ss.errors.ModelError,
            "run.replicate expected a torch.nn.Module, got str",
        ),
    ],
)
def test_invalid_argument_is_named(options, error, words):
    step_fails_with(error, words, **options)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "sampler",
            r"run.batches has order= \(indices, .* and run.evaluate uses each sample once",
        ),
        ("batch_sampler", "run.batches has order="),
        ("lengths", r"write order=ss.ByLength\(lengths, max_tokens=...\)"),
        ("max_tokens", r"write order=ss.ByLength\(lengths, max_tokens=...\)"),
        ("num_workers", "use loader_workers="),
        ("pin_memory", "are pinned automatically"),
    ],
)
@pytest.mark.parametrize("method", ["batches", "evaluate"])
def test_option_of_a_data_loader_is_answered_with_the_one_to_use(method, name, words):
    def body(run):
        start = [] if method == "batches" else [classify, Net()]
        getattr(run, method)(*start, images(8), 4, **{name: 1})

    fails_with(ss.ConfigError, f"run.{method} has no option {name}: .*{words}", body)


@pytest.mark.parametrize("dataset", [DataLoader(images(8)), Endless()])
def test_evaluation_needs_a_map_style_data_set(dataset):
    fails_with(
        ss.DataError,
        "expected a data set, got a DataLoader|Endless.*use run.streams",
        lambda run: run.evaluate(classify, run.replicate(Net()), dataset, 4),
    )


@pytest.mark.parametrize("batch", [DataLoader(images(8)), torch.zeros(4), [torch.zeros(4)]])
def test_backward_needs_a_batch_of_a_loop(batch):
    fails_with(
        ss.DataError,
        f"expected a batch of a loop over run.batches or run.streams, got {type(batch).__name__};"
        " write `for batch in run.batches",
        lambda run: run.backward(classify, run.replicate(Net()), batch),
    )


def test_a_loader_is_not_a_stream():
    fails_with(
        ss.DataError,
        "expected a function of the lane's number .* got DataLoader; .* use run.batches",
        lambda run: run.streams(DataLoader(images(8)), name="loader"),
    )


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_batch_is_not_one_lane_batch(lanes):
    with ss.init(lanes=lanes) as run:
        for batch in run.batches(images(4), 4):
            with pytest.raises(ss.DataError, match=r"cannot be unpacked.* run\.backward"):
                _, _ = batch
            with pytest.raises(ss.DataError, match=r"no item 'x'.* run\.backward"):
                batch["x"]


def test_lane_of_one_sample_with_batch_norm_names_lane_and_cures():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    step_fails_with(
        ss.DataError,
        "lane 0 of 2, with 1 sample, has only one at step 0; use drop_last=True .*fewer lanes",
        model=model,
        batch_size=2,
    )


def checkpointed(model, batch, *, use_reentrant):
    inputs = batch[0].flatten(1).requires_grad_()  # a frozen embedding, in an adapted model
    hidden = checkpoint.checkpoint(model[1], inputs, use_reentrant=use_reentrant)
    return hidden.square().mean()


def test_reentrant_checkpointing_is_named():
    def with_gradient(model, batch):
        return checkpointed(model, batch, use_reentrant=True)

    def without_gradient(model, batch):
        with torch.no_grad():
            teacher = checkpointed(model, batch, use_reentrant=True)
        return checkpointed(model, batch, use_reentrant=False) - teacher

    step_fails_with(ss.errors.LossError, "pass use_reentrant=False", with_gradient)
    with ss.init(lanes=2) as run:
        one_step(run, without_gradient)
    inputs = torch.ones(2, 64, requires_grad=True)  # torch's own function is back
    checkpoint.checkpoint(nn.Linear(64, 1), inputs, use_reentrant=True).sum().backward()
    assert inputs.grad is not None


@pytest.mark.parametrize("where", ["embed", "loss"])
def test_reentrant_checkpointing_is_named_in_losses_of_a_whole_batch(where):
    def embed(model, batch):
        if where == "embed":
            return checkpointed(model, batch, use_reentrant=True).view(1)
        return model(batch[0])

    def loss_fn(_, embeddings):
        if where == "embed":
            return embeddings.mean()
        return checkpoint.checkpoint(torch.square, embeddings, use_reentrant=True).mean()

    with ss.init(lanes=2) as run:
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        for batch in run.batches(images(4), 4):
            with pytest.raises(ss.errors.LossError, match="pass use_reentrant=False"):
                run.backward(loss_fn, model, batch, embed=embed)


def test_sparse_gradient_is_rejected():
    def loss_fn(model, batch):
        return model(batch[0]).sum()

    words = TensorDataset(torch.arange(8))
    step_fails_with(
        ss.errors.LossError,
        r"shape \(9, 2\) has a sparse gradient.*sparse=False",
        loss_fn,
        nn.Embedding(9, 2, sparse=True),
        words,
    )


def test_model_that_is_not_replicated_is_rejected():
    def body(run):
        run.backward(classify, Net(), next(iter(run.batches(images(8), 8))))

    fails_with(
        ss.errors.ModelError,
        "Net has parameters that are not replicated; pass it to run.replicate first",
        body,
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda run, net: net.double(),
            ss.errors.ModelError,
            "Net was changed after run.replicate: '.*' had torch.float32 on cpu, got torch.float64",
        ),
        (
            lambda run, net: setattr(net, "head", nn.Linear(3, 3)),
            ss.errors.ModelError,
            r"Net got the parameter 'head.weight' after run.replicate, so its values may differ",
        ),
        (
            lambda run, net: torch.optim.SGD(net.parameters(), lr=0.1).step(),
            ss.errors.OptimizerError,
            r"this SGD is not tracked, but updates parameters of the Adam that is",
        ),
    ],
)
@pytest.mark.parametrize("when", ["backward", "snapshot"])
def test_a_model_or_optimizer_that_changes_later_is_rejected(tmp_path, change, error, words, when):
    with closing(ss.init(lanes=2, dir=tmp_path)) as run:
        model = run.replicate(Net())
        optimizer = torch.optim.Adam(model.parameters())
        run.track(model=model, optimizer=optimizer)
        batch = next(iter(run.batches(images(8), 8)))
        run.backward(classify, model, batch)
        optimizer.step()
        with pytest.raises(error, match=words):  # noqa: PT012
            change(run, model)
            if when == "backward":
                run.backward(classify, model, batch)
            else:
                run.snapshot(now=True)


def test_a_parameter_that_leaves_a_sharded_optimizer_is_rejected():
    def body(run):
        model = run.replicate(Net())
        optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, batch in enumerate(run.batches(images(8), 4, epochs=2)):
            run.backward(classify, model, batch)
            optimizer.step()
            if number == 1:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()

    for error in errors_of(2, body):
        assert isinstance(error, ss.errors.OptimizerError)
        assert "a parameter of a sharded SGD was moved or converted after run.shard" in str(error)


def test_nested_loops_are_rejected():
    def body(run):
        list(
            zip(
                run.batches(images(8), 4, name="one"),
                run.batches(images(8), 4, name="other"),
                strict=True,
            )
        )

    fails_with(ss.DataError, "in the body of another", body)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "LBFGS cannot be sharded: only elementwise optimizers.*AdamW"),
        (
            type("Muon", (torch.optim.SGD,), {}),
            "Muon cannot be sharded: .* since PyTorch 2.9, Muon",
        ),
    ],
)
def test_another_optimizer_cannot_be_sharded(make, words):
    fails_with(
        ss.errors.OptimizerError,
        words,
        lambda run: run.shard(make(run.replicate(Net()).parameters())),
    )


def test_parameters_that_share_memory_cannot_be_sharded():
    def body(run):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].weight.data = model[0].weight.data
        run.shard(torch.optim.SGD(run.replicate(model).parameters(), lr=0.1))

    fails_with(ss.errors.OptimizerError, "share memory.*share one parameter", body)


def test_optimizer_with_state_cannot_be_sharded():
    def body(run):
        model = nn.Linear(64, 10)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.zeros(64)).sum().backward()
        optimizer.step()
        run.shard(optimizer)

    fails_with(ss.errors.OptimizerError, "has state already", body)


@pytest.mark.parametrize(
    "again",
    [
        lambda optimizer: optimizer,
        lambda optimizer: torch.optim.SGD(optimizer.param_groups[0]["params"]),
    ],
)
def test_parameter_cannot_be_sharded_twice(again):
    def body(run):
        run.shard(again(run.shard(torch.optim.SGD(run.replicate(Net()).parameters()))))

    words = "SGD has parameters that are already sharded"
    fails_with(ss.errors.OptimizerError, words, body)
    assert [words in str(error) for error in errors_of(2, body)] == [True, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lane": 8}, "lane is not an option of samestep; did you mean lanes"),
        ({"lanes": 0}, "lanes must be at least 1, got 0"),
        ({"check_every": 0}, "check_every must be at least 1, got 0"),
        ({"lanes": "eight"}, "lanes must be an integer or none, got 'eight'"),
        ({"precision": "bfloat"}, "precision must be.*did you mean bfloat16"),
        ({"device": "cuda"}, "device='cuda' needs a GPU, but torch finds no GPU"),
        (
            {"devices": ["cuda:0", "cuda:1"]},
            "devices=cuda:0,cuda:1 needs a GPU, but torch finds no GPU",
        ),
    ],
)
def test_invalid_option_is_named(options, words):
    with pytest.raises(ss.ConfigError, match=words):
        ss.init(**options)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SAMESTEP_LANES", "many", "SAMESTEP_LANES must be an integer or none, got 'many'"),
        ("SAMESTEP_LANS", "8", "SAMESTEP_LANS is not an option of samestep; did you mean lanes"),
        (
            "SAMESTEP_NONFINITE_LOSS",
            "go",
            "nonfinite_loss must be one of stop, skip, continue, got 'go'",
        ),
        ("RANK", "0", "RANK=0 is set and WORLD_SIZE"),
    ],
)
def test_invalid_environment_variable_is_named(name, value, words, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ss.ConfigError, match=words):
        ss.init()


def test_invalid_flag_is_named(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it was started')")
    assert main(["run", "--keep-last", "few", str(script)]) == 2
    assert "--keep-last must be an integer, got 'few'" in capsys.readouterr().err


def test_workers_have_the_same_directory(tmp_path):
    def body():
        with ss.init(lanes=2, dir=tmp_path / os.environ["RANK"]):
            pass

    for outcome in try_workers(body, 2):
        assert type(outcome.error) is ss.ConfigError
        words = "dir must be the same on all workers, got .*/0 on worker 0 and .*/1 on worker 1; "
        assert re.match(words, str(outcome.error))


def test_hosts_that_do_not_share_the_directory_are_an_error_unless_only_the_record_is_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "SHARE_SECONDS", 0.1)

    def body(snapshot_every, tracks):
        place = tmp_path / os.environ["RANK"]
        place.mkdir(exist_ok=True)
        os.chdir(place)  # one name for what are different directories, as on separate hosts
        with ss.init(lanes=2, dir="/proc/self/cwd/run", snapshot_every=snapshot_every) as run:
            if tracks:
                run.track(model=nn.Linear(1, 1))
            return (place / "run" / files.NAME).exists()

    for outcome in try_workers(body, 2, 1, False) + try_workers(body, 2, None, True):
        assert type(outcome.error) is ss.ConfigError
        words = "dir must be shared by all hosts, but worker 1 on .* does not see what worker 0 "
        assert re.match(words, str(outcome.error))
    assert run_workers(body, 2, None, False) == [True, False]


def test_workers_wait_half_of_the_timeout_for_a_shared_directory(tmp_path):
    started = time.monotonic()
    assert not files.is_locked_by(tmp_path, "another run", 0.2)
    assert 0.1 <= time.monotonic() - started < files.SHARE_SECONDS / 2


def test_more_workers_than_lanes_is_an_error_on_every_worker():
    errors = errors_of(3, lambda run: None, lanes=2)
    expected = (
        "lanes must be at least the number of workers (3), got 2; "
        "start at most 2 workers (samestep run -n 2), or increase lanes"
    )
    assert {str(error) for error in errors} == {expected}
    assert {type(error) for error in errors} == {ss.ConfigError}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda rank: nn.Linear(4, 2 + rank),
            r"'weight' is .*\(2, 4\).* on worker 0 and .*\(3, 4\).* on worker 1",
        ),
        (
            lambda rank: nn.Linear(4, 2, bias=rank == 0),
            r"'bias' is .*\(2,\).* on worker 0 and missing on worker 1",
        ),
        (
            lambda rank: nn.Linear(4, 2, dtype=(torch.float32, torch.float64)[rank]),
            "torch.float32.* and torch.float64",
        ),
        (
            lambda rank: nn.Linear(4, 2).requires_grad_(requires_grad=rank == 0),
            r"\(2, 4\), trained on worker 0 and torch.float32 \(2, 4\) on worker 1",
        ),
        (
            lambda rank: nn.ModuleDict({name: nn.Linear(2, 2) for name in ["ab", "ba"][rank]}),
            "in a different order",
        ),
    ],
)
def test_models_that_differ_between_workers_are_rejected(make, words):
    for error in errors_of(2, lambda run: run.replicate(make(run.rank))):
        assert isinstance(error, ss.errors.ModelError)
        assert re.search(f"^models differ between workers: .*{words}", str(error))


def test_replicate_copies_the_values_of_rank_0():
    def body():
        with ss.init(lanes=2) as run:
            torch.manual_seed(run.rank)
            model = Net()
            before = model.head.weight.detach().clone()
            assert run.replicate(model) is model
            return before, model.head.weight.detach()

    (first, first_after), (second, second_after) = run_workers(body, 2)
    assert not torch.equal(first, second)
    assert torch.equal(first, first_after)
    assert torch.equal(first, second_after)
