"""What a report says is what the model's own runs say, and its page can hold any text."""

import base64
import hashlib
import html
import io
import json
import re
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
import small
import talking
import torch
from PIL import Image, ImageDraw

from lens_gemma4 import HookedModel, Target, attribution, names, outputs, pages, question
from lens_gemma4.report import FOLDER, SCRIPTS, Report, report, run
from lens_gemma4.visible import token_label, visible
from lens_gemma4.watching import DIRECT, PARTS, SQUARES, WIDE

PROMPT = "The capital of France is"
HOSTILE = "</script><img src=x onerror=alert(1)> <!--<script> {{data}} & \u2028 \u05e9\u05dc\u05d5\u05dd \U0001f600"


@pytest.fixture(scope="module")
def found(tiny_model) -> Report:
    return report(tiny_model, PROMPT, " Paris", " Rome", name="tiny")


@pytest.fixture(scope="module")
def cache(tiny_model):
    """The same run by itself, everything kept."""
    return tiny_model.run_with_cache(PROMPT)[1]


@pytest.fixture(scope="module")
def ids(tiny_model) -> list[int]:
    return [tiny_model.to_single_token(word) for word in (" Paris", " Rome")]


# -- the numbers --------------------------------------------------------------------------------------


def test_the_readout_is_the_models(tiny_model, found, ids):
    logits = tiny_model(PROMPT)[0, -1]
    probs = logits.softmax(-1)
    order = logits.argsort(descending=True).tolist()
    for told, token in zip((found.data["answer"], found.data["versus"]), ids, strict=True):
        assert told["id"] == token
        assert told["logit"] == logits[token].item()
        assert told["probability"] == probs[token].item()
        assert told["rank"] == order.index(token)
    assert [one["id"] for one in found.data["next"]] == order[:10]
    assert [one["id"] for one in found.data["tokens"]] == tiny_model.to_tokens(PROMPT)[0].tolist()
    assert [one["label"] for one in found.data["tokens"][-2:]] == ["␣France", "␣is"]
    assert "Paris has probability 0.99" in repr(found)


def test_each_part_has_its_names_shape_and_length(tiny_model, found, cache):
    data = found.data
    assert [one["part"] for one in data["parts"]] == list(PARTS)
    for i, one in enumerate(data["parts"]):
        row = names.BY_NAME[one["name"]]
        assert one["standard"] == list(row.standard) and one["meaning"] == row.meaning
        assert not row.hf or one["transformers"] == row.hf
        for layer in range(tiny_model.cfg.n_layers):
            value = cache[one["name"].replace("{i}", str(layer))]
            assert one["shapes"][layer] == list(value.shape)
            told = data["norms"][i, layer]
            if one["part"] in SQUARES:
                assert told.isnan().all()
                continue
            want = value[0].flatten(1).double().norm(dim=1)
            torch.testing.assert_close(told.double(), want, rtol=1e-5, atol=0)
            other = (
                cache[one["name"].replace("{i}", str((layer + 1) % 8))][0].flatten(1).norm(dim=1)
            )
            if one["part"] != "attn.v_norm.hook_out":  # whose every head has RMS 1
                assert (told - other).abs().max() > 1e-3  # another block's would not do


def test_the_twin_of_a_part_holds_the_same_value(found, cache):
    twins = [(one["name"], same) for one in found.data["parts"] for same in one["same"]]
    assert len(twins) == 2
    for pair in twins:
        one, other = (cache[name.replace("{i}", "2")] for name in pair)
        assert torch.equal(one, other)


