"""Gemma 4 unified from scratch: tensors in, tensors out, every value through a hook point.

    resid_pre --> ln1 --> attn --> ln1_post --+     attn: q k v, q_norm k_norm v_norm, rotary, scores, pattern, z, o
        +------------------------------------(+)    hook_attn_out = what is added
    resid_mid --> ln2 --> mlp ---> ln2_post --+
        +------------------------------------(+)    hook_mlp_out = what is added
                                              x  layer_scalar
    resid_post <------------------------------+

Operations and their order are transformers' own, so results are equal to the last bit. Weights are stored
as transformers stores them, `[out, in]`; `W_Q` and the like are views in TransformerLens's layout.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lens_gemma4 import names
from lens_gemma4.config import HookedConfig, LayerConfig, RotaryConfig
from lens_gemma4.errors import HookNameError, Unavailable
from lens_gemma4.hooks import HookedRootModule, HookPoint, Part
from lens_gemma4.kept import Made
from lens_gemma4.kv_cache import KVCache
from lens_gemma4.local import local_attention
from lens_gemma4.masks import ImageMask, Mask, attention_masks, knows_images, rule_of
from lens_gemma4.media import AudioEmbedder, PixelEmbedder, frames_and_mask, pixels_and_places
from lens_gemma4.norms import RMSNorm, Shown, empty
from lens_gemma4.products import product_of_few
from lens_gemma4.recompute import recomputed

Product = Callable[[Tensor, Tensor], Tensor]
AttnImplementation = Literal["sdpa", "eager", "local"]
# What a prepared call is made of; a transformers processor returns them under these names.
INPUT_KEYS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "mm_token_type_ids",
    "pixel_values",
    "image_position_ids",
    "image_features",
    "pixel_values_videos",
    "video_position_ids",
    "num_frames_per_video",
    "input_features",
    "input_features_mask",
)


# -- rotary positions ---------------------------------------------------------------------------------


def rotary_frequencies(
    rotary: RotaryConfig, d_head: int, dtype: torch.dtype
) -> Float[Tensor, " half"]:
    """Radians per position of each pair of a head.

    Exponents divide by the whole head even where only a fraction of it turns; the rest stands still.
    Source: `_compute_proportional_rope_parameters` in transformers.
    """
    turned = int(rotary.fraction * d_head // 2)
    exponents = torch.arange(0, 2 * turned, 2, dtype=torch.int64).to(dtype) / d_head
    still = torch.zeros(d_head // 2 - turned, dtype=dtype)
    return torch.cat((1.0 / (rotary.theta**exponents), still))


def turns_of(
    angles: Float[Tensor, "rows pos half"],
) -> tuple[Float[Tensor, "rows pos d_head"], Float[Tensor, "rows pos d_head"]]:
    """What `rotate` needs of the angles: the cosine of both halves of a head, and the sine, negative for the first."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(
    x: Float[Tensor, "*batch pos heads d_head"],
    cos: Float[Tensor, "rows pos d_head"],
    sin: Float[Tensor, "rows pos d_head"],
) -> Float[Tensor, "*batch pos heads d_head"]:
    """Turn each head by its position's angle (`turns_of`); pairs are (i, i + d_head / 2). `rows` are the last of the batch's
    axes, or 1."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return (x * cos.unsqueeze(2)).add_(swapped.mul_(sin.unsqueeze(2)))


# -- attention ----------------------------------------------------------------------------------------


def repeat_heads(
    x: Float[Tensor, "batch kv_head pos d_head"], times: int
) -> Float[Tensor, "batch head pos d_head"]:
    """Each key/value head once for every query head that reads it."""
    if times == 1:
        return x
    batch, kv_heads, pos, d_head = x.shape
    return (
        x[:, :, None]
        .expand(batch, kv_heads, times, pos, d_head)
        .reshape(batch, kv_heads * times, pos, d_head)
    )


def _heads_first(
    x: Float[Tensor, "batch pos kv_head d_head"],
) -> Float[Tensor, "batch kv_head pos d_head"]:
    """Copied, as transformers' cache copies keys and values: products of unlike strides round unlike."""
    return x.transpose(1, 2).contiguous()


def softmax(scores: Float[Tensor, "*axes kv_pos"]) -> Float[Tensor, "*axes kv_pos"]:
    return F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(
        scores.dtype
    )


def masked_scores(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch kv_pos kv_head d_head"],
    mask: Mask,
    per_kv: int,
) -> Float[Tensor, "batch head pos kv_pos"]:
    """Masked scores of keys by position."""
    return _scores(q, _heads_first(k), mask, per_kv)


def _scores(
    q: Float[Tensor, "batch pos head d_head"],
    keys: Float[Tensor, "batch kv_head kv_pos d_head"],
    mask: Mask,
    per_kv: int,
) -> Float[Tensor, "batch head pos kv_pos"]:
    scores = torch.matmul(q.transpose(1, 2), repeat_heads(keys, per_kv).transpose(2, 3))
    additive = mask.additive(scores)
    return scores if additive is None else scores.add_(additive)


KeysValues = tuple[Made, Made]  # after norm and rotary, [batch pos kv_head d_head]


@dataclass
class Sight:
    """What a block needs to know of a call beside the stream."""

    mask: Mask
    rotary: tuple[Tensor, Tensor]
    lent: dict[int, KeysValues]  # by lenders, each adds its own
    kv: KVCache | None = None
    product: Product = F.linear  # with a weight


def _pattern_as_fused(
    scores: Float[Tensor, "batch head pos kv_pos"], mask: Mask
) -> Float[Tensor, "batch head pos kv_pos"]:
    """The fused operation returns zeros where a query sees no key."""
    pattern, blind = softmax(scores), mask.blind()
    return pattern if blind is None else pattern.masked_fill(blind, 0)


