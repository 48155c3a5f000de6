"""Write docs/reliability.md from the results of the soak test: `python docs/make_reliability.py`."""

from pathlib import Path
from typing import Any

from make_performance import RESULTS
from tabulate import tabulate

from parnas.files import read_json, write_text
from parnas.training.checkpoint import KEEP
from parnas.training.phases import MAY_CHANGE

PAGE = Path(__file__).with_name("reliability.md")

TEXT = """# What happens when something goes wrong

Made by `python docs/make_reliability.py` from `benchmarks/results/`: no figure here was typed.

## Going on

**The same command again goes on** with an unfinished run: `parnas search configs/demo.yaml --run runs/a` begins, and
after whatever happened begins where the newest checkpoint is. A finished run is refused and kept. `--resume` does the
same, takes the run's own configuration where none is given, and never begins anew.

* **Checkpoints** are made every `train.save_every` steps, at the end, when a signal asks for an end, and whenever the
  validation loss is the least so far. The last {keep} and the best stay. One holds the weights, the optimizers of
  weights, of the compression of memory and of alpha, alpha, tau and the estimator's state, the step (which gives the
  place in the text and in the schedules), memories, the best loss so far, and the state of every generator of random
  numbers, torch's in each process and on each device, numpy's and Python's.
* **Writing** goes on beside the training, in a folder of its own name that is flushed to the disk and then renamed; its
  manifest has the SHA-256 of each file and the versions of the libraries. A checkpoint that does not verify is passed
  over with a warning. Lines of metrics are flushed before it, and those after the step that a run goes on from are
  dropped, so that each stands once. At the default of every {every} steps they took of the training's time:
  {stalls} (`python benchmarks/saving.py`, on a CPU).
* **Bit by bit.** On a CPU, losses, pi and final weights are those of the run that was never disturbed, given the same
  configuration, versions, machine and number of threads. On a GPU they agree as far as its kernels repeat themselves:
  the sums of gradients of embeddings are added in an order that differs from run to run, so that losses differ in the
  last digits from the first step on (torch's notes on reproducibility). No figure was measured on a GPU.
* **What may change** between two parts of a run: {may_change}. All but `train.steps` leave the
  weights as they would have been; `train.accumulate` to rounding, and with other draws of dropout. `train.steps` may grow, also of a finished
  run, and changes the learning rates of the steps that are left. Everything else that differs is refused, with the list.
* **One at a time.** The folder is locked while a process trains into it. A process that dies lets go of it. On network
  drives without working locks, see to it yourself.

## Signals, clusters

SIGINT (Ctrl-C), SIGTERM and SIGUSR1 let the step, and a validation that has begun, come to their end; then the run is
saved, and the process ends with the command that goes on, by exit code 128 and the signal's number. A second Ctrl-C
leaves at once. So a job that SLURM preempts needs nothing but its own command:

    #SBATCH --requeue --signal=USR1@120 --open-mode=append
    srun parnas retrain configs/wikitext103-base.yaml --arch arch.yaml --run runs/base

With torchrun, `--max-restarts` does the same for processes that die ([scaling.md](scaling.md)).

## Numbers that are not finite, and memory

A loss or gradient that is not finite ends a run with the step, the block where it first went wrong, the last good
checkpoint and what to lower; no weight is updated by it. `train.skip_bad_steps: 3` leaves out up to three such steps and
begins with empty memory after each. Memory that is refused is told in one message too: the step, the block, and what to
lower: `data.batch_size` (or raise `train.accumulate`, which divides it),
`runtime.checkpoint_activations`, `data.tgt_len`, `model.mem_len`.

## What is deterministic

`runtime.seed` fixes initial weights, dropout, batches and the noise of gates, which has a generator of its own. The
same configuration gives the same string and the same weights on the same machine with the same versions and number of
threads. Not deterministic are: latencies, which are measured once for each machine, kept in the cache and written into
the run (`costs.json`), so that a search with `search.cost.metric: latency` may find another string on another day with
an empty cache (`macs` and `parameters` are counted); sums in another order, by another number of threads or processes,
another version or machine; GPUs, see above; and the speeds and times in metrics.

## The soak test

`make soak` trains a search and a retraining of a small network, disturbs them in processes of their own and goes on by
the same command. {kills} times SIGKILL came at random moments, {while_saving} times while a checkpoint was half written.
**{verdict}**

{table}

"Same end": final weights equal bit by bit, and the same lines of metrics and pi but for speeds. "Told": nothing but
messages was printed, and the exit code was the documented one. CI runs a shorter one. Flushing to the disk is
part of the program, but a machine whose power fails was not among the faults.
"""


def render() -> str:
    """The page."""
    found = read_json(RESULTS / "reliability.json")
    whole = found["bit_identical"] and found["told_in_one_message"] and not found["lost_lines"]
    verdict = (
        f"All {found['tries']} tries came to the same end, and no line of metrics or pi was lost or written twice."
        if whole
        else "Not all tries came to the same end: see the table."
    )
    rows = [describe(row) for row in found["faults"]]
    saving = read_json(RESULTS / "saving-cpu.json")["rows"]
    share = next(key for key in saving[0] if key.startswith("share"))
    return TEXT.format(
        keep=("no", "one", "two", "three", "four", "five")[KEEP],
        stalls="; ".join(describe_stall(row["network"], row["weights, MB"], row[share]) for row in saving),
        every=share.split()[-2],
        may_change=", ".join(f"`{key}`" for key in sorted(MAY_CHANGE) if not key.startswith("evaluation."))
        + " and `evaluation`",
        kills=found["kills"],
        while_saving=found["kills_while_saving"],
        verdict=verdict,
        table=tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True),
    )


def describe_stall(network: str, megabytes: float, share: float) -> str:
    """The share of the time that checkpoints take, which measurements of short stalls may find below zero."""
    told = f"{share:.2%}" if share > 0 else "too little to be told from noise"
    return f"{told} ({network}, {megabytes:.0f} MB of weights)"


def describe(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    detail = ", ".join(f"{count} {name}" for name, count in row["detail"].items())
    return {
        "fault": row["fault"] + (f" ({detail})" if detail else ""),
        "what parnas does": row["what"],
        "tries": row["tries"],
        "same end": row["bit_identical"],
        "lines lost": row["lost_lines"],
        "told": row["told"],
    }


if __name__ == "__main__":
    write_text(PAGE, render())
