"""A SLURM of its own on one machine: controller, munge and one slurmd per virtual node, as root, without systemd."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import end_processes, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
HOSTS = Path("/etc/hosts")
GPUS = ("null", "zero")
"""Any character devices of /dev can pose as GPUs."""
START_SEC = 60

CONFIGURATION = """
ClusterName=looped
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_wait_sec}
MinJobAge=3600
ReturnToService=2
GresTypes=gpu
"""
PARTITIONS = """
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_sec}
PartitionName=high Nodes=ALL Default=NO State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why no SLURM can be started here; None if it can. Installs Debian's packages where they are absent."""
    if os.geteuid() != 0:
        return "a private SLURM needs root, and munge, slurmctld, slurmd and slurm-client of Debian"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if not missing:
        return None
    if shutil.which("apt-get") is None:
        return f"not installed, and there is no apt-get: {', '.join(missing)}"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", *command], capture_output=True, text=True, env=environment)
        if done.returncode:
            return f"apt-get {command[0]} failed: {done.stderr.strip()[-300:]}"
    return None


@dataclass(frozen=True)
class Running:
    """A process as /proc shows it; `variables` are those that it was started with."""

    id: int
    command: list[str]
    variables: dict[str, str]


def running_processes() -> Iterator[Running]:
    """The processes of this machine, without those that have ended meanwhile."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, variables = ((folder / name).read_text(errors="replace") for name in ("cmdline", "environ"))
        except OSError:
            continue
        pairs = (entry.partition("=") for entry in variables.split("\0"))
        yield Running(int(folder.name), command.split("\0"), {name: value for name, _, value in pairs})


class PrivateSlurm:
    """Nodes n0, n1, ... of `cpus` processors and two pretended GPUs; partitions main and, preempting it, high.

    `folder` should be short: a socket's path has at most 108 characters.
    """

    def __init__(self, folder: Path, *, nodes: int = 2, cpus: int = 8) -> None:
        self.folder, self.node_names = folder, [f"n{i}" for i in range(nodes)]
        self._cpus = cpus
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._hosts_before: str | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """What SLURM's commands need."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self, *, grace_sec: int = 300, kill_wait_sec: int = 120) -> None:
        """Returns when every node is idle; AssertionError with the controller's log if that takes too long."""
        self._write_configuration(grace_sec, kill_wait_sec)
        self._name_nodes()
        key, munge = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}",
            f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed",
            f"--log-file={self.folder}/munged.log",
        )  # fmt: skip
        wait_until(munge.exists, 10, "munged to listen")
        self._daemon("slurmctld", "-D", "-i", "-c")
        for name in self.node_names:
            self._daemon("slurmd", "-D", "-N", name)
        try:
            wait_until(self._all_idle, START_SEC, "every node to be idle")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{(self.folder / 'slurmctld.log').read_text()[-3000:]}") from None

    def stop(self) -> None:
        """Ends the daemons and everything that they have started: each process carries this SLURM_CONF."""
        try:
            for daemon in reversed(self._daemons):
                daemon.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
        finally:
            end_processes(self._daemons)
            wait_until(lambda: not self._kill_jobs(), 30, "the jobs' processes to end")
            if self._hosts_before is not None:
                HOSTS.write_text(self._hosts_before)

    def run(self, *command: str, check: bool = True) -> str:
        """Output of one of SLURM's commands; AssertionError with its words if `check` and it fails three times."""
        for _ in range(3):
            done = subprocess.run(
                command, capture_output=True, text=True, env=os.environ | self.environment, timeout=60
            )
            if done.returncode == 0 or not check:
                return done.stdout.strip()
            time.sleep(1)
        raise AssertionError(f"{command}: exit code {done.returncode}: {done.stderr}")

    def job(self, job_id: str) -> dict[str, str]:
        """What scontrol says about a job, by name."""
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _kill_jobs(self) -> list[int]:
        """Ids of the processes that have just been killed."""
        own = [p.id for p in running_processes() if p.variables.get("SLURM_CONF") == self.environment["SLURM_CONF"]]
        for process_id in own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        return own

    def _daemon(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as output:
            daemon = subprocess.Popen(
                command, env=os.environ | self.environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._daemons.append(daemon)

    def _all_idle(self) -> bool:
        return self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split() == ["idle"] * len(
            self.node_names
        )

    def _write_configuration(self, grace_sec: int, kill_wait_sec: int) -> None:
        host = socket.gethostname().split(".")[0]
        lines = [
            CONFIGURATION.format(host=host, port=free_port(), folder=self.folder, kill_wait_sec=kill_wait_sec),
            *(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={self._cpus} "
                f"RealMemory=4000 Gres=gpu:{len(GPUS)} State=UNKNOWN"
                for name in self.node_names
            ),
            PARTITIONS.format(grace_sec=grace_sec),
        ]
        (self.folder / "slurm.conf").write_text("\n".join(lines))
        gpus = (f"NodeName={name} Name=gpu File=/dev/{file}\n" for name in self.node_names for file in GPUS)
        (self.folder / "gres.conf").write_text("".join(gpus))
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (self.folder / "state").mkdir(exist_ok=True)
        for name in self.node_names:
            (self.folder / f"spool-{name}").mkdir(exist_ok=True)

    def _name_nodes(self) -> None:
        """Rank 0 is reached by its node's name, as on a cluster."""
        self._hosts_before = HOSTS.read_text()
        known = self._hosts_before.split()
        added = [f"127.0.0.1 {name}\n" for name in self.node_names if name not in known]
        HOSTS.write_text(self._hosts_before + "".join(added))


def wait_until(condition: Callable[[], bool], timeout_sec: float, what: str) -> float:
    """Seconds until `condition` held; AssertionError saying what was waited for when the time is up."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_sec, f"waited {timeout_sec} s for {what}"
        time.sleep(0.5)
    return time.monotonic() - start
