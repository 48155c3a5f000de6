"""Training speed of parnas, transformers and x-transformers on the same work: `python benchmarks/train_step.py`.

What is the same for all: shapes, token ids (drawn by Zipf's law, the same segments in the same order), B·T scored
targets a step, full memory carried from step to step, adaptive softmax tied to the embedding and not narrowed, no
dropout, AdamW and clipping. That softmax stands in for the untied, narrower one of
wikitext2-par.yaml too, which the others cannot do. `networks.py` says what each network is. Before anything is timed,
parnas and transformers get the same weights and must give the same loss. `blocks` is forward and backward of the blocks
alone, from given hidden states and full memory: no embedding, softmax, clipping or optimizer.

Share of peak = model FLOP/s over the FLOP/s of one large matrix product in the same precision, measured here before and
after. Model FLOPs = 6 x the multiply-adds of the forward pass's matrix products, from shapes alone (2 forward, 4
backward); the adaptive softmax by the shares of its clusters in the very targets that were scored. Look-ups, softmax,
norms and the optimizer count zero; masked scores count, and so do all 6 for the keys and values of memory, to which no
gradient goes back.
"""

import gc
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import harness
import torch
from networks import Network, Size, make_networks
from torch import Tensor

from parnas.config.loader import load_config
from parnas.config.schema import ModelConfig
from parnas.errors import ParnasError
from parnas.training.device import Device
from parnas.training.optimizers import gradient_norm, make_adamw, step_clipped

WARM_UP = 2
SAME_WEIGHTS = ("parnas", "transformers")
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # between the mean losses of the same weights, in nats
LR, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
CONVENTION = "model FLOPs = 6 x multiply-adds of the forward pass's matrix products per token, from shapes alone"


class Plan(NamedTuple):
    """How much is measured."""

    rounds: int
    product_size: int | None = None  # rows of the square matrices that give the peak; none: as the device needs


PLANS = {"tiny": Plan(2, product_size=64), "short": Plan(5), "full": Plan(30)}


class Segment(NamedTuple):
    """Tokens and targets of one segment of all rows."""

    tokens: Tensor  # [B, T]
    targets: Tensor  # [B, T]


def sizes(size: str, device: torch.device) -> list[Size]:
    """Return the shapes to compare."""
    if size == "tiny":
        model = ModelConfig(d_model=16, n_heads=2, d_inner=32, mem_len=4, dropout=0.0, cutoffs=(20, 60))
        return [Size("tiny", model, layers=1, vocab_size=200, batch_size=3, tgt_len=6)]
    par = load_config(harness.PAR_CONFIG)
    like_par = {"dropout": 0.0, "proj_factor": None, "tie_weights": True}
    small = ModelConfig(d_model=256, n_heads=8, d_inner=1024, mem_len=64, dropout=0.0, cutoffs=(2000, 10000))
    base = {"d_model": 512, "n_heads": 8, "d_head": 64, "d_inner": 2048, "mem_len": 192, "dropout": 0.0}
    if device.type == "cuda":
        wikitext103 = Size("WT103 base", ModelConfig(**base, cutoffs=(19997, 39997, 199997)), 16, 267_735, 32, 192)
    else:
        wikitext103 = Size("WT103 base, 2 layers", ModelConfig(**base, cutoffs=(2000, 10000)), 2, 33_278, 8, 192)
    return [
        Size("WikiText-2 par", par.model.model_copy(update=like_par), 3, 12_000, par.data.batch_size, par.data.tgt_len),
        Size("12 blocks", small, layers=6, vocab_size=33_278, batch_size=16, tgt_len=64),
        wikitext103,
    ]


def draw_segments(size: Size, count: int, device: torch.device, seed: int = 1) -> list[Segment]:
    """Return random consecutive segments."""
    drawn = harness.draw_ids(size.vocab_size, (size.batch_size, count * size.tgt_len + 1), seed)
    ids = torch.from_numpy(drawn).to(device)
    pairs = zip(ids[:, :-1].split(size.tgt_len, dim=1), ids[:, 1:].split(size.tgt_len, dim=1), strict=True)
    return [Segment(tokens.contiguous(), targets.contiguous()) for tokens, targets in pairs]


class TrainStep:
    """A training step as a callable; each call trains the network on the next segment."""

    def __init__(self, network: Network, segments: Sequence[Segment], device: Device) -> None:
        self.network, self.device = network, device
        self.segments: Iterator[Segment] = cycle(segments)
        weights = dict(network.named_parameters())
        self.parameters = list(weights.values())
        self.optimizer = make_adamw(weights, LR, WEIGHT_DECAY)
        self.memory: Any = None
        self.losses: list[Tensor] = []
        self.scored = 0  # targets of the last step

    def __call__(self) -> None:
        segment = next(self.segments)
        with self.device.autocast():
            nll, self.memory = self.network.nll(*segment, self.memory)
        loss = nll.mean()
        loss.backward()
        step_clipped(self.optimizer, gradient_norm(self.parameters), CLIP)
        self.losses.append(loss.detach())
        self.scored = nll.numel()

    def describe(self) -> dict[str, Any]:
        """Return the number of scored targets, for a result."""
        return {"targets": self.scored, "losses": [loss.item() for loss in self.losses]}


