"""A second look at the most probable networks: their loss with the weights that they inherit from the SuperNet."""

from collections.abc import Callable
from pathlib import Path

import torch

from parnas.architecture import Architecture
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.model.supernet import SuperNet
from parnas.training.device import choose_device
from parnas.training.perplexity import measure_loss
from parnas.training.phases import load

TOKENS = 65_536  # of the validation split that are read; what a hundred networks take is then seconds, not minutes


def inherited_loss(folder: Path, tokens: int = TOKENS) -> Callable[[Architecture], float]:
    """A function that gives the loss of a network of a search, nats per token of the validation split's beginning.

    With the SuperNet's weights as they are, as Guo et al. 2020 (arXiv 1904.00420, section 3.3) rank paths. Raises
    `ParnasError` for other runs.
    """
    found = load(folder)
    config, supernet = found.config, found.model
    if not isinstance(supernet, SuperNet):
        raise ParnasError(f"{folder} is no search; only a SuperNet's weights are those of many networks.")
    device, streams = choose_device(config.runtime), prepare(config.data)
    supernet.to(device.device)
    read = streams.tokens("valid")[:tokens]
    shape = {"batch_size": config.evaluation.batch_size, "tgt_len": config.data.tgt_len}

    @torch.no_grad()
    def loss_of(architecture: Architecture) -> float:
        network = supernet.extract(architecture)
        eos_id = streams.tokenizer.eos_id
        return measure_loss(network, read, eos_id, device, mem_len=config.model.mem_len, **shape).per_token

    return loss_of
