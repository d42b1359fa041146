"""Checkpoints of Hugging Face: a folder with config.json and model.safetensors, as Llama's.

Nothing in one is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recipes.gpt.config import ModelSettings
from recipes.gpt.data import TOKENIZER_FILE, Text
from recipes.gpt.model import hidden_features
from recipes.pretrained import PretrainedError, check_fit

ARCHITECTURE = "LlamaForCausalLM"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
PREFIX = "model."  # of all parameters but the output layer's
OUTPUT = "lm_head.weight"
# what Llama's other versions have, and this model does not
FIXED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rope_scaling": None}


def load(model: nn.Module, settings: ModelSettings, folder: Path) -> str:
    """Load a checkpoint of the same shape into a model; return a line about it.

    Raises `PretrainedError` for a file that is missing or unreadable, another architecture, and
    with a list of all settings or parameters that do not fit.
    """
    expected = shape_of(settings, model.embed_tokens.num_embeddings)
    config = _read_json(folder / CONFIG_FILE)
    check_config(folder / CONFIG_FILE, config, expected)
    saved = {}
    for path in weight_files(folder):
        try:
            tensors = load_file(path)
        except Exception as error:  # a damaged file can fail in any way
            raise PretrainedError(f"{path} cannot be read as safetensors: {error}") from error
        saved |= {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    saved = {name: value for name, value in saved.items() if not name.endswith("inv_freq")}
    if settings.tied and "embed_tokens.weight" in saved:
        saved[OUTPUT] = saved["embed_tokens.weight"]
    check_fit(folder, saved, model.state_dict())
    model.load_state_dict(saved)
    return f"parameters of {folder}: {sum(p.numel() for p in model.parameters()):,}"


def save(model: nn.Module, settings: ModelSettings, text: Text, folder: Path) -> None:
    """Write a model and its tokenizer as a checkpoint that transformers and others load."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, end = text.around
    config = {
        **shape_of(settings, model.embed_tokens.num_embeddings),
        **FIXED,
        "architectures": [ARCHITECTURE],
        "bos_token_id": begin,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    save_file(dict(exported(model, settings)), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    text.tokenizer.save(str(folder / TOKENIZER_FILE))


def exported(model: nn.Module, settings: ModelSettings) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters with the names of a checkpoint; a tied output layer is left out."""
    for name, value in model.state_dict().items():
        if name != OUTPUT:
            yield PREFIX + name, value.detach().cpu().contiguous()
        elif not settings.tied:
            yield name, value.detach().cpu().contiguous()


def shape_of(settings: ModelSettings, vocabulary: int) -> dict[str, Any]:
    """Return the entries of a config.json that say which shape a model has."""
    return {
        "model_type": "llama",
        "hidden_size": settings.width,
        "num_hidden_layers": settings.depth,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.key_heads or settings.heads,
        "intermediate_size": hidden_features(settings),
        "vocab_size": vocabulary,
        "tie_word_embeddings": settings.tied,
        "rope_theta": settings.rope_theta,
        "rms_norm_eps": settings.norm_epsilon,
    }


SETTINGS_OF = {  # what to set for an entry of a config.json
    "hidden_size": "model.width",
    "num_hidden_layers": "model.depth",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.key_heads",
    "intermediate_size": "model.hidden",
    "vocab_size": "model.vocabulary",
    "tie_word_embeddings": "model.tied",
    "rope_theta": "model.rope_theta",
    "rms_norm_eps": "model.norm_epsilon",
}


def check_config(path: Path, config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise `PretrainedError` that lists all settings which have to change for a checkpoint."""
    kind = config.get("model_type")
    if kind != expected["model_type"] or ARCHITECTURE not in config.get(
        "architectures", [ARCHITECTURE]
    ):
        architectures = ", ".join(map(str, config.get("architectures") or [kind]))
        raise PretrainedError(
            f"{path} is of {architectures}; this recipe's model is {ARCHITECTURE}"
        )
    rope = config.get("rope_parameters") or {}
    found = {  # with the defaults of transformers
        "num_key_value_heads": config.get("num_attention_heads"),
        "tie_word_embeddings": False,
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "rms_norm_eps": 1e-6,
        **config,
    }
    lines = [
        f"{name} is {value}: set {key}={json.dumps(value)}, got {expected[name]}"
        for name, key in SETTINGS_OF.items()
        if (value := found.get(name)) != expected[name]
    ]
    head_width = (
        config.get("head_dim") or expected["hidden_size"] // expected["num_attention_heads"]
    )
    unusual = {name: config.get(name, value) for name, value in FIXED.items()}
    unusual |= {"rope_type": rope.get("rope_type", "default")}
    usual = {**FIXED, "rope_type": "default"}
    lines += [
        f"{name} is {value}, which this model does not have"
        for name, value in unusual.items()
        if value != usual[name]
    ]
    if not lines and head_width * expected["num_attention_heads"] != expected["hidden_size"]:
        lines.append(f"head_dim is {head_width}, expected hidden_size / num_attention_heads")
    if lines:
        raise PretrainedError(f"{path} is of another shape:\n  " + "\n  ".join(lines))


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the parameters. Raises `PretrainedError` if one is missing."""
    names = [WEIGHTS_FILE]
    if not (folder / WEIGHTS_FILE).exists() and (folder / INDEX_FILE).exists():
        places = _read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(places, dict) or any(Path(str(n)).name != n for n in places.values()):
            raise PretrainedError(f"{folder / INDEX_FILE}: expected a weight_map to names of files")
        names = sorted(set(places.values()))
    for name in names:
        if not (folder / name).is_file():
            pickled = any(folder.glob("pytorch_model*.bin"))
            hint = "; pickled files (.bin) are not read, save it as safetensors" if pickled else ""
            raise PretrainedError(f"{folder / name} does not exist{hint}")
    return [folder / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise PretrainedError(
            f"{path} does not exist; expected a folder of a Hugging Face checkpoint"
        )
    try:
        content = json.loads(path.read_text())
    except (OSError, RecursionError, ValueError) as error:
        raise PretrainedError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise PretrainedError(f"{path} cannot be read as JSON: expected an object")
    return content
