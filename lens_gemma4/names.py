"""One table of every value that can be hooked: our name, the standard name, axes and meaning.

docs/hook_points.md, `print(model)`, `model.support()` and `lens-gemma4 names` are made from it, and every lookup of
a name goes through it. A hook's name is its module path.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lens_gemma4.config import HookedConfig, LayerConfig

STREAM = "batch pos d_model"
HEADS = "batch pos head d_head"
KV_HEADS = "batch pos kv_head d_head"
SQUARE = "batch head pos kv_pos"
NEURONS = "batch pos d_mlp"
LOGITS = "batch pos d_vocab"


@dataclass(frozen=True)
class Row:
    """One hookable value. `name` and `standard` hold `{i}` for the block."""

    name: str
    axes: str
    meaning: str
    standard: tuple[str, ...] = ()
    starred: bool = False
    hf: str = ""

    @property
    def in_block(self) -> bool:
        return self.name.startswith("blocks.{i}.")

    @property
    def ends(self) -> bool:
        """Comes after the last block."""
        return self.name.split(".")[0] in ("ln_final", "hook_logits_raw", "hook_logits")

    @property
    def media(self) -> str | None:
        """ "vision", "video" or "audio" for their points, else None."""
        head = self.name.split(".")[0]
        return head if head in ("vision", "video", "audio") else None


def _norm(
    path: str, axes: str, what: str, standard: tuple[str, ...] = (), hf: str = ""
) -> list[Row]:
    scaled = axes.rsplit(" ", 1)[0] + " 1"
    centred = path.endswith(("patch_ln1", "patch_ln2", "pos_norm"))  # the LayerNorms
    spread = "variance" if centred else "mean square"
    return [
        Row(
            f"{path}.hook_scale", scaled, f"root of the {spread} (plus eps) of {what}", starred=True
        ),
        Row(f"{path}.hook_normalized", axes, f"{what}, normalised, before the gain"),
        Row(f"{path}.hook_out", axes, f"{what}, normalised, with the gain", standard, hf=hf),
    ]


def _b(
    name: str, axes: str, meaning: str, *standard: str, starred: bool = False, hf: str = ""
) -> Row:
    layers = tuple(f"layers.{{i}}.{s}" for s in standard)
    return Row(f"blocks.{{i}}.{name}", axes, meaning, layers, starred, hf and f"layers.{{i}}.{hf}")


def _block_rows() -> list[Row]:
    b, attn = "blocks.{i}.", "blocks.{i}.attn."
    return [
        _b(
            "hook_resid_pre",
            STREAM,
            "the stream entering the block; in block 0 after the scatter",
            "layer_input",
        ),
        *_norm(
            b + "ln1",
            STREAM,
            "the stream",
            ("layers.{i}.attention_norm_output",),
            "layers.{i}.input_layernorm",
        ),
        _b("attn.hook_q", HEADS, "query projection", hf="self_attn.q_proj"),
        *_norm(attn + "q_norm", HEADS, "the query projection", hf="layers.{i}.self_attn.q_norm"),
        _b(
            "attn.hook_k",
            KV_HEADS,
            "key projection; on a k=v block it feeds keys and values",
            hf="self_attn.k_proj",
        ),
        *_norm(attn + "k_norm", KV_HEADS, "the key projection", hf="layers.{i}.self_attn.k_norm"),
        _b(
            "attn.hook_v",
            KV_HEADS,
            "value projection; on a k=v block what hook_k left",
            hf="self_attn.v_proj",
        ),
        *_norm(
            attn + "v_norm",
            KV_HEADS,
            "the value projection (no gain): the values the pattern mixes",
            ("layers.{i}.self_attn.attention_values",),
            "layers.{i}.self_attn.v_norm",
        ),
        _b(
            "attn.hook_rot_q",
            HEADS,
            "queries entering the scores, after rotary",
            "self_attn.attention_queries",
        ),
        _b(
            "attn.hook_rot_k",
            KV_HEADS,
            "keys entering the scores, after rotary",
            "self_attn.attention_keys",
        ),
        _b(
            "attn.hook_attn_scores",
            SQUARE,
            "masked scores (score + finfo.min), entering the softmax",
            "self_attn.attention_scores",
            starred=True,
        ),
        _b(
            "attn.hook_pattern",
            SQUARE,
            "the softmax of the scores",
            "self_attn.attention_probabilities",
            starred=True,
            hf="self_attn (output 1, eager)",
        ),
        _b(
            "attn.hook_z",
            HEADS,
            "pattern-weighted values by head, entering o_proj",
            "self_attn.attention_head_outputs",
            "self_attn.attention_premix",
        ),
        _b(
            "attn.hook_result",
            "batch pos head d_model",
            "each head's own o_proj output, before the post-norm",
            starred=True,
        ),
        _b("attn.hook_out", STREAM, "o_proj's output, before the post-norm", hf="self_attn.o_proj"),
        *_norm(
            b + "ln1_post",
            STREAM,
            "the attention's output",
            hf="layers.{i}.post_attention_layernorm",
        ),
        _b(
            "hook_attn_out",
            STREAM,
            "what the attention adds to the stream",
            "self_attn.attention_output",
        ),
        _b("hook_resid_mid", STREAM, "the stream between attention and MLP", "layer_mid"),
        *_norm(
            b + "ln2",
            STREAM,
            "the middle stream",
            ("layers.{i}.mlp_norm_output", "layers.{i}.mlp_input"),
            "layers.{i}.pre_feedforward_layernorm",
        ),
        _b("mlp.hook_pre", NEURONS, "gate projection", hf="mlp.gate_proj"),
        _b(
            "mlp.hook_act",
            NEURONS,
            "the activation's output",
            "mlp.mlp_activation",
            hf="mlp.act_fn",
        ),
        _b("mlp.hook_pre_linear", NEURONS, "up projection", hf="mlp.up_proj"),
        _b("mlp.hook_post", NEURONS, "act(gate) * up, entering down_proj", "mlp.mlp_neurons"),
        _b("mlp.hook_out", STREAM, "down_proj's output, before the post-norm", hf="mlp.down_proj"),
        *_norm(
            b + "ln2_post", STREAM, "the MLP's output", hf="layers.{i}.post_feedforward_layernorm"
        ),
        _b("hook_mlp_out", STREAM, "what the MLP adds to the stream", "mlp.mlp_output"),
        _b("hook_resid_sum", STREAM, "resid_mid + mlp_out, before layer_scalar"),
        _b(
            "hook_resid_post",
            STREAM,
            "the stream after layer_scalar",
            "layer_output",
            hf="(output)",
        ),
    ]


def _pixel_rows(root: str) -> list[Row]:
    """The image embedder, and the same module run on video frames."""
    image = root == "vision"
    what = "image" if image else "frame"
    patches, tokens = f"{what} patch d_vision", f"{what} patch d_model"
    features = "hook_image_features" if image else "hook_video_features"
    standard = (lambda *names: names) if image else (lambda *names: ())
    return [
        *_norm(f"{root}.patch_ln1", f"{what} patch d_patch", "the patch's pixel values"),
        Row(
            f"{root}.hook_patch_embed",
            patches,
            "patches projected, before patch_ln2",
            standard("vision.patch_embeddings"),
        ),
        *_norm(f"{root}.patch_ln2", patches, "the projected patches"),
        Row(f"{root}.hook_pos_embed", patches, "position embeddings, pos_x + pos_y"),
        Row(f"{root}.hook_pos_sum", patches, "patches + positions, entering pos_norm"),
        *_norm(f"{root}.pos_norm", patches, "patches + positions"),
        Row(
            f"{root}.hook_out",
            patches,
            "after pos_norm, padded rows included",
            standard("vision.tower_output", "projector.input"),
        ),
        *_norm(f"{root}.projector.norm", patches, "the projector's input (no gain)"),
        Row(
            f"{root}.projector.hook_out",
            tokens,
            "projected rows, padded ones included",
            standard("projector.output"),
        ),
        Row(
            f"{root}.{features}",
            "token d_model",
            "flat over the tokens, as scattered",
            standard("vision.image_features"),
        ),
    ]


ROWS: tuple[Row, ...] = (
    Row(
        "hook_tokens",
        "batch pos",
        "ids the model was called with; an edit runs other ids",
        ("input_ids",),
    ),
    Row(
        "hook_embed",
        STREAM,
        "the embedding's output, scaled, before any scatter",
        ("token_embeddings",),
        hf="embed_tokens",
    ),
    *_pixel_rows("vision"),
    *_pixel_rows("video"),
    *_norm("audio.norm", "audio frame sample", "the frame's samples (no gain)"),
    Row(
        "audio.hook_out",
        "audio frame d_model",
        "projected frames, padded ones included",
        hf="embed_audio",
    ),
    Row("audio.hook_audio_features", "token d_model", "flat over the tokens, as scattered"),
    *_block_rows(),
    *_norm(
        "ln_final", STREAM, "the last stream: what the head reads", ("final_norm_output",), "norm"
    ),
    Row(
        "hook_logits_raw",
        LOGITS,
        "the head's output, before the softcap",
        ("lm_head_output",),
        hf="lm_head",
    ),
    Row(
        "hook_logits",
        LOGITS,
        "logits, after the softcap (fires without one too)",
        ("logits",),
        hf="logits",
    ),
)
BY_NAME = {row.name: row for row in ROWS}
STANDARD = {alias: row.name for row in ROWS for alias in row.standard}

# Served by the cache from what was given or cached; no hook point.
DERIVED = (
    *("attention_mask", "input_size", "next_token_probs", "token_labels"),
    "vision.image_token_mask",
)

# TransformerLens's short words, by where they live in a block.
_SHORT = {
    "attn": ["q", "k", "v", "z", "rot_q", "rot_k", "attn_scores", "pattern", "result"],
    "mlp": ["pre", "pre_linear", "act", "post"],
    "": ["resid_pre", "resid_mid", "resid_post", "resid_sum", "attn_out", "mlp_out"],
}
SHORT = {
    word: f"{place}.hook_{word}".lstrip(".") for place, words in _SHORT.items() for word in words
}
# Its older words for the same.
_WORDS = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "query": "q",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_post": "post",
}
_PLACES = {
    "a": "attn",
    "attn": "attn",
    "m": "mlp",
    "mlp": "mlp",
    "b": "",
    "block": "",
    "blocks": "",
}
_ROOT_WORDS = ("tokens", "embed", "logits", "logits_raw")
_INDEX = re.compile(r"^(blocks|layers)\.(-?\d+)\.")


def get_act_name(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """TransformerLens's short forms spelled out.

    Args:
        name: "resid_post", "pattern", "q", "normalized", ...; or with the block inside, "k6", "scale4ln1".
        layer: block number.
        layer_type: "attn"/"a", "mlp"/"m", or a norm's name ("ln1", "ln2_post", "attn.q_norm").

    >>> get_act_name("pattern", 3)
    'blocks.3.attn.hook_pattern'
    >>> get_act_name("scale4ln1")
    'blocks.4.ln1.hook_scale'
    """
    if "." in name or name.startswith("hook_"):
        return name
    if layer is None and (found := re.fullmatch(r"([a-z_]+?)(\d+)([a-z_0-9]*)", name)):
        name, layer, layer_type = found[1], int(found[2]), found[3] or layer_type
    name = _WORDS.get(name, name)
    if layer is None:
        if name in ("scale", "normalized"):
            return f"ln_final.hook_{name}"
        return f"hook_{name}" if name in _ROOT_WORDS else name
    prefix = f"blocks.{layer}."
    if layer_type in _PLACES and name not in ("scale", "normalized"):
        place = _PLACES[layer_type]
        return prefix + (f"{place}." if place else "") + f"hook_{name}"
    if layer_type:
        return f"{prefix}{layer_type}.hook_{name}"
    return prefix + SHORT.get(name, f"hook_{name}")


def split(name: str) -> tuple[str, int | None]:
    """A name's template and block: `blocks.3.hook_resid_pre` -> (`blocks.{i}.hook_resid_pre`, 3)."""
    if found := _INDEX.match(name):
        return f"{found[1]}.{{i}}.{name[found.end() :]}", int(found[2])
    return name, None


