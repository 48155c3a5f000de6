"""A SuperNet whose pi is set by hand: what is lost where a block is made another layer, or a mixture of some."""

from collections.abc import Mapping
from typing import Literal

import pandas as pd
import torch

from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.model.supernet import SuperNet
from parnas.run import Run
from parnas.training.device import choose_device
from parnas.training.perplexity import measure_loss
from parnas.training.phases import load, refuse_other_text

Pi = Mapping[int, Mapping[str, float]]
"""Of blocks, counted from 1, the probability of each candidate; those that are not named have none."""


class PiByHand:
    """The SuperNet of a search and a text that it was not trained on, to be asked for its loss under any pi."""

    def __init__(self, run: Run, tokens: int = 8192, even: bool = True) -> None:
        """tokens: how many of the validation split are read. even: with the weights from before they settled.

        Raises `ParnasError` where the run is no search, or its text is no longer what it was.
        """
        self.loaded = load(run.folder, even=even)
        if not isinstance(self.loaded.model, SuperNet):
            raise ParnasError(f"{run.folder} is no search; only a SuperNet has a pi.")
        streams = prepare(self.loaded.config.data)
        refuse_other_text(streams.header, self.loaded.header, str(run.folder))
        self.device = choose_device(self.loaded.config.runtime)
        self.supernet = self.loaded.model.to(self.device.device)
        self.learnt = [alpha.detach().clone() for alpha in self.supernet.alphas()]
        self.text, self.eos_id = streams.tokens("valid")[:tokens], streams.tokenizer.eos_id

    def loss(self, pi: Pi | None = None, rest: Literal["derived", "learnt"] = "derived") -> float:
        """Nats per token with the pi of some blocks set; the others are the derived layer, or mixed as was learnt.

        Raises `ParnasError` for blocks and candidates that there are not, and probabilities that do not add up to 1.
        """
        derived = dict(enumerate(self.loaded.architecture, 1))
        wanted = {} if rest == "learnt" else {block: {layer: 1.0} for block, layer in derived.items()}
        wanted |= {block: dict(given) for block, given in (pi or {}).items()}
        spaces = self.loaded.config.search.block_spaces
        for block, given in wanted.items():
            if block not in derived or not set(given) <= set(spaces[block - 1]):
                known = f"1 to {len(derived)}" if block not in derived else f"of {', '.join(spaces[block - 1])}"
                raise ParnasError(f"There is no block {block} with {', '.join(given)}; give {known}.")
            if not (given and min(given.values()) >= 0 and abs(sum(given.values()) - 1) <= 1e-6):  # nor of NaN
                raise ParnasError(f"The pi of block {block} is {given}; give probabilities that add up to 1.")
        with torch.no_grad():
            for block, (alpha, learnt) in enumerate(zip(self.supernet.alphas(), self.learnt, strict=True), 1):
                chances = [wanted[block].get(name, 0.0) for name in self.supernet.space] if block in wanted else None
                alpha.copy_(learnt if chances is None else torch.tensor(chances).log())
        config = self.loaded.config
        total = measure_loss(
            self.supernet,
            self.text,
            self.eos_id,
            self.device,
            batch_size=config.evaluation.batch_size,
            tgt_len=config.data.tgt_len,
            reach=config.model.reach,
        )
        return total.per_token

    def swaps(self) -> pd.DataFrame:
        """The derived network with one block made each of its candidates: `block`, `layer`, `loss`, `more`.

        `loss` in nats per token; `more` is what it is above that of the derived network.
        """
        before = self.loss()
        rows = [
            {"block": block, "layer": layer, "loss": self.loss({block: {layer: 1.0}})}
            for block, layers in enumerate(self.loaded.config.search.block_spaces, 1)
            for layer in layers
        ]
        return pd.DataFrame(rows).assign(more=lambda table: table["loss"] - before)
