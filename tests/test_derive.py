"""From pi to an architecture."""

import json
import math
import shutil
from pathlib import Path

import pytest
import yaml

from parnas.errors import ParnasError
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.derive import choose, derive, write_derivation
from parnas.run import PI, Run
from parnas.training.phases import load


def with_pi(run: Run, folder: Path, pi: list[list[float]]) -> Run:
    """A copy of a search whose last line of pi is given."""
    shutil.copytree(run.folder, folder)
    copy = Run(folder)
    copy.append(PI, {"step": 99, "tau": 0.1, "pi": pi})
    return copy


def test_argmax_entropy_and_margin_of_a_block() -> None:
    block = choose({"s": 0.2, "f": 0.5, "i": 0.3})
    assert block.layer == "f"
    assert block.margin == pytest.approx(0.2)
    assert block.entropy == pytest.approx(-(0.2 * math.log(0.2) + 0.5 * math.log(0.5) + 0.3 * math.log(0.3)))
    assert choose({"s": 0.5, "f": 0.5}).layer == "s"
    assert choose({"s": 0.0, "f": 1.0}).entropy == 0


def test_derives_the_last_pi_and_warns_of_small_margins(search_run: Run, tmp_path: Path) -> None:
    run = with_pi(search_run, tmp_path / "run", [[0.8, 0.1, 0.1], [0.31, 0.40, 0.29], [0.1, 0.2, 0.7]])
    derivation = derive(run)
    assert str(derivation.architecture) == "sfi"
    assert [warning for warning in derivation.warnings if "undecided" in warning] == [
        "block 2 is undecided: f leads by 0.090 only"
    ]


def test_arch_file_holds_the_string_and_its_evidence(search_run: Run, tmp_path: Path) -> None:
    derivation = derive(search_run)
    write_derivation(derivation, search_run, tmp_path / "arch.yaml")
    content = yaml.safe_load((tmp_path / "arch.yaml").read_text())
    assert content["arch"] == search_run.summary()["arch"]
    assert [list(block["pi"].values()) for block in content["blocks"]] == search_run.records(PI)[-1]["pi"]
    assert sum(content["counts"].values()) == len(content["arch"])


def test_parameters_are_those_of_the_network(search_run: Run, tmp_path: Path) -> None:
    derivation = derive(with_pi(search_run, tmp_path / "run", [[1, 0, 0], [0, 0, 1], [0, 1, 0]]))
    loaded = load(search_run.folder)
    network = TransformerXL.build(loaded.config.model, derivation.architecture, loaded.tokenizer.vocab_size)
    assert derivation.parameters == sum(parameter.numel() for parameter in network.parameters())


def test_an_unfinished_search_is_said_to_be(search_run: Run, tmp_path: Path) -> None:
    shutil.copytree(search_run.folder, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    assert any("has not ended" in warning for warning in derive(Run(tmp_path / "run")).warnings)


def test_what_cannot_be_derived_is_refused(search_run: Run, retrain_run: Run, tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match=r"no pi\.jsonl"):
        derive(retrain_run)
    with pytest.raises(ParnasError, match="no layer besides identity"):
        derive(with_pi(search_run, tmp_path / "run", [[0, 0, 1]] * 3))
    shutil.copytree(search_run.folder, tmp_path / "empty")
    (tmp_path / "empty" / PI).write_text("")
    with pytest.raises(ParnasError, match="no pi yet"):
        derive(Run(tmp_path / "empty"))
    lines = [json.dumps({"step": 1, "tau": 1.0, "pi": [[1, 0, 0]]}), "not json", "{}"]
    (tmp_path / "empty" / PI).write_text("\n".join(lines))
    with pytest.raises(ParnasError, match="broken at line 2"):
        derive(Run(tmp_path / "empty"))
