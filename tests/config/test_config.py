"""Reading of configurations: defaults, accepted forms of values, and one message with all errors."""

import re
from pathlib import Path

import pytest
from helpers.config_helpers import complaints, load

from parnas.config.loader import Config, check_config, dump_config, find_config, load_config, walk_fields
from parnas.config.yaml_file import read_yaml
from parnas.errors import ParnasError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(ROOT.glob("configs/*.yaml"))
NETWORKS = ["wikitext103-base", "wikitext103-large", "wikitext103-base-nvidia", "enwik8", "enwik8-large", "text8-large"]
__all__ = ["complaints", "load"]


# Files


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_load(path):
    """Each begins by a comment that names its source and device."""
    config = load_config(path)
    assert check_config(read_yaml(dump_config(config), "dump"), "dump") == config
    comment = "".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    assert "Device: " in comment


def test_the_published_networks_are_shipped():
    assert {f"{name}.yaml" for name in NETWORKS} <= {path.name for path in SHIPPED}


def test_an_empty_file_gives_the_defaults(load):
    assert load("") == load("# nothing\n") == load("model: {}") == Config()


@pytest.mark.parametrize("name", ["demo", "demo.yaml", "configs/demo.yaml"])
def test_shipped_configurations_are_found_from_any_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == ROOT / "parnas" / "config" / "presets" / "demo.yaml"
    Path("demo.yaml").write_text("", encoding="utf-8")
    assert find_config("demo.yaml") == Path("demo.yaml")


@pytest.mark.parametrize("name", ["no-such-name", "configs/none.yaml", "/", ""])
def test_a_missing_file_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParnasError, match=re.escape(f"{name};")):
        load_config(name)


@pytest.mark.parametrize(
    "text, message",
    [
        ("model: [1", r"config\.yaml"),
        ("model:\n\t d_model: 1", r"config\.yaml"),
        ("- 1\n- 2", r"config\.yaml"),
        ("just words", r"config\.yaml"),
        ("model: !!python/object:os.system {}", r"config\.yaml"),
        ("[" * 1500, r"config\.yaml"),
        ("? [1, {a: 2}]\n: 3", r"config\.yaml"),
        ("a: 1\n---\nb: 2", r"config\.yaml"),
        ("model: {d_model: 8, d_model: 16}", "'d_model'"),
        ("model: {}\ndata: {}\nmodel: {}", "'model'"),
        ("model: &m {x: *m}", r"config\.yaml"),
    ],
)
def test_broken_files_are_named(load, text, message):
    with pytest.raises(ParnasError, match=message):
        load(text)


def test_a_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes("data: {corpus: Äther}".encode("latin-1"))
    with pytest.raises(ParnasError, match=r"latin\.yaml.*UTF-8"):
        load_config(path)


# Keys


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("model: {d_modle: 8}", "model.d_modle is no known key; did you mean model.d_model?"),
        ("model: {n_head: 8}", "model.n_head is no known key; did you mean model.n_heads?"),
        ("d_model: 8", "d_model is no known key; did you mean model.d_model?"),
        ("train: {tau_start: 1.0}", "train.tau_start is no known key; did you mean search.tau_start?"),
        ("modell: {d_model: 8}", "modell is no known key; did you mean model?"),
        ("data: {tokenizer: {vocabsize: 8}}", "data.tokenizer.vocabsize is no known key; did you mean "),
        ("model: {zzzz: 8}", "model.zzzz is no known key"),
    ],
)
def test_unknown_keys_come_with_the_nearest(complaints, text, complaint):
    (line,) = complaints(text)
    assert line.startswith(complaint)
    assert ("did you mean" in line) == ("did you mean" in complaint)


def test_keys_that_others_rely_on_are_there():
    known = {key for key, _ in walk_fields()}
    relied_on = {
        "data": "corpus tokenizer.kind tokenizer.vocab_size tokenizer.model_type tokenizer.lowercase batch_size "
        "tgt_len",
        "model": "d_model n_heads d_head d_inner mem_len dropout attention_dropout norm cutoffs proj_factor proj_dims "
        "tie_weights div_val",
        "search": "blocks space estimator steps warmup_steps lr alpha_start_step alpha_lr alpha_split tau_start "
        "tau_end tau_schedule",
        "train": "steps lr warmup_steps weight_decay clip log_every eval_every save_every",
        "evaluation": "split tgt_len mem_len",
        "runtime": "seed device precision compile threads",
    }
    assert {f"{section}.{key}" for section, keys in relied_on.items() for key in keys.split()} <= known


def test_every_key_says_what_it_means():
    assert [key for key, field in walk_fields() if not (field.description or "").endswith(".")] == []


# Values


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e4", 10_000),
        ("1E4", 10_000),
        ("1e+4", 10_000),
        ("2.5e4", 25_000),
        ("1.e4", 10_000),
        ("1_000", 1000),
        ("17", 17),
    ],
)
def test_whole_numbers_may_be_written_with_an_exponent(load, text, value):
    assert load(f"train: {{steps: {text}}}").train.steps == value
    assert load("", f"train.steps={text}").train.steps == value


