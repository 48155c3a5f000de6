"""Where a study of settings is kept: its folder, its storage and terms, and several workers."""

import subprocess
import sys
from pathlib import Path

import pytest
from blackbox_helpers import STORAGES
from conftest import small_config
from tuning_helpers import SPACE, Pretending, pretending, run_study

from parnas.config import dump_config
from parnas.errors import ParnasError
from parnas.files import write_json
from parnas.nas.storage import keepable
from parnas.nas.tuning import STORAGE, STUDY, tune
from parnas.nas.tuning_space import read_space
from parnas.nas.tuning_trials import Demands
from parnas.run import Run
from parnas.training.reporter import Silent

pytestmark = pytest.mark.usefixtures("impatient")
__all__ = ["pretending"]


def test_a_folder_keeps_which_study_it_belongs_to(corpus: Path, tmp_path: Path, pretending: Pretending) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    run_study(corpus, tmp_path / "run", 2, storage=url)
    study = run_study(corpus, tmp_path / "run", 3)
    assert (study.study, len(study.trials)) == ("test", 3)
    assert not (tmp_path / "run" / STORAGE).exists()
    config = small_config(corpus, model__arch="sfs")
    demands = Demands("retrain", read_space(SPACE, config, "retrain"), 3, url, "other")
    with pytest.raises(ParnasError, match=r"belongs to the study test in .*; choose another --run"):
        tune(config, demands, tmp_path / "run", Silent())
    run_study(corpus, tmp_path / "own", 1)
    with pytest.raises(ParnasError, match="has a study of its own"):
        tune(config, demands, tmp_path / "own", Silent())
    write_json(tmp_path / "run" / STUDY, {"storage": None, "study": "test"})  # as where its address has a password
    with pytest.raises(ParnasError, match="belongs to the study test; give its --storage and --study"):
        run_study(corpus, tmp_path / "run", 3)
    assert keepable(url) == url
    assert keepable("journal:file") == f"journal:{Path('file').resolve()}"
    assert keepable("postgresql://me@host/db") == "postgresql://me@host/db"
    assert keepable("postgresql://me:secret@host/db") is keepable("postgresql://host/db?password=secret") is None
    write_json(tmp_path / "run" / STUDY, {})
    with pytest.raises(ParnasError, match="does not say which study"):
        run_study(corpus, tmp_path / "run", 3)


def test_a_study_that_cannot_be_opened_leaves_the_folder_free(
    corpus: Path, tmp_path: Path, pretending: Pretending
) -> None:
    with pytest.raises(ParnasError, match="is no storage"):
        run_study(corpus, tmp_path / "run", 1, storage="nonsense:/x")
    url = f"sqlite:///{tmp_path}/s.db"
    assert len(run_study(corpus, tmp_path / "run", 1, storage=url).trials) == 1
    with pytest.raises(ParnasError, match="belongs to the study test in"):
        run_study(corpus, tmp_path / "run", 1, storage=f"sqlite:///{tmp_path}/another.db")
    with pytest.raises(ParnasError, match="is no address of a database"):
        run_study(corpus, tmp_path / "run", 1, storage="nonsense")


def test_a_study_whose_folder_was_moved_goes_on(corpus: Path, tmp_path: Path, pretending: Pretending) -> None:
    before = run_study(corpus, tmp_path / "s", 3)
    (tmp_path / "s").rename(tmp_path / "moved")
    after = run_study(corpus, tmp_path / "moved", 4)
    assert len(pretending.asked) == 4
    assert after.trials[:3] == before.trials
    assert after.study == "s"


def test_the_training_of_another_study_is_never_taken_for_a_trial(corpus: Path, tmp_path: Path) -> None:
    """As where the file of the study was removed, or another study is given the same folder."""
    space = {"train.lr": "log:1e-3..1e-1"}
    run_study(corpus, tmp_path / "s", 1, space, train__steps=2)
    (tmp_path / "s" / "study.log").unlink()
    changed = Run(tmp_path / "s" / "trial-0").config().replace(train__lr=0.05)
    (tmp_path / "s" / "trial-0" / "config.yaml").write_text(dump_config(changed))
    with pytest.raises(ParnasError, match=r"trial-0 was begun with another configuration:\n.*train\.lr: 0\.05 before"):
        run_study(corpus, tmp_path / "s", 1, space, train__steps=2)


WORKER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import parnas.nas.workers as workers
import parnas.nas.tuning_trials as module
from tuning_helpers import Pretending, run_study
workers.POLL_SECONDS = 0.02
url, corpus, folder, log = sys.argv[1], *map(Path, sys.argv[2:])
module.TRAIN["retrain"] = Pretending(log, seconds=0.05)
found = run_study(corpus, folder, 10, storage=url)
assert len(found.trials) == 10
"""


@pytest.mark.slow
@pytest.mark.parametrize("url", STORAGES)
def test_two_workers_share_a_study(url: str, corpus: Path, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "s"
    script = WORKER.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, url.format(tmp_path), str(corpus), str(folder), str(log)]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len({place for place, _ in lines}) == len(lines), "two trained in one folder"
    assert len(lines) <= 10
    assert len(list(folder.glob("trial-*"))) == len(lines)


def test_a_lost_trial_that_is_not_here_begins_in_a_folder_of_its_own(
    corpus: Path, tmp_path: Path, pretending: Pretending
) -> None:
    """As where the worker that died was on another machine, or was given up and still lives."""
    storage = f"sqlite:///{tmp_path}/s.db"

    def interrupt(number: int, step: int) -> None:
        if number == 1:
            raise KeyboardInterrupt

    pretending.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        run_study(corpus, tmp_path / "there", 3, storage=storage)
    found = run_study(corpus, tmp_path / "here", 3, storage=storage)
    assert [each.folder for each in found.trials] == ["trial-0", "trial-2", "trial-3"]
    assert (tmp_path / "here" / "trial-2").is_dir()


def test_a_folder_that_another_worker_begins_meanwhile_is_shared(
    corpus: Path, tmp_path: Path, pretending: Pretending, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Run.refuse_used

    def begun_meanwhile(run: Run) -> None:
        if run.folder == tmp_path / "s":
            run.folder.mkdir()
            run.folder.joinpath("config.yaml").write_text(dump_config(small_config(corpus, model__arch="sfs")))
        refuse(run)

    monkeypatch.setattr(Run, "refuse_used", begun_meanwhile)
    assert len(run_study(corpus, tmp_path / "s", 1).trials) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    with pytest.raises(ParnasError, match="already holds files"):
        run_study(corpus, tmp_path / "other", 1)


# The terms.


def test_a_study_keeps_its_terms(corpus: Path, tmp_path: Path, pretending: Pretending) -> None:
    storage = f"sqlite:///{tmp_path}/s.db"
    run_study(corpus, tmp_path / "a", 1, storage=storage)
    run_study(corpus, tmp_path / "b", 2, storage=storage, search__lr=0.5, train__log_every=1)
    with pytest.raises(ParnasError, match=r"model\.d_inner: 32 before, 64 now"):
        run_study(corpus, tmp_path / "c", 2, storage=storage, model__d_inner=64)
    with pytest.raises(ParnasError, match=r"space: .*before"):
        run_study(corpus, tmp_path / "d", 2, {"train.lr": "0.1..0.2"}, storage=storage)
    with pytest.raises(ParnasError, match="begun with another configuration"):
        run_study(corpus, tmp_path / "a", 2, storage=storage, model__d_inner=64)
