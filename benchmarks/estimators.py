"""What each estimator makes of about the same time: `python benchmarks/estimators.py`.

Each searches on WikiText-2 with configs/wikitext2-par.yaml for as many steps as the speed of a short search before
promises in `--seconds` (45), so that all schedules run to their ends. The table has the seconds that it took, with
validation and re-ranking, which that speed leaves out: an estimator that spends more on them was given more. Bits per
byte on the validation split, of the network of the argmax with the SuperNet's weights and of the mixture by pi. One
seed: small differences say nothing.
"""

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import harness
from trainings import make_tiny, require_corpus

from parnas.config.loader import Config, load_config
from parnas.model.estimators import ESTIMATORS
from parnas.nas.search import search
from parnas.runs.run import Run
from parnas.training.progress import Silent

PROBE_STEPS = 100  # of the short search


def search_for(config: Config, folder: Path, estimator: str, steps: int) -> Run:
    """Run a search validated at its end; warm-up and start of alpha keep their shares of the steps."""
    usual = config.search
    shares = {
        "search__warmup_steps": usual.warmup_steps * steps // usual.steps,
        "search__alpha_start_step": usual.alpha_start_step * steps // usual.steps,
    }
    ends = {"train__eval_every": steps, "train__save_every": steps, "train__log_every": max(1, steps // 10)}
    changed = config.replace(search__estimator=estimator, search__steps=steps, **shares, **ends)
    return search(changed, folder / f"{estimator}-{steps}", Silent())


def compare(config: Config, folder: Path, seconds: float, least: int) -> list[dict[str, Any]]:
    """Return a record for each estimator."""
    data, records = config.data, []
    for estimator in ESTIMATORS:
        probe = search_for(config, folder, estimator, least).metrics()
        rate = [line.tokens_per_s for line in probe if line.split == "train"][-1]
        steps = max(least + 1, round(seconds * rate / (data.batch_size * data.tgt_len)))
        run = search_for(config, folder, estimator, steps)
        summary = run.summary()
        records.append(
            {"estimator": estimator, "steps": steps, "seconds": summary.seconds, "arch": summary.arch}
            | {"argmax": summary.argmax.bits_per_byte, "mixture": summary.mixture and summary.mixture.bits_per_byte}
        )
    return records


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"])
    parser.add_argument("--seconds", type=float, default=45.0, help="of training, for each estimator")
    parsed: Namespace = parser.parse_args(arguments)
    tiny = parsed.size == "tiny"
    with tempfile.TemporaryDirectory(prefix="parnas-estimators-") as name:
        config = load_config(make_tiny(Path(name)) if tiny else harness.PAR_CONFIG)
        config = config.replace(runtime__device=parsed.device)
        require_corpus(config)
        records = compare(config, Path(name), 0.0 if tiny else parsed.seconds, 8 if tiny else PROBE_STEPS)
        device = harness.choose(parsed.device, config.runtime.precision)
    digits = dict.fromkeys(("argmax", "mixture"), "{:.4f}")
    shown = [
        {key: "–" if value is None else digits.get(key, "{}").format(value) for key, value in record.items()}
        for record in records
    ]
    harness.print_table("Searches planned for the same time, and bits per byte", shown)
    harness.write_result("estimators", device, {"precisions": [device.precision], "records": records}, parsed)


if __name__ == "__main__":
    harness.run(main)
