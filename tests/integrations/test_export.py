"""Sharded safetensors as transformers and huggingface_hub read them."""

from __future__ import annotations

import pytest

from samestep.snapshot import export
from tests.snapshot.exact import exact
from tests.snapshot.saving import save_once
from tests.snapshot.test_export import Tied

pytestmark = pytest.mark.filterwarnings("default")
MISSING = "huggingface_hub or transformers is missing: run `make integrations`"


def test_transformers_and_huggingface_hub_load_shards(tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason=MISSING)
    utilities = pytest.importorskip("transformers.trainer_utils", reason=MISSING)
    model = Tied()
    save_once(tmp_path, 5, {"model": model.state_dict()}, 2)
    for number, load in enumerate([utilities.load_sharded_checkpoint, hub.load_torch_model]):
        folder = tmp_path / f"out-{number}"
        export(tmp_path / "step-00000005", folder, shard_bytes=130)
        other = Tied()
        load(other, str(folder))
        assert exact(other.state_dict()) == exact(model.state_dict())
    export(tmp_path / "step-00000005", tmp_path / "one", shard_bytes=10**9)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    other = Tied()
    hub.load_torch_model(other, str(tmp_path / "one"))
    assert exact(other.state_dict()) == exact(model.state_dict())
