"""Writing on: token after token on a key/value cache, with hooks in every step.

A call is one `Generation`. The prompt runs once (the prefill), then each new token by itself (decoding). Between two steps
nothing is hooked and autograd is as the caller has it, so that a stream may be left at any piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from lens_gemma4.cache import ActivationCache
from lens_gemma4.chat import is_chat, rendered
from lens_gemma4.config import HookedConfig
from lens_gemma4.errors import HookNameError
from lens_gemma4.hooks import Handle, HookFn, HookPoint, NamedPoint, NameFilter
from lens_gemma4.kv_cache import KVCache
from lens_gemma4.new_text import NewText, Stops
from lens_gemma4.sampling import Sampling, generator_of
from lens_gemma4.spans import Inputs

if TYPE_CHECKING:
    from lens_gemma4.hooked_model import HookedModel

HookPairs = Sequence[tuple[NameFilter, HookFn]]
Returned = Literal["input", "text", "tokens"]
Added = tuple[HookPoint, Handle, bool]  # as hooks.py has it: whether the point was named literally

MEDIA = ("vision", "video", "audio")  # points that fire in the prefill alone
# What others call it, or why it is not here.
ELSEWHERE = {
    "verbose": "nothing is printed",
    "use_past_kv_cache": "here it is use_kv_cache=",
    "use_cache": "here it is use_kv_cache=",
    "past_kv_cache": "here it is kv_cache=",
    "past_key_values": "here it is kv_cache=",
    "freq_penalty": "repetition_penalty= is there, and a hook on 'hook_logits' can change what is chosen from",
    "logits_processor": "a hook on 'hook_logits' changes what is chosen from",
    "eos_token_id": "stop= adds ids to the checkpoint's own, which stop_at_eos=False leaves out",
    "stop_strings": "here it is stop=",
    "stopping_criteria": "stop= takes functions of a row's ids",
    "stop_tokens": "here it is stop=",
    "streamer": "stream=True gives an iterator",
    "max_tokens_per_yield": "each piece comes as soon as its characters are whole",
    "max_length": "max_new_tokens= counts the new ones alone",
    "min_new_tokens": "stop_at_eos=False writes max_new_tokens",
    "num_return_sequences": "give the prompt as often as wanted, [text] * n",
    "num_beams": "there is no beam search",
    "generator": "here it is seed=",
    "pad_token_id": "it is the checkpoint's",
    "output_scores": "return_cache=True with names_filter='hook_logits'",
    "output_hidden_states": "return_cache=True",
    "output_attentions": "return_cache=True",
    "return_dict_in_generate": "return_cache=True",
    "position_ids": "positions count the real tokens",
    "start_at_layer": "a token is chosen from the logits of a whole run",
    "stop_at_layer": "a token is chosen from the logits of a whole run",
    "loss_per_token": "generation has no loss",
    "bwd_hooks": "generation runs without gradients; run the text it gives, with bwd_hooks",
}


def generate(
    model: HookedModel,
    input: Any = None,
    max_new_tokens: int = 20,
    *,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: Any = None,
    stop_at_eos: bool = True,
    return_type: Returned = "input",
    return_cache: bool = False,
    stream: bool = False,
    names_filter: NameFilter = None,
    device: torch.device | str | None = None,
    fwd_hooks: HookPairs = (),
    prefill_hooks: HookPairs = (),
    decode_hooks: HookPairs = (),
    kv_cache: KVCache | None = None,
    use_kv_cache: bool = True,
    check_finite: bool = False,
    **inputs: Any,
) -> Any:
    """What `HookedModel.generate` does; see there."""
    for name in ELSEWHERE.keys() & inputs.keys():
        raise TypeError(f"generate takes no {name!r}: {ELSEWHERE[name]}")
    _check_options(max_new_tokens, return_type, return_cache, stream, names_filter, device)
    sampling = Sampling(do_sample, temperature, top_k, top_p, min_p, repetition_penalty)
    if seed is not None and not do_sample:
        raise ValueError(
            "seed would do nothing: the likeliest token is taken unless do_sample=True"
        )
    kv = _cache_of(model.cfg, kv_cache, use_kv_cache, bool(prefill_hooks or decode_hooks))
    if sampling.remembers and kv is not None and kv.length:
        raise ValueError(
            f"the kv_cache holds {kv.length} positions and not which tokens they are, which repetition_penalty has to count: give "
            "the whole text"
        )
    tensors = _prompt(model, input, kv, **inputs)
    config = _generation_config(model.folder)
    eos = _eos_ids(model.cfg, config)
    rows = Rows(tensors, max_new_tokens, _pad_id(model.cfg, config, eos))
    # What is chosen last runs only where activations or a cache that goes on are to hold it.
    runs_last = return_cache or kv_cache is not None
    runs = max(max_new_tokens - 1, 0) + (runs_last and max_new_tokens > 0)  # after the prefill
    held = 0 if kv is None else kv.length
    _check_room(model.cfg, held + rows.prompt, runs, max_new_tokens)
    hooked = Hooked(model, fwd_hooks, prefill_hooks, decode_hooks, decodes=runs > 0)
    stops = Stops(stop, eos if stop_at_eos else (), model.cfg.d_vocab)
    generation = Generation(
        model=model,
        tensors=tensors,
        rows=rows,
        sampling=sampling,
        stops=stops,
        texts=_new_texts(model, rows)
        if stops.texts or (stream and return_type != "tokens")
        else None,
        hooked=hooked,
        kv=kv,
        record=Record(model, names_filter, device) if return_cache else None,
        generator=generator_of(seed, model.device) if do_sample else None,
        max_new_tokens=max_new_tokens,
        runs_last=runs_last,
        check_finite=check_finite,
    )
    if stream:
        return _stream(generation, return_type)
    for _ in generation.steps():
        pass
    given = inputs.get("input_ids") if input is None else input
    as_text = return_type == "text" or (return_type == "input" and _speaks(given))
    out = _whole_texts(model, given, rows) if as_text else rows.written()
    return (out, generation.cache()) if return_cache else out


# -- the loop -----------------------------------------------------------------------------------------


class Rows:
    """The prompts of a batch and what has been written after them; a row that has ended goes on with the pad token.

    Args:
        tensors: of the prompts, padded on the left; without ids there are embeddings, and only new tokens are known.
        room: tokens to come, at most.
        pad: the pad token's id.
    """

    def __init__(self, tensors: Mapping[str, Any], room: int, pad: int) -> None:
        ids, embeds = tensors.get("input_ids"), tensors.get("inputs_embeds")
        first: Any = embeds if ids is None else ids
        self.batch, self.prompt = first.shape[:2]  # rows, and positions of the prompt
        self.known = 0 if ids is None else self.prompt  # of them with ids
        self.pad, self.device = pad, first.device
        self.n_new = 0
        self.ids = torch.full((self.batch, self.known + room), pad, device=self.device)
        if ids is not None:
            self.ids[:, : self.known] = ids
        mask: Tensor | None = tensors.get("attention_mask")
        self.mask = mask  # of the prompt; True on real tokens
        self.n_pads = [0] * self.batch if mask is None else (~mask).sum(-1).tolist()
        self.lengths: list[int | None] = [None] * self.batch  # new tokens of a row that has ended
        self._all_real = torch.ones(self.batch, 1, dtype=torch.bool, device=self.device)
        self._going: Tensor | None = None  # [batch], while some rows have ended and others have not

    @property
    def over(self) -> bool:
        return None not in self.lengths

    @property
    def going(self) -> list[int]:
        return [row for row, length in enumerate(self.lengths) if length is None]

    def add(self, new: Int[Tensor, " batch"]) -> list[int]:
        """Put one more token at the end of each row."""
        if self._going is not None:
            new = torch.where(self._going, new, self.pad)
        self.ids[:, self.known + self.n_new] = new
        self.n_new += 1
        return new.tolist()

    def end(self, rows: Sequence[int]) -> None:
        """These rows have got their last token."""
        for row in rows:
            self.lengths[row] = self.n_new
        if rows:
            going = [length is None for length in self.lengths]
            self._going = torch.tensor(going, device=self.device)

    def last(self) -> Int[Tensor, "batch 1"]:
        """The newest token of each row."""
        return self.ids[:, self.known + self.n_new - 1 :][:, :1]

    def last_mask(self) -> Bool[Tensor, "batch 1"]:
        """Whether it is real: said of a written pad token too, which nobody means as padding."""
        if self._going is None:
            return self._all_real
        now = [length in (None, self.n_new) for length in self.lengths]
        return torch.tensor(now, device=self.device)[:, None]

    def written(self) -> Int[Tensor, "batch pos"]:
        """Prompts and new tokens, padded on the left before prompts and on the right after ends."""
        return self.ids[:, : self.known + self.n_new].clone()

    def whole_mask(self) -> Bool[Tensor, "batch pos"]:
        """Real tokens of prompts and of what has been written."""
        lengths = torch.tensor([self.n_new if n is None else n for n in self.lengths])
        new = torch.arange(self.n_new)[None] < lengths[:, None]
        prompt = self._all_real.expand(-1, self.prompt) if self.mask is None else self.mask
        return torch.cat((prompt, new.to(self.device)), 1)

    def prompt_of(self, row: int) -> Int[Tensor, " pos"]:
        return self.ids[row, min(self.n_pads[row], self.known) : self.known]

    def new_of(self, row: int) -> Int[Tensor, " new"]:
        length = self.lengths[row]
        end = self.n_new if length is None else length
        return self.ids[row, self.known : self.known + end]

    def of(self, row: int) -> Int[Tensor, " pos"]:
        return torch.cat((self.prompt_of(row), self.new_of(row)))


@dataclass
class Generation:
    """One call of `generate`.

    Args:
        tensors: the prepared prompts.
        texts: of each row's new tokens, where somebody reads them on the way.
        kv: what has run; None runs the whole text in every step.
        record: keeps activations.
        runs_last: whether the token chosen last runs, too.
        inference: whether it was asked for in torch's inference mode, in which a stream then goes on wherever it is read.
    """

    model: HookedModel
    tensors: Inputs
    rows: Rows
    sampling: Sampling
    stops: Stops
    texts: list[NewText] | None
    hooked: Hooked
    kv: KVCache | None
    record: Record | None
    generator: torch.Generator | None
    max_new_tokens: int
    runs_last: bool
    check_finite: bool = False
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    _seen: Tensor | None = None  # [batch d_vocab], tokens that a penalty counts
    _held: int | None = None  # positions in the cache after the latest step
    _logits: Tensor | None = None  # [batch d_vocab], after the last position

    def steps(self) -> Iterator[list[int]]:
        """Choose and run token after token; each step's ids, row by row. Nothing is hooked while it waits."""
        self._run(self.tensors, self.hooked.prefill)
        while self.rows.n_new < self.max_new_tokens and not self.rows.over:
            if self.rows.n_new:
                self._decode()
            with torch.inference_mode(self.inference):
                new = self._choose()
            yield new
        if self.runs_last and self.rows.n_new:
            self._decode()

    def _choose(self) -> list[int]:
        assert self._logits is not None
        if self.sampling.remembers and self._seen is None:
            self._seen = _seen_in(self.rows, self.model.cfg.d_vocab)
        chosen = self.sampling.choose(self._logits, self._seen, self.generator)
        if self._seen is not None:
            self._seen.scatter_(1, chosen[:, None], True)
        going = self.rows.going
        new = self.rows.add(chosen)
        if self.texts is not None:
            for row in going:
                self.texts[row].add(new[row])
        self.rows.end([row for row in going if self._ends(row, new[row])])
        return new

    def _ends(self, row: int, token: int) -> bool:
        text = None if self.texts is None else self.texts[row]
        return self.stops.ended(token, text, lambda: self.rows.of(row))

    def _decode(self) -> None:
        if self.kv is None:
            if self.record is not None:
                self.record.forget()  # this run shows everything again
            self._run(self._from_the_start(), self.hooked.again)
        else:
            tensors = {
                "input_ids": self._readable(self.rows.last()),
                "attention_mask": self.rows.last_mask(),
            }
            self._run(tensors, self.hooked.decode)

    def _run(self, tensors: Mapping[str, Any], hooks: list[Added]) -> None:
        """One call of the network, hooked for its length."""
        if self.kv is not None:
            self._check_alone(self.kv)
        model, kept = self.model, [] if self.record is None else self.record.listeners()
        with torch.inference_mode(self.inference), torch.no_grad(), _attached([*hooks, *kept]):
            # A listener is shown every position's logits.
            shown = model.hook_logits.live or model.hook_logits_raw.live
            logits = model._awaiting(
                self.hooked.unmet([*hooks, *kept]),
                **tensors,
                kv_cache=self.kv,
                logits_to_keep=None if shown else 1,
                check_finite=self.check_finite,
            )
        self._logits = logits[:, -1]
        self._held = None if self.kv is None else self.kv.length

    def _check_alone(self, kv: KVCache) -> None:
        if self._held not in (None, kv.length):
            raise RuntimeError(
                f"the kv_cache held {self._held} positions after this generation's last step and holds {kv.length} now: something "
                "else has run on it; give each its own, kv.fork()"
            )

    def _readable(self, ids: Int[Tensor, "batch new"]) -> Int[Tensor, "batch new"]:
        """A placeholder of media that was written stands for nothing: it is read as the pad token, as transformers does."""
        cfg = self.model.cfg
        if cfg.is_wrapper:
            for token in (cfg.image_token_id, cfg.video_token_id, cfg.audio_token_id):
                if token is not None and token < cfg.d_vocab:
                    ids = ids.masked_fill(ids == token, cfg.pad_token_id or 0)
        return ids

    def _from_the_start(self) -> Inputs:
        """The whole text so far as one call."""
        ids = self.rows.written()
        known = self.rows.known
        tensors = dict(self.tensors)
        tensors["input_ids"] = torch.cat((ids[:, :known], self._readable(ids[:, known:])), 1)
        tensors["attention_mask"] = self.rows.whole_mask().long()
        types = tensors.get("mm_token_type_ids")
        if types is not None:
            tensors["mm_token_type_ids"] = F.pad(types, (0, self.rows.n_new))
        return Inputs(tensors, self.model.cfg, self.tensors.sizes)

    def cache(self) -> ActivationCache:
        """What the record has kept, as one run over the whole text would have left it."""
        assert self.record is not None and self._logits is not None
        values = self.record.values(self.rows.prompt + self.rows.n_new)
        model = self.model
        derived = {}
        if self.rows.known:
            whole, device = self._from_the_start(), self.record.device
            derived = model._derived(whole, self._logits[:, None], device)
        weights = model.attribution_weights()
        return ActivationCache(values, model.cfg, weights, derived, to_token=model.to_single_token)


