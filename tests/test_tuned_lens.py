"""A fresh lens is the logit lens, a trained one is nearer to the model on text it has not seen, and a killed training
ends where an unbroken one does."""

import doctest
import json
import random
from pathlib import Path

import pytest
import torch
from small import KINDS, randomise
from tasks import sentence

from lens_gemma4 import HookedConfig, HookedModel, TunedLens, train_tuned_lens, tuned_lens
from lens_gemma4.tuned_lens import kl_by_block

IDS = torch.randint(3, 80, (6, 7), generator=torch.Generator().manual_seed(0))
QUICK = {"steps": 8, "batch_size": 2, "learning_rate": 1e-2, "progress": False}


def build(dtype=torch.float64, seed=3, **text):
    model = HookedModel(HookedConfig.from_hf(KINDS["text"] | text))
    randomise(model, seed=seed)
    return model.to(dtype)


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def trained(model):
    return train_tuned_lens(model, IDS, **QUICK)


def weights(lens):
    return torch.cat([value.flatten() for value in lens.state_dict().values()])


# -- the maps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fresh_lens_is_the_logit_lens_to_the_bit(dtype):
    model = build(dtype)
    lens = TunedLens(model)
    seen, plain = model.logit_lens(IDS, tuned=lens), model.logit_lens(IDS)
    assert torch.equal(seen.top_logits, plain.top_logits) and torch.equal(seen.kl, plain.kl)
    lens.biases[1].data += 0.5
    moved = model.logit_lens(IDS, tuned=lens).kl
    assert [torch.equal(a, b) for a, b in zip(moved, plain.kl, strict=True)] == [
        True,
        False,
        True,
        True,
    ]


def test_a_map_is_the_stream_and_an_affine_function_of_it(model):
    lens, stream = TunedLens(model), torch.randn(2, 3, model.cfg.d_model).double()
    torch.nn.init.normal_(lens.weights[1])
    torch.nn.init.normal_(lens.biases[1])
    whole = torch.eye(model.cfg.d_model) + lens.weights[1]
    wanted = torch.einsum("oi,bpi->bpo", whole, stream) + lens.biases[1]
    torch.testing.assert_close(lens(stream, 1), wanted)
    torch.testing.assert_close(lens(stream, -3), wanted)
    assert not torch.allclose(lens(stream, 1), torch.einsum("io,bpi->bpo", whole, stream))
    assert lens(stream, -1) is stream  # the last block has none
    assert torch.equal(lens(stream, 0), stream)


def test_the_dtype_is_the_streams_and_maps_are_wider():
    model = build(torch.bfloat16)
    lens, stream = TunedLens(model), torch.randn(2, model.cfg.d_model).bfloat16()
    assert {value.dtype for value in lens.parameters()} == {torch.float32}
    assert lens(stream, 0).dtype == torch.bfloat16


@pytest.mark.parametrize("layer", [4, -5])
def test_a_block_that_is_not_there_is_refused(model, layer):
    with pytest.raises(IndexError, match="blocks 0 to 3"):
        TunedLens(model)(torch.zeros(1, model.cfg.d_model).double(), layer)


# -- training -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentences():
    """Two lots of the kind of text that the shipped checkpoint was trained on, none in both."""
    rng = random.Random(5)
    drawn = list(dict.fromkeys(sentence(rng) for _ in range(300)))
    return drawn[40:], drawn[:40]


def test_it_comes_nearer_to_the_model_on_text_it_has_not_seen(tiny_model, sentences):
    texts, held_out = sentences
    assert not set(texts) & set(held_out)
    lens = train_tuned_lens(
        tiny_model,
        texts,
        held_out=held_out,
        steps=40,
        learning_rate=5e-3,
        progress=False,
    )
    plain, tuned = (torch.tensor(lens.record["held_out"][k]) for k in ("logit lens", "tuned lens"))
    assert (tuned[:-1] < 0.5 * plain[:-1]).all()
    assert tuned[-1] == plain[-1] == 0
    assert lens.record["losses"][-1] < 0.5 * lens.record["losses"][0]
    prompt = "The capital of France is"
    last = tiny_model.logit_lens(prompt, tuned=lens, layers=-1)
    assert torch.equal(last.top_logits[0], tiny_model(prompt).topk(10).values)
    # Each map is its own block's: another block's does worse, or as well where a block changes little.
    shifted = kl_by_block(tiny_model, held_out, lambda s, i: lens(s, max(i - 1, 0)) if i < 7 else s)
    assert (shifted[1:-1] > 0.95 * tuned[1:-1]).all()
    assert shifted[1:-1].mean() > 1.1 * tuned[1:-1].mean()


