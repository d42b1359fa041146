"""Gradients that run.backward did not make are refused; other common uses of gradients work."""

from __future__ import annotations

import copy
import signal

import pytest
import torch
from torch import nn

import samestep as ss
from tests.jobs import classify, images
from tests.workers import run_workers, try_workers


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def job(body, *, sharded=False, **options):
    """Return a function for workers that calls `body` in each of four steps, then the optimizer."""

    def work():
        with ss.init(lanes=2, **options) as run:
            model = run.replicate(make_model())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if sharded:
                run.shard(optimizer)
            run.track(model=model, optimizer=optimizer)
            for batch in run.batches(images(16), 4):
                body(run, model, optimizer, batch)
                optimizer.step()
                optimizer.zero_grad()
            return [parameter.tolist() for parameter in model.parameters()]

    return work


def fails(workers, work, error, words):
    """Assert that each worker fails with this error."""
    ends = try_workers(work, workers)
    assert [type(end.error) for end in ends] == [error] * workers
    assert all(words in str(end.error) for end in ends), ends[0]


def same(body, **options):
    """Assert that a job does the same on one and on two workers."""
    (alone,) = run_workers(job(body, **options), 1)
    assert run_workers(job(body, **options), 2) == [alone, alone]


def plain_loop(run, model, optimizer, batch):
    for lane in batch:
        classify(model, lane)[0].backward()


