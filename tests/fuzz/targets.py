"""All fuzzed readers, each with a real example to start from and its documented errors."""

from __future__ import annotations

import asyncio
import io
import json
import math
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save

from recipes import settings
from recipes.vit.config import Settings
from recipes.vit.pretrained import PretrainedError, read_parameters
from samestep.cluster import find_process
from samestep.comm.link import MAX_BYTES, Frames, decode, frame, parse_address
from samestep.comm.signing import is_proof, nonce_of
from samestep.comm.store_server import KeyValueStore
from samestep.config import Config, merge, parse
from samestep.data.packed import Packed
from samestep.data.token_file import TokenFile
from samestep.errors import ConfigError, DataError
from samestep.launch.attempt import ElasticPolicy, Node
from samestep.launch.cluster_spec import Nodes, read_hosts
from samestep.launch.membership import Membership
from tests.fuzz import handed, mutate, network, page, records, snapshots
from tests.fuzz.target import Target

OPTIONS = (
    "8", "auto", "never", "500", "10min", "0.5", "cuda:0,cuda:1", "bfloat16", "continue",
    "runs/one", "mlflow,tensorboard", "my.sinks:Mine", "s3://bucket/run",
)  # fmt: skip
PREFIXES = (
    "", "RANK WORLD LOCAL_ MASTER", "SLURM", "OMPI PMIX", "PMI_ MPI_", "PET_ JOB_ KUBE RANK",
)  # fmt: skip
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "SLURM_NODELIST", "SLURM_STEP_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NNODES", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS", "JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST", "PET_NODE_RANK",
    "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT",
)  # fmt: skip
PLACES = (
    "0", "1", "2", "29500", "127.0.0.1", "n[1-2]", "n[001-999999999],m", "2(x3),1", "1(x999999999)",
    "node-0.job",
)  # fmt: skip


def targets(folder: Path) -> list[Target]:
    """Return all targets; their files are under `folder`."""
    readers = (_launching, snapshots.targets, records.targets, page.targets, _settings, _tokens)
    groups = [group(folder) for group in (*readers, _parameters)]
    groups.append(handed.targets(folder / "handed"))
    return [*_options(), *_messages(), *network.targets(), *chain.from_iterable(groups)]


def _options() -> list[Target]:
    names = [option.name for option in fields(Config)]

    def arguments(random: Random) -> dict[str, Any]:
        return {
            random.choice((*names, "lane")): random.choice((mutate.value, _option))(random)
            for _ in range(random.randint(1, 4))
        }

    def environment(random: Random) -> dict[str, str]:
        return {f"SAMESTEP_{name.upper()}": _option(random) for name in arguments(random)}

    def flag(random: Random) -> tuple[str, str]:
        return random.choice(names), _option(random)

    def check(config: Config) -> None:
        numbers = [value for value in vars(config).values() if isinstance(value, float)]
        assert all(map(math.isfinite, numbers)), config

    def read_flag(pair: tuple[str, str]) -> None:
        check(merge({pair[0]: parse(*pair, "--flag")}, {}))

    return [
        Target("arguments", arguments, lambda options: check(merge(options, {})), (ConfigError,)),
        Target("environment", environment, lambda values: check(merge({}, values)), (ConfigError,)),
        Target("flags", flag, read_flag, (ConfigError,)),
    ]


def _option(random: Random) -> str:
    return mutate.text(random, *OPTIONS)