def test_the_model_never_changes():
    model = build(torch.float32)
    model.requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train_tuned_lens(model, IDS, **QUICK)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert not model.list_hooks()


def test_what_is_trained_is_frozen_afterwards(trained):
    assert not any(value.requires_grad for value in trained.parameters())
    assert weights(trained).abs().max() > 0


def gradients(model, rows, **given):
    lens = TunedLens(model)
    torch.nn.init.constant_(lens.biases[0], 0.1)
    loss = tuned_lens._accumulate(
        model, lens, tuned_lens._streams(model, rows), **{"max_bytes": 2**20} | given
    )
    return loss, torch.cat([value.grad.flatten() for value in lens.parameters()])


def test_padding_is_no_part_of_the_loss(model):
    """Each real token weighs alike, in whichever row it stands."""
    rows = [IDS[0], IDS[1, :3]]
    loss, gradient = gradients(model, rows)
    alone = [gradients(model, [row]) for row in rows]
    share = torch.tensor([7, 3], dtype=torch.float64) / 10
    assert loss == pytest.approx(
        sum(s.item() * one[0] for s, one in zip(share, alone, strict=True))
    )
    wanted = sum(s * one[1] for s, one in zip(share, alone, strict=True))
    torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=1e-9)
    by_row = (alone[0][1] + alone[1][1]) / 2
    assert (by_row - gradient).abs().max() > 1e-4


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_chunks_are_only_a_way_to_go(model, rows):
    loss, gradient = gradients(model, list(IDS[:2]))
    other = gradients(model, list(IDS[:2]), max_bytes=rows * 101 * 8)
    assert other[0] == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(other[1], gradient, atol=1e-12, rtol=1e-9)


def test_the_loss_is_the_divergence_from_the_final_distribution(model):
    lens = TunedLens(model)
    torch.nn.init.constant_(lens.biases[0], 0.1)
    seen = model.logit_lens(IDS[:1], tuned=lens, top_k=101)
    loss, _ = gradients(model, [IDS[0]])
    assert loss == pytest.approx(seen.kl[:-1].mean().item(), rel=1e-10)
    said = torch.empty_like(seen.top_logprobs).scatter_(-1, seen.top_ids, seen.top_logprobs)
    other_way = (said.exp() * (said - said[-1])).sum(-1)[:-1].mean().item()
    assert loss != pytest.approx(other_way, rel=1e-2)


def test_a_bias_moves_by_the_size_of_its_stream(model):
    """Streams of this family differ by orders of magnitude; one rate for all would drown the short ones."""
    lens = TunedLens(model)
    optimizer = tuned_lens._optimizer(lens)
    streams = [torch.full((5, 20), size).double() for size in (0.01, 1.0, 100.0, 7.0)]
    tuned_lens._measure_units(optimizer, streams)
    assert [group["unit"] for group in optimizer.param_groups] == pytest.approx([1, 0.01, 1, 100])


def test_the_rate_rises_and_falls():
    share = [tuned_lens._share_of_rate(step, 100) for step in range(100)]
    assert share[:10] == sorted(share[:10]) and share[10:] == sorted(share[10:], reverse=True)
    assert share[0] == pytest.approx(0.1) and max(share) > 0.9 and share[-1] == pytest.approx(0.01)


def test_every_text_is_seen_before_any_comes_again():
    rows = [torch.tensor([i]) for i in range(5)]
    seen = [int(row) for step in range(5) for row in tuned_lens._batch(rows, step, 3, seed=0)]
    assert sorted(seen[:5]) == sorted(seen[5:10]) == sorted(seen[10:]) == list(range(5))
    assert seen[:5] != seen[5:10]
    other = [int(row) for step in range(5) for row in tuned_lens._batch(rows, step, 3, seed=1)]
    assert other != seen


