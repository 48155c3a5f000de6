"""What the command `derive` takes from its arguments into arch.yaml."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from parnas.cli.main import main
from parnas.nas.cost import count_costs
from parnas.runs.run import PI, Run, read_derivation

UNDECIDED = [[0.6, 0.3, 0.1], [0.41, 0.39, 0.2], [0.2, 0.3, 0.5]]


@pytest.fixture(scope="module")
def undecided(search_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished search whose last pi speaks for `ssi`, in the second block by a hair."""
    run = Run(Path(shutil.copytree(search_run.folder, tmp_path_factory.mktemp("derive") / "run")))
    step = run.config().search.steps
    with (run.folder / PI).open("a") as file:
        file.write(json.dumps({"step": step, "tau": 0.1, "pi": UNDECIDED}) + "\n")
    return run


def derived(run: Run, out: Path, *arguments: str) -> dict[str, Any]:
    """The content of arch.yaml."""
    with pytest.raises(SystemExit) as leaving:
        main(["derive", str(run.folder), "--out", str(out), *arguments])
    assert not leaving.value.code
    return read_derivation(out / "arch.yaml").to_dict()


def test_cost_target_and_metric_bound_the_cost(undecided: Run, tmp_path: Path) -> None:
    content = derived(undecided, tmp_path, "--rerank-top-k", "0", "--cost-target", "0.7", "--metric", "parameters")
    assert (content["cost"]["metric"], content["cost"]["target"]) == ("parameters", 0.7)
    costs = count_costs(undecided.config(), "parameters")
    assert content["cost"]["share"] == pytest.approx(costs.share(content["arch"]))
    assert content["cost"]["share"] <= 0.7 < costs.share("ssi")


def test_within_bounds_several_costs_at_once(undecided: Run, tmp_path: Path) -> None:
    by_hand = ("--rerank-top-k", "0")
    content = derived(undecided, tmp_path, *by_hand, "--within", "macs=0.9,cache=0.5")
    assert (content["cost"]["metric"], content["cost"]["target"]) == ("macs", 0.9)
    assert content["constraints"] == {"rerank_top_k": 0, "within": {"macs": 0.9, "cache": 0.5}}
    cache, macs = (count_costs(undecided.config(), metric) for metric in ("cache", "macs"))
    assert cache.share(content["arch"]) <= 0.5
    assert macs.share(content["arch"]) <= 0.9
    assert "0.5 of the interleaved network's cache" in content["method"]
    (further,) = content["further_costs"]
    assert (further["metric"], further["target"]) == ("cache", 0.5)
    assert further["share"] == pytest.approx(cache.share(content["arch"]))
    alone = derived(undecided, tmp_path, *by_hand, "--within", "macs=0.9")["arch"]
    assert alone == derived(undecided, tmp_path, *by_hand, "--cost-target", "0.9", "--metric", "macs")["arch"]
    assert cache.share(alone) > 0.5


def test_re_ranked_networks_keep_to_every_target(undecided: Run, tmp_path: Path) -> None:
    content = derived(undecided, tmp_path, "--rerank-top-k", "8", "--within", "macs=0.9,cache=0.5")
    cache = count_costs(undecided.config(), "cache")
    assert len(content["ranking"]) > 1
    assert all(cache.share(each["arch"]) <= 0.5 for each in content["ranking"])


@pytest.mark.parametrize(
    "text, message",
    [
        ("macs=0.5,size=1", "is 'size'; give one of latency, macs, parameters, cache"),
        ("macs", "A cost target (--within) is 'macs'"),
        ("macs=1,cache=0", "The target of cache (--within) is 0.0"),
        ("macs=0.01,cache=0.5", "within the other limits"),
        ("macs=1,parameters=0.01", "The further targets are parameters=0.01"),
    ],
)
def test_mistakes_in_within_are_named(
    undecided: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["derive", str(undecided.folder), "--out", str(tmp_path), "--within", text])
    assert leaving.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_within_replaces_target_and_metric(undecided: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["derive", str(undecided.folder), "--within", "macs=0.5", "--metric", "macs"])
    assert "leave out cost_target and metric" in capsys.readouterr().err


def test_max_bounds_a_layer(undecided: Run, tmp_path: Path) -> None:
    assert derived(undecided, tmp_path, "--rerank-top-k", "0")["arch"] == "ssi"
    assert derived(undecided, tmp_path, "--rerank-top-k", "0", "--max", "s=1")["arch"] == "sfi"
    assert derived(undecided, tmp_path, "--rerank-top-k", "0", "--max", "s=1", "--max", "f=0")["arch"] == "sii"


@pytest.mark.parametrize("count", [0, 3])
def test_top_candidates_are_re_ranked(undecided: Run, tmp_path: Path, count: int) -> None:
    content = derived(undecided, tmp_path, "--rerank-top-k", str(count))
    assert sum("loss" in each for each in content["ranking"]) == count


def test_the_file_warns_of_what_is_undecided(undecided: Run, tmp_path: Path) -> None:
    content = derived(undecided, tmp_path, "--rerank-top-k", "0")
    (warning,) = content["warnings"]
    assert warning.startswith("block 2 is undecided")
    assert "0.020" in warning


def test_the_cost_in_every_metric_is_printed(
    undecided: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    derived(undecided, tmp_path, "--rerank-top-k", "0", "--within", "macs=0.9,cache=0.5")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cost of the blocks")]
    assert ["macs" in lines[0], "cache" in lines[1]] == [True, True]


def test_the_least_number_of_attention_layers_holds_unless_max_limits_attention(undecided: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(undecided.folder, tmp_path / "run")))
    path = run.folder / "config.yaml"
    path.write_text(path.read_text().replace("least_attention: null", "least_attention: 2"))
    with (run.folder / PI).open("a") as file:
        file.write(json.dumps({"step": run.config().search.steps, "tau": 0.1, "pi": [[0.2, 0.7, 0.1]] * 3}) + "\n")
    content = derived(run, tmp_path, "--rerank-top-k", "0")
    assert content["counts"]["s"] == 2
    assert "at least 2 of s" in content["method"]
    assert derived(run, tmp_path, "--rerank-top-k", "0", "--max", "s=0")["arch"] == "fff"
