"""What networks reach with the weights that they inherit from a SuperNet, and the second look that this allows.

pi takes blocks for independent of each other, which they are not: where most networks have attention, one more does
little for each, and none at all may look probable. So of the most probable networks several are read by the weights
that they inherit (Guo et al. 2020, arXiv 1904.00420, section 3.3), and two estimates of a network's loss are added:

    estimate = inherited loss - e log p,    p the product of its pi, e = search.entropy_end

With the estimator `uniform`, alpha comes to rest in an objective of loss and entropy, where pi is exp(-loss / e) up
to a factor, so that -e log p is what the search learned of the loss, block by block, in nats per token and up to a
constant. Before that, in short searches, pi is nearer to even, and the inherited loss counts for more. Where a penalty
on the cost shapes pi as well, or weights followed alpha, pi says no such thing: e is 0 there.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from parnas.architecture import Architecture
from parnas.config import Config
from parnas.data.batching import split_share
from parnas.data.streams import Tokens, TokenStreams, prepare
from parnas.errors import ParnasError
from parnas.files import read_json, write_json
from parnas.model.supernet import SuperNet
from parnas.nas.knapsack import Choice
from parnas.run import SECOND_LOOK, Run
from parnas.training.device import choose_device
from parnas.training.perplexity import TotalLoss, measure_loss
from parnas.training.phases import load, refuse_other_text
from parnas.training.reporter import Reporter

READ_TOKENS = 32_768  # differences of 0.005 nats per token are then three times their error


class Estimate(NamedTuple):
    """What is known of a network after the second look."""

    choice: Choice
    inherited: float  # loss by inherited weights, nats per token
    estimate: float  # see the top of this file


def measure_inherited(
    supernet: SuperNet, config: Config, streams: TokenStreams, text: Tokens
) -> Callable[[Architecture], TotalLoss]:
    """A function that gives the loss of a network with the SuperNet's weights, as they are, on a text.

    Moves the SuperNet to the configured device.
    """
    device = choose_device(config.runtime)
    supernet.to(device.device)

    def loss_of(architecture: Architecture) -> TotalLoss:
        return measure_loss(
            supernet.extract(architecture),
            text,
            streams.tokenizer.eos_id,
            device,
            batch_size=config.evaluation.batch_size,
            tgt_len=config.data.tgt_len,
            reach=config.model.reach,
        )

    return loss_of


def held_out(config: Config, streams: TokenStreams) -> Tokens:
    """The beginning of a text that the SuperNet's weights never saw: of alpha's own, or else the validation split."""
    _, own = split_share(streams.tokens("train"), config.search.alpha_share)
    return (own if len(own) else streams.tokens("valid"))[:READ_TOKENS]


def rescorer(run: Run, reporter: Reporter) -> Callable[[Architecture], float]:
    """The loss of a network by a search's evenly trained weights, in nats per token of held-out text.

    Raises `ParnasError` where the run is no search, or its text is no longer what it was.
    """
    found = load(run.folder, even=True, by_pi=True)
    if not isinstance(found.model, SuperNet):
        raise ParnasError(f"{run.folder} is no search; only a SuperNet's weights are those of many networks.")
    streams = prepare(found.config.data, reporter.note)
    refuse_other_text(streams.header, found.header, str(run.folder))
    loss_of = measure_inherited(found.model, found.config, streams, held_out(found.config, streams))
    return lambda architecture: loss_of(architecture).per_token


def rank_again(chosen: Sequence[Choice], losses: Sequence[float], weight_of_pi: float) -> list[Estimate]:
    """Networks by their estimate, the best first, given their inherited losses; one that is no number comes last."""
    found = [
        Estimate(choice, loss, loss - weight_of_pi * choice.log_probability)
        for choice, loss in zip(chosen, losses, strict=True)
    ]
    return sorted(found, key=lambda each: math.inf if math.isnan(each.estimate) else each.estimate)


def write_second_look(run: Run, step: int, chosen: Sequence[Choice], losses: Sequence[float]) -> None:
    """Keep the inherited losses of the networks that were most probable at a step."""
    networks = [
        {"arch": str(Architecture(choice.layers)), "loss": loss} for choice, loss in zip(chosen, losses, strict=True)
    ]
    write_json(run.folder / SECOND_LOOK, {"step": step, "networks": networks})


def read_second_look(run: Run, step: int) -> dict[tuple[str, ...], float]:
    """What was kept up to a step; empty where the search had not come to it, or takes none.

    Raises `ParnasError` where the file is damaged.
    """
    path = run.folder / SECOND_LOOK
    if not path.is_file():
        return {}
    found = read_json(path)
    try:
        losses = {Architecture.parse(each["arch"]).layers: as_loss(each["loss"]) for each in found["networks"]}
        return losses if found["step"] <= step else {}
    except (KeyError, TypeError, ValueError) as error:
        raise ParnasError(f"{path} is not what a search wrote; restore it, or delete it to look again.") from error


def as_loss(value: float | None) -> float:
    """A loss as JSON has it, where what is not finite is null."""
    return math.inf if value is None else float(value)