def canonical(name: str, n_layers: int | None = None) -> str:
    """Our name of a value, given either vocabulary. Unknown names come back as they are.

    Negative blocks count from the end where `n_layers` is given.

    >>> canonical("layers.2.self_attn.attention_output")
    'blocks.2.hook_attn_out'
    """
    template, index = split(name)
    template = STANDARD.get(template, template)
    if index is None:
        return template
    if index < 0 and n_layers is not None:
        index += n_layers
    return template.replace("{i}", str(index))


def aliases(name: str) -> list[str]:
    """A hook point's standard names.

    >>> aliases("blocks.2.attn.hook_pattern")
    ['layers.2.self_attn.attention_probabilities']
    """
    template, index = split(name)
    row = BY_NAME.get(template)
    return [alias.replace("{i}", str(index)) for alias in row.standard] if row else []


def row_of(name: str) -> Row | None:
    """The table's row of a hook point, by either vocabulary."""
    return BY_NAME.get(split(canonical(name))[0])


def absent(row: Row, cfg: HookedConfig, layer: LayerConfig | None = None) -> str | None:
    """Why this checkpoint does not have the value (at that block), or None when it has."""
    if row.media == "audio" and cfg.audio is None:
        return f"this checkpoint ({cfg.model_type}) has no audio embedder"
    if row.media in ("vision", "video") and cfg.vision is None:
        return f"this checkpoint ({cfg.model_type}) has no vision embedder"
    if layer is not None and layer.lender is not None:
        point = row.name.removeprefix("blocks.{i}.attn.")
        own = ("hook_k", "hook_v", "k_norm.", "v_norm.hook_scale", "v_norm.hook_normalized")
        if point != row.name and point.startswith(own):
            return f"block {layer.index} borrows its keys and values from block {layer.lender}: hook it there"
    return None


