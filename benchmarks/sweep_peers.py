"""The ways to make an ablation or patching map, each in a process of its own that makes maps when it is told to.

`sweep.py` starts them: ours with its own python, the peers' with those of environments that hold them. All build the
same random model, and zero the same heads or put the same streams in. Every loop asks for no key/value cache, and for
the last position's logits alone where its library can, in inference mode: as fast as it fairly is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from common import calm
from lens import hf_model, resident_mb, rise_mb

from lens_gemma4 import HookedModel

ANSWER, VERSUS = 7, 9  # the metric: the logit of one minus that of the other, at the last position
WARM = 4  # variants of a loop that run untimed before it is timed
INVOKES = 16  # prompts in one trace, where nnsight batches them
TOKENIZER = Path(__file__).parent.parent / "weights/tiny"  # peers ask for one; prompts are ids

WAYS = {
    "engine": "sweep",
    "loop": "run_with_hooks for each variant, logits at every position",
    "loop, lean": "run_with_hooks for each variant, the last position's logits alone",
    "TransformerLens": "its bridge: run_with_hooks for each variant, the last position's logits alone",
    "nnsight": "a trace for each variant, the last position's logits alone",
    "nnsight, batched": f"{INVOKES} invokes in a trace, one for each variant",
}
NEEDS = {
    "TransformerLens": "transformer-lens",
    "nnsight": "nnsight",
    "nnsight, batched": "nnsight",
}


class Variant(NamedTuple):
    """One entry of a map: a head zeroed at a position (None: at all), or (no head) the stream entering the block replaced there."""

    layer: int
    head: int | None
    position: int | None


Streams = list[torch.Tensor]  # of the other prompt, entering each block: [1 pos d_model]
# How one way runs: the streams of a prompt, and the metric under each variant.
Run = Callable[[torch.Tensor, Streams, list[Variant]], list[float]]
Way = tuple[Callable[[torch.Tensor], Streams], Run]


def difference(logits: torch.Tensor) -> float:
    """The metric, of the last position's logits `[1 d_vocab]`."""
    return (logits[0, ANSWER] - logits[0, VERSUS]).item()


# -- ours, and TransformerLens's, whose calls have the same names ----------------------------------------


def engine(shape: dict[str, Any]) -> Way:
    from lens_gemma4 import logit_difference, sweep
    from lens_gemma4.interventions import Edit, Intervention, Place

    model = HookedModel.from_pretrained(hf_model=hf_model(shape))

    def intervention(one: Variant, streams: Streams, tokens: int) -> Intervention:
        at = None if one.position is None else torch.arange(tokens)[None] == one.position
        where = Place(one.layer, "attn.hook_z", one.head)
        add = None
        if one.head is None:
            where, add = Place(one.layer, "hook_resid_pre"), streams[one.layer]
        return Intervention(str(one), (Edit(where, at, scale=0.0, add=add),))

    def run(ids: torch.Tensor, streams: Streams, variants: list[Variant]) -> list[float]:
        made = [intervention(one, streams, ids.shape[1]) for one in variants]
        found = sweep.sweep(model, ids, made, logit_difference(ANSWER, VERSUS))
        return found.values[:, 0].tolist()

    return lambda other: cached_streams(model, other), run


def cached_streams(model: Any, other: torch.Tensor) -> Streams:
    names = [f"blocks.{i}.hook_resid_pre" for i in range(model.cfg.n_layers)]
    _, cache = model.run_with_cache(other, names_filter=names)
    return [cache[name] for name in names]


def hook(one: Variant, streams: Streams) -> tuple[str, Callable[..., torch.Tensor]]:
    at = slice(None) if one.position is None else one.position

    def zero(z: torch.Tensor, hook: Any) -> torch.Tensor:
        z = z.clone()
        z[:, at, one.head] = 0.0  # [batch pos head d_head]
        return z

    def put(stream: torch.Tensor, hook: Any) -> torch.Tensor:
        stream = stream.clone()
        stream[:, at] = streams[one.layer][:, at]
        return stream

    if one.head is None:
        return f"blocks.{one.layer}.hook_resid_pre", put
    return f"blocks.{one.layer}.attn.hook_z", zero


