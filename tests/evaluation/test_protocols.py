"""Sliding and dynamic evaluation and the continuous cache, each against a slow twin, and what they leave alone."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_config
from torch import Tensor

from parnas.architecture import Architecture
from parnas.config.schema import DynamicConfig, ModelConfig, Reach, Shape
from parnas.data.batching import TrainingBatches
from parnas.data.streams import TokenStreams, prepare
from parnas.errors import ParnasError
from parnas.evaluation.continuous_cache import ContinuousCache, mix
from parnas.evaluation.dynamic import dynamic_evaluation, dynamic_weights, gradient_rms
from parnas.evaluation.scoring import score_sequentially, score_sliding
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device
from parnas.training.perplexity import score_tokens

CPU, BF16 = (Device(torch.device("cpu"), precision) for precision in ("fp32", "bf16"))
REACH = Reach(12)
LENGTHS = {"tgt_len": 8, "reach": REACH}


@pytest.fixture(scope="module")
def streams(corpus: Path) -> TokenStreams:
    return prepare(small_config(corpus).data)


@pytest.fixture(scope="module")
def tokens(streams: TokenStreams) -> np.ndarray:
    return np.asarray(streams.tokens("valid")[:123])  # the last segment is not full


@pytest.fixture(scope="module")
def model(streams: TokenStreams) -> TransformerXL:
    """Of an adaptive softmax, with weights so large that predictions depend on distant context."""
    torch.manual_seed(0)
    head = {"cutoffs": (10, 20), "proj_factor": 2, "tie_weights": False}
    config = ModelConfig(d_model=16, n_heads=2, d_inner=32, mem_len=12, dropout=0.3, **head)
    network = TransformerXL.build(config, Architecture.parse("sfs"), streams.tokenizer.vocab_size)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return network


@pytest.fixture(scope="module")
def rms(model: TransformerXL, streams: TokenStreams) -> list[Tensor]:
    return gradient_rms(model, streams.tokens("train"), CPU, Shape(4, 8, REACH), batches=3)


def plain(model: TransformerXL, tokens: np.ndarray, batch_size: int = 1) -> Tensor:
    return score_tokens(model, tokens, 0, CPU, Shape(batch_size, 8, REACH))


def segments(tokens: np.ndarray, length: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of one row, [1, T] each, the stream preceded by token 0."""
    text = [0, *tokens.tolist()]
    cuts = range(0, len(tokens), length)
    return [(torch.tensor([text[at : at + length]]), torch.tensor([text[at + 1 : at + length + 1]])) for at in cuts]


def slow_dynamic(
    model: TransformerXL, tokens: np.ndarray, rms: list[Tensor], lr: float, decay: float, epsilon: float
) -> list[float]:
    """Autograd through the whole softmax, and the update written for one weight after another."""
    network = copy.deepcopy(model).eval()
    trained = [weight.detach().clone() for weight in network.parameters()]
    mean = sum(root.mean().item() for root in rms) / len(rms)
    memory, nats = None, []
    for inputs, (targets,) in segments(tokens, 8):
        hidden, memory, *_ = network(inputs[:, : len(targets)], memory, reach=Reach(12))
        nll = -network.head.log_probs(hidden[0])[range(len(targets)), targets]
        nats += nll.tolist()
        network.zero_grad(set_to_none=False)
        nll.mean().backward()
        with torch.no_grad():
            for weight, before, root in zip(network.parameters(), trained, rms, strict=True):
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                back = torch.clamp(decay * root / mean, max=1.0) * (before - weight)
                weight.add_(back - lr * gradient / (root + epsilon * mean))
    return nats


