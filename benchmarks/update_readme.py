"""Copy the figures and pictures of a comparison into benchmarks/results and docs/images.

    python benchmarks/update_readme.py SEARCH_RUN COMPARISON_FOLDER RETRAIN_RUN...

The comparison folder is what `parnas evaluate SEARCH_RUN RETRAIN_RUN... --out COMPARISON_FOLDER` wrote. Afterwards
docs/make/results.py and docs/make/readme.py write the pages.
"""

import shutil
import sys
from pathlib import Path

from parnas.runs.files import read_json, write_json
from parnas.runs.run import PLAIN, Run

ROOT = Path(__file__).resolve().parent.parent
TARGET = 1.488  # bits per byte of the TensorFlow forerunner, after 37 minutes on a GPU


def main(search: Run, comparison: Path, retrained: list[Run]) -> None:
    """Write the pictures in docs/images and the result file."""
    rows = [row for row in read_json(comparison / "comparison.json") if row.get("evaluation", PLAIN) == PLAIN]
    derivation = search.derivation().to_dict()
    environment = search.environment().to_dict()
    images = ROOT / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(search.figures / "pi.gif", images / "wikitext2-pi.gif")
    shutil.copyfile(search.figures / "pi-lines.png", images / "wikitext2-pi-lines.png")
    shutil.copyfile(comparison / "curves.png", images / "wikitext2-curves.png")
    record = {
        "comparison": rows,
        "derivation": derivation,
        "reached": {run.name: reached(run) for run in (search, *retrained)},
        "device": {key: environment[key] for key in ("device_name", "cores", "precision", "threads", "versions")},
    }
    write_json(ROOT / "benchmarks" / "results" / "wikitext2-par.json", record)


def reached(run: Run) -> dict[str, float] | None:
    """Return step and bits per byte of the first validation at or below the target, `None` without one."""
    for line in run.metrics():
        if line.split == "valid" and line.bits_per_byte <= TARGET:
            return {"step": line.step, "bits_per_byte": line.bits_per_byte}
    return None


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(Run(sys.argv[1]), Path(sys.argv[2]), [Run(folder) for folder in sys.argv[3:]])