@pytest.mark.parametrize("text, value", [("1e-3", 0.001), ("2.5E-4", 2.5e-4), ("1", 1.0), ("1e0", 1.0), (".5", 0.5)])
def test_numbers_may_be_written_with_an_exponent(load, text, value):
    assert load(f"train: {{lr: {text}}}").train.lr == value


@pytest.mark.parametrize(
    "text, key",
    [
        ("model: {d_model: true}", "model.d_model"),
        ("model: {d_model: '8'}", "model.d_model"),
        ("model: {d_model: 8.5}", "model.d_model"),
        ("model: {d_model: 8.0}", "model.d_model"),
        ("model: {d_model: null}", "model.d_model"),
        ("model: {d_model: [8]}", "model.d_model"),
        ("model: {d_model: 0}", "model.d_model"),
        ("model: {dropout: 1}", "model.dropout"),
        ("model: {dropout: -0.1}", "model.dropout"),
        ("model: {dropout: '0.1'}", "model.dropout"),
        ("model: {tie_weights: 1}", "model.tie_weights"),
        ("model: {tie_weights: 'yes'}", "model.tie_weights"),
        ("model: {norm: middle}", "model.norm"),
        ("model: {mem_len: -1}", "model.mem_len"),
        ("model: {cutoffs: 5}", "model.cutoffs"),
        ("model: {cutoffs: [a]}", "model.cutoffs"),
        ("model: {cutoffs: automatic}", "model.cutoffs"),
        ("model: 5", "model"),
        ("train: {lr: .nan}", "train.lr"),
        ("train: {lr: .inf}", "train.lr"),
        ("train: {lr: 0}", "train.lr"),
        ("search: {tau_start: .inf}", "search.tau_start"),
        ("runtime: {seed: -1}", "runtime.seed"),
        ("runtime: {seed: 4294967296}", "runtime.seed"),
        ("data: {corpus: 8}", "data.corpus"),
        ("data: {corpus: ''}", "data.corpus"),
    ],
)
def test_values_of_the_wrong_kind_or_size_are_refused(complaints, text, key):
    lines = complaints(text)
    assert all(line.startswith(f"{key} is ") for line in lines)


@pytest.mark.parametrize(
    "model, complaint",
    [
        ("{d_model: 10, n_heads: 4}", "n_heads is 4, which does not divide d_model 10"),
        ("{arch: sfq}", "arch is 'sfq': Unknown layer letter 'q'"),
        ("{arch: iii}", "arch is 'iii': iii has no layer besides identity"),
        ("{cutoffs: [5, 5]}", "cutoffs is [5, 5]; give positive numbers that rise"),
        ("{cutoffs: [9, 5]}", "cutoffs is [9, 5]; give positive numbers that rise"),
        ("{cutoffs: [0, 5]}", "cutoffs is [0, 5]; give positive numbers that rise"),
        ("{div_val: 2}", "div_val is 2, but without cutoffs there is one cluster"),
        ("{proj_factor: 4}", "proj_factor is 4, but without cutoffs there is one cluster"),
        ("{proj_dims: [4]}", "proj_dims is given without cutoffs"),
        ("{cutoffs: [5], proj_dims: [4, 2], tie_weights: false}", "proj_dims is [4, 2]; give 1 positive width(s)"),
        ("{cutoffs: [5], proj_dims: [0], tie_weights: false}", "proj_dims is [0]; give 1 positive width(s)"),
        ("{cutoffs: min_macs, proj_dims: [4], tie_weights: false}", "proj_dims is [4]; give 2 positive width(s)"),
        ("{cutoffs: [5], proj_factor: 2}", "tie_weights is true, but the embedding's clusters have widths [128, 128]"),
        ("{cutoffs: [5], proj_dims: [64]}", "tie_weights is true, but the embedding's clusters have widths [128, 128]"),
        ("{cutoffs: auto, proj_factor: 2}", "tie_weights is true, but the embedding's clusters have widths [128, 128"),
        ("{cutoffs: [5], div_val: 200}", "div_val leaves a cluster without width: [128, 0]; lower it"),
        ("{cutoffs: [5], proj_factor: 200, tie_weights: false}", "proj_factor leaves a cluster without width"),
    ],
)
def test_model_settings_that_contradict_each_other(complaints, model, complaint):
    lines = complaints(f"model: {model}")
    assert any(line.startswith(f"model.{complaint}") for line in lines), lines


@pytest.mark.parametrize(
    "model",
    [
        "{d_model: 10, n_heads: 4, d_head: 3}",
        "{cutoffs: [5, 9], div_val: 2, proj_factor: 2}",
        "{cutoffs: [5, 9], div_val: 2}",
        "{cutoffs: [5, 9], proj_factor: 4, tie_weights: false}",
        "{cutoffs: [5, 9], proj_dims: [128, 128]}",
        "{cutoffs: auto, proj_dims: [64, 32], tie_weights: false}",
        "{div_val: 1, proj_factor: 1}",
        "{arch: (sf)*8}",
        "{arch: sandwich-16-4}",
    ],
)
def test_model_settings_that_agree(load, model):
    load(f"model: {model}")


