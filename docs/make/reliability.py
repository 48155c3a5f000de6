"""Write docs/reliability.md from the results of the soak test: `python docs/make/reliability.py`."""

from pathlib import Path
from typing import Any

from performance import RESULTS
from tabulate import tabulate

from parnas.runs.files import read_json, write_text
from parnas.training.checkpoints import KEEP
from parnas.training.session import MAY_CHANGE

PAGE = Path(__file__).resolve().parents[1] / "reliability.md"

TEXT = """# Reliability

A training that was interrupted in any way continues with the same command, and on a CPU it ends with exactly the same
weights:

    parnas search configs/demo.yaml --run runs/a    # starts the run, or resumes it

## Resuming

* **The same command with the same `--run`** continues from the newest intact checkpoint. A finished run is not
  overwritten. With `--resume` the command never starts a new run and needs no configuration, because the run folder has one.
* **Checkpoints** are written every `train.save_every` steps, at the end, on a signal, and at each new lowest validation
  loss. The last {keep} and the best are kept. A checkpoint holds everything that changes during training: weights,
  optimizers, alpha, tau, the state of the estimator, step, memories, best loss and all random generators.
* **Writing a checkpoint** happens in the background, into a temporary folder that is flushed and then renamed. Its manifest
  holds the SHA-256 of each file. A checkpoint that fails verification is skipped with a warning. On resuming, metrics after
  the step of the checkpoint are removed, so every step appears once.
* **Cost of checkpoints** on a CPU, as a share of the training time, with one checkpoint every {every} steps: {stalls}
  (`python benchmarks/saving.py`).
* **Exact on a CPU.** Losses, pi and final weights are the same as without interruption, given the same configuration,
  versions, machine and number of threads. On a GPU, kernels add gradients in varying order, so losses differ in the last
  digits; this was not measured.
* **Settings that may change** when a run resumes: {may_change}. `train.accumulate` changes the weights by rounding and
  by different dropout masks, `runtime.threads` by rounding; `train.steps` may only grow, also for a finished run, and
  changes the learning rates of the remaining steps. Of a word list, the path may change, the words must not. The other
  settings of this list do not change the weights. A change of any setting outside this list is an error that lists the changes.
* **One process per folder.** The folder is locked during a training, and the lock ends with the process. A folder on a
  network drive without working locks is not protected.

## Signals and clusters

On SIGINT (Ctrl-C), SIGTERM or SIGUSR1 the process completes the current step or validation, saves, prints the command that
resumes the run, and exits with 128 plus the number of the signal. A second Ctrl-C exits at once. A SLURM job that may be
preempted needs no extra script:

    #SBATCH --requeue --signal=USR1@120 --open-mode=append
    srun parnas retrain configs/wikitext103-base.yaml --arch arch.yaml --run runs/base

With torchrun, `--max-restarts` restarts processes that died ([scaling](scaling.md)).

## Infinite losses and too little memory

If a loss or gradient is infinite or NaN, the run ends before any weight is updated. The message names the step, the
first affected block, the last good checkpoint and the settings to lower. `train.max_skipped_steps: 3` skips up to three
such steps per run instead; each skip empties the memory of earlier segments. If the machine runs out of memory, the
message names the step, the block and the settings to change: a lower `data.batch_size`, `data.tgt_len` or
`model.mem_len`, a higher `train.accumulate`, or `runtime.checkpoint_activations`.

## Determinism

`runtime.seed` fixes initial weights, dropout, batches and the noise of the gates. The same configuration gives the same
architecture and weights on the same machine with the same versions and number of threads. These vary:

* Latencies are measured once per machine, cached, and written to the run (`costs.json`). With an empty cache, a search
  by latency may derive another architecture. `macs`, `parameters` and `cache` are counted and never vary.
* Sums differ in the last digits with another number of threads or processes, another version, another machine, or on
  GPUs.
* Speeds and times in the metrics.

## Soak test

`make soak` disturbs a search and a retraining of a small network, which run in separate processes, and resumes them with
the same command. It sent SIGKILL {kills} times at a random moment; {while_saving} of these times a checkpoint was half written.
**{verdict}**

{table}

*Same end*: final weights, pi and metrics (except speeds) are bit by bit the same as in an undisturbed run. *One message*: the
command printed a message without traceback and ended with the documented exit code. CI runs a shorter form. Power
failures were not tested.

`python docs/make/reliability.py` writes this page from `benchmarks/results/`.
"""


def render() -> str:
    """Return the page."""
    soak = read_json(RESULTS / "reliability.json")
    whole = soak["bit_identical"] and soak["one_message"] and not soak["lost_lines"]
    verdict = (
        f"After all {soak['tries']} disturbances the runs reached the same end, and no line of metrics or pi was lost or repeated."
        if whole
        else "Not all disturbed runs reached the same end: see the table."
    )
    rows = [describe(row) for row in soak["faults"]]
    saving = read_json(RESULTS / "saving-cpu.json")["rows"]
    share = next(key for key in saving[0] if key.startswith("share"))
    return TEXT.format(
        keep=KEEP,
        stalls="; ".join(describe_stall(row["weights, MB"], row[share]) for row in saving),
        every=share.split()[-2],
        may_change=", ".join(f"`{key}`" for key in sorted(MAY_CHANGE) if not key.startswith("evaluation."))
        + " and `evaluation`",
        kills=soak["kills"],
        while_saving=soak["kills_while_saving"],
        verdict=verdict,
        table=tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True),
    )


def describe_stall(megabytes: float, share: float) -> str:
    """Return the share of the time that checkpoints take; noise may make it negative."""
    size = f"{share:.2%}" if share > 0 else "too little to measure"
    return f"{size} for {megabytes:.0f} MB of weights"


def describe(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    detail = ", ".join(f"{count} {name}" for name, count in row["detail"].items()).replace("1 runs", "all in one run")
    return {
        "fault": row["fault"] + (f" ({detail})" if detail else ""),
        "reaction": row["what"],
        "tries": row["tries"],
        "same end": row["bit_identical"],
        "lines lost": row["lost_lines"],
        "one message": row["told"],
    }


if __name__ == "__main__":
    write_text(PAGE, render())
