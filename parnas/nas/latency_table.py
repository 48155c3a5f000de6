"""Latency table: the measured cost of each layer on this device, and how well their sum predicts whole networks.

A layer is timed inside a network, where caches and memory are as in use:

    latency(layer) = (latency of the network of `depth` such layers - latency of the network without layers) / depth

The network without layers is what every network pays once: embedding, softmax, encoding of distances. The networks take
turns, and the difference is taken within each round, so that a change of the machine's load cancels. The latency of an
architecture is then the sum over its layers plus the fixed part, as in ProxylessNAS (arXiv 1812.00332).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import getsourcefile, isclass, isfunction
from itertools import islice
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from parnas.architecture import ATTENTION, COMPRESSIVE, FEED_FORWARD, IDENTITY, Architecture, drop_identity
from parnas.config.loader import Config
from parnas.config.schema import ModelConfig
from parnas.data.cache import cache_dir, locked
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.model import layers
from parnas.model.layers import MAKERS, Block, make_layer
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.random_sampling import draw_networks
from parnas.runs.files import read_json, write_json
from parnas.runs.run import describe_machine
from parnas.training.device import Device, choose_device
from parnas.training.latency import Candidate, Shape, prepare_scoring, prepare_training, time_in_turns
from parnas.training.progress import Reporter
from parnas.training.session import resolve_cutoffs

__all__ = ["PROFILE", "Check", "Profile", "profile"]

Names = tuple[str, ...]
"""The layers of a network; identity, which is free, left out."""
PROFILE = "profile.json"
_MEMORY_SHAPES = "cmem_len", "ratio", "function", "loss", "distance"


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the rounds: median, 10th and 90th percentile."""

    median_ms: float
    p10_ms: float
    p90_ms: float

    @classmethod
    def from_rounds(cls, times: np.ndarray) -> "Timing":
        """Return the percentiles of milliseconds [rounds]."""
        return cls(*(float(value) for value in np.percentile(times, [50, 10, 90])))


@dataclass(frozen=True)
class ModeTable:
    """The timings of one mode for a whole batch: the network without layers, and what each layer adds."""

    fixed: Timing
    layers: dict[str, Timing]


@dataclass(frozen=True)
class CheckedNetwork:
    """Predicted and measured milliseconds of inference of a whole network, and predicted / measured - 1."""

    arch: str
    predicted_ms: float
    measured_ms: float
    error: float


@dataclass(frozen=True)
class Check:
    """The accuracy of the sum on random networks, as absolute relative errors."""

    median_error: float
    largest_error: float
    networks: list[CheckedNetwork]


@dataclass(frozen=True)
class Profile:
    """Latency of each layer in both modes, and the conditions of the measurement."""

    machine: dict[str, Any]
    precision: str
    shapes: dict[str, int | str]
    depth: int  # equal layers in the networks that were timed
    rounds: int
    inference: ModeTable  # scoring a segment with full memory, kept as keys and values
    training: ModeTable | None  # forward and backward, without the optimizer
    check: Check | None = None

    def latency(self, name: str) -> float:
        """Return the milliseconds that a layer adds to a network in inference; identity is free.

        Raises:
            ParnasError: the layer was not measured.
        """
        if name == IDENTITY:
            return 0.0
        if name not in self.inference.layers:
            raise ParnasError(
                f"The profile has no layer {name!r}, only {', '.join(self.inference.layers)}; "
                "make a new one by 'parnas profile' with the layer in search.space."
            )
        return self.inference.layers[name].median_ms

    def predict(self, architecture: Iterable[str]) -> float:
        """Return the milliseconds of inference of a whole network: the fixed part plus the sum over its layers."""
        return self.inference.fixed.median_ms + fsum(map(self.latency, architecture))

    def write(self, path: Path) -> None:
        """Write the profile as JSON, atomically."""
        write_json(path, asdict(self))

    def refuse_other_shapes(self, config: Config) -> None:
        """Raise `ParnasError` if the profile was measured with other shapes or precision than the configuration has."""
        measured = {**self.shapes, "precision": self.precision}
        wanted = {**describe_shapes(config), "precision": config.runtime.precision}
        if config.runtime.precision == "auto":  # may stand for another precision on this machine
            del wanted["precision"]
        if wrong := [
            f"{key} {measured.get(key)}, not {wanted[key]}" for key in wanted if measured.get(key) != wanted[key]
        ]:
            raise ParnasError(f"The profile was measured with {', '.join(wrong)}; make a new one by 'parnas profile'.")


