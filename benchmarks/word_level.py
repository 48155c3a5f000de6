"""Copy what a pipeline reached into a result file and pictures, for docs/results.md.

    python benchmarks/word_level.py FOLDER [NAME] [--string-of OTHER]

FOLDER is what `parnas pipeline CONFIG --one-run --test --run FOLDER` or the same with `--finalists N` made; NAME is the
name of the result, by default that of FOLDER. Every figure comes from the run folders in it, from `comparison.json` for
the validation split and from `test/comparison.json` for the test split, where it was read.

Evaluations with other lengths are copied too: `parnas evaluate FOLDER/derived … --out FOLDER/lengths/NAME`, and for the
test split the same with `--out FOLDER/lengths/NAME/test`. Their rows of the plain protocol are a list of their own; the
other rows take the place of those of the same protocol with the lengths of training.

Search and retrainings may come from several machines: what an earlier call copied, and FOLDER does not hold, stays.
Retrainings by other settings than FOLDER's stay as well, in the list `earlier`, without their curves and with the
candidates of their search. OTHER is the result whose search FOLDER's string comes from, where that is not its own.
"""

import shutil
from argparse import ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.figures.curves import Curves, draw_curves
from parnas.nas.cost import costs_of_run
from parnas.runs.files import read_json, to_json, write_json
from parnas.runs.run import PLAIN, Run
from parnas.training.progress import Silent

IMAGES = ROOT / "docs" / "images"
PICTURES = {"pi.gif": "pi", "network.png": "network"}
LENGTHS = "lengths"
OF_STEPS = ("steps", "warmup_steps")
PLACES = {"valid": "", "test": "test"}
NOTHING: Mapping[str, Any] = {
    "search": None,
    "finalists": [],
    "runs": {},
    "comparison": {},
    "lengths": [],
    "earlier": [],
}


