"""Which part wrote this logit: exact sums on this architecture, one function per question.

Every function takes a run's cache and a `Target` and returns an `Attribution` whose parts add up to the run's own
number. Held fixed: every norm that a contribution passes on its way (the block's post-norm, the final norm) keeps
the scale it had in the run, and the pattern is the run's.

    by_part      block 0's input, and what each attention and each MLP added
    by_head      attention split into heads            by_kv_head   and their key/value groups
    by_neuron    MLPs split into neurons               by_source    heads split into the positions they read
    by_token     block 0's input at each position

What is written in block i reaches the target times every later layer scalar: `residual_gain` knows that, and
nothing else does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_gemma4.config import HookedConfig
from lens_gemma4.utils import Slice


@runtime_checkable
class Run(Protocol):
    """What is read of an `ActivationCache`."""

    has_batch_dim: bool

    @property
    def cfg(self) -> HookedConfig: ...
    @property
    def weights(self) -> Mapping[str, Any]: ...
    @property
    def derived(self) -> Mapping[str, Any]: ...
    def __getitem__(self, name: str) -> Any: ...


# -- the arithmetic of the stream ---------------------------------------------------------------------


def residual_gain(
    layer_scalars: Sequence[Tensor] | Float[Tensor, " layer"],
) -> Float[Tensor, " layer"]:
    """Factor by which a vector written in each block reaches the final norm.

    A block ends with `resid_post = s_l * (resid_mid + mlp_out)`, so what block l writes is multiplied by
    `s_l * s_{l+1} * ... * s_{L-1}` on its way out. Float64: the products can be as small as 1e-13.

    Args:
        layer_scalars: `s_l` of each block, first block first; dimensionless.
    Raises:
        ValueError: there are no layers.
    Source: `layer_scalar` in transformers' `Gemma4UnifiedTextDecoderLayer.forward`.

    >>> residual_gain(torch.tensor([0.5, 2.0, 4.0]))
    tensor([4., 8., 4.], dtype=torch.float64)
    """
    if not len(layer_scalars):
        raise ValueError("there are no layers, so nothing is written")
    scalars = torch.stack([torch.as_tensor(s).reshape(()) for s in layer_scalars])
    return scalars.double().flip(0).cumprod(0).flip(0)


def gains_at(layer_scalars: Sequence[Tensor], layer: int) -> list[float]:
    """What a vector written in each block below `layer` is multiplied by until the stream enters that block; last
    comes 1, for what block `layer` itself writes before its own scalar."""
    return [*(residual_gain(layer_scalars[:layer]).tolist() if layer else []), 1.0]


def widest(dtype: torch.dtype) -> torch.dtype:
    """Contributions are summed in float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def widened(value: Tensor) -> Tensor:
    return value.to(widest(value.dtype))


def through_norm(
    vectors: Float[Tensor, "*#axes d_model"],
    scale: Float[Tensor, "*#axes 1"],
    gain: Float[Tensor, " d_model"],
) -> Float[Tensor, "*out d_model"]:
    """What a norm makes of a part of its input, its scale held at the run's.

    Args:
        vectors: parts of the norm's input.
        scale: the norm's `hook_scale` in the run; broadcasts over the parts.
        gain: the norm's weight.
    """
    wide = widened(vectors)
    return wide / scale * gain.to(wide)


def head_contributions(
    z: Float[Tensor, "*axes head d_head"],
    w_o: Float[Tensor, "head d_head d_model"],
    scale: Float[Tensor, "*axes 1"],
    gain: Float[Tensor, " d_model"],
) -> Float[Tensor, "head *axes d_model"]:
    """What each head adds to the stream: its o_proj output through the frozen post-norm.

    They sum to `hook_attn_out`. The post-norm's scale comes from all heads together and is held at the run's, so how
    it would answer to one head's absence is left out (ablation shows that).

    Args:
        z: `attn.hook_z`.
        w_o: `attn.W_O`.
        scale: `ln1_post.hook_scale`.
        gain: `ln1_post.weight`.
    """
    return through_norm(
        torch.einsum("...hd,hdm->h...m", widened(z), w_o.to(widened(z))), scale, gain
    )


def neuron_contributions(
    post: Float[Tensor, "*axes neuron"],
    w_out: Float[Tensor, "neuron d_model"],
    scale: Float[Tensor, "*axes 1"],
    gain: Float[Tensor, " d_model"],
) -> Float[Tensor, "neuron *axes d_model"]:
    """What each neuron adds to the stream: its row of `W_out` through the frozen post-norm. They sum to `hook_mlp_out`.

    Args:
        post: `mlp.hook_post` of some neurons, and `w_out` their rows of `mlp.W_out`.
        scale: `ln2_post.hook_scale`.
        gain: `ln2_post.weight`.
    """
    return through_norm(
        torch.einsum("...n,nm->n...m", widened(post), w_out.to(widened(post))), scale, gain
    )


