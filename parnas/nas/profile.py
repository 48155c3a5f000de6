"""What each layer costs on the device in use, measured, and how well the sum predicts whole networks.

A layer is timed where it stands, inside a network: the network of `depth` equal layers and the network without any take
turns, and their difference in a round, divided by `depth`, is the layer's latency in that round. What a network pays
once (embedding, softmax, encoding of distances) is the time of the one without layers (ProxylessNAS, arXiv 1812.00332,
adds up latencies of layers in the same way).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import getsourcefile, isclass, isfunction
from itertools import islice
from math import fsum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from parnas.architecture import ATTENTION, COMPRESSIVE, FEED_FORWARD, IDENTITY, Architecture, drop_identity
from parnas.config import Config
from parnas.data.cache import cache_dir, locked
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.files import read_json, write_json
from parnas.model import layers
from parnas.model.layers import MAKERS, Block, make_layer
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.cost_band import draw_networks
from parnas.run import describe_machine
from parnas.sections import ModelConfig
from parnas.training.device import Device, choose_device
from parnas.training.latency import Candidate, Shape, prepare_scoring, prepare_training, time_in_turns
from parnas.training.phases import resolve_cutoffs
from parnas.training.reporter import Reporter

Mode = Literal["inference", "training"]
Names = tuple[str, ...]
"""The layers of a network without identity, which is free."""
PROFILE = "profile.json"
MEMORY_SHAPES = "cmem_len", "ratio", "function", "loss", "distance"


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the rounds: the median, and what a tenth of the rounds stayed below or above."""

    median_ms: float
    p10_ms: float
    p90_ms: float

    @classmethod
    def of(cls, times: np.ndarray) -> "Timing":
        """Of milliseconds [rounds]."""
        return cls(*(float(value) for value in np.percentile(times, [50, 10, 90])))


@dataclass(frozen=True)
class ModeTable:
    """One mode's timings for a whole batch: of the network without layers, and of what each layer adds."""

    fixed: Timing
    layers: dict[str, Timing]


@dataclass(frozen=True)
class CheckedNetwork:
    """A whole network's predicted and measured milliseconds of inference, and predicted / measured - 1."""

    arch: str
    predicted_ms: float
    measured_ms: float
    error: float


@dataclass(frozen=True)
class Check:
    """How well the sum predicts networks that it was not made from; absolute relative errors."""

    median_error: float
    largest_error: float
    networks: list[CheckedNetwork]


@dataclass(frozen=True)
class Profile:
    """Latency of each layer in both modes, and what must be known to use it."""

    machine: dict[str, Any]
    precision: str
    shapes: dict[str, int | str]
    depth: int  # equal layers in the networks that were timed
    rounds: int
    inference: ModeTable  # scoring a segment with full memory, kept as keys and values
    training: ModeTable | None  # forward and backward, without the optimizer
    check: Check | None = None

    def latency(self, name: str, mode: Mode) -> float:
        """Milliseconds that a layer adds to a network; identity is free.

        Raises `ParnasError` for a layer that was not measured.
        """
        layers = self._table(mode).layers
        if name == IDENTITY:
            return 0.0
        if name not in layers:
            raise ParnasError(
                f"The profile has no layer {name!r}, only {', '.join(layers)}; "
                "make a new one by 'parnas profile' with the layer in search.space."
            )
        return layers[name].median_ms

    def predict(self, architecture: Iterable[str], mode: Mode) -> float:
        """Milliseconds of a whole network: the fixed part and the sum over its layers' names."""
        return self._table(mode).fixed.median_ms + fsum(self.latency(name, mode) for name in architecture)

    def write(self, path: Path) -> None:
        """Write the profile as JSON, whole or not at all."""
        write_json(path, asdict(self))

    def refuse_other_shapes(self, config: Config) -> None:
        """Raise where the profile was measured for other shapes, or another precision, than a configuration's."""
        wanted: dict[str, object] = {**describe_shapes(config)}
        found: dict[str, object] = {**self.shapes}
        if config.runtime.precision != "auto":  # which may be another one here than on the machine of the profile
            wanted["precision"], found["precision"] = config.runtime.precision, self.precision
        if wrong := [f"{key} {found.get(key)}, not {of}" for key, of in wanted.items() if found.get(key) != of]:
            raise ParnasError(
                f"The profile was measured with {', '.join(wrong)}; make one by 'parnas profile' for this one."
            )

    def _table(self, mode: Mode) -> ModeTable:
        table = {"inference": self.inference, "training": self.training}[mode]
        if table is None:
            raise ParnasError(f"The profile has no figures of {mode}; make a new one by 'parnas profile'.")
        return table


def read_profile(path: Path) -> Profile:
    """Read what `Profile.write` wrote, or the `profile.json` of a folder; raises `ParnasError` for anything else."""
    path = path / PROFILE if path.is_dir() else path
    try:
        return TypeAdapter(Profile).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ParnasError(
            f"{path} is no profile of layers ({place}: {first['msg']}); make one by 'parnas profile CONFIG'."
        ) from error


def keep_profile(config: Config, reporter: Reporter) -> Profile:
    """The profile that the cache has for this machine, precision, shapes, text and layers; measured where it has none.

    So searches of one configuration on one machine work with the same figures.
    """
    device = choose_device(config.runtime)
    machine, precision, shapes = describe_conditions(config, device)
    same = [machine["device_name"], machine["threads"], machine["versions"]["torch"], precision, shapes]
    names = layer_names(config)
    told = json.dumps([*same, names, layer_code(names), config.data.model_dump(mode="json"), config.search.blocks])
    path = cache_dir() / "profiles" / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.json"
    with locked(path, reporter.note):
        if not path.is_file():
            profile(config, reporter, check=0, training=False).write(path)
        return read_profile(path)


