"""Equal to transformers to the last bit: logits and every value it exposes, on random checkpoints and inputs.

The small set runs by default, the whole with `-m slow`. Every comparison has its control: one layer scalar moved by
one unit in the last place must be found, and found at the first value it touches.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fixtures
import jaxtyping
import pytest
import torch
from torch import Tensor
from transformers.models.gemma4_unified import modeling_gemma4_unified as modeling

from lens_gemma4 import HookedModel
from lens_gemma4.check import (
    compare,
    difference_of_values,
    load_reference,
    run_reference,
    shown_points,
)
from lens_gemma4.config import HookedConfig

N_SMALL, N_WHOLE, N_FLOAT16 = 24, 220, 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_ours(folder: Path, dtype: torch.dtype, attn: str, **kwargs: Any) -> HookedModel:
    warned = (
        pytest.warns(UserWarning, match="float16")
        if dtype == torch.float16
        else contextlib.nullcontext()
    )
    with warned:
        return HookedModel.from_pretrained(folder, dtype=dtype, attn_implementation=attn, **kwargs)


def reference(hf: Any, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    values: dict[str, Tensor] = {}
    blind = run_reference(hf, inputs, values.__setitem__)
    return values, blind


def assert_equal(
    model: HookedModel, hf: Any, inputs: dict[str, Tensor], given: dict[str, Tensor] | None = None
) -> None:
    """Ours on `given` (by default the same inputs) beside transformers on `inputs`: values, logits, and the control."""
    ours = inputs if given is None else given
    values, blind = reference(hf, inputs)
    assert list(values) != []
    assert set(values) == set(shown_points(model.cfg, inputs, model.attn_implementation))
    logits, cache = model.run_with_cache(**ours)
    first = difference_of_values(cache, values, blind)
    assert first is None, f"first difference, in order of computation: {first}"
    assert compare("hook_logits", logits, values["hook_logits"], blind).equal
    assert compare("hook_logits", model(**ours), values["hook_logits"], blind).equal
    assert_finds_one_bit(model, ours, values, blind)


def assert_finds_one_bit(
    model: HookedModel, inputs: dict[str, Tensor], values: dict[str, Tensor], blind: Tensor
) -> None:
    """A layer scalar moved by one unit in the last place is found, first of all in its block's output."""
    if blind.all():
        return
    block = model.blocks[len(model.blocks) // 2]
    true = block.layer_scalar
    block.layer_scalar = torch.nextafter(true, torch.full_like(true, 10.0))
    try:
        _, cache = model.run_with_cache(**inputs)
    finally:
        block.layer_scalar = true
    first = difference_of_values(cache, values, blind)
    assert first is not None
    assert first.name == f"blocks.{len(model.blocks) // 2}.hook_resid_post"


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """Checking every annotation takes ten times as long as the model: the small set does it, the whole need not."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def config_of(seed: int) -> dict[str, Any]:
    return fixtures.random_config(random.Random(seed))


def inputs_of(seed: int, config: dict[str, Any], n: int) -> list[tuple[str, dict[str, Tensor]]]:
    """`n` kinds of inputs; seeds go round all kinds, so that each kind meets many configurations."""
    rng = random.Random(seed + 1_000_003)
    kinds = fixtures.input_kinds(config)
    chosen = dict.fromkeys(kinds[(n * seed + i) % len(kinds)] for i in range(n))
    return [(kind, fixtures.random_inputs(rng, config, kind)) for kind in chosen]


# -- random configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(N_SMALL))
def test_a_random_checkpoint_is_equal(seed: int, tmp_path: Path) -> None:
    """One dtype and attention each, two kinds of inputs; together they go round all of them."""
    config = config_of(seed)
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    attn = ("eager", "sdpa")[seed // 2 % 2]
    folder = fixtures.make_checkpoint(config, tmp_path, (torch.float32, dtype)[seed // 4 % 2], seed)
    hf, model = load_reference(folder, dtype, attn), load_ours(folder, dtype, attn)
    for _, inputs in inputs_of(seed, config, 2):
        assert_equal(model, hf, inputs)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(N_WHOLE))
def test_every_random_checkpoint_is_equal(seed: int, dtype: str, attn: str, tmp_path: Path) -> None:
    config = config_of(seed)
    stored = (torch.float32, DTYPES[dtype])[seed % 2]
    folder = fixtures.make_checkpoint(config, tmp_path, stored, seed)
    hf, model = load_reference(folder, DTYPES[dtype], attn), load_ours(folder, DTYPES[dtype], attn)
    for _, inputs in inputs_of(seed, config, 4):
        assert_equal(model, hf, inputs)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("seed", range(N_FLOAT16))
def test_float16_is_equal(seed: int, attn: str, tmp_path: Path) -> None:
    config = config_of(seed)
    folder = fixtures.make_checkpoint(config, tmp_path, torch.float16, seed)
    hf, model = load_reference(folder, torch.float16, attn), load_ours(folder, torch.float16, attn)
    for _, inputs in inputs_of(seed, config, 4):
        assert_equal(model, hf, inputs)


@functools.cache
def features(n: int) -> dict[str, int]:
    """How many of the first `n` configurations have each feature."""
    found: dict[str, int] = {}
    for seed in range(n):
        config = config_of(seed)
        cfg = HookedConfig.from_hf(config)
        full = cfg.layers[-1]
        has = {
            f"dialect {fixtures.dialect_of(config)}": True,
            cfg.model_type: True,
            f"bidirectional {cfg.bidirectional}": True,
            f"softcap {cfg.output_logits_soft_cap is not None}": True,
            f"tied {cfg.tied}": True,
            f"k_eq_v {full.k_eq_v}": True,
            "vision": cfg.vision is not None,
            "audio": cfg.audio is not None,
            "wrapper without vision": cfg.is_wrapper and cfg.vision is None,
            "wrapper without audio": cfg.is_wrapper and cfg.audio is None,
            "kv sharing": cfg.n_kv_shared > 0,
            "double-wide mlp": any(layer.d_mlp != cfg.d_mlp for layer in cfg.layers),
            "full block mid-stack": any(layer.kind == "full" for layer in cfg.layers[:-1]),
            "no sliding block": all(layer.kind == "full" for layer in cfg.layers),
            "full head size of its own": full.d_head != cfg.d_head,
            "full kv heads of their own": full.n_key_value_heads != cfg.n_key_value_heads,
            "full kv heads of their own, k != v": not full.k_eq_v
            and full.n_key_value_heads != cfg.n_key_value_heads,
            "own rope": any(
                layer.rotary.theta not in (10_000.0, 1_000_000.0) for layer in cfg.layers
            ),
        }
        for feature, present in has.items():
            found[feature] = found.get(feature, 0) + present
    return found


@pytest.mark.parametrize("n", [N_SMALL, N_WHOLE])
def test_the_configurations_cover_every_feature(n: int) -> None:
    """A random set proves nothing about a feature it does not hold."""
    found = features(n)
    rare = {
        "full kv heads of their own, k != v": fixtures.READS_PER_LAYER_CONFIG,
        "no sliding block": n == N_WHOLE,
    }
    missing = [
        feature for feature, count in found.items() if count == 0 and rare.get(feature, True)
    ]
    assert not missing
    for values in (fixtures.DIALECTS, ("None", "vision", "all")):
        word = "dialect" if values == fixtures.DIALECTS else "bidirectional"
        assert all(found.get(f"{word} {value}") for value in values)


@pytest.mark.parametrize("n", [N_SMALL, N_WHOLE])
def test_the_inputs_cover_every_kind(n: int) -> None:
    per_config = 2 if n == N_SMALL else 4
    kinds = {kind for seed in range(n) for kind, _ in inputs_of(seed, config_of(seed), per_config)}
    every = {*fixtures.TEXT_KINDS, *fixtures.VISION_KINDS, *fixtures.AUDIO_KINDS, "everything"}
    assert kinds == every


# -- the fixture F ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def f_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.make_f(tmp_path_factory.mktemp("f"))


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_f_is_equal_on_text_and_image(f_folder: Path, dtype: str, attn: str) -> None:
    hf, model = (
        load_reference(f_folder, DTYPES[dtype], attn),
        load_ours(f_folder, DTYPES[dtype], attn),
    )
    for inputs in (fixtures.p_inputs(), fixtures.img_inputs()):
        assert_equal(model, hf, inputs)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_shared_storage_is_equal(f_folder: Path, attn: str) -> None:
    hf = load_reference(f_folder, torch.bfloat16, attn)
    model = HookedModel.from_pretrained(f_folder, hf_model=hf, attn_implementation=attn)
    assert model.w_e.data_ptr() == hf.model.language_model.embed_tokens.weight.data_ptr()
    assert_equal(model, hf, fixtures.img_inputs())


def test_a_layer_scalar_left_at_one_is_found(f_folder: Path) -> None:
    """What a loader that reads parameters and forgets buffers would do."""
    hf, model = (
        load_reference(f_folder, torch.float32, "sdpa"),
        load_ours(f_folder, torch.float32, "sdpa"),
    )
    values, blind = reference(hf, fixtures.p_inputs())
    model.blocks[0].layer_scalar = torch.ones(1)
    _, cache = model.run_with_cache(**fixtures.p_inputs())
    first = difference_of_values(cache, values, blind)
    assert first is not None and first.name == "blocks.0.hook_resid_post" and first.largest > 0.1


# -- token types and video forms ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["two images", "adjacent images", "image batch", "video", "audio", "everything"]
)
def test_token_types_derived_from_ids_equal_given_ones(kind: str, tmp_path: Path) -> None:
    config = fixtures.random_config(
        random.Random(5),
        wrapper=True,
        vision=True,
        audio=True,
        use_bidirectional_attention="vision",
    )
    folder = fixtures.make_checkpoint(config, tmp_path, torch.float32, 5)
    hf, model = (
        load_reference(folder, torch.float32, "sdpa"),
        load_ours(folder, torch.float32, "sdpa"),
    )
    inputs = fixtures.random_inputs(random.Random(7), config, kind)
    without = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
    assert_equal(model, hf, inputs, given=without)
    if (
        kind != "audio"
    ):  # the control: transformers itself, not told the types, reads images as causal text
        values, blind = reference(hf, without)
        _, cache = model.run_with_cache(**without)
        first = difference_of_values(cache, values, blind)
        assert (
            first is not None
            and not compare("hook_logits", cache["hook_logits"], values["hook_logits"], blind).equal
        )


def test_video_by_frames_and_by_videos_are_equal(f_folder: Path) -> None:
    """5.24's processor gives frames and their counts, 5.10's one axis more and no counts."""
    hf, model = (
        load_reference(f_folder, torch.float32, "eager"),
        load_ours(f_folder, torch.float32, "eager"),
    )
    inputs = fixtures.random_inputs(random.Random(3), fixtures.F_CONFIG, "video")
    by_video = dict(inputs)
    counts = by_video.pop("num_frames_per_video")
    n_videos = len(counts) if len(set(counts.tolist())) == 1 else 1
    for name in ("pixel_values_videos", "video_position_ids"):
        by_video[name] = inputs[name].unflatten(0, (n_videos, -1))
    assert by_video["pixel_values_videos"].ndim == 4
    assert_equal(model, hf, inputs)
    assert_equal(model, hf, inputs, given=by_video)


# -- the windowed image rule --------------------------------------------------------------------------

needs_windowed = pytest.mark.skipif(
    not hasattr(modeling, "create_masks_for_vision_model"),
    reason="this transformers has one image rule: create_masks_for_generate builds the masks of forward",
)


def masks_for_generate(hf: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The masks of transformers' static-cache generation, as its own function builds them."""
    ids = inputs["input_ids"]
    return type(hf).create_masks_for_generate(
        hf.config,
        inputs_embeds=torch.zeros(
            *ids.shape, hf.config.get_text_config().hidden_size, dtype=hf.dtype
        ),
        attention_mask=inputs.get("attention_mask"),
        cache=None,
        position_ids=torch.arange(ids.shape[1])[None],
        mm_token_type_ids=inputs["mm_token_type_ids"],
    )


@needs_windowed
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "kind",
    [
        "short image",
        "long image",
        "two images",
        "adjacent images",
        "image batch",
        "video",
        "everything",
    ],
)
def test_windowed_images_equal_the_masks_of_generate(kind: str, attn: str, tmp_path: Path) -> None:
    """transformers' own forward under the masks its static-cache generation builds, beside `image_mask="windowed"`."""
    config = fixtures.random_config(
        random.Random(11),
        wrapper=True,
        vision=True,
        audio=True,
        use_bidirectional_attention="vision",
        sliding_window=3,
    )
    folder = fixtures.make_checkpoint(config, tmp_path, torch.float32, 11)
    hf = load_reference(folder, torch.float32, attn)
    model = load_ours(folder, torch.float32, attn, image_mask="windowed")
    inputs = fixtures.random_inputs(random.Random(13), config, kind)
    masked = inputs | {"attention_mask": masks_for_generate(hf, inputs)}
    assert_equal(model, hf, masked, given=inputs)
    if kind == "long image":  # the control: the rule of forward lets this image leave its window
        _, cache = load_ours(folder, torch.float32, attn).run_with_cache(**inputs)
        values, blind = reference(hf, masked)
        assert difference_of_values(cache, values, blind) is not None


def test_nothing_warns_on_the_default_path(f_folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_ours(f_folder, torch.float32, "sdpa")(**fixtures.img_inputs())
