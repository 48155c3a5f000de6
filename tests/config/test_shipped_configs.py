"""Every file in configs/ builds a network with the parameters named in its comment, and trains in both phases."""

import re
from pathlib import Path

import pytest
import torch
from helpers.data_helpers import write_corpus

from parnas.architecture import Architecture
from parnas.config.loader import Config, load_config
from parnas.data.token_frequencies import PUBLISHED as PUBLISHED_VOCABULARIES
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.search import search
from parnas.runs.run import Run
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
PUBLISHED_SYMBOLS = {"enwik8": 204, "text8": 27}  # vocabulary sizes behind the published parameter counts


def vocabulary(config: Config) -> int:
    """Return the configured vocabulary size, or that of the real corpus."""
    name, tokenizer = config.data.corpus, config.data.tokenizer
    return (
        tokenizer.vocab_size
        or PUBLISHED_SYMBOLS.get(name)
        or PUBLISHED_VOCABULARIES[(name, tokenizer.kind)]  # of words
    )


def with_plain_cutoffs(config: Config) -> Config:
    """Return the configuration with fixed cutoffs where they would be chosen by the text."""
    return config.replace(model__cutoffs=(500, 2000)) if isinstance(config.model.cutoffs, str) else config


def architecture_of(config: Config) -> str:
    return config.model.arch or f"interleaved-{config.search.blocks}"


def count(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@every_config
def test_both_networks_have_the_parameters_named_in_the_comment(path: Path) -> None:
    config = with_plain_cutoffs(load_config(path))
    with torch.device("meta"):
        plain = TransformerXL.build(config.model, Architecture.parse(architecture_of(config)), vocabulary(config))
        supernet = SuperNet(config.model, config.search.space, config.search.blocks, vocabulary(config))
    comment = "".join(line for line in path.read_text(encoding="utf-8").splitlines(True) if line.startswith("#"))
    published = [int(figure.replace(",", "")) for figure in re.findall(r"([\d,]{7,}) parameters", comment)]
    assert published in ([], [count(plain)])
    assert len(supernet.blocks) == config.search.blocks
    if config.model.arch is None:  # files with a search
        assert count(supernet) > count(plain)
        assert config.search.blocks == len(plain.blocks)


def shrunk(config: Config, corpus: Path) -> Config:
    """Return the configuration with small widths and lengths; tokenizer, head, norm, dropout and schedule stay.

    The published networks would take gigabytes and minutes.
    """
    kind, cutoffs = config.data.tokenizer.kind, config.model.cutoffs
    narrow = 4 * config.model.n_heads * (4 if config.model.div_val > 1 else 1)
    changes: dict[str, object] = {
        "data__corpus": str(corpus),
        "data__tokenizer__vocab_size": 380 if kind == "sentencepiece" else None,
        "data__batch_size": 2,
        "data__tgt_len": 8,
        "model__arch": "sfs",
        "model__d_model": narrow,
        "model__d_head": None,
        "model__d_inner": 2 * narrow,
        "model__mem_len": 8,
        "model__cutoffs": cutoffs if isinstance(cutoffs, str) else (10, 20, 22)[: len(cutoffs)],
        "search__blocks": 3,
        "search__steps": 2,
        "search__alpha_start_step": 0,
        "search__warmup_steps": 1,
        "search__cost__metric": "macs",
        "train__steps": 2,
        "train__warmup_steps": 1,
        "train__log_every": 1,
        "train__eval_every": 2,
        "train__save_every": 2,
        "evaluation__tgt_len": 8,
        "evaluation__mem_len": 16,
        "runtime__device": "cpu",
        "runtime__threads": 1,
    }
    return config.replace(**changes)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text"))


@every_config
def test_both_phases_train(path: Path, text: Path, tmp_path: Path) -> None:
    config = shrunk(load_config(path), text)
    for train in (search, retrain):
        run = train(config, tmp_path / train.__name__, Silent())
        assert run.finished()
        lines = list(Run(run.folder).metrics())
        assert [line.step for line in lines if line.split == "train"] == [1, 2]
