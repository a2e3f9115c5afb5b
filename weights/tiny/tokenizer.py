"""The tokenizer, a byte-fallback BPE in Gemma's manner, and the processor over it."""

import json

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers import processors as post_processors
from transformers import (
    Gemma4UnifiedAudioFeatureExtractor,
    Gemma4UnifiedImageProcessor,
    Gemma4UnifiedProcessor,
    Gemma4UnifiedVideoProcessor,
    PreTrainedTokenizerFast,
)
from words import (
    COLOURS,
    COMMON,
    CORNERS,
    COUNTRIES,
    EVENTS,
    FACTS,
    GIVING,
    HAVING,
    HELD,
    LASTING,
    NAMES,
    PLACES,
    SEEING,
    SHAPES,
    TELLING,
    THINGS,
)

PAD, EOS, BOS, UNK = range(4)
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
MEDIA = {  # the attribute names that transformers' processor asks the tokenizer for
    "image_token": "<|image|>",
    "audio_token": "<|audio|>",
    "video_token": "<|video|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
FIRST_ORDINARY = len(SPECIAL) + len(MEDIA)  # ids from here on are bytes, characters and pieces


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Every word of the texts is one token, and so are two digits, so that a year is two tokens."""
    pieces = Tokenizer(models.BPE())
    pieces.normalizer = normalizers.Replace(" ", "▁")
    pieces.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Punctuation("isolated"),
            pre_tokenizers.Split(Regex("▁?[0-9]{1,2}"), "isolated"),
        ]
    )
    alphabet = ["▁", *(chr(code) for code in range(33, 127))]
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    pieces.train_from_iterator(words_of_the_texts(), trainer)
    learned = json.loads(pieces.to_str())["model"]
    order = sorted(learned["vocab"], key=learned["vocab"].get)
    vocabulary = [*SPECIAL, *MEDIA.values(), *BYTES, *order]

    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(vocabulary)},
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = pieces.normalizer, pieces.pre_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = post_processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    special = [AddedToken(text, normalized=False) for text in [*SPECIAL, *MEDIA.values()]]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens=dict(MEDIA),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def words_of_the_texts() -> list[str]:
    """What the pieces are learned from: each word as it stands in a sentence, and in front of one."""
    facts = [template for templates in FACTS.values() for template in templates]
    templates = [*GIVING, *facts, HAVING, LASTING, TELLING, SEEING]
    plain = [word.strip(".,") for word in " ".join(templates).split() if "{" not in word]
    countries = [name for country, facts in COUNTRIES.items() for name in (country, *facts)]
    drawn = [*COLOURS, *SHAPES, *" ".join(CORNERS).split()]
    inside = {*plain, *NAMES, *PLACES, *THINGS, *HELD, *EVENTS, *countries, *drawn, *COMMON}
    in_front = {text.split()[0] for text in templates if not text.startswith(("{", " "))} | {*NAMES}
    numbers = [f"{number:02d}" for number in range(100)]
    return [
        *(f" {word}" for word in sorted(inside)),
        *sorted(in_front),
        *numbers,
        *(f" {number}" for number in numbers),
    ]


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Gemma4UnifiedProcessor:
    """The processor of the released models, its defaults and all, over our tokenizer."""
    return Gemma4UnifiedProcessor(
        feature_extractor=Gemma4UnifiedAudioFeatureExtractor(),
        image_processor=Gemma4UnifiedImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Gemma4UnifiedVideoProcessor(),
    )
