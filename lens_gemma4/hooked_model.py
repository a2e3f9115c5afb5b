"""`HookedModel`: the network with a tokenizer, loading, caching and the verbs of the field."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4 import attribution, circuits, lenses, loading, names, rows
from lens_gemma4 import generate as writing
from lens_gemma4.attribution import Attribution
from lens_gemma4.cache import ActivationCache
from lens_gemma4.chat import is_chat
from lens_gemma4.config import HookedConfig, LayerConfig
from lens_gemma4.errors import HookNameError, Unavailable
from lens_gemma4.factored import FactoredMatrix
from lens_gemma4.forms import items_of, never
from lens_gemma4.hooks import HookPoint, NamedPoint, NameFilter
from lens_gemma4.inputs import TextInputs
from lens_gemma4.kv_cache import KVCache
from lens_gemma4.masks import ImageMask
from lens_gemma4.model import INPUT_KEYS, AttnImplementation, Gemma4
from lens_gemma4.spans import (
    ImageFeatures,
    Inputs,
    Span,
    labels_of,
    media_labels,
    together,
    token_labels,
)
from lens_gemma4.utils import Slice, counted_targets, lm_cross_entropy_loss

ReturnType = Literal["logits", "loss", "both"] | None

# Keys a processor returns that the network does not need.
IGNORED_KEYS = ("token_type_ids", "video_metadata")
IGNORED_PREFIX = "num_soft_tokens_per_"


# Positions from which "local" is worth a hint: below, a forward pass is quick either way.
LONG = 2049


class Output(NamedTuple):
    """What `return_type="both"` gives."""

    logits: Tensor
    loss: Tensor


@dataclass(frozen=True)
class AttentionSizes:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class MLPSizes:
    intermediate_size: int


@dataclass(frozen=True)
class LayerSizes:
    """One block's own sizes, under the standard names."""

    self_attn: AttentionSizes
    mlp: MLPSizes


