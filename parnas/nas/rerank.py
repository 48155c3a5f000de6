"""Re-ranking: evaluate whole networks with the SuperNet's weights, and choose among them.

pi treats blocks as independent, which they are not. For example, if most sampled networks have several attention
layers, each single one adds little to them, and a network without any attention layer can become probable. So the most
probable networks are evaluated as a whole, with the shared weights and without training (Guo et al. 2020, arXiv
1904.00420, section 3.3); an evolutionary search (`evolution.py`) evaluates further networks that resemble the best. The
estimate of the loss is added to the one that pi contains:

    score = shared-weight loss - e/2 log p,    p the product of pi over the blocks, e = search.entropy_end

Why e log p is an estimate of a loss: with the estimator `uniform`, alpha minimises expected loss - e · entropy(pi). The
minimum is the Gibbs distribution pi ∝ exp(-loss / e), so -e log pi is the loss that the search estimated block by
block, in nats per token up to a constant. It is the coarser of the two estimates, so its weight is a half: in the space
`hybrid` this ranks trained networks better than no weight and than the whole, and among attention, feed-forward and
identity the weight matters little (`benchmarks/search_quality.py`). Before alpha has converged, in short searches, pi
is flatter, so that the shared-weight loss has more influence on the score. With a cost penalty or another estimator, pi
has no such meaning; then e is 0.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple

from parnas.architecture import Architecture, drop_identity
from parnas.config.loader import Config
from parnas.config.schema import SearchConfig
from parnas.data.batching import split_share
from parnas.data.streams import Tokens, TokenStreams
from parnas.model.supernet import SuperNet
from parnas.nas.budget import Budget
from parnas.nas.evolution import evolve
from parnas.nas.knapsack import LayerString
from parnas.nas.stepwise import reach_in_steps
from parnas.runs.records import RerankedNetwork, RerankRecord
from parnas.runs.run import Run
from parnas.training.device import choose_device
from parnas.training.loaded_run import load_supernet
from parnas.training.perplexity import TotalLoss, measure_loss
from parnas.training.progress import Reporter

__all__ = ["NetworkLosses", "held_out", "losses_of_run", "rank", "shared_weight_losses"]

_SHORT_DIVISOR = 4  # the evolutionary search evaluates networks on the first quarter of the text
_BURN_IN = 4  # segments that fill memory before a row of the text: all networks are compared with the same ones


class ScoredNetwork(NamedTuple):
    """A re-ranked network with its shared-weight loss and its score."""

    choice: LayerString
    shared_weight_loss: float  # on held-out text, nats per token
    score: float  # of the module's docstring; lower is better


class NetworkLosses(NamedTuple):
    """Two functions that measure the loss of an architecture with given weights, in nats per token."""

    short: Callable[[Architecture], float]  # on the beginning of the text
    full: Callable[[Architecture], float]

    def cached(self) -> "NetworkLosses":
        """Return functions that measure each architecture once."""
        return NetworkLosses(cache(self.short), cache(self.full))

    @classmethod
    def mean(cls, losses: Sequence["NetworkLosses"]) -> "NetworkLosses":
        """Return the functions that measure the mean loss with the shared weights of several searches."""
        return cls(
            lambda architecture: fmean(each.short(architecture) for each in losses),
            lambda architecture: fmean(each.full(architecture) for each in losses),
        )


def rank(
    pi: Sequence[Mapping[str, float]],
    budget: Budget,
    config: Config,
    losses: NetworkLosses,
    known_good: Sequence[tuple[str, ...]] = (),
    own_weights: bool = False,
) -> list[ScoredNetwork]:
    """Return the networks of the best scores within `budget`, best first: `search.rerank_top_k`, or fewer if few exist.

    Architectures that differ only in the positions of identity are one network, represented by the best of them, unless
    they have `own_weights`.

    Args:
        pi: for each block the probability of each candidate, by name.
        budget: the constraints.
        config: the configuration of the search.
        losses: the held-out losses of an architecture.
        known_good: networks within the budget from which the evolutionary search starts besides the most probable.
        own_weights: whether each block keeps its own trained weights, as in a search in a trained network, so that
            architectures that differ only in the positions of identity are different networks.

    Raises:
        ParnasError: no architecture is within the budget.
    """
    search, losses = config.search, losses.cached()

    def short_loss(layers: tuple[str, ...]) -> float:
        return losses.short(Architecture(layers))

    def short_score(layers: tuple[str, ...]) -> float:
        return score_network(budget.describe(layers, pi), short_loss(layers), search).score

    # 1. Start from the most probable networks, and from good ones that are known. In a trained network, pi is that of
    #    replacing single layers.
    probable = [each.layers for each in budget.most_probable(pi, search.rerank_count)]
    stepwise = reach_in_steps(pi, budget, short_loss, search.rerank_count) if search.parent is not None else []
    start = list(dict.fromkeys([*known_good, *probable, *stepwise]))
    # 2. Search further, by the loss on a short text.
    spaces = [[name for name, chance in block.items() if chance > 0] for block in pi]
    evolved = evolve(start, short_score, spaces, budget.allows, search.evolution_count, config.runtime.seed)
    # 3. Compare the best networks by their loss on the whole text.
    best: dict[tuple[str, ...], LayerString] = {}
    for layers in evolved:
        network = layers if own_weights else drop_identity(layers)
        best.setdefault(network, budget.describe(layers, pi))
    finalists = list(best.values())[: search.rerank_count]
    return sort_by_score(
        [score_network(choice, losses.full(Architecture(choice.layers)), search) for choice in finalists]
    )


def score_network(choice: LayerString, loss: float, search: SearchConfig) -> ScoredNetwork:
    """Return a network with its score, given its shared-weight loss in nats per token."""
    # score = loss - e/2 log p; log p <= 0, so an improbable network needs a lower loss.
    return ScoredNetwork(choice, loss, loss - search.rerank_pi_weight * choice.log_probability)


def sort_by_score(scored: Iterable[ScoredNetwork]) -> list[ScoredNetwork]:
    """Return networks sorted by score, best first; a score that is NaN comes last."""
    return sorted(scored, key=lambda each: math.inf if math.isnan(each.score) else each.score)


def shared_weight_losses(
    supernet: SuperNet, config: Config, streams: TokenStreams, text: Tokens
) -> Callable[[Architecture], TotalLoss]:
    """Return a function that measures the loss of an architecture on `text` with the weights of the SuperNet.

    The text is divided into rows before which memory is filled for a few segments only: a comparison needs no more, and
    a text of some thousand tokens can be read in parallel. The function uses the SuperNet's weights at the time of its
    call. The SuperNet is moved to the configured device.
    """
    device = choose_device(config.runtime)
    supernet.to(device.device)

    def loss_of(architecture: Architecture) -> TotalLoss:
        # A discrete network with copies of the shared weights, evaluated like any trained network.
        network = supernet.extract(architecture)
        return measure_loss(network, text, streams.tokenizer.eos_id, device, config.validation_shape, _BURN_IN)

    return loss_of


def held_out(config: Config, streams: TokenStreams) -> Tokens:
    """Return tokens that the shared weights are not trained on: the first tokens of alpha's held-out split.

    If the search has no held-out split, return the first tokens of the validation split. The number of tokens is
    `search.rerank_tokens`, or that of the split if it is shorter.
    """
    # Losses on text that the weights were trained on would favour layers that memorise it.
    _, arch_tokens = split_share(streams.tokens("train"), config.search.alpha_share)
    return (arch_tokens if len(arch_tokens) else streams.tokens("valid"))[: config.search.rerank_token_count]


def held_out_losses(supernet: SuperNet, config: Config, streams: TokenStreams) -> NetworkLosses:
    """Return the functions that measure held-out losses with the weights of the SuperNet, at the time of their call."""
    text = held_out(config, streams)
    beginning = text[: max(1, len(text) // _SHORT_DIVISOR)]
    short, full = (shared_weight_losses(supernet, config, streams, part) for part in (beginning, text))
    return NetworkLosses(
        lambda architecture: short(architecture).per_token, lambda architecture: full(architecture).per_token
    )


def losses_of_run(run: Run, reporter: Reporter) -> NetworkLosses:
    """Return the functions that measure held-out losses with the shared weights of a search.

    Raises:
        ParnasError: the run is not a search, or the text has changed since the search.
    """
    # The weights from before the fine-tuning: with the final ones the selected path would win every comparison.
    loaded, supernet = load_supernet(run.folder, by_pi=True)
    return held_out_losses(supernet, loaded.config, loaded.prepare_text(str(run.folder), reporter.note))


def write_rerank(run: Run, step: int, ranking: Sequence[ScoredNetwork]) -> None:
    """Write the networks that were ranked at `step`, and their shared-weight losses, to `rerank.json` of the run."""
    networks = [
        RerankedNetwork(arch=str(Architecture(each.choice.layers)), loss=each.shared_weight_loss) for each in ranking
    ]
    run.write_rerank(RerankRecord(step=step, networks=networks))


def read_rerank(run: Run, step: int) -> dict[tuple[str, ...], float]:
    """Return the shared-weight loss of each re-ranked network, by its layers, as stored in `rerank.json`.

    Return an empty dictionary if the file is missing or from a step after `step`. A loss of NaN is read as infinite.

    Raises:
        ParnasError: the file is damaged.
    """
    record = run.reranked()
    if record is None or record.step > step:
        return {}
    return {
        Architecture.parse(network.arch).layers: math.inf if math.isnan(network.loss) else network.loss
        for network in record.networks
    }