def test_the_lens_of_a_part_is_the_models_own_head_on_it(tiny_model, found, cache, ids):
    lens = found.data["lens"]
    assert lens["parts"] == list(WIDE) and lens["positions"] == list(range(6))
    for i, part in enumerate(WIDE):
        for layer in (0, 3, 7):
            logits = tiny_model.project_on_vocab(cache[f"blocks.{layer}.{part}"][0])
            top = logits.topk(5)
            torch.testing.assert_close(lens["logits"][i, layer], top.values, atol=1e-4, rtol=1e-5)
            assert torch.equal(lens["ids"][i, layer, :, 0], top.indices[:, 0])
            picked = logits.softmax(-1).gather(1, lens["ids"][i, layer].long())
            torch.testing.assert_close(
                lens["probabilities"][i, layer], picked, atol=1e-5, rtol=1e-4
            )
            ranks = (logits > logits[:, ids[:1]]).sum(-1)
            assert (
                lens["answer_ranks"][i, layer] - ranks
            ).abs().max() <= 1  # equal logits may swap
    bare = cache["blocks.3.hook_resid_mid"][0] @ tiny_model.W_U  # without the final norm
    here = lens["logits"][WIDE.index("hook_resid_mid"), 3]
    assert (bare.topk(5).values - here).abs().max() > 1


def test_the_logit_lens_is_logit_lens(tiny_model, found, ids):
    told = found.data["logit_lens"]
    want = tiny_model.logit_lens(PROMPT, top_k=5, tokens=ids)
    assert told["places"] == ["input", *map(str, range(8))]
    assert torch.equal(told["ids"][1:, :, 0], want.top_ids[:, 0, :, 0])
    torch.testing.assert_close(
        told["probabilities"][1:], want.top_probs[:, 0], atol=1e-5, rtol=1e-4
    )
    assert torch.equal(told["ranks"][1:], want.token_ranks[:, 0])
    torch.testing.assert_close(
        told["asked_logits"][1:], want.token_logits[:, 0], atol=1e-4, rtol=1e-5
    )
    first = tiny_model.logit_lens(PROMPT, points="resid_pre", layers=0, top_k=5)
    torch.testing.assert_close(
        told["probabilities"][:1], first.top_probs[:, 0], atol=1e-5, rtol=1e-4
    )
    assert (told["probabilities"][1] - told["probabilities"][2]).abs().max() > 0.01