def _seen_in(rows: Rows, d_vocab: int) -> Bool[Tensor, "batch d_vocab"]:
    """Tokens of each prompt; padding does not count, and placeholders beyond the vocabulary cannot be chosen."""
    ids = rows.ids[:, : rows.known].clamp(max=d_vocab)
    if rows.mask is not None and rows.known:
        ids = ids.masked_fill(~rows.mask, d_vocab)
    seen = torch.zeros(rows.batch, d_vocab + 1, dtype=torch.bool, device=rows.device)
    return seen.scatter_(1, ids, True)[:, :d_vocab]


# -- hooks for the length of a step -------------------------------------------------------------------


class Hooked:
    """Functions of the user, by the steps in which they act.

    Raises:
        HookNameError: a name that does not exist, or that cannot fire in these steps.
    """

    def __init__(
        self,
        model: HookedModel,
        fwd: HookPairs,
        prefill: HookPairs,
        decode: HookPairs,
        decodes: bool,
    ) -> None:
        always = _handles(model, "fwd_hooks", fwd)
        later = _handles(model, "decode_hooks", decode)
        if later and not decodes:
            raise HookNameError(
                "decode_hooks cannot fire: the first new token comes from the prefill, and no other step follows. Ask for "
                "more max_new_tokens, or use prefill_hooks"
            )
        for point, handle, literal in later:
            if literal and (point.name or "").split(".")[0] in MEDIA:
                raise HookNameError(
                    f"{handle.asked.name!r} cannot fire in decode_hooks: media are read in the prefill alone. Use prefill_hooks"
                )
        self.prefill = always + _handles(model, "prefill_hooks", prefill)
        self.decode = always + later
        self.again = always  # where the whole text runs again
        self._met: set[int] = set()

    def unmet(self, added: list[Added]) -> list[Added]:
        """Those that run for the first time, for which a point that does not fire is an error."""
        new = [one for one in added if id(one[1]) not in self._met]
        self._met |= {id(one[1]) for one in new}
        return [one for one in new if one[2]]


