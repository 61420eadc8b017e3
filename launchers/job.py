"""What runs in each task of a SLURM job: the variables of torch.distributed, then pretrain/main.py."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launchers.ending import restart_count, write_ending
from launchers.hosts import expand_hosts
from pretrain.errors import STOPPED_EXIT_CODE, DistributedError, PretrainError
from pretrain.main import leave, main
from pretrain.messages import keep_console
from pretrain.processes import start_resource_tracker, write_stderr

FIRST_PORT, PORTS, PORTS_PER_JOB = 10_000, 20_000, 16
"""Below the ports that Linux gives to outgoing connections (32768 and above)."""


def master_port(job_id: int, restarts: int) -> int:
    """A port that differs between the starts of a job, so that processes of an earlier start are never met.

    Neighbouring jobs may share a node: for 1,250 job ids in a row and 16 starts of each, no two ports are equal.
    """
    return FIRST_PORT + (job_id * PORTS_PER_JOB + restarts) % PORTS


def task_environment(slurm: Mapping[str, str], port: int | None) -> dict[str, str]:
    """What torch.distributed and DeepSpeed read, from the variables that srun sets in a task.

    `port` None: by job and start. Errors: DistributedError where SLURM's list of nodes cannot be read.
    """
    world, nodes = int(slurm["SLURM_STEP_NUM_TASKS"]), int(slurm["SLURM_STEP_NUM_NODES"])
    if port is None:
        port = master_port(int(slurm["SLURM_JOB_ID"]), restart_count(slurm))
    return {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world // nodes),
        "LOCAL_SIZE": str(world // nodes),
        "MASTER_ADDR": expand_hosts(slurm["SLURM_STEP_NODELIST"])[0],
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": slurm.get("OMP_NUM_THREADS", slurm.get("SLURM_CPUS_PER_TASK", "1")),
    }


@dataclass(frozen=True)
class TrainJob:
    """Called by submitit in every task. Holds plain values only, since submitit pickles it."""

    arguments: tuple[str, ...]
    """Of pretrain/main.py."""
    folder: str
    """Where the tasks record how they end."""
    max_requeues: int
    needs_gpu: bool
    port: int | None = None

    def __call__(self) -> None:
        """Trains; after anything but success the process ends here."""
        keep_console()
        _reset_signals()
        logging.getLogger("submitit").propagate = False  # it has handlers of its own
        os.environ.update(task_environment(os.environ, self.port))
        exit_code = self._train()
        if exit_code:
            write_ending(Path(self.folder), os.environ, exit_code)
            # After a failure srun kills the other tasks; after a stop they are only a moment slower to end.
            leave(0 if exit_code == STOPPED_EXIT_CODE else exit_code)

    def _train(self) -> int:
        try:
            check_start(os.environ, self.max_requeues, self.needs_gpu)
        except PretrainError as error:
            write_stderr(f"error on rank {os.environ['RANK']} ({socket.gethostname()}): {error}\n")
            return error.exit_code
        return main(self.arguments)


def _reset_signals() -> None:
    """Until training begins a signal ends the task, for there is nothing to save; submitit ignores TERM and requeues on
    USR2. SLURM signals every process of a task: that of multiprocessing which frees shared memory must live on.
    """
    start_resource_tracker()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)


def check_start(environment: Mapping[str, str], max_requeues: int, needs_gpu: bool) -> None:
    """Raises DistributedError where this start cannot work: requeued too often, the port taken, no GPU for the task."""
    restarts, port = restart_count(environment), int(environment["MASTER_PORT"])
    if restarts > max_requeues:
        raise DistributedError(
            f"SLURM has requeued this job {restarts} times, more than --requeue {max_requeues} allows"
        )
    if environment["RANK"] == "0" and not _is_free(port):
        raise DistributedError(
            f"port {port} of {socket.gethostname()} is taken by another process: submit again, or choose one with "
            "--master-port"
        )
    if needs_gpu:
        import torch

        found, local_rank = torch.cuda.device_count(), int(environment["LOCAL_RANK"])
        if found <= local_rank:
            raise DistributedError(
                f"{socket.gethostname()} shows {found} GPUs to local rank {local_rank}: see nvidia-smi there, and "
                "CUDA_VISIBLE_DEVICES; --sbatch exclude=NODE avoids a broken node"
            )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
