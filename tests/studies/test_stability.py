"""A search with several seeds: votes, distances, the consensus, and resuming after an interruption."""

import csv
import itertools
import json
import math
import random
import shutil
from pathlib import Path

import pytest
from conftest import small_config
from helpers.command_helpers import files_of, run_command
from PIL import Image

from parnas.architecture import Architecture
from parnas.config.loader import dump_config
from parnas.errors import ParnasError
from parnas.figures.heatmap import draw_votes
from parnas.nas.cost import count_costs
from parnas.nas.derive import BlockChoice, read_pi
from parnas.nas.rerank import losses_of_run
from parnas.runs.run import PI, Run
from parnas.studies.stability import compare_seeds, edit_distance, mean_of_pairs, stability
from parnas.training.checkpoints import list_checkpoints
from parnas.training.progress import Silent
from parnas.training.trainer import Trainer


def choose(pi: dict[str, float]) -> BlockChoice:
    """The likeliest candidate of a block."""
    return BlockChoice.from_pi(max(pi, key=lambda name: pi[name]), pi)


def random_pi(draw: random.Random, space: str = "sfi") -> dict[str, float]:
    weights = [draw.expovariate(1) for _ in space]
    return {letter: weight / sum(weights) for letter, weight in zip(space, weights, strict=True)}


def seeds_of(*strings: str, sure: float = 0.8) -> list[list]:
    """Choices of seeds that each prefer their string with probability `sure`."""
    rest = (1 - sure) / 2
    return [[choose({letter: sure if letter == own else rest for letter in "sfi"}) for own in s] for s in strings]


def slow_edit_distance(one: str, other: str) -> int:
    if not one or not other:
        return len(one) + len(other)
    if one[0] == other[0]:
        return slow_edit_distance(one[1:], other[1:])
    return 1 + min(
        slow_edit_distance(one[1:], other), slow_edit_distance(one, other[1:]), slow_edit_distance(one[1:], other[1:])
    )


def test_edit_distance_is_that_of_the_recursive_definition() -> None:
    draw = random.Random(0)
    for _ in range(200):
        one, other = ("".join(draw.choices("sf", k=draw.randint(0, 5))) for _ in range(2))
        assert edit_distance(one, other) == slow_edit_distance(one, other) == edit_distance(other, one)
    assert edit_distance("kitten", "sitting") == 3


def test_the_consensus_is_the_string_of_the_greatest_summed_log_probability() -> None:
    """Against trying every string of the space."""
    draw = random.Random(1)
    for _ in range(30):
        blocks = [[choose(random_pi(draw)) for _ in range(3)] for _ in range(4)]

        def log_probability(string: tuple[str, ...], seeds: list = blocks) -> float:
            return sum(
                math.log(block.pi[layer])
                for own_blocks in seeds
                for block, layer in zip(own_blocks, string, strict=True)
            )

        best = max(itertools.product("sfi", repeat=3), key=log_probability)
        assert compare_seeds(range(4), blocks).consensus == best


def test_the_reranked_consensus_has_the_least_mean_estimate(repeated: Path) -> None:
    """Against the estimate of every network by each seed, read by itself."""
    runs = [Run(repeated / f"seed-{seed}") for seed in (3, 4)]
    pis = [read_pi(run, run.config())[1] for run in runs]
    loss_of = [losses_of_run(run, Silent()).full for run in runs]

    def mean_estimate(string: tuple[str, ...]) -> float:
        chances = [math.prod(row[name] for row, name in zip(pi, string, strict=True)) for pi in pis]
        losses = [loss(Architecture(string)) - 0.02 * math.log(p) for loss, p in zip(loss_of, chances, strict=True)]
        return sum(losses) / 2

    strings = [string for string in itertools.product("sfi", repeat=3) if set(string) != {"i"}]
    consensus = json.loads((repeated / "stability.json").read_text())["consensus"]
    assert mean_estimate(tuple(consensus)) == pytest.approx(min(map(mean_estimate, strings)), abs=1e-5)


def test_candidates_that_a_block_lacks_are_no_choice(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, search__space=(("s",), ("s", "f"), ("f",)))
    result = stability(config, tmp_path / "run", 2, Silent())
    assert result.consensus in [("s", "s", "f"), ("s", "f", "f")]