class HookedModel(TextInputs, Gemma4):
    """Gemma 4 unified with every value hookable, bit-identical to transformers.

    >>> model = HookedModel.from_pretrained("tiny")
    >>> logits, cache = model.run_with_cache("The capital of France is")
    >>> cache["resid_post", -1].shape[-1] == model.cfg.d_model
    True
    """

    def __init__(
        self,
        cfg: HookedConfig,
        attn_implementation: AttnImplementation = "sdpa",
        image_mask: ImageMask = "transformers",
        folder: Path | None = None,
    ) -> None:
        super().__init__(cfg, attn_implementation, image_mask)
        self.folder = folder
        self._warned: set[str] = set()

    # -- loading ----------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        attn_implementation: AttnImplementation = "sdpa",
        image_mask: ImageMask = "transformers",
        hf_model: Any = None,
        device_map: None = None,
    ) -> HookedModel:
        """Load a checkpoint: a Hub id, a folder, or "tiny", the one that ships with the package.

        Args:
            device: where the weights go; the CPU by default.
            dtype: of the weights; by default what config.json names, else the embedding's.
            revision, token, cache_dir, local_files_only: as in huggingface_hub.
            attn_implementation: "sdpa" or "eager", each bit-identical to transformers' own.
            image_mask: "transformers" (its forward) or "windowed" (5.24's static-cache generation).
            hf_model: a loaded transformers model whose tensors are shared; nothing in it changes.
                `name_or_path` then says only where tokenizer and processor are.

        Raises:
            loading.CheckpointError: tensors missing, unexpected or misshapen, all listed; a damaged,
                pickled or quantised checkpoint.
            ConfigError: another model_type, or a field this network does not compute.
        """
        if device_map is not None:
            raise ValueError(
                "device_map is not supported: the model lives on one device; use device="
            )
        if name_or_path is None and hf_model is None:
            raise ValueError('give a Hub id, a folder or "tiny"')
        dtype = _dtype(dtype)
        hub: dict[str, Any] = {
            "revision": revision,
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
        }
        folder = None if name_or_path is None else loading.resolve(name_or_path, **hub)
        cfg = HookedConfig.from_hf(folder) if hf_model is None else loading.config_of(hf_model)  # type: ignore[arg-type]
        with torch.device("meta"):
            model = cls(cfg, attn_implementation, image_mask, folder)
        if hf_model is not None:
            loading.share_storage(hf_model, model, dtype=dtype, device=device)
        elif folder is not None:
            loading.read_checkpoint(folder, cfg, model, dtype=dtype, device=device)
        model.match_dtype()
        if model.dtype == torch.float16:
            warnings.warn(
                "float16 overflows in this family (patch embedding, MLP product): values may be infinite or NaN; "
                "bfloat16 or float32 do not. check_finite=True names the first point that is not finite.",
                stacklevel=2,
            )
        return model

    def save_pretrained(self, folder: str | Path, max_shard_size: str | int = "5GB") -> None:
        """Write a checkpoint that every supported transformers loads to identical logits.

        Tokenizer and processor files go along. An unfinished write never looks like a checkpoint.
        """
        loading.save(self, folder, max_shard_size=max_shard_size)
        self.save_text_files(folder)

    # -- running ----------------------------------------------------------------------------------------

    def forward(  # type: ignore[override]
        self,
        input: Any = None,
        *,
        input_ids: Any = None,
        return_type: ReturnType = "logits",
        loss_per_token: bool = False,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        check_finite: bool = False,
        kv_cache: KVCache | None = None,
        logits_to_keep: int | None = None,
        **inputs: Any,
    ) -> Tensor | Output | None:
        """Run the model.

        Args:
            input: text, texts, chat messages, ids (`[batch pos]` or `[pos]`), a transformers processor's output, or with
                `start_at_layer` a stream `[batch pos d_model]`. `input_ids=` is the same.
            return_type: "logits" `[batch pos d_vocab]`, "loss" (nats, float32 mean over targets that are
                neither padding nor media placeholders), "both", or None.
            loss_per_token: the loss as `[batch pos-1]`, 0 where a target does not count.
            start_at_layer: first block to run, on a given stream.
            stop_at_layer: block before which to stop; the stream entering it is returned.
            check_finite: raise at the first hook point whose value is not finite, and name it.
            kv_cache: what has run before, on which this call goes on and to which it adds; see `KVCache`. Positions then count
                real tokens, as transformers' generate does, and text gets no BOS when the cache holds any position.
            logits_to_keep: how many of the last positions get logits; all by default. Those of a long prompt are larger than
                everything else.
            inputs: `attention_mask` (1 on real tokens), `position_ids` (a tensor, or "mask" to count real
                tokens as transformers' generate does), `mm_token_type_ids`, `pixel_values`,
                `image_position_ids`, `pixel_values_videos`, `video_position_ids`, `num_frames_per_video`,
                `input_features`, `input_features_mask`, `inputs_embeds`; `images`, `videos`, `audio`, `image_tokens`,
                `image_features` with text (see `encode_inputs`); `prepend_bos` (None means on), `padding_side` (None means the tokenizer's).

        Raises:
            TypeError: an unknown keyword.
            ValueError: inputs that do not fit together; the message names both sides.
            HookNameError: a literally named hook that cannot fire in this call.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(
                f'return_type is {return_type!r}; use "logits", "loss", "both" or None'
            )
        if logits_to_keep is not None and (
            not hasattr(logits_to_keep, "__index__")
            or logits_to_keep < 1
            or return_type in ("loss", "both")
        ):
            raise ValueError(
                f"logits_to_keep={logits_to_keep} with return_type={return_type!r}: it is a whole number, 1 or more, and a loss "
                "needs all logits"
            )
        tensors = self.prepare_next(
            kv_cache, input, input_ids=input_ids, start_at_layer=start_at_layer, **inputs
        )
        if kv_cache is not None and return_type in ("loss", "both"):
            ids = tensors.get("input_ids")
            if ids is None or ids.shape[1] < 2:
                raise ValueError(
                    "a loss compares a call's tokens with the next ones of the same call: give two or more, as ids or text"
                )
        wants_logits = return_type is not None or self.hook_logits.live or self.hook_logits_raw.live
        layers: dict[str, Any] = {"start_at_layer": start_at_layer, "stop_at_layer": stop_at_layer}
        with self._finite_or_error(check_finite):
            out = super().forward(
                **tensors,
                **layers,
                with_logits=wants_logits,
                logits_to_keep=logits_to_keep,
                kv_cache=kv_cache,
            )
        if stop_at_layer is not None:
            return out
        if return_type == "logits" or return_type is None:
            return out if return_type else None
        loss = self.loss_fn(
            out, tensors.get("input_ids"), tensors.get("attention_mask"), per_token=loss_per_token
        )
        return Output(out, loss) if return_type == "both" else loss

    def prepare(
        self,
        input: Any = None,
        *,
        input_ids: Any = None,
        start_at_layer: int | None = None,
        prepend_bos: bool | None = None,
        padding_side: Literal["left", "right"] | None = None,
        images: Any = None,
        videos: Any = None,
        audio: Any = None,
        image_tokens: int | None = None,
        image_features: Any = None,
        **inputs: Any,
    ) -> Inputs:
        """Whatever `forward` accepts, as the tensors the network runs on, on the model's device, with the `spans` of media."""
        if inputs.pop("kv_cache", None) is not None:
            raise ValueError(
                "kv_cache goes to the model itself, run_with_cache, run_with_hooks and generate; everything else runs whole texts: "
                "give the prefix as part of the input"
            )
        media = {"images": images, "videos": videos, "audio": audio, "image_tokens": image_tokens}
        if input is not None and isinstance(input, Mapping):
            if "role" in input:
                raise ValueError("this is one message: a conversation is a list of them, [message]")
            beside = {**inputs, **media, "input_ids": input_ids, "image_features": image_features}
            prepared = self.prepare(start_at_layer=start_at_layer, **_merge(input, beside))
            prepared.sizes |= getattr(input, "sizes", {})
            return prepared
        tensors = _known(inputs)
        sizes: dict[str, Any] = {}
        if start_at_layer is not None:
            tensors["resid"], input = input, None
            if tensors["resid"] is not None and tensors["resid"].ndim == 2:
                tensors["resid"] = tensors["resid"][None]
        if input is not None and input_ids is not None:
            raise ValueError("input and input_ids are the same thing: give one")
        input = input_ids if input is None else input
        if _is_text(input) or is_chat(input):
            encoded = self.encode_inputs(
                input,
                prepend_bos=prepend_bos,
                padding_side=padding_side,
                image_features=image_features,
                **media,
            )
            tensors, sizes = tensors | encoded, encoded.sizes
        elif any(given is not None for given in media.values()):
            raise ValueError(
                "images, videos and audio go with text; with ids, give what the processor returned"
            )
        elif input is not None:
            tensors["input_ids"] = _ids(input)
        elif tensors.get("inputs_embeds") is None and tensors.get("resid") is None:
            raise ValueError(
                "nothing to run: give text, ids, a processor's output, or inputs_embeds"
            )
        if isinstance(image_features, Tensor):
            tensors["image_features"] = image_features
        elif image_features is not None and "image_features" not in tensors:
            items = items_of(image_features, never)
            tensors |= together(items, self.device)
            sizes["image"] = [item.size for item in items]
        tensors = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in tensors.items()}
        self._warn_about(tensors)
        return Inputs(tensors, self.cfg, sizes)

    def prepare_next(self, kv_cache: Any, input: Any = None, **inputs: Any) -> Inputs:
        """What `prepare` makes of a call that goes on from what a cache holds: no BOS, which stands at its front, and a mask of
        this call's tokens."""
        if not (kv_cache is None or isinstance(kv_cache, KVCache)):
            raise TypeError(f"kv_cache is {kv_cache!r}; give a KVCache(model.cfg)")
        if kv_cache is None or not kv_cache.length:
            return self.prepare(input, **inputs)
        if is_chat(input if input is not None else inputs.get("input_ids")):
            raise ValueError(
                f"chat messages begin a text, and the kv_cache holds {kv_cache.length} positions: give what follows as text, with "
                "the template's own marks"
            )
        if inputs.get("prepend_bos") is None:
            inputs["prepend_bos"] = False
        tensors = self.prepare(input, **inputs)
        first = next(
            x for x in map(tensors.get, ("resid", "inputs_embeds", "input_ids")) if x is not None
        )
        mask = kv_cache.mask_of_call(tensors.get("attention_mask"), first.shape[1])
        if mask is not None:
            tensors["attention_mask"] = mask
        return tensors

    def spans(self, *inputs: Any, **more: Any) -> list[Span]:
        """Where the images, video frames and clips of a call stand; takes what `prepare` takes."""
        return self.prepare(*inputs, **more).spans

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NameFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        pos_slice: Slice | int | slice | Sequence[int] | None = None,
        return_cache_object: bool = True,
        lazy: bool = True,
        **model_kwargs: Any,
    ) -> tuple[Any, ActivationCache | dict[str, Tensor]]:
        """Run the model and keep values.

        Args:
            names_filter: a name in either vocabulary, a list, a glob, a compiled pattern or a function of our
                name; None keeps every point but `hook_result`. Fewer names, less memory.
            device: where kept values go.
            remove_batch_dim: drop the batch axis; needs a batch of 1.
            incl_bwd: also differentiate the output (`return_type="loss"`) and keep gradients as `name + "_grad"`.
            pos_slice: positions to keep.
            return_cache_object: an `ActivationCache`, else a plain dictionary, which holds every value at once.
            lazy: make what follows from other kept values when it is first read; False makes it in the run, which is quicker
                when most of it will be read.

        Returns:
            (what the call returns, cache). Values are snapshots: later edits never change them. Those that follow from
            other kept ones (the pattern from queries and keys) are made when they are first read.

        Raises:
            RuntimeError: on reading such a value after one it follows from was written into in place.

        >>> model = HookedModel.from_pretrained("tiny")
        >>> _, cache = model.run_with_cache("The capital of France is", names_filter="blocks.*.hook_resid_post")
        >>> len(cache) == model.cfg.n_layers
        True
        """
        inputs = {k: v for k, v in model_kwargs.items() if k not in _RUN_KEYS}
        if model_kwargs.get("logits_to_keep") is not None:
            raise ValueError(
                "a cache shows all positions, and logits_to_keep would leave some without logits: keep less with pos_slice or "
                "names_filter"
            )
        tensors = self.prepare_next(
            model_kwargs.get("kv_cache"),
            *model_args,
            start_at_layer=model_kwargs.get("start_at_layer"),
            **inputs,
        )
        run = {k: v for k, v in model_kwargs.items() if k in _RUN_KEYS}
        out, values = self.run_and_store(
            names_filter=names_filter,
            device=device,
            remove_batch_dim=remove_batch_dim,
            incl_bwd=incl_bwd,
            pos_slice=_slicer(pos_slice),
            lazy=lazy and return_cache_object,
            input=tensors.pop("resid", None),
            **tensors,
            **run,
        )
        if not return_cache_object:
            return out, dict(values.items())
        logits = _logits_of(out, run)
        if logits is None and pos_slice is None and "hook_logits" in values:
            logits = values["hook_logits"]
            logits = logits[None] if remove_batch_dim else logits
        derived = self._derived(tensors, logits, device)
        if "token_labels" in derived:
            derived["token_labels"] = partial(
                _kept_labels, derived["token_labels"], pos_slice, remove_batch_dim
            )
        if remove_batch_dim:
            derived = {
                name: value[0] if isinstance(value, Tensor) else value
                for name, value in derived.items()
            }
        return out, ActivationCache(
            values,
            self.cfg,
            self.attribution_weights(),
            derived,
            has_batch_dim=not remove_batch_dim,
            to_token=self.to_single_token,
        )

    def _derived(
        self,
        tensors: Inputs,
        logits: Tensor | None,
        device: torch.device | str | None = None,
    ) -> dict[str, Any]:
        """Values the cache serves that no hook point holds."""
        ids = tensors.get("input_ids")
        first = ids if ids is not None else tensors.get("inputs_embeds")
        if first is None:
            return {}
        mask = tensors.get("attention_mask")
        derived: dict[str, Any] = {
            "input_size": tuple(first.shape[:2]),
            "attention_mask": torch.ones(first.shape[:2], dtype=torch.long, device=self.device)
            if mask is None
            else mask,
            "token_labels": labels_of(self.tokenizer, tensors, tensors.spans),
        }
        if self.cfg.vision is not None and ids is not None:
            derived["vision.image_token_mask"] = ids == self.cfg.image_token_id
        if logits is not None:
            derived["next_token_probs"] = logits.detach()[:, -1].float().softmax(-1)
        if device is None:
            return derived
        return {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in derived.items()
        }

    def generate(
        self,
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
        return_type: writing.Returned = "input",
        return_cache: bool = False,
        stream: bool = False,
        fwd_hooks: writing.HookPairs = (),
        prefill_hooks: writing.HookPairs = (),
        decode_hooks: writing.HookPairs = (),
        **inputs: Any,
    ) -> Any:
        """Go on writing after a prompt, which is included in what is returned.

        Args:
            input, inputs: what `forward` takes, `kv_cache=` (a prefix that has run) among it. Several texts are padded on the
                left; images, videos and audio are read with the prompt. After `inputs_embeds` alone, only new tokens are
                known and returned.
            max_new_tokens: at most so many; 0 runs the prompt alone.
            do_sample: draw the tokens; else each is the likeliest (the checkpoint's own settings of sampling are not read).
            temperature, top_k, top_p, min_p, repetition_penalty: as transformers has them, in its order; see `Sampling`.
            seed: of the draws, which have randomness of their own: the same seed writes the same, None something new.
            stop: an id, a text, a function of a row's ids `[pos]` that returns True, or a list of them. What ended a row is
                part of it.
            stop_at_eos: end at the tokens that generation_config.json names, else config.json.
            return_type: "text", "tokens" (ids `[batch pos]`, pads before shorter prompts and after rows that ended earlier)
                or "input": text for text and messages, ids for ids. Text is the prompt as given (messages as the template
                puts them; ids decoded without BOS and pads) and what follows, special tokens shown.
            return_cache: return (the above, `ActivationCache`): values of prompt and new tokens as in one run over all of it,
                the last token included; edits by hooks are in them. Squares are whole, `[batch head pos kv_pos]`. With
                `names_filter=` and `device=` as in `run_with_cache`.
            stream: return an iterator over the new text (of one prompt), in pieces that join to it; with "tokens" over the
                new ids. No hook is active between two pieces.
            fwd_hooks, prefill_hooks, decode_hooks: hooks of every step, of the prompt's run, of the new tokens' runs.
                `hook.positions` is the range of positions that a step computes, counted in the padded row.

        `use_kv_cache=False` runs the whole text again for every token: slow, and the same to rounding.

        Raises:
            TypeError: an unknown keyword; for those of others the message names ours.
            ValueError: settings out of range or without effect; prompts padded on the right; no positions left.
            HookNameError: a literally named hook that cannot fire in its steps.

        >>> model = HookedModel.from_pretrained("tiny")
        >>> model.generate("The capital of France is", max_new_tokens=1)
        'The capital of France is Paris'
        >>> "".join(model.generate("The capital of France is", 1, stream=True))
        ' Paris'
        """
        return writing.generate(
            self,
            input,
            max_new_tokens,
            do_sample=do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop,
            stop_at_eos=stop_at_eos,
            return_type=return_type,
            return_cache=return_cache,
            stream=stream,
            fwd_hooks=fwd_hooks,
            prefill_hooks=prefill_hooks,
            decode_hooks=decode_hooks,
            **inputs,
        )

    def generate_stream(
        self, input: Any = None, max_new_tokens: int = 20, **options: Any
    ) -> Iterator[Any]:
        """`generate(..., stream=True)`."""
        return self.generate(input, max_new_tokens, stream=True, **options)

    def attribute(
        self,
        input: Any = None,
        answer: Any = None,
        versus: Any = None,
        *,
        by: str = "head",
        of: str = "raw",
        positions: Any = "last",
        direction: Tensor | None = None,
        layer: int | None = None,
        **inputs: Any,
    ) -> Attribution:
        """Which part wrote this logit? One run that keeps what the question needs, and an exact sum.

        Args:
            input, inputs: what `forward` takes.
            answer: the token asked about: a text that is one token (its leading space counts), an id, or one of these a row.
            versus: another, whose logit is subtracted.
            by: "part", "head", "kv_head", "neuron", "source" (head and the position it read) or "token".
            of: "raw" (the logit before the softcap, exact), "logit" or "logprob" (first order).
            positions: at which it is asked: ints, a slice, None for all, or "last", each row's last real token.
            direction, layer: in place of answer, a direction, of the final norm's output or of the stream entering `layer`.
        Raises:
            ValueError: no such question; a text of several tokens; a target that means nothing.

        >>> model = HookedModel.from_pretrained("tiny")
        >>> found = model.attribute("The capital of France is", " Paris", versus=" Rome")
        >>> found.values.shape[:2] == (model.cfg.n_layers, model.cfg.n_heads)
        True
        >>> bool((found.sum() - found.actual).abs().max() < 1e-3)
        True
        """
        if by not in attribution.BY:
            raise ValueError(f"by is {by!r}; use one of {', '.join(map(repr, attribution.BY))}")
        ids = [self._answers(t) for t in (answer, versus)]
        target = attribution.Target(ids[0], ids[1], direction=direction, layer=layer, of=of)
        tensors = self.prepare(input, **inputs)
        names = attribution.needed(by, self.cfg, self.dtype, target)
        _, cache = self.run_with_cache(**tensors, names_filter=names, return_type=None)
        assert isinstance(cache, ActivationCache)
        found = attribution.BY[by](cache, target, positions)
        if self.tokenizer is not None:
            found = replace(found, target=target.told(self.to_single_str_token))
        return found.relabel(**self._token_labels(tensors, found))

    def _answers(self, answer: Any) -> Any:
        """Ids of texts that are one token each; anything else as it is."""
        if isinstance(answer, str):
            return self.to_single_token(answer)
        if _is_text(answer):
            return torch.tensor([self.to_single_token(text) for text in answer])
        return answer

    def _token_labels(self, tensors: Inputs, found: Attribution) -> dict[str, list[str]]:
        """Names of positions of a single prompt: number and token, or the patch of an image."""
        ids = tensors.get("input_ids")
        if ids is None or len(ids) != 1 or (self.tokenizer is None and not tensors.spans):
            return {}
        media = media_labels(tensors.spans, 0)
        names = [
            f"{i} {media[i]}"
            if i in media
            else str(i)
            if self.tokenizer is None
            else f"{i} {word!r}"
            for i, word in enumerate(token_labels(self, tensors)[0])
        ]
        named = {"pos": [names[int(i)] for i in found.labels["pos"] if i.isdigit()]}
        return named | ({"source": names} if "source" in found.labels else {})

    def attribution_weights(self) -> dict[str, Any]:
        """References to the few weights that attributions need; no copies, and without gradient as cached values are."""
        return {
            "layer_scalar": [block.layer_scalar for block in self.blocks],
            "W_O": [block.attn.W_O.detach() for block in self.blocks],
            "W_out": [block.mlp.W_out.detach() for block in self.blocks],
            "ln1": [_gain(block.ln1.weight) for block in self.blocks],
            "ln1_post": [_gain(block.ln1_post.weight) for block in self.blocks],
            "ln2": [_gain(block.ln2.weight) for block in self.blocks],
            "ln2_post": [_gain(block.ln2_post.weight) for block in self.blocks],
            "ln_final": _gain(self.ln_final.weight),
            "W_U": self.W_U.detach(),
        }

    def input_to_embed(
        self, input: Any = None, **inputs: Any
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream entering block 0: embeddings with media features in place."""
        return self.forward(input, stop_at_layer=0, **inputs)  # type: ignore[return-value]

    def embed_image(
        self, image: Any, image_tokens: int | None = None
    ) -> ImageFeatures | list[ImageFeatures]:
        """Images as rows of the stream, to be used again: `model(text, image_features=...)` gives what the pixels give.

        To the bit, where the same images were embedded together as the pixels of a call would be; else to rounding. They
        are what `vision.hook_image_features` leaves, so that hooks there act here, and again where they are used. Gradients
        end here: for those of pixels run the model on the images.

        Args:
            image: one image or a list, in any form that `images=` takes.
            image_tokens: as in `encode_inputs`.
        Returns:
            For one image its `ImageFeatures`, for a list a list.
        Raises:
            ValueError: no image, or what `encode_inputs` refuses.

        >>> from PIL import Image
        >>> model = HookedModel.from_pretrained("tiny")
        >>> embedded = model.embed_image(Image.new("RGB", (96, 48), "red"))
        >>> text = f"{model.image_token} is"
        >>> again = model(text, image_features=embedded)
        >>> torch.equal(again, model(text, images=Image.new("RGB", (96, 48), "red")))
        True
        """
        pictures = items_of(image, never)
        if not pictures:
            raise ValueError("there is no image to embed: give one, or a list of them")
        tensors = self.prepare(
            self.image_token * len(pictures), images=pictures, image_tokens=image_tokens
        )
        name = "vision.hook_image_features"
        features = self.run_and_store(**tensors, names_filter=name, stop_at_layer=0)[1][name]
        found = []
        for span in tensors.spans:
            assert span.grid is not None
            found.append(ImageFeatures(features[span.features], span.grid, span.size))
        return found if isinstance(image, (list, tuple)) else found[0]

    def loss_fn(
        self,
        logits: Tensor,
        tokens: Tensor | None,
        attention_mask: Tensor | None = None,
        per_token: bool = False,
    ) -> Float[Tensor, ""] | Float[Tensor, "batch targets"]:
        """Next-token loss in nats, float32, over targets that are neither padding nor placeholders."""
        if tokens is None:
            raise ValueError(
                "a loss needs the ids that were run: give input_ids beside inputs_embeds or the stream"
            )
        words = self._are_words(tokens)
        safe = torch.where(words, tokens, 0)  # placeholders may lie outside the vocabulary
        return lm_cross_entropy_loss(logits.float(), safe, attention_mask, per_token, targets=words)

    def loss_targets(
        self, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None
    ) -> Bool[Tensor, "batch target"]:
        """Which tokens but the first a loss counts, each at the position before it."""
        return counted_targets(tokens, attention_mask, self._are_words(tokens))

    def _are_words(self, tokens: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """False on placeholders of media."""
        words = torch.ones_like(tokens, dtype=torch.bool)
        for token in (self.cfg.image_token_id, self.cfg.video_token_id, self.cfg.audio_token_id):
            if token is not None:
                words = words & (tokens != token)
        return words

    @contextmanager
    def _finite_or_error(self, wanted: bool) -> Iterator[None]:
        if not wanted:
            yield
            return
        added = []
        try:
            for point in self.hook_dict.values():
                added.append((point, point.add_hook(_raise_unless_finite, reads_only=True)))
            yield
        finally:
            for point, handle in added:
                point.remove(handle)

    def _warn_about(self, tensors: Mapping[str, Any]) -> None:
        """A hint, and two things that peers do silently; each said once for each model."""
        self._hint_at_local(tensors)
        if tensors.get("attention_mask") is not None:
            return
        ids, positions = tensors.get("input_ids"), tensors.get("position_ids")
        pad = self.cfg.pad_token_id
        if (
            ids is not None
            and pad is not None
            and "pad" not in self._warned
            and bool((ids == pad).any())
        ):
            self._warn(
                "pad",
                "the ids hold the pad token and no attention_mask was given, so it is attended to",
            )
        if not isinstance(positions, Tensor) or "jump" in self._warned:
            return
        if bool((positions.diff(dim=-1) != 1).any()):
            self._warn(
                "jump",
                "position_ids jump and no attention_mask was given. Positions only turn the rotary here; "
                "transformers' wrapper would also hide the parts from each other, as packed documents",
            )

    def _hint_at_local(self, tensors: Mapping[str, Any]) -> None:
        first = tensors.get("input_ids")
        first = tensors.get("inputs_embeds") if first is None else first
        if first is None or "local" in self._warned or self.attn_implementation != "sdpa":
            return
        pos, windows = first.shape[1], first.shape[1] / self.cfg.window_size
        if windows > 8 and pos >= LONG:
            self._warn(
                "local",
                f"{pos} positions are {windows:.0f} windows: sliding blocks then compute mostly what nobody sees. "
                'set_attn_implementation("local") leaves that out, equal to rounding, not to the bit',
            )

    def _warn(self, key: str, message: str) -> None:
        self._warned.add(key)
        warnings.warn(message + ".", stacklevel=4)

    # -- verbs ------------------------------------------------------------------------------------------

    def project_on_vocab(
        self, stream: Float[Tensor, "*axes d_model"]
    ) -> Float[Tensor, "*axes d_vocab"]:
        """Logits of any stream: final norm (recomputed), head and softcap. No hook fires."""
        return lenses.project(self, stream)

    logit_lens = lenses.logit_lens
    attention_rows = rows.attention_rows

    def topk_tokens(self, stream: Float[Tensor, "*axes d_model"], k: int = 5) -> list[Any]:
        """The k likeliest tokens of a stream vector as strings, nested like the stream's axes."""
        return self._strings(self.project_on_vocab(stream).topk(k, dim=-1).indices)

    def _strings(self, ids: Tensor) -> Any:
        return [self._strings(i) for i in ids] if ids.ndim else self.to_single_str_token(int(ids))

    @contextmanager
    def steer(
        self,
        layers: int | Iterable[int],
        vector: Float[Tensor, "*axes d_model"],
        factor: float = 1.0,
        positions: int | slice | Sequence[int] | Tensor | None = None,
    ) -> Iterator[HookedModel]:
        """Add `factor * vector` to the stream leaving each of `layers`, after `layer_scalar`.

        Args:
            vector: `[d_model]`, or anything that broadcasts over `[batch pos d_model]`.
            positions: where; everywhere by default. In calls on a key/value cache, and so in `generate`, positions count
                from the front of the whole text, and negative ones from the end of each call.
        """
        if vector.shape[-1] != self.cfg.d_model:
            raise ValueError(
                f"the steering vector is {list(vector.shape)}; needed is [... {self.cfg.d_model}]"
            )

        def add(resid: Tensor, hook: HookPoint | NamedPoint) -> Tensor:
            resid[:, _where(positions, hook)] += factor * vector.to(resid)
            return resid

        chosen = [layers] if isinstance(layers, int) else list(layers)
        points = [f"blocks.{self.cfg.layer(layer).index}.hook_resid_post" for layer in chosen]
        with self.hooks(fwd_hooks=[(point, add) for point in points]):
            yield self

    @contextmanager
    def skip_layers(
        self, first: int, last: int, stream: Float[Tensor, "batch pos d_model"] | None = None
    ) -> Iterator[HookedModel]:
        """Leave out blocks `first` to `last`, both included; `stream` then takes the place of what they
        would have passed on (by default what entered them). They compute nothing and their hooks are silent."""
        begin, end = self.cfg.layer(first).index, self.cfg.layer(last).index
        if begin > end:
            raise ValueError(
                f"skip_layers({first}, {last}) leaves out nothing: the first is above the last"
            )
        outer = self._skipped
        self._skipped = outer | dict.fromkeys(range(begin, end + 1), stream)
        try:
            yield self
        finally:
            self._skipped = outer

    # -- weights, in TransformerLens's layout -----------------------------------------------------------

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The stored matrix, without the scale: `hook_embed == W_E[ids] * cfg.embed_scale`."""
        return self.w_e

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:  # type: ignore[override]
        return self.unembedding.T

    @property
    def W_Q(self) -> list[Tensor]:
        """By block; head sizes differ."""
        return [block.attn.W_Q for block in self.blocks]

    @property
    def W_K(self) -> list[Tensor]:
        return [block.attn.W_K for block in self.blocks]

    @property
    def W_V(self) -> list[Tensor]:
        return [block.attn.W_V for block in self.blocks]

    @property
    def W_O(self) -> list[Tensor]:
        return [block.attn.W_O for block in self.blocks]

    @property
    def W_gate(self) -> list[Tensor]:
        return [block.mlp.W_gate for block in self.blocks]

    @property
    def W_in(self) -> list[Tensor]:
        return [block.mlp.W_in for block in self.blocks]

    @property
    def W_out(self) -> list[Tensor]:
        return [block.mlp.W_out for block in self.blocks]

    # -- circuits ---------------------------------------------------------------------------------------

    def QK(
        self,
        layer: int,
        head: int | None = None,
        *,
        offset: int | None = None,
        scales: circuits.Scales = 1.0,
    ) -> FactoredMatrix:
        """What a head looks for, gains and the rotary at `offset` folded in; see `circuits.qk`."""
        return circuits.qk(self, layer, head, offset=offset, scales=scales)

    def OV(
        self, layer: int, head: int | None = None, *, scales: circuits.Scales = 1.0
    ) -> FactoredMatrix:
        """What a head moves, from a source's stream to what it adds; see `circuits.ov`."""
        return circuits.ov(self, layer, head, scales=scales)

    def QK_for_attn_layers(self) -> tuple[list[int], list[FactoredMatrix]]:
        """Blocks, all of which attend, and each one's QK by head, in a list because head sizes differ."""
        blocks = list(range(self.cfg.n_layers))
        return blocks, [self.QK(layer) for layer in blocks]

    def OV_for_attn_layers(self) -> tuple[list[int], list[FactoredMatrix]]:
        """Blocks, all of which attend, and each one's OV by head."""
        blocks = list(range(self.cfg.n_layers))
        return blocks, [self.OV(layer) for layer in blocks]

    def all_composition_scores(
        self, mode: circuits.Mode, *, offset: int | None = None
    ) -> Float[Tensor, "earlier head later later_head"]:
        """How much each later head's "Q", "K" or "V" reads of what each earlier one writes; see `circuits`."""
        return circuits.all_composition_scores(self, mode, offset=offset)

    def accumulated_bias(
        self, layer: int = -1, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Tensor:
        """Sum of the biases that reach the stream: zero, since this family has none. `[d_model]`"""
        return torch.zeros(self.cfg.d_model, dtype=self.dtype, device=self.device)

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under TransformerLens's names and in its layout (`blocks.0.attn.W_Q`), as views."""
        yield from (("embed.W_E", self.W_E), ("unembed.W_U", self.W_U))
        for i, block in enumerate(self.blocks):
            own = ("W_Q", "W_O") if block.cfg.lender is not None else ("W_Q", "W_K", "W_V", "W_O")
            yield from ((f"blocks.{i}.attn.{name}", getattr(block.attn, name)) for name in own)
            yield from (
                (f"blocks.{i}.mlp.{name}", getattr(block.mlp, name))
                for name in ("W_gate", "W_in", "W_out")
            )

    def tl_parameters(self) -> dict[str, Tensor]:
        return dict(self.tl_named_parameters())

    @property
    def n_params_total(self) -> int:
        """Numbers in all weights; tied ones once, layer scalars not counted."""
        return sum(p.numel() for p in self.parameters())

    # -- sizes, under the standard names ----------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return self.cfg.n_layers

    @property
    def hidden_size(self) -> int:
        return self.cfg.d_model

    @property
    def num_heads(self) -> int:
        return self.cfg.n_heads

    @property
    def num_kv_heads(self) -> int:
        return self.cfg.n_key_value_heads

    @property
    def head_dim(self) -> int:
        return self.cfg.d_head

    qk_head_dim = head_dim

    @property
    def vocab_size(self) -> int:
        return self.cfg.d_vocab

    @property
    def intermediate_size(self) -> int:
        return self.cfg.d_mlp

    @property
    def layers(self) -> list[LayerSizes]:
        """Each block's own sizes: `layers[5].self_attn.head_dim`."""
        return [_layer_sizes(layer) for layer in self.cfg.layers]

    def all_head_labels(self) -> list[str]:
        return [
            f"L{layer.index}H{head}" for layer in self.cfg.layers for head in range(layer.n_heads)
        ]

    # -- what there is ----------------------------------------------------------------------------------

    def support(self) -> list[dict[str, str]]:
        """Every value of the table: its names, axes, whether this checkpoint has it, and if not, why."""
        rows = []
        for row in names.ROWS:
            reasons = [
                names.absent(row, self.cfg, layer)
                for layer in (self.cfg.layers if row.in_block else (None,))
            ]
            missing = [reason for reason in reasons if reason]
            state = (
                "yes" if not missing else "no" if len(missing) == len(reasons) else "some blocks"
            )
            rows.append(
                {
                    "name": row.name,
                    "standard": ", ".join(row.standard),
                    "axes": row.axes,
                    "meaning": row.meaning,
                    "available": state,
                    "why": "; ".join(dict.fromkeys(missing)),
                }
            )
        return rows

    def __getattr__(self, name: str) -> Any:
        if name in _NO_BIAS:
            raise Unavailable(
                f"no {name}: this family has no biases in its blocks and no position matrix"
            )
        return super().__getattr__(name)

    def __repr__(self) -> str:
        return names.tree(
            self.cfg, f"{type(self).__name__}({self.cfg.model_name!r}, {self.dtype}, {self.device})"
        )

    # Flags of TransformerLens: the points they switch on are always there.

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Does nothing: `attn.hook_result` is always there and computed while somebody listens."""

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Does nothing: hook `attn.hook_q`, `hook_k` and `hook_v`, which are separate points."""

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Does nothing: hook `ln1.hook_out`, what the attention reads."""

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Does nothing: hook `ln2.hook_out`, what the MLP reads."""


_NO_BIAS = ("b_Q", "b_K", "b_V", "b_O", "b_in", "b_gate", "b_out", "b_U", "W_pos", "W_E_pos")
_RUN_KEYS = (
    *("return_type", "loss_per_token", "start_at_layer", "stop_at_layer", "check_finite"),
    *("kv_cache", "logits_to_keep"),
)


def _where(
    positions: int | slice | Sequence[int] | Tensor | None, hook: HookPoint | NamedPoint
) -> Any:
    """Positions of the whole text among those that a call computes."""
    if positions is None:
        return slice(None)
    if not hook.place.goes_on:
        return positions
    assert hook.positions is not None
    start, stop = hook.positions.start, hook.positions.stop
    if isinstance(positions, slice):
        wanted = list(range(*positions.indices(stop)))
    else:
        chosen = torch.as_tensor(positions)
        chosen = chosen.nonzero() if chosen.dtype == torch.bool else chosen
        wanted = [p + stop if p < 0 else p for p in chosen.reshape(-1).tolist()]
    return [p - start for p in wanted if start <= p < stop]


def _gain(weight: Tensor | None) -> Tensor:
    assert weight is not None
    return weight.detach()


def _logits_of(out: Any, run: Mapping[str, Any]) -> Tensor | None:
    """The logits among what a call returned."""
    if run.get("stop_at_layer") is not None:
        return None
    if isinstance(out, Output):
        return out.logits
    return out if run.get("return_type", "logits") == "logits" else None


def _layer_sizes(layer: LayerConfig) -> LayerSizes:
    return LayerSizes(
        AttentionSizes(layer.n_heads, layer.n_key_value_heads, layer.d_head), MLPSizes(layer.d_mlp)
    )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"dtype is {dtype!r}; use torch.float32, torch.bfloat16, torch.float64, or their names"
        )
    return found


def _is_text(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(item, str) for item in value)
    )


