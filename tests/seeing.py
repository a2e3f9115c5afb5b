"""A small random checkpoint with the 12B's own processor: patches of 48 x 48 pixels, 640 samples a frame of sound."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import fixtures
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PATCH = 48  # pixels on a side
BUDGETS = (70, 140, 280, 560, 1120)
MEDIA = {
    "image_token": "<|image|>",
    "audio_token": "<|audio|>",
    "video_token": "<|video|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
IMAGE, AUDIO, VIDEO = (MEDIA[f"{kind}_token"] for kind in ("image", "audio", "video"))
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", *MEDIA.values()]
WORDS = "a b c what is this the cat sat on mat".split()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; anything else is <unk>."""
    names = [*SPECIAL, *(f"▁{word}" for word in WORDS)]
    ids = {name: i for i, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Replace("▁", " ")
    words.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
    )
    words.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens=dict(MEDIA),
    )


def processor() -> Any:
    from transformers import (
        Gemma4UnifiedAudioFeatureExtractor,
        Gemma4UnifiedImageProcessor,
        Gemma4UnifiedProcessor,
        Gemma4UnifiedVideoProcessor,
    )

    return Gemma4UnifiedProcessor(
        feature_extractor=Gemma4UnifiedAudioFeatureExtractor(),
        image_processor=Gemma4UnifiedImageProcessor(),
        tokenizer=tokenizer(),
        video_processor=Gemma4UnifiedVideoProcessor(),
    )


def checkpoint(
    folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **text: Any
) -> Path:
    """`F` with this processor's sizes; keywords override fields of its text config."""
    words, config = tokenizer(), copy.deepcopy(fixtures.F_CONFIG)
    config["text_config"] |= {"vocab_size": len(words), "max_position_embeddings": 8192} | text
    config["vision_config"] |= {"patch_size": 16, "pooling_kernel_size": 3, "mm_posemb_size": 1120}
    config["audio_config"]["audio_embed_dim"] = 640
    for name, token in MEDIA.items():
        key = "eoa_token_index" if name == "eoa_token" else f"{name}_id"
        config[key] = words.convert_tokens_to_ids(token)
    n_layers = config["text_config"]["num_hidden_layers"]
    scalars = fixtures.F_SCALARS[:n_layers]
    fixtures.make_checkpoint(config, folder, dtype, seed, scalars=scalars)
    processor().save_pretrained(folder)
    return folder
