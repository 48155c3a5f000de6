"""The pointer against a loop over single positions."""

import math
from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.model_helpers import VOCABULARY, make_network, random_ids

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.config.schema import DistillConfig, Reach, Shape
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.evaluation.comparison import compare
from parnas.evaluation.loading import EvalOptions
from parnas.evaluation.scoring import score_sequentially, score_sliding
from parnas.export.segment import SegmentNetwork
from parnas.model.transformer_xl import TransformerXL
from parnas.pretrained.probe_model import probe_model
from parnas.pretrained.settings import search_settings
from parnas.training.checkpoints import list_checkpoints, load_weights
from parnas.training.device import Device
from parnas.training.inheritance import load_teachers
from parnas.training.loaded_run import load
from parnas.training.perplexity import score_tokens
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

CPU = Device(torch.device("cpu"), "fp32")
LENGTH = 7


def slow_probabilities(
    network: TransformerXL, hidden: list[torch.Tensor], tokens: list[int], first: int
) -> torch.Tensor:
    """Probabilities [V] after the last of `tokens`, whose hidden states are given, with positions from `first` on."""
    pointer = network.pointer
    query = pointer.query.weight @ hidden[-1]
    scores = {i: float(query @ hidden[i]) / math.sqrt(8) for i in range(first, len(tokens) - 1)}
    sentinel = float(pointer.sentinel.weight[0] @ hidden[-1] + pointer.sentinel.bias)
    total = math.exp(sentinel) + sum(map(math.exp, scores.values()))
    probabilities = math.exp(sentinel) / total * network.head.log_probs(hidden[-1][None])[0].exp()
    for i, score in scores.items():
        probabilities[tokens[i + 1]] += math.exp(score) / total
    return probabilities


@torch.no_grad()
@pytest.mark.parametrize("cutoffs", [(), (5, 9)])
def test_probabilities_equal_a_loop_over_the_positions_before(cutoffs: tuple[int, ...]) -> None:
    network, segments = make_network("sf", cutoffs=cutoffs, pointer_len=LENGTH), random_ids(2, 15).split(5, dim=1)
    hidden: list[list[torch.Tensor]] = [[], []]
    read: list[list[int]] = [[], []]
    memory = None
    for ids in segments:
        before = len(read[0])
        output = network(ids, memory)
        memory = output.memory
        log_probs = network.log_probs(output)
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 5))
        targets = random_ids(2, 5, seed=3)
        expected = -log_probs.gather(2, targets[..., None]).squeeze(-1)
        torch.testing.assert_close(network.score(output, targets), expected)
        torch.testing.assert_close(network.score(output.last(2), targets[:, -2:]), expected[:, -2:])
        for row in range(2):
            for place in range(5):
                hidden[row].append(output.hidden[row, place])
                read[row].append(int(ids[row, place]))
                first = max(0, before - LENGTH)
                slow = slow_probabilities(network, hidden[row], read[row], first)
                torch.testing.assert_close(log_probs[row, place].exp(), slow, atol=1e-5, rtol=1e-4)


def test_the_first_token_has_no_position_to_copy_from_and_a_finite_gradient() -> None:
    network = make_network("f", pointer_len=LENGTH)
    nll, _ = network.nll(torch.tensor([[3]]), torch.tensor([[3]]))
    torch.testing.assert_close(nll, make_network("f").nll(torch.tensor([[3]]), torch.tensor([[3]]))[0])
    nll.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())


def test_before_training_positions_have_a_tenth_of_the_probability() -> None:
    torch.manual_seed(0)
    config = make_network("f", pointer_len=50).config
    network = TransformerXL.build(config, Architecture.parse("f"), VOCABULARY).eval()
    memory = network(random_ids(1, 50)).memory
    scores = network(random_ids(1, 1, seed=1), memory).pointer_scores
    assert scores is not None
    weights = torch.cat([scores.positions, scores.sentinel[..., None]], dim=-1).softmax(-1)
    assert float(weights.detach()[0, 0, :-1].sum()) == pytest.approx(0.1, abs=0.01)


