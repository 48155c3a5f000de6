"""Latency table: the measured latency of each layer on this device, and how well sums of them predict networks.

A layer is timed inside a network, where caches and memory are as in use:

    latency(layer) = (latency of the network of `depth` such layers - latency of the network without layers) / depth

The network without layers is the fixed part of every network: embedding, softmax, encoding of distances. In each round
every network is timed once, and the difference is taken within the round, so that a change of the machine's load
cancels. The predicted latency of an architecture is the sum over its layers plus the fixed part, as in ProxylessNAS
(arXiv 1812.00332).
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
from parnas.training import latency as timing
from parnas.training.device import Device, choose_device
from parnas.training.latency import TimedNetwork, prepare_scoring, prepare_training, time_in_turns
from parnas.training.progress import Reporter
from parnas.training.session import resolve_cutoffs

__all__ = ["PROFILE", "Check", "Profile", "profile"]

Names = tuple[str, ...]
"""The names of a network's layers, without identity, which takes no time."""
PROFILE = "profile.json"
_MEMORY_SHAPES = "cmem_len", "ratio", "function", "loss", "distance"


@dataclass(frozen=True)
class Timing:
    """The median, 10th and 90th percentile of a latency over all rounds of a measurement, in milliseconds."""

    median_ms: float
    p10_ms: float
    p90_ms: float

    @classmethod
    def from_rounds(cls, times: np.ndarray) -> "Timing":
        """Return the percentiles of `times` [rounds], which are in milliseconds."""
        return cls(*(float(value) for value in np.percentile(times, [50, 10, 90])))


@dataclass(frozen=True)
class ModeTable:
    """The latencies of layers in one mode (inference or training) for a whole batch."""

    fixed: Timing  # of the network without layers
    layers: dict[str, Timing]  # by layer name: the time that one such layer adds to a network


@dataclass(frozen=True)
class CheckedNetwork:
    """The predicted and the measured latency of a whole network in inference."""

    arch: str
    predicted_ms: float
    measured_ms: float
    error: float  # predicted / measured - 1


@dataclass(frozen=True)
class Check:
    """Absolute values of relative errors of predicting the latency of random networks by sums of layer latencies."""

    median_error: float
    largest_error: float
    networks: list[CheckedNetwork]


@dataclass(frozen=True)
class Profile:
    """The measured latency of each layer in inference and training, and the conditions of the measurement."""

    machine: dict[str, Any]
    precision: str
    shapes: dict[str, int | str]
    depth: int  # number of layers, all equal, in each network that was timed
    rounds: int  # how often each network was timed
    inference: ModeTable  # to score a segment with full memory, kept as keys and values
    training: ModeTable | None  # forward and backward pass, without the optimizer
    check: Check | None = None  # `None` if no network was checked

    def latency(self, name: str) -> float:
        """Return the milliseconds that a layer adds to a network in inference, for a whole batch; 0 for identity.

        Raises:
            ParnasError: the layer was not measured.
        """
        if name == IDENTITY:
            return 0.0
        if name not in self.inference.layers:
            raise ParnasError(
                f"The profile has the layers {', '.join(self.inference.layers)}, but not {name!r}; "
                "make a new profile by 'parnas profile' with the layer in search.space."
            )
        return self.inference.layers[name].median_ms

    def predict(self, architecture: Iterable[str]) -> float:
        """Return the predicted milliseconds of a network in inference: the fixed part plus the sum over its layers."""
        return self.inference.fixed.median_ms + fsum(map(self.latency, architecture))

    def write(self, path: Path) -> None:
        """Write the profile to the file `path` as JSON, atomically."""
        write_json(path, asdict(self))

    def refuse_other_shapes(self, config: Config) -> None:
        """Raise `ParnasError` if the profile was measured with other shapes or another precision than in `config`."""
        measured = {"same_length": False, **self.shapes, "precision": self.precision}  # older profiles lack same_length
        wanted = {**describe_shapes(config), "precision": config.runtime.precision}
        if config.runtime.precision == "auto":  # may stand for another precision on this machine
            del wanted["precision"]
        if wrong := [
            f"{key} {measured.get(key)}, not {wanted[key]}" for key in wanted if measured.get(key) != wanted[key]
        ]:
            raise ParnasError(
                f"The profile was measured with {', '.join(wrong)}; make a new one by 'parnas profile CONFIG'."
            )


def read_profile(path: Path) -> Profile:
    """Read a profile from a file, or from `profile.json` in a folder.

    Raises:
        ParnasError: the file does not exist, or holds no profile.
    """
    path = path / PROFILE if path.is_dir() else path
    try:
        return TypeAdapter(Profile).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ParnasError(
            f"{path} is not a profile of layers ({place}: {first['msg']}); make one by 'parnas profile CONFIG'."
        ) from error


def cached_profile(config: Config, reporter: Reporter) -> Profile:
    """Return the profile for this machine and `config` from the cache; measure and cache one if there is none.

    A cached profile is valid for the same device, threads, torch version, precision, shapes, text, layers and number of
    blocks. So all searches of one configuration on one machine use the same latencies.
    """
    device = choose_device(config.runtime)
    machine, precision, shapes = _describe_conditions(config, device)
    same = [machine["device_name"], machine["threads"], machine["versions"]["torch"], precision, shapes]
    names = layer_names(config)
    key = json.dumps([*same, names, timed_code(names), config.data.model_dump(mode="json"), config.search.blocks])
    path = cache_dir() / "profiles" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    with locked(path, reporter.note):
        if not path.is_file():
            profile(config, reporter, check=0, training=False).write(path)
        return read_profile(path)