def _ids(value: Any) -> Tensor:
    """Ids as `[batch pos]`."""
    if isinstance(value, Tensor):
        ids = value
    else:
        try:
            ids = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"cannot run {type(value).__name__}: give text, a list of texts, or ids [batch pos]"
            ) from error
    if not ids.numel():
        raise ValueError("nothing to run: the list of texts or ids is empty")
    if ids.is_floating_point():
        raise TypeError(
            f"ids must be whole numbers, got {ids.dtype} {list(ids.shape)}; a stream goes with start_at_layer, "
            "embeddings with inputs_embeds="
        )
    return ids[None] if ids.ndim == 1 else ids


def _merge(processed: Mapping[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """A processor's output with keywords beside it; the same key twice is refused."""
    extra = {k: v for k, v in inputs.items() if v is not None}
    if twice := sorted(set(processed) & set(extra)):
        raise ValueError(
            f"{twice} given both in the processor's output and as keywords: give them once"
        )
    return {**processed, **extra}


def _known(inputs: dict[str, Any]) -> dict[str, Any]:
    """Keywords the network takes, without those a processor adds for others."""
    known = {}
    for key, value in inputs.items():
        if key in INPUT_KEYS:
            known[key] = value
        elif not (key in IGNORED_KEYS or key.startswith(IGNORED_PREFIX)):
            close = difflib.get_close_matches(key, INPUT_KEYS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            if key in ("past_kv_cache", "past_key_values", "cache"):
                hint = "; here it is kv_cache=, a KVCache"
            raise TypeError(f"unknown keyword {key!r}{hint}")
    return known


def _slicer(pos_slice: Any) -> Callable[[Tensor, str], Tensor] | None:
    """Keep some positions of every value that has a position axis, as a copy of its own."""
    if pos_slice is None:
        return None
    chosen = Slice.unwrap(pos_slice)

    def keep(value: Tensor, axes: str) -> Tensor:
        words = axes.split()
        return chosen.apply(value, dim=words.index("pos")).clone() if "pos" in words else value

    return keep


def _kept_labels(labels: Callable[[], list[list[str]]], pos_slice: Any, one_row: bool) -> list[Any]:
    """Names of the positions that were kept."""
    rows = labels()
    if pos_slice is not None:
        kept = Slice.unwrap(pos_slice).indices(len(rows[0])).reshape(-1).tolist()
        rows = [[row[i] for i in kept] for row in rows]
    return rows[0] if one_row else rows


def _raise_unless_finite(value: Tensor, hook: HookPoint | NamedPoint) -> None:
    # Masked scores hold the dtype's lowest number, which is finite.
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise FloatingPointError(
            f"{hook.name!r} is the first value that is not finite ({value.dtype})"
        )


__all__ = ["HookNameError", "HookedModel", "Output"]
