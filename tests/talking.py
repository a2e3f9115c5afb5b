"""A small random checkpoint with a tokenizer, for what needs text and no training."""

from pathlib import Path

import torch
from small import KINDS, randomise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lens_gemma4 import HookedConfig, HookedModel

WORDS = "The the capital of France Italy is Paris Rome Berlin Madrid a cat sat on mat <b> </script> & and but".split()


def make(folder: Path, dtype: torch.dtype = torch.float32, **text) -> Path:
    """A text checkpoint, gains and scalars away from 1; each of `WORDS` with a space before it is one token."""
    model = HookedModel(HookedConfig.from_hf(KINDS["text"] | text))
    randomise(model, seed=1)
    model.to(dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; anything else is <unk>."""
    vocabulary = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"▁{word}" for word in WORDS)]
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Replace("▁", " ")
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )
