"""The report's page in a real Chromium: it opens, stays alone, does what it says, and shows the run's numbers."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import talking
import torch
from PIL import Image, ImageDraw
from printed import kept_percent, number, percent, signed, whole

from lens_gemma4 import HookedConfig, HookedModel
from lens_gemma4.report import Report, report

pytestmark = pytest.mark.browser

BROWSER = os.environ.get("BROWSER") or "/usr/bin/chromium"
GIFTS = "When Mary and John went to the shop, John gave a drink to"
HOSTILE = (
    "</script><img src=x onerror=alert(1)> <!--<script>alert(2)</script> {{data}} &lt; \u2028 "
    "\u05e9\u05dc\u05d5\u05dd \u202eabc \U0001f469\u200d\U0001f467"
)


# -- a browser ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One that fails, and does not skip, when it is missing: who asks for these tests wants them run."""
    if shutil.which(BROWSER) is None:
        pytest.fail(
            f"there is no {BROWSER}: install a Chromium (Debian: apt-get install chromium) or set BROWSER"
        )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("playwright is not installed: pip install 'lens-gemma4[browser]'")
    with sync_playwright() as driver:
        # Without its own sandbox, which does not start for root in a container; it opens our files alone.
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


def eventually(check: Callable[[], None], seconds: float = 20) -> None:
    """What a page does in its own time: asserted until it holds, or time is up."""
    until = time.monotonic() + seconds
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