def penalty_after(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    (0.1 * model[1].weight.square().sum()).backward()


def penalty_before(run, model, optimizer, batch):
    model[1].bias.square().sum().backward()
    run.backward(classify, model, batch)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("body", [plain_loop, penalty_after, penalty_before])
def test_backward_outside_of_run_backward_is_refused(body, sharded, workers, tmp_path):
    name = "'1.bias'" if body is penalty_before else "'1.weight'"
    words = f"SGD.step() would use a gradient of {name} of Sequential that run.backward did not"
    if sharded:
        words = "Instead of loss.backward(), write run.backward(loss_fn, model, batch)"
    work = job(body, sharded=sharded, dir=tmp_path, snapshot_every="1", check_every=1000)
    fails(workers, work, ss.errors.OptimizerError, words)
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("workers", [1, 2])
def test_backward_of_a_tracked_model_that_is_not_replicated_is_refused(workers):
    def work():
        with ss.init(lanes=2) as run:
            model = make_model()
            run.track(model=model)
            for batch in run.batches(images(16), 4):
                plain_loop(run, model, None, batch)
                torch.optim.SGD(model.parameters()).step()

    fails(workers, work, ss.errors.OptimizerError, "run.backward did not make")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_step_in_a_hook_of_a_gradient_is_refused(sharded, workers):
    def work():
        with ss.init(lanes=2) as run:
            model = run.replicate(make_model())
            for parameter in model.parameters():
                optimizer = torch.optim.SGD([parameter])
                if sharded:
                    run.shard(optimizer)
                parameter.register_post_accumulate_grad_hook(
                    lambda _, optimizer=optimizer: optimizer.step()
                )
            for batch in run.batches(images(16), 4):
                run.backward(classify, model, batch)

    fails(workers, work, ss.errors.OptimizerError, "SGD.step() was called while run.backward")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_loss_function_that_calls_backward_is_refused(sharded, workers):
    def loss_fn(model, batch):
        model[1].weight.square().sum().backward()
        return classify(model, batch)

    def body(run, model, optimizer, batch):
        run.backward(loss_fn, model, batch)

    words = "but in lane 0 it called backward() itself and left a gradient of '1.weight'"
    ends = try_workers(job(body, sharded=sharded), workers)
    assert type(ends[0].error) is ss.errors.LossError
    assert words in str(ends[0].error)


def gradients_of(model, lane):
    """Return the gradients of a lane, as for samples that are clipped, or of an adapted copy."""
    return torch.autograd.grad(classify(model, lane)[0], list(model.parameters()))


def set_before(run, model, optimizer, batch):
    for lane in batch.lanes(model):
        for parameter, gradient in zip(model.parameters(), gradients_of(model, lane), strict=True):
            parameter.grad = gradient
        batch.backward(classify(model, lane)[0])


def set_after(run, model, optimizer, batch):
    for lane in batch.lanes(model):
        batch.backward(classify(model, lane)[0])
        for parameter, gradient in zip(model.parameters(), gradients_of(model, lane), strict=True):
            parameter.grad = gradient


def set_of_a_part(run, model, optimizer, batch):
    for number, lane in enumerate(batch.lanes(model)):
        batch.backward(classify(model, lane)[0])
        if number == 0:
            model[1].bias.grad = torch.ones(10)


def set_by_a_loss_function(run, model, optimizer, batch):
    def loss_fn(model, lane):
        model[1].bias.grad = gradients_of(model, lane)[1]
        return classify(model, lane)

    run.backward(loss_fn, model, batch)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("body", [set_before, set_after, set_of_a_part, set_by_a_loss_function])
def test_a_gradient_that_a_lane_sets_is_refused(body, workers):
    ends = try_workers(job(body), workers)
    assert type(ends[0].error) is ss.errors.LossError
    assert "itself and left a gradient of '1." in str(ends[0].error)
    assert "is that of the loss sum((p * gradient.detach()).sum()" in str(ends[0].error)


def surrogate(run, model, optimizer, batch):
    for lane in batch.lanes(model):
        pairs = zip(model.parameters(), gradients_of(model, lane), strict=True)
        batch.backward(sum((p * gradient).sum() for p, gradient in pairs))


def copied(run, model, optimizer, batch):
    """Train a copy in each lane, as Reptile does."""
    for lane in batch.lanes(model):
        learner = copy.deepcopy(model)
        inner = torch.optim.SGD(learner.parameters(), lr=0.1)
        inner.zero_grad()
        classify(learner, lane)[0].backward()
        inner.step()
        pairs = zip(model.parameters(), learner.parameters(), strict=True)
        batch.backward(sum((p * (p - q).detach()).sum() for p, q in pairs))


def means_alone(run, model, optimizer, batch):
    """Estimate a gradient from two losses, of which no lane has a graph."""
    losses = []
    for step in (0.01, -0.01):
        with torch.no_grad():
            model[1].bias += step
            for lane in batch.lanes(model):
                batch.backward(classify(model, lane)[0], samples=len(lane[0]))
        losses.append(batch.means["loss"])
        assert model[1].bias.grad is None
        assert batch.means["samples"] == 2
    with torch.no_grad():
        means = run.backward(classify, model, batch)
    assert means["loss"] == losses[-1]
    model[1].bias.grad = torch.full((10,), (losses[0] - losses[1]) / 0.02)


def in_place(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def assigned(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    penalty = model[1].weight.square().sum()
    (gradient,) = torch.autograd.grad(penalty, [model[1].weight])
    model[1].weight.grad = model[1].weight.grad + gradient
    model[1].bias.grad = None


def adversarial_images(model, batch):
    """Perturb the images by their gradient, as in a loop without samestep."""
    pictures = batch[0].clone().requires_grad_()
    classify(model, (pictures, batch[1]))[0].backward()
    model.zero_grad()
    return [pictures.detach() + 0.1 * pictures.grad.sign(), batch[1]]


def adversarial_in_lanes(run, model, optimizer, batch):
    run.backward(
        lambda model, batch: classify(model, adversarial_images(model, batch)), model, batch
    )


def adversarial_in_the_body(run, model, optimizer, batch):
    for lane in batch:
        adversarial_images(model, lane)
        classify(model, lane)[0].backward()
        model.zero_grad(set_to_none=False)
    run.backward(classify, model, batch)


def several_calls(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    run.backward(lambda model, _: model[1].weight.square().sum(), model, batch)


def probe(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    other = make_model()
    other_optimizer = torch.optim.SGD(other.parameters())
    for lane in batch:
        classify(other, [model[0](lane[0]).detach(), lane[1]])[0].backward()
    other_optimizer.step()


def unfrozen(run, model, optimizer, batch):
    model[1].weight.requires_grad_(run.step > 0)
    run.backward(classify, model, batch)


def scaled(run, model, optimizer, batch):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run.backward(lambda model, batch: scaler.scale(classify(model, batch)[0]), model, batch)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "body",
    [
        in_place,
        pytest.param(assigned, marks=pytest.mark.long),
        adversarial_in_lanes,
        pytest.param(adversarial_in_the_body, marks=pytest.mark.long),
        several_calls,
        surrogate,
        copied,
        means_alone,
        pytest.param(probe, marks=pytest.mark.long),
        unfrozen,
        pytest.param(scaled, marks=pytest.mark.long),
    ],
)
def test_other_uses_of_gradients_work(body):
    same(body)


def test_a_step_without_a_gradient_is_refused():
    def body(run, model, optimizer, batch):
        with torch.no_grad():
            run.backward(classify, model, batch)

    fails(1, job(body), ss.errors.OptimizerError, "SGD.step() has no gradient, because the lanes")


def test_a_mean_over_other_items_is_refused_without_a_gradient_too():
    def body(run, model, optimizer, batch):
        with torch.no_grad():
            for pictures, labels in batch.lanes(model):
                weight = torch.arange(1.0, 11.0)
                batch.backward(nn.functional.cross_entropy(model(pictures), labels, weight))

    fails(2, job(body), ss.errors.LossError, "weighted by samples, lanes do not give the mean")


def clipped_by_torch(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def changed_in_place(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(0.5)


def changed_between_calls(run, model, optimizer, batch):
    clipped_by_torch(run, model, optimizer, batch)
    run.backward(classify, model, batch)


def replaced(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    model[1].bias.grad = torch.ones(10)


def group_added(run, model, optimizer, batch):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "body", [clipped_by_torch, changed_in_place, changed_between_calls, replaced, group_added]
)
def test_change_of_a_sharded_optimizer_is_refused(body, workers):
    words = (
        "add_param_group was called" if body is group_added else "to clip, use run.clip_grad_norm"
    )
    fails(workers, job(body, sharded=True), ss.errors.OptimizerError, words)


def in_closure(body):
    """Return a body that makes the step, with another body as the closure."""

    def step(run, model, optimizer, batch):
        optimizer.step(lambda: body(run, model, optimizer, batch))
        optimizer.zero_grad()

    return step


def bias_cleared(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    model[1].bias.grad = None


@pytest.mark.parametrize("sharded", [False, True])
def test_a_gradient_that_a_closure_clears_is_not_used(sharded):
    same(in_closure(bias_cleared), sharded=sharded)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_backward_in_a_closure_outside_of_run_backward_is_refused(sharded, workers):
    words = "run.backward(loss_fn, model, batch)"
    fails(workers, job(in_closure(plain_loop), sharded=sharded), ss.errors.OptimizerError, words)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gradient_that_a_closure_gives_to_a_sharded_optimizer_is_refused(workers):
    words = "to clip, use run.clip_grad_norm"
    fails(workers, job(in_closure(replaced), sharded=True), ss.errors.OptimizerError, words)


def clipped(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    run.clip_grad_norm(model, 0.1)
    run.backward(lambda model, _: model[1].weight.square().sum(), model, batch)


def without_the_bias(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    model[1].bias.grad = None
    if run.step % 2:
        run.clip_grad_norm(model, 0.1)


def cleared(run, model, optimizer, batch):
    run.backward(lambda model, batch: 3 * classify(model, batch)[0], model, batch)
    model.zero_grad(set_to_none=run.step % 2 == 0)
    run.backward(classify, model, batch)
    if run.step == 2:
        model.zero_grad()


def stepped_twice(run, model, optimizer, batch):
    run.backward(classify, model, batch)
    optimizer.step()


@pytest.mark.parametrize(
    "body",
    [
        clipped,
        pytest.param(without_the_bias, marks=pytest.mark.long),
        cleared,
        pytest.param(stepped_twice, marks=pytest.mark.long),
        pytest.param(several_calls, marks=pytest.mark.long),
        unfrozen,
    ],
)
def test_gradients_of_a_sharded_optimizer_can_be_cleared_and_clipped(body):
    same(body, sharded=True)


def test_gradient_made_while_its_parameter_was_frozen_is_noticed_later():
    def body(run, model, optimizer, batch):
        plain_loop(run, model, optimizer, batch)

    def work():
        with ss.init(lanes=2) as run:
            model = run.replicate(make_model().requires_grad_(requires_grad=False))
            assert not any(parameter.requires_grad for parameter in model.parameters())
            model.requires_grad_()
            for batch in run.batches(images(16), 4):
                plain_loop(run, model, None, batch)
                torch.optim.SGD(model.parameters()).step()

    with pytest.raises(ss.errors.OptimizerError, match=r"run\.backward did not make"):
        work()


def test_model_can_be_trained_by_hand_after_its_run():
    model = make_model()
    with ss.init() as run:
        run.replicate(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plain_loop(None, model, None, [images(4)[:4]])
    torch.optim.SGD(model.parameters()).step()
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.fixture
def _own_signal_handlers():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_own_signal_handlers")
def test_a_run_that_was_not_closed_does_not_disturb_the_next():
    model = make_model()
    left = ss.init(lanes=2)
    left.replicate(model)
    with ss.init(lanes=2) as run:
        run.replicate(model)
        for batch in run.batches(images(16), 4):
            run.backward(classify, model, batch)
            torch.optim.SGD(model.parameters()).step()
        left.close()
        for batch in run.batches(images(16), 4):
            plain_loop(run, model, None, batch)
            with pytest.raises(ss.errors.OptimizerError, match=r"run\.backward did not make"):
                torch.optim.SGD(model.parameters()).step()