def _all(name: str) -> bool:
    return True


def _handles(model: HookedModel, option: str, pairs: HookPairs) -> list[Added]:
    found: list[Added] = []
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not callable(pair[1]):
            raise TypeError(
                f"{option} holds {pair!r}; each entry is a pair (name or filter, function)"
            )
        name, fn = pair
        for asked, (point, literal) in model.matches(_all if name is None else name).items():
            found.append((point, Handle(fn, _as_asked(point, asked)), literal))
    return found


def _as_asked(point: HookPoint, name: str) -> HookPoint | NamedPoint:
    return point if name == point.name else NamedPoint(point, name)


@contextmanager
def _attached(added: list[Added]) -> Iterator[None]:
    """Handles that exist before they are attached can be taken off whenever this ends."""
    try:
        for point, handle, _ in added:
            point.fwd_hooks.append(handle)
            point.live = True
        yield
    finally:
        try:
            _take_off(added)
        except BaseException:  # an interrupt may come here as well
            _take_off(added)
            raise


def _take_off(added: list[Added]) -> None:
    for point, handle, _ in added:
        point.remove(handle)


class Record:
    """Keeps the values of points in every step, and joins them to those of one run.

    Its listeners hold the parts, not the record: a cycle would keep tensors alive until Python looks for cycles.
    """

    def __init__(
        self, model: HookedModel, names_filter: NameFilter, device: torch.device | str | None
    ) -> None:
        self.device = device
        self._parts = _Parts(model, device)
        self._added: list[Added] = []
        for asked, (point, literal) in model.matches(names_filter).items():
            keep = partial(self._parts.keep, point.name or "")
            handle = Handle(keep, _as_asked(point, asked), reads_only=True)
            self._added.append((point, handle, literal))

    def listeners(self) -> list[Added]:
        """For the run that now begins."""
        self._parts.begin()
        return self._added

    def forget(self) -> None:
        self._parts.tensors.clear()

    def values(self, pos: int) -> dict[str, Tensor]:
        """Each point's value over all `pos` positions; they are no longer held here."""
        axes = {point.name: point.axes.split() for point, _, _ in self._added}
        joined: dict[str, Tensor] = {}
        while self._parts.tensors:
            name = next(iter(self._parts.tensors))
            parts = self._parts.tensors.pop(name)
            if "pos" not in axes[name]:
                joined[name] = parts[0]  # media, which the prefill alone reads
            elif sum(part.shape[axes[name].index("pos")] for part in parts) == pos:
                joined[name] = _joined(
                    name, parts, axes[name]
                )  # else ids of a prompt that had none
        return joined