def test_the_loss_is_the_same_for_any_batch_size_and_protocol(corpus: Path) -> None:
    streams = prepare(small_config(corpus).data)
    network = make_network("sk", vocab_size=streams.tokenizer.vocab_size, pointer_len=LENGTH)
    tokens, first, reach = streams.tokens("valid"), streams.tokenizer.eos_id, Reach(6, pointer_len=LENGTH)
    whole = score_tokens(network, tokens, first, CPU, Shape(1, 8, reach))
    torch.testing.assert_close(score_tokens(network, tokens, first, CPU, Shape(5, 8, reach)), whole)
    torch.testing.assert_close(score_sliding(network, tokens, first, CPU, Shape(3, 8, reach), 8), whole)
    torch.testing.assert_close(score_sequentially(network, tokens, first, CPU, tgt_len=8, reach=reach)[0], whole)
    longer = score_tokens(network, tokens, first, CPU, Shape(1, 8, reach._replace(pointer_len=20)))
    assert not torch.allclose(longer, whole)


def test_generated_text_is_the_most_probable(corpus: Path) -> None:
    network, ids = make_network("sf", pointer_len=20, mem_len=20), random_ids(1, 4)
    found = network.generate(ids, 5, temperature=0)
    for _ in range(5):
        ids = torch.cat([ids, network.log_probs(network(ids))[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert found.tolist() == ids.tolist()


def test_distillation_and_traced_exports_refuse_a_pointer(corpus: Path, tmp_path: Path) -> None:
    network = make_network("sf", pointer_len=LENGTH)
    with pytest.raises(ParnasError, match="use --to safetensors"):
        SegmentNetwork(network, Architecture.parse("sf"))
    with pytest.raises(ParnasError, match=r"set model.pointer_len: 0"):
        Config().replace(model__pointer_len=4, train__teachers=("run",))
    run = retrain(small_config(corpus, model__arch="f", model__pointer_len=4), tmp_path / "run", Silent())
    loaded = load(run.folder)
    with pytest.raises(ParnasError, match="has a pointer"):
        load_teachers([str(run.folder)], DistillConfig(), loaded.header, loaded.model.head.bounds, CPU.device)
    for refused in (
        lambda: search_settings(run),
        lambda: probe_model(run.folder, None, 64, 1, 1, loaded.config.runtime, lambda _: None),
    ):
        with pytest.raises(ParnasError, match=r"has a pointer \(model.pointer_len: 4\)"):
            refused()
    with pytest.raises(ParnasError, match="the network has no pointer"):
        Config().replace(evaluation__pointer_len=4)


def test_runs_with_a_pointer_are_compared_at_other_lengths(corpus: Path, tmp_path: Path) -> None:
    """And validations during a training are those of the weights at that step, with subword features too."""
    settings = {"model__pointer_len": 4, "model__subword_features": 20, "model__cutoffs": (5, 12)}
    run = retrain(small_config(corpus, model__arch="f", **settings), tmp_path / "run", Silent())
    validated = {line.step: line.loss for line in run.metrics() if line.split == "valid"}
    assert len(validated) > 1
    tables = {length: compare([run.folder], EvalOptions(pointer_len=length), Silent()).table for length in (None, 20)}
    assert [table["pointer_len"].tolist() for table in tables.values()] == [[4], [20]]
    plain = retrain(small_config(corpus, model__arch="f"), tmp_path / "plain", Silent())
    assert "pointer_len" not in compare([plain.folder], EvalOptions(), Silent()).table
    assert compare([run.folder, plain.folder], EvalOptions(), Silent()).table["pointer_len"].isna().tolist() == [
        False,
        True,
    ]
    found = {length: float(table["ppl"].iloc[0]) for length, table in tables.items()}
    assert found[None] == pytest.approx(math.exp(validated[max(validated)]), rel=1e-6)
    assert found[20] != found[None]
    for step, loss in validated.items():
        (newest, *_) = [path for path in list_checkpoints(run.checkpoints) if path.name.endswith(f"{step:08}")]
        network = load(run.folder).model
        load_weights(newest, network)
        data = prepare(small_config(corpus).data)
        tokens, first, shape = data.tokens("valid"), data.tokenizer.eos_id, run.config().validation_shape
        again = score_tokens(network, tokens, first, CPU, shape).double().mean()
        assert float(again) == pytest.approx(loss, rel=1e-6)


def test_log_probabilities_of_tokens_that_are_not_copied_have_a_gradient() -> None:
    network = make_network("f", pointer_len=LENGTH)
    network.log_probs(network(random_ids(1, 3))).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())
