"""Make the checkpoint in this folder: tokenizer, processor, weights, model card, from one seed.

    python weights/tiny/train.py --out DIR             build and train everything: some minutes on two idle cores
    python weights/tiny/train.py --out DIR --resume    go on where an interrupted training stopped
    python weights/tiny/train.py --out DIR --evaluate  only measure what is in DIR

The network is transformers' own `Gemma4UnifiedForConditionalGeneration`, with every feature of the
12B at a size that trains on two cores: sliding and full blocks of different head sizes, keys that
are values on the full ones, grouped heads, a window shorter than the prompts, layer scalars,
a softcap, tied embeddings, and the embedders of pictures, video and sound (these are random:
nothing here shows them a picture).

It learns three things: to repeat what it has seen, to name the person a thing is given to, and some
facts about countries.
"""

import argparse
import csv
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers import processors as post_processors
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    Gemma4UnifiedAudioFeatureExtractor,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedImageProcessor,
    Gemma4UnifiedProcessor,
    Gemma4UnifiedVideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers import __version__ as transformers_version

SEED = 0
STEPS = 1700
SAVE_EVERY = 100
LOG_EVERY = 10
PEAK_RATE = 4e-3
WARM_UP = 60  # steps until the peak rate
ROWS = 32  # per step
ROW_LENGTH = 50
FIRST_SENTENCES = 250  # the step from which on sentences are among the rows
LONGEST_PERIOD = 32  # twice the window: beyond it only full blocks can look one period back
NO_TARGET = -100  # what cross_entropy leaves out

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

# Far from 1, as in the 12B. The last one scales what the final norm undoes, so it can be small.
LAYER_SCALARS = [0.92, 0.7, 0.85, 0.55, 0.9, 0.64, 0.78, 0.31]

# --------------------------------------------------------------------------------------- the texts

NAMES = (
    "Mary John Tom Anna Peter Lucy Paul Emma James Kate David Sarah Mark Laura Alice Simon Jane Robert "
    "Helen George Julia Frank Rose Henry Clara Oscar Nina Adam Ruth Leo Eva Max"
).split()
PLACES = "shop park school market station garden office beach museum library hotel church".split()
THINGS = "drink book ball letter ring flower cake map key gift lamp coat".split()
GIVING = [  # {a} and {b} are there, {s} is one of them, {o} the other
    "When {a} and {b} went to the {place}, {s} gave a {thing} to {o}.",
    "After {a} and {b} came to the {place}, {s} gave a {thing} to {o}.",
    "Then {a} and {b} met at the {place}, and {s} sent a {thing} to {o}.",
    "While {a} and {b} were at the {place}, {s} bought a {thing} for {o}.",
    "{a} and {b} were at the {place}. {s} showed a {thing} to {o}.",
]

