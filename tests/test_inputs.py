"""Text and media to tensors: one BOS rule for every method, padding with its mask, media."""

from __future__ import annotations

import dataclasses
import json
import wave
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from lens_gemma4 import HookedModel, inputs
from lens_gemma4.inputs import load_processor, load_tokenizer

PAD, EOS, BOS, UNK = range(4)
MEDIA = {
    "image_token": "<|image|>",
    "audio_token": "<|audio|>",
    "video_token": "<|video|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", *MEDIA.values()]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁the", "▁cat", "▁of", "▁is", "▁Paris", "▁capital", "▁France", "The"]


# -- tokenizers of several habits -------------------------------------------------------------


def pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary in which each of WORDS is one token, with the merges that get there."""
    merges = [(word[:n], word[n]) for word in WORDS for n in range(1, len(word))]
    merges = list(dict.fromkeys(merges))
    letters = ["▁", *(chr(code) for code in range(33, 127))]
    names = [*SPECIAL, *BYTES, *letters, *(first + second for first, second in merges)]
    return {name: index for index, name in enumerate(dict.fromkeys(names))}, merges


def gemma_style(single: str | None) -> Tokenizer:
    """Byte fallback, "▁" for a space; `single` is the post-processor's template, if any."""
    vocab, merges = pieces()
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    if single:
        ids = [("<bos>", BOS), ("<eos>", EOS)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return tokenizer


def wrapped(tokenizer: Tokenizer, kind: type = PreTrainedTokenizerFast, **kwargs: Any) -> Any:
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return kind(tokenizer_object=tokenizer, extra_special_tokens=dict(MEDIA), **(names | kwargs))


class Stubborn(PreTrainedTokenizerFast):
    """Puts a BOS there whatever it is asked, as some custom tokenizers do."""

    def __call__(self, text, add_special_tokens=True, **kwargs):
        return super().__call__(text, add_special_tokens=True, **kwargs)


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2 style, and it names no BOS: config.json does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: index for index, name in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", padding_side="right"
    )


TOKENIZERS = {
    "adds BOS": lambda: wrapped(gemma_style("<bos> $A"), padding_side="left"),
    "adds BOS and EOS": lambda: wrapped(gemma_style("<bos> $A <eos>"), padding_side="right"),
    "adds nothing": lambda: wrapped(gemma_style(None), padding_side="right"),
    "adds BOS unasked": lambda: wrapped(gemma_style("<bos> $A"), Stubborn, padding_side="left"),
    "no BOS of its own": byte_level,
}
TEXTS = {  # text: how many BOS it spells out at its front
    "The cat": 0,
    " cat of the": 0,
    "<bos>The cat": 1,
    "<bos><bos>The cat": 2,
    "The<bos> cat": 0,
    "": 0,
    "Zürich 東 <0x0A>\n": 0,
}

# -- a checkpoint with a tokenizer and a processor --------------------------------------------


def media_ids(tokenizer: Any) -> dict[str, int]:
    names = {
        **{f"{name}_id": name for name in MEDIA if name != "eoa_token"},
        "eoa_token_index": "eoa_token",
    }
    return {key: tokenizer.convert_tokens_to_ids(MEDIA[name]) for key, name in names.items()}