def test_what_a_part_gives_directly_is_attribution_by_part_at_every_position(found, cache, ids):
    direct = found.data["direct"]
    assert direct["parts"] == list(DIRECT)
    by_part = attribution.by_part(cache, Target(*ids), positions=None).values[:, 0]  # [part pos]
    values = dict(zip(DIRECT, direct["values"], strict=True))
    torch.testing.assert_close(values["hook_attn_out"], by_part[1::2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(values["hook_mlp_out"], by_part[2::2], atol=1e-4, rtol=1e-4)
    # The stream holds all that was written before: the input, then attention and MLP of each block.
    written = by_part.cumsum(0)
    for part, so_far in (
        ("hook_resid_pre", written[0:-1:2]),
        ("hook_resid_mid", written[1::2]),
        ("hook_resid_sum", written[2::2]),
        ("hook_resid_post", written[2::2]),
    ):
        torch.testing.assert_close(values[part], so_far, atol=1e-3, rtol=1e-3)
    raw = cache["hook_logits_raw"][0]
    torch.testing.assert_close(
        values["hook_resid_post"][-1], raw[:, ids[0]] - raw[:, ids[1]], atol=1e-3, rtol=1e-4
    )
    # Without the layer scalars on the way it would be another number.
    assert (
        values["hook_attn_out"][0] - by_part[1] / found.data["blocks"][0]["gain"]
    ).abs().max() > 1


def test_attribution_adds_up_to_the_runs_own_number(found, cache, ids):
    told = found.data["attribution"]
    raw = cache["hook_logits_raw"][0, -1]
    own = (raw[ids[0]] - raw[ids[1]]).item()
    for view in ("parts", "heads", "sources"):
        split = told[view]
        assert split["own"] == pytest.approx(own, abs=1e-4)
        parts = split["values"].double().sum().item() + sum(split["others"].values())
        assert parts == pytest.approx(split["sum"], abs=1e-4) == pytest.approx(own, abs=1e-3)
        assert split["remainder"] == pytest.approx(own - parts, abs=1e-3)
    heads, sources = told["heads"], told["sources"]
    torch.testing.assert_close(sources["values"].sum(-1), heads["values"], atol=1e-4, rtol=1e-4)
    assert abs(heads["values"].sum().item() - own) > 0.1  # the input and the MLPs count
    want = attribution.by_head(cache, Target(*ids), positions=-1).values[:, :, 0, 0]
    torch.testing.assert_close(heads["values"], want, atol=1e-5, rtol=1e-5)


def difference_without(model, ids, layer, head, change) -> float:
    """The raw logit difference of a plain run in which one head's z is changed."""

    def edit(z, hook):
        change(z[:, :, head])

    raw = {}
    hooks = [
        (f"blocks.{layer}.attn.hook_z", edit),
        ("hook_logits_raw", lambda value, hook: raw.update(value=value[0, -1].clone())),
    ]
    model.run_with_hooks(PROMPT, fwd_hooks=hooks)
    return (raw["value"][ids[0]] - raw["value"][ids[1]]).item()


def zero(z):
    z.zero_()


def zero_last(z):
    z[:, -1] = 0


def mean(z):
    z[:] = z[:, 1:].mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("options", "change", "wrong"),
    [
        ({}, zero, zero_last),
        ({"ablate_last_only": True}, zero_last, zero),
        ({"ablation": "mean"}, mean, zero),
    ],
)
def test_the_ablation_map_is_a_run_without_each_head(tiny_model, ids, options, change, wrong):
    told = report(tiny_model, PROMPT, " Paris", " Rome", **options).data["ablation"]
    clean = difference_without(tiny_model, ids, 0, 0, lambda z: None)
    assert told["baseline"] == pytest.approx(clean, abs=1e-4)
    strongest = told["effects"].abs().flatten().argmax().item()
    apart = 0.0
    for layer, head in ((0, 1), (3, 2), divmod(strongest, 4)):
        effect = told["effects"][layer, head].item()
        assert effect == pytest.approx(
            difference_without(tiny_model, ids, layer, head, change) - clean, abs=1e-3
        )
        other = difference_without(tiny_model, ids, layer, head, wrong) - clean
        apart = max(apart, abs(effect - other))
    assert apart > 0.01
    assert told["mode"] == options.get("ablation", "zero")


def test_patterns_are_the_runs(tiny_model, found, cache):
    told = found.data["patterns"]
    assert told["queries"] == list(range(6))
    for layer in range(8):
        pattern = cache["pattern", layer][0]
        assert torch.equal(told["values"][layer], pattern)
        seen = found.data["visible"][tiny_model.cfg.layer(layer).kind]
        assert not pattern[:, ~seen].any() and seen.sum() == 21  # causal, within the window
    kept = report(tiny_model, PROMPT, ablation=None, max_pattern_values=8 * 4 * 6 * 2).data[
        "patterns"
    ]
    assert kept["queries"] == [4, 5] and torch.equal(kept["values"], told["values"][:, :, 4:])


def test_what_a_sliding_block_cannot_see_is_before_its_window(tiny_model):
    prompt = "The code is 42. When Mary and John went to the shop, John gave a drink to Mary."
    seen = report(tiny_model, prompt, ablation=None).data["visible"]
    last = len(seen["full"]) - 1
    assert seen["full"][last].all()
    assert seen["sliding"][last].tolist() == [key > last - 16 for key in range(last + 1)]


def test_by_itself_the_first_choice_is_asked_about(tiny_model, ids):
    data = report(tiny_model, PROMPT, ablation=None).data
    assert data["answer"]["id"] == ids[0] and data["versus"] is None and not data["answer_given"]
    assert data["target"] == "logit of ␣Paris" and data["ablation"] is None
    raw = tiny_model.run_with_cache(PROMPT)[1]["hook_logits_raw"][0, -1, ids[0]].item()
    assert data["attribution"]["heads"]["own"] == pytest.approx(raw, abs=1e-4)
    against = report(tiny_model, PROMPT, versus=ids[0], ablation=None).data
    assert against["answer"]["rank"] == 1  # the first choice but the one it is compared with


def test_the_model_is_left_as_it_was(tiny_model):
    before = tiny_model(PROMPT)
    report(tiny_model, PROMPT)
    assert torch.equal(tiny_model(PROMPT), before) and not tiny_model.list_hooks()


# -- other checkpoints --------------------------------------------------------------------------------


def test_blocks_that_borrow_say_what_they_lack(tmp_path):
    model = HookedModel.from_pretrained(talking.make(tmp_path / "lent", **small.SHARED))
    data = report(model, PROMPT, " Paris").data
    rows = {one["part"]: one for one in data["parts"]}
    assert rows["attn.hook_k"]["absent"][1] is None
    assert "borrows its keys and values from block 1" in rows["attn.hook_k"]["absent"][3]
    assert rows["attn.hook_k"]["shapes"][3] is None and rows["attn.hook_rot_k"]["shapes"][3]
    k = PARTS.index("attn.hook_k")
    assert data["norms"][k, 3].isnan().all() and not data["norms"][k, 1].isnan().any()
    assert [one["lender"] for one in data["blocks"]] == [None, None, None, 1, 2, 2]


@pytest.mark.parametrize("text", [{}, {"final_logit_softcapping": None}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_in_other_dtypes_and_without_a_softcap(tmp_path, dtype, text):
    model = HookedModel.from_pretrained(talking.make(tmp_path / "x", **text), dtype=dtype)
    found = report(model, PROMPT, " Paris", " Rome")
    heads = found.data["attribution"]["heads"]
    low = dtype == torch.bfloat16
    assert ("rounding" in heads["others"]) == low
    assert abs(heads["remainder"]) < (1e-3 if low else 1e-10)
    assert found.data["model"]["dtype"] == str(dtype).removeprefix("torch.")
    assert "<title>" in found.html()


# -- pictures -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tiny_model) -> Report:
    picture = Image.new("RGB", (384, 384), "white")
    ImageDraw.Draw(picture).ellipse((55, 55, 95, 95), fill="red")
    return report(
        tiny_model, "the shape at the top left is", " red", " blue", picture, image_tokens=70
    )


def test_a_picture_without_a_placeholder_stands_in_front(tiny_model, seen):
    assert seen.data["tokens"][2] == {
        "id": tiny_model.cfg.image_token_id,
        "label": "image[0] (0, 0)",
        "media": True,
    }
    (image,) = seen.data["images"]
    assert (image["columns"], image["rows"], len(image["positions"])) == (8, 8, 64)
    assert image["positions"] == list(range(2, 66)) and image["grid"][9] == [1, 1]
    assert seen.data["visible"]["sliding"][2, 65]  # patches see each other both ways
    address = image["picture"].removeprefix("data:image/png;base64,")
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(address))))
    assert shown.shape == (384, 384, 3)
    assert shown[75, 75].tolist() == [255, 0, 0] and shown[200, 200].tolist() == [255] * 3


