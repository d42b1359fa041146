"""Small training jobs with models of other packages, random weights and random data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

SAMPLES: Final = 36
WORDS: Final = 64
LABELS: Final = 5


def own_loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss that a model of transformers computes."""
    return model(**batch).loss


@dataclass(frozen=True)
class Job:
    """What one script trains: the model, samples, and the arguments of `run.backward`."""

    model: nn.Module
    samples: list[Any]
    loss_fn: Callable[..., Any] = own_loss
    embed: Callable[..., Any] | None = None
    count: Callable[[Any], Any] | None = None
    collate_fn: Callable[[list[Any]], Any] = default_collate


Build = Callable[[], Job]


@dataclass(frozen=True)
class Row:
    """A job of the table: the packages to install, and a function that builds it."""

    packages: tuple[str, ...]
    build: Build


def _samples(sample: Callable[[], Any]) -> list[Any]:
    return [sample() for _ in range(SAMPLES)]


def _words(length: int = 16) -> torch.Tensor:
    return torch.randint(3, WORDS, (length,))


def _label() -> torch.Tensor:
    return torch.randint(LABELS, ())


def _image(size: int = 32) -> torch.Tensor:
    return torch.rand(3, size, size)


# samples by kind of task
def _class_of_text() -> dict[str, Any]:
    return {"input_ids": _words(), "labels": _label()}


def _text() -> dict[str, Any]:
    words = _words()
    return {"input_ids": words, "labels": words}


def _replaced_words() -> dict[str, Any]:
    return {"input_ids": _words(), "labels": torch.randint(2, (16,))}


def _text_to_text() -> dict[str, Any]:
    return {"input_ids": _words(), "labels": _words(8)}


def _class_of_image() -> dict[str, Any]:
    return {"pixel_values": _image(), "labels": _label()}


def _classes_of_pixels() -> dict[str, Any]:
    return {"pixel_values": _image(64), "labels": torch.randint(LABELS, (64, 64))}


def _class_of_sound() -> dict[str, Any]:
    return {"input_values": torch.randn(1600), "labels": _label()}


def _transcript_of_sound() -> dict[str, Any]:
    return {"input_values": torch.randn(1600), "labels": _words(2)}


def _transcript_of_spectrum() -> dict[str, Any]:
    return {"input_features": torch.randn(16, 40), "labels": _words(8)}


def _captioned_image() -> dict[str, Any]:
    return {"pixel_values": _image(), "input_ids": _words()}


def _series() -> dict[str, Any]:
    return {"past_values": torch.randn(32, 2), "future_values": torch.randn(8, 2)}


ENCODER: Final = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
GPT2: Final = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
DECODER: Final = {**ENCODER, "num_attention_heads": 4, "num_key_value_heads": 2}
IMAGE_ENCODER: Final = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_labels": LABELS,
}
ENCODER_DECODER: Final = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
TEXT_TO_TEXT: Final = {
    **ENCODER_DECODER,
    "vocab_size": WORDS,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
SOUND: Final = {
    **ENCODER,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "num_labels": LABELS,
    "classifier_proj_size": 16,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
}


def _transformer(name: str, sample: Callable[[], Any], /, **sizes: Any) -> Row:
    """Return the job of a class of transformers, with the options of its configuration."""

    def build() -> Job:
        return Job(_build_transformer(name, **sizes), _samples(sample))

    return Row(("transformers",), build)


def _build_transformer(name: str, /, **sizes: Any) -> nn.Module:
    import transformers

    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**sizes))


