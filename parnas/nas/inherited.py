"""What networks reach with the weights that they inherit from a SuperNet."""

from collections.abc import Callable

from parnas.architecture import Architecture
from parnas.config import Config
from parnas.data.streams import TokenStreams, prepare
from parnas.errors import ParnasError
from parnas.model.supernet import SuperNet
from parnas.run import Run
from parnas.training.device import choose_device
from parnas.training.perplexity import TotalLoss, measure_loss
from parnas.training.phases import load
from parnas.training.reporter import Reporter

RESCORED_TOKENS = 65_536  # of the validation split: seconds for a dozen networks


def measure_inherited(
    supernet: SuperNet, config: Config, streams: TokenStreams, tokens: int | None = None
) -> Callable[[Architecture], TotalLoss]:
    """A function that gives the loss of a network with the SuperNet's weights, as they are, on the validation split.

    As Guo et al. 2020 (arXiv 1904.00420, section 3.3) rank paths. `tokens`: read the split's beginning alone. Moves the
    SuperNet to the configured device.
    """
    device = choose_device(config.runtime)
    supernet.to(device.device)
    shape = {
        "batch_size": config.evaluation.batch_size,
        "tgt_len": config.data.tgt_len,
        "mem_len": config.model.mem_len,
    }
    read, eos_id = streams.tokens("valid")[:tokens], streams.tokenizer.eos_id
    return lambda architecture: measure_loss(supernet.extract(architecture), read, eos_id, device, **shape)


def rescorer(run: Run, reporter: Reporter) -> Callable[[Architecture], float]:
    """The loss of a network of a search by its weights, nats per token of the validation split's beginning."""
    found = load(run.folder)
    if not isinstance(found.model, SuperNet):
        raise ParnasError(f"{run.folder} is no search; only a SuperNet's weights are those of many networks.")
    streams = prepare(found.config.data, reporter.note)
    loss_of = measure_inherited(found.model, found.config, streams, RESCORED_TOKENS)
    return lambda architecture: loss_of(architecture).per_token