class _Parts:
    def __init__(self, model: HookedModel, device: torch.device | str | None) -> None:
        self.model, self.device = model, device
        self.depth = 0  # of the run that is kept, not of one that a hook starts inside it
        self.tensors: dict[str, list[Tensor]] = {}

    def begin(self) -> None:
        self.depth = self.model.place.depth + 1

    def keep(self, name: str, value: Tensor, hook: Any) -> None:
        if self.model.place.depth > self.depth:
            return
        kept = value.detach() if self.device is None else value.detach().to(self.device)
        self.tensors.setdefault(name, []).append(kept)


def _joined(name: str, parts: list[Tensor], axes: list[str]) -> Tensor:
    """One after another; rows of a square are as long as the last, and what came later was hidden from them."""
    if axes[-1] == "kv_pos":
        hidden = torch.finfo(parts[0].dtype).min if name.endswith("scores") else 0.0
        width = parts[-1].shape[-1]
        parts = [F.pad(part, (0, width - part.shape[-1]), value=hidden) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axes.index("pos"))


# -- what goes in -------------------------------------------------------------------------------------


def _check_options(
    max_new_tokens: int,
    return_type: Any,
    return_cache: bool,
    stream: bool,
    names_filter: NameFilter,
    device: Any,
) -> None:
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
        raise TypeError(f"max_new_tokens is {max_new_tokens!r}; it is a whole number")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it is 0 or more")
    if return_type not in ("input", "text", "tokens"):
        raise ValueError(f'return_type is {return_type!r}; use "input", "text" or "tokens"')
    if return_cache and stream:
        raise ValueError("a stream is text piece by piece: return_cache=True goes without it")
    if not return_cache and not (names_filter is None and device is None):
        raise ValueError(
            "names_filter and device say what return_cache=True keeps, and where: add it"
        )