class Opened:
    """A page, and everything it complained of or asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        options = {"viewport": {"width": 1200, "height": 900}, **options}
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)  # machines may be busy
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.problems.append("a dialog"), dialog.dismiss()))
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]")
        self.path = path

    def text(self, selector: str) -> str:
        return " ".join(self.page.inner_text(selector).split(" "))

    def run(self, script: str) -> Any:
        return self.page.evaluate(script)

    def choose(
        self, block: int | None = None, head: int | None = None, pos: int | None = None
    ) -> None:
        """By the keyboard and the menus of the bar."""
        if block is not None:
            self.page.focus("#strip")
            self.page.keyboard.press("Home")
            for _ in range(block):
                self.page.keyboard.press("ArrowRight")
        for menu, value in (("#head-pick", head), ("#pos-pick", pos)):
            if value is not None:
                self.page.select_option(menu, str(value))
        self.settle()

    def settle(self) -> None:
        """Patterns are unpacked when they are first looked at: wait for those of what is chosen."""
        block = self.page.get_attribute("#strip", "aria-valuenow")
        head, pos = (self.page.input_value(menu) for menu in ("#head-pick", "#pos-pick"))
        self.page.wait_for_selector(f'html[data-pattern="{block} {head} {pos}"]')

    def click_in_map(self, selector: str, fraction: tuple[float, float]) -> None:
        """A place of a canvas, as shares of its width and height."""
        canvas = self.page.locator(f"{selector} .map canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        canvas.click(position={"x": fraction[0] * box["width"], "y": fraction[1] * box["height"]})
        self.settle()

    def check(self) -> None:
        assert self.problems == []
        assert [
            one
            for one in self.requests
            if one != self.path.as_uri() and not one.startswith("data:")
        ] == []

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def opened(chromium, request) -> Iterator[Any]:
    """Opens a page, and after the test looks whether it complained or asked for anything."""
    pages: list[Opened] = []

    def open_page(path: Path, **options: Any) -> Opened:
        pages.append(Opened(chromium, path, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.check()
        page.close()


# -- pages --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def gifts(tiny_model, folder) -> tuple[Report, Path]:
    found = report(tiny_model, GIFTS, " Mary", " John", name="tiny")
    return found, found.write_html(folder / "gifts.html")


@pytest.fixture(scope="module")
def picture(tiny_model, folder) -> tuple[Report, Path]:
    seen = Image.new("RGB", (384, 384), "white")
    ImageDraw.Draw(seen).ellipse((55, 55, 95, 95), fill="red")
    found = report(
        tiny_model, "the shape at the top left is", " red", " blue", seen, image_tokens=70
    )
    return found, found.write_html(folder / "picture.html")


@pytest.fixture(scope="module")
def large(tiny_model, folder) -> tuple[Report, Path]:
    """As many blocks and heads as the 12B, narrow and random, at 64 tokens."""
    config = HookedConfig.from_hf(_of_48_by_16(tiny_model.cfg.raw))
    model = HookedModel(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_weights():
            drawn = torch.randn(weight.shape, generator=generator)
            if name.endswith("layer_scalar"):
                drawn = 0.8 + 0.3 * torch.rand(1, generator=generator)
            elif weight.ndim == 1:
                drawn = 0.7 + 0.3 * drawn
            else:
                drawn = drawn / weight.shape[-1] ** 0.5
            weight.copy_(drawn)
    model.set_tokenizer(tiny_model.tokenizer)
    start = time.perf_counter()
    found = report(
        model, " ".join(["The capital of France is Paris"] * 10 + ["The capital of"]), ablation=None
    )
    path = found.write_html(folder / "large.html")
    assert len(found.data["tokens"]) == 64
    print(
        f"\n48 x 16 at 64 tokens: {time.perf_counter() - start:.1f} s, {path.stat().st_size / 1e6:.2f} MB"
    )
    return found, path


def _of_48_by_16(raw: dict[str, Any]) -> dict[str, Any]:
    text = {
        **raw["text_config"],
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 16,
        "global_head_dim": 32,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
        "sliding_window": 24,
    }
    text.pop("per_layer_config", None)
    return {**raw, "text_config": text}


# -- it opens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gifts", "picture"])
def test_it_opens_alone_and_soon(opened, request, name):
    _, path = request.getfixturevalue(name)
    page = opened(path)
    assert path.stat().st_size < 5e6
    paints = page.run("performance.getEntriesByType('paint').map(e => e.startTime)")
    print(
        f"\n{name}: {path.stat().st_size / 1e6:.2f} MB, first paint {paints[0]:.0f} ms, drawn {page.run('document.documentElement.dataset.ready')} ms"
    )
    assert not page.page.locator("#problem").is_visible()


def test_what_it_watches_for_would_be_seen(chromium, folder):
    """A page that asks, complains and runs a script that is not its own."""
    path = folder / "bad.html"
    path.write_text(
        '<html data-ready><meta http-equiv="Content-Security-Policy" content="script-src \'none\'"><img src="missing.png"><script>alert(1)</script>'
    )
    page = Opened(chromium, path)
    page.page.wait_for_timeout(200)
    with pytest.raises(AssertionError):
        page.check()
    assert any("missing.png" in one for one in page.requests) and page.problems
    page.close()


def test_48_blocks_of_16_heads(opened, large):
    found, path = large
    assert path.stat().st_size < 40e6
    page = opened(path)
    paints = page.run("performance.getEntriesByType('paint').map(e => e.startTime)")
    print(
        f"\n48 x 16: first paint {paints[0]:.0f} ms, drawn {page.run('document.documentElement.dataset.ready')} ms"
    )
    start = time.perf_counter()
    page.choose(block=47, head=15, pos=40)
    print(f"47 steps of the slider and two choices: {time.perf_counter() - start:.1f} s")
    assert page.text("#h-block") == "Block 47: full attention"
    share = found.data["patterns"]["values"][47, 15, 40]
    key = int(share.argmax())
    assert kept_percent(share[key].item()) in page.text("#pattern .said")
    assert page.page.locator("#heads button").count() == 16
    assert page.page.locator(".lens tbody tr").count() == 49


# -- numbers ------------------------------------------------------------------------------------------


def test_the_head_of_the_page_is_the_readout(opened, gifts):
    found, path = gifts
    page = opened(path)
    rows = page.page.locator("#answer tbody tr").all_inner_texts()
    for row, token in zip(rows, (found.data["answer"], found.data["versus"]), strict=False):
        assert token["label"] in row and number(token["logit"]) in row
        assert number(token["probability"]) in row
        assert ("first" if token["rank"] == 0 else whole(token["rank"])) in row
    difference = found.data["answer"]["logit"] - found.data["versus"]["logit"]
    assert signed(difference) in rows[2]
    text = page.text("#next")
    for token in found.data["next"]:
        assert (
            token["label"] in text
            and percent(token["probability"]) in text
            and number(token["logit"]) in text
        )
    chips = page.page.locator("#prompt .tok").all_inner_texts()
    assert chips == [token["label"] for token in found.data["tokens"]]


def test_every_part_can_be_clicked_and_says_what_it_is(opened, gifts):
    found, path = gifts
    page = opened(path)
    data = found.data
    layer, pos = 3, 5
    page.choose(block=layer, pos=pos)
    assert page.page.locator(".node").count() == len(data["parts"]) + 1  # and the scalar
    for i, part in enumerate(data["parts"]):
        page.page.click(f'[data-part="{part["part"]}"]')
        text = page.text("#details")
        ours, standard, hf = (
            [name.replace("{i}", str(layer)) for name in names]
            for names in ([part["name"], *part["same"]], part["standard"], [part["transformers"]])
        )
        assert all(name in text for name in [*ours, *standard, *hf])
        assert " \u00d7 ".join(map(str, part["shapes"][layer])) in text
        length = data["norms"][i, layer, pos].item()
        if length == length:
            assert number(length) in text
            other = number(data["norms"][i, layer, pos - 1].item())
            assert other not in text or other == number(length)  # not that of another position
        if part["part"] in data["direct"]["parts"]:
            k = data["direct"]["parts"].index(part["part"])
            assert signed(data["direct"]["values"][k, layer, pos].item()) in text
        if part["part"] in data["lens"]["parts"]:
            k = data["lens"]["parts"].index(part["part"])
            for token, logit, share in zip(
                *(
                    data["lens"][name][k, layer, pos].tolist()
                    for name in ("ids", "logits", "probabilities")
                ),
                strict=True,
            ):
                assert (
                    data["vocabulary"][token] in text
                    and number(logit) in text
                    and percent(share) in text
                )
    page.page.click('[data-part="layer_scalar"]')
    assert number(data["blocks"][layer]["layer_scalar"]) in page.text("#details .big")
    assert (
        page.page.locator('.node[aria-checked="true"]').get_attribute("data-part") == "layer_scalar"
    )


def test_the_lens_table_is_the_lens(opened, gifts):
    found, path = gifts
    page = opened(path)
    lens = found.data["logit_lens"]
    for place, pos in ((0, 0), (4, 14), (8, 9)):
        cell = page.page.locator(f'td[data-place="{place}"][data-pos="{pos}"]')
        assert cell.inner_text() == found.data["vocabulary"][lens["ids"][place, pos, 0].item()]
        cell.click()
        text = page.text("#lens-told")
        for token, share, logit in zip(
            *(lens[name][place, pos].tolist() for name in ("ids", "probabilities", "logits")),
            strict=True,
        ):
            assert (
                found.data["vocabulary"][token] in text
                and percent(share) in text
                and number(logit) in text
            )
        if place:
            assert page.text("#h-block").startswith(f"Block {place - 1}:")  # the drawing follows
        assert page.page.locator("#pos-pick").input_value() == str(pos)
    # The rank line: a dot for each place and asked token, said in words.
    dots = page.page.locator("#rank circle")
    assert dots.count() == 2 * len(lens["places"])
    dots.nth(4).hover()
    rank, share = (lens[name][4, 9, 0].item() for name in ("ranks", "asked_probabilities"))
    assert page.text("#tip") == f"␣Mary after block 3: rank {whole(rank)}, {percent(share)}"


def test_attribution_is_printed_with_its_remainder(opened, gifts):
    found, path = gifts
    page = opened(path)
    told = found.data["attribution"]
    sums = page.text("#sums")
    heads = told["heads"]
    for value in (
        heads["others"]["0_pre"],
        heads["values"].double().sum().item(),
        heads["others"]["mlps"],
        heads["sum"],
        heads["own"],
        heads["remainder"],
    ):
        assert number(value) in sums
    table = page.page.locator("#bars-numbers tbody tr")
    for layer in range(8):
        text = table.nth(layer).text_content()
        for part in (
            told["parts"]["values"][1 + 2 * layer],
            told["parts"]["values"][2 + 2 * layer],
        ):
            assert signed(part.item()) in text
    page.choose(block=6, head=2)
    assert (
        page.text("#head-map .said") == f"block 6, head 2: {signed(heads['values'][6, 2].item())}"
    )
    chips = page.page.locator("#sources .tok small").all_inner_texts()
    everyone = told["sources"]["values"].double().sum((0, 1)).tolist()
    assert chips == [signed(value) for value in everyone]
    page.page.click('#sources-switch [data-value="one"]')
    chips = page.page.locator("#sources .tok small").all_inner_texts()
    assert (
        chips
        == [signed(value) for value in told["sources"]["values"][6, 2].tolist()]
        != [signed(value) for value in everyone]
    )


def test_the_ablation_map_leads_to_the_pattern(opened, gifts):
    found, path = gifts
    page = opened(path)
    told = found.data["ablation"]

    def said(layer: int, head: int) -> str:
        effect = told["effects"][layer, head].item()
        return (
            f"block {layer}, head {head}: {signed(effect)}, to {number(told['baseline'] + effect)}"
        )

    strongest = divmod(int(told["effects"].abs().argmax()), 4)
    assert page.text("#ablation-map .said") == said(*strongest)  # the page opens there
    canvas = page.page.locator("#ablation-map .map canvas").bounding_box()
    cell = (canvas["width"] - 55) / 8
    page.click_in_map(
        "#ablation-map", ((52 + 5.5 * cell) / canvas["width"], (3 + 26 * 1.5) / canvas["height"])
    )
    assert page.text("#ablation-map .said") == said(5, 1)
    assert page.text("#pattern-caption").startswith("Block 5, head 1 ")
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("ArrowDown")
    page.settle()
    assert page.text("#ablation-map .said") == said(6, 2) != said(5, 1)
    assert page.text("#pattern-caption").startswith("Block 6, head 2 ")
    assert page.text("#head-map .said").startswith("block 6, head 2:")


def test_patterns_are_the_runs_and_follow_the_arrows(opened, gifts):
    found, path = gifts
    page = opened(path)
    values, tokens = found.data["patterns"]["values"], found.data["tokens"]
    page.choose(block=2, head=0, pos=14)
    page.page.focus("#heads [aria-checked=true]")
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("ArrowDown")
    page.settle()
    assert page.text("#pattern-caption").startswith("Block 3, head 1 full attention")
    assert page.run("document.activeElement.closest('#heads') !== null")  # the focus stays
    row = values[3, 1, 14]
    shares = page.page.locator("#query-text .tok small").all_inner_texts()
    assert shares == [kept_percent(share) for share in row.tolist()]
    page.page.focus("#pattern canvas[tabindex]")
    page.page.keyboard.press("ArrowUp")  # an earlier query, the same key
    page.settle()
    page.page.keyboard.press("ArrowLeft")
    page.settle()
    key = int(row.argmax())
    key = max(0, key - 1)
    share = kept_percent(values[3, 1, 13, key].item())
    assert (
        page.text("#pattern .said")
        == f"13 {tokens[13]['label']} → {key} {tokens[key]['label']}: {share}"
    )
    page.page.keyboard.press("End")  # no key of the map: nothing happens
    assert page.page.locator("#pos-pick").input_value() == "13"


def test_a_picture_has_its_maps(opened, picture):
    found, path = picture
    page = opened(path)
    (image,) = found.data["images"]
    assert page.page.locator("#images").is_visible()
    page.page.wait_for_selector("#image-list canvas")
    page.choose(block=7, head=1)
    titles = page.page.locator("#image-list figcaption").all_inner_texts()
    assert [title.split(":")[0] for title in titles] == [
        "As the model got it",
        "Attention",
        "Attribution",
        "Ablation",
    ]
    shares = found.data["patterns"]["values"][7, 1, -1][image["positions"]]
    read = found.data["attribution"]["sources"]["values"][7, 1][image["positions"]]
    wanted = (
        (shares, lambda value: percent(round(value * 10_000) / 10_000)),
        (read, signed),
        (torch.tensor(image["ablation"]), signed),
    )

    def check() -> None:
        said = page.page.locator("#image-list .said").all_inner_texts()
        for text, (values, printed) in zip(said, wanted, strict=True):
            most = int(values.abs().argmax())
            x, y = image["grid"][most]
            assert text == f"patch ({x}, {y}): {printed(values[most].item())}"

    eventually(check)
    shown = page.run(
        "(() => { const i = document.querySelector('.seen'); return [i.complete, i.naturalWidth, i.naturalHeight]; })()"
    )
    assert shown == [True, 384, 384]
    chip = page.page.locator("#prompt .tok.media")
    assert chip.inner_text() == "image[0]: 64 patches"


def test_what_a_block_borrows_is_drawn_so(opened, folder):
    """In bfloat16, whose rounding is a part of its own, and without ablation."""
    made = talking.make(folder / "lent", **small.SHARED)
    model = HookedModel.from_pretrained(made, dtype=torch.bfloat16)
    found = report(model, "The capital of France is", " Paris", ablation=None)
    page = opened(found.write_html(folder / "lent.html"))
    page.choose(block=3)
    assert "keys and values of block 1" in page.text("#block-facts")
    absent = page.page.locator(".node.absent").evaluate_all(
        "all => all.map(one => one.dataset.part)"
    )
    assert absent == ["attn.hook_k", "attn.hook_v", "attn.k_norm.hook_out"]
    page.page.click('[data-part="attn.hook_k"]')
    assert "Not here: block 3 borrows its keys and values from block 1" in page.text("#details")
    page.choose(block=1)
    assert page.page.locator(".node.absent").count() == 0
    assert "Not here" not in page.text("#details")
    assert "rounding of the run" in page.text("#sums")
    assert page.text("#ablation-lede") == "The map was left out of this report."


# -- hands and eyes -----------------------------------------------------------------------------------


def test_the_slider_goes_by_pointer_and_keys(opened, gifts):
    found, path = gifts
    page = opened(path)
    kinds = [block["kind"] for block in found.data["blocks"]]
    for layer in (0, 3, 7):
        cell = page.page.locator("#strip i").nth(layer).bounding_box()
        page.page.mouse.click(cell["x"] + cell["width"] / 2, cell["y"] + cell["height"] / 2)
        assert page.text("#block-value") == f"{layer} of 7, {kinds[layer]}"
        assert page.page.get_attribute("#strip", "aria-valuenow") == str(layer)
    page.page.keyboard.press("ArrowRight")
    assert page.page.get_attribute("#strip", "aria-valuenow") == "7"  # the end
    page.page.keyboard.press("ArrowLeft")
    assert page.text("#h-block") == "Block 6: sliding attention, window 16"
    first, last = (page.page.locator("#strip i").nth(i).bounding_box() for i in (0, 5))
    page.page.mouse.move(first["x"] + 3, first["y"] + 5)
    page.page.mouse.down()
    page.page.mouse.move(last["x"] + 5, last["y"] + 5, steps=4)
    page.page.mouse.up()
    assert page.page.get_attribute("#strip", "aria-valuenow") == "5"


def test_the_tab_key_reaches_everything_and_shows_where_it_is(opened, gifts):
    _, path = gifts
    page = opened(path)
    page.page.focus("body")
    reached, hidden = [], []
    for _ in range(60):
        page.page.keyboard.press("Tab")
        place, outline, stroke = page.run(
            """(() => { const at = document.activeElement; const look = getComputedStyle(at);
            const inner = at.querySelector && at.matches('.node') ? getComputedStyle(at.querySelector('rect')).strokeWidth : '0';
            const home = at.closest('[id]'); return [home ? home.id : at.tagName, look.outlineStyle, inner]; })()"""
        )
        if place == "BODY":
            break
        reached.append(place)
        if outline == "none" and not float(stroke.rstrip("px")) > 3:
            hidden.append(place)
    wanted = "prompt strip head-pick pos-pick diagram lens-box head-map sources-switch sources ablation-map heads pattern query-text".split()
    assert [place for place in wanted if place in reached] == wanted
    assert sorted(wanted, key=reached.index) == wanted  # from top to bottom
    assert hidden == [] and len(reached) < 40  # groups are one stop each


def test_the_drawing_is_walked_by_arrows(opened, gifts):
    _, path = gifts
    page = opened(path)
    page.page.focus('.node[aria-checked="true"]')
    page.page.keyboard.press("Home")
    assert page.text("#details h3") == "resid_pre"
    page.page.keyboard.press("ArrowRight")
    assert page.text("#details h3") == "ln1"
    assert page.run("document.activeElement.dataset.part") == "ln1.hook_out"


def test_controls_have_names_and_roles(opened, gifts):
    _, path = gifts
    page = opened(path)
    nameless = page.run(
        """[...document.querySelectorAll('[role=application], [role=radiogroup], [role=slider], [role=grid], [role=img], select, button, .node')]
        .filter(one => !(one.getAttribute('aria-label') || one.getAttribute('aria-labelledby') || one.closest('label') || one.textContent.trim()))
        .map(one => one.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    twice = page.run(
        "(() => { const ids = [...document.querySelectorAll('[id]')].map(one => one.id); return ids.length - new Set(ids).size; })()"
    )
    assert twice == 0


@pytest.mark.parametrize("width", [1600, 1200, 700, 420])
def test_nothing_runs_out_of_the_window(opened, picture, width):
    page = opened(picture[1], viewport={"width": width, "height": 800})
    page.page.wait_for_selector("#image-list canvas")
    assert page.run("document.documentElement.scrollWidth - innerWidth") <= 0


def luminance(colour: str) -> float:
    red, green, blue = (float(part) for part in colour.split("(")[1].rstrip(")").split(",")[:3])
    linear = [
        (v / 255 / 12.92) if v < 10 else ((v / 255 + 0.055) / 1.055) ** 2.4
        for v in (red, green, blue)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_light_and_dark(opened, gifts, scheme):
    page = opened(gifts[1], color_scheme=scheme)
    paper = luminance(page.run("getComputedStyle(document.body).backgroundColor"))
    assert (paper > 0.9) == (scheme == "light")
    pairs = page.run(
        """[...document.querySelectorAll('.lens td, .tok, .lede, figcaption, .note, .tick, .answers td')].map(one => {
        let place = one; let back = 'rgba(0, 0, 0, 0)';
        while (place && (back === 'rgba(0, 0, 0, 0)')) { back = getComputedStyle(place).backgroundColor; place = place.parentElement; }
        return [one.matches('text') ? getComputedStyle(one).fill : getComputedStyle(one).color, back]; })"""
    )
    assert len(pairs) > 150
    for ink, back in pairs:
        light, dark = sorted((luminance(ink), luminance(back)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, back)


def test_colours_follow_when_the_scheme_changes(opened, gifts):
    page = opened(gifts[1], color_scheme="light")
    cell = 'getComputedStyle(document.querySelector(\'td[data-place="8"][data-pos="14"]\')).backgroundColor'
    light = luminance(page.run(cell))
    assert light < 0.1

    def shown(least: float, most: float) -> None:
        assert least <= luminance(page.run(cell)) <= most

    page.page.emulate_media(color_scheme="dark")
    eventually(lambda: shown(0.5, 1))
    page.page.emulate_media(media="print")  # on paper it is light whatever the screen was
    eventually(lambda: shown(light, light))
    assert luminance(page.run("getComputedStyle(document.body).backgroundColor")) == 1


def test_paper_shows_every_section_whole(opened, gifts, folder):
    page = opened(gifts[1], viewport={"width": 720, "height": 1000})
    page.page.emulate_media(media="print")
    clipped = page.run(
        """[...document.querySelectorAll('section, figure, .lens-box, .details, .tokens')].filter(one => one.getClientRects().length
        && (one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1) && getComputedStyle(one).overflow !== 'visible')
        .map(one => one.id || one.className)"""
    )
    assert clipped == []
    hidden = page.run(
        "[...document.querySelectorAll('section:not([hidden]) h2')].filter(one => !one.getClientRects().length).length"
    )
    assert hidden == 0
    assert not page.page.locator("nav").is_visible()
    page.page.pdf(path=folder / "gifts.pdf", format="A4", print_background=True)
    assert (folder / "gifts.pdf").stat().st_size > 20_000


def test_any_text_is_text(opened, tiny_model, folder):
    found = report(tiny_model, HOSTILE, name="</title><b>x", ablation=None)
    page = opened(found.write_html(folder / "hostile.html"))
    assert (
        page.page.title() == f"{HOSTILE} · lens_gemma4".replace("\u2028", " ")
        or HOSTILE.split(" ")[0] in page.page.title()
    )
    chips = page.page.locator("#prompt .tok").all_text_contents()
    assert chips == [token["label"] for token in found.data["tokens"]] and "<0xF0>" in chips
    assert page.text("#model-name") == "</title><b>x"
    assert page.page.locator("img").count() == 0 and page.page.locator("b").count() <= 6
    assert page.page.locator("script").count() == 2
    for key in ("Tab", "ArrowRight"):
        page.page.keyboard.press(key)