def hook_loop(model: Any, last_logits: Callable[[torch.Tensor, list[Any]], torch.Tensor]) -> Way:
    def run(ids: torch.Tensor, streams: Streams, variants: list[Variant]) -> list[float]:
        return [difference(last_logits(ids, [hook(one, streams)])) for one in variants]

    return lambda other: cached_streams(model, other), run


def loop(shape: dict[str, Any]) -> Way:
    model = HookedModel.from_pretrained(hf_model=hf_model(shape))
    return hook_loop(model, lambda ids, hooks: model.run_with_hooks(ids, fwd_hooks=hooks)[:, -1])


def lean_loop(shape: dict[str, Any]) -> Way:
    model = HookedModel.from_pretrained(hf_model=hf_model(shape))

    def last_logits(ids: torch.Tensor, hooks: list[Any]) -> torch.Tensor:
        stream = model.run_with_hooks(ids, fwd_hooks=hooks, stop_at_layer=model.cfg.n_layers)
        return model.project_on_vocab(stream[:, -1])

    return hook_loop(model, last_logits)


def bridge(shape: dict[str, Any]) -> Any:
    """TransformerLens's model of a random one."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.sources.transformers import helpers
    from transformers import AutoTokenizer

    helpers._ensure_torchvision = lambda: (
        False
    )  # it would install packages here, for want of a processor
    whole = with_media(hf_model(shape))
    with tempfile.TemporaryDirectory() as folder:
        whole.config.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        model = TransformerBridge.boot_transformers(
            folder, hf_model=whole, tokenizer=tokenizer, device="cpu", dtype=torch.float32
        )
    whole.set_attn_implementation(
        "sdpa"
    )  # booting chose "eager", for patterns that are not read here
    return model


def transformer_lens(shape: dict[str, Any]) -> Way:
    """Its own patching functions are such a loop too, and compute the logits of every position."""
    model = bridge(shape)
    keep = {"use_cache": False, "logits_to_keep": 1}
    return hook_loop(
        model, lambda ids, hooks: model.run_with_hooks(ids, fwd_hooks=hooks, **keep)[:, -1]
    )


def with_media(text: Any) -> Any:
    """The model that takes images around a text model: TransformerLens knows no other."""
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    vision = {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16, "patch_size": 4}
    config = Gemma4UnifiedConfig(
        text_config=text.config.to_dict(),
        vision_config=vision,
        audio_config={"audio_embed_dim": 16},
        architectures=["Gemma4UnifiedForConditionalGeneration"],
    )
    whole = Gemma4UnifiedForConditionalGeneration._from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    whole.model.language_model = text.model
    whole.tie_weights()
    return whole.eval().requires_grad_(False)


# -- nnsight ------------------------------------------------------------------------------------------


def nnsight_model(shape: dict[str, Any]) -> tuple[Any, Callable[[torch.Tensor], Streams]]:
    from nnsight.modeling.transformers import TransformersModel
    from transformers import AutoTokenizer

    raw = hf_model(shape)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model = TransformersModel(raw, task="text-generation", tokenizer=tokenizer)
    return model, lambda other: list(raw(other, output_hidden_states=True).hidden_states[:-1])


def edit(model: Any, one: Variant, streams: Streams) -> None:
    """Make a variant's change in the trace or invoke that is open."""
    block = model.model.layers[one.layer]
    at = slice(None) if one.position is None else one.position
    if one.head is None:
        block.input[:, at] = streams[one.layer][:, at]
    else:
        z = block.self_attn.o_proj.input.unflatten(-1, (model.config.num_attention_heads, -1))
        z[:, at, one.head] = 0.0  # a view: [batch pos head d_head]


