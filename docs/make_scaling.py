"""Write docs/scaling.md with the measured efficiency: `python docs/make_scaling.py`."""

from pathlib import Path

from make_performance import RESULTS

from parnas.files import read_json, write_text

PAGE = Path(__file__).with_name("scaling.md")

TEXT = r"""# More than one machine

Made by `python docs/make_scaling.py`; its figures are those of `benchmarks/results/`.

## One training on several GPUs

`torchrun` starts `search` or `retrain` once for each GPU, by NCCL, or on CPUs by gloo:

    torchrun --nproc-per-node 8 -- retrain.py configs/wikitext103-base.yaml data.batch_size=64 --arch interleaved-32 \
        --run runs/base
    torchrun --nproc-per-node 2 -- search.py configs/demo.yaml runtime.device=cpu --run runs/two

The dashes before the script keep torchrun from taking `--run` for an option of its own. On several machines, the same
command on each, with torchrun's `--nnodes` and `--rdzv-endpoint`; the run folder must be on a drive that all share.

* **N processes do what one does.** `data.batch_size` is that of all together: each process has its share of the rows,
  with the memory of those, and must get as many as the others. Gradients of the weights are averaged by
  DistributedDataParallel while the backward pass goes on; those of the gates are averaged before alpha learns from them.
  The noise of the gates comes from a generator of its own that is equal in all processes, so all take the same path;
  a candidate that did not run has no gradient and stays as it is. With dropout off, losses, pi, alpha's gradients and
  the weights are those of one process, to rounding (`tests/test_ranks.py`: mixture and single paths, two and four
  processes). Dropout has a generator for each process.
* **The first process writes**: run folder, checkpoints, pictures. Validation is shared out by rows.
* **Less memory**: `train.accumulate: 4` reads the rows of each process in four parts before a step, and
  `runtime.checkpoint_activations` keeps only the input of each block. Gradients are the same as without, but for the
  draws of dropout in parts.
* **Going on** works as with one process ([reliability.md](reliability.md)), and with another number of them: memories
  are kept by rows and shared out anew. Only the generators of dropout begin anew in processes that were not there.
* **A process that dies** ends the job: the others say which step was lost and which checkpoint is the last good one.
  `torchrun --max-restarts 3` starts the same command again, which goes on. A signal to torchrun lets all end the
  same step, and saves.
* **What it takes**: `parnas plan CONFIG --gpus N` ([planning.md](planning.md)), which also projects WikiText-103 to 8
  and 64 GPUs from counted bytes and FLOPs.

Measured on two cores (`python benchmarks/ranks.py`, the forerunner's shapes, bf16), where two processes can gain
nothing but what two threads lose by waiting for each other, and pay for averaging the gradients:

{table}

No figure was measured on a GPU.

## Many machines, one study

`parnas blackbox` is the command that many machines share. Workers given the same `--storage` and `--study` make
`--trials` trials together, with nobody in charge: start as many as you like, whenever you like, and start them again
after whatever happened. [architecture.md](architecture.md#a-shared-study) says how they keep out of each other's way.
All this holds for [`parnas tune`](tuning.md) too, whose trials are taken up where a cut-off training left off.

### A server

On the machine that keeps the study, from Debian's packages:

    apt-get install postgresql
    su postgres -c "createuser --pwprompt parnas"
    su postgres -c "createdb --owner parnas parnas"

Debian's server listens on loopback alone. To let a network in, here 192.168.1.0/24, which should be a trusted one:

    echo "listen_addresses = '*'" >> /etc/postgresql/15/main/postgresql.conf
    echo "host parnas parnas 192.168.1.0/24 scram-sha-256" >> /etc/postgresql/15/main/pg_hba.conf
    pg_ctlcluster 15 main restart

(15 is the version that Debian 12 has; `pg_lsclusters` shows yours.) The tables are made by the first worker. The
password belongs into `~/.pgpass` of each worker's user, readable by nobody else, and not into `--storage`, where
others see it among the processes:

    echo "HOST:5432:parnas:parnas:PASSWORD" >> ~/.pgpass
    chmod 600 ~/.pgpass

### The workers

On each machine, in a clone of this repository, with the driver:

    pip install '.[postgresql]'
    parnas blackbox CONFIG search.cost.metric=macs --train-steps 2000 --trials 200 \
        --storage postgresql://parnas@HOST/parnas --study wikitext2

One worker evaluates one network at a time on one device. For a machine with several GPUs start one for each, with
`CUDA_VISIBLE_DEVICES` and a `--run` of its own.

* **All that values depend on must be equal**: the text, the network, the training, the seed, the costs. A worker with
  other settings is refused, with the list of what differs. The device, the threads and where the text lies may differ.
* **Costs**: `macs` and `parameters` are the same everywhere. Latency is not, so `search.cost.metric=latency` needs one
  table for all, from `parnas profile` on the machine that counts: `search.cost.table=profile.json`.
* **`runtime.precision`**: `auto` may mean different things on different machines; name one.
* **Results**: each worker writes `pareto.csv` and `arch.yaml` of the whole study into its own `--run` folder when the
  last trial is finished. The same command on a finished study writes them again and evaluates nothing.
* **More trials**: the same command with a greater `--trials`.

### When something dies

* **A worker is killed, or its machine is gone.** Every worker writes a beat into its trial every 20 seconds and looks
  at the others' as often. A beat that stands still for two minutes gives the trial up. Its place is free, and the next
  worker that ends a trial of its own evaluates the network again, from the first step: with trials of an hour that is at
  most two minutes and an hour later. Nothing that was finished is lost, and nothing is counted twice.
* **A worker is interrupted** (Ctrl-C) or ends with an error: it gives its trial up itself, so that the next worker takes
  its network at once.
* **A worker was only suspended**, or cut off: what it finds after others have given it up is not written down, and it
  goes on with another trial.
* **A network kills its workers**, for want of memory say: after three of them it is passed over, as a trial that counts
  but has no values. Interruptions do not count.
* **The server is restarted or out of reach**: workers go on with what they evaluate, and try for ten minutes to reach
  it. Then they end with a message; the same command goes on with the study when the server is back. A server that was
  away takes nobody's trial: the two minutes begin anew.

### Without a server

| storage | for | not for |
| --- | --- | --- |
| `postgresql://USER@HOST/DATABASE` | any number of machines and workers | |
| `journal:FILE` | several machines that share a folder (NFS 3 or later), some ten workers, trials of minutes | file systems without exclusive creation of files; a folder that may fill up |
| `sqlite:///FILE` | several workers of one machine, on its own disk | network drives: their locks cannot be relied on |

    parnas blackbox CONFIG --train-steps 2000 --trials 200 --storage journal:/shared/study.log --study wikitext2
    parnas blackbox CONFIG --train-steps 2000 --trials 200 --storage sqlite:///study.db --study wikitext2

Where a worker is killed while it writes into a journal, the others wait thirty seconds for its lock, once.
"""


def render() -> str:
    """The page."""
    table = read_json(RESULTS / "ranks-cpu.json")["tables"][0].partition("\n\n")[2]
    return TEXT.replace("{table}", table)


if __name__ == "__main__":
    write_text(PAGE, render())
