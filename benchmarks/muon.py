"""Compare our Muon with torch.optim.Muon: `python benchmarks/muon.py`.

Both update the matrices of the same network with the same gradients. Reported are the milliseconds of an update, taken
in turns, and the smallest cosine between the two updates of a matrix. torch.optim.Muon orthogonalises each matrix by
itself and in bf16; ours batches matrices of one shape and computes in the precision of the training.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import harness
import torch
from torch import Tensor, nn

from parnas.architecture import Architecture
from parnas.config.loader import load_config
from parnas.model.transformer_xl import TransformerXL
from parnas.training.optimizers import Muon, suits_muon

LR, DECAY = 1e-3, 0.01


class Plan(NamedTuple):
    """Rounds, and the configurations whose network is updated."""

    rounds: int
    configs: Sequence[str]


PLANS = {
    "tiny": Plan(2, ["demo"]),
    "short": Plan(20, ["demo", "wikitext2-word-cpu"]),
    "full": Plan(100, ["demo", "wikitext2-word-cpu"]),
}


def make_matrices(name: str, device: torch.device) -> list[nn.Parameter]:
    """Return the matrices that Muon trains in the interleaved network of a configuration, with random gradients."""
    torch.manual_seed(1)
    network = TransformerXL.build(
        load_config(name).model.model_copy(update={"cutoffs": ()}), Architecture.parse("interleaved-8"), 100
    )
    matrices = [weight.to(device) for parameter, weight in network.named_parameters() if suits_muon(parameter, weight)]
    parameters = [nn.Parameter(matrix.detach()) for matrix in matrices]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def make_torch(matrices: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's Muon with the settings of ours."""
    return torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")


def least_cosine(name: str, device: torch.device) -> float:
    """Return the smallest cosine between the first updates of a matrix by both optimizers."""

    def update(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[Tensor]:
        matrices = make_matrices(name, device)
        before = [matrix.detach().clone() for matrix in matrices]
        make(matrices).step()
        return [(after - old).detach() for after, old in zip(matrices, before, strict=True)]

    ours, theirs = update(lambda matrices: Muon(matrices, LR, DECAY)), update(make_torch)
    cosines = [torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in zip(ours, theirs, strict=True)]
    return float(torch.stack(cosines).min())


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table and write the result."""
    parsed = harness.make_parser(__doc__).parse_args(arguments)
    plan, device = PLANS[parsed.size], harness.choose(parsed.device, "fp32")
    rows: list[dict[str, Any]] = []
    for name in plan.configs:
        optimizers = {
            "ours, fp32, ms": Muon(make_matrices(name, device.device), LR, DECAY),
            "ours, bf16, ms": Muon(make_matrices(name, device.device), LR, DECAY, torch.bfloat16),
            "torch.optim.Muon, ms": make_torch(make_matrices(name, device.device)),
        }
        steps = {key: optimizer.step for key, optimizer in optimizers.items()}
        seconds = harness.take_turns(steps, plan.rounds, 2, device.device)
        times = {key: 1000 * median(values) for key, values in seconds.items()}
        rows.append({"network": name, **times, "least cosine": least_cosine(name, device.device)})
    harness.print_table("One update of all matrices", rows)
    harness.write_result("muon", device, {"precisions": ["fp32", "bf16"], "rows": rows}, parsed)


if __name__ == "__main__":
    harness.run(main)
