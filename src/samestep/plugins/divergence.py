"""Detection of state that differs between workers, and of changes by lanes that stay local."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from samestep.comm.base import World
from samestep.data.generators import can_seed, find, get_state, observe
from samestep.data.nested import tensors_in
from samestep.data.random_state import set_generators
from samestep.data.search import KINDS
from samestep.errors import DivergenceError
from samestep.plugin import RunPlugin
from samestep.plugins.disagreement import Disagreement, differing, grouped
from samestep.snapshot.files import checksum
from samestep.snapshot.manager import Tracked
from samestep.step.hashing import bytes_of, hash_of, texts_of
from samestep.step.lane_pass import LanePass, LossSpec, StepPlugin
from samestep.step.optimizer_state import DividedState

OWN_ATTRIBUTES: Final = frozenset(vars(torch.nn.Module()))  # of every module, such as its hooks
MOST_VALUES: Final = 2000  # of one attribute that are compared

COMPARING: Final = "comparing the workers' states"
CAUSES: Final = (
    "expected the same bits on all workers. Likely causes: gradients that are not made by"
    " run.backward (one that a lane computes itself is that of the loss (p * gradient).sum()),"
    " code that changes the model or the optimizer on some workers only (a condition on the rank,"
    " or random numbers or data that differ between workers), an optimizer whose step is not"
    " deterministic, or, if it is always the same host, faulty memory"
)
CAUSES_OF_TEXTS: Final = (
    "expected the same value on all workers. Likely causes: code that computes it from what only"
    " one worker has, such as the losses of its own lanes, a clock or its rank; use the means that"
    " run.backward or run.evaluate returns, or send it to all workers with run.all_gather"
)
SHOWN: Final = 60  # characters of a value in an error


class DivergenceCheck(RunPlugin):
    """Compares what is tracked and not sharded: tensors, also of replicated `modules`, and numbers.

    Workers compare a digest of all bytes: a NaN is equal to itself, and 0.0 differs from -0.0. Only
    if digests differ, they compare a checksum of each tensor, and each number and text. If it also
    `blames` hardware, workers whose tensors differ from most others' are said to be wrong, so that
    a run can go on without them. Numbers are inputs of the next update, so user code made them
    differ. `shards` are those of tracked optimizers: all of their options are the same.
    """

    def __init__(
        self,
        intervals: Sequence[int | None],
        world: World,
        tracked: Tracked,
        modules: list[torch.nn.Module],
        *,
        blames: bool = False,
    ) -> None:
        self.modules, self._blames = modules, blames
        self.shards: dict[str, DividedState] = {}
        self._world, self._tracked = world, tracked
        self._intervals = [steps for steps in intervals if steps is not None]
        self._has_begun = self._is_fresh = False
        self._equal_step: int | None = None

    def expire(self) -> None:
        """Forget the last comparison, because user code ran after it."""
        self._is_fresh = False

    def compare_if_due(self, step: int, *, last: bool = False) -> None:
        """Compare after the first step of this process, and the last one, and when one is due."""
        first, self._has_begun = not self._has_begun and not last, True
        is_due = first or last or any(step % every == 0 for every in self._intervals)
        if not self._intervals or not is_due:
            return
        if not (last and step == self._equal_step):
            self.compare(step, what="ending the run" if last else COMPARING)

    def compare(
        self, step: int, shared: Mapping[str, Any] | None = None, what: str = COMPARING
    ) -> None:
        """Compare the workers after this step. Raises `DivergenceError` on all of them.

        `shared` are the states of tracked objects that are not sharded, if they are known already.
        Collective, except with one worker and if no user code ran since the last comparison.
        """
        # A snapshot right after a comparison need not compare again. All workers skip it together,
        # since they made the same calls.
        if self._world.size == 1 or self._is_fresh:
            return
        states = {name: shard.shared_state() for name, shard in self.shards.items()}
        states.update(self._tracked.states()[0] if shared is None else shared)
        for number, module in enumerate(self.modules):
            states[f"module {number} ({type(module).__name__})"] = module.state_dict()
        self._world.wait_for_gpu()
        # One digest per worker. Checksums of each tensor follow only if these differ.
        cut = texts_of({name: shard.counters_of_cut() for name, shard in self.shards.items()})
        entries = self._world.all_gather_json([digest(states), cut], what)
        digests, cuts = zip(*entries, strict=True)
        if len(set(digests)) > 1 or differing_texts(cuts):
            entry = [socket.gethostname(), checksums(states), texts_of(states) | cut]
            self._compare_all(step, self._world.all_gather_json(entry, "comparing checksums"))
        self._equal_step, self._is_fresh = step, True

    def _compare_all(self, step: int, entries: Sequence[Any]) -> None:
        """Raise the error about (host, checksums, texts) of all workers, if they differ."""
        hosts, sums, texts = zip(*entries, strict=True)
        tensors = differing(sums)
        if names := differing_texts(texts):  # tensors that differ may follow from them
            what = described(names[0], texts, hosts)
            raise self._error(step, [*names, *tensors], hosts, texts, what)
        if tensors:  # otherwise only their devices differ, and so the kinds of digests
            raise self._error(step, tensors, hosts, sums, "", blames=self._blames)

    def _error(
        self,
        step: int,
        names: Sequence[str],
        hosts: Sequence[str],
        values: Sequence[Mapping[str, str]],
        what: str,
        *,
        blames: bool = False,
    ) -> DivergenceError:
        """Return the error for this worker about what differs; `what` describes the first."""
        own = [[of_worker.get(name) for name in names] for of_worker in values]
        disagreement = Disagreement([(host, "", row) for host, row in zip(hosts, own, strict=True)])
        if not what:
            ranks = disagreement.ranks
            (who,) = grouped(dict.fromkeys(ranks), hosts).values()
            what = f"{who} differ{'s' * (len(ranks) == 1)} from the majority"
            if not disagreement.is_certain:
                who = " and ".join(grouped(dict(enumerate(row[0] for row in own)), hosts).values())
                what = f"there is no majority: {who} differ from each other"
            what += f"; {CAUSES}"
        which = f" (the first of {len(names)} values that differ)" if names[1:] else ""
        resume = (
            "nothing was compared earlier in this attempt: resume from a snapshot that you trust,"
            " or start over"
        )
        if self._equal_step is not None:
            resume = (
                f"all workers were equal after step {self._equal_step}: resume from a snapshot of"
                " that step or an earlier one"
            )
        return disagreement.error(
            DivergenceError,
            self._world.rank,
            f"workers differ after step {step} in {names[0]!r}{which}: {what}."
            f" samestep verify finds the first step that differs; {resume}",
            blames=blames,
            step=step,
            tensor=names[0],
        )


def checksums(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksums of the tensors in a nested state, by path; skip aliases."""
    return {
        path: f"{tensor.dtype} {tuple(tensor.shape)} {checksum(data.numpy().data)}"
        for path, tensor in _unique(state)
        for data in [bytes_of(tensor.cpu())]
    }


