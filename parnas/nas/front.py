"""The front of a search: the best network within each of several cost targets, from one pi and one set of weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from parnas.errors import OverBudget, ParnasError
from parnas.nas.derive import Constraints, Derivation, derive, write_derivation
from parnas.nas.rerank import NetworkLosses, losses_of_run
from parnas.runs.files import write_json
from parnas.runs.run import ARCH_FILE, DERIVED_FRONT, Run
from parnas.training.progress import Reporter, Silent

__all__ = ["Front", "check_targets", "derive_front", "read_targets"]

_MOST_TARGETS = 100


@dataclass(frozen=True)
class Front:
    """Derivations within different cost targets, by rising target; targets that no network meets have none."""

    derivations: tuple[Derivation, ...]
    targets: tuple[float, ...]

    @property
    def reference(self) -> str:
        """The network that costs are shares of: `parent` in a trained network, otherwise `interleaved`."""
        costs = self.derivations[0].costs
        return "interleaved" if costs is None or costs.parent is None else "parent"

    def to_rows(self) -> list[dict[str, Any]]:
        """Return for each target the network, its cost, loss and score, as plain values."""
        rows = []
        for each in self.derivations:
            best = each.ranking[0]
            rows.append(
                {
                    "target": each.target,
                    "arch": str(each.architecture),
                    "cost": best.cost,  # share of the reference's
                    "loss": best.loss,  # held-out loss with the shared weights, nats per token
                    "score": best.score,
                    "parameters": each.parameters,
                }
            )
        return rows

    def write(self, run: Run, folder: Path) -> list[Path]:
        """Write `front.json`, and an `arch.yaml` for each target, to the folder `front` in `folder`; return the paths.

        The networks of an earlier front in this folder are removed. `run` is the search.
        """
        listed, paths = folder / DERIVED_FRONT, []
        for earlier in listed.parent.glob(f"*/{ARCH_FILE}"):
            earlier.unlink()
            if not any(earlier.parent.iterdir()):
                earlier.parent.rmdir()
        for each in self.derivations:
            paths.append(listed.with_name(f"{each.target:g}") / ARCH_FILE)
            write_derivation(each, run, paths[-1])
        first = self.derivations[0]
        constraints = {key: value for key, value in first.constraints.to_dict().items() if key != "cost_target"}
        metric = first.costs.metric if first.costs else None
        given = {"metric": metric, "reference": self.reference, "targets": list(self.targets)}
        write_json(listed, {**given, "constraints": constraints, "networks": self.to_rows()})
        return [listed, *paths]


def read_targets(text: str) -> tuple[float, ...]:
    """Return cost targets from a number N, for N targets with equal distances up to 1, or a list such as `0.3,0.5,0.8`.

    Raises:
        ParnasError: the text is not valid.
    """
    try:
        targets = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        targets = ()
    if "," not in text and targets and targets[0] >= 1 and targets[0].is_integer():
        count = int(targets[0])
        targets = tuple(number / count for number in range(1, count + 1)) if count <= _MOST_TARGETS else ()
    return check_targets(targets, repr(text)[:60])


def check_targets(targets: Sequence[float], given: str) -> tuple[float, ...]:
    """Return cost targets, sorted, without repeats; raise `ParnasError`, which names `given`, if one is not valid."""
    names = {f"{target:g}" for target in targets}  # of folders
    if not targets or not all(0 < target < math.inf for target in targets) or len(names) < len(set(targets)):
        raise ParnasError(
            f"The targets of the front (--front) are {given}; give a number of targets, up to {_MOST_TARGETS}, or "
            "shares of a network's cost, such as 0.3,0.5,0.8, which differ in the first six digits."
        )
    return tuple(sorted(set(targets)))


def derive_front(
    run: Run, targets: Sequence[float], constraints: Constraints | None = None, reporter: Reporter | None = None
) -> Front:
    """Derive a network within each cost target; other constraints are the same for all.

    Each network is found as by `derive`: exactly the most probable ones within the target, then re-ranking. The search
    for a target also starts from the networks found within lower targets.

    Args:
        run: the search.
        targets: largest costs, as shares of the reference's cost.
        constraints: the other constraints, without a target.
        reporter: receives notes.

    Raises:
        ParnasError: the run is not a search, a target is not valid or also in `constraints`, or no network is within
            the highest target. Lower targets that no network meets are left out, with a note.
    """
    constraints, reporter = constraints or Constraints(), reporter or Silent()
    targets = check_targets(targets, str(list(targets))[:60])
    if constraints.cost_target is not None:
        raise ParnasError("A front has targets of its own (--front); leave out cost_target (--cost-target).")

    @cache  # the shared weights are loaded once, and only if networks are re-ranked
    def losses() -> NetworkLosses:
        return losses_of_run(run, reporter).cached()

    front: list[Derivation] = []
    for target in targets:
        lower = [each.architecture.layers for each in front]
        try:
            front.append(derive(run, replace(constraints, cost_target=target), reporter, losses, lower))
        except OverBudget as error:
            if target == targets[-1]:
                raise
            reporter.note(f"the front has no network within {target:g}: {error}")
    return Front(tuple(front), targets)