def test_one_sure_seed_outweighs_a_narrow_majority() -> None:
    narrow, sure = {"s": 0.52, "f": 0.46, "i": 0.02}, {"s": 0.01, "f": 0.98, "i": 0.01}
    block = compare_seeds([1, 2, 3], [[choose(narrow)], [choose(narrow)], [choose(sure)]]).blocks[0]
    assert (block.consensus, block.majority, block.agrees) == ("f", "s", False)
    assert block.votes == {"s": 2, "f": 1, "i": 0}
    assert block.mean_pi["s"] == pytest.approx((0.52 + 0.52 + 0.01) / 3)


def test_a_tied_vote_has_no_majority_and_pi_may_be_zero() -> None:
    pis = [{"s": 1.0, "f": 0.0, "i": 0.0}, {"s": 0.0, "f": 1.0, "i": 0.0}]
    block = compare_seeds([1, 2], [[choose(pi)] for pi in pis]).blocks[0]
    assert block.majority is None
    assert not block.agrees
    assert block.consensus == "s"  # one zero each, against two for identity: the first in the space
    assert all(math.isfinite(value) for value in block.mean_log_pi.values())


def test_distances_count_blocks_and_edits_of_networks() -> None:
    result = compare_seeds([1, 2, 3], seeds_of("sifs", "isfs", "fiii"))
    assert result.hamming() == [[0, 2, 3], [2, 0, 4], [3, 4, 0]]
    assert result.edits() == [[0, 0, 2], [0, 0, 2], [2, 2, 0]]  # sfs, sfs and f
    content = result.to_dict()
    assert content["mean_hamming"] == pytest.approx((2 + 3 + 4) / 3)
    assert content["mean_edit"] == pytest.approx((0 + 2 + 2) / 3)
    assert content["networks"] == [list("sfs"), list("sfs"), ["f"]]
    assert mean_of_pairs([[0]]) == 0


def test_a_seed_that_chose_identity_alone_is_a_result_too() -> None:
    result = compare_seeds([1, 2], seeds_of("ii", "sf"))
    assert result.edits() == [[0, 2], [2, 0]]
    assert result.to_dict()["networks"][0] == []


def test_searches_of_different_spaces_are_refused() -> None:
    with pytest.raises(ParnasError):
        compare_seeds([1, 2], [seeds_of("sf")[0], seeds_of("sfs")[0]])
    with pytest.raises(ParnasError):
        compare_seeds([1, 2], [seeds_of("s")[0], [choose({"s": 0.5, "f": 0.5})]])


def test_the_consensus_meets_the_cost_target(corpus: Path, tmp_path: Path) -> None:
    """Against all strings within it; without a target both seeds would take attention everywhere."""
    config = small_config(corpus, search__cost__target=0.65, search__rerank_top_k=0)
    stability(config, tmp_path / "run", 2, Silent())
    costs, pi = count_costs(config, "macs"), [[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.5, 0.3, 0.2]]
    for seed in (1, 2):
        Run(tmp_path / "run" / f"seed-{seed}").append(PI, {"step": 24, "tau": 0.1, "pi": pi})
    affordable = [string for string in itertools.product("sfi", repeat=3) if costs.share(string) <= 0.65]
    best = max(
        affordable, key=lambda string: math.prod(pi[block]["sfi".index(layer)] for block, layer in enumerate(string))
    )
    assert stability(config, tmp_path / "run", 2, Silent()).consensus == best != ("s", "s", "s")


