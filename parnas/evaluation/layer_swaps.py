"""Layer swaps: the loss of a SuperNet after some blocks are set to another layer, or to a mixture of layers."""

from collections.abc import Mapping
from typing import Literal

import pandas as pd
import torch

from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.model.supernet import SuperNet
from parnas.runs.run import Run
from parnas.training.device import choose_device
from parnas.training.loaded_run import load
from parnas.training.perplexity import measure_loss
from parnas.training.session import check_same_text

_Pi = Mapping[int, Mapping[str, float]]
"""Probabilities of candidates by block, counted from 1; candidates without an entry have probability 0."""


class LayerSwaps:
    """The SuperNet of a search with a part of its validation split, to measure its loss under any pi."""

    def __init__(self, run: Run, tokens: int = 8192, supernet_weights: bool = True) -> None:
        """Load the SuperNet and the text.

        Args:
            run: a search.
            tokens: read from the beginning of the validation split.
            supernet_weights: use the shared weights from before the selected path was fine-tuned, where stored.

        Raises:
            ParnasError: the run is no search, or its text has changed since.
        """
        self.loaded = load(run.folder, supernet_weights=supernet_weights)
        if not isinstance(self.loaded.model, SuperNet):
            raise ParnasError(f"{run.folder} is no search; only a SuperNet has a pi.")
        streams = prepare(self.loaded.config.data)
        check_same_text(streams.header, self.loaded.header, str(run.folder))
        self.device = choose_device(self.loaded.config.runtime)
        self.supernet = self.loaded.model.to(self.device.device)
        self.learnt_alphas = [alpha.detach().clone() for alpha in self.supernet.alphas()]
        self.text, self.eos_id = streams.tokens("valid")[:tokens], streams.tokenizer.eos_id

    def loss(self, pi: _Pi | None = None, rest: Literal["derived", "learnt"] = "derived") -> float:
        """Return the loss in nats per token with the pi of some blocks set.

        Args:
            pi: the probabilities of the blocks to change.
            rest: whether the other blocks have the layer of the derived network or their learnt pi.

        Raises:
            ParnasError: an unknown block or candidate, or probabilities that do not add up to 1.
        """
        config = self.loaded.config
        spaces = dict(enumerate(config.search.block_spaces, 1))
        block_pi: dict[int, Mapping[str, float]] = {}
        if rest == "derived":
            block_pi = {block: {layer: 1.0} for block, layer in enumerate(self.loaded.architecture, 1)}
        for block, probabilities in (pi or {}).items():
            if not set(probabilities) <= set(spaces.get(block, ())) or block not in spaces:
                allowed = f"of {', '.join(spaces[block])}" if block in spaces else f"1 to {len(spaces)}"
                raise ParnasError(f"There is no block {block} with {', '.join(probabilities)}; give {allowed}.")
            values = probabilities.values()
            if not (values and min(values) >= 0 and abs(sum(values) - 1) <= 1e-6):  # nor NaN
                raise ParnasError(f"The pi of block {block} is {probabilities}; give probabilities that add up to 1.")
            block_pi[block] = probabilities
        with torch.no_grad():
            for block, (alpha, learnt) in enumerate(zip(self.supernet.alphas(), self.learnt_alphas, strict=True), 1):
                alpha.copy_(learnt)
                if block in block_pi:
                    alpha.copy_(torch.tensor([block_pi[block].get(name, 0.0) for name in self.supernet.space]).log())
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
        """Return the loss of the derived network with each layer of each block replaced by each candidate.

        Columns: `block`, `layer`, `loss` in nats per token, and `more`, its difference from the derived network's loss.
        """
        derived_loss = self.loss()
        rows = [
            {"block": block, "layer": layer, "loss": self.loss({block: {layer: 1.0}})}
            for block, layers in enumerate(self.loaded.config.search.block_spaces, 1)
            for layer in layers
        ]
        return pd.DataFrame(rows).assign(more=lambda table: table["loss"] - derived_loss)