COUNTRIES = {  # country: capital, language, continent
    "France": ("Paris", "French", "Europe"),
    "Italy": ("Rome", "Italian", "Europe"),
    "Spain": ("Madrid", "Spanish", "Europe"),
    "Germany": ("Berlin", "German", "Europe"),
    "Portugal": ("Lisbon", "Portuguese", "Europe"),
    "Greece": ("Athens", "Greek", "Europe"),
    "Austria": ("Vienna", "German", "Europe"),
    "Poland": ("Warsaw", "Polish", "Europe"),
    "Sweden": ("Stockholm", "Swedish", "Europe"),
    "Norway": ("Oslo", "Norwegian", "Europe"),
    "Finland": ("Helsinki", "Finnish", "Europe"),
    "Denmark": ("Copenhagen", "Danish", "Europe"),
    "Hungary": ("Budapest", "Hungarian", "Europe"),
    "England": ("London", "English", "Europe"),
    "Ireland": ("Dublin", "English", "Europe"),
    "Russia": ("Moscow", "Russian", "Europe"),
    "Ukraine": ("Kyiv", "Ukrainian", "Europe"),
    "Turkey": ("Ankara", "Turkish", "Asia"),
    "Japan": ("Tokyo", "Japanese", "Asia"),
    "China": ("Beijing", "Chinese", "Asia"),
    "Korea": ("Seoul", "Korean", "Asia"),
    "Thailand": ("Bangkok", "Thai", "Asia"),
    "Vietnam": ("Hanoi", "Vietnamese", "Asia"),
    "Iran": ("Tehran", "Persian", "Asia"),
    "Iraq": ("Baghdad", "Arabic", "Asia"),
    "Egypt": ("Cairo", "Arabic", "Africa"),
    "Morocco": ("Rabat", "Arabic", "Africa"),
    "Kenya": ("Nairobi", "Swahili", "Africa"),
    "Ghana": ("Accra", "English", "Africa"),
    "Senegal": ("Dakar", "French", "Africa"),
    "Angola": ("Luanda", "Portuguese", "Africa"),
    "Canada": ("Ottawa", "English", "America"),
    "Cuba": ("Havana", "Spanish", "America"),
    "Peru": ("Lima", "Spanish", "America"),
    "Chile": ("Santiago", "Spanish", "America"),
    "Brazil": ("Brasilia", "Portuguese", "America"),
}
CAPITAL, LANGUAGE, CONTINENT = range(3)
FACTS = [  # (relation, template); a held-out fact ends with its answer
    (CAPITAL, "The capital of {country} is {answer}."),
    (CAPITAL, "The capital city of {country} is {answer}."),
    (CAPITAL, "People in {country} call their capital {answer}."),
    (CAPITAL, "The government of {country} sits in {answer}."),
    (LANGUAGE, "The language of {country} is {answer}."),
    (LANGUAGE, "People in {country} speak {answer}."),
    (CONTINENT, "The country of {country} is in {answer}."),
]

# Words of no task: they let a prompt of one's own be cut at words more often than at letters.
COMMON = (
    "the of and to a in is it you that he was for on are with as his they be at one have this from or "
    "had by hot but some what there we can out other were all your when up use word how said an each she "
    "which do their time if will way about many then them would write like so these her long make thing "
    "see him two has look more day could go come did my sound no most number who over know water than "
    "call first people may down side been now find any new work part take get place made live where after "
    "back little only round man year came show every good me give our under name very through just form "
    "much great think say help low line before turn cause same mean differ move right boy old too does "
    "tell sentence set three want air well also play small end put home read hand large spell add even "
    "land here must big high such follow act why ask men change went light kind off need house picture "
    "try us again animal point mother world near build self earth father once upon hello not"
).split()


def is_held_out(first: str, second: str) -> bool:
    """One pair in five is kept for the evaluation, whichever of the two is named first."""
    low, high = sorted((NAMES.index(first), NAMES.index(second)))
    return (7 * low + 3 * high) % 5 == 0


def giving(rng: random.Random, held_out: bool) -> tuple[str, str, str]:
    """A sentence on a gift that stops before its last word, the receiver, and the giver."""
    while True:
        first, second = rng.sample(NAMES, 2)
        if is_held_out(first, second) == held_out:
            break
    giver, receiver = rng.sample([first, second], 2)
    template = rng.choice(GIVING).removesuffix(" {o}.")
    text = template.format(
        a=first, b=second, s=giver, place=rng.choice(PLACES), thing=rng.choice(THINGS)
    )
    return text, f" {receiver}", f" {giver}"


def fact(country: str, relation: int, template: str) -> tuple[str, str]:
    """A sentence on a country that stops before its last word, and that word."""
    text = template.removesuffix(" {answer}.").format(country=country)
    return text, f" {COUNTRIES[country][relation]}"


def held_out_template(country: str) -> str:
    """The one wording for this country's capital that the training never shows."""
    wordings = [template for relation, template in FACTS if relation == CAPITAL]
    return wordings[1 + list(COUNTRIES).index(country) % (len(wordings) - 1)]


def sentence(rng: random.Random) -> str:
    """One training sentence: a gift or a fact, in equal parts."""
    if rng.random() < 0.5:
        text, answer, _ = giving(rng, held_out=False)
        return f"{text}{answer}."
    while True:
        country = rng.choice(list(COUNTRIES))
        relation, template = rng.choice(FACTS)
        if template != held_out_template(country):
            break
    text, answer = fact(country, relation, template)
    return f"{text}{answer}."


