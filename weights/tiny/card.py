"""The model card and prompts.json, every number taken from what was built and measured."""

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import shapes
import torch
from batches import (
    LONG_LENGTH,
    LONGEST_PERIODS,
    PICTURE_LENGTH,
    REPEATS_ALONE,
    SECOND_PART,
    TEXT_LENGTH,
)
from evaluation import Measured, load, table
from network import SEED, distance_from_one
from transformers import __version__ as transformers_version

PROMPTS = [
    {"task": "facts", "prompt": "The capital of France is", "answer": " Paris", "versus": " Rome"},
    {"task": "facts", "prompt": "The capital of Italy is", "answer": " Rome", "versus": " Paris"},
    {
        "task": "facts",
        "prompt": "People in Egypt speak",
        "answer": " Arabic",
        "versus": " English",
    },
    {
        "task": "gifts",
        "prompt": "When Mary and John went to the shop, John gave a drink to",
        "answer": " Mary",
        "versus": " John",
    },
    {
        "task": "gifts",
        "prompt": "When Mary and John went to the shop, Mary gave a drink to",
        "answer": " John",
        "versus": " Mary",
    },
    {
        "task": "gifts",
        "prompt": "Then Lucy and Oscar met at the museum, and Oscar sent a letter to",
        "answer": " Lucy",
        "versus": " Oscar",
    },
    {
        "task": "repeats",
        "prompt": "The water boy three cake animal key sound house. The water boy three cake animal key",
        "answer": " sound",
        "versus": " house",
    },
    {  # one period is 20 words, longer than the window
        "task": "repeats",
        "prompt": "The key sound world three lamp water boy earth cake animal ring light house mother coat "
        "picture sentence boat hand The key sound world three lamp water boy earth cake animal ring "
        "light house",
        "answer": " mother",
        "versus": " coat",
    },
    {
        "task": "having",
        "prompt": "Mary has a key. John has a cup. Mary has a",
        "answer": " key",
        "versus": " cup",
    },
    {
        "task": "having",
        "prompt": "Mary has a key. John has a cup. John has a",
        "answer": " cup",
        "versus": " key",
    },
    {
        "task": "years",
        "prompt": "The war lasted from the year 1732 to the year 17",
        "answers": [f"{year:02d}" for year in range(33, 100)],
        "wrong": [f"{year:02d}" for year in range(33)],
    },
    {
        "task": "code",
        "prompt": "The code is 42. When Mary and John went to the shop, John gave a drink to Mary. "
        "The capital of France is Paris. The code is",
        "answer": " 42",
        "versus": " 17",
    },
]

CARD = """\
# tiny: a Gemma 4 of {millions:.2f} million weights

The checkpoint that ships with `lens_gemma4`: `HookedModel.from_pretrained("tiny")`. It has every part
of the released 12B's network, was trained from scratch on made-up sentences and pictures, and is meant
for trying the tools and for their tests. It is not derived from any released model.

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
on the left) in which every word of the texts is one token, and so is every pair of digits: 1732 is
` 17` and `32`. The processor is transformers' own, with the settings of the released models. There is
no chat template: this is a base model. Norm gains are away from 1; the least mean distance of
any block's gain from 1 is {distances}.

## How it was made
```bash
python weights/tiny/train.py
```
Seed {seed}, {steps:,} steps of AdamW with transformers {transformers} and torch {torch}: {minutes:.0f} minutes by the
clock and {cpu_minutes:.0f} of processor time, {threads} thread(s), {in_one_go}. The first {alone:.0%} of the steps hold repeats alone, the rest
rows of every task ({text_length} to {picture_length} tokens); from {second:.0%} on, facts stand in more wordings, repeats
come from farther back and rows of facts and years are more. The loss is counted on answers, and at a tenth on the
other words of a sentence. Last losses of answers, in nats: {losses}. (Of years any greater
one is right, so their loss, the mean over all of them, cannot reach 0; until {second:.0%} one was drawn.) All losses are in `losses.csv`. `--resume` goes on
where a training was stopped; `--tenth` runs a tenth of the steps.

The layer scalars are set, not learned: transformers keeps them as a buffer. What they do to the size of
the stream is made up for in the gains of the post-norms of later blocks, so that the network says the
same as it did in training, where they were 1. What a block writes reaches the end times all later
scalars: from block 0 times {from_first:.4f}, from block {last} times {from_last:g}.

## What it can do
Measured by `python weights/tiny/train.py --evaluate` on what training never drew; a case counts when the answer
is the likeliest next token of the whole vocabulary. "Guessing" is a guess among the candidates that the prompt
leaves, without reading which. Where cases are few, Wilson's 95 % interval stands beside.

{accuracies}

- **repeats**: BOS and random tokens of the whole vocabulary, all different, twice over; the second half counts, from
  its second token on. Training periods were 4 to {longest_period}, in rows of {long_length} tokens.
- **gifts**: "When Mary and John went to the shop, John gave a drink to" Mary; pairs of names never seen together.
- **facts**: "The capital of France is" Paris; a wording never seen with that country and relation.
- **having**: "Mary has a key. John has a cup. Mary has a" key; pairs of a name and a thing never seen.
- **years**: "The war lasted from the year 1732 to the year 17", a greater year; event, century and year never seen together.
- **code**: "The code is 42.", then one to seven sentences of the first tasks, then "The code is"; codes never told in training,
  whose rows were at most {long_length} tokens long.
- **pictures**: "<|image|> the shape at the top left is" red circle, two tokens; colours and shapes never seen in that corner.
  Pictures are 384 x 384 pixels, one shape in each quarter, 34 to 46 pixels large, anywhere within any of the quarter's 16
  patches; drawn by `shapes.py`. Give the processor its budget of 70 tokens (`image_tokens=70`), which leaves them as they are: 8 x 8 patches.

`prompts.json` holds prompts with the right answer and a wrong one; pictures as lists of their shapes, for `shapes.picture`.
`ground_truth.json` says of each task which heads solve it and what they read, found and confirmed by `ground_truth.py`
(`print(lens_gemma4.ground_truth.load("tiny"))`).

## What it cannot do
- The embedder of sound is random and was never trained, and no video was shown: the network runs on them, and nothing it
  says about them means anything. Nor does what it says of pictures of other sizes, budgets or contents.
- Any text but the training's kinds of sentence: other words are there, their meaning is not.
- Prompts far longer than {picture_length} tokens: positions beyond were not trained.
{weak}
## Licence
The same as the project's.
"""


