"""Run a search that may choose compressive memory for each block: `python benchmarks/compressive_search.py`.

The search of compressive.yaml has the space [s, c, f, i]. Then the derived network, the one derived without a cost
target, and two hand-designed ones are trained from scratch with the seeds of that file. The same command resumes.
"""

import math
from pathlib import Path
from statistics import mean

import harness
from compressive import CONFIG, TINY
from trainings import read_study, require_corpus, work_off

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.nas.cost import read_costs
from parnas.nas.derive import Constraints, derive, write_derivation
from parnas.nas.search import search
from parnas.runs.run import Run
from parnas.studies.train_or_load import train_once
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

TINY_SEARCH = {"blocks": 3, "steps": 12, "warmup_steps": 2, "alpha_start_step": 3}


def run_search(config: Config, folder: Path) -> Run:
    """Run the search, or resume it."""
    run = train_once(search, config, folder, Silent())
    write_derivation(derive(run), run, folder / "arch.yaml")
    return run


def train(job: tuple[Config, Path]) -> float:
    """Train a network and return its validation perplexity."""
    config, folder = job
    return float(train_once(retrain, config, folder, Silent()).summary().valid.ppl)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = ("corpus", "runs", "workers")
    parser = harness.make_parser(__doc__, ["tiny"], options, runs=Path("runs/compressive"))
    parsed = parser.parse_args(arguments)
    config, plan = read_study(CONFIG, parsed, {**TINY, "search": TINY_SEARCH}, {"seeds": [1]})
    require_corpus(config)
    seeds = plan["seeds"]
    run = run_search(config, parsed.runs / "search")
    derived, costs = Architecture.parse(run.derivation().arch), read_costs(run.folder)
    assert costs is not None, "the search has a target"
    blocks = config.search.blocks
    unlimited = derive(run, Constraints(cost_target=math.inf)).architecture
    networks = {"derived": derived.canonical(), "derived, at any cost": unlimited.canonical()}
    networks |= {name: Architecture.parse(f"{name}-{blocks}") for name in ("interleaved", "compressive")}
    jobs = [
        (config.replace(model__arch=str(of), runtime__seed=seed), parsed.runs / f"{of}-{seed}".replace(" ", "_"))
        for of in dict.fromkeys(networks.values())
        for seed in seeds
    ]
    list(work_off(train, jobs, parsed.workers))
    found = {(job[0].model.arch, job[0].runtime.seed): train(job) for job in jobs}
    table = [
        {
            "network": name,
            "string": str(of),
            "predicted latency, share of interleaved": costs.share(of),
            "seeds": len(seeds),
            "ppl": mean(found[str(of), seed] for seed in seeds),
        }
        for name, of in networks.items()
    ]
    shown = [row | {"ppl": f"{row['ppl']:.2f}"} for row in table]
    harness.print_table(f"Searched: {derived}; validation perplexity per piece", shown)
    device = harness.choose(parsed.device, config.runtime.precision)
    told = {"arch": str(derived), "share": costs.share(derived), "target": config.search.cost.target}
    payload = {"precisions": [device.precision], **told, "pi": [block.pi for block in run.derivation().blocks]}
    harness.write_result("compressive_search", device, {**payload, "networks": table}, parsed)


if __name__ == "__main__":
    harness.run(main)