def test_the_same_seed_gives_the_same_lens(model, trained):
    assert torch.equal(weights(train_tuned_lens(model, IDS, **QUICK)), weights(trained))
    assert not torch.equal(weights(train_tuned_lens(model, IDS, **QUICK, seed=1)), weights(trained))


def test_ids_and_texts_are_cut_alike(tiny_model):
    texts = ["The capital of France is Paris.", "The language of Spain is Spanish."]
    ids = [tiny_model.to_tokens(text)[0] for text in texts]
    given = {"steps": 2, "batch_size": 2, "progress": False}
    of_texts = train_tuned_lens(tiny_model, texts, max_tokens=4, **given)
    of_ids = train_tuned_lens(tiny_model, [row[:4] for row in ids], **given)
    whole = train_tuned_lens(tiny_model, ids, **given)
    assert torch.equal(weights(of_texts), weights(of_ids))
    assert not torch.equal(weights(of_texts), weights(whole))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"texts": []}, "texts is empty"),
        ({"texts": "one text"}, "give a list"),
        ({"texts": [torch.tensor([], dtype=torch.long)]}, "one of them is"),
        ({"held_out": []}, "texts is empty"),
        ({"steps": 0}, "steps is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"save_every": 0}, "save_every is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_the_work(model, given, told, monkeypatch):
    monkeypatch.setattr(tuned_lens, "_streams", None)
    with pytest.raises(ValueError, match=told):
        train_tuned_lens(model, **{"texts": IDS, **QUICK} | given)


def test_the_divergence_by_block_is_a_mean_over_tokens(model):
    rows = [IDS[0], IDS[1, :3], IDS[2, :5]]
    per_token = torch.cat([model.logit_lens(row).kl[:, 0] for row in rows], dim=1)
    found = kl_by_block(model, rows, batch_size=2)
    torch.testing.assert_close(found, per_token.mean(-1), atol=1e-10, rtol=1e-9)
    of_rows = torch.stack([model.logit_lens(row).kl[:, 0].mean(-1) for row in rows]).mean(0)
    assert (of_rows - found).abs().max() > 1e-3


# -- a killed training --------------------------------------------------------------------------------


class Killed(Exception):
    pass


def killed_at(monkeypatch, step):
    """The training ends while it computes this step."""
    batch = tuned_lens._batch

    def dying(rows, at, *rest):
        if at == step:
            raise Killed
        return batch(rows, at, *rest)

    monkeypatch.setattr(tuned_lens, "_batch", dying)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_killed_training_ends_where_an_unbroken_one_does(tmp_path, monkeypatch, dtype):
    model, state = build(dtype), tmp_path / "state"
    unbroken = train_tuned_lens(model, IDS, **QUICK)
    with monkeypatch.context() as patched:
        killed_at(patched, 7)
        with pytest.raises(Killed):
            train_tuned_lens(model, IDS, **QUICK, state=state, save_every=3)
    seen = []
    batch = tuned_lens._batch
    monkeypatch.setattr(tuned_lens, "_batch", lambda *a: seen.append(a[1]) or batch(*a))
    resumed = train_tuned_lens(model, IDS, **QUICK, state=state, save_every=3)
    assert seen == [6, 7]  # from the last state on
    assert torch.equal(weights(resumed), weights(unbroken))
    assert resumed.record["losses"] == unbroken.record["losses"]
    again = train_tuned_lens(model, IDS, **QUICK, state=state)
    assert seen == [6, 7] and torch.equal(weights(again), weights(unbroken))  # nothing left to do
    last_steps_alone = train_tuned_lens(model, IDS, **QUICK | {"steps": 2})
    assert not torch.allclose(weights(last_steps_alone), weights(unbroken))


def test_a_state_that_was_not_finished_is_not_taken_for_one(tmp_path, monkeypatch, model, trained):
    state = tmp_path / "state"
    save, count = torch.save, []

    def torn(value, file):
        count.append(file)
        if len(count) == 2:
            Path(file).write_bytes(b"half of it")
            raise Killed
        save(value, file)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", torn)
        with pytest.raises(Killed):
            train_tuned_lens(model, IDS, **QUICK, state=state, save_every=2)
    assert state not in count and torch.load(state, weights_only=True)["losses"]
    state.with_name("state.part").write_bytes(b"what a kill leaves")
    resumed = train_tuned_lens(model, IDS, **QUICK, state=state)
    assert torch.equal(weights(resumed), weights(trained))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"learning_rate": 2e-2}, "learning_rate was 0.01, now 0.02"),
        ({"steps": 9}, "steps was 8, now 9"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"texts": IDS.flip(0)}, "texts was"),
    ],
)
def test_a_state_of_another_training_is_refused(tmp_path_factory, model, given, told):
    state = tmp_path_factory.getbasetemp() / "tuned_lens_state"
    train_tuned_lens(model, IDS, **QUICK, state=state)
    with pytest.raises(ValueError, match=told):
        train_tuned_lens(model, **{"texts": IDS, **QUICK, "state": state} | given)
    with pytest.raises(ValueError, match="unembedding was"):
        train_tuned_lens(build(seed=4), IDS, **QUICK, state=state)


