"""Content of the report page: the result of a search, and missing, unfinished or odd files."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.report_helpers import (
    Page,
    make_all,
    make_retraining,
    make_search,
    metric_lines,
    page_of,
    pi_lines,
    row,
    write_comparison,
    write_lines,
    write_summary,
)

from parnas.architecture import LETTERS, Architecture, Letter
from parnas.errors import ParnasError
from parnas.figures.report.page import write_report
from parnas.figures.report.result import describe_blocks, headline
from parnas.runs.run import METRICS, PI, STREAMS

# The result


def test_the_result_names_better_and_worse_measures(tmp_path: Path) -> None:
    page = page_of(make_all(tmp_path))
    assert "In 1 of its 3 blocks." in page.text
    assert "Self-attention in block 1; feed-forward in block 2; identity in block 3." in page.text
    assert "64.20 perplexity per token, 0.5 % lower (better) than the interleaved network's 64.50" in page.text
    assert "4.10 ms per segment, 2.5 % higher (worse) than the interleaved network's 4.00 ms" in page.text
    assert "Derive warned: block 2 is undecided" in page.text
    assert "Each network was trained once" in page.text
    assert "on the test split" in page.text


def test_an_interleaved_network_of_another_depth_is_compared_with_and_named(tmp_path: Path) -> None:
    """As the one of equal cost that a pipeline trains."""
    make_search(tmp_path / "search")
    rows = [row("derived", "sf", ppl=64.2), row("equal-cost", "sfsf", ppl=60.0), row("short", "s", ppl=70.0)]
    page = page_of(tmp_path / "search", write_comparison(tmp_path / "comparison", rows))
    assert "64.20 perplexity per token, 7.0 % higher (worse) than the interleaved network sfsf's 60.00" in page.text
    assert "No interleaved network" not in page.text
    rows.append(row("interleaved", "sfs", ppl=65.0))
    page = page_of(tmp_path / "search", write_comparison(tmp_path / "comparison", rows))
    assert "1.2 % lower (better) than the interleaved network's 65.00" in page.text


def test_only_a_network_trained_from_scratch_is_compared(tmp_path: Path) -> None:
    make_search(tmp_path / "search")
    rows = [row("search", "sfi", "derived, in SuperNet", ppl=50.0), row("plain", "sfs", ppl=60.0)]
    page = page_of(tmp_path / "search", write_comparison(tmp_path / "comparison", rows))
    assert "has not been trained from scratch in the runs given here" in page.text
    assert "--arch" in page.text
    assert "(better)" not in page.text


def test_without_a_comparison_the_table_comes_from_the_runs_and_names_the_command_that_times_them(
    tmp_path: Path,
) -> None:
    make_all(tmp_path)
    page = page_of(*(tmp_path / name for name in ("search", "derived", "interleaved")))
    assert "64.20 perplexity per token, 0.5 % lower" in page.text
    assert "Latency was not measured." in page.text
    assert f"parnas evaluate {tmp_path}/derived {tmp_path}/interleaved" in page.text
    assert "ms per segment" not in page.text
    assert "272,204 tokens for perplexity per token" in page.text


def test_an_unfair_or_empty_comparison_has_a_note(tmp_path: Path) -> None:
    make_search(tmp_path / "search", derived="sfs")
    page = page_of(tmp_path / "search", write_comparison(tmp_path / "same", [row("one", "sfs"), row("two", "sfsi")]))
    assert "It is the interleaved network itself" in page.text
    assert "(better)" not in page.text
    (tmp_path / "search" / "arch.yaml").write_text("arch: sfi\n")
    rows = [row("one", "sfi", steps=10), row("two", "sfs", steps=20)]
    page = page_of(tmp_path / "search", write_comparison(tmp_path / "other", rows))
    assert "Steps of training: derived network 10, interleaved 20." in page.text


@pytest.mark.parametrize(
    ("arch", "text"), [("fff", "In none of its 3 blocks."), ("s", "In its only block."), ("sc", "In every one")]
)
def test_the_headline_says_where_attention_is(arch: str, text: str) -> None:
    assert headline(Architecture.parse(arch)).startswith(text)
    assert "in 13 blocks" in describe_blocks(Architecture.parse("f*13 s:heads=2"))


def test_descriptions_of_own_layers_keep_their_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LETTERS, "e", Letter("GELU-gated feed-forward"))
    assert describe_blocks(Architecture.parse("fe")) == "Feed-forward in block 1; GELU-gated feed-forward in block 2."


# A search in a trained network


def make_family(place: Path, parent: str = "parent", **changes: object) -> Path:
    """Write a search in a trained network, its parent, its child and a network from scratch, and their comparison."""
    searched = make_search(place / "comparison" / "search", derived="sfi", search__parent=str(place / parent))
    make_retraining(place / parent, "sfs", 60.0)
    teachers = {"train__inherit": str(searched.folder), "train__teachers": (str(place / parent),)}
    make_retraining(place / "child", "sfi", 60.6, **teachers)
    make_retraining(place / "scratch", "sfi", 62.0)
    figures = {"train_seconds": 246.0, "steps": 750, "inherited_steps": 500}
    rows = [
        row(parent, "sfs", ppl=60.0, latency_ms=10.0, folder=f"../{parent}"),
        row("child", "sfi", ppl=60.48, latency_ms=6.1, folder="../child", **figures) | changes,
        row("scratch", "sfi", ppl=62.0, latency_ms=6.1, folder="../scratch", steps=5000),
    ]
    return write_comparison(place / "comparison", rows)


def test_the_report_of_a_compression_begins_with_child_and_parent(tmp_path: Path) -> None:
    page = page_of(make_family(tmp_path))
    sentence = (
        "The child sfi takes 0.61 of the parent's time at 0.8 % higher perplexity, after a healing of 4.1 minutes."
    )
    assert sentence in page.text
    assert "Trained from inherited weights of 500 steps with teachers, the derived network reaches 60.48" in page.text
    assert "0.8 % higher (worse) than the parent's 60.00" in page.text
    assert "parent: 10.00 ms" in page.text
    assert "Trained from scratch in 5,000 steps, scratch, the same network, reaches 62.00 perplexity" in page.text
    assert "interleaved:" not in page.text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"latency_ms": None}, "The child sfi has 0.8 % higher perplexity compared with the parent, after a healing"),
        ({"ppl": 60.01}, "The child sfi takes 0.61 of the parent's time at equal perplexity, after"),
        ({"ppl": 30.0}, "The child sfi takes 0.61 of the parent's time at 50.0 % lower perplexity, after"),
        ({"ppl": None}, "at equal perplexity per word, after"),
        ({"train_seconds": None}, "The child sfi takes 0.61 of the parent's time at 0.8 % higher perplexity."),
        ({"train_seconds": 42.0}, "after a healing of 42 seconds."),
        ({"ppl": None, "word_ppl": None, "bits_per_byte": None}, "takes 0.61 of the parent's time, after a healing"),
    ],
)
def test_the_sentence_on_a_child_has_measured_values_only(tmp_path: Path, changes: dict, sentence: str) -> None:
    assert sentence in page_of(make_family(tmp_path, **changes)).text


def test_a_child_without_measured_values_has_no_such_sentence(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("ppl", "word_ppl", "bits_per_byte", "latency_ms"))
    page = page_of(make_family(tmp_path, **nothing))
    assert "The child" not in page.text
    assert "In 1 of its 3 blocks." in page.text


def test_parent_and_child_are_found_where_all_folders_were_moved(tmp_path: Path) -> None:
    make_family(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    assert "The child sfi takes 0.61 of the parent's time" in page_of(tmp_path / "after" / "comparison").text


def test_tables_say_how_each_network_was_trained(tmp_path: Path) -> None:
    page = page_of(make_family(tmp_path))
    assert "weights" in [text.strip() for text in page.texts]
    assert "inherited, distilled" in page.text
    assert "from scratch" in page.text
    alike = page_of(make_all(tmp_path / "other"))
    assert "weights" not in [text.strip() for text in alike.texts]
    assert "Weights of all networks: from scratch." in alike.text
    rows = [row("one", "sf"), row("two", "s", weights="inherited")]
    unknown = page_of(write_comparison(tmp_path / "unknown" / "comparison", rows))
    assert "inherited" in unknown.text


# Runs that lack something


def test_a_search_without_derive_says_what_derive_would_choose(tmp_path: Path) -> None:
    page = page_of(make_search(tmp_path / "search", derived=None).folder)
    assert "No network was derived yet" in page.text
    assert f"parnas derive {tmp_path}/search" in page.text
    assert "block 1: self-attention" in page.text


def test_an_unfinished_search_has_a_note(tmp_path: Path) -> None:
    page = page_of(make_search(tmp_path / "search", derived=None, finished=False).folder)
    assert "The search has not ended" in page.text
    assert "Not ended yet: search." in page.text


@pytest.mark.parametrize("spoil", ["empty", "missing"])
def test_a_search_that_logged_nothing_yet_gives_a_page_without_an_answer(spoil: str, tmp_path: Path) -> None:
    run = make_search(tmp_path / "search", derived=None, finished=False)
    for name in (PI, METRICS):
        (run.folder / name).unlink()
        if spoil == "empty":
            (run.folder / name).touch()
    page = page_of(run.folder)
    assert "has not logged any pi yet" in page.text
    assert "No pi was logged yet" in page.text
    assert "No finite loss was logged yet" in page.text
    assert page.data() == []


def test_a_single_logged_step_has_a_heatmap_and_no_slider(tmp_path: Path) -> None:
    page = page_of(make_search(tmp_path / "search", lines=1).folder)
    assert not page.all("input")
    assert "1 logged step." in page.text
    assert len(page.data()[0]["steps"]) == 1
    assert len([each for each in page.all("i") if (each.get("class") or "").startswith("cell")]) == 9


def test_a_retraining_alone_has_its_figures_and_no_search(tmp_path: Path) -> None:
    page = page_of(make_retraining(tmp_path / "derived", "sf").folder)
    assert "No search is among these runs" in page.text
    assert "64.20" in page.text
    assert "#pi" not in [link.get("href") for link in page.all("a")]


def test_losses_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    run = make_retraining(tmp_path / "derived", "sf")
    broken = [{"step": 60 + n, "split": "train", "loss": None, "ppl": None} for n in range(3)]
    write_lines(run.folder / METRICS, [*metric_lines(64.0), *broken])
    with (run.folder / METRICS).open("a") as file:
        file.write('{"step": 70, "split": "valid", "loss": NaN, "ppl": Infinity}\n')
    write_summary(run, "retrain", "sf", None)
    page = page_of(run.folder)
    assert "derived logged 4 loss(es) that were not finite" in page.text
    assert "180.50" in page.text
    assert "nan" not in page.text.lower().split()


def test_networks_without_a_finite_perplexity_or_a_latency_are_named_and_not_drawn(tmp_path: Path) -> None:
    rows = [row("one", "sf", ppl=None, word_ppl=None, bits_per_byte=None), row("two", "s", latency_ms=None)]
    page = page_of(write_comparison(tmp_path / "comparison", rows))
    assert "No network has both a finite perplexity and a latency." in page.text
    page = page_of(write_comparison(tmp_path / "comparison", [*rows, row("three", "f")]))
    assert "Not drawn, without a finite perplexity or a latency: one, two." in page.text


def test_runs_of_other_tokenizers_are_compared_by_words_alone(tmp_path: Path) -> None:
    make_search(tmp_path / "search")
    make_retraining(tmp_path / "derived", "sfi")
    make_retraining(tmp_path / "bytes", "sfs", data__tokenizer__kind="byte")
    rows = [row("derived", "sfi", word_ppl=180.0), row("bytes", "sfs", word_ppl=200.0)]
    for each in rows:
        del each["ppl"], each["tokens"]
        each["folder"] = f"../{each['run']}"
    page = page_of(tmp_path / "search", write_comparison(tmp_path / "comparison", rows))
    assert "180.00 perplexity per word, 10.0 % lower (better)" in page.text
    assert "perplexities per token are not comparable and left out" in page.text
    assert "Bits per byte over the steps" in page.text
    assert page.text.count("ppl per token") == 1  # of the search, which stands outside the comparison


def test_runs_whose_tokens_are_others_do_not_compare_by_token(tmp_path: Path) -> None:
    """Two versions of a tokenizer's library may make different tokens of one text by the same settings."""
    for name, tokens in (("one", 100), ("two", 90)):
        run = make_retraining(tmp_path / name, "sf")
        counts = {"valid": {"tokens": tokens}}
        (run.folder / STREAMS).write_text(json.dumps({"fingerprint": "the text", "splits": counts}))
    assert "so perplexities per token are not comparable" in page_of(tmp_path / "one", tmp_path / "two").text
    shutil.copyfile(tmp_path / "one" / STREAMS, tmp_path / "two" / STREAMS)
    assert "so perplexities per token are not comparable" not in page_of(tmp_path / "one", tmp_path / "two").text