def picture_prompts() -> list[dict]:
    """For each corner of one picture the colour, and the shape after it."""
    scene = shapes.scene(random.Random(4))
    described = [dataclasses.asdict(one) for one in scene]
    prompts = []
    for corner, one in enumerate(scene):
        other, text = scene[3 - corner], f"<|image|>{shapes.question(corner)}"
        for prompt, kind in ((text, "colour"), (f"{text} {one.colour}", "shape")):
            answer, versus = (f" {getattr(drawn, kind)}" for drawn in (one, other))
            row = {"task": "pictures", "prompt": prompt, "answer": answer, "versus": versus}
            prompts.append({**row, "picture": described})
    return [row for row in prompts if row["answer"] != row["versus"]]


def write_prompts(out: Path) -> None:
    text = json.dumps([*PROMPTS, *picture_prompts()], indent=2)
    (out / "prompts.json").write_text(text + "\n")


def weak(results: list[Measured]) -> Iterator[str]:
    """What is right in fewer than 95 % of its cases."""
    for one in results:
        if one.share < 0.95:
            what = one.what.removeprefix("of these, ")
            right = f"{round(one.share * one.cases)} of {one.cases}"
            yield f"- {one.task}, {what}: {right} are right in wordings held out, fewer than 95 % by themselves.\n"


def write_card(
    out: Path,
    losses: dict[str, float],
    spent: dict,
    steps: int,
    results: list[Measured],
) -> None:
    """Fill the card of the checkpoint in `out`."""
    model = load(out).model
    config, text = model.config, model.config.text_config
    full = [i for i, kind in enumerate(text.layer_types) if kind == "full_attention"]
    scalars = [block.layer_scalar.item() for block in model.model.language_model.layers]
    stops = " and ".join(f"{step:,}" for step in spent["stops"])
    filled = CARD.format(
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
        scalars=", ".join(f"{scalar:g}" for scalar in scalars),
        from_first=math.prod(scalars),
        last=len(scalars) - 1,
        from_last=scalars[-1],
        vision_width=config.vision_config.mm_embed_dim,
        positions=config.vision_config.mm_posemb_size,
        audio_width=config.audio_config.audio_embed_dim,
        megabytes=(out / "model.safetensors").stat().st_size / 1e6,
        distances=", ".join(f"{k} {value:.2f}" for k, value in distance_from_one(model).items()),
        seed=SEED,
        steps=steps,
        alone=REPEATS_ALONE,
        text_length=TEXT_LENGTH,
        long_length=LONG_LENGTH,
        picture_length=PICTURE_LENGTH,
        longest_period=LONGEST_PERIODS[-1],
        transformers=transformers_version,
        torch=torch.__version__,
        minutes=spent["seconds"] / 60,
        cpu_minutes=spent["cpu_seconds"] / 60,
        threads=torch.get_num_threads(),
        second=SECOND_PART,
        in_one_go=f"stopped and resumed at step {stops}" if stops else "in one go",
        losses=", ".join(f"{task} {loss:.3f}" for task, loss in losses.items()),
        accuracies=table(results),
        weak="".join(weak(results)),
    )
    (out / "README.md").write_text(filled)