def test_a_patch_is_ablated_where_it_stands(tiny_model, seen):
    (image,) = seen.data["images"]
    picture = Image.new("RGB", (384, 384), "white")
    ImageDraw.Draw(picture).ellipse((55, 55, 95, 95), fill="red")
    text = f"{tiny_model.image_token}the shape at the top left is"
    inputs = tiny_model.prepare(text, images=picture, image_tokens=70)
    ids = [tiny_model.to_single_token(word) for word in (" red", " blue")]

    def difference(patch) -> float:
        def edit(stream, hook):
            if patch is not None:
                stream[:, image["positions"][patch]] = 0

        raw = {}
        hooks = [
            ("blocks.0.hook_resid_pre", edit),
            ("hook_logits_raw", lambda value, hook: raw.update(value=value[0, -1].clone())),
        ]
        tiny_model.run_with_hooks(inputs, fwd_hooks=hooks)
        return (raw["value"][ids[0]] - raw["value"][ids[1]]).item()

    clean = difference(None)
    strongest = int(np.abs(image["ablation"]).argmax())
    for patch in (0, strongest):
        assert image["ablation"][patch] == pytest.approx(difference(patch) - clean, abs=1e-3)
    assert abs(image["ablation"][strongest] - image["ablation"][0]) > 0.01