# -- files --------------------------------------------------------------------------------------------


def test_a_saved_lens_comes_back(tmp_path, model, trained):
    trained.save_pretrained(tmp_path / "lens")
    lens = TunedLens.from_pretrained(tmp_path / "lens", model)
    assert torch.equal(weights(lens), weights(trained))
    assert lens.record == trained.record and lens.record["steps"] == 8
    assert not any(value.requires_grad for value in lens.parameters())
    assert {file.name for file in (tmp_path / "lens").iterdir()} == {
        "tuned_lens.json",
        "tuned_lens.safetensors",
    }
    kl = model.logit_lens(IDS, tuned=lens).kl
    assert torch.equal(kl, model.logit_lens(IDS, tuned=trained).kl)
    assert not torch.equal(kl, model.logit_lens(IDS).kl)


def test_it_fits_the_same_checkpoint_in_another_dtype(tmp_path):
    model = build(torch.bfloat16)
    train_tuned_lens(model, IDS, **QUICK).save_pretrained(tmp_path)
    wide = build(torch.bfloat16).to(torch.float32)
    lens = TunedLens.from_pretrained(tmp_path, wide)
    assert wide.logit_lens(IDS, tuned=lens).kl[:-1].mean() < wide.logit_lens(IDS).kl[:-1].mean()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"seed": 4}, "unembedding is"),
        ({"hidden_size": 24}, "d_model is 20 there and 24 here"),
        (
            {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
            "n_layers is 4 there and 2",
        ),
    ],
)
def test_a_lens_of_another_model_is_refused(tmp_path, trained, other, told):
    trained.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=told):
        TunedLens.from_pretrained(tmp_path, build(**other))


def test_the_final_norm_is_part_of_what_a_lens_fits(model):
    other = build()
    assert tuned_lens.fingerprint(other) == tuned_lens.fingerprint(model)
    other.ln_final.weight.data[0] *= 1.1
    assert tuned_lens.fingerprint(other) != tuned_lens.fingerprint(model)


def test_where_there_is_no_lens_it_says_so(tmp_path, model, trained):
    with pytest.raises(FileNotFoundError, match=r"tuned_lens.json is missing"):
        TunedLens.from_pretrained(tmp_path, model)
    trained.save_pretrained(tmp_path)
    (tmp_path / "tuned_lens.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"tuned_lens.safetensors is missing"):
        TunedLens.from_pretrained(tmp_path, model)


def test_an_unfinished_write_is_no_lens(tmp_path, monkeypatch, model, trained):
    trained.save_pretrained(tmp_path)

    def torn(tensors, file):
        Path(file).write_bytes(b"half of it")
        raise Killed

    monkeypatch.setattr(tuned_lens.safetensors.torch, "save_file", torn)
    with pytest.raises(Killed):
        trained.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="json"):
        TunedLens.from_pretrained(tmp_path, model)


def test_the_record_is_plain_json(tmp_path, trained):
    trained.save_pretrained(tmp_path)
    about = json.loads((tmp_path / "tuned_lens.json").read_text())
    assert about["n_layers"] == 4 and about["record"]["learning_rate"] == 1e-2
    assert len(about["record"]["losses"]) == 8


def test_the_examples_run():
    ran = doctest.testmod(tuned_lens, extraglobs={"torch": torch, "HookedModel": HookedModel})
    assert ran.attempted and not ran.failed