def processor_of(tokenizer: Any) -> Any:
    """transformers' own processor at F's sizes: patches of 6 x 6 pixels, 20 samples a frame."""
    from transformers import (
        Gemma4UnifiedAudioFeatureExtractor,
        Gemma4UnifiedImageProcessor,
        Gemma4UnifiedProcessor,
        Gemma4UnifiedVideoProcessor,
    )

    patches = {"patch_size": 2, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    return Gemma4UnifiedProcessor(
        feature_extractor=Gemma4UnifiedAudioFeatureExtractor(
            feature_size=20, audio_samples_per_token=20
        ),
        image_processor=Gemma4UnifiedImageProcessor(**patches),
        tokenizer=tokenizer,
        video_processor=Gemma4UnifiedVideoProcessor(**patches, num_frames=4),
    )


def checkpoint(folder: Path) -> Path:
    config = json.loads(json.dumps(fixtures.F_CONFIG))
    tokenizer = TOKENIZERS["adds BOS"]()
    config["text_config"] |= {"vocab_size": len(tokenizer), "max_position_embeddings": 700}
    config["vision_config"]["mm_posemb_size"] = 70
    config |= media_ids(tokenizer)
    fixtures.make_checkpoint(config, folder, scalars=fixtures.F_SCALARS)
    processor_of(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def model(folder) -> HookedModel:
    return HookedModel.from_pretrained(folder)


@pytest.fixture
def bare(folder, tmp_path) -> HookedModel:
    """The same weights in a folder without tokenizer and processor."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    return HookedModel.from_pretrained(tmp_path)


@pytest.fixture(params=TOKENIZERS)
def any_model(request, bare) -> HookedModel:
    """A model with each of the tokenizers."""
    bare.set_tokenizer(TOKENIZERS[request.param]())
    return bare


def leading(ids: list[int]) -> int:
    return next((n for n, token in enumerate(ids) if token != BOS), len(ids))


def plain_ids(text: str, tokenizer: Any) -> list[int]:
    """The text's own tokens, without the BOS spelled out at its front."""
    while text.startswith("<bos>"):
        text = text.removeprefix("<bos>")
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


# -- the BOS rule -----------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prepend_bos", [None, True])
def test_exactly_one_bos_whatever_the_tokenizer_does(any_model, text, prepend_bos):
    (ids,) = any_model.to_tokens(text, prepend_bos=prepend_bos).tolist()
    assert ids == [BOS, *plain_ids(text, any_model.tokenizer)]


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_without_bos_only_one_that_was_spelled_out_stays(any_model, text):
    (ids,) = any_model.to_tokens(text, prepend_bos=False).tolist()
    assert ids == [BOS] * TEXTS[text] + plain_ids(text, any_model.tokenizer)


def test_the_tokenizers_do_differ():
    """The control: what they do by themselves is none, one or two BOS, so that a rule is needed."""
    own = {name: leading(make()("<bos>The cat")["input_ids"]) for name, make in TOKENIZERS.items()}
    assert set(own.values()) == {1, 2}
    assert {leading(make()("The cat")["input_ids"]) for make in TOKENIZERS.values()} == {0, 1}
    asked = TOKENIZERS["adds BOS unasked"]()("The cat", add_special_tokens=False)["input_ids"]
    assert leading(asked) == 1
    assert TOKENIZERS["adds BOS and EOS"]()("The cat")["input_ids"][-1] == EOS


@pytest.mark.parametrize("text", ["The cat", "<bos>The cat"])
def test_every_method_that_takes_text_has_the_same_bos(any_model, text):
    ids = any_model.to_tokens(text)
    assert any_model.encode(text)["input_ids"].tolist() == ids.tolist()
    assert any_model.encode_inputs(text)["input_ids"].tolist() == ids.tolist()
    assert any_model.prepare(text)["input_ids"].tolist() == ids.tolist()
    assert any_model.to_str_tokens(text) == any_model.to_str_tokens(ids)
    assert any_model.get_token_position(BOS, text, mode="last") == 0
    assert torch.equal(any_model(text), any_model(ids))
    _, cache = any_model.run_with_cache(text, names_filter="hook_tokens")
    assert torch.equal(cache["hook_tokens"], ids)
    seen = []
    any_model.run_with_hooks(
        text, fwd_hooks=[("hook_tokens", lambda value, hook: seen.append(value.clone()))]
    )
    assert torch.equal(seen[0], ids)
    without = any_model.to_tokens(text, prepend_bos=False)
    assert torch.equal(any_model(text, prepend_bos=False), any_model(without))
    if text == "The cat":
        assert any_model(text).shape != any_model(text, prepend_bos=False).shape


@pytest.mark.parametrize("ids", [[BOS, BOS, 7], [7, 8], [7, BOS]])
def test_ids_are_never_touched(model, ids):
    _, cache = model.run_with_cache(torch.tensor([ids]), names_filter="hook_tokens")
    assert cache["hook_tokens"].tolist() == [ids]
    assert model.to_str_tokens(ids) == [model.to_single_str_token(i) for i in ids]


def test_no_bos_anywhere_is_an_error_unless_it_is_off(bare):
    bare.set_tokenizer(byte_level())
    bare.cfg = fixtures.HookedConfig.from_hf(
        {**bare.cfg.raw, "text_config": {**bare.cfg.raw["text_config"], "bos_token_id": None}}
    )
    assert bare.cfg.bos_token_id is None
    with pytest.raises(ValueError, match="prepend_bos=False"):
        bare.to_tokens("The cat")
    assert bare.to_tokens("The", prepend_bos=False).shape == (1, 3)


# -- padding ----------------------------------------------------------------------------------

RAGGED = ["The cat is", "The", "The capital of France is"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_rows_are_padded_with_their_mask(any_model, side):
    rows = [any_model.to_tokens(text)[0].tolist() for text in RAGGED]
    given = any_model.encode(RAGGED, padding_side=side)
    width = max(map(len, rows))
    assert given["input_ids"].shape == given["attention_mask"].shape == (3, width)
    for row, ids, mask in zip(
        rows, given["input_ids"].tolist(), given["attention_mask"].tolist(), strict=True
    ):
        pads, ones = [PAD] * (width - len(row)), [1] * len(row)
        assert ids == (pads + row if side == "left" else row + pads)
        assert mask == ([0] * len(pads) + ones if side == "left" else ones + [0] * len(pads))


@pytest.mark.parametrize("texts", ["The cat", ["The cat"], ["The cat", "The cat"]])
def test_no_mask_when_nothing_was_padded(any_model, texts):
    assert set(any_model.encode(texts)) == {"input_ids"}


def test_the_side_is_the_tokenizers_own_unless_said(bare):
    for name, make in TOKENIZERS.items():
        tokenizer = make()
        bare.set_tokenizer(tokenizer)
        own = bare.to_tokens(RAGGED)
        assert torch.equal(own, bare.to_tokens(RAGGED, padding_side=tokenizer.padding_side)), name
        other = "left" if tokenizer.padding_side == "right" else "right"
        assert not torch.equal(own, bare.to_tokens(RAGGED, padding_side=other)), name
        bare.set_tokenizer(tokenizer, default_padding_side=other)
        assert torch.equal(bare.to_tokens(RAGGED), bare.to_tokens(RAGGED, padding_side=other)), name
        assert not torch.equal(bare.to_tokens(RAGGED), own), name


def test_another_side_is_refused_even_when_nothing_is_padded(model):
    for texts in ("The cat", RAGGED):
        with pytest.raises(
            (ValueError, TypeError), match="middle"
        ):  # the types' checker sees it first here
            model.encode(texts, padding_side="middle")
    with pytest.raises(ValueError, match="'middle'; use 'left' or 'right'"):
        inputs._check_side("middle")


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_runs_as_it_does_alone(folder, side):
    model = HookedModel.from_pretrained(folder, dtype=torch.float64)
    together = model(RAGGED, padding_side=side)
    blind = model.encode(RAGGED, padding_side=side)["input_ids"]
    with pytest.warns(UserWarning, match="no attention_mask was given"):
        unmasked = model(blind)
    for i, text in enumerate(RAGGED):
        alone = model(text)[0]
        keep = slice(-len(alone), None) if side == "left" else slice(len(alone))
        torch.testing.assert_close(together[i, keep], alone, atol=1e-10, rtol=0)
        if side == "left" and i != 2:  # the control: without the mask the pads are read
            assert (unmasked[i, keep] - alone).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_padded_rows_is_that_of_the_rows_alone(folder, side):
    model = HookedModel.from_pretrained(folder, dtype=torch.float64)
    losses = [model(text, return_type="loss", loss_per_token=True)[0] for text in RAGGED]
    torch.testing.assert_close(
        model(RAGGED, padding_side=side, return_type="loss"),
        torch.cat(losses).mean(),
        atol=1e-5,
        rtol=0,
    )
    per_token = model(RAGGED, padding_side=side, return_type="loss", loss_per_token=True)
    for row, alone in zip(per_token, losses, strict=True):
        keep = slice(len(row) - len(alone), None) if side == "left" else slice(len(alone))
        torch.testing.assert_close(row[keep], alone, atol=1e-5, rtol=0)
        assert torch.count_nonzero(row) == len(alone)  # nothing read from or at padding counts


# -- tokenizer objects ------------------------------------------------------------------------


def state_of(tokenizer: Any) -> tuple[Any, ...]:
    """All that a caller could find changed."""
    kept = {
        k: repr(v)
        for k, v in vars(tokenizer).items()
        if k not in ("_tokenizer", "deprecation_warnings")
    }
    return tokenizer.backend_tokenizer.to_str(), tokenizer.padding_side, len(tokenizer), kept


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_was_passed_in_is_not_changed(bare, name):
    tokenizer = TOKENIZERS[name]()
    before = state_of(tokenizer)
    bare.set_tokenizer(tokenizer, default_padding_side="left")
    assert bare.tokenizer is tokenizer
    for side in (None, "left", "right"):
        bare(RAGGED, padding_side=side)
    bare.to_tokens("The cat", truncate=True)
    bare.to_string(bare.to_tokens("The cat"))
    bare.to_str_tokens(RAGGED)
    bare.get_token_position("T", "The") if name == "no BOS of its own" else bare.get_token_position(
        " cat", "The cat"
    )
    assert state_of(tokenizer) == before
    tokenizer.padding_side = "left" if tokenizer.padding_side == "right" else "right"
    assert state_of(tokenizer) != before  # the control: a change is seen


def test_the_tokenizer_is_loaded_when_first_needed(model):
    model(torch.tensor([[BOS, 7]]))
    assert "_tokenizer" not in vars(model)
    model("The cat")
    assert "_tokenizer" in vars(model)
    assert "_processor" not in vars(model)


def test_a_folder_without_text_files_gives_none_and_says_what_to_do(bare, tmp_path):
    assert bare.tokenizer is None and bare.processor is None
    assert load_tokenizer(None) is None and load_processor(tmp_path) is None
    for call in (bare, bare.to_tokens, bare.to_str_tokens, bare.to_single_token):
        with pytest.raises(ValueError, match=r"set_tokenizer\(tokenizer\)"):
            call("The cat")
    with pytest.raises(ValueError, match=r"set_tokenizer\(tokenizer\)"):
        bare.to_string([1, 2])
    with pytest.raises(ValueError, match=r"set_processor\(processor\)"):
        bare.encode_inputs("<|image|>", images=[picture()])
    assert bare(torch.tensor([[BOS, 7]])).shape[1] == 2


def test_a_model_from_no_folder_says_so(folder):
    from transformers import AutoModelForImageTextToText

    given = AutoModelForImageTextToText.from_pretrained(folder)
    model = HookedModel.from_pretrained(hf_model=given)
    with pytest.raises(ValueError, match="not loaded from a folder"):
        model("The cat")
    model.set_tokenizer(TOKENIZERS["adds BOS"]())
    assert model("The cat").shape[1] == 3


def test_a_tokenizer_with_more_words_than_the_model_is_refused(bare):
    vocab, merges = pieces()
    more = vocab | {f"word{n}": n for n in range(len(vocab), len(vocab) + 9)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(more, merges)))
    with pytest.raises(ValueError, match=f"{len(more)} words, the model {len(vocab)}"):
        bare.set_tokenizer(tokenizer)
    placeholders = TOKENIZERS["adds BOS"]()
    placeholders.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    bare.set_tokenizer(placeholders)  # a placeholder needs no embedding


def test_what_was_set_is_saved_and_else_the_files_as_they_are(folder, tmp_path):
    model = HookedModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "same")
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        assert (tmp_path / "same" / name).read_bytes() == (folder / name).read_bytes()
    model.set_tokenizer(TOKENIZERS["adds nothing"]())
    model.save_pretrained(tmp_path / "other")
    again = HookedModel.from_pretrained(tmp_path / "other")
    assert leading(again.tokenizer("The cat")["input_ids"]) == 0
    assert (
        leading(model.from_pretrained(folder).tokenizer("The cat")["input_ids"]) == 1
    )  # the control
    assert torch.equal(again("The cat"), HookedModel.from_pretrained(folder)("The cat"))


# -- ids and strings --------------------------------------------------------------------------


def test_to_string_takes_ids_in_every_shape(model):
    ids = model.to_tokens("The cat of France")
    assert model.to_string(ids) == ["<bos>The cat of France"]
    assert model.to_string(ids[0]) == model.to_string(ids[0].tolist()) == "<bos>The cat of France"
    assert model.to_string(ids[0].numpy()) == "<bos>The cat of France"
    assert model.to_string(ids[0, 1]) == model.to_string(int(ids[0, 1])) == "The"
    assert model.to_string([[BOS], [BOS, int(ids[0, 1])]]) == ["<bos>", "<bos>The"]
    assert model.to_string([]) == ""


@pytest.mark.parametrize("text", ["Zürich 東\n", "  two  spaces ", "a , b .", "日"])
def test_text_comes_back_as_it_was(any_model, text):
    assert any_model.to_string(any_model.to_tokens(text, prepend_bos=False)[0]) == text


def test_tokens_as_strings_keep_their_spaces(model):
    assert model.to_str_tokens("The cat of") == ["<bos>", "The", " cat", " of"]
    assert model.to_str_tokens("The cat of", prepend_bos=False) == ["The", " cat", " of"]
    assert model.to_str_tokens(["The cat", "The"]) == [["<bos>", "The", " cat"], ["<bos>", "The"]]
    assert model.to_str_tokens(["The"]) == [["<bos>", "The"]]
    ids = model.to_tokens("The cat")
    assert model.to_str_tokens(ids) == model.to_str_tokens(ids[0]) == ["<bos>", "The", " cat"]
    assert model.to_str_tokens(ids.expand(2, -1)) == [["<bos>", "The", " cat"]] * 2
    assert model.to_str_tokens(ids[0, 1]) == ["The"]
    assert model.to_str_tokens([]) == []
    assert model.to_str_tokens("é", prepend_bos=False) == ["<0xC3>", "<0xA9>"]  # no characters


def test_single_tokens(model):
    paris = model.to_single_token(" Paris")
    assert model.to_single_str_token(paris) == " Paris"
    assert model.to_single_token("<bos>") == BOS
    with pytest.raises(ValueError, match=r"5 tokens, \['P', 'a', 'r', 'i', 's'\]"):
        model.to_single_token("Paris")
    with pytest.raises(ValueError, match="0 tokens"):
        model.to_single_token("")
    for wrong in (-1, model.cfg.d_vocab):
        with pytest.raises(ValueError, match=f"{wrong} is no token"):
            model.to_single_str_token(wrong)


def test_where_a_token_stands(model):
    text = "The cat of the cat"
    cat = model.to_single_token(" cat")
    assert model.get_token_position(" cat", text) == model.get_token_position(cat, text) == 2
    assert model.get_token_position(" cat", text, mode="last") == 5
    assert model.get_token_position(" cat", text, prepend_bos=False) == 1
    ids = model.to_tokens(text, prepend_bos=False)
    assert (
        model.get_token_position(" cat", ids)
        == model.get_token_position(" cat", ids[0].tolist())
        == 1
    )
    with pytest.raises(ValueError, match=r"' Paris' .* does not occur"):
        model.get_token_position(" Paris", text)
    with pytest.raises(ValueError, match="one row"):
        model.get_token_position(" cat", ids.expand(2, -1))


def test_residual_directions_are_columns_of_the_unembedding(model):
    cat, of = model.to_single_token(" cat"), model.to_single_token(" of")
    column = model.W_U[:, cat]
    for asked in (" cat", cat, torch.tensor(cat), torch.tensor([cat]), torch.tensor([[cat]])):
        assert torch.equal(model.tokens_to_residual_directions(asked), column)
    both = model.tokens_to_residual_directions([" cat", " of"])
    assert torch.equal(both, torch.stack([column, model.W_U[:, of]]))
    assert torch.equal(model.tokens_to_residual_directions(torch.tensor([[cat, of]])), both[None])
    _, cache = model.run_with_cache(
        "The cat", names_filter=["ln_final.hook_out", "hook_logits_raw"]
    )
    raw = cache["ln_final.hook_out"] @ column
    torch.testing.assert_close(raw, cache["hook_logits_raw"][..., cat])
    assert not torch.allclose(raw, cache["hook_logits_raw"][..., of])
    for wrong in (-1, model.cfg.d_vocab):
        with pytest.raises(ValueError, match="0 to"):
            model.tokens_to_residual_directions(torch.tensor([cat, wrong]))


def test_too_long_a_text_is_an_error_and_is_cut_when_asked(model):
    text = "The" + " cat" * 720
    with pytest.raises(ValueError, match="722 tokens; this model has 700"):
        model.to_tokens(text)
    cut = model.to_tokens(text, truncate=True)
    assert cut.shape == (1, 700) and cut[0, 0] == BOS


def test_what_is_no_text_is_refused(model):
    with pytest.raises(TypeError, match="text is a string or a list of strings"):
        model.encode_inputs([])
    with pytest.raises(TypeError, match="text"):
        model.encode_inputs(["The", 3])
    with pytest.raises(ValueError, match="text 1 has no token"):
        model.encode(["The", ""], prepend_bos=False)


def test_to_tokens_stays_on_the_cpu_when_asked(model):
    assert torch.equal(model.to_tokens("The", move_to_device=False), model.to_tokens("The").cpu())


# -- media ------------------------------------------------------------------------------------


def picture(width: int = 48, height: int = 36, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def sound(n: int = 90, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) / 4).astype(np.float32)


def film(n: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 24, 24, 3), dtype=np.uint8)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Our tensors are the processor's own; mask and types apart, which the network derives."""
    theirs = {k: v for k, v in theirs.items() if k not in ("mm_token_type_ids", "attention_mask")}
    assert set(ours) - {"attention_mask"} == set(theirs)
    for key, value in theirs.items():
        assert torch.equal(ours[key], torch.as_tensor(value)), key


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # 5.10's own
def test_an_image_beside_text_is_what_the_processor_makes_of_it(model):
    text = f"The cat {model.image_token} is"
    theirs = model.processor(text=text, images=[picture()], return_tensors="pt")
    ours = model.encode_inputs(text, images=[picture()])
    same(ours, theirs)
    assert torch.equal(model(text, images=[picture()]), model(**theirs))
    assert not torch.equal(model(text, images=[picture(seed=1)]), model(**theirs))
    n = int((ours["input_ids"] == model.cfg.image_token_id).sum())
    assert n > 20 and len(model.to_str_tokens(text)) + n + 1 == ours["input_ids"].shape[1]