def nnsight_loop(shape: dict[str, Any]) -> Way:
    model, streams_of = nnsight_model(shape)

    def metric(ids: torch.Tensor, streams: Streams, one: Variant) -> float:
        with model.trace(ids, use_cache=False, logits_to_keep=1):
            edit(model, one, streams)
            logits = model.output.logits[:, -1].save()
        return difference(logits)

    def run(ids: torch.Tensor, streams: Streams, variants: list[Variant]) -> list[float]:
        return [metric(ids, streams, one) for one in variants]

    return streams_of, run


def nnsight_batched(shape: dict[str, Any]) -> Way:
    model, streams_of = nnsight_model(shape)

    def together(ids: torch.Tensor, streams: Streams, variants: list[Variant]) -> list[Any]:
        found = []
        with model.trace(use_cache=False, logits_to_keep=1) as tracer:
            for one in variants:
                with tracer.invoke(ids):
                    edit(model, one, streams)
                    found.append(model.output.logits[:, -1].save())
        return found

    def run(ids: torch.Tensor, streams: Streams, variants: list[Variant]) -> list[float]:
        return [
            difference(logits)
            for chosen in in_parts(variants, INVOKES)
            for logits in together(ids, streams, chosen)
        ]

    return streams_of, run


def in_parts(variants: list[Variant], size: int) -> Iterator[list[Variant]]:
    left = iter(variants)
    while part := list(islice(left, size)):
        yield part


MAKERS: dict[str, Callable[[dict[str, Any]], Way]] = {
    "engine": engine,
    "loop": loop,
    "loop, lean": lean_loop,
    "TransformerLens": transformer_lens,
    "nnsight": nnsight_loop,
    "nnsight, batched": nnsight_batched,
}


# -- a process ------------------------------------------------------------------------------------------


def prompts(d_vocab: int, tokens: int) -> torch.Tensor:
    """Two prompts `[2 1 pos]`: the one that is run, and the one whose streams are put in."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, d_vocab, (2, 1, tokens), generator=generator)


def largest_batch(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call of the engine returns, and how many variants ran together at most."""
    from lens_gemma4.variants import Runner

    sizes, run = [0], Runner.run

    def counted(runner: Any, groups: Any) -> Any:
        sizes.append(sum(len(group.variants) for group in groups))
        return run(runner, groups)

    with patch.object(Runner, "run", counted):
        return call(), max(sizes)


def answer(way: str, made: Way, idle: float, d_vocab: int, asked: dict[str, Any]) -> dict[str, Any]:
    """Make a map, once untimed (a loop: its first variants) and once timed; the engine is watched in the untimed one."""
    streams_of, run = made
    ids, other = prompts(d_vocab, asked["tokens"])
    variants = [Variant(*one) for one in asked["variants"]]
    streams = streams_of(other)
    told: dict[str, Any] = {}
    if way == "engine":
        from lens_gemma4 import sweep

        before = resident_mb()
        (_, batch), rise = rise_mb(lambda: largest_batch(lambda: run(ids, streams, variants)))
        # Above the idle process: what earlier maps left with the allocator was this one's to use.
        rise += before - idle
        told = {"batch": batch, "rise": rise, "allowed": sweep.room(ids.device) / 2**20}
    else:
        run(ids, streams, variants[:WARM])
    begin = time.perf_counter()
    values = run(ids, streams, variants)
    return told | {"seconds": time.perf_counter() - begin, "values": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=list(MAKERS), required=True)
    parser.add_argument("--shape", type=json.loads, required=True, help="of the model, in JSON")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    calm()
    torch.set_num_threads(args.threads)
    mode = torch.no_grad if args.way == "engine" else torch.inference_mode
    with mode():
        made = MAKERS[args.way](args.shape)
        d_vocab = args.shape["vocab_size"]
        ids, other = prompts(d_vocab, 2)
        made[1](ids, made[0](other), [Variant(0, 0, None)])  # loads what the first call loads
        idle = resident_mb()
        names = ["torch", "transformers", *([NEEDS[args.way]] if args.way in NEEDS else [])]
        print(json.dumps({"versions": {name: version(name) for name in names}}), flush=True)
        for line in sys.stdin:
            told = answer(args.way, made, idle, d_vocab, json.loads(line))
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
