"""Probe a trained model in a folder: a parnas run, or a causal language model of `transformers`."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from parnas.architecture import drop_identity
from parnas.config.loader import Override, check_config, read_override
from parnas.config.schema import RuntimeConfig
from parnas.data.corpora import NAMES, find_corpus
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.pretrained.findings import Findings, investigate
from parnas.pretrained.parent import Parent, ParnasParent
from parnas.pretrained.probe import rows_of
from parnas.pretrained.settings import refuse_pointer
from parnas.pretrained.transformers_parent import TransformersParent, load_transformers
from parnas.runs.files import expand_user
from parnas.runs.records import ProbeConditions
from parnas.runs.run import ENVIRONMENT, Run
from parnas.training.device import choose_device
from parnas.training.loaded_run import load

__all__ = ["PROBE_PAIRS", "PROBE_TOKENS", "ROUNDS", "probe_model", "read_runtime"]

PROBE_TOKENS, PROBE_PAIRS = 4096, 8
ROUNDS = 10  # of measuring the time of a layer

_ROWS = 16
_LENGTH = 512  # tokens of a row that a model of transformers reads, or as many as it has positions
_LEAST_TOKENS = 64


def probe_model(
    folder: Path,
    text: str | None,
    tokens: int,
    pairs: int,
    rounds: int,
    runtime: RuntimeConfig,
    note: Callable[[str], None],
) -> Findings:
    """Probe the model in a folder.

    Args:
        folder: a parnas run with a discrete network, or a folder that `transformers` has written.
        text: a text file, or the name of a corpus, whose validation split is read; `None`: the validation split of the
            run's own text.
        tokens: how many tokens are read.
        pairs: number of pairs of layers that are left out together, to check that losses add up.
        rounds: how often the time of each layer is measured.
        runtime: device, precision and threads.
        note: receives the progress.

    Raises:
        ParnasError: the folder holds no such model, or there is no text, or too little.
    """
    device, start = choose_device(runtime), time.perf_counter()
    parent: Parent
    own_text = ""
    if (folder / ENVIRONMENT).is_file():
        loaded = load(folder)
        refuse_pointer(loaded.config.model, folder)
        network, layers = loaded.discrete(), drop_identity(loaded.architecture)
        config, encode = loaded.config, loaded.tokenizer.encode
        own_text = config.data.corpus
        length, memory, rows = config.data.tgt_len, config.model.mem_len, _ROWS
        if not Run(folder).finished():
            note(f"{folder} has not ended: its newest checkpoint is probed")
        network.to(device.device)
        parent = ParnasParent(network, layers, length)
        ids = prepare(config.data, note).tokens("valid")[: tokens + 1] if text is None else encode(read(text, note))
    else:
        model, tokenizer = load_transformers(folder)
        if text is None:
            raise ParnasError(f"{folder} has no text of its own; give one (--text): a text file or a corpus.")
        ids = tokenizer(read(text, note), truncation=False)["input_ids"]
        length = min(_LENGTH, int(getattr(model.config, "max_position_embeddings", _LENGTH)), tokens, len(ids) - 1)
        rows, memory = max(1, min(tokens, len(ids) - 1) // max(1, length)), 0
        parent = TransformersParent(model.to(device.device), length)
    taken = np.asarray(ids[: tokens + 1])
    if len(taken) <= _LEAST_TOKENS:
        raise ParnasError(f"The text has {len(taken)} tokens; give one of more than {_LEAST_TOKENS}.")
    found = rows_of(taken, rows, length, memory).to(device.device)
    findings = investigate(parent, found, device, pairs, rounds, 1, note)
    return replace(
        findings,
        conditions=ProbeConditions(
            model=str(folder),
            text=text,
            source=describe_source(text or own_text),
            requested_tokens=tokens,
            device_name=device.describe()["device_name"] or device.device.type,
            precision=device.precision,
            seconds=time.perf_counter() - start,
        ),
    )


def read_runtime(overrides: list[Override]) -> RuntimeConfig:
    """Return the section runtime with overrides; raise `ParnasError` for settings of other sections."""
    keys = [read_override(each)[0] if isinstance(each, str) else each[0] for each in overrides]
    if others := [key for key in keys if not key.startswith("runtime.")]:
        raise ParnasError(f"A probe has settings of the section runtime only, not {others[0]}.")
    return check_config({}, "The settings", overrides).runtime


def describe_source(text: str) -> str:
    """Return in words what `read` reads, without the folder."""
    is_file = text not in NAMES and expand_user(text).is_file()
    return Path(text).name if is_file else f"the validation split of {Path(text).name}"


def read(text: str, note: Callable[[str], None]) -> str:
    """Return the content of a text file, or of the validation split of a corpus."""
    if not text:
        raise ParnasError("The name of the text (--text) is empty; give a text file or a corpus.")
    path = expand_user(text)
    if text not in NAMES and path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ParnasError(f"{text} cannot be read as text in UTF-8: {error}.") from error
    return b"".join(find_corpus(text, note).splits["valid"].blocks()).decode("utf-8", errors="replace")
