"""The mean of the weights of the last steps: what is validated, saved and resumed."""

from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.training_helpers import Recorded, Stop, StopAfter, assert_same_weights
from torch import nn

from parnas.config.loader import Config
from parnas.evaluation.comparison import compare, to_rows
from parnas.evaluation.loading import EvalOptions
from parnas.training.loaded_run import load
from parnas.training.progress import Silent
from parnas.training.retrain import retrain


def averaging(corpus: Path, share: float = 0.25, **changes: object) -> Config:
    return small_config(corpus, model__arch="f", train__average=share, **changes)


def test_the_mean_of_the_last_steps_is_validated_and_kept(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    run = retrain(averaging(corpus, train__steps=8, train__eval_every=1), tmp_path / "run", Silent())
    assert list(recorded.validated) == list(range(1, 9))
    for step, weights in recorded.validated.items():
        mean = torch.stack(recorded.after[6:step] or recorded.after[step - 1 : step]).double().mean(0)
        torch.testing.assert_close(weights.double(), mean, rtol=1e-6, atol=1e-7)
    assert not torch.equal(recorded.validated[8], recorded.after[7])
    recorded.assert_untouched()
    kept = nn.utils.parameters_to_vector(load(run.folder).model.parameters())
    assert torch.equal(kept, recorded.validated[8])
    rates = {line.lr for line in run.metrics() if line.step > 4}
    assert rates == {run.config().train.lr}


def test_evaluation_is_that_of_the_mean(corpus: Path, tmp_path: Path) -> None:
    run = retrain(averaging(corpus, share=0.5), tmp_path / "run", Silent())
    (row,) = to_rows(compare([run.folder], EvalOptions(), Silent()).table)
    assert row["word_ppl"] == pytest.approx(run.summary().valid.word_ppl, rel=1e-6)


@pytest.mark.parametrize("killed_after", [9, 20])
def test_a_run_killed_before_or_in_the_average_resumes_bit_by_bit(
    killed_after: int, corpus: Path, tmp_path: Path
) -> None:
    config = averaging(corpus, share=0.3, model__dropout=0.1)
    whole = retrain(config, tmp_path / "whole", Silent())
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(killed_after))
    resumed = retrain(config, tmp_path / "run", Silent(), resume=True)
    assert_same_weights(whole, resumed)
    assert resumed.summary().valid == whole.summary().valid


def test_a_run_cut_off_before_its_summary_is_measured_with_the_mean(corpus: Path, tmp_path: Path) -> None:
    config = averaging(corpus, share=0.3)
    run = retrain(config, tmp_path / "run", Silent())
    summary = run.summary()
    (run.folder / "summary.json").unlink()
    assert retrain(config, run.folder, Silent(), resume=True).summary().valid == summary.valid


def test_a_lengthened_run_resumes_from_its_own_weights_and_averages_its_last_steps(
    corpus: Path, tmp_path: Path
) -> None:
    """So it is the run that had been as long from the beginning, since its rate does not fall."""
    short, long = (averaging(corpus, share=0.25, train__steps=steps) for steps in (16, 24))
    whole = retrain(long, tmp_path / "whole", Silent())
    run = retrain(short, tmp_path / "run", Silent())
    assert_same_weights(whole, retrain(long, run.folder, Silent(), resume=True))


def test_a_run_lengthened_by_less_than_its_average_keeps_what_that_has(corpus: Path, tmp_path: Path) -> None:
    """Steps 9 to 16, asked for 11 to 20: 9 to 20, since what is in a mean cannot be taken out of it."""
    whole = retrain(averaging(corpus, share=0.6, train__steps=20), tmp_path / "whole", Silent())
    run = retrain(averaging(corpus, share=0.5, train__steps=16), tmp_path / "run", Silent())
    longer = averaging(corpus, share=0.5, train__steps=20)
    with pytest.raises(Stop):
        retrain(longer, run.folder, StopAfter(18), resume=True)
    assert_same_weights(whole, retrain(longer, run.folder, Silent(), resume=True))
