"""The one perplexity: every token once, summed first, whatever the batch size; and latency's turns."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_config

import parnas.training.perplexity as perplexity
from parnas.architecture import Architecture
from parnas.config.schema import ModelConfig, Reach, Shape
from parnas.data.batching import evaluation_batches
from parnas.data.streams import SplitCounts, TokenStreams, prepare
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device
from parnas.training.latency import TimedNetwork, measure_latencies
from parnas.training.perplexity import TotalLoss, measure_loss, score_batches, score_tokens

CPU = Device(torch.device("cpu"), "fp32")


@pytest.fixture(scope="module")
def streams(corpus: Path) -> TokenStreams:
    return prepare(small_config(corpus).data)


@pytest.fixture(scope="module")
def model(streams: TokenStreams) -> TransformerXL:
    """A network whose predictions depend on distant context: its weights are large."""
    torch.manual_seed(0)
    config = ModelConfig(d_model=16, n_heads=2, d_inner=32, mem_len=12, dropout=0.3, attention_dropout=0.3)
    network = TransformerXL.build(config, Architecture.parse("sfs"), streams.tokenizer.vocab_size)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return network


def loss_of(
    model: TransformerXL, streams: TokenStreams, batch_size: int, tgt_len: int = 8, mem_len: int = 12
) -> TotalLoss:
    tokens, first = streams.tokens("valid"), streams.tokenizer.eos_id
    return measure_loss(model, tokens, first, CPU, Shape(batch_size, tgt_len, Reach(mem_len)))


def slow_loss(model: TransformerXL, streams: TokenStreams, tgt_len: int, mem_len: int) -> tuple[float, int]:
    """One row, one segment after another, a Python sum over single tokens."""
    model.eval()
    tokens = [streams.tokenizer.eos_id, *streams.tokens("valid").tolist()]
    memory, total, count = None, 0.0, 0
    for at in range(0, len(tokens) - 1, tgt_len):
        inputs, targets = tokens[at : at + tgt_len], tokens[at + 1 : at + tgt_len + 1]
        with torch.no_grad():
            hidden, memory, *_ = model(torch.tensor([inputs[: len(targets)]]), memory, reach=Reach(mem_len))
        log_probs = model.head.log_probs(hidden[0])
        for position, target in enumerate(targets):
            total -= float(log_probs[position, target])
            count += 1
    return total, count


@pytest.mark.parametrize(
    ("forgetting", "mem_len", "fewest", "most"),
    [  # the first pass takes 13 segments
        (0.0, 12, 8, 8),  # a state is halved with each token: the second pass ends where memory is compared first
        (-7.0, 12, 3 * 13, 7 * 13),  # a state loses a thousandth with each token: as many passes as rows
        (0.0, 400, 13 + 101, 13 + 101),  # the memory of attention is longer than a row: the text is read in one row
    ],
)
def test_rows_of_a_recurrent_network_are_read_until_their_memories_are_exact(
    streams: TokenStreams,
    monkeypatch: pytest.MonkeyPatch,
    forgetting: float,
    mem_len: int,
    fewest: int,
    most: int,
) -> None:
    torch.manual_seed(0)
    config = ModelConfig(d_model=16, n_heads=2, d_inner=32, mem_len=mem_len, dropout=0.0)
    network = TransformerXL.build(config, Architecture.parse("rskr"), streams.tokenizer.vocab_size)
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        if name.endswith("inner.bias"):
            torch.nn.init.constant_(parameter[:16], forgetting)
    monkeypatch.setattr(perplexity, "_LEAST_ROW", 100)
    tokens, first = streams.tokens("valid")[:805], streams.tokenizer.eos_id
    alone = score_tokens(network, tokens, first, CPU, Shape(1, 8, Reach(mem_len)))
    segments, nll = [], network.nll
    monkeypatch.setattr(network, "nll", lambda *args, **settings: segments.append(1) or nll(*args, **settings))
    together = score_tokens(network, tokens, first, CPU, Shape(32, 8, Reach(mem_len)))
    assert len(tokens) == len(together) == 805
    assert fewest <= len(segments) - 13 <= most
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-3)


def test_with_limited_burn_in_a_short_text_is_read_in_parallel_with_almost_the_same_loss(
    model: TransformerXL, streams: TokenStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, first, shape = streams.tokens("valid")[:400], streams.tokenizer.eos_id, Shape(32, 8, Reach(12))
    exact, rows, nll = score_tokens(model, tokens, first, CPU, shape), [], model.nll
    monkeypatch.setattr(
        model, "nll", lambda inputs, *args, **more: rows.append(len(inputs)) or nll(inputs, *args, **more)
    )
    approximate = score_tokens(model, tokens, first, CPU, shape, burn_in=2)
    assert rows == [12] * 6  # 2 of 6 segments are burn-in
    assert float(approximate.mean()) == pytest.approx(float(exact.mean()), rel=0.05)
    assert not torch.equal(approximate, exact)
    assert torch.equal(score_tokens(model, tokens, first, CPU, shape, burn_in=100), exact)


def test_a_recurrent_network_reads_a_text_of_few_segments_in_one_row(
    streams: TokenStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "_LEAST_ROW", 100)
    config = ModelConfig(d_model=16, n_heads=2, d_inner=32, mem_len=0, dropout=0.0)
    network = TransformerXL.build(config, Architecture.parse("r"), streams.tokenizer.vocab_size)
    tokens, first = streams.tokens("valid")[:805], streams.tokenizer.eos_id
    alone, together = (score_tokens(network, tokens, first, CPU, Shape(rows, 500, Reach(0))) for rows in (1, 32))
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(("tgt_len", "mem_len"), [(8, 12), (5, 12), (16, 0), (7, 30)])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_equals_the_slow_sum_for_any_batch_size(
    model: TransformerXL, streams: TokenStreams, batch_size: int, tgt_len: int, mem_len: int
) -> None:
    total, count = slow_loss(model, streams, tgt_len, mem_len)
    found = loss_of(model, streams, batch_size, tgt_len, mem_len)
    assert found.tokens == count == streams.header.splits["valid"].tokens
    assert found.nats == pytest.approx(total, rel=1e-5)


def test_a_train_mode_network_is_scored_without_dropout_and_left_in_train_mode(
    model: TransformerXL, streams: TokenStreams
) -> None:
    quiet = loss_of(model.eval(), streams, 4)
    assert loss_of(model.train(), streams, 4) == quiet
    assert model.training


def test_a_network_is_left_in_train_mode_where_reading_fails(model: TransformerXL, streams: TokenStreams) -> None:
    def fail(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    tokens, eos = streams.tokens("valid"), streams.tokenizer.eos_id
    batches = evaluation_batches(tokens, eos, 4, 8, model.burn_in(8, Reach(12)), model.alignment())
    with pytest.raises(RuntimeError, match="out of memory"):
        score_batches(model.train(), fail, batches, len(tokens), CPU)
    assert model.training


def test_supernet_is_scored_without_noise(streams: TokenStreams) -> None:
    torch.manual_seed(1)
    config = ModelConfig(d_model=16, n_heads=2, d_inner=32, mem_len=4)
    supernet = SuperNet(config, "sfi", 3, streams.tokenizer.vocab_size).train()
    state = torch.get_rng_state()
    assert loss_of(supernet, streams, 4) == loss_of(supernet, streams, 4)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn


def test_perplexity_is_the_exponential_of_the_mean_not_the_mean_of_exponentials() -> None:
    counts = SplitCounts(tokens=4, words=2, line_ends=1, lines=1, bytes=10, unknown=0)
    loss = TotalLoss(nats=8.0, tokens=4)
    assert loss.perplexity == pytest.approx(math.exp(2))
    assert loss.word_perplexity(counts) == pytest.approx(math.exp(8 / 3))
    assert loss.bits_per_byte(counts) == pytest.approx(8 / math.log(2) / 10)
    assert TotalLoss(1e6, 1).perplexity == math.inf


def test_forerunners_figure_in_our_units() -> None:
    """39.41 per piece of 314,913 pieces, 213,886 words and 1,121,681 bytes, line ends not counted."""
    counts = SplitCounts(tokens=314_913, words=213_886, line_ends=0, lines=3_760, bytes=1_121_681, unknown=0)
    loss = TotalLoss(314_913 * math.log(39.41), 314_913)
    assert loss.bits_per_byte(counts) == pytest.approx(1.488, abs=5e-4)
    assert loss.word_perplexity(counts) == pytest.approx(223.5, abs=0.2)


def test_networks_take_turns_when_their_latency_is_measured(
    model: TransformerXL, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    other = TransformerXL.build(model.config, Architecture.parse("f"), model.vocab_size)
    original = TransformerXL.nll

    def spy(self: TransformerXL, *args: object, **named: object) -> object:
        calls.append(id(self))
        return original(self, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(TransformerXL, "nll", spy)
    tokens = np.arange(37)
    shape = Shape(1, 4, Reach(6))
    candidates = {"a": (TimedNetwork(model, tokens), shape, CPU), "b": (TimedNetwork(other, tokens), shape, CPU)}
    latencies = measure_latencies(candidates, rounds=5)
    assert calls == [id(model), id(other)] * (len(calls) // 2)
    assert len(calls) == 2 * (5 + 3)
    assert all(0 < latency.median <= latency.p95 for latency in latencies.values())
