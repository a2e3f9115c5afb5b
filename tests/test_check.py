"""The reference itself: what is captured from transformers, that nothing stays behind, and what `check` reports."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fixtures
import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lens_gemma4 import check as checking
from lens_gemma4.check import (
    Difference,
    compare,
    for_transformers,
    load_reference,
    reference_values,
    run_reference,
)
from lens_gemma4.config import HookedConfig

TORCH_SOFTMAX = torch.nn.functional.softmax


@pytest.fixture(scope="module")
def f_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.make_f(tmp_path_factory.mktemp("f"))


@pytest.fixture(scope="module")
def hf(f_folder: Path) -> Any:
    return load_reference(f_folder, torch.float32, "eager")


@pytest.fixture(scope="module")
def values(hf: Any) -> dict[str, Tensor]:
    return reference_values(hf, fixtures.img_inputs())


def text_of(hf: Any) -> Any:
    return hf.model.language_model


# -- fixtures -----------------------------------------------------------------------------------------


def test_nothing_in_f_stands_at_its_default(hf: Any) -> None:
    scalars = [layer.layer_scalar.item() for layer in text_of(hf).layers]
    assert scalars == pytest.approx(fixtures.F_SCALARS)
    gains = {
        name: p for name, p in hf.named_parameters() if p.ndim == 1 and not name.endswith("bias")
    }
    assert gains
    for name, gain in gains.items():
        assert (gain - 1).abs().mean() > 0.05, name
    for name, p in hf.named_parameters():
        assert p.std() > 0.01, name


def test_random_scalars_spread_over_the_real_range(tmp_path: Path) -> None:
    config = fixtures.random_config(random.Random(0), num_hidden_layers=7)
    folder = fixtures.make_checkpoint(config, tmp_path)
    model = load_reference(folder, torch.float32, "sdpa")
    scalars = torch.stack(
        [m.layer_scalar[0] for m in model.modules() if hasattr(m, "layer_scalar")]
    )
    assert scalars.min() >= 0.05 and scalars.max() <= 1.7 and scalars.std() > 0.1


@pytest.mark.parametrize("seed", range(12))
def test_a_saved_config_reads_as_the_one_asked_for(seed: int, tmp_path: Path) -> None:
    """transformers rewrites config.json on saving: sizes, windows and patterns must survive it in every dialect."""
    config = fixtures.random_config(random.Random(seed))
    asked = HookedConfig.from_hf(config)
    saved = HookedConfig.from_hf(fixtures.make_checkpoint(config, tmp_path))
    assert (saved.layers, saved.bidirectional, saved.tied) == (
        asked.layers,
        asked.bidirectional,
        asked.tied,
    )
    assert (saved.vision, saved.audio) == (asked.vision, asked.audio)


@pytest.mark.parametrize("kind", fixtures.input_kinds(fixtures.F_CONFIG))
def test_inputs_hold_as_many_placeholders_as_features(kind: str) -> None:
    inputs = fixtures.random_inputs(random.Random(1), fixtures.F_CONFIG, kind)
    types = inputs["mm_token_type_ids"]
    for value, name in ((1, "image_position_ids"), (2, "video_position_ids")):
        patches = (inputs[name] >= 0).all(-1).sum() if name in inputs else 0
        assert (types == value).sum() == patches
    assert (types == 3).sum() == (
        inputs["input_features_mask"].sum() if "input_features_mask" in inputs else 0
    )
    if "attention_mask" in inputs:
        assert (inputs["input_ids"][inputs["attention_mask"] == 0] == 0).all()
    else:
        assert (inputs["input_ids"] != 0).all()


# -- capture ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["text", "left", "image batch", "everything"])
def test_every_point_is_captured_and_watching_changes_nothing(
    f_folder: Path, kind: str, attn: str
) -> None:
    model = load_reference(f_folder, torch.float32, attn)
    inputs = fixtures.random_inputs(random.Random(2), fixtures.F_CONFIG, kind)
    found = reference_values(model, inputs)
    assert set(found) == set(checking.shown_points(HookedConfig.from_hf(f_folder), inputs, attn))
    with torch.no_grad():
        assert torch.equal(model(**for_transformers(inputs)).logits, found["hook_logits"])


def test_the_captured_block_adds_up(hf: Any, values: dict[str, Tensor]) -> None:
    for i, layer in enumerate(text_of(hf).layers):
        of = {
            name: values[f"blocks.{i}.{name}"]
            for name in checking.BLOCK_POINTS
            if f"blocks.{i}.{name}" in values
        }
        assert torch.equal(of["hook_resid_pre"] + of["hook_attn_out"], of["hook_resid_mid"])
        assert torch.equal(
            of["hook_resid_mid"] + of["hook_mlp_out"], values[f"blocks.{i}.hook_resid_sum"]
        )
        assert torch.equal(
            values[f"blocks.{i}.hook_resid_sum"] * layer.layer_scalar, of["hook_resid_post"]
        )
        # The control: what is captured before the in-place multiply is not what stands there afterwards.
        assert not torch.equal(values[f"blocks.{i}.hook_resid_sum"], of["hook_resid_post"])
        if i:
            assert torch.equal(of["hook_resid_pre"], values[f"blocks.{i - 1}.hook_resid_post"])


def test_the_captured_attention_adds_up(hf: Any, values: dict[str, Tensor]) -> None:
    for i, layer in enumerate(text_of(hf).layers):
        attn = f"blocks.{i}.attn."
        scores, pattern = values[attn + "hook_attn_scores"], values[attn + "hook_pattern"]
        assert torch.equal(torch.softmax(scores, -1), pattern)
        q, k, v = (
            values[attn + name].transpose(1, 2)
            for name in ("hook_rot_q", "hook_rot_k", "v_norm.hook_out")
        )
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        visible = pattern > 0
        torch.testing.assert_close((q @ k.mT)[visible], scores[visible], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            (pattern @ v).transpose(1, 2), values[attn + "hook_z"], atol=1e-5, rtol=1e-5
        )
        z = values[attn + "hook_z"]
        torch.testing.assert_close(layer.self_attn.o_proj(z.flatten(2)), values[attn + "hook_out"])
        # The control: keys before rotary give other scores.
        plain = values[attn + "k_norm.hook_out"].transpose(1, 2).repeat_interleave(groups, 1)
        assert ((q @ plain.mT)[visible] - scores[visible]).abs().max() > 0.1


def test_values_of_a_full_block_are_its_raw_key_projection(values: dict[str, Tensor]) -> None:
    assert torch.equal(values["blocks.2.attn.hook_v"], values["blocks.2.attn.hook_k"])
    assert not torch.equal(values["blocks.0.attn.hook_v"], values["blocks.0.attn.hook_k"])


def test_the_captured_image_is_what_is_scattered(values: dict[str, Tensor]) -> None:
    inputs = fixtures.img_inputs()
    image = inputs["input_ids"] == 290
    features = values["vision.hook_image_features"]
    assert torch.equal(values["vision.projector.hook_out"].flatten(0, 1), features)
    assert torch.equal(values["blocks.0.hook_resid_pre"][image], features)
    assert not torch.equal(values["hook_embed"][image], features)
    total = values["vision.patch_ln2.hook_out"] + values["vision.hook_pos_embed"]
    assert torch.equal(total, values["vision.hook_pos_sum"])
    assert values["vision.hook_pos_embed"].std() > 0.1


def test_images_and_frames_are_told_apart(hf: Any) -> None:
    inputs = fixtures.random_inputs(random.Random(4), fixtures.F_CONFIG, "everything")
    found = reference_values(hf, inputs)
    assert len(found["vision.hook_out"]) == len(inputs["pixel_values"])
    assert len(found["video.hook_out"]) == len(inputs["pixel_values_videos"])
    assert found["video.hook_video_features"].shape[0] == (inputs["mm_token_type_ids"] == 2).sum()
    assert found["audio.hook_audio_features"].shape[0] == (inputs["mm_token_type_ids"] == 3).sum()


def test_blind_rows_are_the_padding_that_sees_nothing(hf: Any) -> None:
    """Left padding sees no key; right padding sees the text until a sliding window (here 4) has passed it."""
    ids = torch.full((2, 12), 5)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3], mask[1, 6:] = 0, 0
    blind = run_reference(hf, {"input_ids": ids, "attention_mask": mask}, lambda name, value: None)
    expected = torch.zeros(2, 12, dtype=torch.bool)
    expected[0, :3], expected[1, 9:] = True, True
    assert torch.equal(blind, expected)


# -- nothing stays behind -----------------------------------------------------------------------------


@pytest.fixture
def untouched(hf: Any) -> Iterator[None]:
    """transformers and torch are after the test what they were before."""

    def state() -> list[Any]:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in hf.modules()]
        return [
            hooks,
            dict(ALL_ATTENTION_FUNCTIONS._local_mapping),
            dict(ALL_ATTENTION_FUNCTIONS._global_mapping),
        ]

    before = state()
    yield
    assert state() == before
    assert torch.nn.functional.softmax is TORCH_SOFTMAX
    assert not torch._C._len_torch_function_stack()


def test_nothing_stays_behind(hf: Any, untouched: None) -> None:
    reference_values(hf, fixtures.p_inputs())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_stays_behind_after_an_error(
    hf: Any, untouched: None, error: type[BaseException]
) -> None:
    def keep(name: str, value: Tensor) -> None:
        if name == "blocks.3.attn.hook_attn_scores":
            raise error

    with pytest.raises(error):
        run_reference(hf, fixtures.p_inputs(), keep)


def test_an_attention_function_of_the_users_own_stays(hf: Any) -> None:
    def mine(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not called")

    ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
    try:
        reference_values(hf, fixtures.p_inputs())
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


# -- compare ------------------------------------------------------------------------------------------


def test_compare_counts_and_measures() -> None:
    ours = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    theirs = torch.tensor([[[1.0, 2.0], [3.5, 4.0]]])
    blind = torch.zeros(1, 2, dtype=torch.bool)
    found = compare("blocks.0.hook_resid_pre", ours, theirs, blind)
    assert (found.largest, found.differing, found.size, found.equal) == (0.5, 1, 4, False)
    assert compare("blocks.0.hook_resid_pre", ours, ours.clone(), blind).equal


def test_compare_finds_the_last_bit() -> None:
    ours = torch.tensor([[[1.0]]], dtype=torch.bfloat16)
    theirs = torch.nextafter(ours, torch.full_like(ours, 2.0))
    assert not compare("hook_embed", ours, theirs, torch.zeros(1, 1, dtype=torch.bool)).equal


def test_compare_leaves_out_blind_rows_which_must_be_finite() -> None:
    ours, theirs = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)
    theirs[0, 0] = 7.0
    blind = torch.tensor([[True, False]])
    assert compare("hook_embed", ours, theirs, blind).equal
    assert not compare("hook_embed", ours, theirs, ~blind).equal
    ours[0, 0, 0] = float("nan")
    found = compare("hook_embed", ours, theirs, blind)
    assert not found.equal and "not finite" in found.note
    scores = torch.zeros(1, 4, 2, 2)
    other = scores.clone()
    other[:, :, 0] = 1.0  # queries are the third axis of a pattern
    assert compare("blocks.0.attn.hook_pattern", scores, other, blind).equal
    assert not compare("blocks.0.attn.hook_pattern", scores, other.mT.contiguous(), blind).equal


@pytest.mark.parametrize(
    "theirs", [torch.zeros(1, 2, 4), torch.zeros(1, 2, 3, dtype=torch.bfloat16)]
)
def test_compare_refuses_another_shape_or_dtype(theirs: Tensor) -> None:
    found = compare("hook_embed", torch.zeros(1, 2, 3), theirs, torch.zeros(1, 2, dtype=torch.bool))
    assert (
        not found.equal
        and str(list(theirs.shape)) in found.note
        and str(theirs.dtype) in found.note
    )


def test_a_nan_is_never_equal() -> None:
    nan = torch.full((1, 1, 1), float("nan"))
    found = compare("hook_embed", nan, nan.clone(), torch.zeros(1, 1, dtype=torch.bool))
    assert not found.equal


def test_the_verdict_names_the_first_difference() -> None:
    good = Difference("sdpa", "text", "hook_embed", 0.0, 0, 8)
    bad = Difference("eager", "image", "blocks.1.hook_resid_mid", 0.25, 3, 8)
    assert "Equal to the last bit: 1 values in 1 runs" in checking.verdict([good])
    told = checking.verdict([good, bad])
    assert (
        "blocks.1.hook_resid_mid" in told
        and "'image'" in told
        and "3 of 8" in told
        and "0.25" in told
    )
    lines = checking.table([good, bad]).splitlines()
    assert lines[1].split() == ["hook_embed", "0", "0", "of", "8"]
    assert lines[2].split() == ["blocks.{i}.hook_resid_mid", "0.25", "3", "of", "8"]


# -- the command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows_of_f(f_folder: Path) -> list[Difference]:
    return checking.check(f_folder, progress=False)


def test_check_of_f_is_equal(rows_of_f: list[Difference]) -> None:
    assert rows_of_f and [row for row in rows_of_f if not row.equal] == []


def test_check_runs_every_medium_padding_and_attention(rows_of_f: list[Difference]) -> None:
    assert {row.attn for row in rows_of_f} == {"sdpa", "eager"}
    points = {row.name for row in rows_of_f}
    for name in (
        "vision.hook_image_features",
        "video.hook_video_features",
        "audio.hook_audio_features",
        "hook_logits",
    ):
        assert name in points
    labels = {row.prompt for row in rows_of_f}
    assert {
        "batch, padded left",
        "batch, padded right",
        "longer than the window",
        "image",
        "video",
    } <= labels
    assert any("audio" in label for label in labels)


def test_the_command_prints_every_point_and_returns_zero(
    f_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checking.run(f_folder, dtype="bfloat16", attn="eager", progress=False) == 0
    told = capsys.readouterr().out
    assert (
        "Equal to the last bit" in told
        and "blocks.{i}.attn.hook_pattern" in told
        and "hook_logits" in told
    )


def test_check_of_a_text_only_checkpoint_is_equal(tmp_path: Path) -> None:
    config = fixtures.random_config(random.Random(8), wrapper=False)
    folder = fixtures.make_checkpoint(config, tmp_path, torch.bfloat16)
    rows = checking.check(folder, attn_implementation=["sdpa"], progress=False)
    assert rows and all(row.equal for row in rows)
    assert {row.prompt for row in rows} >= {"text", "one token"} and not any(
        "image" in row.prompt for row in rows
    )


def test_check_finds_a_wrong_weight(
    f_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One scalar off by one unit in the last place, in transformers alone."""
    true_load = checking.load_reference

    def load_off_by_one(*args: Any, **kwargs: Any) -> Any:
        model = true_load(*args, **kwargs)
        layer = text_of(model).layers[4]
        layer.layer_scalar = torch.nextafter(layer.layer_scalar, torch.full((1,), 10.0))
        return model

    monkeypatch.setattr(checking, "load_reference", load_off_by_one)
    assert checking.run(f_folder, attn="sdpa", progress=False) == 1
    told = capsys.readouterr().out
    assert "DIFFERENT" in told and "The first is blocks.4.hook_resid_post" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [({"dtype": "int8"}, "int8"), ({"attn": "flash"}, "flash")],
)
def test_check_refuses_what_it_cannot_run(
    f_folder: Path, options: dict[str, str], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        checking.run(f_folder, **options, progress=False)


def test_check_says_when_transformers_is_built_in_another_way(
    hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checking.BLOCK_POINTS, "mlp.hook_pre", ("mlp.gate_projection", "out"))
    found = reference_values(hf, fixtures.p_inputs())
    assert "blocks.0.mlp.hook_pre" not in found  # and `check` raises on it:
    monkeypatch.setattr(checking, "load_reference", lambda *args: hf)
    with pytest.raises(RuntimeError, match=r"did not compute blocks.0.mlp.hook_pre \(and 5 more"):
        checking.check(hf.config._name_or_path, attn_implementation=["eager"], progress=False)