def _cache_of(
    cfg: HookedConfig, given: KVCache | None, wanted: bool, by_step: bool
) -> KVCache | None:
    """The cache to write on; None to run the whole text in every step."""
    empty = KVCache(cfg)  # refuses a model that nothing can be generated with
    if wanted:
        return empty if given is None else given
    if given is not None:
        raise ValueError("kv_cache was given and use_kv_cache is False: give one of them")
    if by_step:
        raise ValueError(
            "use_kv_cache=False runs the whole text in every step, so that prefill and decoding are not apart: use fwd_hooks, "
            "and hook.positions in them"
        )
    return None


def _prompt(
    model: HookedModel,
    input: Any,
    kv: KVCache | None,
    padding_side: Literal["left", "right"] | None = None,
    **inputs: Any,
) -> Inputs:
    """Prepared prompts, padded on the left; their mask is None when every token is real."""
    if padding_side == "right":
        raise ValueError("new tokens follow a prompt's last one: prompts are padded on the left")
    tensors = model.prepare_next(kv, input, padding_side="left", **inputs)
    if kv is None and tensors.get("inputs_embeds") is not None:
        raise ValueError(
            "use_kv_cache=False runs the ids of the whole text again, and inputs_embeds have none"
        )
    tensors["position_ids"] = "mask"  # real tokens are counted, with a cache and without
    mask = tensors.get("attention_mask")
    if mask is None:
        return tensors
    ids = tensors.get("input_ids")
    pos = (tensors["inputs_embeds"] if ids is None else ids).shape[1]
    mask = mask.bool()
    if mask.ndim != 2 or mask.shape[1] != pos or not bool(mask[:, -1].all()):
        _refuse(mask, pos)
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError(
            "attention_mask hides tokens inside a prompt: padding stands on the left alone"
        )
    tensors["attention_mask"] = None if bool(mask.all()) else mask
    return tensors