def read_profile(path: Path) -> Profile:
    """Read a profile file, or `profile.json` of a folder; raises `ParnasError` for anything else."""
    path = path / PROFILE if path.is_dir() else path
    try:
        return TypeAdapter(Profile).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ParnasError(
            f"{path} is no profile of layers ({place}: {first['msg']}); make one by 'parnas profile CONFIG'."
        ) from error


def cached_profile(config: Config, reporter: Reporter) -> Profile:
    """Return the cached profile for this machine, precision, shapes, text and layers; measure it where there is none.

    All searches of one configuration on one machine use the same cached figures.
    """
    device = choose_device(config.runtime)
    machine, precision, shapes = _describe_conditions(config, device)
    same = [machine["device_name"], machine["threads"], machine["versions"]["torch"], precision, shapes]
    names = layer_names(config)
    key = json.dumps([*same, names, layer_code(names), config.data.model_dump(mode="json"), config.search.blocks])
    path = cache_dir() / "profiles" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    with locked(path, reporter.note):
        if not path.is_file():
            profile(config, reporter, check=0, training=False).write(path)
        return read_profile(path)


def profile(config: Config, reporter: Reporter, *, rounds: int = 50, check: int = 20, training: bool = True) -> Profile:
    """Return the latency of each layer of the search space and of `s` and `f`, checked on whole networks.

    The checked networks take turns with the networks that measure the layers, so that the check tests whether latencies
    add up rather than whether the machine's load changed. The caller's random state does not change.

    Args:
        config: shapes, text and search space.
        reporter: receives the progress.
        rounds: measurements of each network.
        check: number of random networks to predict.
        training: measure training steps too.
    """
    device = choose_device(config.runtime)
    with torch.random.fork_rng([device.device] if device.device.type == "cuda" else []):
        return _measure_layers(config, device, reporter, rounds, check, training)


def _measure_layers(
    config: Config, device: Device, reporter: Reporter, rounds: int, check: int, training: bool
) -> Profile:
    """Measure as `profile` does, but seed torch's global generator."""
    # 1. The networks: none, `depth` times each layer, and random ones for the check.
    streams = prepare(config.data, reporter.note)
    config = resolve_cutoffs(config, streams)
    names, depth = layer_names(config), config.search.blocks
    equal = [(name,) * depth for name in names]
    drawn = draw_architectures(config, check, equal)
    torch.manual_seed(config.runtime.seed)
    networks = share_layers([(), *equal, *drawn], config.model, streams.header.vocab_size, device)
    shape = Shape(config.data.batch_size, config.data.tgt_len, config.model.reach)
    tokens = streams.tokens("valid")

    # 2. Time them in turns.
    def measure(keys: Sequence[Names], prepare_call: Callable[..., Callable[[], None]]) -> dict[Names, np.ndarray]:
        calls = {key: prepare_call(Candidate(networks[key], tokens), device, shape) for key in keys}
        return time_in_turns(calls, device, rounds)

    reporter.note(f"timing {len(networks)} networks of {depth} blocks in turns, {rounds} rounds: inference")
    scored = measure(list(networks), prepare_scoring)
    trained: ModeTable | None = None
    if training:
        reporter.note(f"timing {1 + len(equal)} networks of {depth} blocks in turns, {rounds} rounds: training")
        trained = tabulate(measure([(), *equal], prepare_training), names, depth)
    # 3. Latencies per layer, and the check of their sums.
    result = Profile(*_describe_conditions(config, device), depth, rounds, tabulate(scored, names, depth), trained)
    measured = {architecture: float(np.median(scored[key])) for key, architecture in drawn.items()}
    return replace(result, check=check_sum(result, measured))