def digest(state: Mapping[str, Any]) -> str:
    """Return a hash of all values in a nested state; GPUs hash their own tensors."""
    hasher = xxh3_128(repr(texts_of(state)).encode(errors="surrogatepass"))
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, tensor in _unique(state):
        if tensor.device.type == "cpu":
            hasher.update(bytes_of(tensor).numpy().data)  # no copy
        else:
            by_device.setdefault(tensor.device, []).append(bytes_of(tensor))
    for values in by_device.values():
        hasher.update(hash_of(values).cpu().numpy().data)  # 8 bytes instead of the tensors
    return hasher.hexdigest()


def differing_texts(texts_by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the paths of values that differ between workers that have them.

    As in a snapshot, each worker may have its own keys in a dict.
    """
    paths = dict.fromkeys(path for texts in texts_by_rank for path in texts)
    return [path for path in paths if len({t[path] for t in texts_by_rank if path in t}) > 1]


def described(path: str, texts_by_rank: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str:
    """Describe the values of all workers, by rank, of which some differ."""
    texts = {rank: own[path] for rank, own in enumerate(texts_by_rank) if path in own}
    parts = [
        f"{text[:SHOWN]}{'...' * (len(text) > SHOWN)} on {who}"
        for text, who in grouped(texts, hosts).items()
    ]
    return f"{' and '.join(parts)}; {CAUSES_OF_TEXTS}"


def _unique(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested state with their paths; skip aliases."""
    seen = set()
    for path, tensor in tensors_in(state, "/"):
        # tied parameters have the same memory
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if memory not in seen:
            seen.add(memory)
            yield path, tensor


class LaneObserver(StepPlugin):
    """Reports to `samestep verify` what a lane changes that is not a parameter or buffer.

    These are the generators that its loss function and model reach and that nothing seeds, and
    plain attributes of modules. Also reports checksums of `modules` before each backward.
    """

    def __init__(self, rank: int, modules: Sequence[torch.nn.Module]) -> None:
        self._rank, self._modules = rank, modules
        self._seed: tuple[int, ...] = ()

    @contextmanager
    def lane(self, lane_pass: LanePass, *_: object) -> Iterator[None]:
        """Compare the state before and after a lane, which is the body of the `with` statement."""
        loss, seed = lane_pass.loss, lane_pass.seed
        if seed != self._seed:
            self._seed = seed
            states = {
                f"{type(module).__name__}{number or ''}": module.state_dict()
                for number, module in enumerate(self._modules)
            }
            sums = checksums(states)
            observe(kind="tensors", step=seed[0], call=seed[1:], rank=self._rank, checksums=sums)
            buffers = {name for module in self._modules for name, _ in module.named_buffers()}
            observe(kind="buffers", names=sorted(buffers))
        before = self._generators(loss)
        # What this changes is seeded before each lane, so its later changes do no harm. All other
        # generators keep state that stays on this worker.
        set_generators(0)  # by any value: the lane seeds them next
        seeded = {name for name, state in self._generators(loss).items() if state != before[name]}
        attributes = self._attributes(loss)
        yield
        for name, state in self._generators(loss).items():
            if name not in seeded and state != before.get(name):
                observe(kind="generator", step=seed[0], name=name)
        for name, value in self._attributes(loss).items():
            if value != attributes.get(name):
                observe(kind="attribute", step=seed[0], name=name)

    def _generators(self, loss: LossSpec) -> dict[str, str]:
        generators = {
            place.name: place.value()
            for place in find(loss_fn=loss.fn, model=loss.model, embed=loss.embed)
        }
        return {
            name: summary(get_state(generator))
            for name, generator in generators.items()
            if isinstance(generator, KINDS) and can_seed(generator)
        }

    def _attributes(self, loss: LossSpec) -> dict[str, str]:
        roots = [*self._modules, *([loss.model] if isinstance(loss.model, torch.nn.Module) else [])]
        summaries: dict[str, str] = {}
        for root in dict.fromkeys(roots):
            for path, module in root.named_modules():
                where = ".".join(part for part in (type(root).__name__, path) if part)
                for attribute, value in vars(module).items():
                    if attribute not in OWN_ATTRIBUTES:
                        summaries[f"{where}.{attribute}"] = summary(value)
        return summaries


def summary(value: Any) -> str:
    """Return a checksum of the numbers, texts and tensors in an object, to find changes."""
    summaries: list[str] = []
    queue = deque([value])
    while queue and len(summaries) < MOST_VALUES:  # breadth first; the object may contain itself
        value = queue.popleft()
        if hasattr(value, "is_sharded"):  # each worker has some of its rows
            continue
        if isinstance(value, torch.Tensor):
            value = bytes_of(value.cpu()).numpy()
        if isinstance(value, np.ndarray):
            summaries.append(checksum(np.ascontiguousarray(value).view(np.uint8).data))
        elif isinstance(value, (str, bytes, int, float, complex, type(None), np.generic)):
            summaries.append(repr(value))
        else:
            summaries.append(type(value).__name__)
            if isinstance(value, dict):
                queue += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple, deque)):
                queue += value
    return checksum(repr(summaries).encode())
