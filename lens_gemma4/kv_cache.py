"""Keys and values of what has run, so that more text runs without running it again.

    kv = KVCache(model.cfg)
    model("The capital of France is", kv_cache=kv)      # 6 positions are held now
    one, other = kv.fork(), kv.fork()
    model(" Paris", kv_cache=one); model(" Rome", kv_cache=other)

A sliding block keeps its window and an eighth of it to spare: new tokens are written behind the window, and only where the
memory ends is the window moved back to its begin, so that a token costs no copy of those before it. (A plain ring costs none
either, but shows keys in another order, and sums over keys in another order round otherwise than transformers' own.) A full
block keeps everything. What hooks leave at `hook_k`, `hook_rot_k` and their like is what is held, so that calls on a cache
equal one run with the same hooks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4.config import HookedConfig, LayerConfig

SPARE = 8  # a sliding block's slots beyond its window are the window over this, or this many

New = Float[Tensor, "batch kv_head pos d_head"]
Seen = Float[Tensor, "batch kv_head kv_pos d_head"]


def slots_of(window: int) -> int:
    """A window, and what is to spare behind it."""
    return window + max(SPARE, window // SPARE)


class Held:
    """Keys and values of one block, heads first.

    What a call adds counts from `settle` on: a call that fails leaves everything as it was.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.length = 0  # positions run, those that have left the window too
        self._first = 0  # the position in the first slot
        self._reached = (
            0  # the end of what was ever written: a window before it is there, and nothing older
        )
        self._keys: Tensor | None = None  # [batch kv_head slot d_head]
        self._values: Tensor | None = None
        self._alone = True  # False while a fork reads the same memory
        self._tail: tuple[Tensor, Tensor] | None = None  # what settle writes
        self.seen: tuple[Tensor, Tensor] | None = None  # by the queries of the call at hand

    def extend(self, k: New, v: New) -> tuple[Seen, Seen]:
        """Add a call's keys and values; those that its queries may see, in the order of `places`."""
        pos, past = k.shape[2], self.length
        if not past:
            self._keys = self._values = None  # of a first call that failed
            self._first = self._reached = 0
        elif self._keys is not None and (self._keys.dtype, self._keys.device) != (
            k.dtype,
            k.device,
        ):
            raise ValueError(
                f"the kv_cache holds {self._keys.dtype} on {self._keys.device}, and this call's keys are {k.dtype} on {k.device}: "
                "the model was moved; begin another cache"
            )
        if self.window is not None and pos > 1:
            self._tail = tuple(x[:, :, -self.window :].clone() for x in (k, v))  # type: ignore[assignment]
            self.seen = (k, v) if not past else self._after_window(k, v)
        else:
            self._write(k, v)
            end = past + pos
            begin = 0 if self.window is None else max(0, end - self.window)
            self.seen = self._between(begin, end) if past else (k, v)
        return self.seen

    def _between(self, begin: int, end: int) -> tuple[Seen, Seen]:
        """What is held of these positions."""
        assert self._keys is not None and self._values is not None
        here = slice(begin - self._first, end - self._first)
        return self._keys[:, :, here], self._values[:, :, here]

    def settle(self, pos: int) -> None:
        """The call that added `pos` positions is over."""
        self.seen, tail = None, self._tail
        if tail is not None:
            self._tail = None
            n = tail[0].shape[2]
            self.length += pos - n
            if pos > n:
                # Nothing before it is wanted, and not all of that was ever written.
                self._first = self.length
            self._write(*tail)
            self.length += n
        else:
            self.length += pos

    def forget(self) -> None:
        """The call that added something has failed."""
        self.seen = self._tail = None

    def _write(self, k: New, v: New) -> None:
        """Behind the positions before `length`; no more than a window of them."""
        end = self.length + k.shape[2]
        self._make_room(k, v, end)
        assert self._keys is not None and self._values is not None
        here = slice(self.length - self._first, end - self._first)
        self._keys[:, :, here], self._values[:, :, here] = k, v
        self._reached = max(self._reached, end)

    def _make_room(self, k: New, v: New, end: int) -> None:
        """Memory up to a position, doubled when it grows, so that a token costs no copy of those before it."""
        room = 0 if self._keys is None else self._keys.shape[2]
        if end - self._first <= room and self._alone:
            return
        first = self._first
        if self.window is not None and end - first > slots_of(self.window):
            first = end - self.window
        if end - first > room:
            room = max(end - first, 2 * room, 16)
        if self.window is not None:
            most = slots_of(self.window)
            room = most if end > self.window else min(room, most)
        kept = slice(first - self._first, max(first, self.length) - self._first)
        self._keys, self._values = (
            _moved(old, new, room, kept) for old, new in ((self._keys, k), (self._values, v))
        )
        self._first, self._alone = first, True

    def _after_window(self, k: New, v: New) -> tuple[Seen, Seen]:
        """What is left of the window before a call of several tokens, and then its own."""
        assert self.window is not None
        keys, values = self._between(max(0, self.length - self.window + 1), self.length)
        return torch.cat((keys, k), 2), torch.cat((values, v), 2)

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)  # a skipped block has run less

    def can_crop(self, length: int) -> bool:
        """Whether what a query at `length` sees is still there."""
        if self.window is None:
            return True
        return max(0, length - self.window + 1) >= max(0, self._reached - self.window)

    def fork(self, rows: Int[Tensor, " row"] | None = None) -> Held:
        """Another that goes on from here; memory is copied when either is next written to, or at once to choose rows."""
        other = Held(self.window)
        other.length, other._first, other._reached = self.length, self._first, self._reached
        if rows is None:
            other._keys, other._values = self._keys, self._values
            self._alone = other._alone = False
        elif self._keys is not None and self._values is not None:
            with torch.inference_mode(False):
                other._keys, other._values = self._keys[rows], self._values[rows]
        return other

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self._keys, self._values) if x is not None)