def _describe_conditions(config: Config, device: Device) -> tuple[dict[str, Any], str, dict[str, int | str]]:
    """Return machine, precision and shapes: the figures depend on them."""
    machine = {**describe_machine(), **device.describe()}
    del machine["command_line"]
    return machine, machine.pop("precision"), describe_shapes(config)


def describe_shapes(config: Config) -> dict[str, int | str]:
    """Return the sizes that a layer's latency depends on, by name."""
    model = config.model
    compressive = any(name[0] == COMPRESSIVE for name in config.search.candidates)
    memory = {key: getattr(model.memory, key) for key in _MEMORY_SHAPES} if compressive else {}
    return {
        "batch_size": config.data.batch_size,
        "tgt_len": config.data.tgt_len,
        "mem_len": model.mem_len,
        "d_model": model.d_model,
        "n_heads": model.n_heads,
        "d_head": model.head_width,
        "d_inner": model.d_inner,
        **memory,
    }


def tabulate(times: Mapping[Names, np.ndarray], names: Sequence[str], depth: int) -> ModeTable:
    """Return timings per layer, given the milliseconds [rounds] of the networks of `depth` equal layers and of `()`."""
    layers = {name: Timing.from_rounds((times[(name,) * depth] - times[()]) / depth) for name in names}
    return ModeTable(Timing.from_rounds(times[()]), {**layers, IDENTITY: Timing(0.0, 0.0, 0.0)})


def check_sum(table: Profile, measured: Mapping[Architecture, float]) -> Check | None:
    """Compare predictions with measured milliseconds of inference; `None` where there are none."""
    networks = []
    for architecture, milliseconds in measured.items():
        predicted = table.predict(architecture)
        networks.append(CheckedNetwork(str(architecture), predicted, milliseconds, predicted / milliseconds - 1))
    if not networks:
        return None
    errors = [abs(network.error) for network in networks]
    return Check(float(np.median(errors)), max(errors), networks)


def layer_names(config: Config) -> list[str]:
    """Return the layers to measure: the candidates of the search space, self-attention and feed-forward."""
    names = dict.fromkeys([ATTENTION, FEED_FORWARD, *config.search.candidates])
    return [name for name in names if name != IDENTITY]


def layer_code(names: Iterable[str]) -> list[str]:
    """Return the SHA-256 of the files that define layers, those of custom layers included where they are found."""
    makers = [MAKERS[name[0]] for name in names]
    files = [getsourcefile(make) for make in makers if isfunction(make) or isclass(make)]
    paths = [*Path(layers.__file__).parent.glob("*.py"), *(Path(file) for file in files if file is not None)]
    return sorted({hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()})


def draw_architectures(config: Config, count: int, known: Iterable[Names]) -> dict[Names, Architecture]:
    """Return up to `count` random architectures by their layers: different, not empty and not in `known`."""
    spaces = config.search.block_spaces
    costless = dict.fromkeys((name for space in spaces for name in space), 0.0)
    drawn = draw_networks(spaces, costless, 0.0, 0.0, config.runtime.seed, without=known)
    return {drop_identity(names): Architecture(names) for names in islice(drawn, count)}


def share_layers(
    wanted: Iterable[Names], config: ModelConfig, vocab_size: int, device: Device
) -> dict[Names, TransformerXL]:
    """Return a network for each sequence of layers; all share embedding, softmax, and the nth layer of each name.

    Shared weights need little memory. And networks that take turns do not push each other's weights out of the
    processor's cache, so that they are as fast as a network that runs alone.
    """
    pool: dict[tuple[str, int], Block] = {}
    networks: dict[Names, TransformerXL] = {}
    first: TransformerXL | None = None
    for names in wanted:
        places = [(name, names[:index].count(name)) for index, name in enumerate(names)]
        with torch.device(device.device):
            pool |= {place: make_layer(place[0], config) for place in places if place not in pool}
            network = TransformerXL(config, [pool[place] for place in places], vocab_size)
        first = first or network
        network.embedding, network.head = first.embedding, first.head
        networks[names] = network
    return networks