@pytest.mark.parametrize(
    "search, complaint",
    [
        (
            "{space: hybird}",
            "search.space is 'hybird'; give a list of layer names, or the name of a space: par, hybrid",
        ),
        ("{space: [s, x]}", "search.space is ['s', 'x']; give different letters"),
        ("{space: [s, s]}", "search.space is ['s', 's']; give different letters"),
        ("{space: [i]}", "search.space has identity alone"),
        ("{space: []}", "search.space is "),
        ("{space: ['s:heads=2', 's:heads=02']}", "search.space is ['s:heads=2', 's:heads=2']; give different letters"),
        ("{space: ['s:width=2']}", "search.space is ['s:width=2']; give different letters"),
        ("{space: [s:heads=2,d_head=4]}", "search.space is ['s:heads=2', 'd_head=4']; give different letters"),
        ("{space: [[s, f], [f]]}", "search.space has 2 lists, but search.blocks is 6"),
        ("{blocks: 2, space: [[s, f], []]}", "search.space is [['s', 'f'], []]; give every block a candidate"),
        ("{blocks: 2, space: [[s, f], [f, f]]}", "search.space is ['f', 'f']; give different letters"),
        ("{blocks: 2, space: [[i], [i]]}", "search.space has identity alone"),
        ("{tau_end: 2.0}", "search.tau_end is 2.0, above tau_start 1.0"),
        ("{steps: 200}", "search.alpha_start_step is 200, but alpha's training ends after 120 of 200 steps"),
        ("{estimator: gdas, steps: 200}", "search.alpha_start_step is 200, but alpha's training ends after 200 of 200"),
        ("{paths_within_target: true, cost: {target: null}}", "search.paths_within_target is true, which is for esti"),
        ("{paths_within_target: true, estimator: soft}", "search.paths_within_target is true, which is for estimator"),
        ("{least_attention: 7}", "search.least_attention is 7, but 6 block(s) have attention as a candidate"),
        ("{least_attention: 1, space: [f, i]}", "search.least_attention is 1, but 0 block(s) have attention"),
        ("{block_ridge: 10, estimator: soft}", "search.block_ridge is 10, which is for estimator uniform"),
        ("{candidate_dropout: 0.2}", "search.candidate_dropout is 0.2, but estimator uniform samples uniformly"),
        ("{parent: runs/a, share_slices: true}", "search.share_slices is true, but in a trained network"),
        ("{parent: runs/a, entropy_end: 0}", "search.entropy_end is 0, but in a trained network"),
        ("{tau_start: 2.0}", "search.tau_start is 2.0, but for estimator uniform tau is a share"),
        ("{tau_schedule: learnable}", "search.tau_schedule is learnable, but estimator uniform"),
    ],
)
def test_search_settings_that_contradict_each_other(complaints, search, complaint):
    (line,) = complaints(f"search: {search}")
    assert line.startswith(complaint)


def test_all_mistakes_are_reported_at_once(complaints):
    """Also those across fields, where other fields of the same section are wrong too."""
    lines = complaints(
        """
        model: {d_model: 10, n_heads: 4, d_iner: 3, dropout: 2, cutoffs: [5, 5]}
        data: {tokenizer: {kind: byte, vocab_size: 500}, batch_size: none}
        search: {space: [s, s], tau_end: 3.0, lr: true}
        trian: {steps: 3}
        """,
        "runtime.seed=x",
        "nonsense",
    )
    starts = [
        "'nonsense' is not of the form section.key=value",
        "data.batch_size is 'none'",
        "data.tokenizer.vocab_size is 500",
        "model.cutoffs is [5, 5]",
        "model.d_iner is no known key; did you mean model.d_inner?",
        "model.dropout is 2; it should be less than 1",
        "model.n_heads is 4, which does not divide d_model 10",
        "runtime.seed is 'x'",
        "search.lr is True",
        "search.space is ['s', 's']",
        "search.tau_end is 3.0",
        "trian is no known key; did you mean train?",
    ]
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(sorted(lines), starts, strict=True)), sorted(lines)


@pytest.mark.parametrize(
    "text, starts",
    [
        ("search: {steps: 20k, alpha_start_step: 3000}", ["search.steps is '20k'"]),
        ("model: {d_model: 384x, n_heads: 6}", ["model.d_model is '384x'"]),
        ("data: {tgt_len: 0}\nevaluation: {stride: 48}", ["data.tgt_len is 0"]),
        ("search: {blocks: 0, tau_start: 2}", ["search.blocks is 0", "search.tau_start is 2"]),
        (
            "train: {steps: 0}\nsearch: {alpha_start_step: 1000000}",
            ["search.alpha_start_step is 1000000", "train.steps is 0"],
        ),
        (
            "model: {d_model: null, same_length: true, mem_len: 0}",
            ["model.d_model is None", "model.same_length is true"],
        ),
    ],
)
def test_no_mistake_speaks_of_the_default_of_a_key_that_is_wrong(complaints, text, starts):
    lines = sorted(complaints(text))
    assert len(lines) == len(starts), lines
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
