"""Import of a Transformer-XL: equal to the model of transformers 4.35.2, and each refusal is one message.

It comes with `pip install -e '.[parity]'`; in CI (CI=true) its absence is a failure, elsewhere a skip.
"""

import json
import os
import pickle
import re

import pytest
import torch
from conftest import make_corpus
from helpers.command_helpers import refusal, result_of, run_command
from helpers.model_helpers import model_config, random_ids, randomise, require_parity
from reference import make_transfo_xl

import parnas
from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.pretrained.import_transfo_xl import import_settings
from parnas.pretrained.transfo_xl import convert, read_transfo_xl
from parnas.runs.run import Run
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

LAYERS, SEGMENT, CUTOFFS, DIVIDED = 2, 5, (4, 9, 15), {"cutoffs": (4, 9, 15), "div_val": 4}
HEADS = {
    "one cluster": {},
    "one cluster, untied": {"tie_weights": False},
    "adaptive": {"cutoffs": CUTOFFS},
    "adaptive, untied": {"cutoffs": CUTOFFS, "tie_weights": False},
    "div_val 4": DIVIDED,
    "div_val 4, untied": {**DIVIDED, "tie_weights": False},
    "div_val 4, own projections": {**DIVIDED, "tie_projs": [False] * 4},
    "div_val 4, untied tables": {**DIVIDED, "tie_weights": False, "tie_projs": [False, True, True, True]},
    "div_val 4, all tied": {**DIVIDED, "tie_projs": [True] * 4},
}
ORIGINAL = ["model.mem_len=8", "model.same_length=false", "model.clamp_len=null", "model.dropout=0", "model.norm=post"]
"""Settings that the weights alone do not say."""


