"""Models of transformers as parents: GPT-2 and Llama, against the models themselves with masks."""

import json
from pathlib import Path

import pytest
import torch
from helpers.model_helpers import near, random_ids
from safetensors.torch import load_file, save_file

from parnas.errors import ParnasError
from parnas.pretrained.probe import measure_networks, probe
from parnas.pretrained.transformers_parent import TransformersParent, load_transformers

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

VOCABULARY, LENGTH = 40, 12


def make_model(family):
    torch.manual_seed(1)
    shared = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=2, n_embd=16, n_head=4, n_positions=32, **shared)
        ).eval()
    groups = {"llama": 4, "llama with groups": 2}[family]
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=groups,
        **shared,
    )
    return transformers.LlamaForCausalLM(config).eval()


FAMILIES = ["gpt2", "llama", "llama with groups"]


@pytest.fixture(params=FAMILIES)
def parent(request):
    return TransformersParent(make_model(request.param), LENGTH)


def read():
    return random_ids(2, LENGTH + 1, vocab_size=VOCABULARY)


@torch.no_grad()
def log_probs_of(model, ids):
    return model(ids[:, :-1]).logits.float().log_softmax(dim=-1)


@torch.no_grad()
def log_probs_with(parent, names):
    ids = read()
    parent.measure_importance(ids[:, :-1])
    hidden = parent.hidden(parent.embed(ids[:, :-1]), names)
    return parent.logits(hidden, 0).log_softmax(dim=-1)


def output_of(parent, number):
    """Return the last linear map of a layer of the model."""
    part = getattr(parent.blocks[number // 2], parent.names[number % 2])
    return getattr(part, parent.names[2 + number % 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_run_one_by_one_are_the_model(family):
    expected = log_probs_of(make_model(family), read())  # of a model that no parent has changed
    near(log_probs_with(TransformersParent(make_model(family), LENGTH), [None] * 4), expected)


@pytest.mark.parametrize("number", range(4))
def test_a_layer_that_is_left_out_adds_nothing(parent, number):
    found = log_probs_with(parent, ["i" if place == number else None for place in range(4)])
    for parameter in output_of(parent, number).parameters():
        parameter.data.zero_()
    near(found, log_probs_of(parent.model, read()))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("place", [0, 1])
def test_a_cut_layer_is_the_layer_without_the_other_channels(parent, number, place):
    cuts = [name for name in parent.alternatives[number] if "heads" in name or "d_inner" in name]
    name = cuts[place % len(cuts)]  # there are fewer where heads of keys and values cannot be divided
    found = log_probs_with(parent, [name if here == number else None for here in range(4)])
    smaller = parent.replacements[number][name]
    whole = getattr(parent.blocks[number // 2], parent.names[number % 2])
    last, cut = (getattr(part, parent.names[2 + number % 2]) for part in (whole, smaller))
    transposed = hasattr(last, "nf")
    weights = [each.weight.t() if transposed else each.weight for each in (last, cut)]
    kept = [any(torch.equal(column, own) for own in weights[1].t()) for column in weights[0].t()]
    assert 0 < sum(kept) == weights[1].shape[1] < len(kept)
    with torch.no_grad():
        weights[0].mul_(torch.tensor(kept, dtype=torch.float32))
    near(found, log_probs_of(parent.model, read()))


def test_a_window_hides_all_keys_but_the_last_ones(parent):
    window = LENGTH // 4
    found = log_probs_with(parent, [f"s:window={window}", "i", "i", "i"])
    # A position sees itself and the two before it: a text that differs farther back gives the same prediction.
    ids = read()
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCABULARY
    hidden = parent.hidden(parent.embed(changed[:, :-1]), [f"s:window={window}", "i", "i", "i"]).detach()
    other = parent.logits(hidden, 0).detach().log_softmax(dim=-1)
    near(other[:, window:], found[:, window:])
    assert not torch.allclose(other[:, window - 1], found[:, window - 1])


def test_a_probe_measures_each_layer_in_the_whole_model(parent):
    result = probe(parent, read(), lambda _: None, pairs=1)
    assert result.loss == pytest.approx(
        float(-log_probs_of(parent.model, read()).gather(2, read()[:, 1:, None]).mean()), abs=1e-5
    )
    for number, names in enumerate(parent.alternatives):
        for name in names:
            replaced = [name if place == number else own for place, own in enumerate(parent.layers)]
            (change,) = measure_networks(parent, read(), [replaced])
            assert tuple(result.changes[number][name]) == pytest.approx(tuple(change), abs=1e-5)


def save_model(folder: Path, model: object) -> Path:
    """Save a model and a tokenizer that splits at white space."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save_pretrained(folder, safe_serialization=True)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_saved_model_is_read_with_its_tokenizer(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    loaded, tokenizer = load_transformers(save_model(tmp_path / "model", model))
    near(log_probs_of(loaded.eval(), read()), log_probs_of(model, read()))
    assert tokenizer("w3 w7 w5")["input_ids"] == [3, 7, 5]


def test_a_model_without_some_weights_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", make_model("gpt2"))
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("h.1.attn.c_proj.weight"))
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ParnasError, match="lacks 1 weights of a gpt2 language model"):
        load_transformers(folder)


def test_a_model_that_contradicts_its_other_files_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "shapes", make_model("gpt2"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_embd": 32}))
    with pytest.raises(ParnasError, match="weights of other shapes"):
        load_transformers(folder)
    folder = save_model(tmp_path / "tokens", make_model("gpt2"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"new{number}" for number in range(5)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ParnasError, match="tokenizer of 45 tokens, but its model knows 40"):
        load_transformers(folder)


def save(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_without_a_model_that_can_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match="neither a parnas run nor"):
        load_transformers(tmp_path)
    with pytest.raises(ParnasError, match="type 'bert'"):
        load_transformers(save(tmp_path / "bert", model_type="bert"))
    with pytest.raises(ParnasError, match="parnas import"):
        load_transformers(save(tmp_path / "transfo-xl", model_type="transfo-xl"))
    pickled = save(tmp_path / "pickled", model_type="gpt2")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ParnasError, match="safetensors"):
        load_transformers(pickled)
    damaged = save(tmp_path / "damaged", model_type="gpt2")
    (damaged / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ParnasError, match="cannot be read by transformers"):
        load_transformers(damaged)
