"""Write docs/scaling.md with the measured efficiency: `python docs/make/scaling.py`."""

from pathlib import Path

from performance import RESULTS

from parnas.runs.files import read_json, write_text

PAGE = Path(__file__).resolve().parents[1] / "scaling.md"

TEXT = r"""# Use many GPUs or machines

A search or a retraining can use several GPUs or machines, and several machines can share one study. **No figure was
measured on several GPUs.**

## One training on several GPUs

`torchrun` starts `search` or `retrain` once per GPU (with NCCL), or several times on a CPU (with gloo):

    torchrun --nproc-per-node 8 -- retrain.py configs/wikitext103-base.yaml data.batch_size=64 --arch interleaved-32 \
        --run runs/base
    torchrun --nproc-per-node 2 -- search.py configs/demo.yaml runtime.device=cpu --run runs/two

The `--` keeps torchrun from reading `--run` as its own option. On several machines run the same command on each, with
torchrun's `--nnodes` and `--rdzv-endpoint`; the run folder must be on a shared drive.

* **N processes compute the same as one.** `data.batch_size` is the total over all processes; each has an equal share of
  the sequences and their memory. Gradients of the weights are averaged during the backward pass, gradients of the gates
  before alpha is updated. All processes sample the same paths. Without dropout, losses, pi and weights are the same
  as with one process, up to rounding (`tests/training/test_distributed.py`). Dropout masks differ between processes.
* **The first process writes** the run folder, checkpoints and pictures. In a validation, each process scores a part of the sequences.
* **Less memory**: `train.accumulate: 4` uses four micro-batches per step, and `runtime.checkpoint_activations` keeps
  only the input of each block. Neither changes the gradients, except for the samples of dropout.
* **Resuming** works as with one process ([reliability](reliability.md)), also with another number of processes.
  An additional process starts its random numbers for dropout from `runtime.seed`.
* **If a process dies**, the job ends, and the other processes print the interrupted step and the last good checkpoint.
  `torchrun --max-restarts 3` runs the same command again, which resumes the training. After a signal to torchrun, all
  processes complete the same step, save and exit.
* **Memory, time and price**: `parnas plan CONFIG --gpus N` ([plan a training](planning.md)).

The table shows the cost of averaging gradients, measured on two cores in bf16 (`python benchmarks/ranks.py`). One process
has two threads, two processes have one thread each, so two cannot be faster than one. *Two over one* is the speed of two
processes divided by that of one, *gradients, MB* the size of the gradients averaged in every step.

{table}

## Many machines, one study

Several machines can share a study of `parnas blackbox` or [`parnas tune`](tuning.md). Each command is a worker; workers
with the same `--storage` and `--study` run `--trials` trials together and can be started and stopped at any time. The
storage is a database server or, [without a server](#without-a-server), a file.

### A server

PostgreSQL on the machine that keeps the study, with the packages of Debian:

    apt-get install postgresql
    su postgres -c "createuser --pwprompt parnas"
    su postgres -c "createdb --owner parnas parnas"

Debian's server listens on the loopback interface only. To allow a trusted network, here 192.168.1.0/24:

    echo "listen_addresses = '*'" >> /etc/postgresql/15/main/postgresql.conf
    echo "host parnas parnas 192.168.1.0/24 scram-sha-256" >> /etc/postgresql/15/main/pg_hba.conf
    pg_ctlcluster 15 main restart

Debian 12 has version 15; `pg_lsclusters` shows the version on your machine. The first worker creates the tables. Put the
password into `~/.pgpass` of each worker's user. If it were part of `--storage`, other users could see it in the list of
processes:

    echo "HOST:5432:parnas:parnas:PASSWORD" >> ~/.pgpass
    chmod 600 ~/.pgpass

### The workers

On each machine, in a clone of this repository:

    pip install '.[postgresql]'
    parnas blackbox CONFIG search.cost.metric=macs --train-steps 2000 --trials 200 \
        --storage postgresql://parnas@HOST/parnas --study wikitext2

One worker evaluates one network at a time on one device. On a machine with several GPUs start one worker for each, with
`CUDA_VISIBLE_DEVICES` and a separate `--run`.

* **Settings must be equal**: text, network, training, seed and costs. A worker with other settings ends with an error that
  lists the differences. Device, threads and the location of the text may differ.
* **Costs**: `macs` and `parameters` are the same everywhere. With `search.cost.metric=latency` all workers need the same
  table of latencies, from `parnas profile` on the target machine: `search.cost.table=profile.json`.
* **Precision**: set `runtime.precision`, because `auto` may differ between machines.
* **Results**: each worker writes `pareto.csv` and `arch.yaml` of the whole study into its `--run` folder when the last
  trial has finished. The same command on a finished study writes both files again.
* **More trials**: run the same command with a larger `--trials`. W workers may finish up to W − 1 trials more than `--trials`.
  Workers that draw the same network at the same time both evaluate it.

### Failures

* **A worker is killed.** With a database, every running trial sends a heartbeat. After two minutes without one, the trial
  is marked as failed and queued again. A journal file has no heartbeats, so a trial whose worker was killed is not retried.
* **A worker is interrupted or its trial fails.** The worker itself queues the trial again. A trial that failed three times is not tried
  again; interruptions do not count as failures.
* **A worker is suspended or cut off** for more than two minutes. Its trial has been queued again, so its result is not
  stored; the worker continues with another trial.
* **The server is restarted or unreachable.** Workers continue evaluating and try to reach it for ten minutes. Then they
  end with a message; the same command resumes the study later.

### Without a server

| storage | use it for | not for |
| --- | --- | --- |
| `postgresql://USER@HOST/DATABASE` | any number of machines and workers | |
| `journal:FILE` | several machines with a shared folder (NFS 3 or later), about ten workers, trials of minutes | file systems without exclusive creation of files |
| `sqlite:///FILE` | several workers on one machine with a local disk | network drives, whose locks are unreliable |

    parnas blackbox CONFIG --train-steps 2000 --trials 200 --storage journal:/shared/study.log --study wikitext2
    parnas blackbox CONFIG --train-steps 2000 --trials 200 --storage sqlite:///study.db --study wikitext2

If a worker is killed while it writes to a journal, the other workers wait once, for thirty seconds, until the lock of the
journal expires.

`python docs/make/scaling.py` writes this page.
"""


def render() -> str:
    """Return the page."""
    table = read_json(RESULTS / "ranks-cpu.json")["tables"][0].partition("\n\n")[2]
    return TEXT.replace("{table}", table)


if __name__ == "__main__":
    write_text(PAGE, render())
