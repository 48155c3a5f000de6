"""One table for any number of runs, and what it refuses."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import make_text, small_config

from parnas.cli.tables import show_comparison
from parnas.errors import ParnasError
from parnas.evaluation.comparison import compare
from parnas.evaluation.loading import EvalOptions
from parnas.runs.files import read_json
from parnas.runs.records import parse_rows
from parnas.runs.run import Run
from parnas.training.loaded_run import load
from parnas.training.progress import Silent
from parnas.training.retrain import retrain


@pytest.fixture(scope="module")
def byte_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = small_config(corpus, model__arch="sf", data__tokenizer__kind="byte", train__steps=4)
    return retrain(config, tmp_path_factory.mktemp("runs") / "bytes", Silent())


def test_the_table_agrees_with_the_runs(search_run: Run, retrain_run: Run) -> None:
    comparison = compare([search_run.folder, retrain_run.folder], EvalOptions(), Silent())
    table = comparison.table.set_index("run")
    for run in (search_run, retrain_run):
        assert table.loc[run.name, "ppl"] == pytest.approx(run.summary().valid.ppl, rel=1e-6)
    assert table.loc[retrain_run.name, "parameters"] == retrain_run.summary().parameters
    loaded = load(search_run.folder)
    argmax = loaded.model.extract(loaded.architecture)
    assert table.loc[search_run.name, "parameters"] == sum(parameter.numel() for parameter in argmax.parameters())
    assert list(table["network"]) == ["derived, in SuperNet", "discrete"]
    assert (table["latency_p95_ms"] >= table["latency_ms"]).all()
    assert (table["train_tokens_per_s"] > 0).all()


def test_multiply_adds_of_a_small_network_counted_by_hand(retrain_run: Run) -> None:
    """sfs at width 16, inner 32, segment and memory 8, full softmax over 36 words and <eos>."""
    row = compare([retrain_run.folder], EvalOptions(), Silent()).table.iloc[0]
    attention = 4 * 16 * 16 + 16 * 16 * (16 / 8) + 3 * 16 * 16
    vocabulary = retrain_run.summary().parameters - retrain_run.summary().parameters_without_embeddings
    assert vocabulary % (16 + 1) == 0
    assert row["multiply_adds_per_token"] == 2 * attention + 2 * 16 * 32 + 16 * (vocabulary // 17)


def test_lengths_and_split_are_the_callers(retrain_run: Run) -> None:
    usual = compare([retrain_run.folder], EvalOptions(), Silent()).table.iloc[0]
    other = compare([retrain_run.folder], EvalOptions("test", tgt_len=4, mem_len=0), Silent()).table.iloc[0]
    assert (usual["tgt_len"], usual["mem_len"], other["tgt_len"], other["mem_len"]) == (8, 8, 4, 0)
    assert usual["ppl"] != other["ppl"]


def test_different_tokenizers_that_lose_nothing_share_words_and_bytes_only(retrain_run: Run, byte_run: Run) -> None:
    comparison = compare([retrain_run.folder, byte_run.folder], EvalOptions(), Silent())
    assert not {"ppl", "tokens"} & set(comparison.table.columns)
    assert {"word_ppl", "bits_per_byte"} <= set(comparison.table.columns)
    assert comparison.table["words"].nunique() == comparison.table["bytes"].nunique() == 1
    assert any("different tokenizers" in note for note in comparison.notes)


def test_tokenizers_that_lose_different_information_are_refused(retrain_run: Run, corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="f", data__tokenizer__lowercase=True, train__steps=2)
    folded = retrain(config, tmp_path / "folded", Silent())
    with pytest.raises(ParnasError, match="folded: case"):
        compare([retrain_run.folder, folded.folder], EvalOptions(), Silent())


def test_word_vocabularies_of_different_sizes_lose_different_words(corpus: Path, tmp_path: Path) -> None:
    folders = []
    for size in (12, 20):
        config = small_config(corpus, model__arch="f", data__tokenizer__vocab_size=size, train__steps=2)
        folders.append(retrain(config, tmp_path / str(size), Silent()).folder)
    with pytest.raises(ParnasError, match="unknown words"):
        compare(folders, EvalOptions(), Silent())


def test_runs_of_one_name_are_told_apart(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="f", train__steps=2)
    folders = [retrain(config, tmp_path / side / "run", Silent()).folder for side in ("a", "b")]
    assert list(compare(folders, EvalOptions(), Silent()).table["run"]) == [str(folder) for folder in folders]


def test_different_corpora_are_refused(retrain_run: Run, tmp_path: Path) -> None:
    for seed, split in enumerate(("train", "valid", "test")):
        (tmp_path / f"{split}.txt").write_text(make_text(200, 50 + seed))
    other = retrain(small_config(tmp_path, model__arch="f", train__steps=2), tmp_path / "other", Silent())
    with pytest.raises(ParnasError):
        compare([retrain_run.folder, other.folder], EvalOptions(), Silent())


def test_a_text_changed_since_training_is_refused(corpus: Path, tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text((corpus / f"{split}.txt").read_text())
    run = retrain(small_config(tmp_path, model__arch="f", train__steps=2), tmp_path / "run", Silent())
    (tmp_path / "valid.txt").write_text(make_text(150, 77))
    with pytest.raises(ParnasError):
        compare([run.folder], EvalOptions(), Silent())


def test_written_files_agree_with_each_other(retrain_run: Run, tmp_path: Path) -> None:
    comparison = compare([retrain_run.folder], EvalOptions(), Silent())
    csv, markdown, as_json = comparison.write(tmp_path)
    assert pd.read_csv(csv)["word_ppl"][0] == pytest.approx(json.loads(as_json.read_text())[0]["word_ppl"])
    assert "| sfs" in markdown.read_text()
    assert all(f"* {note}" in markdown.read_text() for note in comparison.notes)


def test_rows_say_how_each_network_was_trained(
    search_run: Run, retrain_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train__inherit": str(search_run.folder), "model__arch": search_run.summary().arch, "train__steps": 2}
    config = retrain_run.config().replace(**settings)
    inherited = retrain(config, tmp_path / "inherited", Silent())
    teachers = (str(retrain_run.folder),)
    taught = retrain(config.replace(train__teachers=teachers), tmp_path / "taught", Silent())
    distilled = retrain(config.replace(train__teachers=teachers, train__inherit=None), tmp_path / "new", Silent())
    folders = [run.folder for run in (search_run, retrain_run, inherited, taught, distilled)]
    expected = ["from scratch", "from scratch", "inherited", "inherited, distilled", "from scratch, distilled"]
    comparison = compare(folders, EvalOptions(), Silent())
    csv, _, as_json = comparison.write(tmp_path / "out")
    assert list(pd.read_csv(csv)["weights"]) == expected
    assert [row["weights"] for row in json.loads(as_json.read_text())] == expected
    show_comparison(comparison)
    printed = capsys.readouterr().out
    assert "inherited, distilled" in printed
    assert "weights of all networks" not in printed
    show_comparison(compare(folders[:2], EvalOptions(), Silent()))
    assert "weights of all networks: from scratch" in capsys.readouterr().out


def test_the_same_run_twice_is_refused(retrain_run: Run) -> None:
    with pytest.raises(ParnasError):
        compare([retrain_run.folder, retrain_run.folder], EvalOptions(), Silent())


SEVERAL = {
    "evaluation.stride": 4,
    "evaluation.dynamic.lr": 1e-3,
    "evaluation.dynamic.batches": 2,
    "evaluation.cache.size": 30,
}
PROTOCOLS = ["plain", "sliding", "cache", "dynamic", "dynamic + cache"]


def test_each_evaluation_protocol_has_its_own_row(retrain_run: Run, tmp_path: Path) -> None:
    alone = compare([retrain_run.folder], EvalOptions(tgt_len=32), Silent()).table.iloc[0]
    comparison = compare([retrain_run.folder], EvalOptions(tgt_len=32, changes=SEVERAL), Silent())
    table = comparison.table.set_index("evaluation")
    assert list(table.index) == PROTOCOLS
    assert alone["evaluation"] == "plain"
    assert table.loc["plain", "ppl"] == alone["ppl"]
    assert table["ppl"].nunique() == len(PROTOCOLS)
    assert table["tokens"].nunique() == table["bytes"].nunique() == 1
    assert table.loc["dynamic", "settings"] == "lr 0.001, decay 0, update rms, epsilon 1"
    rows = json.loads(comparison.write(tmp_path)[-1].read_text())
    assert [row["evaluation"] for row in rows] == PROTOCOLS
    assert [row["latency_ms"] is None for row in rows] == [False] + 4 * [True]
    assert [row["multiply_adds_per_token"] is None for row in rows] == [False] + 4 * [True]
    assert type(rows[0]["multiply_adds_per_token"]) is int
    assert rows[0]["conditions"] == {"tgt_len": 32, "changes": SEVERAL}


def test_all_protocols_of_a_search_score_its_derived_network(search_run: Run) -> None:
    comparison = compare([search_run.folder], EvalOptions(tgt_len=32, changes=SEVERAL), Silent())
    assert list(comparison.table["evaluation"]) == PROTOCOLS


def test_a_run_that_is_not_finished_is_compared_with_one_that_is(retrain_run: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(retrain_run.folder, tmp_path / "unfinished"))
    (folder / "summary.json").unlink()
    compare([retrain_run.folder, folder], EvalOptions(), Silent()).write(tmp_path)
    finished, unfinished = parse_rows(read_json(tmp_path / "comparison.json"), "comparison.json")
    assert (finished.steps, unfinished.steps) == (retrain_run.summary().steps, None)
    assert finished.ppl == unfinished.ppl


def test_a_length_of_compressed_memory_needs_such_a_network(retrain_run: Run) -> None:
    for options in (EvalOptions(cmem_len=9), EvalOptions(changes={"evaluation.cmem_len": 9})):
        with pytest.raises(ParnasError, match="no network has compressed memory"):
            compare([retrain_run.folder], options, Silent())


def test_lengths_may_be_settings_and_are_noted_where_training_had_others(retrain_run: Run) -> None:
    by_option = compare([retrain_run.folder], EvalOptions(mem_len=20), Silent())
    by_setting = compare([retrain_run.folder], EvalOptions(changes={"evaluation.mem_len": 20}), Silent())
    assert by_option.table.loc[0, "ppl"] == by_setting.table.loc[0, "ppl"]
    assert by_setting.table.loc[0, "mem_len"] == 20
    for comparison in (by_option, by_setting):
        assert f"{retrain_run.name}: evaluated with mem_len 20 (trained with 8)" in comparison.notes


def test_settings_of_other_sections_are_refused(retrain_run: Run) -> None:
    for key in ("model.d_model", "runtime.seed"):
        with pytest.raises(ParnasError, match=re.escape(key)):
            compare([retrain_run.folder], EvalOptions(changes={key: 3}), Silent())
    with pytest.raises(ParnasError, match=r"evaluation\.cache\.weight is 1\.0"):
        compare([retrain_run.folder], EvalOptions(changes={"evaluation.cache.weight": 1.0}), Silent())


def test_device_precision_and_threads_may_differ_from_those_of_the_training(retrain_run: Run) -> None:
    threads = torch.get_num_threads()
    try:
        usual, other = (
            compare([retrain_run.folder], EvalOptions(changes=changes), Silent()).table.iloc[0]
            for changes in ({}, {"runtime.device": "cpu", "runtime.precision": "bf16", "runtime.threads": threads + 1})
        )
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert other["ppl"] == pytest.approx(usual["ppl"], rel=0.01)
    assert other["ppl"] != usual["ppl"], "the training was in fp32"


def test_impossible_lengths_and_unknown_settings_are_refused(retrain_run: Run) -> None:
    for conditions, message in (
        (EvalOptions(tgt_len=0), r"evaluation\.tgt_len is 0"),
        (EvalOptions(mem_len=-3), r"evaluation\.mem_len is -3"),
        (EvalOptions(changes={"evaluation": {"best": True}}), r"evaluation\.best is no known key"),
        (EvalOptions(changes={"evaluation.dynamic": {"epsilon": 2}}), r"dynamic\.epsilon has no effect without"),
    ):
        with pytest.raises(ParnasError, match=message):
            compare([retrain_run.folder], conditions, Silent())


def test_a_protocol_that_diverges_is_noted(retrain_run: Run) -> None:
    changes = {"evaluation.dynamic.lr": 1e6, "evaluation.dynamic.batches": 1}
    comparison = compare([retrain_run.folder], EvalOptions(tgt_len=32, changes=changes), Silent())
    assert f"{retrain_run.name}: dynamic gives no finite loss" in comparison.notes


def test_untuned_settings_on_the_test_split_are_noted(retrain_run: Run) -> None:
    changes = {"evaluation.cache.size": 30}
    notes = [
        compare([retrain_run.folder], EvalOptions(split, tgt_len=32, changes=changes), Silent()).notes
        for split in ("valid", "test")
    ]
    assert [any("not tuned" in note for note in each) for each in notes] == [False, True]