_installed = pytest.fixture(scope="module", autouse=True)(require_parity)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A corpus, with a list of its words in no order."""
    corpus = make_corpus(tmp_path_factory.mktemp("text"))
    words = ["<eos>", *sorted({*(corpus / "train.txt").read_text().split()}), "<unk>"]
    (corpus / "words").write_text("\n".join(words))
    return corpus


@pytest.fixture
def settings(text):
    return [f"data.corpus={text}", f"data.tokenizer.vocabulary={text / 'words'}", f"data.tgt_len={SEGMENT}"]


@pytest.fixture(scope="module")
def size(text):
    return len((text / "words").read_text().split("\n"))


def make_model(size, shared=True, **given):
    changes = {key: given.pop(key) for key in {*given} - {*type(model_config()).model_fields}}
    changes = {"dropout": 0.25, "dropatt": 0.125, **changes}
    shape = {"d_model": 64, "n_heads": 4, "d_head": 10, "d_inner": 48, "mem_len": 8, "share_biases": shared}
    return randomise(make_transfo_xl(model_config(**shape, **given), LAYERS, size, **changes), std=0.15).eval()


def save(model, folder, safe=True):
    model.save_pretrained(folder, safe_serialization=safe)
    return folder


def save_original(model, folder):
    """Write the weights as the original code does, without config.json and with the logits of tails in reverse order.

    In its softmax, log p(tail i) is column -i of the head (proj_adaptive_softmax.py).
    """
    folder.mkdir(exist_ok=True)
    state = {name.removeprefix("transformer."): each for name, each in model.state_dict().items()}
    if "r_w_bias" in state:  # the layers of the original have them as arguments
        state = {name: each for name, each in state.items() if not re.search(r"dec_attn\.r_._bias", name)}
    for name in {"crit.cluster_weight", "crit.cluster_bias"} & {*state}:
        state[name] = state[name].flip(0)
    torch.save(state, folder / "model.pt")
    return folder


def convert_with(folder, settings):
    model = read_transfo_xl(folder)
    config = import_settings(model, None, settings)
    return convert(model, config), config


@torch.no_grad()
def assert_equal(ours, theirs, size):
    """Compare log-probabilities over three segments with memory, and the losses of the first one."""
    memory, mems = None, [torch.zeros(0, 2, 64) for _ in range(LAYERS)]
    ids = random_ids(2, 3 * SEGMENT, vocab_size=size)
    for part in ids.split(SEGMENT, dim=1):
        found = ours(part, memory)
        memory = found.memory
        log_probs = ours.head.log_probs(found.hidden.flatten(0, 1)).view(2, SEGMENT, size)
        output = theirs(part, mems=mems)
        mems = output.mems
        torch.testing.assert_close(log_probs, output.prediction_scores, atol=1e-5, rtol=0)
    nll, _ = ours.nll(ids[:, :-1], ids[:, 1:])
    output = theirs(ids, labels=ids.clone(), mems=[torch.zeros(0, 2, 64) for _ in range(LAYERS)])
    torch.testing.assert_close(nll.flatten().sort().values, output.losses.flatten().sort().values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared u, v", "own u, v"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_a_model_of_transformers_is_the_same(head, shared, safe, size, settings, tmp_path):
    reach = {"same_length": True, "clamp_len": 5} if shared else {}
    theirs = make_model(size, shared, **head, **reach)
    ours, config = convert_with(save(theirs, tmp_path, safe), settings)
    assert_equal(ours, theirs, size)
    model = config.model
    assert (model.mem_len, model.dropout, model.attention_dropout) == (8, 0.25, 0.125)
    assert (model.cutoffs, model.div_val) == (head.get("cutoffs", ()), head.get("div_val", 1))
    assert (model.share_biases, model.same_length, model.clamp_len) == (shared, shared, 5 if shared else None)
    assert model.tie_weights == (head.get("tie_weights", True) and head.get("tie_projs", [0, True])[1])


@pytest.mark.parametrize("shared", [True, False], ids=["shared u, v", "own u, v"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_the_names_of_the_original_are_the_same(head, shared, size, settings, tmp_path):
    theirs = make_model(size, shared, **head)
    given = [*settings, *ORIGINAL]
    if head.get("cutoffs") and not head.get("div_val"):
        given.append(f"model.cutoffs={list(CUTOFFS)}")
    ours, _ = convert_with(save_original(theirs, tmp_path / "model"), given)
    assert_equal(ours, theirs, size)


def test_weights_in_half_precision_or_of_several_processes_are_read(size, settings, tmp_path):
    theirs = make_model(size)
    for parameter in theirs.parameters():
        parameter.data = parameter.data.half().float()
    folder = save_original(theirs, tmp_path / "model")
    state = {f"module.{name}": each.half() for name, each in torch.load(folder / "model.pt", weights_only=True).items()}
    torch.save(state, tmp_path / "half.pt")
    ours, _ = convert_with(tmp_path / "half.pt", [*settings, *ORIGINAL])
    assert_equal(ours, theirs, size)


@pytest.fixture(scope="module")
def imported(text, size, tmp_path_factory):
    """The run of an imported model, and the model."""
    folder = tmp_path_factory.mktemp("imported")
    theirs = make_model(size, **DIVIDED)
    options = ["data.batch_size=4", "train.steps=20", "runtime.device=cpu", "runtime.precision=fp32"]
    given = [f"data.corpus={text}", f"data.tokenizer.vocabulary={text / 'words'}", f"data.tgt_len={SEGMENT}"]
    command = ("import", save(theirs, folder / "model"), *given, *options, "runtime.threads=1", "-q")
    assert run_command(*command, "--run", folder / "run") == 0
    return Run(folder / "run"), theirs


def test_the_run_is_that_of_a_finished_retraining(imported, text, size):
    run, theirs = imported
    summary = run.summary()
    assert (summary.kind, summary.arch, summary.steps, summary.inherited) == ("retrain", "sfsf", 20, None)
    assert [record.split for record in run.metrics()] == ["valid"]
    loaded = parnas.load(run)
    assert loaded.step == summary.best.step == 20
    assert_equal(loaded.model, theirs, size)
    assert loaded.tokenizer.spellings()[1:] == [f" {word}" for word in (text / "words").read_text().split("\n")[1:]]
    row = parnas.evaluate(run).table.iloc[0]
    assert row["ppl"] == pytest.approx(summary.valid.ppl, rel=1e-6)
    # The text of one row, read by the model of transformers in segments.
    ids = torch.tensor([[0, *loaded.tokenizer.encode((text / "valid.txt").read_text())]])
    mems, total = [torch.zeros(0, 1, 64) for _ in range(LAYERS)], 0.0
    with torch.no_grad():
        for start in range(0, ids.shape[1] - 1, SEGMENT):
            part = ids[:, start : start + SEGMENT + 1]
            output = theirs(part[:, :-1], mems=mems)
            mems = output.mems
            total -= output.prediction_scores.gather(2, part[:, 1:, None]).double().sum().item()
    assert parnas.evaluate(run, overrides={"evaluation.batch_size": 1}).table.iloc[0]["ppl"] == pytest.approx(
        torch.tensor(total / (ids.shape[1] - 1)).exp().item(), rel=1e-5
    )
    assert "imported from" in (run.folder / "run.log").read_text()


def test_probe_search_and_compress_work_on_it(imported, tmp_path, capsys):
    run, _ = imported
    probed = result_of(capsys, "probe", run.folder, "--tokens", 100, "--pairs", 0, "--out", tmp_path / "probe")
    assert probed["layers"] == ["s", "f", "s", "f"]
    short = ("search.evolution_steps=2", "search.rerank_top_k=2", "-q")
    command = ("compress", run.folder, "--within", "macs=0.9", "--no-baselines", "--run", tmp_path / "small")
    assert run_command(*command, *short) == 0
    search, child = Run(tmp_path / "small" / "search"), Run(tmp_path / "small" / "child")
    assert search.config().search.parent == str(run.folder.resolve())
    assert (search.summary().steps, child.summary().steps) == (8, 4), "shares of train.steps, 8 at least"
    assert child.config().data.tokenizer.vocabulary == str((child.tokenizer / "tokenizer.json").resolve())


def test_it_is_a_teacher_and_trains_on(imported, tmp_path):
    run, _ = imported
    config = run.config()
    student = retrain(
        config.replace(model__arch="sf", train__steps=2, train__teachers=(str(run.folder),)), tmp_path / "run", Silent()
    )
    assert student.finished()
    # As after any finished retraining, more steps train for longer.
    again = parnas.import_model(run.folder.parent / "model", config, run=tmp_path / "long")
    assert again.summary.steps == 20
    trained = retrain(config.replace(train__steps=22), tmp_path / "long", Silent())
    assert trained.summary().steps == 22


def test_an_import_that_was_cut_off_is_finished(imported, tmp_path):
    run, _ = imported
    arguments = (run.folder.parent / "model", run.config())
    first = parnas.import_model(*arguments, run=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    again = parnas.import_model(*arguments, run=tmp_path / "run")
    assert (again.summary.valid, again.summary.best) == (first.summary.valid, first.summary.best)
    with pytest.raises(ParnasError, match="is finished"):
        parnas.import_model(*arguments, run=tmp_path / "run")


# Refusals.


def test_a_pickled_module_is_not_read(size, settings, tmp_path, capsys):
    model = make_model(size)
    torch.save(model, tmp_path / "model.pt")
    message = refusal(capsys, "import", tmp_path, *settings, *ORIGINAL, "--run", tmp_path / "run")
    assert "state_dict()" in message
    assert not (tmp_path / "run").exists()


class Hostile:
    def __reduce__(self):
        return os.mkdir, (os.environ["HOSTILE"],)


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_no_code_is_executed(write, size, settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOSTILE", str(tmp_path / "executed"))
    write({"word_emb.emb_layers.0.weight": Hostile()}, tmp_path / "pytorch_model.bin")
    assert "not" in refusal(capsys, "import", tmp_path, *settings, *ORIGINAL, "--run", tmp_path / "run")
    (tmp_path / "words").write_bytes(pickle.dumps(Hostile()))
    save(make_model(size), tmp_path)
    words = f"data.tokenizer.vocabulary={tmp_path / 'words'}"
    assert "idx2sym" in refusal(capsys, "import", tmp_path, *settings, words, "--run", tmp_path / "run")
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pre_lnorm", True, "pre_lnorm True"),
        ("attn_type", 1, "attn_type 1"),
        ("sample_softmax", 100, "sample_softmax 100"),
        ("layer_norm_epsilon", 1e-3, "layer_norm_epsilon 0.001"),
        ("ext_len", 4, "ext_len 4"),
        ("model_type", "gpt2", "model_type transfo-xl"),
        ("n_head", 2, "n_head is 2, but the weights have 4"),
        ("d_embed", 32, "d_embed is 32, but the weights have 64"),
        ("untie_r", True, "untie_r is True, but the weights have False"),
        ("cutoffs", [4, 9], "cutoffs is [4, 9], but the weights have [4, 9, 15]"),
        ("tie_word_embeddings", False, "out_layers.0.weight is not tied to the embedding, but it is missing"),
        ("clamp_len", "far", "model.clamp_len is 'far'"),
        ("mem_len", -3, "model.mem_len is -3"),
        ("dropout", 2, "model.dropout is 2"),
    ],
)
def test_a_description_of_another_model_is_refused(key, value, message, size, settings, tmp_path, capsys):
    folder = save(make_model(size, **DIVIDED), tmp_path / "model")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, key: value}))
    assert message in refusal(capsys, "import", folder, *settings, "--run", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_all_missing_settings_are_one_message(size, tmp_path, capsys):
    save_original(make_model(size, cutoffs=CUTOFFS), tmp_path)
    message = refusal(capsys, "import", tmp_path, "--run", tmp_path / "run")
    needed = ("data.corpus", "data.tokenizer.vocabulary", "data.tgt_len", "model.mem_len", "model.same_length")
    for key in (*needed, "model.clamp_len", "model.cutoffs", "model.dropout", "model.norm"):
        assert f"- {key}: " in message
    (tmp_path / "mine.yaml").write_text("data: {tgt_len: 4}\nmodel: {norm: pre, same_length: true}\n")
    message = refusal(capsys, "import", tmp_path, tmp_path / "mine.yaml", "data.corpus=x", "--run", tmp_path / "run")
    assert "model.mem_len" in message
    assert not any(key in message for key in ("data.corpus", "data.tgt_len", "model.norm", "model.same_length"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.norm=pre", "--pre_lnorm"),
        ("model.n_heads=2", "model.n_heads is 2, not 4"),
        ("model.pointer_len=4", "model.pointer_len is 4, not 0"),
        ("model.subword_features=9", "model.subword_features is 9, not 0"),
        ("model.tie_weights=false", "model.tie_weights is False, not True"),
        ("data.tokenizer.kind=byte", "data.tokenizer.kind is byte, not word"),
        ("model.cutoffs=[4]", "give the 3 of the model"),
        ("model.cutoffs=auto", "give the 3 of the model"),
        ("model.cutoffs=[4,9,1000]", "model.cutoffs end at 1000"),
        ("train.stepz=3", "did you mean train.steps?"),
    ],
)
def test_settings_of_another_model_are_refused(setting, message, size, settings, tmp_path, capsys):
    save_original(make_model(size, cutoffs=CUTOFFS), tmp_path)
    given = [*settings, *ORIGINAL, "model.cutoffs=[4,9,15]", setting]
    assert message in refusal(capsys, "import", tmp_path, *given, "--run", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_list_of_another_length_is_refused(size, settings, text, tmp_path, capsys):
    save(make_model(size), tmp_path / "model")
    (tmp_path / "words").write_text((text / "words").read_text() + "\nmore\n")
    words = f"data.tokenizer.vocabulary={tmp_path / 'words'}"
    message = refusal(capsys, "import", tmp_path / "model", *settings, words, "--run", tmp_path / "run")
    assert f"has {size + 1} words, but the model has {size}" in message
    with pytest.raises(ParnasError, match="vocabulary is null"):
        parnas.import_model(tmp_path / "model", Config(), run=tmp_path / "run")


def damage(state, kind):
    """Change a state_dict with the names of the original."""
    name = "layers.1.dec_attn.r_net.weight"
    if kind == "missing":
        del state[name]
    elif kind == "shape":
        state[name] = state[name][:3]
    elif kind == "scalar":
        state["layers.1.dec_attn.qkv_net.weight"] = torch.tensor(1.0)
    elif kind == "vector":
        state["word_emb.emb_layers.0.weight"] = torch.zeros(3)
    elif kind == "more":
        state["layers.0.dec_attn.more"] = torch.zeros(3)
    elif kind == "nan":
        state[name][0, 0] = torch.nan
    elif kind == "biases":
        state["layers.1.dec_attn.r_w_bias"] = torch.zeros(4, 10)
    elif kind == "attention":
        state["r_emb"] = torch.zeros(2, 3)
    elif kind == "sampled":
        state["out_layer.weight"] = torch.zeros(2, 3)
    elif kind == "no softmax":
        state = {key: each for key, each in state.items() if not key.startswith("crit.")}
    elif kind == "other":
        state = {"weight": torch.zeros(2, 2)}
    elif kind == "narrow":
        state["word_emb.emb_layers.0.weight"] = torch.zeros(8, 32)
    elif kind == "nested":
        state = {"model": state, "step": 3}
    return state


@pytest.mark.parametrize(
    ("kind", "message"),
    {
        "missing": "layers.1.dec_attn.r_net.weight is missing",
        "shape": "r_net.weight has the shape [3, 64], not [40, 64]",
        "scalar": "has the shape [], not",
        "vector": "is no matrix",
        "more": "layers.0.dec_attn.more is not a weight",
        "nan": "not finite",
        "biases": "differs from that of other layers",
        "attention": "attn_type",
        "sampled": "sample_softmax",
        "no softmax": "crit.out_layers.0.bias is missing",
        "other": "holds no Transformer-XL",
        "narrow": "d_embed = d_model",
        "nested": "no state_dict",
    }.items(),
)
def test_other_weights_are_refused(kind, message, size, settings, tmp_path, capsys):
    folder = save_original(make_model(size), tmp_path / "model")
    torch.save(damage(torch.load(folder / "model.pt", weights_only=True), kind), folder / "model.pt")
    assert message in refusal(capsys, "import", folder, *settings, *ORIGINAL, "--run", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt"])
def test_a_broken_file_is_one_message(name, settings, tmp_path, capsys):
    assert "has no weights" in refusal(capsys, "import", tmp_path / "nothing", *settings)
    for content in (b"", b"x" * 100, b"PK\x03\x04" + b"\0" * 50):
        (tmp_path / name).write_bytes(content)
        assert str(tmp_path / name) in refusal(capsys, "import", tmp_path, *settings)