def test_one_image_in_every_form(model, tmp_path):
    text, image = f"{model.image_token} is", picture(40, 28)
    wanted = model.encode_inputs(text, images=[image])
    array = np.asarray(image)
    image.save(tmp_path / "picture.png")
    forms = {
        "alone": image,
        "row": [[image]],
        "path": tmp_path / "picture.png",
        "text path": str(tmp_path / "picture.png"),
        "array": array,
        "tensor": torch.tensor(array),
        "channels first": torch.tensor(array).permute(2, 0, 1),
        "wide whole numbers": torch.tensor(array).long(),
    }
    for name, form in forms.items():
        given = model.encode_inputs(text, images=form)
        assert all(torch.equal(given[key], value) for key, value in wanted.items()), name
    exact = picture(
        6 * 10, 6 * 7
    )  # its own size at the budget of 70, so nothing is resampled and rounded
    floats = model.encode_inputs(text, images=np.asarray(exact) / 255)["pixel_values"]
    whole = model.encode_inputs(text, images=exact)["pixel_values"]
    torch.testing.assert_close(floats, whole, atol=1e-6, rtol=0)
    theirs = model.processor.image_processor(np.asarray(exact) / 255, return_tensors="pt")[
        "pixel_values"
    ]
    assert (theirs - whole).abs().max() > 0.9  # the control: floats as they are come out black


