"""Copy a comparison's figures and pictures into the README: every figure there comes from run folders by this command.

    python benchmarks/update_readme.py SEARCH_RUN COMPARISON_FOLDER RETRAIN_RUN...

The comparison folder is what `evaluate.py SEARCH_RUN RETRAIN_RUN... --out COMPARISON_FOLDER` wrote.
"""

import shutil
import sys
from pathlib import Path

from parnas.files import read_json, write_json, write_text
from parnas.run import METRICS, PLAIN, Run

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
TARGET = 1.488  # bits per byte of the TensorFlow forerunner, after 37 minutes on a GPU


def main(search: Run, comparison: Path, retrained: list[Run]) -> None:
    """Rewrite the README's block between the markers, the pictures in docs/images and the result file."""
    rows = [row for row in read_json(comparison / "comparison.json") if row.get("evaluation", PLAIN) == PLAIN]
    derivation = search.arch_file()
    environment = search.environment()
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
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text(readme, f"{before}{BEGIN}\n{render(record)}\n{END}{after}")


def reached(run: Run) -> dict[str, float] | None:
    """The first validation at or below the target: its step and bits per byte; none if there was none."""
    for line in run.records(METRICS):
        if line["split"] == "valid" and line["bits_per_byte"] <= TARGET:
            return {"step": line["step"], "bits_per_byte": line["bits_per_byte"]}
    return None


def render(record: dict) -> str:
    """The block as Markdown."""
    lines = [
        f"The search derived `{record['derivation']['arch']}`. Validation split of WikiText-2, "
        f"{record['comparison'][0]['bytes']:,} bytes, {record['comparison'][0]['words']:,} words (line ends included), "
        f"{record['comparison'][0]['tokens']:,} tokens; {record['device']['cores']} cores of "
        f"{record['device']['device_name']}, {record['device']['precision']}:",
        "",
        "| run | network | string | bits per byte | ppl per token | ppl per word | parameters | MACs per token "
        "| ms per segment | steps | minutes, validation included |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in record["comparison"]:
        lines.append(
            f"| {row['run']} | {row['network']} | `{row['arch']}` | {row['bits_per_byte']:.4f} | {row['ppl']:.2f} "
            f"| {row['word_ppl']:.1f} | {row['parameters']:,} | {row['multiply_adds_per_token']:,.0f} "
            f"| {row['latency_ms']:.2f} | {row['steps']:,.0f} | {row['train_seconds'] / 60:.1f} |"
        )
    lines += [
        "",
        f"First validation at or below {TARGET} bits per byte: "
        + "; ".join(
            f"{name} at step {at['step']:,}" if at else f"{name} never" for name, at in record["reached"].items()
        )
        + ".",
    ]
    if warnings := record["derivation"]["warnings"]:
        lines += ["", "Derive warned: " + "; ".join(warnings) + "."]
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(Run(sys.argv[1]), Path(sys.argv[2]), [Run(folder) for folder in sys.argv[3:]])