def _fused_pattern(
    q: Tensor, k: Tensor, mask: Mask, per_kv: int
) -> Float[Tensor, "batch head pos kv_pos"]:
    return _pattern_as_fused(masked_scores(q, k, mask, per_kv), mask)


def _release(library: str) -> tuple[int, ...]:
    """The installed release, e.g. (5, 24), read from its metadata; the newest rules where there is none."""
    try:
        version = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return (999,)
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


# On a GPU the spelling of the call picks the kernel, and kernels round unlike: the installed release's is
# followed. Since 5.13 heads wider than 256 are repeated rather than grouped; since 5.23 a single query under
# a mask is regrouped under its key/value head.
WIDE_HEADS_REPEATED = _release("transformers") >= (5, 13)
SINGLE_QUERY_REGROUPED = _release("transformers") >= (5, 23)
# On a CPU the fused kernel makes of grouped heads what it makes of repeated ones, to the bit, and saves the copies;
# torch 2.7 still took a slower way for them that rounds otherwise.
GROUPS_ON_CPU = _release("torch") >= (2, 13)


def sdpa(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head kv_pos d_head"],
    v: Float[Tensor, "batch kv_head kv_pos d_head"],
    mask: Mask,
) -> Float[Tensor, "batch head pos d_head"]:
    """PyTorch's fused attention with scale 1, spelled as transformers spells it."""
    batch, heads, pos, d_head = q.shape
    per_kv = heads // k.shape[1]
    plain = q.is_cpu and not (q.requires_grad or k.requires_grad or v.requires_grad)
    visible = mask.fused(q) if plain else mask.visible
    grouped = per_kv > 1 and plain and pos > 1 and GROUPS_ON_CPU
    if per_kv > 1 and not grouped:
        grouped = visible is None and (d_head <= 256 or not WIDE_HEADS_REPEATED)
        if not grouped and pos == 1 and SINGLE_QUERY_REGROUPED:
            q = q.reshape(batch, heads // per_kv, per_kv, d_head)
        elif not grouped:
            k, v = repeat_heads(k, per_kv), repeat_heads(v, per_kv)
    causal = visible is None and mask.causal and pos > 1
    z = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=1.0, is_causal=causal, enable_gqa=grouped
    )
    return z.reshape(batch, heads, pos, d_head)


def _watched(
    point: HookPoint, squares: Float[Tensor, "batch head pos kv_pos"], mask: Mask, nothing: float
) -> tuple[Float[Tensor, "batch head pos kv_pos"], bool]:
    """`point.watch` on scores or a pattern, shown against all positions: a sliding block's cache holds its window alone.

    Raises:
        ValueError: a hook wrote where the keys have been dropped.
    """
    if not point.live or mask.keeps_all:
        return point.watch(squares)
    whole = squares.new_full((*squares.shape[:-1], mask.total), nothing)
    whole[..., mask.keys] = squares
    shown, edited = point.watch(whole)
    if edited:
        gone = torch.ones(mask.total, dtype=torch.bool, device=whole.device)
        gone[mask.keys] = False
        # A scaled mask is still one.
        wrote = shown[..., gone] > nothing / 100 if nothing else shown[..., gone] != 0
        if bool(wrote.any()):
            raise ValueError(
                f"the hook on {point.name!r} wrote to a position that has left the window: its keys and values are gone from "
                "the cache. Leave such positions as they are, or run the text without kv_cache"
            )
    return shown[..., mask.keys], edited