def _launching(folder: Path) -> list[Target]:
    def environment(random: Random) -> dict[str, str]:
        prefix = random.choice(PREFIXES).split() or [""]
        likely = [name for name in VARIABLES if name.startswith(tuple(prefix))]
        chosen = {name for name in likely if random.random() < 0.9} | {
            name for name in VARIABLES if random.random() < 0.03
        }
        return {
            name: random.choice(PLACES) if random.random() < 0.8 else mutate.text(random, *PLACES)
            for name in sorted(chosen)
        }

    def address(random: Random) -> str:
        return mutate.text(random, "node1:29400", "[fd00::1]:29400", "1:4", "2")

    def hosts(random: Random) -> Path:
        path = folder / "hosts"
        likely = "node1 workers=4", "user@node2", "[fd00::1]", "# none", "-oProxyCommand=id"
        lines = [mutate.text(random, *likely) for _ in range(3)]
        path.write_bytes("\n".join(["node0", *lines]).encode(errors="surrogatepass"))
        return path

    def read_the_hosts(path: Path) -> None:
        for host in read_hosts(path):
            assert host.name[0] not in "-@", "the remote shell would read it as an option"
            assert not set(host.name) & set(" ;|&$`'\"\\\n\0"), (
                "the remote shell would read it as more than a host"
            )

    return [
        Target("place", environment, find_process, (ConfigError,)),
        Target("address", address, lambda text: parse_address(text, "--master"), (ConfigError,)),
        Target("nodes", address, Nodes.read, (ConfigError,)),
        Target("hosts", hosts, read_the_hosts, (ConfigError,)),
    ]


def _messages() -> list[Target]:
    messages = (
        {"as": "host", "name": "node1", "workers": 4, "nonce": "0" * 64, "proof": "0" * 64},
        {"report": "heartbeat", "step": 3, "attempt": 0},
    )
    requests = [
        {"do": "set", "key": "rank", "value": "MA=="}, {"do": "append", "key": "rank",
        "value": "MA=="}, {"do": "check", "keys": ["rank"]},
        {"do": "add", "key": "rank", "amount": 1}, {"do": "delete", "key": "rank"}, {"do": "get",
        "key": "other", "seconds": 0.0},
        {"do": "compare_set", "key": "rank", "expected": "", "value": "MA=="}, {"do": "wait",
        "keys": ["rank"], "seconds": 0.0},
        {"do": "count"},
    ]  # fmt: skip
    failure = {
        "rank": 0, "summary": "lost", "traceback": "", "status": 1, "is_secondary": False,
        "is_retryable": True, "step": 3,
    }  # fmt: skip
    news = [
        {"report": "heartbeat", "step": 3}, {"report": "ready"}, {"report": "ended", "attempt": 0},
        {"report": "signaled", "signal": 15, "again": False},
        {"report": "failed", "attempt": 0, "age": 0.1, "failure": {**failure, "host": "node1"}},
    ]  # fmt: skip
    loop = cache(asyncio.new_event_loop)

    def stream(random: Random) -> bytes:
        bodies = [mutate.as_json(random, mutate.of_json(random, message)) for message in messages]
        data = b"".join(map(frame, bodies))
        return mutate.of_bytes(random, data) if random.random() < 0.5 else data

    def read_stream(data: bytes) -> None:
        frames = Frames(MAX_BYTES)
        frames.feed(data)
        while (body := frames.next()) is not None:
            message = decode(body)
            assert not is_proof(message, "a token", "purpose", b"nonces")
            with suppress(ValueError):
                nonce_of(message)

    async def answer(request: Any) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(KeyValueStore().handle(request), 0.001)

    def read_request(request: Any) -> None:
        loop().run_until_complete(answer(request))

    def one_of(examples: list[dict[str, Any]], random: Random) -> Any:
        try:
            return decode(mutate.as_json(random, mutate.of_json(random, random.choice(examples))))
        except ValueError:
            return {}

    def receive(message: dict[str, Any]) -> None:
        nothing, terms = lambda _: None, ElasticPolicy(1, 2, 8, 3, 30.0)
        membership = Membership(terms, 0.0, open_attempt=nothing, log=nothing)
        membership.join(node := Node("node1", 4, nothing, 0.0))
        membership.receive(node, {"report": "ready"}, 1.0)
        membership.update(3.0)  # starts workers
        membership.receive(node, message, 4.0)
        membership.update(5.0)

    return [
        Target("messages", stream, read_stream, (ValueError,)),
        Target("requests", partial(one_of, requests), read_request, (ValueError,)),
        Target("news", partial(one_of, news), receive, (ValueError,)),
    ]