def test_a_photograph_on_its_side_is_seen_upright(model, tmp_path):
    image, exif = picture(48, 30), Image.Exif()
    exif[0x0112] = 6  # orientation: shown turned by a quarter
    image.save(tmp_path / "photo.png", exif=exif)
    upright = image.transpose(Image.Transpose.ROTATE_270)
    given, wanted, lying = (
        model.encode_inputs(model.image_token, images=one)["pixel_values"]
        for one in (tmp_path / "photo.png", upright, image)
    )
    assert torch.equal(given, wanted) and not torch.equal(given, lying)


def test_a_grey_picture_is_one_with_three_equal_channels(model, tmp_path):
    grey = picture().convert("L")
    grey.save(tmp_path / "grey.png")
    wanted = model.encode_inputs(model.image_token, images=grey.convert("RGB"))["pixel_values"]
    for form in (grey, tmp_path / "grey.png"):
        given = model.encode_inputs(model.image_token, images=form)["pixel_values"]
        assert torch.equal(given, wanted)


def test_a_picture_of_few_rows_is_not_taken_for_channels(model):
    """The processor guesses: an array of one row, or since 5.24 of four, is a picture of so many channels to it."""
    for height in (1, 2, 4):
        image = picture(30, height)
        wanted = model.encode_inputs(model.image_token, images=image)
        given = model.encode_inputs(model.image_token, images=np.asarray(image))
        assert all(torch.equal(given[key], value) for key, value in wanted.items()), height
        assert given.spans[0].size == (30, height)
    one_row = np.array(picture(30, 1))
    guessed = model.processor.image_processor.process_image(one_row, do_convert_rgb=True)
    assert tuple(guessed.shape)[1:] == (30, 3) != (1, 30)  # the control: not height and width


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # 5.10's own
@pytest.mark.parametrize("image_tokens", inputs.forms.BUDGETS)
def test_a_budget_of_tokens_is_the_processors_own(folder, image_tokens):
    model = HookedModel.from_pretrained(folder)
    model.cfg = dataclasses.replace(model.cfg, n_ctx=2000)
    text = f"{model.image_token} is"
    ours = model.encode_inputs(text, images=picture(), image_tokens=image_tokens)
    theirs = model.processor(
        text=text, images=[picture()], max_soft_tokens=image_tokens, return_tensors="pt"
    )
    same(ours, theirs)
    n = int((ours["input_ids"] == model.cfg.image_token_id).sum())
    assert image_tokens * 0.8 < n <= image_tokens == ours["pixel_values"].shape[1]
    assert model.processor.image_processor.max_soft_tokens == 70  # nothing was changed for good
    by_call = model.prepare(text, images=picture(), image_tokens=image_tokens)
    assert torch.equal(by_call["pixel_values"], ours["pixel_values"])