def points(cfg: HookedConfig) -> Iterator[tuple[str, Row]]:
    """Every hook point this checkpoint has, in the table's order, with its row."""
    for row in (r for r in ROWS if not (r.in_block or r.ends)):
        if absent(row, cfg) is None:
            yield row.name, row
    for layer in cfg.layers:
        for row in (r for r in ROWS if r.in_block):
            if absent(row, cfg, layer) is None:
                yield row.name.replace("{i}", str(layer.index)), row
    yield from ((row.name, row) for row in ROWS if row.ends)


def unknown(name: str, known: Iterable[str], cfg: HookedConfig | None = None) -> str:
    """The message for a name that is no hook point here: why not, or the closest ones."""
    template, index = split(canonical(name, cfg.n_layers if cfg else None))
    row = BY_NAME.get(template)
    if row is not None and cfg is not None:
        if index is not None and not 0 <= index < cfg.n_layers:
            return f"no hook point {name!r}: this model has blocks 0 to {cfg.n_layers - 1}."
        if reason := absent(row, cfg, None if index is None else cfg.layer(index)):
            return f"no hook point {name!r}: {reason}."
    if name in DERIVED:
        return f"{name!r} is derived and can be read from a cache by key; it has no hook point."
    known = list(known)
    if (
        index is not None
    ):  # compare with names of the same block: the block itself is rarely what was misspelt
        known = [k for k in known if split(k)[1] == index] or known
    spelt = (
        {alias.replace("{i}", str(index)): None for alias in STANDARD}
        if index is not None
        else STANDARD
    )
    close = difflib.get_close_matches(name, [*known, *spelt], n=3, cutoff=0.6)
    hint = f" Closest: {', '.join(map(repr, close))}." if close else ""
    return (
        f"no hook point {name!r}.{hint}\n"
        "  `lens-gemma4 names` lists all of them with their standard and transformers names."
    )