def rounded(got: Tensor, exact: Tensor, room: Tensor) -> Tensor:
    """What rounding made of a number: the difference, where it is no larger than rounding can be. What is larger is no
    rounding (an edit by a hook, a weight that is not the run's) and is left for the remainder to show."""
    difference = got - exact
    return torch.where(difference.abs() <= room, difference, 0)


def stream_rounding(
    run: Run, layer: int, mlp_input: bool = False
) -> Float[Tensor, "*axes d_model"]:
    """What rounding in a run added to the stream entering block `layer` (the last stream at n_layers).

    Computed at each addition and each product by `layer_scalar`, from the values on both sides of it, in float64;
    each carries the scalars it passes. With `mlp_input`, up to between block `layer`'s attention and MLP.
    """
    scalars = run.weights["layer_scalar"]
    gains = gains_at(scalars, layer)
    dtype = run["blocks.0.hook_resid_pre"].dtype
    total = torch.zeros_like(run["blocks.0.hook_resid_pre"], dtype=torch.float64)
    for i in range(layer + mlp_input):
        pre, attn, mid = (
            run[f"blocks.{i}.hook_{word}"].double()
            for word in ("resid_pre", "attn_out", "resid_mid")
        )
        total += gains[i] * rounded(mid, pre + attn, _half_a_step(mid, dtype))
        if i == layer:
            break
        mlp, summed, post = (
            run[f"blocks.{i}.hook_{word}"].double()
            for word in ("mlp_out", "resid_sum", "resid_post")
        )
        total += gains[i] * rounded(summed, mid + mlp, _half_a_step(summed, dtype))
        scaled = summed * scalars[i].to(summed)
        total += gains[i + 1] * rounded(post, scaled, _half_a_step(post, dtype))
    return total


def write_rounding(
    x: Float[Tensor, "*axes inside"],
    w: Float[Tensor, "inside d_model"],
    scale: Float[Tensor, "*axes 1"],
    gain: Float[Tensor, " d_model"],
    got: Float[Tensor, "*axes d_model"],
    dtype: torch.dtype,
) -> Float[Tensor, "*axes d_model"]:
    """What rounding added to a block's output `got`: that of the product `x @ w` and of the post-norm behind it.

    Args:
        dtype: of the run; the others are in float32 at least.
    """
    exact = through_norm(x @ w, scale, gain)
    terms = through_norm(x.abs() @ w.abs(), scale, gain.abs())
    # Twice half a step, and what adding up many numbers in float32 loses.
    return rounded(got, exact, 2 * _half_a_step(got, dtype) + 2.0**-18 * terms)