def profile(config: Config, reporter: Reporter, *, rounds: int = 50, check: int = 20, training: bool = True) -> Profile:
    """Measure the layers of the search space, `s` and `f`, training only if asked; predict `check` whole networks.

    The networks of the check take turns with those that the layers are measured in: so the check says how well the
    sum holds, not whether the machine was as busy before as it is now. No random number of the caller's is used up.
    """
    device = choose_device(config.runtime)
    with torch.random.fork_rng([device.device] if device.device.type == "cuda" else []):
        return measure_layers(config, device, reporter, rounds, check, training)


def measure_layers(
    config: Config, device: Device, reporter: Reporter, rounds: int, check: int, training: bool
) -> Profile:
    """What `profile` gives; it seeds the global generator."""
    streams = prepare(config.data, reporter.note)
    config = resolve_cutoffs(config, streams)
    names, depth = layer_names(config), config.search.blocks
    equal = [(name,) * depth for name in names]
    drawn = draw_architectures(config, check, equal)
    torch.manual_seed(config.runtime.seed)
    networks = share_layers([(), *equal, *drawn], config.model, streams.header.vocab_size, device)
    shape = Shape(config.data.batch_size, config.data.tgt_len, config.model.reach)
    tokens = streams.tokens("valid")

    def measure(keys: Sequence[Names], prepare_call: Callable[..., Callable[[], None]]) -> dict[Names, np.ndarray]:
        calls = {key: prepare_call(Candidate(networks[key], tokens), device, shape) for key in keys}
        return time_in_turns(calls, device, rounds)

    reporter.note(f"timing {len(networks)} networks of {depth} blocks in turns, {rounds} rounds: inference")
    scored = measure(list(networks), prepare_scoring)
    trained: ModeTable | None = None
    if training:
        reporter.note(f"timing {1 + len(equal)} networks of {depth} blocks in turns, {rounds} rounds: training")
        trained = tabulate(measure([(), *equal], prepare_training), names, depth)
    found = Profile(*describe_conditions(config, device), depth, rounds, tabulate(scored, names, depth), trained)
    measured = {architecture: float(np.median(scored[key])) for key, architecture in drawn.items()}
    return replace(found, check=check_sum(found, measured))


def describe_conditions(config: Config, device: Device) -> tuple[dict[str, Any], str, dict[str, int | str]]:
    """Machine, precision and shapes that the figures hold for."""
    machine = {**describe_machine(), **device.describe()}
    del machine["command_line"]
    return machine, machine.pop("precision"), describe_shapes(config)


def describe_shapes(config: Config) -> dict[str, int | str]:
    """What the work of a layer depends on."""
    model = config.model
    compressive = any(name[0] == COMPRESSIVE for name in config.search.candidates)
    memory = {key: getattr(model.memory, key) for key in MEMORY_SHAPES} if compressive else {}
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
    """Timings from the milliseconds [rounds] of the networks of `depth` equal layers and of that without, `()`."""
    layers = {name: Timing.of((times[(name,) * depth] - times[()]) / depth) for name in names}
    return ModeTable(Timing.of(times[()]), {**layers, IDENTITY: Timing(0.0, 0.0, 0.0)})


def check_sum(found: Profile, measured: Mapping[Architecture, float]) -> Check | None:
    """Compare the predictions with measured milliseconds of inference; none where there are none."""
    networks = []
    for architecture, milliseconds in measured.items():
        predicted = found.predict(architecture, "inference")
        error = predicted / milliseconds - 1
        networks.append(CheckedNetwork(str(architecture), predicted, milliseconds, error))
    if not networks:
        return None
    errors = [abs(network.error) for network in networks]
    return Check(float(np.median(errors)), max(errors), networks)


def layer_names(config: Config) -> list[str]:
    """What is measured: the candidates of the search space, and always self-attention and feed-forward."""
    names = dict.fromkeys([ATTENTION, FEED_FORWARD, *config.search.candidates])
    return [name for name in names if name != IDENTITY]


def layer_code(names: Iterable[str]) -> list[str]:
    """SHA-256 of the files that layers are written in: all of parnas's own, and those of the user's that are found."""
    makers = [MAKERS[name[0]] for name in names]
    files = [getsourcefile(make) for make in makers if isfunction(make) or isclass(make)]
    paths = [*Path(layers.__file__).parent.glob("*.py"), *(Path(file) for file in files if file is not None)]
    return sorted({hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()})


def draw_architectures(config: Config, count: int, known: Iterable[Names]) -> dict[Names, Architecture]:
    """Up to `count` random strings of the space by their layers: different networks, none of them `known` or empty."""
    spaces = config.search.block_spaces
    costless = dict.fromkeys((name for space in spaces for name in space), 0.0)
    drawn = draw_networks(spaces, costless, 0.0, 0.0, config.runtime.seed, without=known)
    return {drop_identity(names): Architecture(names) for names in islice(drawn, count)}


def share_layers(
    wanted: Iterable[Names], config: ModelConfig, vocab_size: int, device: Device
) -> dict[Names, TransformerXL]:
    """A network for each sequence of layers; all share embedding, softmax, and the nth layer of each name.

    So many networks need little memory, and none meets weights that have just been pushed out of the processor's cache
    by those of others, which a network that runs by itself does not meet either.
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
