"""Layer swaps: the loss of a SuperNet when some blocks use another layer than the derived network."""

from collections.abc import Mapping

import pandas as pd
import torch

from parnas.errors import ParnasError
from parnas.runs.run import Run
from parnas.training.device import choose_device
from parnas.training.loaded_run import load_supernet
from parnas.training.perplexity import measure_loss


class LayerSwaps:
    """Measures the validation loss of a search's SuperNet with chosen layers, or mixtures of layers, in some blocks."""

    def __init__(self, run: Run, tokens: int = 8192) -> None:
        """Load the SuperNet of a search and the first `tokens` tokens of its validation split.

        The weights are those from before the selected path was fine-tuned, or the last ones if the run did not store
        these. Raises `ParnasError` if the run is not a search, or if the text has changed since the search.
        """
        self.loaded, supernet = load_supernet(run.folder)
        streams = self.loaded.prepare_text(str(run.folder))
        self.device = choose_device(self.loaded.config.runtime)
        self.supernet = supernet.to(self.device.device)
        self.text, self.eos_id = streams.tokens("valid")[:tokens], streams.tokenizer.eos_id

    def loss(self, pi: Mapping[int, Mapping[str, float]] | None = None) -> float:
        """Return the loss in nats per token with the given candidates in some blocks.

        `pi` holds the probability of each candidate by block (counted from 1) and candidate; a candidate without an
        entry has probability 0. Blocks that are not in `pi` use the layer of the derived network. Raises `ParnasError`
        for an unknown block or candidate, and for probabilities that do not add up to 1.
        """
        config = self.loaded.config
        spaces = dict(enumerate(config.search.block_spaces, 1))
        block_pi: dict[int, Mapping[str, float]] = {
            block: {layer: 1.0} for block, layer in enumerate(self.loaded.architecture, 1)
        }
        for block, probabilities in (pi or {}).items():
            if block not in spaces:
                raise ParnasError(f"pi has block {block}, but the blocks are 1 to {len(spaces)}; give one of them.")
            if unknown := [name for name in probabilities if name not in spaces[block]]:
                raise ParnasError(
                    f"pi has layer {unknown[0]} in block {block}, whose candidates are {', '.join(spaces[block])}; "
                    "give one of them."
                )
            values = probabilities.values()
            if not (values and min(values) >= 0 and abs(sum(values) - 1) <= 1e-6):  # a NaN fails the comparisons too
                raise ParnasError(f"pi of block {block} is {probabilities}; give probabilities that add up to 1.")
            block_pi[block] = probabilities
        with torch.no_grad():  # alpha = log pi, since without gates a SuperNet mixes its candidates by softmax(alpha)
            for block, alpha in enumerate(self.supernet.alphas(), 1):
                alpha.copy_(torch.tensor([block_pi[block].get(name, 0.0) for name in self.supernet.space]).log())
        return measure_loss(self.supernet, self.text, self.eos_id, self.device, config.validation_shape).per_token

    def swaps(self) -> pd.DataFrame:
        """Return the loss of the derived network with a single layer replaced, for each block and candidate.

        Columns: `block`, counted from 1; `layer`, the candidate that replaces the derived layer of this block; `loss`
        in nats per token; `more`, `loss` minus the loss of the derived network.
        """
        derived_loss = self.loss()
        rows = [
            {"block": block, "layer": layer, "loss": self.loss({block: {layer: 1.0}})}
            for block, layers in enumerate(self.loaded.config.search.block_spaces, 1)
            for layer in layers
        ]
        return pd.DataFrame(rows).assign(more=lambda table: table["loss"] - derived_loss)
