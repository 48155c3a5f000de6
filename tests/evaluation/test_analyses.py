"""What evaluate --analyse finds, against slow twins."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import small_config
from helpers.command_helpers import refusal, run_command

from parnas.config.schema import Reach
from parnas.errors import ParnasError
from parnas.evaluation.analyses import Analysis, effective_lengths, perplexity_by_memory
from parnas.evaluation.attention import attention_by_age
from parnas.evaluation.frequency import BUCKETS, perplexity_by_frequency, spell_words, word_starts
from parnas.evaluation.loading import EvalOptions, open_runs
from parnas.figures.analyses import draw_attention, draw_frequency, draw_memory
from parnas.runs.run import Run
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

MEMORY = {"model__mem_len": 8, "model__memory__cmem_len": 6, "model__memory__ratio": 2}


@pytest.fixture(scope="module")
def compressive_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = small_config(corpus, model__arch="csf", **MEMORY)
    return retrain(config, tmp_path_factory.mktemp("runs") / "compressive", Silent())


@pytest.fixture(scope="module", params=["sentencepiece", "byte", "folded"])
def other_run(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    kind = "sentencepiece" if request.param == "folded" else request.param
    changes = {"data__tokenizer__kind": kind, "data__tokenizer__lowercase": request.param == "folded"}
    if kind == "sentencepiece":
        changes |= {"data__tokenizer__vocab_size": 305}
    config = small_config(corpus, model__arch="sf", train__steps=4, **changes)
    return retrain(config, tmp_path_factory.mktemp("runs") / request.param, Silent())


# Attention by age


@pytest.mark.parametrize("changes", [{}, {"cmem_len": 4, "mem_len": 7}, {"mem_len": 3, "tgt_len": 5}])
def test_attention_by_age_equals_a_sum_over_keys(compressive_run: Run, changes: dict[str, int]) -> None:
    """Read in one row, segment by segment, with the weights of each query added up by hand."""
    (run,) = open_runs([compressive_run.folder], EvalOptions(**changes))
    table = attention_by_age([run], "valid")
    network, tgt_len, reach = run.network.eval(), run.shape.tgt_len, run.shape.reach
    assert set(table["block"]) == {1, 2}
    assert list(table["layer"].unique()) == ["c", "s"]
    totals = table.groupby("block")["weight"].sum()
    assert totals.tolist() == pytest.approx([1, 1])
    by_part = table.groupby(["block", "part"])["positions"].sum()
    assert (by_part[1]["compressed memory"], by_part[1]["segment"]) == (reach.cmem_len, tgt_len)
    assert reach.mem_len <= by_part[1]["memory"] <= reach.mem_len + 1
    assert (by_part[2]["memory"], by_part[2]["segment"]) == (reach.mem_len, tgt_len)

    # The same positions, read alone.
    from parnas.data.batching import evaluation_batches

    fill, sums, segments = network.burn_in(tgt_len, reach), np.zeros((2, 3)), 0
    memory = None
    batches = evaluation_batches(run.streams.tokens("valid"), run.streams.tokenizer.eos_id, 32, tgt_len, fill, 2)
    for step, batch in enumerate(batches):
        with torch.no_grad():
            output = network(torch.from_numpy(batch.inputs), memory, reach=reach, with_weights=True)
        if step >= fill and batch.scored.all():
            segments += len(batch.inputs)
            for number in range(2):
                weights = output.weights[number]
                slots = reach.cmem_len if number == 0 else 0
                for row in range(weights.shape[1]):
                    mean = weights[:, row].mean(dim=(0, 1))
                    sums[number] += [
                        float(mean[:slots].sum()),
                        float(mean[slots:-tgt_len].sum()),
                        float(mean[-tgt_len:].sum()),
                    ]
        memory = output.memory
        if segments >= 64:
            break
    shares = table.groupby(["block", "part"])["weight"].sum()
    for number in range(2):
        for part, total in zip(("compressed memory", "memory", "segment"), sums[number], strict=True):
            if total:
                assert shares[number + 1][part] == pytest.approx(total / segments, rel=1e-4)


def test_buckets_are_six_of_each_part_the_oldest_first(compressive_run: Run) -> None:
    (run,) = open_runs([compressive_run.folder], EvalOptions())
    table = attention_by_age([run], "valid")
    first = table[table["block"] == 1]
    assert first["bucket"].tolist() == [1, 2, 3, 4, 5, 6] * 3
    assert list(first["part"].unique()) == ["compressed memory", "memory", "segment"]
    assert first["positions"].tolist() == [1] * 6 + [2, 2, 1, 1, 1, 1] * 2
    newest = first[(first["part"] == "segment") & (first["bucket"] == 6)]["weight"].iloc[0]
    assert newest < first[first["part"] == "segment"]["weight"].max()  # which one query alone can see


def test_attention_of_a_search_is_that_of_the_derived_network(search_run: Run) -> None:
    (run,) = open_runs([search_run.folder], EvalOptions())
    layers = [layer for layer in run.loaded.architecture if layer != "i"]
    table = attention_by_age([run], "valid")
    assert len(table) == 12 * layers.count("s")


def test_attention_beside_a_recurrence_is_measured_with_full_memory(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="rs", train__steps=2)
    (run,) = open_runs([retrain(config, tmp_path / "run", Silent()).folder], EvalOptions())
    table = attention_by_age([run], "valid")
    assert table["weight"].sum() == pytest.approx(1)
    assert table.groupby("part")["positions"].sum().to_dict() == {"memory": 8, "segment": 8}


def test_a_split_that_ends_too_soon_is_refused(compressive_run: Run) -> None:
    (run,) = open_runs([compressive_run.folder], EvalOptions(mem_len=10**4))
    with pytest.raises(ParnasError, match="valid"):
        attention_by_age([run], "valid")


# Word frequency


def slow_words(text: str) -> list[str]:
    return [word for line in text.splitlines() for word in [*line.split(), "\n"]]


def test_words_of_any_tokenizer_are_those_of_the_text(other_run: Run, corpus: Path) -> None:
    (run,) = open_runs([other_run.folder], EvalOptions())
    tokenizer = run.streams.tokenizer
    for split in ("train", "valid"):
        tokens = np.asarray(run.streams.tokens(split))
        found = spell_words(tokens, word_starts(tokens, tokenizer), tokenizer)
        text = (corpus / f"{split}.txt").read_text(encoding="utf-8")
        assert found == slow_words(text.lower() if tokenizer.folds_case else text)


def test_white_space_belongs_to_the_word_behind_it() -> None:
    from parnas.data.tokenizers import ByteTokenizer

    text = " the  cat \n\n sat . \nx"
    tokenizer = ByteTokenizer(sorted(set(text.encode())), lowercase=False)
    ids = np.array(tokenizer.encode(text), np.uint16)
    starts = word_starts(ids, tokenizer)
    assert spell_words(ids, starts, tokenizer) == ["the", "cat", "\n", "\n", "sat", ".", "\n", "x"]
    assert starts.tolist() == [0, 4, 9, 11, 12, 16, 18, 20]


def test_perplexity_by_frequency_equals_a_loop_over_words(
    retrain_run: Run, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parnas.evaluation.frequency._EDGES", (200, 400, 800))
    (run,) = open_runs([retrain_run.folder], EvalOptions())
    table = perplexity_by_frequency([run], "valid").set_index("occurrences")
    counts = Counter(slow_words((corpus / "train.txt").read_text(encoding="utf-8")))
    words = slow_words((corpus / "valid.txt").read_text(encoding="utf-8"))
    network, memory, losses = run.network.eval(), None, []
    tokens = [run.streams.tokenizer.eos_id, *run.streams.tokens("valid").tolist()]
    for start in range(0, len(tokens) - 1, 8):
        inputs, targets = tokens[start : start + 8], tokens[start + 1 : start + 9]
        inputs = inputs[: len(targets)]
        with torch.no_grad():
            nll, memory = network.nll(torch.tensor([inputs]), torch.tensor([targets]), memory)
        losses += nll[0].tolist()
    buckets: dict[str, list[float]] = {bucket: [] for bucket in BUCKETS}
    for word, loss in zip(words, losses, strict=True):
        seen = counts[word]
        buckets[BUCKETS[0 if seen >= 800 else 1 if seen >= 400 else 2 if seen >= 200 else 3]].append(loss)
    assert sum(bool(of) for of in buckets.values()) >= 3
    for bucket, of in buckets.items():
        assert table.loc[bucket, "words"] == len(of)
        if of:
            assert table.loc[bucket, "ppl"] == pytest.approx(math.exp(sum(of) / len(of)), rel=1e-4)
    assert table.loc["all", "ppl"] == pytest.approx(retrain_run.summary().valid.ppl, rel=1e-4)


def test_losses_of_pieces_add_up_to_those_of_words(other_run: Run) -> None:
    (run,) = open_runs([other_run.folder], EvalOptions())
    table = perplexity_by_frequency([run], "valid").set_index("occurrences")
    assert table.loc["all", "ppl"] == pytest.approx(other_run.summary().valid.word_ppl, rel=1e-4)
    assert table.loc["all", "words"] == other_run.summary().valid.words


# Memory


def test_perplexity_by_memory_is_that_of_evaluations_with_these_lengths(compressive_run: Run, retrain_run: Run) -> None:
    from parnas.evaluation.comparison import compare

    runs = open_runs([compressive_run.folder, retrain_run.folder], EvalOptions())
    table = perplexity_by_memory(runs, "valid", Silent())
    assert table.groupby(["run", "varied"], sort=False)["length"].agg(list).tolist() == [
        [0, 2, 4, 8, 16, 32],
        [0, 2, 3, 6, 12, 24],
        [0, 2, 4, 8, 16, 32],
    ]
    for varied in ("mem_len", "cmem_len"):
        of = table[(table["run"] == compressive_run.name) & (table["varied"] == varied)].set_index("length")
        for length in (0, 12 if varied == "cmem_len" else 16):
            row = compare([compressive_run.folder], EvalOptions(**{varied: length}), Silent()).table.iloc[0]
            assert of.loc[length, "ppl"] == pytest.approx(row["ppl"], rel=1e-6)
            assert row[varied] == length
        assert of["sees"].tolist() == [length + (6 if varied == "mem_len" else 8) for length in of.index]
        assert of["tokens"].tolist() == [length + 12 if varied == "mem_len" else 8 + 2 * length for length in of.index]
    rows = table[table["run"] == retrain_run.name].reset_index(drop=True)
    assert math.isnan(rows.loc[0, "gain"])
    for number in range(1, len(rows)):
        gain = 1 - rows.loc[number, "ppl"] / rows.loc[number - 1, "ppl"]
        assert rows.loc[number, "gain"] == pytest.approx(gain)
        added = rows.loc[number, "length"] - rows.loc[number - 1, "length"]
        assert rows.loc[number, "gain_per_position"] == pytest.approx(gain / added)


def test_the_effective_length_is_the_least_that_is_nearly_the_best() -> None:
    table = pd.DataFrame({"run": "a", "varied": "mem_len", "length": [0, 8, 16, 32], "ppl": [50.0, 40.3, 40.0, 41.0]})
    assert effective_lengths(table) == ["a: mem_len 8 is enough to be within 1% of the best perplexity, 40.00 with 16"]


def test_a_perplexity_that_is_not_a_number_has_no_effective_length() -> None:
    table = pd.DataFrame(
        {"run": ["a", "a", "b"], "varied": "mem_len", "length": [0, 8, 8], "ppl": [50.0, math.nan, math.nan]}
    )
    assert effective_lengths(table) == ["a: mem_len 0 is enough to be within 1% of the best perplexity, 50.00 with 0"]


def test_same_length_is_never_tried_without_memory(compressive_run: Run) -> None:
    runs = open_runs([compressive_run.folder], EvalOptions(same_length=True))
    table = perplexity_by_memory(runs, "valid", Silent())
    assert table[table["varied"] == "mem_len"]["length"].min() == 1
    with pytest.raises(ParnasError, match="mem_len is 0"):
        open_runs([compressive_run.folder], EvalOptions(same_length=True, mem_len=0))


def test_lengths_come_from_the_command_then_the_evaluation_then_training(corpus: Path, tmp_path: Path) -> None:
    evaluation = {"evaluation__cmem_len": 3, "evaluation__clamp_len": 9, "evaluation__same_length": True}
    run = retrain(
        small_config(corpus, model__arch="c", train__steps=2, **MEMORY, **evaluation), tmp_path / "run", Silent()
    )
    (eval_run,) = open_runs([run.folder], EvalOptions())
    assert eval_run.shape.reach == Reach(8, 3, 9, True)
    (eval_run,) = open_runs([run.folder], EvalOptions(mem_len=5, cmem_len=0, clamp_len=4, same_length=False))
    assert eval_run.shape.reach == Reach(5, 0, 4, False)


def test_a_block_is_named_by_its_place_in_the_string(corpus: Path, tmp_path: Path) -> None:
    """As derive and the attention maps name it; identity counts."""
    run = retrain(small_config(corpus, model__arch="sifs", train__steps=2), tmp_path / "run", Silent())
    table = attention_by_age(open_runs([run.folder], EvalOptions()), "valid")
    assert list(table["block"].unique()) == [1, 4]


# The command and its pictures


def test_the_command_writes_tables_and_pictures(
    compressive_run: Run, retrain_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "attention, frequency,memory,attention"
    folders = str(compressive_run.folder), str(retrain_run.folder)
    assert run_command("evaluate", *folders, "--analyse", names, "--out", str(tmp_path)) == 0
    pictures = {"curves.png", "attention-compressive.png", "attention-retrain.png", "frequency.png", "memory.png"}
    assert {path.name for path in tmp_path.glob("*.png")} == pictures
    assert all((tmp_path / name).stat().st_size > 5000 for name in pictures)
    for name, columns in (("attention", "weight"), ("frequency", "occurrences"), ("memory", "gain")):
        assert columns in pd.read_csv(tmp_path / f"{name}.csv")
    shown = capsys.readouterr().out
    for text in (
        "attention by age",
        "perplexity per word by occurrences",
        "perplexity per token by memory",
        "is enough",
    ):
        assert text in shown
    assert run_command("evaluate", str(retrain_run.folder), "--out", str(tmp_path)) == 0
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith(("attention", "frequency", "memory"))}
    assert not left, "what an earlier comparison had is none of this one's"


def test_only_files_of_an_earlier_comparison_are_removed(retrain_run: Run, tmp_path: Path) -> None:
    for name in ("attention.csv", "memory-usage.png"):
        (tmp_path / name).write_text("a file of somebody")
    assert run_command("evaluate", retrain_run.folder, "--out", tmp_path) == 0
    assert (tmp_path / "attention.csv").read_text() == "a file of somebody"
    assert run_command("evaluate", retrain_run.folder, "--out", tmp_path) == 0
    assert not (tmp_path / "attention.csv").exists()
    assert (tmp_path / "memory-usage.png").exists(), "no analysis writes it"


@pytest.mark.parametrize("listed, message", [("attention,age", "'age'"), (" ,", "is empty")])
def test_other_analyses_are_refused_before_anything_is_read(
    listed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, "evaluate", "nowhere", "--analyse", listed)


def test_networks_without_attention_or_memory(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], retrain_run: Run
) -> None:
    config = small_config(corpus, model__arch="ff", train__steps=2)
    run = retrain(config, tmp_path / "run", Silent())
    out = "--out", tmp_path / "out"
    told = refusal(capsys, "evaluate", run.folder, "--analyse", "attention", *out)
    assert "None of the networks has attention" in told
    assert run_command("evaluate", retrain_run.folder, "--mem-len", 0, "--analyse", "attention", *out) == 0
    assert set(pd.read_csv(tmp_path / "out" / "attention.csv")["part"]) == {"segment"}


def test_compressed_memory_may_be_switched_off(compressive_run: Run) -> None:
    for lengths in ({"cmem_len": 0}, {"cmem_len": 0, "mem_len": 0}, {"mem_len": 0}):
        (run,) = open_runs([compressive_run.folder], EvalOptions(**lengths))
        assert run.score("valid").isfinite().all()


def test_runs_whose_names_differ_in_signs_alone_have_pictures_of_their_own(tmp_path: Path) -> None:
    rows = [
        {"run": run, "block": 1, "layer": "s", "part": "segment", "bucket": 1, "per_position": 0.1}
        for run in ("runs/x/a", "runs-x/a")
    ]
    assert len(set(draw_attention(pd.DataFrame(rows), tmp_path))) == 2


def test_bytes_of_one_character_are_never_white_space() -> None:
    from parnas.data.tokenizers import ByteTokenizer

    text = "voilà le Рим хор\n"
    tokenizer = ByteTokenizer(sorted(set(text.encode())), lowercase=False)
    ids = np.array(tokenizer.encode(text), np.uint16)
    found = spell_words(ids, word_starts(ids, tokenizer), tokenizer)
    assert len(found) == 5
    assert found[1:2] + found[4:] == ["le", "\n"]


def test_a_bucket_without_words_is_shown_and_a_huge_loss_is_infinite(capsys: pytest.CaptureFixture[str]) -> None:
    from parnas.cli.tables import show_analysis

    rows = [
        {"run": run, "occurrences": bucket, "words": number, "ppl": math.nan if number == 2 else math.inf}
        for run in ("a", "b[c]")
        for number, bucket in enumerate((*BUCKETS, "all"))
    ]
    show_analysis(Analysis("frequency", "title", pd.DataFrame(rows)))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[-1:] == ["b[c]"] for line in lines), "brackets are no markup"
    assert sum("inf" in line for line in lines) == 4
    assert any(line.split()[:3] == ["100", "to", "999"] for line in lines)


@pytest.mark.parametrize("runs", [1, 9])
def test_pictures_of_one_run_and_of_many_with_odd_names(runs: int, tmp_path: Path) -> None:
    names = [f"$x^{number} {'long/' * 20}" for number in range(runs)]
    frequency = pd.DataFrame(
        [
            {"run": name, "occurrences": bucket, "words": 5, "ppl": 10.0}
            for name in names
            for bucket in (*BUCKETS, "all")
        ]
    )
    memory = pd.DataFrame(
        [
            {"run": name, "varied": "mem_len", "length": at, "sees": at, "ppl": 10.0 + at}
            for name in names
            for at in (0, 8, 16)
        ]
    )
    attention = pd.DataFrame(
        [
            {"run": name, "block": block, "layer": "s:heads=2", "part": "segment", "bucket": 1, "per_position": 0.1}
            for name in names
            for block in (1, 2)
        ]
    )
    assert len(draw_attention(attention, tmp_path)) == runs
    assert all(path.is_file() for path in draw_frequency(frequency, tmp_path) + draw_memory(memory, tmp_path))