@pytest.fixture(scope="module")
def repeated(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds, from the command line."""
    folder = tmp_path_factory.mktemp("stability")
    (folder / "small.yaml").write_text(dump_config(small_config(corpus, runtime__seed=3)))
    assert run_command("stability", str(folder / "small.yaml"), "--seeds", "2", "--run", str(folder / "run")) == 0
    return folder / "run"


def test_each_seed_is_the_search_of_that_seed(repeated: Path, corpus: Path, tmp_path: Path) -> None:
    from parnas.nas.search import search

    assert sorted(path.name for path in repeated.glob("seed-*")) == ["seed-3", "seed-4"]
    alone = search(small_config(corpus, runtime__seed=4), tmp_path / "alone", Silent())
    assert Run(repeated / "seed-4").pi_records() == alone.pi_records()
    assert Run(repeated / "seed-3").pi_records() != alone.pi_records()


def test_files_table_and_picture_agree(repeated: Path) -> None:
    content = json.loads((repeated / "stability.json").read_text())
    assert content["seeds"] == [3, 4]
    for seed, string in zip(content["seeds"], content["strings"], strict=True):
        assert "".join(string) == Run(repeated / f"seed-{seed}").summary().arch
    rows = list(csv.DictReader((repeated / "stability.csv").open()))
    assert len(rows) == 9
    for row in rows:
        block = content["blocks"][int(row["block"]) - 1]
        assert int(row["votes"]) == block["votes"][row["candidate"]]
        assert int(row["consensus"]) == (block["consensus"] == row["candidate"])
        assert float(row["mean_pi"]) == pytest.approx(block["mean_pi"][row["candidate"]])
    assert Image.open(repeated / "figures" / "votes.png").size[0] > 300


def test_finished_seeds_are_loaded_and_more_are_added(repeated: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    shutil.copytree(repeated, folder)
    before = files_of(folder / "seed-3") | files_of(folder / "seed-4")
    assert run_command("stability", "--seeds", "3", "--run", str(folder)) == 0
    assert files_of(folder / "seed-3") | files_of(folder / "seed-4") == before
    assert json.loads((folder / "stability.json").read_text())["seeds"] == [3, 4, 5]
    out = capsys.readouterr().out
    assert "mean pairwise distance" in out
    assert "consensus: " in out


def test_an_interrupted_seed_is_resumed_from_its_checkpoint(
    repeated: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second seed stops after a checkpoint, a third before its first files: both end as without interruption."""
    config, folder, steps = small_config(corpus, runtime__seed=3), tmp_path / "run", []
    shutil.copytree(repeated, folder)
    shutil.rmtree(folder / "seed-4")
    original = Trainer.train_step

    def step_or_stop(self: Trainer, *arguments: object) -> object:
        steps.append(self.step)
        if len(steps) == 13:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", step_or_stop)
    with pytest.raises(KeyboardInterrupt):
        stability(config, folder, 2, Silent())
    assert [path.name[-2:] for path in list_checkpoints(folder / "seed-4" / "checkpoints")] == ["08", "12"]
    steps.clear()
    steps += [0] * 100
    (folder / "seed-5").mkdir()
    (folder / "seed-5" / "environment.json").write_text("torn")
    result = stability(config, folder, 3, Silent())
    assert steps[100:] == [*range(12, 24), *range(24)]
    assert Run(folder / "seed-4").pi_records() == Run(repeated / "seed-4").pi_records()
    assert len(Run(folder / "seed-4").metrics()) == len(Run(repeated / "seed-4").metrics())
    assert result.seeds == (3, 4, 5)


def test_other_settings_and_other_folders_are_refused(repeated: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match=r"search\.lr"):
        stability(small_config(corpus, runtime__seed=3, search__lr=1e-4), repeated, 2, Silent())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ParnasError):
        stability(small_config(corpus), tmp_path, 2, Silent())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_seed_replaced_by_a_search_of_other_settings_is_refused(repeated: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(repeated, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "seed-4")
    shutil.copytree(tmp_path / "run" / "seed-3", tmp_path / "run" / "seed-4")
    with pytest.raises(ParnasError, match=r"runtime\.seed"):
        stability(small_config(corpus, runtime__seed=3), tmp_path / "run", 2, Silent())


def test_pictures_of_many_blocks_and_of_broken_files(tmp_path: Path) -> None:
    for blocks in (1, 60, 200):
        compare_seeds([1, 2], seeds_of("s" * blocks, "f" * blocks)).write(tmp_path)
        assert draw_votes(tmp_path).is_file()
    (tmp_path / "stability.json").write_text('{"blocks": 3}')
    with pytest.raises(ParnasError, match="stability"):
        draw_votes(tmp_path)
