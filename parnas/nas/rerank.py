"""Re-ranking: evaluate the most probable networks with the SuperNet's weights.

pi treats blocks as independent, which they are not. For example, if most sampled networks have several attention
layers, each single one adds little to them, and a network without any attention layer can become probable. So the most
probable networks are evaluated as a whole, with the shared weights and without training (Guo et al. 2020, arXiv
1904.00420, section 3.3), and this estimate of their loss is added to the estimate that pi contains:

    score = shared-weight loss - e log p,    p the product of pi over the blocks, e = search.entropy_end

Why e log p is an estimate of a loss: with the estimator `uniform`, alpha minimises expected loss - e · entropy(pi). The
minimum is the Gibbs distribution pi ∝ exp(-loss / e), so -e log pi is the loss that the search estimated block by
block, in nats per token up to a constant. Before alpha has converged, in short searches, pi is flatter, so that the
shared-weight loss has more influence on the score. With a cost penalty or another estimator, pi has no such meaning;
then e is 0.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.data.batching import split_share
from parnas.data.streams import Tokens, TokenStreams, prepare
from parnas.errors import ParnasError
from parnas.model.supernet import SuperNet
from parnas.nas.knapsack import LayerString
from parnas.runs.records import RerankedNetwork, RerankRecord
from parnas.runs.run import Run
from parnas.training.device import choose_device
from parnas.training.loaded_run import load
from parnas.training.perplexity import TotalLoss, measure_loss
from parnas.training.progress import Reporter
from parnas.training.session import check_same_text

__all__ = ["rerank", "rescorer", "shared_weight_losses"]

_EVALUATED_TOKENS = 32_768  # enough that a difference of 0.005 nats per token is three times its standard error


class Estimate(NamedTuple):
    """A re-ranked network with its shared-weight loss and its score."""

    choice: LayerString
    shared_weight_loss: float  # on held-out text, nats per token
    estimate: float  # the score of the module's docstring; lower is better


def shared_weight_losses(
    supernet: SuperNet, config: Config, streams: TokenStreams, text: Tokens
) -> Callable[[Architecture], TotalLoss]:
    """Return a function that measures the loss of an architecture on `text` with the weights of the SuperNet.

    The function uses the SuperNet's weights at the time of its call. The SuperNet is moved to the configured device.
    """
    device = choose_device(config.runtime)
    supernet.to(device.device)

    def loss_of(architecture: Architecture) -> TotalLoss:
        # A discrete network with copies of the shared weights, evaluated like any trained network.
        network = supernet.extract(architecture)
        return measure_loss(network, text, streams.tokenizer.eos_id, device, config.validation_shape)

    return loss_of


def held_out(config: Config, streams: TokenStreams) -> Tokens:
    """Return tokens that the shared weights are not trained on: the first tokens of alpha's held-out split.

    If the search has no held-out split, return the first tokens of the validation split. The number of tokens is
    `_EVALUATED_TOKENS`, or that of the split if it is shorter.
    """
    # Losses on text that the weights were trained on would favour layers that memorise it.
    _, arch_tokens = split_share(streams.tokens("train"), config.search.alpha_share)
    return (arch_tokens if len(arch_tokens) else streams.tokens("valid"))[:_EVALUATED_TOKENS]


def rescorer(run: Run, reporter: Reporter) -> Callable[[Architecture], float]:
    """Return a function that measures the held-out loss of an architecture with the shared weights of a search.

    The loss is in nats per token.

    Raises:
        ParnasError: the run is not a search, or the text has changed since the search.
    """
    # The weights from before the fine-tuning: with the final ones the selected path would win every comparison.
    loaded = load(run.folder, supernet_weights=True, by_pi=True)
    if not isinstance(loaded.model, SuperNet):
        raise ParnasError(f"{run.folder} is not the run of a search; re-ranking needs the shared weights of a search.")
    streams = prepare(loaded.config.data, reporter.note)
    check_same_text(streams.header, loaded.header, str(run.folder))
    loss_of = shared_weight_losses(loaded.model, loaded.config, streams, held_out(loaded.config, streams))
    return lambda architecture: loss_of(architecture).per_token


def rerank(chosen: Sequence[LayerString], losses: Sequence[float], rerank_pi_weight: float) -> list[Estimate]:
    """Return the networks `chosen` with their scores, best first; a score that is NaN comes last.

    Args:
        chosen: the most probable networks.
        losses: shared-weight losses of `chosen` in nats per token, in the same order.
        rerank_pi_weight: e in the score, loss - e · (log probability of the network).
    """
    # score = loss - e log p; log p <= 0, so an improbable network needs a lower loss.
    estimates = [
        Estimate(choice, loss, loss - rerank_pi_weight * choice.log_probability)
        for choice, loss in zip(chosen, losses, strict=True)
    ]
    return sorted(estimates, key=lambda each: math.inf if math.isnan(each.estimate) else each.estimate)


def write_rerank(run: Run, step: int, chosen: Sequence[LayerString], losses: Sequence[float]) -> None:
    """Write the networks `chosen` at `step` and their shared-weight losses to `rerank.json` in the run folder."""
    networks = [
        RerankedNetwork(arch=str(Architecture(choice.layers)), loss=loss)
        for choice, loss in zip(chosen, losses, strict=True)
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