def test_a_budget_counts_in_every_call_that_takes_text(model):
    text, given = f"{model.image_token} is", {"images": picture(24, 24), "image_tokens": 140}
    n = model(text, **given).shape[1]
    assert n > model(text, images=given["images"]).shape[1]  # the control
    assert model.run_with_cache(text, names_filter="hook_tokens", **given)[0].shape[1] == n
    assert model.run_with_hooks(text, fwd_hooks=[], **given).shape[1] == n
    assert model.logit_lens(text, layers=0, **given).top_ids.shape[2] == n
    assert model.attribute(text, 9, by="part", **given).values.shape[-1] == 1


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        (
            "<|image|>",
            {"image_tokens": 100},
            "is 100; the processor allows 70, 140, 280, 560, 1120",
        ),
        ("The", {"images": None, "image_tokens": 70}, "how many tokens an image becomes"),
        ([[2, 5]], {"images": None, "image_tokens": 70}, "go with text"),
        ({"input_ids": [[2, 5]]}, {}, "go with text"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(model, text, given, message):
    if isinstance(text, dict):
        text = {"input_ids": torch.tensor(text["input_ids"])}
    with pytest.raises(ValueError, match=message):
        model(text, **{"images": picture(), **given})


def test_media_may_be_listed_text_by_text(model):
    token = model.image_token
    texts = [f"{token} {token}", "The", token]
    images = [picture(seed=n) for n in range(3)]
    wanted = model.encode_inputs(texts, images=images)
    for rows in ([images[:2], [], images[2:]], [images[:2], None, images[2]]):
        given = model.encode_inputs(texts, images=rows)
        assert all(torch.equal(given[key], value) for key, value in wanted.items())
    with pytest.raises(
        ValueError, match=r"hold \[2, 0, 1\] placeholders .* and \[1, 0, 2\] of kind"
    ):
        model.encode_inputs(texts, images=[images[:1], [], images[1:]])
    with pytest.raises(ValueError, match=r"hold \[1, 1\] placeholders .* and \[2\] of kind audio"):
        model.encode_inputs([model.audio_token] * 2, audio=[[sound(), sound()]])


def test_a_file_that_cannot_be_read_is_named(model, tmp_path):
    picture().save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    for name, content in (("cut.png", whole[:200]), ("text.png", b"hello"), ("none.png", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} is no picture that can be read"):
            model.encode_inputs(model.image_token, images=tmp_path / name)
    model.encode_inputs(model.image_token, images=tmp_path / "whole.png")


def test_a_picture_too_large_for_pil_is_an_error_that_says_how_to_go_on(
    model, tmp_path, monkeypatch
):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    picture(48, 36).save(tmp_path / "large.png")
    with pytest.raises(ValueError, match=r"large\.png: .*1728 pixels.*raise PIL\.Image\.MAX"):
        model.encode_inputs(model.image_token, images=tmp_path / "large.png")


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 900), (4000, 50)])
def test_extreme_shapes_are_what_the_processor_makes_of_them(model, size):
    text = f"{model.image_token} is"
    ours = model.encode_inputs(text, images=Image.new("RGB", size, "red"))
    columns, rows = ours.spans[0].shape
    assert 1 <= columns * rows <= 70 and (columns >= rows) == (size[0] >= size[1])
    assert ours.spans[0].boxes()[-1, 2:].tolist() == list(size)