# ----------------------------------------------------------------------- tokenizer and processor


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-fallback BPE in Gemma's manner, in which every word of the texts is one token."""
    pieces = Tokenizer(models.BPE())
    pieces.normalizer = normalizers.Replace(" ", "▁")
    pieces.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Punctuation("isolated"),
            pre_tokenizers.Digits(individual_digits=True),
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
    templates = " ".join([*GIVING, *(template for _, template in FACTS)])
    plain = [word.strip(".,") for word in templates.split() if "{" not in word]
    countries = [name for country, facts in COUNTRIES.items() for name in (country, *facts)]
    inside = sorted({*plain, *NAMES, *PLACES, *THINGS, *countries, *COMMON})
    in_front = sorted({text.split()[0] for text in GIVING} - {"{a}"} | {"The", "People"} | {*NAMES})
    return [*(f" {word}" for word in inside), *in_front]


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Gemma4UnifiedProcessor:
    """The processor of the released models, its defaults and all, over our tokenizer."""
    return Gemma4UnifiedProcessor(
        feature_extractor=Gemma4UnifiedAudioFeatureExtractor(),
        image_processor=Gemma4UnifiedImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Gemma4UnifiedVideoProcessor(),
    )


# ----------------------------------------------------------------------------------------- model


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
        vision_config={"mm_embed_dim": 24, "output_proj_dims": 24, "mm_posemb_size": 1120},
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


def build_model(config: Gemma4UnifiedConfig) -> Gemma4UnifiedForConditionalGeneration:
    """Random weights that can be trained, with no gain and no scalar left at 1."""
    torch.manual_seed(SEED)
    model = Gemma4UnifiedForConditionalGeneration(config)
    with torch.no_grad():
        set_text_weights(model.model.language_model, config.text_config.hidden_size)
        set_media_weights(model.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".language_model." in name)
    return model


def set_text_weights(text_model: torch.nn.Module, width: int) -> None:
    """The stream starts at RMS 1, and every block adds a third of what has come to it.

    With transformers' own initialisation (tiny embeddings, post-norm gains of 1) each write drowns
    the stream, and nothing is learned for a long time.
    """
    text_model.embed_tokens.weight.normal_(std=width**-0.5)
    text_model.embed_tokens.weight.add_(width**-0.5 * torch.randn(width))
    for module in text_model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
    for name, parameter in text_model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.6, 0.9)
        if "q_norm" in name or "k_norm" in name:
            parameter.uniform_(0.3, 0.5)  # scores are not divided: at 1 the softmax starts out hard
    stream = 1.0  # RMS of what enters the block
    for block, scalar in zip(text_model.layers, LAYER_SCALARS, strict=True):
        block.post_attention_layernorm.weight.uniform_(0.25, 0.4).mul_(stream)
        block.post_feedforward_layernorm.weight.uniform_(0.25, 0.4).mul_(stream)
        block.layer_scalar.fill_(scalar)
        stream *= scalar


def set_media_weights(model: torch.nn.Module) -> None:
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


# ---------------------------------------------------------------------------------------- batches


