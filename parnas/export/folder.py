"""The folder of an export: write the files that every target has, and load an exported network."""

import importlib.util
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from parnas.architecture import Architecture
from parnas.config.loader import check_config
from parnas.data.tokenizers import MODEL_FILE, SETTINGS_FILE, Tokenizer, load_tokenizer
from parnas.errors import ParnasError
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.files import read_json_object, refuse_outside_links, write_json, write_text
from parnas.runs.run import Run, package_version
from parnas.training.checkpoints import WEIGHTS, check_size, load_weights
from parnas.training.loaded_run import LoadedRun, generate_text

CONFIG, _README, _TOKENIZER = "config.json", "README.md", "tokenizer"
COMMON_FILES = {CONFIG, _README, _TOKENIZER, f"{_TOKENIZER}/{SETTINGS_FILE}", f"{_TOKENIZER}/{MODEL_FILE}"}
"""Files and folders that an export to any target may contain."""
_KEYS = {"target", "vocab_size", "eos_id", "tgt_len", "model", "trained", "parnas"}
"""Keys in `config.json` by which the folder of an export is recognised."""


@dataclass(frozen=True)
class Source:
    """The network to export, with float32 weights, on the CPU and in evaluation mode, and the run that trained it."""

    run: Run
    loaded: LoadedRun
    network: TransformerXL
    architecture: Architecture  # without identity: one layer for each block of the network


def require_package(package: str, target: str) -> None:
    """Raise `ParnasError` if `package`, which the export as `target` needs, is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ParnasError(
            f"--to {target} needs {package.replace('_', '-')}, which is not installed; run: pip install -e '.[export]' "
            "in the repository of parnas"
        )


def write_common(
    source: Source, target: str, folder: Path, readme: str, settings: dict[str, Any] | None = None
) -> None:
    """Write the files that every target has: `config.json`, the tokenizer, and a README that ends with `readme`.

    `settings` are entries of `config.json` that only this target has.
    """
    loaded, arch, version = source.loaded, str(source.architecture), package_version("parnas")
    name, kind, tokenizer = source.run.name, source.run.kind(), loaded.tokenizer
    content = {
        "target": target,
        "arch": arch,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tgt_len": loaded.config.data.tgt_len,
        "model": {**loaded.config.model.model_dump(mode="json"), "arch": arch},
        "trained": {"run": name, "kind": kind, "steps": loaded.step},
        "parnas": version,
    }
    write_json(folder / CONFIG, {**content, **(settings or {})})
    (folder / _TOKENIZER).mkdir()
    tokenizer.save(folder / _TOKENIZER)
    derived = f"Derived by the search `{name}`, with the SuperNet's weights"
    about = (
        f"{derived if kind == 'search' else f'Trained as `{name}`'} ({loaded.step:,} steps): a Transformer-XL of "
        f"{len(source.architecture)} layers, width {loaded.config.model.d_model}, {tokenizer.vocab_size:,} symbols. "
        f"`{CONFIG}` has its settings, `{_TOKENIZER}/` its tokenizer, which parnas reads. Written by parnas {version}."
    )
    write_text(folder / _README, f"# {arch}\n\n{about}\n{readme}")


def read_target(folder: Path) -> str | None:
    """Return the target named in the `config.json` of a folder; `None` if the folder is not an export."""
    try:
        content = read_json_object(folder / CONFIG)
    except (ParnasError, OSError):
        return None
    return str(content["target"]) if content.keys() >= _KEYS else None


@dataclass(frozen=True)
class ExportedNetwork:
    """A network and its tokenizer, loaded from an export to safetensors."""

    model: TransformerXL  # in evaluation mode, on the CPU, in float32
    tokenizer: Tokenizer
    architecture: Architecture
    config: dict[str, Any]  # content of config.json

    def generate(self, prompt: str, tokens: int = 100, temperature: float = 1.0, top_k: int | None = None) -> str:
        """Return `prompt` and a continuation of `tokens` sampled tokens; see `TransformerXL.generate`."""
        return generate_text(self.model, self.tokenizer, prompt, tokens, temperature, top_k)


def load_exported(folder: str | Path) -> ExportedNetwork:
    """Load the network and tokenizer that `parnas export --to safetensors` wrote; nothing in the folder is executed.

    Raises:
        ParnasError: A file is missing or not valid, or the weights do not fit the settings.
    """
    path = Path(folder)
    if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
        raise ParnasError(f"{folder} has no {CONFIG} or no {WEIGHTS}; parnas export RUN --to safetensors writes both.")
    refuse_outside_links(path)
    content = read_json_object(path / CONFIG)
    try:
        config = check_config({"model": content["model"]}, CONFIG).model
        architecture = Architecture.parse(content["arch"])
    except (KeyError, ParnasError) as error:
        reason = f"{type(error).__name__}: {error!s:.300}"
        raise ParnasError(f"{path / CONFIG} is not the configuration of an export ({reason}); export again.") from error
    tokenizer = load_tokenizer(path / _TOKENIZER)
    build = partial(TransformerXL.build, config, architecture, tokenizer.vocab_size)
    check_size(build, path)
    model = build()
    load_weights(path, model)
    return ExportedNetwork(model.eval(), tokenizer, architecture, content)
