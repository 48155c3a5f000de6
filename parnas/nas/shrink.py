"""Shrinking: leave out layers of a trained network, those that matter least, until it is within a cost target.

A network of which the right layers are left out has lost little (LLM-Drop, arXiv 2406.15786, drops half of the
attention of large models), and recovers in a short training. Repeated for lower and lower targets, each network starts
from the one before: progressive shrinking (once-for-all, Cai et al. 2020, arXiv 1908.09791), here of whole layers.

The trained network is treated as a SuperNet whose blocks have two candidates, the layer and identity, so that the
layers are chosen as a search chooses them (`rank`): exactly within the target by a score for each block, then by the
loss of whole networks.
"""

from collections.abc import Sequence

from parnas.architecture import ATTENTION, IDENTITY, Architecture, drop_identity
from parnas.config.loader import Config
from parnas.nas.budget import Budget
from parnas.nas.cost import Costs
from parnas.nas.knapsack import is_limited, probabilities
from parnas.nas.rerank import NetworkLosses, rank
from parnas.runs.run import Run
from parnas.training.device import choose_device
from parnas.training.loaded_run import load
from parnas.training.perplexity import measure_loss
from parnas.training.progress import Reporter

__all__ = ["shrink"]

_TOKENS, _FEW_TOKENS = 16384, 4096  # of text on which networks are compared: those that are re-ranked, and all others
_RERANKED, _EVOLVED = 6, 12  # networks to re-rank, and steps of the evolutionary search


def shrink(run: Run, costs: Costs, target: float, least_attention: int, reporter: Reporter) -> Architecture:
    """Return the layers of a trained network to keep within a cost target, with identity in place of the others.

    Args:
        run: a retraining.
        costs: the costs of layers.
        target: largest cost, as a share of the reference's cost.
        least_attention: least number of attention layers, or all if the network has fewer.
        reporter: receives notes.

    Raises:
        OverBudget: no part of the network is within the target.
        ParnasError: the text has changed since the training.
    """
    loaded = load(run.folder)
    config, model = loaded.config, loaded.model
    streams, device = loaded.prepare_text(str(run.folder), reporter.note), choose_device(config.runtime)
    model.to(device.device)

    def loss(architecture: Architecture, tokens: int) -> float:
        # On training text: the validation split serves to report the result.
        text, network = streams.tokens("train")[:tokens], model.extract(architecture)
        return measure_loss(network, text, streams.tokenizer.eos_id, device, config.validation_shape).per_token

    losses = NetworkLosses(lambda each: loss(each, _FEW_TOKENS), lambda each: loss(each, _TOKENS)).cached()
    layers = drop_identity(loaded.architecture)
    least = min(least_attention, sum(is_limited(name, ATTENTION) for name in layers))
    budget = Budget(costs, target, least={ATTENTION: least} if least else {})
    kept = select_layers(layers, losses, budget, config)
    reporter.note(f"within {target:g}: {Architecture(kept)} of {Architecture(layers)}")
    return Architecture(kept)


def select_layers(layers: Sequence[str], losses: NetworkLosses, budget: Budget, config: Config) -> tuple[str, ...]:
    """Return the layers to keep within a budget, with identity in place of the others; see `shrink`.

    `losses` are those of the network with some of the layers, in nats per token; `config` has the seed.
    """
    if budget.allows(layers):
        return tuple(layers)
    budget.most_probable([{layer: 0.5, IDENTITY: 0.5} for layer in layers])  # raises if nothing is within the target
    # 1. The loss without each layer. As in a search, pi ∝ exp(-loss) for the candidates of a block.
    whole, pi = losses.full(Architecture(layers)), []
    for number, layer in enumerate(layers):
        without = losses.full(Architecture([*layers[:number], IDENTITY, *layers[number + 1 :]]))
        pi.append(probabilities({layer: whole, IDENTITY: without}))
    # 2. The networks of the least sum of these losses within the target, others that resemble them, and of all these
    #    the one of the lowest loss: log pi, which adds up the losses of single layers, has no weight.
    settings = {"rerank_top_k": _RERANKED, "evolution_steps": _EVOLVED, "entropy_end": 0.0}
    config = config.replace(**{f"search__{name}": value for name, value in settings.items()})
    return rank(pi, budget, config, losses, own_weights=True)[0].choice.layers
