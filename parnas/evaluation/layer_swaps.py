"""Layer swaps: the loss of a SuperNet when some blocks use another layer or mixture of layers than the derived one."""

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
"""Probability of each candidate, by block (counted from 1) and candidate; 0 for candidates without an entry."""


class LayerSwaps:
    """Measures the validation loss of a search's SuperNet with given layers or layer probabilities in some blocks."""

    def __init__(self, run: Run, tokens: int = 8192, supernet_weights: bool = True) -> None:
        """Load the SuperNet of `run` and the beginning of its validation split.

        Args:
            run: a search.
            tokens: the number of tokens to read from the beginning of the validation split.
            supernet_weights: use the shared weights from before the selected path was fine-tuned, if they are stored.

        Raises:
            ParnasError: the run is no search, or its text has changed since the search.
        """
        self.loaded = load(run.folder, supernet_weights=supernet_weights)
        if not isinstance(self.loaded.model, SuperNet):
            raise ParnasError(f"{run.folder} is no search and has no SuperNet; give the folder of a search.")
        streams = prepare(self.loaded.config.data)
        check_same_text(streams.header, self.loaded.header, str(run.folder))
        self.device = choose_device(self.loaded.config.runtime)
        self.supernet = self.loaded.model.to(self.device.device)
        self.learnt_alphas = [alpha.detach().clone() for alpha in self.supernet.alphas()]
        self.text, self.eos_id = streams.tokens("valid")[:tokens], streams.tokenizer.eos_id

    def loss(self, pi: _Pi | None = None, rest: Literal["derived", "learnt"] = "derived") -> float:
        """Return the loss in nats per token with the given layer probabilities in some blocks.

        Args:
            pi: for each block to change, the probability of each candidate; see `_Pi`.
            rest: what the other blocks use: the layer of the derived network, or the probabilities that were learnt.

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
                known = f"blocks are 1 to {len(spaces)}"
                if block in spaces:
                    known = f"its candidates are {', '.join(spaces[block])}"
                raise ParnasError(f"There is no block {block} with {', '.join(probabilities)}; {known}.")
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
        """Return the loss of the derived network after a single layer is replaced, for each block and candidate.

        Columns: `block`, counted from 1; `layer`, the candidate that replaces its layer; `loss` in nats per token; and
        `more`, by how much `loss` exceeds the derived network's loss.
        """
        derived_loss = self.loss()
        rows = [
            {"block": block, "layer": layer, "loss": self.loss({block: {layer: 1.0}})}
            for block, layers in enumerate(self.loaded.config.search.block_spaces, 1)
            for layer in layers
        ]
        return pd.DataFrame(rows).assign(more=lambda table: table["loss"] - derived_loss)
