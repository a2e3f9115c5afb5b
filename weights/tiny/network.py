"""The network: transformers' own, with every part of the 12B's, and weights it can be trained from."""

import json
from pathlib import Path

import torch
from tokenizer import BOS, EOS, MEDIA, PAD
from torch import nn
from transformers import (
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedProcessor,
    PreTrainedTokenizerFast,
)

SEED = 0
# Away from 1, as in the 12B: what block 0 writes reaches the end at a hundredth of its size.
LAYER_SCALARS = [0.92, 0.75, 0.85, 0.6, 0.95, 0.05, 0.8, 0.7]


def build_config(tokenizer: PreTrainedTokenizerFast) -> Gemma4UnifiedConfig:
    """Every feature of the 12B; a width whose root is not whole, so that its rounding shows."""
    media_ids = {name: tokenizer.convert_tokens_to_ids(text) for name, text in MEDIA.items()}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": len(LAYER_SCALARS),
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 16,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "max_position_embeddings": 4096,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        "dtype": "float32",
    }
    return Gemma4UnifiedConfig(
        text_config=text,
        # A merged patch is 48 x 48 x 3 = 6912 wide: the narrow projection keeps the file small.
        vision_config={"mm_embed_dim": 48, "output_proj_dims": 48, "mm_posemb_size": 1120},
        audio_config={"audio_embed_dim": 640},
        image_token_id=media_ids["image_token"],
        video_token_id=media_ids["video_token"],
        audio_token_id=media_ids["audio_token"],
        boi_token_id=media_ids["boi_token"],
        eoi_token_id=media_ids["eoi_token"],
        boa_token_id=media_ids["boa_token"],
        eoa_token_index=media_ids["eoa_token"],
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
        dtype="float32",
    )


def build_model(
    config: Gemma4UnifiedConfig, seed: int = SEED
) -> Gemma4UnifiedForConditionalGeneration:
    """Random weights that can be trained, with no gain at 1; layer scalars are 1 until the end.

    Everything is trained but the embedder of sound.
    """
    torch.manual_seed(seed)
    model = Gemma4UnifiedForConditionalGeneration(config)
    with torch.no_grad():
        set_text_weights(model.model.language_model, config.text_config.hidden_size)
        set_media_weights(model.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("audio" not in name)
    return model


def set_text_weights(text_model: nn.Module, width: int) -> None:
    """The stream starts at RMS 1, and every block adds a third of that to it.

    With transformers' own initialisation (tiny embeddings, post-norm gains of 1) each write drowns
    the stream, and nothing is learned for a long time.
    """
    text_model.embed_tokens.weight.normal_(std=width**-0.5)
    text_model.embed_tokens.weight.add_(width**-0.5 * torch.randn(width))
    for module in text_model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
    for name, parameter in text_model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.6, 0.9)
        if "q_norm" in name or "k_norm" in name:
            parameter.uniform_(0.3, 0.5)  # scores are not divided: at 1 the softmax starts out hard
        if "post_" in name:
            parameter.uniform_(0.25, 0.4)


def set_media_weights(model: nn.Module) -> None:
    """Random embedders of a sensible size: their rows come out at the RMS of word embeddings."""
    vision, audio = model.embed_vision, model.embed_audio
    for norm in (vision.patch_ln1, vision.patch_ln2, vision.pos_norm):
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_(std=0.2)
    vision.patch_dense.weight.normal_(std=vision.patch_dense.in_features**-0.5)
    vision.patch_dense.bias.normal_(std=0.2)
    vision.pos_embedding.normal_(std=0.5)
    for projection in (vision.multimodal_embedder.embedding_projection, audio.embedding_projection):
        projection.weight.normal_(std=projection.in_features**-0.5)


@torch.no_grad()
def set_layer_scalars(model: nn.Module, scalars: list[float]) -> None:
    """Put in the layer scalars without changing what the network says.

    A block that multiplies the stream by s makes all that later blocks read smaller, and the norms
    undo it; so that what they *write* stays as large beside it, the gains of their post-norms are
    multiplied by all scalars before them. Trained with the scalars in place, those gains would
    differ by factors of a hundred, and no one learning rate would suit them.
    """
    stream = 1.0
    for block, scalar in zip(model.model.language_model.layers, scalars, strict=True):
        block.post_attention_layernorm.weight.mul_(stream)
        block.post_feedforward_layernorm.weight.mul_(stream)
        block.layer_scalar.fill_(scalar)
        stream *= scalar


def save(model: nn.Module, processor: Gemma4UnifiedProcessor, out: Path) -> None:
    """Write weights, config and processor as transformers does, block sizes in the Hub's words."""
    model.save_pretrained(out)
    processor.save_pretrained(out)
    file = out / "config.json"
    config = json.loads(file.read_text())
    text = config["text_config"]
    full = text.pop("per_layer_config")[str(text["layer_types"].index("full_attention"))]
    # Every release from 5.10 on reads these two; 5.10 knows no other words, and 5.14 fails on both.
    text["global_head_dim"] = full["head_dim"]
    text["num_global_key_value_heads"] = full["num_key_value_heads"]
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def distance_from_one(model: nn.Module) -> dict[str, float]:
    """Per kind of norm gain: the least mean |value - 1| of any block."""
    distances: dict[str, float] = {}
    for name, tensor in model.model.language_model.state_dict().items():
        kind = name.removesuffix(".weight").split(".")[-1]
        if "norm" in kind:
            distance = (tensor - 1).abs().mean().item()
            distances[kind] = min(distances.get(kind, distance), distance)
    return distances
