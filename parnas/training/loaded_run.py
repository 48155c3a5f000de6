"""Load the network, tokenizer and configuration of a run from its folder, and generate text."""

from dataclasses import dataclass
from pathlib import Path

import torch

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.data.cache import Note, silent
from parnas.data.streams import StreamHeader, TokenStreams, prepare
from parnas.data.tokenizers import Tokenizer, load_tokenizer
from parnas.errors import ParnasError
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.run import STREAMS, Run
from parnas.training.checkpoints import best_checkpoint, check_size, load_weights, newest_checkpoint, step_of
from parnas.training.session import check_same_text

__all__ = ["LoadedRun", "generate_text", "load", "load_supernet", "run_architecture"]


@dataclass(frozen=True)
class LoadedRun:
    """The network, tokenizer and configuration of a run, rebuilt from the run folder without the training text."""

    model: TransformerXL  # in evaluation mode, on the CPU; a SuperNet for a search
    tokenizer: Tokenizer
    config: Config
    architecture: Architecture  # see `Run.architecture`
    header: StreamHeader  # facts about the training text: its tokenizer, vocabulary size and counts
    checkpoint: Path  # folder of the loaded weights

    @property
    def step(self) -> int:
        """Number of steps for which the loaded weights were trained."""
        return step_of(self.checkpoint)

    def prepare_text(self, name: str, note: Note = silent) -> TokenStreams:
        """Return the token streams of the configured text; `name` is that of the run in messages.

        Raises:
            ParnasError: text or tokenizer have changed since the training.
        """
        streams = prepare(self.config.data, note)
        check_same_text(streams.header, self.header, name)
        return streams

    def discrete(self) -> TransformerXL:
        """Return the discrete network in evaluation mode.

        For a search, it is the derived network, with its weights in the loaded SuperNet.
        """
        model = self.model
        return (model.extract(self.architecture) if isinstance(model, SuperNet) else model).eval()

    def generate(self, prompt: str, tokens: int = 100, temperature: float = 1.0, top_k: int | None = None) -> str:
        """Return `prompt` and a continuation of `tokens` tokens, sampled by the discrete network.

        See `TransformerXL.generate`.
        """
        return generate_text(self.discrete(), self.tokenizer, prompt, tokens, temperature, top_k)


def generate_text(
    model: TransformerXL, tokenizer: Tokenizer, prompt: str, tokens: int, temperature: float, top_k: int | None
) -> str:
    """Return `prompt` and a continuation of `tokens` sampled tokens; see `TransformerXL.generate`."""
    device = next(model.parameters()).device
    start = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eos_id]], device=device)
    return str(tokenizer.decode(model.generate(start, tokens, temperature, top_k)[0].tolist()))


def load(folder: str | Path, supernet_weights: bool = False, best: bool = False, by_pi: bool = False) -> LoadedRun:
    """Load the network of a run with the weights of the newest checkpoint, and the run's tokenizer and configuration.

    Args:
        folder: the run folder.
        supernet_weights: load the shared weights that a search stored before it fine-tuned the selected path; if it
            stored none, load the newest checkpoint.
        best: load the checkpoint with the lowest validation loss instead of the newest one.
        by_pi: derive the architecture of a search from pi, even if an `arch.yaml` in the folder names another one.

    Raises:
        ParnasError: the folder has no intact checkpoint, or a file that the network needs is missing or damaged.
    """
    run = Run(folder)
    config = run.config()
    if not (run.folder / STREAMS).is_file() or not run.tokenizer.is_dir():
        raise ParnasError(
            f"{folder} is incomplete: {STREAMS} or tokenizer/ is missing; restore the missing part, or train again."
        )
    tokenizer = load_tokenizer(run.tokenizer)
    damaged: list[str] = []
    supernet = newest_checkpoint(run.supernet, damaged.append) if supernet_weights else None
    if supernet_weights and supernet is None and damaged:
        raise ParnasError("\n".join([f"{run.supernet} has no intact checkpoint; restore its files.", *damaged]))
    find = best_checkpoint if best else newest_checkpoint
    checkpoint = supernet or find(run.checkpoints, damaged.append)
    if checkpoint is None:
        raise ParnasError(
            "\n".join([f"{folder} has no intact checkpoint; train first, or resume the run (--resume).", *damaged])
        )
    is_search = run.kind() == "search"

    def build() -> TransformerXL:
        if is_search:
            return SuperNet.from_config(config.model, config.search, tokenizer.vocab_size)
        return TransformerXL.build(config.model, run_architecture(config), tokenizer.vocab_size)

    check_size(build, checkpoint)
    model = build()
    load_weights(checkpoint, model)
    if isinstance(model, SuperNet):
        architecture = run.architecture(by_pi) or model.argmax_architecture()
    else:
        architecture = run_architecture(config)
    header = StreamHeader.read(run.folder / STREAMS)
    return LoadedRun(model.eval(), tokenizer, config, architecture, header, checkpoint)


def load_supernet(folder: str | Path, by_pi: bool = False) -> tuple[LoadedRun, SuperNet]:
    """Load a search and return it with its SuperNet; about `by_pi` see `load`.

    The weights are those from before the selected path was fine-tuned, or the last ones if the run did not store these.

    Raises:
        ParnasError: the run is not a search; or as `load`.
    """
    loaded = load(folder, supernet_weights=True, by_pi=by_pi)
    if not isinstance(loaded.model, SuperNet):
        raise ParnasError(f"{folder} is a {Run(folder).kind()} run and has no SuperNet; give the folder of a search.")
    return loaded, loaded.model


def run_architecture(config: Config) -> Architecture:
    """Return the architecture that `model.arch` names.

    Raises:
        ParnasError: `model.arch` is not set, is not valid, or has no layers except identity.
    """
    if config.model.arch is None:
        raise ParnasError(
            "No architecture was given; set model.arch, or give arch (--arch): a layer string such as sfsf, an "
            "arch.yaml or a preset such as interleaved-16."
        )
    architecture = Architecture.parse(config.model.arch)
    architecture.canonical()  # raises for identity alone
    return architecture