def collect(folder: Path, earlier: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """Return the content of docs/results.md from a pipeline, with earlier results that the folder does not hold.

    Raises `ParnasError` for an unfinished pipeline, and for parts that do not belong together.
    """
    rows = {split: read_rows(folder / place, split) for split, place in PLACES.items()}
    if not rows["valid"]:
        raise ParnasError(f"{folder} has no comparison.json; run the pipeline to its end first.")
    lengths = {split: read_lengths(folder / LENGTHS, split) for split in PLACES}
    rows = {split: replace_protocols(rows[split], lengths, split) for split in PLACES}
    with_plain = [row for split in PLACES for row in lengths[split] if row["evaluation"] == PLAIN]
    runs = {row["run"]: Run(folder / row["run"]) for row in rows["valid"]}
    described = {name: describe(run) for name, run in runs.items()}
    settings = recipes({"runs": described})
    if len(settings) > 1:
        raise ParnasError(f"The runs of {folder} were made by several settings; give those of one recipe.")
    earlier = set_aside(earlier, settings)
    search, final = Run(folder / "search"), folder / "finalists" / "finalists.json"
    if not search.finished() and not earlier["search"]:
        raise ParnasError(f"{folder} has no search; give one where it is first, or --string-of.")
    result = {
        "search": describe_search(search) if search.finished() else earlier["search"],
        "finalists": read_json(final) if final.is_file() else [] if search.finished() else earlier["finalists"],
        "runs": {**earlier["runs"], **described},
        "comparison": {
            split: [*rows[split], *(row for row in earlier["comparison"].get(split, []) if row["run"] not in runs)]
            for split in rows
        },
        "lengths": [*with_plain, *(row for row in earlier["lengths"] if row["run"] not in runs)],
        "earlier": earlier["earlier"],
    }
    archs = [result["search"]["derivation"]["arch"], *(each["arch"] for each in result["finalists"][:1])]
    archs += [run["arch"] for run in [result["runs"].get("derived")] if run]
    if len({Architecture.parse(arch).canonical() for arch in archs}) > 1:
        raise ParnasError(f"The search derived {archs[0]}, but {archs[-1]} was trained as that; train the derived one.")
    return result


def set_aside(earlier: Mapping[str, Any], settings: Collection[str]) -> Mapping[str, Any]:
    """Return the results with retrainings by other settings, as JSON, moved to the list `earlier`."""
    if recipes(earlier) <= set(settings):
        return earlier
    runs = {name: {key: run[key] for key in run if key != "curves"} for name, run in earlier["runs"].items()}
    searched = (earlier["search"] or {}).get("settings", {})
    moved = {"runs": runs, "comparison": earlier["comparison"], "space": searched.get("space")}
    others = [each for each in earlier["earlier"] if not recipes(each) <= set(settings)]
    return {**earlier, "runs": {}, "comparison": {}, "lengths": [], "earlier": [*others, moved]}


def recipes(collected: Mapping[str, Any]) -> set[str]:
    """Return the settings of retrainings, as JSON, without the number of steps and their warm-up.

    After a search, one run has fewer steps than a training from scratch for the same time.
    """
    settings = [run["settings"] for run in collected["runs"].values()]
    kept = [{**each, "train": {k: v for k, v in each["train"].items() if k not in OF_STEPS}} for each in settings]
    return {to_json(each) for each in kept}


def describe_search(search: Run) -> dict[str, Any]:
    """As `describe`, with what was derived, what layers cost and the settings of the search."""
    config = search.config()
    settings = config.search.model_dump(mode="json")
    costs = asdict(costs_of_run(search.folder, config, config.search.cost.metric, Silent()))
    return {**describe(search), "derivation": search.derivation().to_dict(), "costs": costs, "settings": settings}


def read_rows(folder: Path, split: str) -> list[dict[str, Any]]:
    """Return the rows of a comparison without run folders; empty where there is none."""
    path = folder / "comparison.json"
    rows = read_json(path) if path.is_file() else []
    if any(row["split"] != split for row in rows):
        raise ParnasError(f"{path} is not of the split {split}.")
    return [{key: value for key, value in row.items() if key != "folder"} for row in rows]


def read_lengths(folder: Path, split: str) -> list[dict[str, Any]]:
    """Return the rows of evaluations with other lengths on a split, by the names of their folders."""
    return [row for place in sorted(folder.glob("*")) for row in read_rows(place / PLACES[split], split)]


def replace_protocols(
    rows: Sequence[dict[str, Any]], lengths: Mapping[str, Sequence[dict[str, Any]]], split: str
) -> list[dict[str, Any]]:
    """Return the rows of a comparison on a split, with those of other protocols than plain replaced, or added to.

    `lengths` are the rows of evaluations with other lengths by split. A row is left out if another split alone has one
    with other lengths, since perplexities of one protocol stand side by side. Raises `ParnasError` for two evaluations
    of one run and protocol.
    """
    others = [row for found in lengths.values() for row in found if row["evaluation"] != PLAIN]
    if len({(row["split"], row["run"], row["evaluation"]) for row in others}) < len(others):
        raise ParnasError(f"{LENGTHS} has several evaluations of one run by one protocol; keep one of them.")
    replaced = {(row["run"], row["evaluation"]) for row in others}
    kept = [row for row in rows if (row["run"], row["evaluation"]) not in replaced]
    return kept + [row for row in others if row["split"] == split]


def describe(run: Run) -> dict[str, Any]:
    """Return string, settings, steps, seconds, device and curves of a run: points of step and perplexity per token.

    The curves of a run with inherited weights begin after the steps that trained these, the number `first`.
    """
    config = run.config().replace(model__arch=None, train__inherit=None)  # no paths of a machine
    summary, environment, curves = run.summary(), run.environment(), Curves.from_run(run, run.name)
    kept = {"device_name", "cores", "precision", "threads", "versions", "git_commit"}
    return {
        "arch": summary.arch,
        **summary.model_dump(include={"steps", "seconds", "parameters", "parameters_without_embeddings"}),
        "machine": environment.model_dump(include=kept, exclude_unset=True),
        "settings": config.model_dump(mode="json", include={"data", "model", "train"}),
        "curves": {"train": curves.train, "valid": curves.valid, "argmax": curves.argmax, "first": curves.first},
    }


def result_file(name: str) -> Path:
    """Return the path of a result by name."""
    return RESULTS / f"word_level-{name}.json"


def main(arguments: list[str] | None = None) -> None:
    """Write the result file and the pictures."""
    parser = ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what parnas pipeline made")
    parser.add_argument("name", nargs="?", help="of the result; default: the folder's")
    parser.add_argument("--string-of", metavar="OTHER", help="the result whose search the string comes from")
    given = parser.parse_args(arguments)
    folder, name = given.folder, given.name or given.folder.name
    path = result_file(name)
    earlier = {**NOTHING, **read_json(path)} if path.is_file() else NOTHING
    if given.string_of:
        earlier = {**earlier, "search": {**read_json(result_file(given.string_of))["search"], "of": given.string_of}}
    result = collect(folder, earlier)
    write_json(path, {**result, "name": name})
    for picture, kind in PICTURES.items():
        if (made := folder / "search" / "figures" / picture).is_file():
            shutil.copyfile(made, IMAGES / f"{name}-{kind}{made.suffix}")
    shown = {"search": result["search"]} if any(run["curves"].get("first") for run in result["runs"].values()) else {}
    curves = [Curves(of, run["arch"], **run["curves"]) for of, run in {**shown, **result["runs"]}.items()]
    draw_curves(curves, IMAGES / f"{name}-curves.png")


if __name__ == "__main__":
    main()