def _half_a_step(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The most by which rounding to a dtype moves a number, and a fifth on top."""
    info = torch.finfo(dtype)
    return 0.6 * info.eps * value.abs() + info.eps * info.smallest_normal


# -- targets ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The number that is attributed, one at each position.

    Args:
        token: the id whose logit is asked about: one for all, `[batch]`, or `[batch pos]` at the chosen positions; a number, list,
            array or tensor of whole numbers.
        versus: another id, whose logit is subtracted.
        direction: in place of a token, a direction `[... d_model]`: of the final norm's output (as a column of `W_U` is) or,
            with `layer`, of the stream.
        layer: the target is the stream entering this block (n_layers: after the last) along `direction`.
        of: "raw", the logit before the softcap, is a sum of parts, exactly. "logit" and "logprob" (nats) are not: there the parts
            are first order, those of the raw logits times the slope that the softcap, and the softmax after it, has in this run.
    Raises:
        ValueError: both or neither of token and direction; a layer without a direction.
    """

    token: Any = None
    versus: Any = None
    direction: Float[Tensor, "*axes d_model"] | None = None
    layer: int | None = None
    of: str = "raw"

    def __post_init__(self) -> None:
        if (self.token is None) == (self.direction is None):
            raise ValueError("a target is a token or a direction: give one of them")
        if self.of not in WORDS:
            raise ValueError(f"of is {self.of!r}; use 'raw', 'logit' or 'logprob'")
        if self.direction is not None and (self.versus is not None or self.of != "raw"):
            raise ValueError("versus and of belong to a token: a direction is read as it is")
        if self.layer is not None and self.direction is None:
            raise ValueError(
                "the stream at a layer is read along a direction: give direction [d_model] with layer"
            )

    def told(self, word: Callable[[int], str] | None = None) -> str:
        """In words, for titles; tokens by their numbers, or as `word` spells them."""
        if self.direction is not None:
            where = "the final norm" if self.layer is None else f"the stream at block {self.layer}"
            return f"direction of {where}"
        versus = "" if self.versus is None else f" minus {_told(self.versus, word)}"
        return f"{WORDS[self.of]} of {_told(self.token, word)}{versus}"

    def __str__(self) -> str:
        return self.told()


VOCAB_CHUNK = 16_384
WORDS = {"raw": "logit before softcap", "logit": "logit", "logprob": "log-probability"}


def _told(token: Any, word: Callable[[int], str] | None) -> str:
    ids = torch.as_tensor(token).unique().tolist()
    if len(ids) > 1:
        return "a token a row"
    return f"token {ids[0]}" if word is None else repr(word(ids[0]))


@dataclass(frozen=True)
class Reading:
    """A target in a run at the chosen positions: a part of the stream gives `part . read` to it."""

    target: Target
    at: Positions
    layer: int
    read: Float[Tensor, "batch pos d_model"]
    total: Float[Tensor, "batch pos"]  # what the parts add up to
    actual: Float[
        Tensor, "batch pos"
    ]  # the run's own number; another one when the parts are first order
    direction: Tensor | None = None  # of the final norm's output; None when the target is a stream

    @property
    def gains(self) -> list[float]:
        """What each block's writing is multiplied by on its way."""
        return gains_at(self.at.run.weights["layer_scalar"], self.layer)[:-1]


class Positions:
    """Chosen positions of a run's values, which it gives a batch axis where they have none.

    `"last"` is each row's last real token, by the run's `attention_mask`.
    """

    def __init__(self, run: Run, chosen: Any = "last") -> None:
        self.run = run
        stream = self._batched(run["blocks.0.hook_resid_pre"])
        rows, pos = stream.shape[:2]
        if isinstance(chosen, str):
            self.index = _last(run, chosen, rows, pos, stream.device)[:, None]
        else:
            places = Slice.unwrap(chosen).apply(torch.arange(pos, device=stream.device))
            if not len(places):
                raise ValueError(f"positions is {chosen!r}, which is none of the {pos} positions")
            self.index = places.expand(rows, -1)  # [batch chosen]
        self.rows = torch.arange(rows, device=stream.device)[:, None]

    def _batched(self, value: Tensor) -> Tensor:
        return value if self.run.has_batch_dim else value[None]

    def whole(self, name: str) -> Tensor:
        """A value at every position, in float32 at least."""
        return widened(self._batched(self.run[name]))

    def __call__(self, name: str) -> Float[Tensor, "batch chosen *axes"]:
        """A value whose first axes are batch and position."""
        return widened(self.chosen(self.run[name]))

    def chosen(self, value: Tensor) -> Float[Tensor, "batch chosen *axes"]:
        return self._batched(value)[self.rows, self.index]

    def queries(self, name: str) -> Float[Tensor, "batch chosen head kv_pos"]:
        """A pattern at the chosen queries."""
        return widened(self._batched(self.run[name]).transpose(1, 2)[self.rows, self.index])

    def labels(self) -> dict[str, list[str]]:
        rows, n = self.index.shape
        same = bool((self.index == self.index[:1]).all())
        names = [str(i) for i in self.index[0].tolist()] if same else ["last"] * n
        return {"batch": [str(row) for row in range(rows)], "pos": names}


def _last(
    run: Run, chosen: str, rows: int, pos: int, device: torch.device
) -> Int[Tensor, " batch"]:
    if chosen != "last":
        raise ValueError(f"positions is {chosen!r}; use 'last', ints, a slice or None")
    mask = run.derived.get("attention_mask")
    mask = None if mask is None else mask.reshape(rows, -1)
    if mask is None:
        return torch.full((rows,), pos - 1, device=device)
    if mask.shape[1] != pos:
        raise ValueError(
            f"the run had {mask.shape[1]} positions and {pos} were kept: 'last' cannot be found among them; give positions"
        )
    return (torch.as_tensor(mask, device=device).bool() * torch.arange(pos, device=device)).argmax(
        -1
    )


def read_target(run: Run, target: Target, positions: Any = "last") -> Reading:
    """A target's direction in the stream of a run, and its number there."""
    at = Positions(run, positions)
    n_layers = run.cfg.n_layers
    if target.layer is not None:
        layer = operator.index(target.layer)
        layer += n_layers + 1 if layer < 0 else 0
        if not 0 <= layer <= n_layers:
            raise ValueError(f"layer is {target.layer}; the stream can be read at 0 to {n_layers}")
        stream = at(stream_name(layer, n_layers))
        read = _along(target.direction, stream)
        total = (stream * read).sum(-1)
        return Reading(target, at, layer, read, total, total)
    out = at("ln_final.hook_out")
    if target.direction is not None:
        direction = _along(target.direction, out)
        total = actual = (out * direction).sum(-1)
    else:
        direction, total, actual = _of_tokens(at, target, out)
    read = through_norm(direction, at("ln_final.hook_scale"), run.weights["ln_final"].to(out))
    return Reading(target, at, n_layers, read, total, actual, direction)


def _along(direction: Tensor | None, stream: Tensor) -> Float[Tensor, "batch pos d_model"]:
    assert direction is not None
    direction = direction.to(stream)
    shape = direction.shape
    if shape[-1:] != stream.shape[-1:] or not fits(shape, stream.shape):
        raise ValueError(
            f"direction is {list(shape)}; the run has {list(stream.shape)} [batch chosen-positions d_model]: give [d_model], "
            "[pos d_model], or [batch pos d_model] (1 where it is the same for all)"
        )
    return direction.expand_as(stream)


def fits(small: Sequence[int], large: Sequence[int]) -> bool:
    """Whether a tensor spreads over another without making it larger: a product would, unasked."""
    return len(small) <= len(large) and all(
        a in (1, b) for a, b in zip(small[::-1], large[::-1], strict=False)
    )


def stream_name(layer: int, n_layers: int) -> str:
    return (
        f"blocks.{layer}.hook_resid_pre"
        if layer < n_layers
        else f"blocks.{n_layers - 1}.hook_resid_post"
    )


def _of_tokens(at: Positions, target: Target, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Direction in the final norm's output, what its parts add up to, and the run's own number."""
    run, w_u = at.run, at.run.weights["W_U"]
    ids = [
        _per_position(token, at.index, w_u.shape[1])
        for token in (target.token, target.versus)
        if token is not None
    ]
    signs = (1.0, -1.0)[: len(ids)]
    raw = at("hook_logits_raw") if _has(run, "hook_logits_raw") else None
    if raw is None and target.of == "logprob":
        raw = (out.to(w_u) @ w_u).to(out)
    if raw is None:
        picked = [(out * w_u.T[i].to(out)).sum(-1) for i in ids]
    else:
        picked = [raw.gather(-1, i[..., None])[..., 0] for i in ids]
    cap = run.cfg.output_logits_soft_cap
    if target.of == "raw":
        slopes = [torch.ones_like(p) for p in picked]
    else:
        slopes = [torch.ones_like(p) if cap is None else 1 - (p / cap).tanh() ** 2 for p in picked]
    direction = sum(
        s * k[..., None] * w_u.T[i].to(out) for s, k, i in zip(signs, slopes, ids, strict=True)
    )
    total = sum(s * k * p for s, k, p in zip(signs, slopes, picked, strict=True))
    capped = [p if cap is None or target.of == "raw" else cap * (p / cap).tanh() for p in picked]
    actual = sum(s * p for s, p in zip(signs, capped, strict=True))
    if target.of == "logprob" and len(ids) == 1:  # of a pair, the normaliser drops out
        assert raw is not None
        logits = raw if cap is None else cap * (raw / cap).tanh()
        pull = logits.softmax(-1) * (1.0 if cap is None else 1 - (raw / cap).tanh() ** 2)
        direction = direction - _mixed(pull, w_u)
        total = total - (pull * raw).sum(-1)
        actual = actual - logits.logsumexp(-1)
    return direction, total, actual  # type: ignore[return-value]


def _mixed(
    pull: Float[Tensor, "batch pos d_vocab"], w_u: Float[Tensor, "d_model d_vocab"]
) -> Float[Tensor, "batch pos d_model"]:
    """Columns of `w_u` by their weights, in float32 at least; the whole matrix never stands a second time."""
    parts = zip(pull.split(VOCAB_CHUNK, -1), w_u.split(VOCAB_CHUNK, -1), strict=True)
    return sum((p @ w.T.to(p) for p, w in parts), pull.new_zeros(*pull.shape[:-1], w_u.shape[0]))


def _per_position(
    token: Any, like: Int[Tensor, "batch chosen"], d_vocab: int
) -> Int[Tensor, "batch chosen"]:
    ids = token_ids(token, d_vocab).to(like)
    ids = ids[:, None] if ids.ndim == 1 and ids.numel() > 1 else ids
    try:
        return ids.expand(like.shape)
    except RuntimeError:
        raise ValueError(
            f"tokens are {list(torch.as_tensor(token).shape)}; the run has {list(like.shape)} [batch chosen-positions]: give one id, "
            "[batch] or [batch pos]"
        ) from None


def token_ids(token: Any, d_vocab: int) -> Int[Tensor, "*axes"]:
    """Ids as whole numbers in the vocabulary, for as an index a bool or a byte would be a mask and -1 another token.

    Raises:
        ValueError: something else.
    """
    ids = torch.as_tensor(token)
    if (
        ids.is_floating_point()
        or ids.dtype == torch.bool
        or ids.numel() == 0
        or not 0 <= int(ids.min()) <= int(ids.max()) < d_vocab
    ):
        raise ValueError(f"a token is an id from 0 to {d_vocab - 1}, got {token!r}")
    return ids.long()


def _has(run: Run, name: str) -> bool:
    return name in run  # type: ignore[operator]


# -- what comes back ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attribution:
    """Contributions to a target, and what they are of.

    `values` has the axes of `axes`, `batch` and `pos` among them; `labels` names the entries of each. `others` are the parts
    that this view does not split (and in low precision "rounding"), each `[batch pos]`: together with them everything adds up
    to `total`, which is `actual`, the run's own number, unless the target is first order.
    """

    target: str
    values: Float[Tensor, "*axes"]
    axes: tuple[str, ...]
    labels: Mapping[str, list[str]]
    others: Mapping[str, Float[Tensor, "batch pos"]]
    total: Float[Tensor, "batch pos"]
    actual: Float[Tensor, "batch pos"]

    def sum(self) -> Float[Tensor, "batch pos"]:
        """All parts together."""
        split = [i for i, axis in enumerate(self.axes) if axis not in ("batch", "pos")]
        inside = self.values.sum(split) if split else self.values
        return inside + sum(self.others.values(), torch.zeros_like(self.total))

    @property
    def remainder(self) -> Float[Tensor, "batch pos"]:
        """What the parts leave over: rounding, unless a hook edited the run on the way or the weights are not the run's."""
        return self.total - self.sum()

    def relabel(self, **labels: Sequence[str]) -> Attribution:
        """The same with other names on some axes, e.g. `pos=model.to_str_tokens(prompt)`.

        Raises:
            ValueError: no such axis, or another number of names than entries.
        """
        for axis, names in labels.items():
            if axis not in self.labels or len(names) != len(self.labels[axis]):
                sizes = {name: len(known) for name, known in self.labels.items()}
                raise ValueError(
                    f"{len(names)} names for axis {axis!r}; the axes and their sizes are {sizes}"
                )
        return replace(
            self, labels={**self.labels, **{axis: list(names) for axis, names in labels.items()}}
        )

    def top(self, k: int = 10, batch: int = 0, pos: int = -1) -> list[tuple[str, float]]:
        """The k parts furthest from zero at one position, by name."""
        where = {"batch": batch, "pos": pos}
        values = self.values[tuple(where.get(axis, slice(None)) for axis in self.axes)]
        named = list(zip(self._names(), values.flatten().tolist(), strict=True))
        named += [(name, value[batch, pos].item()) for name, value in self.others.items()]
        return sorted(named, key=lambda part: -abs(part[1]))[:k]

    def _names(self) -> list[str]:
        """One name for each part, in the order of `values` at one position."""
        axes = [axis for axis in self.axes if axis not in ("batch", "pos")]
        names = ["0_pre"] if not axes else [""]
        for axis in axes:
            names = [
                f"{name} <- {label}" if axis == "source" else name + label
                for name in names
                for label in self.labels[axis]
            ]
        return names

    def to_dataframe(self) -> Any:
        """Long form, a pandas row for each part, row and position: `part`, `batch`, `pos`, `value`."""
        import pandas as pd

        order = [i for i, axis in enumerate(self.axes) if axis not in ("batch", "pos")]
        order += [self.axes.index("batch"), self.axes.index("pos")]
        names = self._names()
        values = self.values.permute(order).reshape(len(names), *self.total.shape)
        values = torch.cat([values, *(other[None].to(values) for other in self.others.values())])
        index = pd.MultiIndex.from_product(
            [[*names, *self.others], range(self.total.shape[0]), range(self.total.shape[1])]
        )
        frame = index.to_frame(index=False, name=["part", "batch", "pos"])
        for axis in ("batch", "pos"):
            frame[axis] = [self.labels[axis][i] for i in frame[axis]]
        return frame.assign(value=values.flatten().tolist())

    def plot(self, batch: int = 0, pos: int = -1, k: int = 30) -> Any:
        """A plotly figure of one position: heads as a map of blocks and heads, everything else as the k largest bars."""
        from lens_gemma4 import plots

        if self.axes[:2] == ("layer", "head") and len(self.axes) == 4:
            return plots.heatmap(
                self.values[:, :, batch, pos].tolist(),
                self.labels["layer"],
                self.labels["head"],
                row_title="block",
                column_title="head",
                unit=self.target,
            )
        parts = self.top(k, batch, pos)
        return plots.bars(
            [value for _, value in parts], [name for name, _ in parts], unit=self.target
        )


# -- one function per question ------------------------------------------------------------------------


def by_part(run: Run, target: Target, positions: Any = "last") -> Attribution:
    """What block 0's input, each attention and each MLP wrote towards the target.

    Args:
        run: an `ActivationCache` that kept `needed("part", run.cfg)` (no filter keeps everything).
        positions: at which the target is asked: what makes a `Slice` (an int, a list, an array, `(start, stop)`), None for all,
            or "last", each row's last real token.
    Returns:
        Axes `part batch pos`; parts "0_pre", "0_attn_out", "0_mlp_out", ...
    Raises:
        KeyError: a value was not kept, or its block did not run; the message says which.

    >>> from lens_gemma4 import HookedModel
    >>> model = HookedModel.from_pretrained("tiny")
    >>> _, cache = model.run_with_cache("The capital of France is")
    >>> found = by_part(cache, Target(model.to_single_token(" Paris")))
    >>> bool(found.remainder.abs().max() < 1e-3)
    True
    """
    reading = read_target(run, target, positions)
    values, names = [_start(reading)], ["0_pre"]
    for i in range(reading.layer):
        values += [_whole(reading, i, "attn"), _whole(reading, i, "mlp")]
        names += [f"{i}_attn_out", f"{i}_mlp_out"]
    return _result(reading, torch.stack(values), ("part", "batch", "pos"), {"part": names}, {})


def by_head(run: Run, target: Target, positions: Any = "last") -> Attribution:
    """What each head wrote towards the target, through the frozen post-norm.

    Returns:
        Axes `layer head batch pos`; "0_pre" and "mlps" are among `others`.
    """
    reading = read_target(run, target, positions)
    heads = [_heads(reading, i) for i in range(reading.layer)]
    values = _stacked(reading, heads, run.cfg.n_heads)  # [layer head batch pos]
    others = {"0_pre": _start(reading), "mlps": _all(reading, "mlp")}
    inside = _inside_rounding(reading, "attn")
    return _result(
        reading, values, ("layer", "head", "batch", "pos"), _head_labels(values), others, inside
    )


def by_kv_head(run: Run, target: Target, positions: Any = "last") -> Attribution:
    """What each key/value head's group of query heads wrote towards the target; a borrowing block's groups are its own.

    Returns:
        Axes `kv_head batch pos`, all blocks in a row ("L3KV1"), because their numbers differ.
    """
    found = by_head(run, target, positions)
    groups, names = [], []
    for i, heads in enumerate(found.values):
        per_kv = run.cfg.layer(i).heads_per_kv
        groups += list(heads.unflatten(0, (-1, per_kv)).sum(1))
        names += [f"L{i}KV{j}" for j in range(len(heads) // per_kv)]
    values = torch.stack(groups) if groups else found.values.flatten(0, 1)
    labels = {"kv_head": names} | {axis: found.labels[axis] for axis in ("batch", "pos")}
    return replace(found, values=values, axes=("kv_head", "batch", "pos"), labels=labels)


def by_neuron(run: Run, target: Target, positions: Any = "last", k: int | None = 50) -> Attribution:
    """What single MLP neurons wrote towards the target, through the frozen post-norm.

    Args:
        k: how many are named, those furthest from zero at any of the positions; the others of all blocks are one part.
            No more than one block's are held at a time. None names all.
    Returns:
        Axes `neuron batch pos`, labels "L3N17"; "0_pre", "attns" and "other neurons" are among `others`.
    """
    if k is not None and k < 0:
        raise ValueError(f"k is {k}; name some neurons, or all with None")
    reading = read_target(run, target, positions)
    best = torch.zeros(
        0, *reading.total.shape, dtype=reading.total.dtype, device=reading.total.device
    )
    names: list[str] = []
    sums = []
    for i in range(reading.layer):
        neurons = _neurons(reading, i)  # [neuron batch pos]
        sums.append(neurons.sum(0))
        best = torch.cat([best, neurons])
        names += [f"L{i}N{j}" for j in range(len(neurons))]
        if k is not None and len(names) > k:
            kept = best.abs().amax((1, 2)).topk(k).indices
            best, names = best[kept], [names[j] for j in kept.tolist()]
    others = {"0_pre": _start(reading), "attns": _all(reading, "attn")}
    if k is not None:
        others["other neurons"] = sum(sums, torch.zeros_like(reading.total)) - best.sum(0)
    inside = _inside_rounding(reading, "mlp")
    return _result(reading, best, ("neuron", "batch", "pos"), {"neuron": names}, others, inside)


def by_source(run: Run, target: Target, positions: Any = "last") -> Attribution:
    """What each head wrote towards the target, by the position it read it from: pattern times value.

    The numbers are as many as the pattern's at the chosen positions: ask about few.

    Returns:
        Axes `layer head batch pos source`; "0_pre" and "mlps" are among `others`.
    """
    reading = read_target(run, target, positions)
    sources = [_sources(reading, i) for i in range(reading.layer)]
    length = reading.at.whole("blocks.0.hook_resid_pre").shape[1]
    values = _stacked(reading, sources, run.cfg.n_heads, length)
    others = {"0_pre": _start(reading), "mlps": _all(reading, "mlp")}
    labels = {**_head_labels(values), "source": [str(i) for i in range(length)]}
    inside = _inside_rounding(reading, "attn", mixed=True)
    return _result(
        reading, values, ("layer", "head", "batch", "pos", "source"), labels, others, inside
    )


def by_token(run: Run, target: Target, positions: Any = None) -> Attribution:
    """What each position's own block-0 input (a token's embedding, a media row) gives to the target at that position, along the
    stream alone; all positions by default. What a position gives through attention is in `by_source`.

    Returns:
        Axes `batch pos`; "attns" and "mlps" are among `others`.
    """
    reading = read_target(run, target, positions)
    others = {"attns": _all(reading, "attn"), "mlps": _all(reading, "mlp")}
    return _result(reading, _start(reading), ("batch", "pos"), {}, others)


BY = {
    "part": by_part,
    "head": by_head,
    "kv_head": by_kv_head,
    "neuron": by_neuron,
    "source": by_source,
    "token": by_token,
}
_ATTENTION = {
    "part": ("hook_attn_out",),
    "token": ("hook_attn_out",),
    "neuron": ("hook_attn_out", "mlp.hook_post", "ln2_post.hook_scale"),
    "head": ("attn.hook_z", "ln1_post.hook_scale"),
    "kv_head": ("attn.hook_z", "ln1_post.hook_scale"),
    "source": ("attn.hook_pattern", "attn.v_norm.hook_out", "ln1_post.hook_scale"),
}
_ROUNDING = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_sum", "resid_post")


def needed(
    by: str, cfg: HookedConfig, dtype: torch.dtype = torch.float32, target: Target | None = None
) -> list[str]:
    """What a question reads: pass it to `run_with_cache` as names_filter.

    Args:
        by: a key of `BY`.
        dtype: the model's; below float32 the parts of rounding need more.
        target: a stream needs another value than a logit does.
    """
    names = ["blocks.0.hook_resid_pre", "ln_final.hook_out", "ln_final.hook_scale"]
    if target is not None and target.layer is not None:
        names = [
            "blocks.0.hook_resid_pre",
            stream_name(target.layer % (cfg.n_layers + 1), cfg.n_layers),
        ]
    names += [f"blocks.*.{name}" for name in _ATTENTION[by]]
    if by != "neuron":
        names.append("blocks.*.hook_mlp_out")
    if dtype.itemsize < 4:
        names += [f"blocks.*.hook_{word}" for word in _ROUNDING]
        names += ["blocks.*.attn.hook_z"] if by == "source" else []
    return names


# -- the pieces ---------------------------------------------------------------------------------------


def _start(reading: Reading) -> Float[Tensor, "batch pos"]:
    """Of block 0's input, which carries the whole product of scalars."""
    gain = reading.gains[0] if reading.gains else 1.0
    return gain * (reading.at("blocks.0.hook_resid_pre") * reading.read).sum(-1)


def _whole(reading: Reading, i: int, kind: str) -> Float[Tensor, "batch pos"]:
    """Of a block's whole attention ("attn") or MLP ("mlp")."""
    return reading.gains[i] * (reading.at(f"blocks.{i}.hook_{kind}_out") * reading.read).sum(-1)


def _all(reading: Reading, kind: str) -> Float[Tensor, "batch pos"]:
    parts = [_whole(reading, i, kind) for i in range(reading.layer)]
    return sum(parts, torch.zeros_like(reading.total))


def _before_post_norm(reading: Reading, i: int, norm: str) -> Float[Tensor, "batch pos d_model"]:
    """The target's direction before a block's post-norm, whose scale is the run's, times the scalars to come."""
    gain = reading.at.run.weights[norm][i].to(reading.read)
    return reading.gains[i] * through_norm(
        reading.read, reading.at(f"blocks.{i}.{norm}.hook_scale"), gain
    )


def _before_heads(reading: Reading, i: int) -> Float[Tensor, "batch pos head d_head"]:
    """The target's direction in each head's z."""
    w_o = reading.at.run.weights["W_O"][i].to(reading.read)
    return torch.einsum("bpm,hdm->bphd", _before_post_norm(reading, i, "ln1_post"), w_o)


def _heads(reading: Reading, i: int) -> Float[Tensor, "head batch pos"]:
    z = reading.at(f"blocks.{i}.attn.hook_z")
    return (z * _before_heads(reading, i)).sum(-1).permute(2, 0, 1)


def _sources(reading: Reading, i: int) -> Float[Tensor, "head batch pos source"]:
    values = reading.at.whole(f"blocks.{i}.attn.v_norm.hook_out")  # [batch source kv_head d_head]
    pattern = reading.at.queries(f"blocks.{i}.attn.hook_pattern")  # [batch pos head source]
    if pattern.shape[-1] != values.shape[1]:
        raise ValueError(
            f"the run had {pattern.shape[-1]} positions and {values.shape[1]} were kept: heads read the others too; keep "
            "them all (no pos_slice) and choose among them with positions"
        )
    grouped = _before_heads(reading, i).unflatten(2, (values.shape[2], -1))
    read = torch.einsum("bpkgd,bskd->bpkgs", grouped, values).flatten(2, 3)
    return (pattern * read).permute(2, 0, 1, 3)


def _neurons(reading: Reading, i: int) -> Float[Tensor, "neuron batch pos"]:
    w_out = reading.at.run.weights["W_out"][i].to(reading.read)
    read = _before_post_norm(reading, i, "ln2_post") @ w_out.T  # [batch pos neuron]
    return (reading.at(f"blocks.{i}.mlp.hook_post") * read).permute(2, 0, 1)


def _stacked(reading: Reading, parts: list[Tensor], n_heads: int, *more: int) -> Tensor:
    if parts:
        return torch.stack(parts)
    return reading.total.new_zeros(0, n_heads, *reading.total.shape, *more)


def _head_labels(values: Tensor) -> dict[str, list[str]]:
    return {
        "layer": [f"L{i}" for i in range(values.shape[0])],
        "head": [f"H{i}" for i in range(values.shape[1])],
    }


def _is_low(reading: Reading) -> bool:
    return reading.at.run["blocks.0.hook_resid_pre"].dtype.itemsize < 4


def _inside_rounding(reading: Reading, kind: str, mixed: bool = False) -> Tensor | None:
    """Between what a block's attention or MLP is split into and what it added, in a low-precision run; `mixed`, of the
    pattern's product with the values too."""
    if not _is_low(reading):
        return None
    at, run = reading.at, reading.at.run
    inside, matrix, norm = {
        "attn": ("attn.hook_z", "W_O", "ln1_post"),
        "mlp": ("mlp.hook_post", "W_out", "ln2_post"),
    }[kind]
    total, dtype = torch.zeros_like(reading.total), run["blocks.0.hook_resid_pre"].dtype
    for i in range(reading.layer):
        x, got = at(f"blocks.{i}.{inside}"), at(f"blocks.{i}.hook_{kind}_out")
        w = run.weights[matrix][i].to(x).flatten(0, -2)
        scale, gain = at(f"blocks.{i}.{norm}.hook_scale"), run.weights[norm][i].to(x)
        written = write_rounding(x.flatten(2), w, scale, gain, got, dtype)
        total = total + reading.gains[i] * (written * reading.read).sum(-1)
        if mixed:
            total = total + (_mix_rounding(reading, i, x) * _before_heads(reading, i)).sum((-1, -2))
    return total


def _mix_rounding(
    reading: Reading, i: int, z: Float[Tensor, "batch pos head d_head"]
) -> Float[Tensor, "batch pos head d_head"]:
    """Between the pattern times the values and z."""
    values = reading.at.whole(f"blocks.{i}.attn.v_norm.hook_out")  # [batch source kv_head d_head]
    pattern = reading.at.queries(f"blocks.{i}.attn.hook_pattern")
    pattern = pattern.unflatten(2, (values.shape[2], -1))  # [batch pos kv_head group source]
    exact, terms = (
        torch.einsum("bpkgs,bskd->bpkgd", pattern, v).flatten(2, 3) for v in (values, values.abs())
    )
    dtype = reading.at.run["blocks.0.hook_resid_pre"].dtype
    # Of the pattern, of what the fused operation rounds inside, and of z.
    return rounded(z, exact, 4 * _half_a_step(terms, dtype))


def _rounding(reading: Reading) -> Float[Tensor, "batch pos"]:
    """Of the additions and products along the stream, and of the final norm and head."""
    at, run = reading.at, reading.at.run
    stream = (at.chosen(stream_rounding(run, reading.layer)) * reading.read).sum(-1)
    if reading.direction is None:
        return stream.to(reading.total)
    dtype = run["blocks.0.hook_resid_pre"].dtype
    last, out = at(stream_name(reading.layer, run.cfg.n_layers)), at("ln_final.hook_out")
    exact = through_norm(last, at("ln_final.hook_scale"), run.weights["ln_final"].to(last))
    normed = rounded(out, exact, _half_a_step(out, dtype) + 2.0**-18 * out.abs())
    terms = out * reading.direction
    room = 2 * _half_a_step(terms.abs().sum(-1) + reading.total.abs(), dtype)
    head = rounded(reading.total, terms.sum(-1), room)
    return stream.to(reading.total) + (normed * reading.direction).sum(-1) + head


def _result(
    reading: Reading,
    values: Tensor,
    axes: tuple[str, ...],
    labels: Mapping[str, list[str]],
    others: dict[str, Tensor],
    inside: Tensor | None = None,
) -> Attribution:
    if _is_low(reading):
        rounding = _rounding(reading)
        others = {**others, "rounding": rounding if inside is None else rounding + inside}
    labels = {**labels, **reading.at.labels()}
    return Attribution(
        str(reading.target), values, axes, labels, others, reading.total, reading.actual
    )