def profile(config: Config, reporter: Reporter, *, rounds: int = 50, check: int = 20, training: bool = True) -> Profile:
    """Measure the latency of each layer in the search space and of `s` and `f`, and check sums of these latencies.

    For the check, random networks are timed in the same rounds as the networks that measure the layers. So the check
    tests whether latencies add up, not whether the machine's load has changed. The caller's random state is unchanged.

    Args:
        config: shapes, text and search space.
        reporter: receives the progress.
        rounds: how often each network is timed.
        check: number of random networks whose latency is predicted and measured.
        training: whether to measure training steps too.
    """
    device = choose_device(config.runtime)
    with torch.random.fork_rng([device.device] if device.device.type == "cuda" else []):
        return _measure_layers(config, device, reporter, rounds, check, training)


def _measure_layers(
    config: Config, device: Device, reporter: Reporter, rounds: int, check: int, training: bool
) -> Profile:
    """Measure a profile; see `profile`. This function sets torch's global seed, which `profile` restores."""
    # 1. The networks: none, `depth` times each layer, and random ones for the check.
    streams = prepare(config.data, reporter.note)
    config = resolve_cutoffs(config, streams)
    names, depth = layer_names(config), config.search.blocks
    equal = [(name,) * depth for name in names]
    drawn = draw_architectures(config, check, equal)
    torch.manual_seed(config.runtime.seed)
    networks = share_layers([(), *equal, *drawn], config.model, streams.header.vocab_size, device)
    shape = config.training_shape
    tokens = streams.tokens("valid")

    # 2. Time them in turns.
    def measure(keys: Sequence[Names], prepare_call: Callable[..., Callable[[], None]]) -> dict[Names, np.ndarray]:
        calls = {key: prepare_call(TimedNetwork(networks[key], tokens), device, shape) for key in keys}
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
    """Return the conditions on which latencies depend: machine, precision, and shapes by `describe_shapes`."""
    machine = {**describe_machine(), **device.describe()}
    del machine["command_line"]
    return machine, machine.pop("precision"), describe_shapes(config)


def describe_shapes(config: Config) -> dict[str, int | str]:
    """Return the settings of `config` on which the latency of a layer depends, by name."""
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
        "same_length": model.same_length,
        **memory,
    }


def tabulate(times: Mapping[Names, np.ndarray], names: Sequence[str], depth: int) -> ModeTable:
    """Return the latency of each layer in `names`, given the times of networks in milliseconds, [rounds] for each.

    `times` has an entry for the network of `depth` equal layers of each name, and one for `()`, the network without
    layers.
    """
    layers = {name: Timing.from_rounds((times[(name,) * depth] - times[()]) / depth) for name in names}
    return ModeTable(Timing.from_rounds(times[()]), {**layers, IDENTITY: Timing(0.0, 0.0, 0.0)})


def check_sum(table: Profile, measured: Mapping[Architecture, float]) -> Check | None:
    """Compare `measured` latencies in inference, in milliseconds, with predictions; `None` if there are no networks."""
    networks = []
    for architecture, milliseconds in measured.items():
        predicted = table.predict(architecture)
        networks.append(CheckedNetwork(str(architecture), predicted, milliseconds, predicted / milliseconds - 1))
    if not networks:
        return None
    errors = [abs(network.error) for network in networks]
    return Check(float(np.median(errors)), max(errors), networks)


def layer_names(config: Config) -> list[str]:
    """Return the layers to measure: attention `s`, feed-forward `f` and all candidates except identity."""
    names = dict.fromkeys([ATTENTION, FEED_FORWARD, *config.search.candidates])
    return [name for name in names if name != IDENTITY]


def timed_code(names: Iterable[str]) -> list[str]:
    """Return SHA-256 sums of the source files of layers and of the measurement.

    They are part of a cached profile's key, so that the profile of changed code is not used.
    """
    makers = [MAKERS[name[0]] for name in names]
    files = [getsourcefile(make) for make in makers if isfunction(make) or isclass(make)]
    paths = [*Path(layers.__file__).parent.glob("*.py"), *(Path(file) for file in files if file is not None)]
    paths += [Path(__file__), Path(timing.__file__)]
    return sorted({hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()})


def draw_architectures(config: Config, count: int, known: Iterable[Names]) -> dict[Names, Architecture]:
    """Draw up to `count` random architectures, all of different networks, keyed by their layers without identity.

    Networks in `known` and the network without layers are not drawn.
    """
    spaces = config.search.block_spaces
    costless = dict.fromkeys((name for space in spaces for name in space), 0.0)
    drawn = draw_networks(spaces, costless, 0.0, 0.0, config.runtime.seed, without=known)
    return {drop_identity(names): Architecture(names) for names in islice(drawn, count)}


def share_layers(
    wanted: Iterable[Names], config: ModelConfig, vocab_size: int, device: Device
) -> dict[Names, TransformerXL]:
    """Return a network for each sequence of layers in `wanted`, all with the same weights.

    The networks share embedding, softmax and, for each layer name, the nth layer of this name. Shared weights need
    little memory. They also stay in the processor's cache when the networks take turns, so that each network is as fast
    as if it ran alone.
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