def test_the_processors_failures_are_one_line_with_the_sizes(model, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("float division by zero\nand more")

    monkeypatch.setattr(type(model.processor), "__call__", fail)
    with pytest.raises(
        ValueError, match=r"\[\(48, 36\)\] \[width height\]\): float division by zero$"
    ):
        model.encode_inputs(model.image_token, images=picture())


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.new("RGB", (0, 5)), r"an image is \[0, 5\] \[width height\]: it has no pixel"),
        (np.zeros((0, 5, 3), np.uint8), r"an image is \[0, 5, 3\]: it has no pixel"),
        (np.full((8, 8, 3), np.nan), "values from nan to nan"),
        (np.zeros((8, 8, 4), np.uint8), "convert"),
        (np.zeros((8, 8), np.uint8), "convert"),
        (np.zeros((2, 8, 8, 3), np.uint8), r"\[2, 8, 8, 3\]"),
        (np.full((8, 8, 3), 200.0), "floats are in"),
        (np.full((8, 8, 3), -1, np.int32), "whole numbers 0 to 255"),
    ],
)
def test_an_image_that_would_be_misread_is_refused(model, image, message):
    with pytest.raises(ValueError, match=message):
        model.encode_inputs(model.image_token, images=[image])


def test_a_path_without_a_file_is_not_taken_for_base64(model):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.png"):
        model.encode_inputs(model.image_token, images="nowhere.png")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.wav"):
        model.encode_inputs(model.audio_token, audio="nowhere.wav")


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_with_unequal_image_counts(folder, side):
    model = HookedModel.from_pretrained(folder, dtype=torch.float64)
    token, images = model.image_token, [picture(seed=n) for n in range(3)]
    texts = [f"The {token} of {token}", "The cat", f"{token} is"]
    together = model(texts, images=images, padding_side=side)
    given = model.encode_inputs(texts, images=images, padding_side=side)
    assert all(
        ids[mask.bool()][0] == BOS
        for ids, mask in zip(*map(given.get, ("input_ids", "attention_mask")), strict=True)
    )
    assert leading(given["input_ids"][1][given["attention_mask"][1].bool()].tolist()) == 1
    for i, own in enumerate((images[:2], None, images[2:])):
        alone = model(texts[i], images=own)[0]
        keep = slice(-len(alone), None) if side == "left" else slice(len(alone))
        torch.testing.assert_close(together[i, keep], alone, atol=1e-10, rtol=0)
    swapped = model(texts, images=images[::-1], padding_side=side)
    assert (swapped - together).abs().max() > 1e-3  # the control: the order counts


@pytest.mark.parametrize("text", ["{} is", "<bos>{} is", "<bos><bos>{} is"])
@pytest.mark.parametrize(
    "name", ["adds BOS", "adds BOS and EOS", "adds nothing", "adds BOS unasked"]
)
def test_media_follow_the_same_bos_rule(bare, name, text):
    bare.set_processor(processor_of(TOKENIZERS[name]()))
    text = text.format(bare.image_token)
    on = bare.encode_inputs(text, images=[picture()])["input_ids"][0].tolist()
    off = bare.encode_inputs(text, images=[picture()], prepend_bos=False)["input_ids"][0].tolist()
    assert leading(on) == 1 and leading(off) == text.count("<bos>")
    assert on[1:] == off[leading(off) :]
    assert EOS not in on


def test_placeholders_and_media_must_be_as_many(model):
    token = model.image_token
    for text, images, found, given in (
        (f"{token} {token}", [picture()], 2, 1),
        ("The", [picture()], 0, 1),
    ):
        with pytest.raises(
            ValueError, match=f"holds {found} placeholders .*and {given} of kind image"
        ):
            model.encode_inputs(text, images=images)
    with pytest.raises(ValueError, match=r"holds 1 placeholders .*and 2 of kind audio"):
        model.encode_inputs(model.audio_token, audio=[sound(), sound()])
    with pytest.raises(ValueError, match=r"holds 1 placeholders .*and 0 of kind video"):
        model.encode_inputs(f"{model.video_token} {token}", images=[picture()])
    with pytest.raises(ValueError, match=r"1 placeholders|features"):
        model(f"{token} is")  # placeholders without any media


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # 5.10's own
def test_sound_in_every_form(model, tmp_path):
    text, clip = f"The {model.audio_token} is", sound()
    theirs = model.processor(text=text, audio=[clip], return_tensors="pt")
    wanted = model.encode_inputs(text, audio=[clip])
    same(wanted, theirs)
    assert torch.equal(model(text, audio=clip), model(**theirs))
    forms = {
        "alone": clip,
        "with its rate": (clip, 16_000),
        "list with its rate": [(clip, 16_000)],
        "samples in a list": clip.tolist(),
        "tensor": torch.tensor(clip),
    }
    for name, form in forms.items():
        given = model.encode_inputs(text, audio=form)
        assert torch.equal(given["input_features"], wanted["input_features"]), name


