"""Disturb a search and a retraining in every way, go on each time, and compare with the undisturbed ones bit by bit.

    python tests/soak/soak.py                          the whole, some minutes on two cores
    python tests/soak/soak.py --kills 4 --tries 1 --out FOLDER

Writes `reliability.json`, which `python docs/make/reliability.py` makes docs/reliability.md from.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from soak_faults import FAULTS, kills
from soak_runs import ROOT, Row, make_config, prepare, write_corpus

from parnas.runs.files import write_json
from parnas.runs.run import describe_machine

STEPS, SAVE_EVERY = 1200, 15


def soak(kill: int, tries: int, steps: int = STEPS, save_every: int = SAVE_EVERY) -> list[Row]:
    """Every fault: `kill` SIGKILLs of each phase, `tries` of each of the others."""
    with tempfile.TemporaryDirectory(prefix="parnas-soak-") as name:
        folder = Path(name)
        os.environ["PARNAS_CACHE"] = str(folder / "cache")
        write_corpus(folder / "corpus")
        phases = prepare(folder, make_config(folder / "corpus", steps, save_every))
        rows = []
        for fault in (kills, *FAULTS):
            began = time.monotonic()
            made = fault(phases, folder, kill if fault is kills else tries)
            rows += made
            for row in made:
                print(f"{row.fault}: {row.bit_identical} of {row.tries} came to the same end", flush=True)
            print(f"  {time.monotonic() - began:.0f} s", flush=True)
        return rows


def summarise(rows: Sequence[Row]) -> dict[str, object]:
    """The figures of a result file."""
    killed = [row for row in rows if row.fault.startswith("SIGKILL")]
    machine = {key: value for key, value in describe_machine().items() if key != "command_line"}  # it holds paths
    return {
        "kills": sum(row.tries for row in killed),
        "kills_while_saving": sum(row.detail["while saving"] for row in killed),
        "tries": sum(row.tries for row in rows),
        "bit_identical": all(row.bit_identical == row.tries for row in rows),
        "lost_lines": sum(row.lost_lines for row in rows),
        "one_message": all(row.told == row.tries for row in rows),
        "machine": machine,
        "faults": [asdict(row) for row in rows],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 where anything was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=17, help="SIGKILLs of each of the two phases")
    parser.add_argument("--tries", type=int, default=2, help="tries of each other fault")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of reliability.json")
    given = parser.parse_args(arguments)
    result = summarise(soak(given.kills, given.tries))
    write_json(given.out / "reliability.json", result)
    whole = bool(result["bit_identical"] and result["one_message"] and not result["lost_lines"])
    print(f"{result['kills']} kills, {result['tries']} tries: {'nothing was lost' if whole else 'SOMETHING WAS LOST'}")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