def _refuse(mask: Tensor, pos: int) -> None:
    if mask.ndim != 2 or mask.shape[1] != pos:
        raise ValueError(
            f"attention_mask is {list(mask.shape)}; the prompts have {pos} positions [batch pos]"
        )
    row = int((~mask[:, -1]).nonzero()[0])
    raise ValueError(
        f"prompt {row} ends with padding, and new tokens follow a prompt's last position. Pad on the left: give the texts "
        'themselves, or ids of a tokenizer with padding_side="left"'
    )


def _check_room(cfg: HookedConfig, prompt: int, runs: int, max_new_tokens: int) -> None:
    over = prompt + runs - cfg.n_ctx
    if over <= 0:
        return
    told = f"the prompt has {prompt} tokens; this model has {cfg.n_ctx} positions"
    if prompt <= cfg.n_ctx:
        told += f", and {runs} more are to run after it. max_new_tokens may be {max_new_tokens - over} at most"
    raise ValueError(told)


def _generation_config(folder: Path | None) -> dict[str, Any]:
    """generation_config.json of a checkpoint, where it has one."""
    path = None if folder is None else folder / "generation_config.json"
    if path is None or not path.is_file():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def _eos_ids(cfg: HookedConfig, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a text: generation_config.json knows more of them (the end of a turn) than config.json."""
    found = config.get("eos_token_id")
    if found is None:
        return cfg.eos_token_ids
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def _pad_id(cfg: HookedConfig, config: Mapping[str, Any], eos: Sequence[int]) -> int:
    """As transformers: the pad token, else the first that ends a text."""
    found = config.get("pad_token_id")
    found = cfg.pad_token_id if found is None else found
    return found if found is not None else next(iter(eos), 0)


# -- what comes out -----------------------------------------------------------------------------------


def _new_texts(model: HookedModel, rows: Rows) -> list[NewText]:
    tokenizer = model._tokenizer_or_error()
    return [NewText(tokenizer, rows.prompt_of(row).tolist()) for row in range(rows.batch)]


def _stream(generation: Generation, return_type: Returned) -> Iterator[Any]:
    """New text as it settles, or each new id."""
    if generation.rows.batch > 1:
        raise ValueError(
            f"a stream is one text, and {generation.rows.batch} prompts were given: generate them without stream"
        )
    return _ids_of(generation) if return_type == "tokens" else _pieces(generation)


def _ids_of(generation: Generation) -> Iterator[int]:
    for new in generation.steps():
        yield new[0]


def _pieces(generation: Generation) -> Iterator[str]:
    assert generation.texts is not None
    text = generation.texts[0]
    for _ in generation.steps():
        if piece := text.take():
            yield piece
    if text.loose:
        yield text.loose


def _speaks(given: Any) -> bool:
    """Whether the prompts are text."""
    texts = given if isinstance(given, (list, tuple)) else [given]
    return is_chat(given) or (len(texts) > 0 and all(isinstance(text, str) for text in texts))


def _whole_texts(model: HookedModel, given: Any, rows: Rows) -> str | list[str]:
    """Prompts and what follows. A prompt that was text is that text, the template's for messages; ids are decoded, without
    a BOS in front."""
    tokenizer = model._tokenizer_or_error()
    single = isinstance(given, str) or (is_chat(given) and isinstance(given[0], Mapping))
    if is_chat(given):
        prompts, _ = rendered(given, tokenizer, model.processor)
    elif _speaks(given):
        prompts = [given] if isinstance(given, str) else list(given)
    else:
        prompts = [_shown(model, rows.prompt_of(row).tolist()) for row in range(rows.batch)]
    texts = []
    for row, prompt in enumerate(prompts):
        new = NewText(tokenizer, rows.prompt_of(row).tolist())
        for token in rows.new_of(row).tolist():
            new.add(token)
        texts.append(prompt + new.whole())
    return texts[0] if single else texts


def _shown(model: HookedModel, ids: list[int]) -> str:
    bos = getattr(model.tokenizer, "bos_token_id", None)
    return str(model.to_string(ids[1:] if ids and ids[0] == bos else ids))