def _compiled_llama() -> Job:
    model = _build_transformer("LlamaForCausalLM", **DECODER)
    forward = torch.compile(model, dynamic=False)

    def loss_fn(_: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        return forward(**batch).loss

    return Job(model, _samples(_text), loss_fn)


def _checkpointed_bert() -> Job:
    model = _build_transformer("BertForMaskedLM", **ENCODER)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Job(model, _samples(_text))


def _detr() -> Job:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    model = _build_transformer(
        "DetrForObjectDetection",
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        num_queries=6,
        num_labels=LABELS,
        **ENCODER_DECODER,
    )

    def sample() -> dict[str, Any]:
        count = int(torch.randint(1, 4, ()))
        boxes = torch.rand(count, 4) * 0.4 + 0.1  # center, width and height
        labels = {"class_labels": torch.randint(LABELS, (count,)), "boxes": boxes}
        return {"pixel_values": _image(64), "labels": labels}

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        images = torch.stack([sample["pixel_values"] for sample in samples])
        return {"pixel_values": images, "labels": [sample["labels"] for sample in samples]}

    return Job(model, _samples(sample), collate_fn=collate)


def _clip() -> Job:
    model = _build_transformer(
        "CLIPModel",
        text_config={**ENCODER, "eos_token_id": 2},
        vision_config=IMAGE_ENCODER,
        projection_dim=16,
    )

    def embed(model: Any, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        output = model(**batch)
        return {"image": output.image_embeds, "text": output.text_embeds}

    def loss_fn(model: Any, embeddings: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = model.logit_scale.exp() * embeddings["text"] @ embeddings["image"].T
        targets = torch.arange(len(logits))
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2

    return Job(model, _samples(_captioned_image), loss_fn, embed)


def _lora() -> Job:
    import peft

    base = _build_transformer("GPT2LMHeadModel", **GPT2)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True
    )
    return Job(peft.get_peft_model(base, lora), _samples(_text))


def _diffusion(model: nn.Module) -> Job:
    """Return the job of a model that predicts the noise in images [3, 16, 16]."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(num_train_timesteps=100)

    def loss_fn(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(images)
        times = torch.randint(100, (len(images),))
        return F.mse_loss(model(scheduler.add_noise(images, noise, times), times).sample, noise)

    return Job(model, _samples(lambda: _image(16)), loss_fn)


def _unet() -> Job:
    from diffusers import UNet2DModel

    return _diffusion(
        UNet2DModel(
            sample_size=16,
            layers_per_block=1,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            dropout=0.1,
        )
    )


def _autoencoder() -> Job:
    from diffusers import AutoencoderKL

    def loss_fn(model: Any, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        latent = model.encode(images).latent_dist
        distance = latent.kl().mean()
        error = F.mse_loss(model.decode(latent.sample()).sample, images)
        return error + 1e-4 * distance, {"kl": distance}

    model = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=16,
    )
    return Job(model, _samples(lambda: _image(16)), loss_fn)


def _graphs(model: nn.Module) -> Job:
    """Return the job of a model that classifies graphs of 4 to 8 nodes [nodes, 6]."""
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import global_mean_pool

    def sample() -> Data:
        size = int(torch.randint(4, 9, ()))
        return Data(
            x=torch.randn(size, 6),
            edge_index=torch.randint(size, (2, 3 * size)),
            y=torch.randint(LABELS, (1,)),
        )

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        nodes = model(batch.x, batch.edge_index)
        return F.cross_entropy(global_mean_pool(nodes, batch.batch), batch.y)

    def count(batch: Batch) -> int:  # a batch has nodes and edges, so samestep cannot count it
        return batch.num_graphs

    return Job(model, _samples(sample), loss_fn, count=count, collate_fn=Batch.from_data_list)


def _graph_model(name: str, **options: Any) -> Build:
    def build() -> Job:
        from torch_geometric.nn import models

        model_class = getattr(models, name)
        return _graphs(model_class(6, 32, 2, LABELS, dropout=0.2, **options))

    return build


JOBS: Final[Mapping[str, Row]] = {
    "albert": _transformer("AlbertForMaskedLM", _text, embedding_size=16, **ENCODER),
    "bart": _transformer("BartForConditionalGeneration", _text_to_text, **TEXT_TO_TEXT),
    "beit": _transformer("BeitForImageClassification", _class_of_image, **IMAGE_ENCODER),
    "bert": _transformer("BertForMaskedLM", _text, **ENCODER),
    "bert, checkpointed": Row(("transformers",), _checkpointed_bert),
    "clip": Row(("transformers",), _clip),
    "convnext": _transformer(
        "ConvNextForImageClassification",
        _class_of_image,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
        drop_path_rate=0.2,
        num_labels=LABELS,
    ),
    "deberta": _transformer(
        "DebertaV2ForSequenceClassification", _class_of_text, **ENCODER, num_labels=LABELS
    ),
    "detr": Row(("transformers", "scipy"), _detr),
    "distilbert": _transformer(
        "DistilBertForSequenceClassification",
        _class_of_text,
        vocab_size=WORDS,
        dim=32,
        n_layers=2,
        n_heads=2,
        hidden_dim=64,
        max_position_embeddings=32,
        num_labels=LABELS,
    ),
    "electra": _transformer("ElectraForPreTraining", _replaced_words, embedding_size=16, **ENCODER),
    "gcn": Row(("torch_geometric",), _graph_model("GCN")),
    "gin": Row(("torch_geometric",), _graph_model("GIN", norm="BatchNorm")),
    "gpt2": _transformer("GPT2LMHeadModel", _text, **GPT2),
    "gpt2, lora": Row(("transformers", "peft"), _lora),
    "llama": _transformer("LlamaForCausalLM", _text, **DECODER),
    "llama, compiled": Row(("transformers",), _compiled_llama),
    "mamba": _transformer(
        "MambaForCausalLM",
        _text,
        vocab_size=WORDS,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
    ),
    "mixtral": _transformer(
        "MixtralForCausalLM",
        _text,
        num_local_experts=4,
        output_router_logits=True,
        **DECODER,
    ),
    "patchtst": _transformer(
        "PatchTSTForPrediction",
        _series,
        num_input_channels=2,
        context_length=32,
        prediction_length=8,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    ),
    "resnet": _transformer(
        "ResNetForImageClassification",
        _class_of_image,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_labels=LABELS,
    ),
    "roberta": _transformer(
        "RobertaForSequenceClassification", _class_of_text, **ENCODER, num_labels=LABELS
    ),
    "segformer": _transformer(
        "SegformerForSemanticSegmentation",
        _classes_of_pixels,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        num_labels=LABELS,
    ),
    "speech2text": _transformer(
        "Speech2TextForConditionalGeneration",
        _transcript_of_spectrum,
        input_feat_per_channel=40,
        conv_channels=32,
        max_source_positions=32,
        max_target_positions=32,
        **TEXT_TO_TEXT,
    ),
    "swin": _transformer(
        "SwinForImageClassification",
        _class_of_image,
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        num_labels=LABELS,
    ),
    "t5": _transformer(
        "T5ForConditionalGeneration",
        _text_to_text,
        vocab_size=WORDS,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    ),
    "unet": Row(("diffusers",), _unet),
    "vae": Row(("diffusers",), _autoencoder),
    "vit": _transformer("ViTForImageClassification", _class_of_image, **IMAGE_ENCODER),
    "wav2vec2": _transformer("Wav2Vec2ForCTC", _transcript_of_sound, **SOUND),
    "wav2vec2, classes": _transformer(
        "Wav2Vec2ForSequenceClassification", _class_of_sound, **SOUND
    ),
    "whisper": _transformer(
        "WhisperForConditionalGeneration",
        lambda: {"input_features": torch.randn(8, 32), "labels": _words(8)},
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        **TEXT_TO_TEXT,
    ),
}