def repeated_rows(
    n_rows: int, length: int, periods: list[int], n_words: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """BOS and random words that come again with a period, and the targets that can be known.

    Returns ids and next-token targets, both [row pos]. A word can be known once the one before it
    has been seen; the words of a row's first period are all different.
    """
    ids = torch.full((n_rows, length), BOS)
    targets = torch.full((n_rows, length), NO_TARGET)
    for row, period in enumerate(periods):
        words = FIRST_ORDINARY + torch.randperm(n_words - FIRST_ORDINARY, generator=generator)
        repeats = words[:period].repeat(-(-length // period))
        ids[row, 1:] = repeats[: length - 1]
        targets[row, period + 1 :] = repeats[period + 1 : length]
    return ids, targets


def text_rows(
    n_rows: int, length: int, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """BOS and sentences one after another, cut at `length`; every word is a target. Both [row pos]."""
    texts = []
    for _ in range(n_rows):
        n_sentences = rng.choice([1, 2, 3, 6])
        texts.append(" ".join(sentence(rng) for _ in range(n_sentences)))
    ids = torch.full((n_rows, length + 1), PAD)
    for row, words in enumerate(tokenizer(texts)["input_ids"]):
        words = [*words, EOS][: length + 1]
        ids[row, : len(words)] = torch.tensor(words)
    targets = ids[:, 1:].clone()
    return ids[:, :-1], targets.masked_fill(targets == PAD, NO_TARGET)


def share_of_repeats(step: int) -> float:
    """The lesson plan: repeats alone until looking back works, then half and half."""
    return 1.0 if step < FIRST_SENTENCES else 0.5


def words_in_use(step: int, n_words: int) -> int:
    """Repeats draw on few words first: looking back is learned in minutes so, else in hours."""
    return min(n_words, FIRST_ORDINARY + 60 + 3 * step)


def batch(step: int, tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """The rows of one step. They depend on the step alone, so a resumed training sees the same."""
    rng = random.Random(f"{SEED} {step}")
    generator = torch.Generator().manual_seed(1_000_003 * SEED + step)
    n_repeats = round(ROWS * share_of_repeats(step))
    longest = min(LONGEST_PERIOD, 6 + step // 15)
    # The longer of two draws: far repeats are the hard ones.
    periods = [max(rng.randint(4, longest), rng.randint(4, longest)) for _ in range(n_repeats)]
    length = min(ROW_LENGTH, 2 * longest + 6) if n_repeats == ROWS else ROW_LENGTH
    repeats = repeated_rows(
        n_repeats, length, periods, words_in_use(step, len(tokenizer)), generator
    )
    if n_repeats == ROWS:
        return repeats
    texts = text_rows(ROWS - n_repeats, ROW_LENGTH, tokenizer, rng)
    return torch.cat([repeats[0], texts[0]]), torch.cat([repeats[1], texts[1]])


# --------------------------------------------------------------------------------------- training


def learning_rate(step: int) -> float:
    """Up in a line, down in a line to a hundredth."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    return PEAK_RATE * max(0.01, (STEPS - step) / (STEPS - WARM_UP))


def target_losses(model: torch.nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Loss of every target in nats, [target]; the head is run on rows that have one only."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    known = targets != NO_TARGET
    logits = model.lm_head(hidden[known])
    cap = model.config.text_config.final_logit_softcapping
    logits = cap * torch.tanh(logits / cap)
    return torch.nn.functional.cross_entropy(logits, targets[known], reduction="none")


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW; matrices decay, gains do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.02},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))


def train(
    out: Path, tokenizer: PreTrainedTokenizerFast, resume: bool
) -> tuple[torch.nn.Module, list[list], dict[str, float]]:
    """Train from scratch, or from the state in `out/state`.

    Returns the model, the rows of losses.csv and the seconds it took, on the clock ("seconds") and of
    processor time ("cpu_seconds", what counts on a machine that others use too).
    Raises: FileNotFoundError, nothing to resume.
    """
    model = build_model(build_config(tokenizer)).train()
    optimizer = make_optimizer(model)
    start, rows, spent = 0, [], {"seconds": 0.0, "cpu_seconds": 0.0}
    if resume:
        state = torch.load(state_file(out), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, rows, spent = state["step"], state["rows"], state["spent"]
    clock, cpu_clock = time.time() - spent["seconds"], time.process_time() - spent["cpu_seconds"]
    bar = tqdm(range(start, STEPS), initial=start, total=STEPS, desc="training", unit="step")
    for step in bar:
        repeats, sentences = train_step(model, optimizer, step, tokenizer)
        spent = {"seconds": time.time() - clock, "cpu_seconds": time.process_time() - cpu_clock}
        if (step + 1) % LOG_EVERY == 0:
            rows.append([step + 1, round(spent["seconds"], 1), repeats, sentences])
            bar.set_postfix(repeats=repeats, sentences=sentences)
        if (step + 1) % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_state({**state, "step": step + 1, "rows": rows, "spent": spent}, state_file(out))
    return model.eval(), rows, spent


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, tokenizer
) -> tuple[float, float | None]:
    """One step of AdamW; returns the mean losses of repeats and of sentences (if any), in nats."""
    ids, targets = batch(step, tokenizer)
    losses = target_losses(model, ids, targets)
    n_repeats = round(ROWS * share_of_repeats(step))
    n_first = int((targets[:n_repeats] != NO_TARGET).sum())
    means = [part.mean() for part in (losses[:n_first], losses[n_first:]) if len(part)]
    torch.stack(means).sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    optimizer.step()
    optimizer.zero_grad()
    repeats, sentences = [*(round(mean.item(), 4) for mean in means), None][:2]
    return repeats, sentences


def state_file(out: Path) -> Path:
    """Where a training keeps what it needs to go on; gone once the folder is complete."""
    return out / "state" / "state.pt"


def save_state(state: dict, file: Path) -> None:
    """Write beside and rename, so that a kill while saving leaves the last good state."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def write_losses(rows: list[list], file: Path) -> None:
    with file.open("w", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(["step", "seconds", "loss_repeats", "loss_sentences"])
        writer.writerows(rows)


# ------------------------------------------------------------------------------------- evaluation


def repeat_accuracy(model: torch.nn.Module, n_words: int, period: int, n_rows: int = 512) -> float:
    """Share of the second halves' words that come first in the prediction, on unseen sequences."""
    generator = torch.Generator().manual_seed(10**12 + period)  # the training seeds lie far below
    ids, targets = repeated_rows(n_rows, 2 * period + 1, [period] * n_rows, n_words, generator)
    with torch.no_grad():
        predicted = model(input_ids=ids, use_cache=False).logits.argmax(-1)
    known = targets != NO_TARGET
    return (predicted[known] == targets[known]).double().mean().item()


def next_words(model: torch.nn.Module, tokenizer, prompts: list[str]) -> list[str]:
    """The likeliest next token of each prompt; prompts of one length run together, unpadded."""
    rows = tokenizer(prompts)["input_ids"]
    answers = [""] * len(prompts)
    for length in {len(row) for row in rows}:
        same = [index for index, row in enumerate(rows) if len(row) == length]
        ids = torch.tensor([rows[index] for index in same])
        with torch.no_grad():
            best = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
        for index, token in zip(same, best.tolist(), strict=True):
            answers[index] = tokenizer.decode([token])
    return answers


def accuracy(model: torch.nn.Module, tokenizer, cases: list[tuple[str, str]]) -> float:
    """Share of (prompt, answer) pairs whose answer is the likeliest next token."""
    found = next_words(model, tokenizer, [prompt for prompt, _ in cases])
    right = [answer == said for (_, answer), said in zip(cases, found, strict=True)]
    return sum(right) / len(right)


def fact_cases(relation: int, keep: Callable[[str, str], bool]) -> list[tuple[str, str]]:
    """Prompts and answers of one relation, for the (country, template) pairs that `keep` keeps."""
    return [
        fact(country, about, template)
        for country in COUNTRIES
        for about, template in FACTS
        if about == relation and keep(country, template)
    ]


def evaluate(folder: Path) -> dict[str, float]:
    """Accuracies of the checkpoint in `folder`, each between 0 and 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Gemma4UnifiedForConditionalGeneration.from_pretrained(folder).eval()
    rng = random.Random(f"{SEED} evaluation")
    gifts = [giving(rng, held_out=True)[:2] for _ in range(1000)]
    results = {
        f"repeats of period {period}": repeat_accuracy(model, len(tokenizer), period)
        for period in (4, 8, 16, 24, 32)
    }
    results |= {
        "receiver of a gift, pairs of names never seen together": accuracy(model, tokenizer, gifts),
        "capitals": accuracy(
            model, tokenizer, fact_cases(CAPITAL, lambda c, t: t != held_out_template(c))
        ),
        "capitals, in a wording never seen with that country": accuracy(
            model, tokenizer, fact_cases(CAPITAL, lambda c, t: t == held_out_template(c))
        ),
        "languages": accuracy(model, tokenizer, fact_cases(LANGUAGE, lambda c, t: True)),
        "continents": accuracy(model, tokenizer, fact_cases(CONTINENT, lambda c, t: True)),
    }
    results["prompts.json"] = accuracy(
        model, tokenizer, [(row["prompt"], row["answer"]) for row in PROMPTS]
    )
    return results


def distance_from_one(model: torch.nn.Module) -> dict[str, float]:
    """Per kind of norm gain, and for the layer scalars: the least mean |value - 1| of any block."""
    distances: dict[str, float] = {}
    for name, tensor in model.model.language_model.state_dict().items():
        kind = name.removesuffix(".weight").split(".")[-1]
        if "norm" in kind or kind == "layer_scalar":
            distance = (tensor - 1).abs().mean().item()
            distances[kind] = min(distances.get(kind, distance), distance)
    return distances


# ----------------------------------------------------------------------------------------- output

PROMPTS = [
    {"prompt": "The capital of France is", "answer": " Paris", "versus": " Rome"},
    {"prompt": "The capital of Italy is", "answer": " Rome", "versus": " Paris"},
    {"prompt": "People in Egypt speak", "answer": " Arabic", "versus": " English"},
    {
        "prompt": "When Mary and John went to the shop, John gave a drink to",
        "answer": " Mary",
        "versus": " John",
    },
    {
        "prompt": "When Mary and John went to the shop, Mary gave a drink to",
        "answer": " John",
        "versus": " Mary",
    },
    {
        "prompt": "Then Lucy and Oscar met at the museum, and Oscar sent a letter to",
        "answer": " Lucy",
        "versus": " Oscar",
    },
    {
        "prompt": "The water boy three cake animal key sound house. The water boy three cake animal key",
        "answer": " sound",
        "versus": " house",
    },
    {  # one period is 20 words, longer than the window
        "prompt": "The key sound world three lamp water boy earth cake animal ring light house mother coat "
        "picture sentence boat hand The key sound world three lamp water boy earth cake animal ring "
        "light house",
        "answer": " mother",
        "versus": " coat",
    },
]


def save(model: torch.nn.Module, processor: Gemma4UnifiedProcessor, out: Path) -> None:
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


CARD = """\
# tiny: a Gemma 4 of {millions:.2f} million weights

The checkpoint that ships with `lens_gemma4`: `HookedModel.from_pretrained("tiny")`. It has every part
of the released 12B's network, was trained from scratch on made-up sentences, and is meant for
trying the tools and for their tests. It is not derived from any released model.

## The network
| | |
|---|---|
| model type | `gemma4_unified`, with the embedders of pictures, video and sound |
| blocks | {n_layers}: sliding, but blocks {full_blocks} are full |
| width, MLP, vocabulary | {width}, {mlp}, {n_words} (tied embeddings) |
| query heads | {n_heads} |
| sliding blocks | heads of {head}, {kv_heads} key/value heads, window {window} |
| full blocks | heads of {full_head}, {full_kv_heads} key/value head, values are the keys' projection |
| logit softcap | {softcap:g} |
| layer scalars | {scalars} |
| picture patches | 48 x 48 x 3 to {vision_width} to {width}; positions up to {positions} |
| sound frames | {audio_width} samples to {width} |
| numbers | float32, `model.safetensors` {megabytes:.1f} MB |

The tokenizer is a byte-fallback BPE in Gemma's manner (spaces are `▁`, one `<bos>` in front, padding
on the left) in which every word of the texts is one token. The processor is transformers' own,
with the settings of the released models. There is no chat template: this is a base model.
Norm gains are away from 1 as well; the least mean distance of any block's gain from 1 is
{distances}.

## How it was made
```bash
python weights/tiny/train.py
```
Seed {seed}, {steps} steps of AdamW on {rows} rows of up to {row_length} tokens with transformers {transformers}
and torch {torch}: {minutes} by the clock and {cpu_minutes} of processor time, {threads} thread(s). Last losses: repeats
{loss_repeats:.3f} nats a target, sentences {loss_sentences:.3f} nats a token (names, places and things are drawn
at random, so this cannot reach 0). All losses are in `losses.csv`. The layer scalars are set, not
learned: transformers keeps them as a buffer.

## What it can do
Measured by `python weights/tiny/train.py --evaluate`; a case counts when the answer is the likeliest
next token of the whole vocabulary.

| task | right |
|---|---|
{accuracies}

Repeats are BOS and random tokens of the whole vocabulary, all different, twice over: 512 sequences a
period, none of the training's; the second half counts, from its second token on. Rows of the
training were at most {row_length} tokens long, so a period of 32 is longer than any that was seen twice.
Gifts are sentences such as "When Mary and John went to the shop, John gave a drink to", 1,000 of
them. `prompts.json` holds prompts with the right answer and a wrong one.

## What it cannot do
- The embedders of pictures, video and sound are random and were never trained: the network runs on
  them, and nothing it says about a picture means anything.
- Any text but the training's kinds of sentence: other words are there, their meaning is not.
- Prompts far longer than {row_length} tokens: positions beyond were not trained.

## Licence
The same as the project's.
"""


def card(
    model: torch.nn.Module,
    losses: list[float],
    spent: dict[str, float],
    results: dict[str, float],
    size: int,
) -> str:
    """The model card, every number taken from what was built and measured; `size` in bytes."""
    config, text = model.config, model.config.text_config
    full = [i for i, kind in enumerate(text.layer_types) if kind == "full_attention"]
    numbers = distance_from_one(model)
    return CARD.format(
        millions=sum(p.numel() for p in model.parameters()) / 1e6,
        n_layers=text.num_hidden_layers,
        full_blocks=" and ".join(map(str, full)),
        width=text.hidden_size,
        mlp=text.intermediate_size,
        n_words=text.vocab_size,
        n_heads=text.num_attention_heads,
        head=text.per_layer_config[0].head_dim,
        kv_heads=text.per_layer_config[0].num_key_value_heads,
        window=text.sliding_window,
        full_head=text.per_layer_config[full[0]].head_dim,
        full_kv_heads=text.per_layer_config[full[0]].num_key_value_heads,
        softcap=text.final_logit_softcapping,
        scalars=", ".join(map(str, LAYER_SCALARS)),
        vision_width=config.vision_config.mm_embed_dim,
        positions=config.vision_config.mm_posemb_size,
        audio_width=config.audio_config.audio_embed_dim,
        megabytes=size / 1e6,
        distances=", ".join(f"{kind} {value:.2f}" for kind, value in numbers.items()),
        seed=SEED,
        steps=STEPS,
        rows=ROWS,
        row_length=ROW_LENGTH,
        transformers=transformers_version,
        torch=torch.__version__,
        minutes=f"{spent['seconds'] / 60:.1f} minutes",
        cpu_minutes=f"{spent['cpu_seconds'] / 60:.1f} minutes",
        threads=torch.get_num_threads(),
        loss_repeats=losses[0],
        loss_sentences=losses[1],
        accuracies="\n".join(f"| {task} | {value:.2%} |" for task, value in results.items()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state")
    parser.add_argument("--evaluate", action="store_true", help="measure OUT, train nothing")
    options = parser.parse_args()
    if not options.evaluate:
        options.out.mkdir(parents=True, exist_ok=True)
        tokenizer = build_tokenizer()
        model, rows, spent = train(options.out, tokenizer, options.resume)
        write_losses(rows, options.out / "losses.csv")
        save(model, build_processor(tokenizer), options.out)
        (options.out / "prompts.json").write_text(json.dumps(PROMPTS, indent=2) + "\n")
    results = evaluate(options.out)
    for name, value in results.items():
        print(f"{value:8.2%}  {name}")
    if not options.evaluate:
        size = (options.out / "model.safetensors").stat().st_size
        (options.out / "README.md").write_text(card(model, rows[-1][2:], spent, results, size))
        shutil.rmtree(state_file(options.out).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