def blocks_step(network: Network, memory: Any, size: Size, device: Device) -> Callable[[], None]:
    """Return a call that runs forward and backward of the blocks alone, with gradients of weights and inputs."""
    generator = torch.Generator().manual_seed(1)
    shape = (size.batch_size, size.tgt_len, size.model.d_model)
    x, gradient = (torch.randn(shape, generator=generator).to(device.device) for _ in range(2))
    x.requires_grad_()

    def step() -> None:
        with device.autocast():
            hidden = network.transform(x, memory)
        hidden.backward(gradient.to(hidden.dtype))
        network.zero_grad(set_to_none=True)
        x.grad = None

    return step


@torch.no_grad()
def loss_difference(networks: Mapping[str, Network], segments: Sequence[Segment], device: Device) -> float:
    """Return the largest difference of the mean losses of parnas and transformers, in nats per token, over segments.

    The first segment has no memory. Raises `ParnasError` if the difference exceeds the tolerance of the precision,
    since the times of different computations must not be compared.
    """
    largest = 0.0
    memories: dict[str, Any] = dict.fromkeys(SAME_WEIGHTS)
    for segment in segments:
        losses = {}
        for name, memory in memories.items():
            with device.autocast():
                nll, memories[name] = networks[name].nll(*segment, memory)
            losses[name] = nll.double().mean().item()
        largest = max(largest, abs(losses["parnas"] - losses["transformers"]))
    if not largest <= TOLERANCE[device.precision]:
        raise ParnasError(
            f"parnas and transformers differ by {largest:.2g} nats with the same weights in {device.precision}, "
            f"beyond {TOLERANCE[device.precision]}: this is not the same work. "
            "Run tests/model/test_transformers_parity.py."
        )
    return largest


def compare(size: Size, devices: Mapping[str, Device], plan: Plan) -> list[dict[str, Any]]:
    """Time each network of a size in each precision; return a record for whole steps and one for the blocks alone."""
    device = next(iter(devices.values())).device
    segments = draw_segments(size, WARM_UP + plan.rounds, device)
    shares = size.cluster_shares(torch.cat([segment.targets for segment in segments[WARM_UP:]]))
    steps: dict[tuple[str, str], TrainStep] = {}
    differences: dict[str, float] = {}
    for precision, of in devices.items():
        networks = {name: network.to(device) for name, network in make_networks(size).items()}
        differences[precision] = loss_difference(networks, segments[:2], of)
        steps |= {(name, precision): TrainStep(network, segments, of) for name, network in networks.items()}
    rates = [measure_rates(devices, plan)]
    timed = {"step": harness.take_turns(steps, plan.rounds, WARM_UP, device)}
    blocks = {key: blocks_step(step.network, step.memory, size, step.device) for key, step in steps.items()}
    timed["blocks"] = harness.take_turns(blocks, plan.rounds, WARM_UP, device)
    rates.append(measure_rates(devices, plan))
    records = []
    for (name, precision), step in steps.items():
        for work, head in (("step", size.head_multiply_adds(shares)), ("blocks", 0.0)):
            flops = 6 * (size.block_multiply_adds(step.network.projects_positions) + head)
            peak = max(rate[precision] for rate in rates)
            seconds = harness.describe_seconds(timed[work][name, precision])
            speed = size.tokens / seconds["median_seconds"]
            records.append(
                {"size": size.name, "work": work, "network": name, "precision": precision, **seconds}
                | {"tokens_per_second": speed, "flops_per_token": flops, "peak_flops": peak}
                | {"share_of_peak": speed * flops / peak}
                | {"loss_difference": differences[precision] if name in SAME_WEIGHTS else None}
                | (step.describe() if work == "step" else {})
            )
    return records


def measure_rates(devices: Mapping[str, Device], plan: Plan) -> dict[str, float]:
    """Return the FLOP/s of a large matrix product by precision."""
    return {
        name: harness.matrix_rate(harness.DTYPES[name], of.device, plan.product_size) for name, of in devices.items()
    }


def print_records(records: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for whole steps and one for the blocks alone."""
    for work, title in (("step", "Training step"), ("blocks", "Blocks alone, forward and backward")):
        shown = [record for record in records if record["work"] == work]
        ours = {(r["size"], r["precision"]): r["tokens_per_second"] for r in shown if r["network"] == "parnas"}
        harness.print_table(
            title,
            [
                {
                    "size": r["size"],
                    "precision": r["precision"],
                    "network": r["network"],
                    "ms": 1000 * r["median_seconds"],
                    "tokens/s": r["tokens_per_second"],
                    "parnas is x times as fast": ours[r["size"], r["precision"]] / r["tokens_per_second"],
                    "share of peak": f"{r['share_of_peak']:.1%}",
                    "loss difference": f"{r['loss_difference']:.1e}" if r["loss_difference"] is not None else None,
                }
                for r in shown
            ],
        )


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed: Namespace = harness.make_parser(__doc__).parse_args(arguments)
    devices = {precision: harness.choose(parsed.device, precision) for precision in harness.DTYPES}
    device = devices["fp32"]
    compared, records = sizes(parsed.size, device.device), []
    for size in compared:
        records += compare(size, devices, PLANS[parsed.size])
        gc.collect()  # the networks of one size, before those of the next
    print_records(records)
    payload = {
        "machine": harness.machine(device, ["transformers", "x-transformers"]),
        "precisions": list(devices),
        "convention": CONVENTION,
        "sizes": {size.name: {**size.describe(), "targets": size.tokens} for size in compared},
        "records": records,
    }
    harness.write_result("train_step", device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