def _moved(old: Tensor | None, like: Tensor, room: int, kept: slice) -> Tensor:
    """Memory of so many slots that begins with some that were held."""
    batch, kv_heads, _, d_head = like.shape
    with torch.inference_mode(False):  # a cache filled there goes on elsewhere
        new = torch.empty(batch, kv_heads, room, d_head, dtype=like.dtype, device=like.device)
    if old is not None:
        new[:, :, : kept.stop - kept.start] = old[:, :, kept]
    return new


class KVCache:
    """What a model has run so far: give it to further calls as `kv_cache=` and they go on from there.

    Args:
        cfg: the model's, `model.cfg`.
    Raises:
        ValueError: the config says `use_bidirectional_attention: "all"`, where earlier tokens see later ones.

    >>> from lens_gemma4 import HookedModel, KVCache
    >>> model = HookedModel.from_pretrained("tiny")
    >>> kv = KVCache(model.cfg)
    >>> _ = model("The capital of France", kv_cache=kv)
    >>> logits = model(" is", kv_cache=kv)
    >>> kv.length, list(logits.shape[:2])
    (6, [1, 1])
    """

    def __init__(self, cfg: HookedConfig) -> None:
        if cfg.bidirectional == "all":
            raise ValueError(
                'this model attends both ways everywhere (use_bidirectional_attention: "all"): what follows changes what '
                "came before, so keys and values cannot be kept, and nothing can be generated"
            )
        self.cfg = cfg
        self.length = 0
        self.attention_mask: Bool[Tensor, "batch length"] | None = None  # None: all are real
        self.rows = 0  # prompts in the batch; 0 before the first call
        self.busy = False  # while a call on it runs
        self._lenders = {layer.lender for layer in cfg.layers if layer.lender is not None}
        self._held: dict[int, Held] = {}  # of blocks with keys of their own, and what is lent
        self._edited: dict[int, Held] = {}  # of a lender or borrower, where a hook made them differ
        self._media: Bool[Tensor, "batch length"] | None = (
            None  # image and video tokens; None: no such
        )

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"KVCache({self.rows} x {self.length} positions, {self.nbytes / 1e6:.1f} MB)"

    @property
    def nbytes(self) -> int:
        """Memory of keys and values."""
        return sum(held.nbytes for held in self._all())

    def _all(self) -> list[Held]:
        return [*self._held.values(), *self._edited.values()]

    # -- what users do ----------------------------------------------------------------------------------

    def crop(self, length: int) -> None:
        """Forget all positions from `length` on.

        Raises:
            ValueError: more than is held; or sliding blocks have dropped what the next query would see.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"crop({length}): the cache holds {self.length} positions")
        if not length:
            self.__init__(self.cfg)  # type: ignore[misc]
            return
        if not all(held.can_crop(length) for held in self._all()):
            raise ValueError(
                f"crop({length}): sliding blocks keep {self.cfg.window_size} positions of the {self.length} that have run, "
                f"and what the token at {length} sees is gone; fork() before going on, and go on from the fork"
            )
        if self._media is not None and length < self.length:
            if bool((self._media[:, length - 1] & self._media[:, length]).any()):
                raise ValueError(
                    f"crop({length}) would cut an image or a video frame in two, whose tokens have all seen one another; crop "
                    "before or after it"
                )
            self._media = self._media[:, :length]
        for held in self._all():
            held.crop(length)
        self.length = length
        if self.attention_mask is not None:
            self._remember(self.attention_mask[:, :length])

    def fork(self, rows: Sequence[int] | Tensor | None = None) -> KVCache:
        """Another cache that goes on from the same prefix.

        Args:
            rows: prompts of the batch to take, in any order and as often as wanted: `fork([0, 0, 0])` continues the first
                prompt in three ways at once. A mask of all prompts chooses those where it is True. None takes all.
        """
        other = KVCache(self.cfg)
        other.length, other.rows = self.length, self.rows
        other.attention_mask, other._media = self.attention_mask, self._media
        chosen = None
        if rows is not None:
            chosen = torch.as_tensor(rows).reshape(-1)
            if chosen.dtype == torch.bool and len(chosen) == self.rows:
                chosen = chosen.nonzero()[:, 0]
            chosen = chosen.long().cpu()
            if not chosen.numel() or int(chosen.min()) < 0 or int(chosen.max()) >= self.rows:
                raise ValueError(f"fork({rows}): the cache holds prompts 0 to {self.rows - 1}")
            other.rows = len(chosen)
            if self.attention_mask is not None:
                other._remember(self.attention_mask[chosen.to(self.attention_mask.device)])
            if self._media is not None:
                other._media = self._media[chosen.to(self._media.device)]
        for mine, its in ((self._held, other._held), (self._edited, other._edited)):
            for index, held in mine.items():
                its[index] = held.fork(chosen)
        return other

    # -- what the network does --------------------------------------------------------------------------

    def check(self, cfg: HookedConfig, batch: int, types: Tensor | None) -> None:
        """Refuse a call that does not go on from what is held."""
        if self.busy:
            raise RuntimeError(
                "a call on this kv_cache is running, or was interrupted at its very end. A hook may run the model on a fork taken "
                "before the call; after an interrupt go on from an earlier fork, or begin again"
            )
        if cfg.layers != self.cfg.layers:
            raise ValueError(
                f"this kv_cache was made for {self.cfg.model_name!r}, whose blocks differ from those of {cfg.model_name!r}"
            )
        if self.length and batch != self.rows:
            raise ValueError(
                f"the kv_cache holds {self.rows} prompts and this call has {batch}; fork([0] * {batch}) continues one in "
                f"{batch} ways"
            )
        if types is None or self._media is None:
            return
        if bool((self._media[:, -1] & _in_media(types[:, 0])).any()):
            raise ValueError(
                "this call begins with image or video tokens and the one before it ended with some: what stands side by side "
                "sees itself both ways, and cannot be split over calls; run it in one"
            )

    def mask_of_call(self, mask: Tensor | None, pos: int) -> Tensor | None:
        """An attention mask of this call's tokens, of one that may cover what is held as well.

        Raises:
            ValueError: it says otherwise of what is held than the calls before.
        """
        if mask is None or not self.length or mask.ndim != 2 or mask.shape[1] != self.length + pos:
            return mask
        before = mask[:, : self.length].bool()
        held = torch.ones_like(before) if self.attention_mask is None else self.attention_mask
        if before.shape != held.shape or not torch.equal(before, held.to(before.device)):
            raise ValueError(
                f"the attention_mask covers the {self.length} positions held and this call's {pos}, and says otherwise of those "
                "held than the calls in which they ran: what has run cannot be hidden or shown afterwards"
            )
        return mask[:, self.length :]

    def real(
        self, padding: Bool[Tensor, "batch pos"] | None, pos: int, device: torch.device
    ) -> Tensor | None:
        """Which positions are real, with those of the call at hand; None when all are.

        Raises:
            ValueError: a row has padding between its tokens, and is longer than the window, which counts padding too.
        """
        if self.attention_mask is None and (padding is None or bool(padding.all())):
            return None
        batch = self.rows if padding is None else len(padding)
        before, now = (
            torch.ones(batch, n, dtype=torch.bool, device=device) if real is None else real
            for real, n in ((self.attention_mask, self.length), (padding, pos))
        )
        if self.length and self.length + pos > self.cfg.window_size:
            self._refuse_gaps(before, now)
        return torch.cat((before, now), 1)

    def _refuse_gaps(self, before: Tensor, now: Tensor) -> None:
        begins = now & ~torch.cat((before[:, -1:], now[:, :-1]), 1)  # a real token after padding
        some = before.any(1, keepdim=True) | (now.cumsum(1) > now)
        torn = (begins & some).any(1)
        if bool(torn.any()):
            row = int(torn.nonzero()[0, 0])
            raise ValueError(
                f"prompt {row} has padding between what is held and its new tokens: sliding blocks would count it as part of their "
                f"window of {self.cfg.window_size}, and see less than the prompt alone. Go on from prompts one by one, on a "
                "fork taken before the padding, or give all of them as many tokens"
            )

    def places(self, window: int | None, pos: int, device: torch.device) -> Int[Tensor, " kv_pos"]:
        """Positions of the keys that `extend` returns in a block of this window."""
        total = self.length + pos
        if window is None or not self.length:
            return torch.arange(total, device=device)
        return torch.arange(max(0, self.length - window + 1), total, device=device)

    def extend(
        self,
        layer: LayerConfig,
        lent: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        edited: bool,
    ) -> tuple[Seen, Seen]:
        """Add a block's keys and values; all that the queries of this call may see.

        Args:
            lent: before the hooks that stay in this block, `[batch pos kv_head d_head]`.
            own: after them.
            edited: whether they differ.
        """
        source = layer.index if layer.lender is None else layer.lender
        if source not in self._lenders:
            return self._at(self._held, source, layer.window).extend(*_heads_first(own))
        held = self._at(self._held, source, layer.window)
        if held.seen is None:
            held.extend(*_heads_first(lent))
        if layer.index not in self._edited:
            if not edited:
                assert held.seen is not None
                return held.seen
            self._edited[layer.index] = held.fork()
        return self._edited[layer.index].extend(*_heads_first(own))

    def _at(self, entries: dict[int, Held], index: int, window: int | None) -> Held:
        held = entries.setdefault(index, Held(window))
        if held.length != self.length:
            raise ValueError(
                f"block {index} holds {held.length} of the {self.length} positions that have run: it was skipped in a call on "
                "this cache; skip the same blocks in all of them"
            )
        return held

    def settle(self, real: Tensor | None, pos: int, batch: int, types: Tensor | None) -> None:
        """A call is over: what it added counts."""
        for held in self._all():
            if held.seen is not None:
                held.settle(pos)
        self.length += pos
        self.rows = batch
        self.attention_mask = real
        self._media = self._with_media(types, pos, batch)

    def _with_media(self, types: Tensor | None, pos: int, batch: int) -> Tensor | None:
        """Which positions hold image or video tokens, those of a call of these types included."""
        if types is None and self._media is None:
            return None
        device = self._media.device if types is None else types.device  # type: ignore[union-attr]
        now = (
            torch.zeros(batch, pos, dtype=torch.bool, device=device)
            if types is None
            else _in_media(types)
        )
        before = now.new_zeros(batch, self.length - pos) if self._media is None else self._media
        return torch.cat((before, now), 1)

    def forget(self) -> None:
        """A call has failed: nothing that it added counts."""
        for held in self._all():
            held.forget()

    def _remember(self, real: Tensor) -> None:
        self.attention_mask = None if bool(real.all()) else real


def _in_media(types: Tensor) -> Tensor:
    return (types == 1) | (types == 2)


def _heads_first(pair: tuple[Tensor, Tensor]) -> tuple[New, New]:
    k, v = pair
    if k.requires_grad or v.requires_grad:
        raise RuntimeError(
            "a kv_cache holds numbers without gradient, and these keys or values need one: run under torch.no_grad(), or "
            "without kv_cache"
        )
    return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
