"""One-run training: the configurations of search and retraining."""

from pathlib import Path

import pytest
from conftest import small_config

from parnas.errors import ParnasError
from parnas.nas.one_run import healing, split_training
from parnas.training.optimizers import Schedule, learning_rate


def test_one_run_divides_the_steps_between_search_and_training(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, search__share=0.25, train__steps=40, train__warmup_steps=6, train__lr=5e-3)
    config = config.replace(search__estimator="uniform", search__cost__target=0.9)
    first, second = split_training(config, tmp_path / "search")
    assert (first.search.steps, second.train.steps) == (10, 30)
    search_settings = first.search
    schedule = Schedule(10, search_settings.lr, search_settings.warmup_steps, decays=search_settings.lr_decay)
    assert [learning_rate(step, schedule) for step in range(5, 10)] == [5e-3] * 5
    assert search_settings.alpha_start_step < search_settings.alpha_end_step == 10
    assert (first.search.lr, first.search.lr_decay, first.search.uniform_fraction) == (5e-3, False, 1.0)
    assert second.train.inherit == str(tmp_path / "search")
    assert second.train.warmup_steps == 1
    assert split_training(first, tmp_path / "search")[0] == first, "a resumed first part is not divided again"
    assert (first.search.gate_samples, first.search.paths_within_target) == (1, True)
    assert (first.search.alpha_start_step, first.search.alpha_every, first.search.block_ridge) == (5, 2, 100)
    assert (first.search.least_attention, first.search.rerank_tokens) == (1, 8192)
    assert first.search.alpha_lr == 4, "three updates, whose rates add up to twice this rate"
    given = {"gate_samples": 2, "paths_within_target": False, "rerank_top_k": 3, "evolution_steps": 5}
    given |= {"block_ridge": 7, "least_attention": 0, "rerank_tokens": 64}
    kept, _ = split_training(config.replace(**{f"search__{name}": of for name, of in given.items()}), tmp_path / "a")
    assert {name: getattr(kept.search, name) for name in given} == given
    without, _ = split_training(config.replace(search__space=("f", "i")), tmp_path / "b")
    assert without.search.least_attention == 0, "the space has no attention"


def test_the_rate_of_a_short_search_rises_as_in_the_whole_training(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, search__share=0.25, train__steps=40, train__warmup_steps=30, train__lr=6e-3)
    first, second = split_training(config, tmp_path)
    assert second.train.warmup_steps == 20, "what is left of the warm-up"
    search = first.search
    short = Schedule(search.steps, search.lr, search.warmup_steps, decays=search.lr_decay)
    whole = Schedule(40, 6e-3, 30)
    assert [learning_rate(step, short) for step in range(9)] == pytest.approx(
        [learning_rate(step, whole) for step in range(9)]
    )


def test_alpha_has_more_updates_if_it_learns_from_the_training_text(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, search__share=0.5, train__steps=40, search__estimator="soft")
    held_out, reused = (split_training(config.replace(search__alpha_split=of), tmp_path)[0] for of in (0.1, 0))
    assert held_out.search.alpha_lr == 2 * reused.search.alpha_lr


def test_a_smaller_network_recovers_in_a_quarter_of_the_steps_at_a_lower_rate(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, train__steps=40, train__lr=8e-3, train__warmup_steps=30)
    train = healing(config, tmp_path / "front-0.8").train
    assert (train.steps, train.lr, train.warmup_steps) == (10, 3e-3, 0)
    assert train.inherit == str(tmp_path / "front-0.8")


@pytest.mark.parametrize(("steps", "share"), [(8, 0.01), (8, 0.99), (40, 0.99)])
def test_both_parts_of_a_run_have_steps(corpus: Path, tmp_path: Path, steps: int, share: float) -> None:
    config = small_config(corpus, search__share=share, train__steps=steps)
    first, second = split_training(config, tmp_path)
    assert first.search.steps + second.train.steps == steps
    assert min(first.search.steps, second.train.steps) >= 1


def test_few_steps_are_not_divided(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match=r"needs 8 steps or more"):
        split_training(small_config(corpus, train__steps=7), tmp_path)