@pytest.mark.parametrize("warnings", ["5", "undecided", "{block: 2}", "[3, [4]]", "null"])
def test_warnings_of_the_wrong_kind_are_refused(warnings: str, tmp_path: Path) -> None:
    run = make_search(tmp_path / "search")
    (run.folder / "arch.yaml").write_text(f"arch: sfi\nwarnings: {warnings}\n")
    with pytest.raises(ParnasError, match="warnings"):
        page_of(run.folder)


# What the SuperNet's weights reach


def test_a_search_has_the_figures_of_the_one_network_not_of_the_mixture(tmp_path: Path) -> None:
    run = make_search(tmp_path / "search")
    summary = json.loads((run.folder / "summary.json").read_text())
    summary["valid"] = summary["mixture"]  # as a search by the soft estimator has it
    (run.folder / "summary.json").write_text(json.dumps(summary))
    page = page_of(run.folder)
    assert "With the SuperNet's weights it reaches 70.00" in page.text
    assert "99.90" not in page.text


def test_figures_of_the_network_that_the_search_ended_with_are_not_given_to_another(tmp_path: Path) -> None:
    run = make_search(tmp_path / "search")
    (run.folder / "arch.yaml").write_text("arch: fff\n")
    page = page_of(run.folder)
    assert "With the SuperNet's weights" not in page.text
    assert "The search ended with another network, sfi, and validated that one." in page.text
    assert "search ended with sfi and validated that network" in page.text
    assert "180.50" not in page.text
    (run.folder / "arch.yaml").write_text("arch: sifi\n")  # identity does nothing
    assert "With the SuperNet's weights it reaches 70.00" in page_of(run.folder).text


@pytest.mark.parametrize(("last", "shown"), [("sfi", True), ("sss", False)])
def test_a_search_that_goes_on_has_the_figure_of_the_string_that_was_validated(
    last: str, shown: bool, tmp_path: Path
) -> None:
    run = make_search(tmp_path / "search", derived=None, finished=False)
    validated = {"step": 40, "split": "valid", "ppl": 99.9, "argmax_ppl": 71.25}
    write_lines(run.folder / METRICS, [validated])
    lines = pi_lines(5, 3)
    lines[3]["arch"], lines[4]["arch"] = "sfi", last
    write_lines(run.folder / PI, lines)
    cells = Page(write_report([run.folder], tmp_path / "page")).source
    assert (">71.25<" in cells) == shown
    assert ">99.90<" not in cells