class Attention(Part):
    """Queries, keys and values by head, their norms, rotary positions, pattern, and the output projection.

    A full block may read its values from the raw key projection (`k_eq_v`); a borrower attends with the
    keys and values of its lender.
    """

    def __init__(self, cfg: HookedConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.cfg = layer
        self.eager = self.local = False
        self.lends = layer.index in cfg.lenders()  # else keys and values go when the block is done
        width, kv_width = layer.n_heads * layer.d_head, layer.n_key_value_heads * layer.d_head
        self.w_q = empty(width, cfg.d_model)
        self.w_o = empty(cfg.d_model, width)
        self.hook_q, self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint(), HookPoint()
        self.q_norm = RMSNorm(cfg.eps, layer.d_head)
        if layer.lender is None:
            self.w_k = empty(kv_width, cfg.d_model)
            if not layer.k_eq_v:
                self.w_v = empty(kv_width, cfg.d_model)
            self.hook_k, self.hook_v = HookPoint(), HookPoint()
            self.k_norm, self.v_norm = RMSNorm(cfg.eps, layer.d_head), RMSNorm(cfg.eps)
        else:
            self.v_norm = Shown()  # type: ignore[assignment]
        self.hook_attn_scores, self.hook_pattern, self.hook_z = (
            HookPoint(),
            HookPoint(),
            HookPoint(),
        )
        self.hook_result, self.hook_out = HookPoint(), HookPoint()

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        sight: Sight,
    ) -> Float[Tensor, "batch pos d_model"]:
        q = self.hook_q(self._by_head(sight.product(x, self._parameters["w_q"])))
        cos, sin = sight.rotary
        q = self.hook_rot_q.of(partial(rotate, cos=cos, sin=sin), self.q_norm(q))
        lender = self.cfg.lender
        lent = self._own_keys_values(x, sight) if lender is None else sight.lent[lender]
        if self.lends:  # before the two hooks below: edits there stay in this block
            sight.lent[self.cfg.index] = lent
        if sight.kv is None:
            k, v = self.hook_rot_k.again(*lent[0]), self.v_norm.hook_out.again(*lent[1])
            z = self._mix(q, k, v, sight.mask)
        else:
            z = self._mix_held(q, lent, sight.mask, sight.kv)
        return self.hook_out(self._project(self.hook_z(z), sight.product))

    def _by_head(
        self, x: Float[Tensor, "batch pos width"]
    ) -> Float[Tensor, "batch pos heads d_head"]:
        return x.view(*x.shape[:2], -1, self.cfg.d_head)  # [batch pos heads d_head]

    def _own_keys_values(self, x: Tensor, sight: Sight) -> KeysValues:
        """Keys after norm and rotary, values after their norm, by key/value head."""
        weights, product = self._parameters, sight.product
        k = self.hook_k(self._by_head(product(x, weights["w_k"])))
        v = self.hook_v(k if self.cfg.k_eq_v else self._by_head(product(x, weights["w_v"])))
        k, turn = self.k_norm(k), partial(rotate, cos=sight.rotary[0], sin=sight.rotary[1])
        return Made(turn(k), turn, k), self.v_norm.normalise(v)

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Values mixed by the pattern."""
        z = None
        if self.eager or not self._squares_deferred(q, k, mask):
            z = self._explicit(q, _heads_first(k), _heads_first(v), mask)
        if z is None:
            z = self._fused(q, _heads_first(k), _heads_first(v), mask)
        return z.transpose(1, 2).contiguous()

    def _mix_held(
        self, q: Tensor, lent: KeysValues, mask: Mask, kv: KVCache
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Values mixed by the pattern, those that a cache holds among them."""
        raw = lent[0].value, lent[1].value
        (k, by_k), (v, by_v) = self.hook_rot_k.watch(raw[0]), self.v_norm.hook_out.watch(raw[1])
        keys, values = kv.extend(self.cfg, raw, (k, v), by_k or by_v)
        z = None
        if self.eager or self.hook_attn_scores.live or self.hook_pattern.live:
            z = self._explicit(q, keys, values, mask)
        if z is None:
            z = self._fused(q, keys, values, mask)
        return z.transpose(1, 2).contiguous()

    def _fused(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Mask
    ) -> Float[Tensor, "batch head pos d_head"]:
        q = q.transpose(1, 2)
        if self.local and q.shape[2] > 1:
            return local_attention(q, keys, values, mask)
        return sdpa(q, keys, values, mask)

    def _squares_deferred(self, q: Tensor, k: Tensor, mask: Mask) -> bool:
        if not (self.hook_attn_scores.live or self.hook_pattern.live):
            return True
        # Functions of numbers and tensors, not methods: whoever keeps them keeps no module, and nothing set on the
        # model later changes what they make.
        how: dict[str, Any] = {"mask": mask, "per_kv": self.cfg.heads_per_kv}
        return self.hook_attn_scores.defer(
            partial(masked_scores, **how), q, k
        ) and self.hook_pattern.defer(partial(_fused_pattern, **how), q, k)

    def _explicit(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Mask
    ) -> Float[Tensor, "batch head pos d_head"] | None:
        """Scores, softmax, pattern @ v; None when they were only shown and the fast operation counts."""
        per_kv = self.cfg.heads_per_kv
        scores = _scores(q, keys, mask, per_kv)
        scores, by_scores = _watched(
            self.hook_attn_scores, scores, mask, torch.finfo(scores.dtype).min
        )
        if by_scores:  # a scaled mask is -inf, and a query that sees no key would be NaN
            scores = scores.clamp(min=torch.finfo(scores.dtype).min)
        pattern = softmax(scores) if self.eager else _pattern_as_fused(scores, mask)
        pattern, by_pattern = _watched(self.hook_pattern, pattern, mask, 0.0)
        if not (self.eager or by_scores or by_pattern):
            return None
        return torch.matmul(pattern, repeat_heads(values, per_kv))

    def _project(
        self, z: Float[Tensor, "batch pos head d_head"], product: Product
    ) -> Float[Tensor, "batch pos d_model"]:
        if self.hook_result.live:
            result, edited = self.hook_result.watch(torch.einsum("bphd,hdm->bphm", z, self.W_O))
            if edited:
                return result.sum(2)
        return product(z.flatten(2), self._parameters["w_o"])

    # TransformerLens's layout, as views

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:
        return self.w_q.unflatten(0, (-1, self.cfg.d_head)).transpose(1, 2)

    @property
    def W_K(self) -> Float[Tensor, "kv_head d_model d_head"]:
        return self.w_k.unflatten(0, (-1, self.cfg.d_head)).transpose(1, 2)

    @property
    def W_V(self) -> Float[Tensor, "kv_head d_model d_head"]:
        """On a k=v block the keys' own weights."""
        return (
            (self.w_k if self.cfg.k_eq_v else self.w_v)
            .unflatten(0, (-1, self.cfg.d_head))
            .transpose(1, 2)
        )

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        return self.w_o.unflatten(1, (-1, self.cfg.d_head)).permute(1, 2, 0)

    def __getattr__(self, name: str) -> Any:
        lender = self.__dict__["cfg"].lender if "cfg" in self.__dict__ else None
        if lender is not None and name in (
            "W_K",
            "W_V",
            "w_k",
            "w_v",
            "k_norm",
            "hook_k",
            "hook_v",
        ):
            raise Unavailable(
                f"block {self.cfg.index} has no {name}: it borrows its keys and values from block {lender}; "
                f"read blocks[{lender}].attn.{name}"
            )
        return super().__getattr__(name)


# -- MLP and block ------------------------------------------------------------------------------------


def gelu(x: Float[Tensor, "*axes d_mlp"]) -> Float[Tensor, "*axes d_mlp"]:
    return F.gelu(x, approximate="tanh")