def _settings(folder: Path) -> list[Target]:
    path, base = folder / "settings.yaml", folder / "base.yaml"
    model, rest = {"width": 8, "depth": 2}, {"epochs": 3, "data": {"root": "there"}}
    example = {"model": model, "optimizer": {"lr": 0.1}, **rest}
    base.write_text(yaml.safe_dump(example))
    bomb = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
        b"%c: &%c [%s]\n" % (letter, letter, b",".join([b"*%c" % (letter - 1)] * 9))
        for letter in range(ord("b"), ord("k"))
    )

    def file(random: Random) -> list[str]:
        bombs = bomb, bomb + b"epochs: *j", bomb + b"- *j"
        plain = yaml.safe_dump(example).encode()
        changed = random.choice((plain, b"base: settings.yaml", b"base: /dev/zero", *bombs))
        if random.random() < 0.6:
            based = {"base": "base.yaml", **example}
            changed = mutate.as_json(random, mutate.of_json(random, based))
        path.write_bytes(mutate.of_bytes(random, changed) if random.random() < 0.6 else changed)
        return [str(path)]

    def argument(random: Random) -> list[str]:
        names = ("model.width", "optimizer.lr", "data", "epochs", "lanes", "seed", "width")
        key = random.choice((*names, mutate.text(random, "model.depth")))
        return [f"{key}={mutate.text(random, '1e-3', '[1, 2]', 'none', 'true')}"]

    def read(arguments: list[str]) -> object:
        return settings.read(Settings, arguments)

    read([])  # evaluates the annotations of the dataclasses, once

    return [
        Target(name, make, read, (settings.SettingsError,), reads_elsewhere=True, is_slow=True)
        for name, make in (("settings", file), ("setting", argument))
    ]


def _tokens(folder: Path) -> list[Target]:
    path = folder / "tokens.bin"
    TokenFile.write(path, [range(9), [], range(5)], dtype="uint16")
    files = {file: file.read_bytes() for file in (path, path.with_suffix(".idx"))}

    def make(random: Random) -> Path:
        for file, data in files.items():
            file.write_bytes(mutate.of_bytes(random, data) if random.random() < 0.6 else data)
        return path

    def read(path: Path) -> None:
        packed = Packed(TokenFile(path), length=4, vocabulary=10_000)
        assert sum(int((row["documents"] >= 0).sum()) for row in packed) <= path.stat().st_size

    return [Target("tokens", make, read, (ConfigError, DataError))]


def _parameters(folder: Path) -> list[Target]:
    tensors = {
        "head.weight": torch.ones(3, 2),
        "head.bias": torch.zeros(3),
        "blocks.0.norm1.weight": torch.ones(2, dtype=torch.float16),
    }
    safetensors = save(tensors, {"format": "pt"})
    length = int.from_bytes(safetensors[:8], "little")
    header = json.loads(safetensors[8 : 8 + length])
    arrays = {
        "classifier.weight": np.ones((2, 3), np.float32),
        "classifier.bias": ("linear_0.b_0", np.zeros(3, np.float32)),
    }
    torch.save(tensors, zipped := io.BytesIO())
    pickles = {
        ".pdparams": [pickle.dumps(arrays, protocol) for protocol in (2, 4)],
        ".pth": [zipped.getvalue()],
    }

    def file(random: Random, suffix: str) -> Path:
        path = folder / f"parameters{suffix}"
        if suffix == ".safetensors" and random.random() < 0.6:
            text = mutate.as_json(random, mutate.of_json(random, header))
            wrong = random.choice((0, 2**40, 2**63, 2**64 - 1))
            size = random.choice((len(text), len(text), len(text), wrong))
            path.write_bytes(size.to_bytes(8, "little") + text + safetensors[8 + length :])
        else:
            written = random.choice(pickles.get(suffix, [safetensors]))
            path.write_bytes(mutate.of_bytes(random, written))
        return path

    def made(suffix: str) -> Callable[[Random], Path]:
        return lambda random: file(random, suffix)

    return [
        Target(suffix[1:], made(suffix), read_parameters, (PretrainedError,))
        for suffix in (".safetensors", *pickles)
    ]