# -- requests that cannot be met ----------------------------------------------------------------------


def test_bad_requests_say_what_is_wrong(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"is 2 tokens, \[' Paris', ' Rome'\]"):
        report(tiny_model, PROMPT, " Paris Rome")
    with pytest.raises(ValueError, match="two tokens to compare"):
        report(tiny_model, PROMPT, " Paris", " Paris")
    with pytest.raises(ValueError, match="the prompt is empty"):
        report(tiny_model, "")
    with pytest.raises(ValueError, match=r"id from 0 to 1543, got 9999"):
        report(tiny_model, PROMPT, 9999)
    with pytest.raises(ValueError, match=f"at most {question.MAX_POSITIONS}"):
        report(tiny_model, "The " * 1300)
    two, picture = f"{tiny_model.image_token} or {tiny_model.image_token}", Image.new("RGB", (9, 9))
    for images, given in ((None, 0), (picture, 1)):
        with pytest.raises(ValueError, match=rf"images, 2, and {given} .*image=, or --image"):
            report(tiny_model, two, image=images)
    assert question.ask(tiny_model, two, image=[picture] * 2, image_tokens=70).given is False
    with tiny_model.hooks(fwd_hooks=[("blocks.0.hook_attn_out", lambda value, hook: None)]):  # noqa: SIM117
        with pytest.raises(ValueError, match="the model has hooks"):
            report(tiny_model, PROMPT)
    text_only = HookedModel.from_pretrained(talking.make(tmp_path / "text"))
    with pytest.raises(ValueError, match="no vision embedder"):
        report(text_only, PROMPT, image=Image.new("RGB", (9, 9)))


def test_a_page_that_cannot_be_written_is_found_out_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setattr(
        HookedModel, "from_pretrained", lambda *a, **k: pytest.fail("the model was loaded")
    )
    with pytest.raises(FileNotFoundError, match="no folder"):
        run(output=tmp_path / "missing" / "page.html")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        run(output=tmp_path)
    (tmp_path / "notes.html").write_text("mine")
    with pytest.raises(FileExistsError, match="no page of this command"):
        run(output=tmp_path / "notes.html")
    monkeypatch.setattr(outputs.os, "access", lambda *a: False)  # root may write anywhere
    with pytest.raises(PermissionError, match="cannot be written"):
        run(output=tmp_path / "page.html")


def test_the_command_writes_the_page_and_says_where(tmp_path, capsys):
    page = tmp_path / "report.html"
    assert run(PROMPT, " Paris", output=page, ablation=None) == page
    assert f"{page}, " in capsys.readouterr().out
    run(PROMPT, " Rome", output=page, ablation=None)  # its own page is overwritten
    assert "logit of ␣Rome" in page.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [page]


# -- the page -----------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text inside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.open = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.open = tag in ("script", "style")
        if self.open:
            self.inside.append("")

    def handle_endtag(self, tag):
        self.open = False

    def handle_data(self, data):
        if self.open:
            self.inside[-1] += data


def held(text: str) -> dict:
    """The data of a page."""
    return json.loads(Elements(text).inside[1])


def unpacked(packed: dict) -> np.ndarray:
    kind = {"f4": "<f4", "i4": "<i4", "u2": "<u2", "u1": "|u1"}[packed["type"]]
    raw = zlib.decompress(base64.b64decode(packed["bytes"]))
    return np.frombuffer(raw, kind).reshape(packed["shape"])