class MLP(Part):
    """`w_out(gelu(w_gate x) * w_in x)`, with the tanh GELU."""

    def __init__(self, cfg: HookedConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.w_gate = empty(layer.d_mlp, cfg.d_model)
        self.w_in = empty(layer.d_mlp, cfg.d_model)
        self.w_out = empty(cfg.d_model, layer.d_mlp)
        self.hook_pre, self.hook_act, self.hook_pre_linear = HookPoint(), HookPoint(), HookPoint()
        self.hook_post, self.hook_out = HookPoint(), HookPoint()

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], product: Product = F.linear
    ) -> Float[Tensor, "batch pos d_model"]:
        weights = self._parameters  # nn.Module's own look-up is a Python call for each
        act = self.hook_act.of(gelu, self.hook_pre(product(x, weights["w_gate"])))
        up = self.hook_pre_linear(product(x, weights["w_in"]))
        return self.hook_out(product(self.hook_post.of(torch.mul, act, up), weights["w_out"]))

    @property
    def W_gate(self) -> Float[Tensor, "d_model d_mlp"]:
        return self.w_gate.T

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        return self.w_in.T

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        return self.w_out.T


def same(x: Tensor) -> Tensor:
    """A value that has two names."""
    return x


class Block(Part):
    """One block: attention, then MLP, each between two norms, then the whole stream times `layer_scalar`."""

    layer_scalar: Tensor

    def __init__(self, cfg: HookedConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.cfg = layer
        self.ln1, self.ln1_post = RMSNorm(cfg.eps, cfg.d_model), RMSNorm(cfg.eps, cfg.d_model)
        self.ln2, self.ln2_post = RMSNorm(cfg.eps, cfg.d_model), RMSNorm(cfg.eps, cfg.d_model)
        self.attn, self.mlp = Attention(cfg, layer), MLP(cfg, layer)
        self.register_buffer("layer_scalar", torch.empty(1))
        self.hook_resid_pre, self.hook_attn_out, self.hook_resid_mid = (
            HookPoint(),
            HookPoint(),
            HookPoint(),
        )
        self.hook_mlp_out, self.hook_resid_sum, self.hook_resid_post = (
            HookPoint(),
            HookPoint(),
            HookPoint(),
        )

    def forward(
        self,
        resid_pre: Float[Tensor, "batch pos d_model"],
        sight: Sight,
    ) -> Float[Tensor, "batch pos d_model"]:
        # 1. attention reads the stream and adds to it
        resid_pre = self.hook_resid_pre(resid_pre)
        attn_out = self.ln1_post(self.attn(self.ln1(resid_pre), sight))
        attn_out = self.hook_attn_out.again(attn_out, same, attn_out)
        resid_mid = self.hook_resid_mid.of(torch.add, resid_pre, attn_out)
        # 2. so does the MLP
        mlp_out = self.ln2_post(self.mlp(self.ln2(resid_mid), sight.product))
        mlp_out = self.hook_mlp_out.again(mlp_out, same, mlp_out)
        resid_sum = self.hook_resid_sum.of(torch.add, resid_mid, mlp_out)
        # 3. the whole stream is scaled, skip path included
        return self.hook_resid_post(resid_sum * self._buffers["layer_scalar"])


def softcap(
    raw: Float[Tensor, "*axes d_vocab"], cap: float | None, own: bool = False
) -> Float[Tensor, "*axes d_vocab"]:
    """`cap * tanh(raw / cap)`, in the logits' own dtype.

    These are the largest tensors of a run: where `raw` is the caller's own it is overwritten, else one fresh one is
    enough. Autograd needs them all.
    """
    if cap is None:
        return raw
    if raw.requires_grad:
        return torch.tanh(raw / cap) * cap
    return (raw.div_(cap) if own else raw / cap).tanh_().mul_(cap)


# -- the network --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Which part of the network a call runs, and what it was given."""

    start: int
    stop: int
    stop_at_layer: int | None
    given: frozenset[str]


class Gemma4(HookedRootModule):
    """The network. Weights are unset until a loader fills them; see `HookedModel.from_pretrained`."""

    blocks: Sequence[Block]  # an nn.ModuleList

    def __init__(
        self,
        cfg: HookedConfig,
        attn_implementation: AttnImplementation = "sdpa",
        image_mask: ImageMask = "transformers",
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.image_mask = _one_of("image_mask", image_mask, ("transformers", "windowed"))
        self.w_e = empty(cfg.d_vocab, cfg.d_model)
        self.hook_tokens, self.hook_embed = HookPoint(), HookPoint()
        if cfg.vision is not None:
            self.vision = PixelEmbedder(cfg.vision, cfg.d_model)
            self.video = PixelEmbedder(cfg.vision, cfg.d_model, weights_of=self.vision)
        if cfg.audio is not None:
            self.audio = AudioEmbedder(cfg.audio.d_audio, cfg.d_model, cfg.audio.eps)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in cfg.layers)  # type: ignore[assignment]
        self.ln_final = RMSNorm(cfg.eps, cfg.d_model)
        if not cfg.tied:
            self.w_u = empty(cfg.d_vocab, cfg.d_model)
        self.hook_logits_raw, self.hook_logits = HookPoint(), HookPoint()
        self._frequencies: dict[Any, Tensor] = {}
        self._call: Call | None = None  # the latest, for messages
        self._skipped: dict[
            int, Tensor | None
        ] = {}  # blocks left out, and the stream put in their place
        self._recomputes = False
        self._compiled: Callable[..., Tensor] | None = None
        self._points: dict[int, list[HookPoint]] = {}  # of each block
        self.set_attn_implementation(attn_implementation)
        self.setup()
        for block in self.blocks:
            points = [m for m in block.modules() if isinstance(m, HookPoint)]
            self._points[block.cfg.index] = points
        for name, point in self.hook_dict.items():
            point.axes = names.BY_NAME[names.split(name)[0]].axes
        self.eval()

    def set_attn_implementation(self, name: AttnImplementation) -> None:
        """ "sdpa" (PyTorch's fused attention), "eager" (scores, softmax, pattern @ v), or "local" (the fused one by parts of the
        prompt, for long ones: sliding blocks cost window x length)."""
        self.attn_implementation = _one_of(
            "attn_implementation", name, get_args(AttnImplementation)
        )
        for block in self.blocks:
            block.attn.eager, block.attn.local = name == "eager", name == "local"

    def compile(self, **options: Any) -> None:  # type: ignore[override]
        """Run blocks as `torch.compile` makes them, wherever nobody listens: equal to rounding, no longer to the bit.

        A block with a hook runs as it is, hook points and all; so do calls on a key/value cache, and "local" attention. The first
        call takes a minute, each type of block and each new length of prompt some time again.

        Args:
            options: of `torch.compile`.
        """
        self._compiled = torch.compile(Block.forward, **options)

    def uncompile(self) -> None:
        """Run all blocks as they are again, equal to transformers to the bit."""
        self._compiled = None

    def _runs_compiled(self, block: Block, sight: Sight) -> bool:
        if (
            sight.kv is not None
            or block.attn.local
            or (self._recomputes and torch.is_grad_enabled())
        ):
            return False
        return not any(point.live for point in self._points[block.cfg.index])

    def gradient_checkpointing_enable(self) -> None:
        """Keep for the way back what enters each block, and compute its inside once more then: a forward pass more in time, and
        memory for one block instead of all. Hooks on points inside blocks are called again then, but those of caches."""
        self._recomputes = True

    def gradient_checkpointing_disable(self) -> None:
        self._recomputes = False

    @property
    def dtype(self) -> torch.dtype:
        return self.w_e.dtype

    @property
    def device(self) -> torch.device:
        return self.w_e.device

    @property
    def unembedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """The head's stored matrix: the embedding's own when tied."""
        return self.w_e if self.cfg.tied else self.w_u

    def match_dtype(self) -> None:
        """Round the embedding's scale to the weights' dtype, as transformers does (62.0 in bfloat16 at 3840)."""
        scale = torch.tensor(
            self.cfg.d_model**0.5, dtype=self.dtype if self.dtype.is_floating_point else None
        )
        self.cfg = replace(self.cfg, embed_scale=scale.item())

    def _apply(self, fn: Any, recurse: bool = True) -> Gemma4:
        super()._apply(fn, recurse)
        self.match_dtype()
        return self

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        *,
        inputs_embeds: Float[Tensor, "batch pos d_model"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "rows pos"] | Literal["mask"] | None = None,
        mm_token_type_ids: Int[Tensor, "batch pos"] | None = None,
        pixel_values: Tensor | None = None,
        image_position_ids: Tensor | None = None,
        image_features: Float[Tensor, "token d_model"] | None = None,
        pixel_values_videos: Tensor | None = None,
        video_position_ids: Tensor | None = None,
        num_frames_per_video: Tensor | None = None,
        input_features: Tensor | None = None,
        input_features_mask: Tensor | None = None,
        resid: Float[Tensor, "batch pos d_model"] | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        with_logits: bool = True,
        logits_to_keep: int | None = None,
        kv_cache: KVCache | None = None,
    ) -> Tensor:
        """Run the blocks from `start_at_layer` (on `resid`) up to, not including, `stop_at_layer`.

        With a `kv_cache` the positions follow those that it holds.

        Takes what a transformers processor returns; `image_features` are what `vision.hook_image_features` showed of the
        same images, and take the place of their pixels. Returns logits `[batch pos d_vocab]`, or the stream
        `[batch pos d_model]` entering block `stop_at_layer`; without `with_logits`, the last norm's output.
        """
        media = {
            "vision": self._pictures(pixel_values, image_position_ids, image_features),
            "video": pixels_and_places(
                "pixel_values_videos", pixel_values_videos, "video_position_ids", video_position_ids
            ),
            "audio": frames_and_mask(input_features, input_features_mask),
        }
        any_media = any(value is not None for value in media.values())
        start, stop = self._range(start_at_layer, stop_at_layer, resid, kv_cache)
        given = {
            "resid": resid,
            "inputs_embeds": inputs_embeds,
            "features": image_features,
            **media,
        }
        self._call = Call(
            start, stop, stop_at_layer, frozenset(k for k, v in given.items() if v is not None)
        )
        for point, handle in self.take_awaited():
            if reason := self._unreachable(point.name or ""):
                raise HookNameError(f"{handle.asked.name!r} cannot fire in this call: {reason}.")
        self._tell_place(resid, inputs_embeds, input_ids, kv_cache)
        if resid is None:
            input_ids, stream = self._embed(input_ids, inputs_embeds)
            types = self._types(input_ids, mm_token_type_ids, media, stream)
            stream = self._scatter(stream, input_ids, types, media, inputs_embeds is not None)
        else:
            stream = self._outer_stream("the stream", resid)
            types = self._types(input_ids, mm_token_type_ids, media, resid)
        if kv_cache is not None:
            # Types derived from text alone say nothing.
            typed = mm_token_type_ids is not None or inputs_embeds is not None or any_media
            seen = stream, types if typed else None, attention_mask, position_ids
            # The first call is the plain one to the bit; those after it cannot be.
            product = product_of_few if kv_cache.length else F.linear
            with self._held(kv_cache, *seen, product) as sights:
                stream = self._blocks(stream, sights, start, stop)
                return self._head(stream, with_logits, logits_to_keep, product)
        masks, turns = self._sight(stream, types, attention_mask, position_ids)
        lent: dict[int, KeysValues] = {}
        sights = {kind: Sight(masks[kind], turns[kind], lent) for kind in masks}
        stream = self._blocks(stream, sights, start, stop)
        if stop_at_layer is not None:
            return stream.clone()  # the caller's to change; a cache may hold the stream itself
        return self._head(stream, with_logits, logits_to_keep)

    def _tell_place(
        self,
        resid: Tensor | None,
        embeds: Tensor | None,
        ids: Tensor | None,
        kv: KVCache | None,
    ) -> None:
        """Tell all points which positions this call computes."""
        first = next((x for x in (resid, embeds, ids) if x is not None), None)
        if first is not None and first.ndim > 1:
            past = 0 if kv is None else kv.length
            self.place.positions = range(past, past + first.shape[1])
            self.place.goes_on = kv is not None

    def _blocks(
        self, stream: Tensor, sights: Mapping[str, Sight], start: int, stop: int
    ) -> Float[Tensor, "batch pos d_model"]:
        for block in self.blocks[start:stop]:
            if block.cfg.index in self._skipped:
                instead = self._skipped[block.cfg.index]
                stream = stream if instead is None else instead
            else:
                stream = self._run_block(block, stream, sights[block.cfg.kind])
        return stream

    def _run_block(
        self, block: Block, stream: Tensor, sight: Sight
    ) -> Float[Tensor, "batch pos d_model"]:
        if self._compiled is not None and self._runs_compiled(block, sight):
            _ = sight.mask.visible  # spelled out once, outside
            return self._compiled(block, stream, sight)
        if self._recomputes and torch.is_grad_enabled() and sight.kv is None:
            return recomputed(block, self.place, partial(block, sight=sight), stream)
        return block(stream, sight)

    def _head(
        self, stream: Tensor, with_logits: bool, keep: int | None, product: Product = F.linear
    ) -> Float[Tensor, "batch kept d_vocab"]:
        stream = self.ln_final(stream)
        if not with_logits:
            return stream
        return self.unembed(stream if keep is None else stream[:, -keep:], product)

    @contextmanager
    def _held(
        self,
        kv: KVCache,
        stream: Tensor,
        types: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | str | None,
        product: Product,
    ) -> Iterator[dict[str, Sight]]:
        """What blocks see in a call on a cache, which counts once it is over."""
        batch, pos, _ = stream.shape
        kv.check(self.cfg, batch, types)
        past, total = kv.length, kv.length + pos
        padding = _padding(kv.mask_of_call(attention_mask, pos), batch, pos)
        real = kv.real(padding, pos, stream.device)
        if not past:
            masks = attention_masks(
                self.cfg, batch, pos, stream.device, padding, types, self.image_mask
            )
        else:
            masks = self._masks_after(kv, batch, pos, real, types, stream.device)
        if isinstance(position_ids, Tensor):
            positions = self._position_ids(position_ids, padding, pos, stream.device)
        else:
            position_ids = "mask" if position_ids is None else position_ids
            positions = self._position_ids(position_ids, real, total, stream.device)[:, past:]
        turns = self._rotary(positions, stream)
        lent: dict[int, KeysValues] = {}
        kv.busy = True
        try:
            yield {kind: Sight(masks[kind], turns[kind], lent, kv, product) for kind in masks}
        except BaseException:
            kv.forget()
            kv.busy = False
            raise
        kv.settle(real, pos, batch, types)
        kv.busy = False

    def _masks_after(
        self,
        kv: KVCache,
        batch: int,
        pos: int,
        real: Tensor | None,
        types: Tensor | None,
        device: torch.device,
    ) -> dict[str, Mask]:
        """The mask of each block type in a call of `pos` tokens after those that a cache holds."""
        queries = torch.arange(kv.length, kv.length + pos, device=device)
        if types is not None:
            types = F.pad(types, (kv.length, 0))
        masks: dict[str, Mask] = {}
        for kind in {layer.kind for layer in self.cfg.layers}:
            rule = rule_of(self.cfg, kind, real, types, self.image_mask)
            keys = kv.places(rule.window, pos, device)
            # One token sees all that is held but padding. Under a mask kernels round otherwise, even where it hides nothing:
            # it is passed where transformers passes one.
            hides = pos > 1 or real is not None
            full = rule.window is not None and kv.length + pos >= rule.window
            passed = hides or full or knows_images(self.cfg, kind, self.image_mask)
            mask = Mask(rule, queries, keys, batch, kv.length + pos, passed)
            masks[kind] = mask if hides else mask.of_everything()
        return masks

    def sight(
        self,
        stream: Float[Tensor, "batch pos d_model"],
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | Literal["mask"] | None = None,
        mm_token_type_ids: Tensor | None = None,
    ) -> tuple[dict[str, Mask], dict[str, tuple[Tensor, Tensor]]]:
        """Who sees whom, and cos and sin of the positions, of each block type in a call with these inputs."""
        types = self._types(input_ids, mm_token_type_ids, {}, stream)
        return self._sight(stream, types, attention_mask, position_ids)

    def _sight(
        self, stream: Tensor, types: Tensor | None, attention_mask: Any, position_ids: Any
    ) -> tuple[dict[str, Mask], dict[str, tuple[Tensor, Tensor]]]:
        batch, pos, _ = stream.shape
        padding = _padding(attention_mask, batch, pos)
        masks = attention_masks(
            self.cfg, batch, pos, stream.device, padding, types, self.image_mask
        )
        positions = self._position_ids(position_ids, padding, pos, stream.device)
        return masks, self._rotary(positions, stream)

    def unembed(
        self, x: Float[Tensor, "*axes d_model"], product: Product = F.linear
    ) -> Float[Tensor, "*axes d_vocab"]:
        """The head and its softcap, in the logits' own dtype."""
        raw = self.hook_logits_raw(product(x, self.unembedding))
        cap = partial(softcap, cap=self.cfg.output_logits_soft_cap)
        # The caller may change what is returned, and a listener may have kept it: whoever needs it now gets another.
        if not self.hook_logits.defer(cap, raw):
            return self.hook_logits(cap(raw)).clone()
        if self.hook_logits_raw.live:
            logits = cap(raw)
            return logits.clone() if logits is raw else logits
        return cap(raw, own=True)

    # -- from inputs to the first stream ----------------------------------------------------------------

    def _embed(self, ids: Tensor | None, embeds: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Ids as run and their embeddings; placeholders are embedded as the pad token."""
        if embeds is not None:
            return ids, self.hook_embed(self._outer_stream("inputs_embeds", embeds))
        if ids is None:
            raise ValueError(
                "nothing to run: give input_ids, inputs_embeds, or a stream with start_at_layer"
            )
        if ids.ndim != 2 or ids.is_floating_point():
            raise ValueError(
                f"input_ids is {ids.dtype} {list(ids.shape)}; needed are whole numbers [batch pos]"
            )
        if not ids.numel():
            raise ValueError(f"input_ids is {list(ids.shape)}: there is no token to run")
        ids = self.hook_tokens(
            ids.clone()
        )  # a copy: the caller may reuse theirs, and a cache keeps this one
        words = ids
        if self.cfg.is_wrapper:
            for token in self._placeholders().values():
                words = (
                    words
                    if token is None
                    else words.masked_fill(ids == token, self.cfg.pad_token_id or 0)
                )
        low, high = words.aminmax()
        if low < 0 or high >= self.cfg.d_vocab:
            bad = low if low < 0 else high
            raise ValueError(
                f"input_ids holds {bad.item()}; this vocabulary has 0 to {self.cfg.d_vocab - 1}"
            )
        return ids, self.hook_embed(F.embedding(words, self.w_e) * self.cfg.embed_scale)

    def _outer_stream(self, name: str, stream: Tensor) -> Float[Tensor, "batch pos d_model"]:
        """A stream from outside, checked and copied: the caller may change theirs, and a cache keeps this one."""
        if stream.ndim != 3 or stream.shape[-1] != self.cfg.d_model or stream.dtype != self.dtype:
            raise ValueError(
                f"{name} is {stream.dtype} {list(stream.shape)}; needed is {self.dtype} [batch pos {self.cfg.d_model}]"
            )
        return stream.clone()

    def _placeholders(self) -> dict[str, int | None]:
        return {
            "vision": self.cfg.image_token_id,
            "video": self.cfg.video_token_id,
            "audio": self.cfg.audio_token_id,
        }

    def _types(
        self, ids: Tensor | None, given: Tensor | None, media: Mapping[str, Any], stream: Tensor
    ) -> Int[Tensor, "batch pos"] | None:
        """1 on image tokens, 2 on video, 3 on audio: as given, else from the ids."""
        if not self.cfg.is_wrapper:
            return None
        if given is not None:
            if given.shape != stream.shape[:2]:
                raise ValueError(
                    f"mm_token_type_ids is {list(given.shape)}; the prompt is {list(stream.shape[:2])} [batch pos]"
                )
            return given
        if ids is None:
            if any(value is not None for value in media.values()):
                raise ValueError(
                    "media with a stream or embeddings need mm_token_type_ids (1 image, 2 video, 3 audio) or input_ids: "
                    "nothing else says where they go"
                )
            return None
        types = torch.zeros_like(ids)
        for kind, token in enumerate(self._placeholders().values(), 1):
            types = types if token is None else types.masked_fill(ids == token, kind)
        return types

    def _pictures(
        self, pixels: Tensor | None, places: Tensor | None, features: Tensor | None
    ) -> tuple[Tensor, ...] | None:
        """Patches to embed and their places, or features that were embedded before."""
        if features is None:
            return pixels_and_places("pixel_values", pixels, "image_position_ids", places)
        if pixels is not None:
            raise ValueError("pixel_values and image_features are the same images: give one")
        if features.ndim != 2 or features.shape[-1] != self.cfg.d_model:
            raise ValueError(
                f"image_features is {list(features.shape)}; needed is [token {self.cfg.d_model}]"
            )
        return (features.clone(),)  # the caller may change theirs, and a hook may change these

    def _features(self, name: str, media: tuple[Tensor, ...]) -> Float[Tensor, "token d_model"]:
        """Of one kind of media, as they are scattered."""
        embedder = getattr(self, name)
        return embedder.hook_image_features(*media) if len(media) == 1 else embedder(*media)

    def _scatter(
        self,
        stream: Tensor,
        ids: Tensor | None,
        types: Tensor | None,
        media: Mapping[str, Any],
        embedded: bool,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Image, video and audio features in place of their placeholders; a stream `embedded` outside may hold them."""
        for kind, (name, token) in enumerate(self._placeholders().items(), 1):
            if not self.cfg.is_wrapper:
                if media[name] is not None:
                    raise Unavailable(
                        f"{_MEDIUM[name]} input was given, but {names.absent(_ROW[name], self.cfg)}"
                    )
                continue
            if embedded and media[name] is None:
                continue
            where = _equal(ids, token) if ids is not None else _equal(types, kind)
            features = None if media[name] is None else self._features(name, media[name])
            wanted = 0 if where is None else int(where.sum())
            given = 0 if features is None else features.shape[0]
            if wanted != given:
                raise ValueError(
                    f"the prompt holds {wanted} {_MEDIUM[name]} placeholder tokens (id {token}), the input gives {given} "
                    f"features: they must be equal, so give {_GIVEN[name]}= beside the text, or all that the processor returned"
                )
            if features is not None and where is not None:
                stream = stream.masked_scatter(where.unsqueeze(-1), features.to(stream.dtype))
        return stream

    def _position_ids(
        self, given: Tensor | str | None, padding: Tensor | None, pos: int, device: torch.device
    ) -> Int[Tensor, "rows pos"]:
        """arange, as transformers' forward; "mask" counts real tokens, as its generate does."""
        plain = torch.arange(pos, device=device)[None]
        if given is None:
            return plain
        if isinstance(given, str):
            if given != "mask":
                raise ValueError(
                    f'position_ids is {given!r}; use a tensor [batch pos], "mask" or None'
                )
            return (
                plain if padding is None else (padding.long().cumsum(-1) - 1).clamp(min=0) * padding
            )
        if given.ndim == 1:
            given = given[None]
        if given.shape[-1] != pos:
            raise ValueError(f"position_ids is {list(given.shape)}; the prompt has {pos} positions")
        return given

    def _rotary(
        self, positions: Int[Tensor, "rows pos"], like: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """cos and sin of each block type; angles in float32 at least, then cast."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        turns: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in {layer.kind: layer for layer in self.cfg.layers}.values():
            key = (layer.kind, dtype, like.device)
            known = self._frequencies.get(key)
            if known is None:
                known = rotary_frequencies(layer.rotary, layer.d_head, dtype).to(like.device)
                if type(known) is Tensor:  # not one without numbers, of a mode that traces shapes
                    self._frequencies[key] = known
            cos, sin = turns_of(positions[..., None].to(dtype) * known)
            turns[layer.kind] = cos.to(like.dtype), sin.to(like.dtype)
        return turns

    # -- which part runs --------------------------------------------------------------------------------

    def _range(
        self,
        start: int | None,
        stop: int | None,
        resid: Tensor | None,
        kv: KVCache | None,
    ) -> tuple[int, int]:
        n = self.cfg.n_layers
        if kv is not None and not (start is None and stop is None):
            raise ValueError(
                "kv_cache runs all blocks: start_at_layer and stop_at_layer would leave some without these positions"
            )
        if (start is None) != (resid is None):
            raise ValueError(
                "start_at_layer runs on a stream [batch pos d_model]: give both or neither"
            )
        begin = 0 if start is None else start + n if start < 0 else start
        end = n if stop is None else stop + n if stop < 0 else stop
        if not (0 <= begin <= n and 0 <= end <= n):
            raise ValueError(
                f"start_at_layer={start}, stop_at_layer={stop}: this model has blocks 0 to {n - 1}"
            )
        if begin > end:
            raise ValueError(
                f"start_at_layer={start} is above stop_at_layer={stop}: nothing would run"
            )
        for layer in self.cfg.layers[begin:end]:
            if layer.lender is None or layer.index in self._skipped:
                continue
            if layer.lender < begin or layer.lender in self._skipped:
                raise ValueError(
                    f"block {layer.index} borrows its keys and values from block {layer.lender}, which this call leaves "
                    f"out: start at block {layer.lender} or below, and do not skip it"
                )
        return begin, end

    def _unreachable(self, name: str) -> str | None:
        """Why a point cannot fire in the call at hand, known before anything is computed; None when it can."""
        call, head = self._call, name.split(".")[0]
        if call is None:
            return None
        if head == "blocks":
            index = int(name.split(".")[1])
            if not call.start <= index < call.stop:
                ran = (
                    f"blocks {call.start} to {call.stop - 1}"
                    if call.start < call.stop
                    else "no block"
                )
                return f"it is in block {index}, and this call runs {ran}"
            if index in self._skipped:
                return f"block {index} is skipped"
        elif head in ("ln_final", "hook_logits_raw", "hook_logits"):
            if call.stop_at_layer is not None:
                return f"stop_at_layer={call.stop_at_layer} ends before the final norm and the head"
        elif "resid" in call.given:
            return "start_at_layer runs on a given stream, which comes after it"
        elif head in _MEDIUM and head not in call.given:
            return f"no {_MEDIUM[head]} was given"
        elif head == "vision" and "features" in call.given and name != "vision.hook_image_features":
            return "image_features were given, so no pixels are embedded"
        elif head == "hook_tokens" and "inputs_embeds" in call.given:
            return "inputs_embeds were given, so no ids are embedded"
        return None

    # -- what hooks.py asks -----------------------------------------------------------------------------

    def canonical_name(self, name: str) -> str:
        return names.canonical(name, self.cfg.n_layers)

    def aliases(self, name: str) -> list[str]:
        return names.aliases(name)

    def short_form(self, words: tuple[Any, ...]) -> str:
        return names.get_act_name(*words)

    def unknown_name(self, name: str) -> str:
        return names.unknown(name, self.hook_dict, self.cfg)

    def why_silent(self, name: str) -> str:
        return self._unreachable(self.hook_point(name).name or "") or super().why_silent(name)

    def uncached(self, name: str) -> bool:
        return name.endswith(".hook_result")

    def __getattr__(self, name: str) -> Any:
        if name in ("vision", "video", "audio") and name not in self._modules:
            raise Unavailable(f"no {name}: {names.absent(_ROW[name], self.cfg)}")
        return super().__getattr__(name)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and the layer scalars, under our names."""
        yield from self.named_parameters()
        yield from self.named_buffers()


def _equal(values: Tensor | None, wanted: int | None) -> Bool[Tensor, "batch pos"] | None:
    return None if values is None or wanted is None else torch.eq(values, wanted)


_MEDIUM = {"vision": "image", "video": "video", "audio": "audio"}
_GIVEN = {"vision": "images", "video": "videos", "audio": "audio"}
_ROW = {name: names.BY_NAME[f"{name}.hook_out"] for name in ("vision", "video", "audio")}


def _one_of(what: str, given: str, known: tuple[str, ...]) -> Any:
    if given not in known:
        raise ValueError(f"{what} is {given!r}; known are {', '.join(map(repr, known))}")
    return given


def _padding(mask: Tensor | None, batch: int, pos: int) -> Bool[Tensor, "batch pos"] | None:
    """True on real tokens."""
    if mask is None:
        return None
    if mask.shape != (batch, pos):
        raise ValueError(
            f"attention_mask is {list(mask.shape)}; the prompt is [{batch}, {pos}] [batch pos]"
        )
    return mask.bool()