def write_wav(path: Path, samples: np.ndarray, rate: int = 16_000, n_channels: int = 1) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setparams((n_channels, samples.dtype.itemsize, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


@pytest.mark.parametrize(
    ("dtype", "full", "zero"), [(np.uint8, 128, 128), (np.int16, 32_768, 0), (np.int32, 2**31, 0)]
)
def test_whole_numbers_are_pcm_in_arrays_and_files(model, tmp_path, dtype, full, zero):
    values = (np.clip(sound(), -0.9, 0.9).astype(np.float64) * full).round()
    stored = (values + zero).astype(dtype)
    wanted = torch.tensor(values / full, dtype=torch.float32)
    for given in (stored, write_wav(tmp_path / "clip.wav", stored)):
        features = model.encode_inputs(model.audio_token, audio=given)["input_features"].flatten()
        torch.testing.assert_close(features[: len(wanted)], wanted, atol=1e-7, rtol=0)


def test_sound_that_would_be_misheard_is_refused_with_the_fix(model, tmp_path):
    token, stereo = model.audio_token, np.stack([sound(), sound(seed=1)])
    short = (sound() * 30_000).astype(np.int16)
    with pytest.raises(ValueError, match=r"clip is \[2, 90\].*: clip\.mean\(0\) mixes \[channel"):
        model.encode_inputs(token, audio=stereo)
    with pytest.raises(ValueError, match=r"stereo\.wav has 2 channels; .* soundfile\.read"):
        model.encode_inputs(token, audio=write_wav(tmp_path / "stereo.wav", short, n_channels=2))
    for given in ((sound(), 44_100), write_wav(tmp_path / "fast.wav", short, rate=44_100)):
        with pytest.raises(ValueError, match=r"44100 Hz.*resample\(clip, 44100, 16000\)"):
            model.encode_inputs(token, audio=given)
    with pytest.raises(ValueError, match=r"clip is \[0\]: it has no sample"):
        model.encode_inputs(token, audio=[np.zeros(0, np.float32)])
    with pytest.raises(
        ValueError, match=r"clip is \[128, 40\], as mel features are: .* raw samples"
    ):
        model.encode_inputs(token, audio=np.zeros((128, 40), np.float32))
    model.encode_inputs(token, audio=stereo.mean(0))  # the fix works


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # 5.10's own
def test_a_short_video_goes_in_whole_and_a_long_one_is_sampled(model):
    text = f"The {model.video_token} is"
    for n, kept in ((1, 1), (3, 3), (4, 4), (8, 4)):
        given = model.encode_inputs(text, videos=[film(n)])
        frames = torch.as_tensor(given["pixel_values_videos"])
        assert frames.flatten(0, -3).shape[0] == kept, n
        assert model(text, videos=film(n)).shape[1] == given["input_ids"].shape[1]
    theirs = model.processor(
        text=text, videos=[film()], do_sample_frames=False, return_tensors="pt"
    )
    same(model.encode_inputs(text, videos=[film()]), theirs)


def test_one_video_in_every_form(model):
    text, array = model.video_token, film()
    wanted = model.encode_inputs(text, videos=[array])
    forms = {
        "alone": array,
        "tensor": torch.tensor(array),
        "channels first": torch.tensor(array).permute(0, 3, 1, 2),
        "images": [Image.fromarray(frame) for frame in array],
        "row of images": [[Image.fromarray(frame) for frame in array]],
        "frames": list(array),
        "with the usual rate": (array, 24),
    }
    for name, form in forms.items():
        given = model.encode_inputs(text, videos=form)
        assert all(
            torch.equal(given[key], torch.as_tensor(value)) for key, value in wanted.items()
        ), name


def test_the_rate_of_a_video_sets_the_times_in_the_prompt(model):
    texts = [
        model.to_string(
            model.encode_inputs(model.video_token, videos=[(film(), rate)])["input_ids"][0]
        )
        for rate in (24, 0.5)
    ]
    assert "00:02" not in texts[0] and "00:02" in texts[1] and "00:04" in texts[1]


def test_short_and_long_videos_do_not_mix(model, tmp_path):
    token = model.video_token
    with pytest.raises(ValueError, match=r"\[3, 9\] frames"):
        model.encode_inputs(token * 2, videos=[film(3), film(9)])
    both = model.encode_inputs(token * 2, videos=[film(3), film(9)[:3]])
    counts = model.encode_inputs(token, videos=[film(3)])["input_ids"].shape[1]
    assert both["input_ids"].shape[1] > counts
    (tmp_path / "film.mp4").write_bytes(b"")
    with pytest.raises(ValueError, match="all files or all frames"):
        model.encode_inputs(token * 2, videos=[film(3), tmp_path / "film.mp4"])


def test_a_video_that_is_none_is_refused(model):
    token = model.video_token
    with pytest.raises(ValueError, match=r"a video is \[0, 24, 24, 3\]: it has no pixel"):
        model.encode_inputs(token, videos=film(0))
    frames = [picture(24, 24), picture(24, 30)]
    with pytest.raises(ValueError, match=r"frames of 2 sizes, \[\(24, 24\), \(24, 30\)\]"):
        model.encode_inputs(token, videos=[frames])


def test_images_sound_and_video_in_one_prompt(model):
    text = f"{model.video_token} The {model.image_token} of {model.audio_token} is"
    media = {"images": picture(), "audio": sound(), "videos": film(2)}
    logits, cache = model.run_with_cache(text, names_filter=["hook_tokens"], **media)
    ids = cache["hook_tokens"]
    assert logits.shape[:2] == ids.shape
    for token in (model.cfg.image_token_id, model.cfg.audio_token_id, model.cfg.video_token_id):
        assert (ids == token).any()
    for name, other in (
        ("images", picture(seed=5)),
        ("audio", sound(seed=5)),
        ("videos", film(2, seed=5)),
    ):
        assert not torch.equal(model(text, **(media | {name: other})), logits), name


def test_a_processor_that_was_passed_in_is_not_changed(bare):
    processor = processor_of(TOKENIZERS["adds BOS"]())
    before = state_of(processor.tokenizer), processor.to_json_string()
    bare.set_processor(processor)
    assert bare.processor is processor and bare.tokenizer is processor.tokenizer
    token = bare.image_token
    bare([f"{token} is", "The"], images=[picture()], padding_side="right")
    bare([f"{bare.audio_token} is", "The"], audio=[sound()], padding_side="left")
    bare(bare.video_token, videos=film())
    assert (state_of(processor.tokenizer), processor.to_json_string()) == before


def test_a_replaced_tokenizer_takes_the_processor_away(model):
    model.set_tokenizer(
        model.tokenizer, default_padding_side="right"
    )  # its own: the processor stays
    model.encode_inputs(model.image_token, images=picture())
    model.set_tokenizer(TOKENIZERS["adds nothing"]())
    with pytest.raises(ValueError, match="tokenizer was replaced"):
        model.encode_inputs("<|image|>", images=picture())
    model.set_processor(processor_of(TOKENIZERS["adds nothing"]()))
    assert model.encode_inputs(model.image_token, images=picture())["pixel_values"].shape[0] == 1


def test_too_long_a_prompt_with_media_is_an_error(model):
    with pytest.raises(ValueError, match="tokens; this model has 700 positions"):
        model.encode_inputs(model.image_token * 12, images=[picture(seed=n) for n in range(12)])


# -- chat -------------------------------------------------------------------------------------

TEMPLATE = """{{ bos_token }}{% for message in messages %}The {{ message.role }} {% if message.content is string -%}
{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == "text" %}{{ part.text }}{% else -%}
<|{{ part.type }}|>{% endif %}{% endfor %}{% endif %} of {% endfor %}{% if add_generation_prompt %}cat{% endif %}"""


@pytest.fixture
def chatty(folder) -> HookedModel:
    """With a template, as instruction-tuned checkpoints have one."""
    model = HookedModel.from_pretrained(folder)
    model.tokenizer.chat_template = TEMPLATE
    return model


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def test_messages_are_the_text_that_the_template_makes_of_them(chatty):
    messages = [{"role": "user", "content": "the cat is"}]
    text = chatty.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<bos>The user the cat is of") and text.endswith("cat")
    ids = chatty.prepare(messages)["input_ids"]
    assert torch.equal(ids, chatty.to_tokens(text)) and leading(ids[0].tolist()) == 1
    assert torch.equal(chatty(messages), chatty(text))
    _, cache = chatty.run_with_cache(messages, names_filter="hook_tokens")
    assert torch.equal(cache["hook_tokens"], ids)
    answered = [*messages, {"role": "assistant", "content": "Paris"}]
    (said,) = chatty.to_string(chatty.prepare(answered)["input_ids"])
    assert said.endswith("The assistant Paris of ")  # a finished turn, and nothing is opened
    with pytest.raises(TypeError, match="text"):
        chatty.encode_inputs([messages[0], "The"])


def test_a_processors_template_comes_first(chatty):
    chatty.processor.chat_template = "is {{ messages[0].content }}"
    (said,) = chatty.to_string(chatty.prepare([{"role": "user", "content": "cat"}])["input_ids"])
    assert said == "<bos>is cat"


def test_media_in_messages_are_media_beside_text(chatty, tmp_path):
    image, clip = picture(40, 20), sound()
    image.save(tmp_path / "picture.png")
    said = {"type": "text", "text": "the cat"}
    parts = [{"type": "image", "image": image}, said, {"type": "audio", "audio": clip}]
    messages = [user(*parts)]
    text = "<bos>The user <|image|>the cat<|audio|> of cat"
    wanted = chatty.encode_inputs(text, images=image, audio=clip)
    at_path = [user({"type": "image", "path": tmp_path / "picture.png"}, *parts[1:])]
    for given in (messages, at_path):
        inputs = chatty.prepare(given)
        assert all(torch.equal(inputs[key], value) for key, value in wanted.items())
        assert inputs.spans[0].size == (40, 20)
    places = [user({"type": "image"}, said, {"type": "audio"})]
    assert torch.equal(chatty(places, images=image, audio=clip), chatty(messages))
    both = chatty.prepare([messages, [user(said)]], padding_side="left", image_tokens=140)
    assert len(both.spans[0]) > 100 and both["attention_mask"][1].sum() < 20
    film_part = {"type": "video", "video": film(2)}
    videos = chatty.prepare([user(film_part, said)])
    assert [span.name for span in videos.spans] == ["frame[0]", "frame[1]"]


@pytest.mark.parametrize(
    ("parts", "given", "message"),
    [
        (
            [{"type": "image_url", "image_url": "x"}],
            {},
            "type 'image_url'; known are 'text', 'image'",
        ),
        (
            [{"type": "image", "image": picture()}],
            {"images": picture()},
            "images are in the messages",
        ),
        (
            [{"type": "image", "image": picture()}, {"type": "image"}],
            {},
            "of 2 parts for images, 1 carry theirs",
        ),
        ([{"type": "image"}], {}, "1 image placeholder tokens"),
        ([{"type": "text", "text": "The"}], {"images": picture()}, "holds 0 placeholders"),
    ],
)
def test_messages_that_do_not_fit_are_refused(chatty, parts, given, message):
    with pytest.raises(ValueError, match=message):
        chatty([user(*parts)], **given)


def test_a_base_checkpoint_shows_the_plain_form(model):
    parts = [{"type": "image", "image": picture()}, {"type": "text", "text": "What is this?"}]
    with pytest.raises(ValueError, match="no chat template") as error:
        model([user(*parts)])
    assert str(error.value).endswith("model('<|image|> What is this?', images=[...])")
    with pytest.raises(ValueError, match=r"model\('The cat'\)$"):
        model([{"role": "user", "content": "The cat"}])


# -- the checkpoint that ships ----------------------------------------------------------------


def test_the_shipped_checkpoints_text(tiny_model):
    text = "The capital of France is"
    assert tiny_model.to_str_tokens(text) == ["<bos>", "The", " capital", " of", " France", " is"]
    assert tiny_model.to_string(tiny_model.to_tokens("Zürich 東")[0]) == "<bos>Zürich 東"
    assert tiny_model.to_tokens(f"<bos>{text}").tolist() == tiny_model.to_tokens(text).tolist()
    assert tiny_model.to_tokens(text).tolist() == [tiny_model.tokenizer(text)["input_ids"]]
    together = tiny_model([text, "The"])
    torch.testing.assert_close(together[0], tiny_model(text)[0], atol=1e-4, rtol=0)


def test_the_shipped_checkpoints_media(tiny_model):
    given = tiny_model.encode_inputs(f"{tiny_model.image_token} is", images=picture(224, 224))
    assert int((given["input_ids"] == tiny_model.cfg.image_token_id).sum()) == 256
    logits = tiny_model(f"The {tiny_model.audio_token} is", audio=sound(1300))
    assert logits.shape[1] == 1 + 1 + 2 + 3 + 1 + tiny_model.to_str_tokens(
        "The  is", prepend_bos=False
    ).count(" ")


def test_a_byte_alone_is_shown_as_the_vocabulary_spells_it():
    model = HookedModel.from_pretrained("tiny")
    ids = model.to_tokens("the ∑")[0]
    words = model.to_str_tokens("the ∑")
    assert words[-3:] == ["<0xE2>", "<0x88>", "<0x91>"] and model.to_string(ids[1:]) == "the ∑"
    _, cache = model.run_with_cache("the ∑")
    assert cache["token_labels"][0][-3:] == words[-3:]
    assert model.logit_lens("the ∑", tokens=[int(ids[-1])]).name(int(ids[-1])) == "<0x91>"