def tree(cfg: HookedConfig, title: str) -> str:
    """The model as text: runs of identical blocks folded, each hook point with standard name, axes, meaning."""
    lines = [title]
    shown = dict(points(cfg))
    for name, row in shown.items():
        if not (row.in_block or row.ends):
            lines.append("  " + _line(name, row))
    told: dict[str, str] = {}
    for first, last in _runs(cfg):
        layer = cfg.layer(first)
        span = f"{first}-{last}" if last > first else f"{first}"
        if (same := told.setdefault(_sizes(layer), span)) != span:
            lines.append(f"  blocks.{span}  as blocks.{same}")
            continue
        lines.append(f"  blocks.{span}  {_sizes(layer)}")
        prefix = f"blocks.{first}."
        lines += [
            "    " + _line(name.removeprefix(prefix), row)
            for name, row in shown.items()
            if name.startswith(prefix)
        ]
    lines += ["  " + _line(name, row) for name, row in shown.items() if row.ends]
    return "\n".join(lines)


def _line(name: str, row: Row) -> str:
    standard = (
        f" = {', '.join(s.removeprefix('layers.{i}.') for s in row.standard)}"
        if row.standard
        else ""
    )
    return f"{name}{'*' if row.starred else ''}{standard}  [{row.axes}]  {row.meaning}"


def _sizes(layer: LayerConfig) -> str:
    window = f", window {layer.window}" if layer.window else ""
    values = ", values read from keys" if layer.k_eq_v else ""
    lender = f", keys and values of block {layer.lender}" if layer.lender is not None else ""
    return (
        f"{layer.kind}{window}: {layer.n_heads} heads of {layer.d_head}, {layer.n_key_value_heads} key/value heads, "
        f"MLP {layer.d_mlp}{values}{lender}"
    )


def _runs(cfg: HookedConfig) -> list[tuple[int, int]]:
    """First and last block of each run of blocks that differ in nothing but their number."""
    runs: list[tuple[int, int]] = []
    for layer in cfg.layers:
        if runs and _sizes(cfg.layer(runs[-1][0])) == _sizes(layer):
            runs[-1] = (runs[-1][0], layer.index)
        else:
            runs.append((layer.index, layer.index))
    return runs


def markdown(every: bool = False) -> str:
    """The table as Markdown. Norms' `hook_scale` and `hook_normalized` and the video twins of the vision
    points are left to a sentence unless `every` is asked for."""
    lines = [
        "| hook point | standard name | in transformers | axes | what it is |",
        "|---|---|---|---|---|",
    ]
    for row in ROWS:
        if every or not (
            row.media == "video" or row.name.endswith(("hook_scale", "hook_normalized"))
        ):
            standard = ", ".join(f"`{name}`" for name in row.standard)
            hf = f"`{row.hf}`" if row.hf else ""
            lines.append(
                f"| `{row.name}`{' *' if row.starred else ''} | {standard} | {hf} | {row.axes} | {row.meaning} |"
            )
    return "\n".join(lines)