@pytest.mark.parametrize(("lr", "decay"), [(1e-3, 0.0), (3e-3, 0.05)])
def test_dynamic_evaluation_equals_a_plain_loop_of_autograd(
    model: TransformerXL, tokens: np.ndarray, rms: list[Tensor], lr: float, decay: float
) -> None:
    expected = slow_dynamic(model, tokens, rms, lr, decay, epsilon=0.5)
    with dynamic_evaluation(model, DynamicConfig(lr=lr, decay=decay, epsilon=0.5), rms) as update:
        scores = score_sequentially(model, tokens, 0, CPU, update=update, **LENGTHS)
    torch.testing.assert_close(scores[0], torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert (scores[0] - plain(model, tokens)).abs().max() > 0.01  # it has learnt something


def test_plain_gradient_descent_is_the_other_update(model: TransformerXL, tokens: np.ndarray) -> None:
    """Its divisor is 1 and its decay the same for all weights."""
    ones = [torch.ones_like(weight) for weight in model.parameters()]
    expected = slow_dynamic(model, tokens, ones, 0.02, 0.1, epsilon=0.0)
    with dynamic_evaluation(model, DynamicConfig(lr=0.02, decay=0.1, update="sgd"), []) as update:
        scores = score_sequentially(model, tokens, 0, CPU, update=update, **LENGTHS)
    torch.testing.assert_close(scores[0], torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_mean_squared_gradients_equal_those_of_a_loop(
    model: TransformerXL, streams: TokenStreams, rms: list[Tensor]
) -> None:
    network, memory = copy.deepcopy(model).eval(), None
    text, squares = TrainingBatches(streams.tokens("train"), 4, 8), [0.0] * len(rms)
    for step in range(3):
        inputs, targets = (torch.from_numpy(part) for part in text.batch(step)[:2])
        nll, memory = network.nll(inputs, targets, memory, reach=Reach(12))
        network.zero_grad(set_to_none=False)
        nll.mean().backward()
        squares = [square + weight.grad**2 for square, weight in zip(squares, network.parameters(), strict=True)]
    for root, square in zip(rms, squares, strict=True):
        torch.testing.assert_close(root, (square / 3).sqrt())


def test_segments_too_long_for_all_rows_are_read_in_fewer(model: TransformerXL, streams: TokenStreams) -> None:
    tokens = streams.tokens("train")[:200]
    third = (len(tokens) - 1) // 3
    roots = [gradient_rms(model, tokens, CPU, Shape(rows, third, REACH), batches=1) for rows in (8, 3)]
    assert all(torch.equal(*each) for each in zip(*roots, strict=True))


@pytest.mark.parametrize("device", [CPU, BF16], ids=["fp32", "bf16"])
def test_without_a_learning_rate_nothing_changes(
    model: TransformerXL, tokens: np.ndarray, rms: list[Tensor], device: Device
) -> None:
    """Keys of memory are computed again, which rounds differently."""
    expected = score_tokens(model, tokens, 0, device, Shape(1, 8, REACH))
    with dynamic_evaluation(model, DynamicConfig(lr=0.0, decay=0.1), rms) as update:
        scores = score_sequentially(model, tokens, 0, device, update=update, **LENGTHS)
    close = {"rtol": 1e-5, "atol": 1e-5} if device is CPU else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(scores[0], expected, **close)


def test_weights_are_bit_for_bit_what_they_were(model: TransformerXL, tokens: np.ndarray, rms: list[Tensor]) -> None:
    before, expected = copy.deepcopy(model.state_dict()), plain(model, tokens)
    model.train()

    def spoil(done: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), dynamic_evaluation(model, DynamicConfig(lr=0.1), rms) as update:
        score_sequentially(model, tokens, 0, CPU, update=update, advance=spoil, **LENGTHS)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(plain(model, tokens), expected)


def test_each_token_is_scored_before_anything_is_learnt_of_it(
    model: TransformerXL, tokens: np.ndarray, rms: list[Tensor]
) -> None:
    """Other tokens from the tenth segment on change no score before it."""
    other = tokens.copy()
    other[72:] = tokens[72:][::-1]
    scores = []
    for text in (tokens, other):
        with dynamic_evaluation(model, DynamicConfig(lr=1e-2), rms) as update:
            caches = [ContinuousCache(30, 0.1)]
            scores.append(score_sequentially(model, text, 0, CPU, update=update, caches=caches, **LENGTHS))
    assert torch.equal(scores[0][:, :72], scores[1][:, :72])
    assert not torch.equal(scores[0][:, 80:], scores[1][:, 80:])


def test_alpha_of_a_supernet_does_not_learn(streams: TokenStreams) -> None:
    config = ModelConfig(d_model=16, n_heads=2, d_inner=32, mem_len=4)
    supernet = SuperNet(config, "sfi", 2, streams.tokenizer.vocab_size)
    ids = {id(weight) for weight in dynamic_weights(supernet)}
    assert not ids & {id(alpha) for alpha in supernet.alphas()}
    assert len(ids) == sum(weight.numel() > 0 for weight in supernet.parameters()) - 2


def brute_force(
    model: TransformerXL, tokens: np.ndarray, size: int, theta: float, weight: float
) -> tuple[list[float], list[float]]:
    """The whole distribution of the cache at every position, mixed with the whole softmax."""
    states: list[Tensor] = []
    memory, mixed, sums = None, [], []
    for inputs, targets in segments(tokens, 8):
        with torch.no_grad():
            hidden, memory, *_ = model.eval()(inputs[:, : targets.shape[1]], memory, reach=Reach(12))
            by_model = model.head.log_probs(hidden[0]).exp()
        for state, network, target in zip(hidden[0], by_model, targets[0].tolist(), strict=True):
            cache = torch.zeros_like(network)
            for place in range(max(0, len(states) - size), len(states)):
                cache[tokens[place]] += math.exp(theta * float(state @ states[place]))
            share = weight if states else 0.0
            whole = (1 - share) * network + (share * cache / cache.sum() if states else 0)
            sums.append(float(whole.sum()))
            mixed.append(-math.log(whole[target]))
            states.append(state)
    return mixed, sums


@pytest.mark.parametrize(("size", "theta", "weight"), [(20, 0.1, 0.3), (5, 0.5, 0.1), (1000, 0.0, 0.9)])
def test_the_cache_equals_brute_force_over_the_vocabulary(
    model: TransformerXL, tokens: np.ndarray, size: int, theta: float, weight: float
) -> None:
    expected, sums = brute_force(model, tokens, size, theta, weight)
    scores = score_sequentially(model, tokens, 0, CPU, caches=[ContinuousCache(size, theta)], **LENGTHS)
    torch.testing.assert_close(mix(scores[0], scores[1], weight), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert sums == pytest.approx([1.0] * len(tokens), abs=1e-5)  # it is a distribution


def test_a_cache_without_weight_is_the_plain_evaluation(model: TransformerXL, tokens: np.ndarray) -> None:
    scores = score_sequentially(model, tokens, 0, CPU, caches=[ContinuousCache(50, 1.0)], **LENGTHS)
    assert torch.equal(mix(scores[0], scores[1], 0.0), plain(model, tokens))
    assert scores[1, 0] == -scores[0, 0]  # empty, it agrees with the network


def test_several_caches_read_together_as_alone(model: TransformerXL, tokens: np.ndarray) -> None:
    both = score_sequentially(
        model, tokens, 0, CPU, caches=[ContinuousCache(9, 0.1), ContinuousCache(70, 1.0)], **LENGTHS
    )
    alone = score_sequentially(model, tokens, 0, CPU, caches=[ContinuousCache(70, 1.0)], **LENGTHS)
    assert torch.equal(both[2], alone[1])


def slow_sliding(model: TransformerXL, tokens: np.ndarray, stride: int) -> list[float]:
    """For each token the segment of 8 that ends with its stride, read with the memory from before it."""
    memories, nats = [None], []
    pieces = segments(tokens, stride)
    with torch.no_grad():
        for inputs, _ in pieces:
            memories.append(model.eval()(inputs, memories[-1], reach=Reach(12)).memory)
        for last, (_, targets) in enumerate(pieces):
            first = max(0, last + 1 - 8 // stride)
            together = torch.cat([inputs for inputs, _ in pieces[first : last + 1]], dim=1)
            hidden = model(together, memories[first], reach=Reach(12)).hidden[0]
            count = targets.shape[1]
            ended = hidden[(last - first) * stride :][:count]
            nats += (-model.head.log_probs(ended)[range(count), targets[0]]).tolist()
    return nats


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_sliding_evaluation_equals_reading_each_window_by_itself(
    model: TransformerXL, tokens: np.ndarray, stride: int
) -> None:
    expected = torch.tensor(slow_sliding(model, tokens, stride))
    for batch_size in (1, 3):
        nats = score_sliding(model, tokens, 0, CPU, Shape(batch_size, 8, REACH), stride)
        torch.testing.assert_close(nats, expected, rtol=1e-4, atol=1e-4)


def test_a_stride_of_a_whole_segment_is_the_plain_evaluation(model: TransformerXL, tokens: np.ndarray) -> None:
    nats = score_sliding(model, tokens, 0, CPU, Shape(3, 8, REACH), stride=8)
    assert torch.equal(nats, plain(model, tokens, batch_size=3))


def test_a_stride_that_does_not_divide_the_segment_is_refused(model: TransformerXL, tokens: np.ndarray) -> None:
    with pytest.raises(ParnasError, match=r"evaluation\.stride is 3"):
        score_sliding(model, tokens, 0, CPU, Shape(1, 8, REACH), stride=3)