def test_the_page_holds_the_numbers(found):
    data = held(found.html())
    assert np.array_equal(unpacked(data["norms"]), found.data["norms"].numpy(), equal_nan=True)
    assert np.array_equal(
        unpacked(data["logit_lens"]["ids"]), found.data["logit_lens"]["ids"].numpy()
    )
    effects = unpacked(data["ablation"]["effects"])
    assert np.array_equal(effects, found.data["ablation"]["effects"].numpy())
    assert data["answer"] == found.data["answer"] and data["prompt"] == PROMPT
    steps = data["patterns"]["steps"]
    for packed, block in zip(
        data["patterns"]["values"], found.data["patterns"]["values"], strict=True
    ):
        shares = unpacked(packed)
        printed = np.vectorize(lambda n: f"{n / steps:.4f}")(shares)
        assert (printed == np.vectorize(lambda p: f"{p:.4f}")(block.double().numpy())).all()
    coarse = np.vectorize(lambda n: f"{round(n / 100) / 100:.4f}")(shares)  # 8 bits would not do
    assert (coarse != printed).any()


def test_no_text_of_a_user_becomes_part_of_the_page(tiny_model):
    text = report(tiny_model, HOSTILE, name="</title><b>x", ablation=None).html()
    elements = Elements(text)
    assert [tag for tag, _ in elements.found if tag in ("script", "img", "b", "iframe")] == [
        "script"
    ] * 2
    assert held(text)["prompt"] == HOSTILE and held(text)["model"]["name"] == "</title><b>x"
    plain = Elements("<script>1</script><script>" + json.dumps(HOSTILE) + "</script>")
    assert [tag for tag, _ in plain.found].count("img") == 1  # what would have happened


def test_the_page_allows_its_own_script_and_nothing_else(found):
    text = found.html()
    elements = Elements(text)
    (policy,) = (
        given["content"]
        for tag, given in elements.found
        if given.get("http-equiv") == "Content-Security-Policy"
    )
    style, _, script = elements.inside
    for kind, inside in (("script", script), ("style", style)):
        known = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{known}'" in policy
    assert (
        policy.startswith("default-src 'none'")
        and "unsafe" not in policy
        and "connect" not in policy
    )
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not any(given.get("src") or given.get("style") for _, given in elements.found)
    assert outputs.MADE_HERE in text.encode()[:2000]


def test_every_file_of_the_page_is_used_and_short():
    files = {path.name for path in FOLDER.iterdir()}
    assert files == {*SCRIPTS, "page.html", "page.css"}
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 400, path.name
        assert "innerHTML" not in text and "eval(" not in text


def test_what_no_page_can_hold_is_refused():
    assert pages.encoded({"a": [1, 2.5, None, "x", float("nan")]}) == {
        "a": [1, 2.5, None, "x", None]
    }
    with pytest.raises(TypeError, match="cannot hold set"):
        pages.encoded({"a": {1}})
    assert json.loads(pages.in_html("<\u2028>&\ud800")) == "<\u2028>&\ud800"
    assert not set("<>&\u2028") & set(pages.in_html("<\u2028>&"))
    assert html.escape("x") == "x"


def test_a_page_of_the_demo_is_small(found, seen):
    assert len(found.html().encode()) < 1e6 and len(seen.html().encode()) < 5e6


# -- tokens to see ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" Paris", "␣Paris"),
        ("\n\t", "↵⇥"),
        ("\x00\x1b", "␀␛"),
        ("a\u202eb\u200b", "a<U+202E>b<U+200B>"),
        ("\u05e9\u05dc", "\u05e9\u05dc"),
        ("\U0001f469\u200d\U0001f467", "\U0001f469\u200d\U0001f467"),
        ("\u00a0\u2028\ud800", "<U+00A0><U+2028><U+D800>"),
    ],
)
def test_text_is_seen(text, shown):
    assert visible(text) == shown


def test_bytes_and_places_without_text_have_names(tiny_model):
    tokenizer = tiny_model.tokenizer
    byte = tokenizer.convert_tokens_to_ids("<0xF0>")
    assert token_label(tokenizer, byte) == "<0xF0>"
    assert token_label(tokenizer, tiny_model.to_single_token(" Paris")) == "␣Paris"
    assert token_label(tokenizer, 2) == "<bos>" and token_label(None, 7) == "token 7"
