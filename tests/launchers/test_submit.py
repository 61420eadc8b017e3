"""The command line: what is submitted, and what is refused before, with programs that stand in for SLURM's."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest

from launchers.cluster import time_limit_sec
from launchers.slurm import main
from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from tests.config.test_preflight import write_data_set
from tests.helpers import exit_code_of

CONFIG = """
run: {{dir: {folder}/runs, name: first}}
model: {{context_length: 2048, vocab_size: 32768}}
data: {{path: {folder}/data, num_workers: 3}}
train: {{max_steps: 10, global_batch_size: 32, micro_batch_size: 2}}
"""


class Cluster:
    """A folder with a data set, a configuration and, on request, a scheduler that answers as told."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        write_data_set(folder / "data")
        self.config = folder / "c.yaml"
        self.config.write_text(CONFIG.format(folder=folder))

    def install(
        self, *, test_only: str = "sbatch: Job 4 to start at noon", exit_code: int = 0, squeue: str = ":"
    ) -> None:
        """sbatch says `test_only` about a script that it is only to test, and submits others as job 81."""
        programs = {
            "sbatch": f'if [ "$1" = --test-only ]; then echo "{test_only}" >&2; exit {exit_code}; fi\n'
            f'/usr/bin/env > {self.folder}/env; /bin/cp "$1" {self.folder}/submitted.sh\n'
            'echo "Submitted batch job 81"',
            "sinfo": "printf 'main*\\nhigh\\n'",
            "srun": "exit 1",
            "squeue": f'echo "$@" >> {self.folder}/squeue.txt; {squeue}',
        }
        for name, lines in programs.items():
            (self.folder / "bin").mkdir(exist_ok=True)
            path = self.folder / "bin" / name
            path.write_text(f"#!/bin/sh\n{lines}\n")
            path.chmod(0o755)

    def launch(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, output and errors of the launcher with the test's configuration."""
        exit_code = exit_code_of(main, "--config", self.config, *arguments)
        captured = self._capsys.readouterr()
        return exit_code, captured.out, captured.err

    def refusal(self, *arguments: str) -> str:
        """The message of a launch that must be refused, having written nothing."""
        exit_code, output, message = self.launch(*arguments)
        assert (exit_code, output) == (2, "")
        assert not (self.folder / "runs").exists() and not (self.folder / "submitted.sh").exists()
        return message


@pytest.fixture
def cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return Cluster(tmp_path, capsys)


GPUS = ("--nodes", "2", "--gpus-per-node", "8")
CPUS = ("--nodes", "1", "--tasks-per-node", "2")


def test_dry_run_prints_the_script(cluster: Cluster) -> None:
    exit_code, script, _ = cluster.launch(
        *GPUS, "--partition", "gpu", "--time", "1-12", "--account", "me", "--requeue", "5", "--sbatch", "exclusive",
        "--sbatch", "constraint=a b", "--dry-run",
    )  # fmt: skip
    assert exit_code == 0
    folder = cluster.folder / "runs/first/slurm"
    lines = script.splitlines()
    for option in (
        "nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "cpus-per-task=4", "partition=gpu", "time=1-12",
        "account=me", "requeue", "signal=USR2@120", "job-name=first", "exclusive", "constraint='a b'",
        f"output={folder}/%j_0_log.out",
    ):  # fmt: skip
        assert f"#SBATCH --{option}" in lines
    (srun,) = (line for line in lines if line.startswith("srun "))
    assert "--kill-on-bad-exit=1 --open-mode=append --distribution=block --cpus-per-task=4 --gpu-bind=none" in srun
    assert f"{sys.executable} -u -m submitit.core._submit {folder}" in srun
    assert lines[-2].endswith(f"-m launchers.requeue --folder {folder} --max-requeues 5 --status $?")
    assert lines[-1] == "# not checked by SLURM: no sbatch here"
    assert not (cluster.folder / "runs").exists()


def test_what_is_not_asked_for_is_left_to_the_cluster(cluster: Cluster) -> None:
    _, script, _ = cluster.launch(*CPUS, "--dry-run")
    assert "#SBATCH --no-requeue" in script.splitlines()
    for option in ("time", "partition", "account", "gpus", "wckey", "array", "qos"):
        assert f"#SBATCH --{option}" not in script
    assert "--gpu-bind" not in script


def test_a_run_is_submitted_as_it_was_checked(cluster: Cluster) -> None:
    cluster.install()
    exit_code, output, errors = cluster.launch(*GPUS, "--requeue", "2", "optimizer.lr=1e-3", "--train.seed", "7")
    assert exit_code == 0, errors
    folder = cluster.folder / "runs/first/slurm"
    assert "#SBATCH --nodes=2" in (cluster.folder / "submitted.sh").read_text()
    job = pickle.loads((folder / "81_submitted.pkl").read_bytes()).function
    assert (job.folder, job.max_requeues, job.needs_gpu, job.port) == (str(folder), 2, True, None)
    option, config = job.arguments
    cluster.config.write_text("model: {width: 1}")  # what happens to the file now does not matter
    cfg = load_config(config)
    assert (option, cfg.optimizer.lr, cfg.train.seed, cfg.run.name) == ("--config", 1e-3, 7, "first")
    for words in ("job 81", "2 nodes x 8 GPUs", "to start at noon", f"{folder}/81_RANK_log.out", "scancel 81"):
        assert words in output


def test_a_sweep_is_submitted_as_an_array(cluster: Cluster) -> None:
    cluster.install()
    (cluster.folder / "lr.yaml").write_text("grid:\n  optimizer.lr: [1e-3, 2e-3]\n  train.seed: [0, 1]\n")
    exit_code, output, errors = cluster.launch(
        *CPUS, "--array", "lr.yaml", "--array-parallelism", "2", "--master-port", "29500", "train.seed=5"
    )
    assert exit_code == 0, errors
    assert "#SBATCH --array=0-3%2" in (cluster.folder / "submitted.sh").read_text()
    folder = cluster.folder / "runs/lr_slurm"
    jobs = [pickle.loads((folder / f"81_{i}_submitted.pkl").read_bytes()).function for i in range(4)]
    runs = [load_config(job.arguments[1]) for job in jobs]
    assert [(cfg.run.name, cfg.optimizer.lr, cfg.train.seed) for cfg in runs] == [
        ("first-0", 1e-3, 0), ("first-1", 1e-3, 1), ("first-2", 2e-3, 0), ("first-3", 2e-3, 1),
    ]  # fmt: skip
    assert {job.port for job in jobs} == {29_500}
    for i in range(4):
        assert f"runs/first-{i}/log.txt" in output and f"81_{i}_RANK_log.out" in output


def test_inside_of_another_job_its_variables_are_dropped(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.install()
    names = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "1", "SBATCH_PARTITION": "x", "SLURM_CONF": "/etc/slurm.conf"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert cluster.launch(*CPUS)[0] == 0
    seen = dict(line.split("=", 1) for line in (cluster.folder / "env").read_text().splitlines() if "=" in line)
    assert {name for name in names if name in seen} == {"SLURM_CONF"}


SWEEP = "- [optimizer.lr=1e-3]\n- [optimizer.lr=2e-3]\n"


def test_a_run_is_queued_once(cluster: Cluster) -> None:
    cluster.install(squeue="echo '81 PENDING'")
    assert cluster.launch(*CPUS)[0] == 0
    assert not (cluster.folder / "squeue.txt").exists(), "nothing was submitted before"
    assert (cluster.folder / "runs/first/slurm/jobs.txt").read_text() == "81\n"
    (cluster.folder / "submitted.sh").unlink()
    (cluster.folder / "link").symlink_to("runs")
    for more in ((), ("--dry-run",), (f"run.dir={cluster.folder}/link",), ("--sbatch", "dependency=afterok:8")):
        exit_code, _, message = cluster.launch(*CPUS, *more)
        assert exit_code == 2 and "first: job 81 (pending) is for this run already" in message, more
        assert "--sbatch dependency=afterany:81" in message
    assert not (cluster.folder / "submitted.sh").exists()
    assert cluster.launch(*CPUS, "run.name=second")[0] == 0
    for option in ("dependency=afterany:81", "dependency=singleton"):
        assert cluster.launch(*CPUS, "--sbatch", option)[0] == 0, "one behind the other"
    assert (cluster.folder / "runs/first/slurm/jobs.txt").read_text() == "81\n81\n81\n"


@pytest.mark.parametrize("first", ["sweep", "one"])
def test_a_run_is_queued_once_alone_or_in_a_sweep(first: str, cluster: Cluster) -> None:
    job = "81_1" if first == "sweep" else "81"
    cluster.install(squeue=f"echo '{job} RUNNING'")
    (cluster.folder / "s.yaml").write_text(SWEEP)
    (cluster.folder / "other.yaml").write_text(SWEEP)
    one, sweep = (*CPUS, "run.name=first-1"), (*CPUS, "--array", "s.yaml")
    assert cluster.launch(*(sweep if first == "sweep" else one))[0] == 0
    for again in (one, sweep, (*CPUS, "--array", "other.yaml")):
        exit_code, _, message = cluster.launch(*again)
        assert exit_code == 2 and f"runs/first-1: job {job} (running) is for this run already" in message
    assert cluster.launch(*CPUS, "run.name=first-2")[0] == 0


@pytest.mark.parametrize(
    "squeue, message",
    [
        ("echo '81 COMPLETING'", None),
        (":", None),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", None),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", "Unable to contact slurm"),
    ],
    ids=["leaving", "gone", "forgotten", "no_answer"],
)
def test_a_job_that_has_ended_is_in_nobodys_way(squeue: str, message: str | None, cluster: Cluster) -> None:
    cluster.install(squeue=squeue)
    assert cluster.launch(*CPUS)[0] == 0
    exit_code, _, errors = cluster.launch(*CPUS)
    assert exit_code == (0 if message is None else 2) and (message or "") in errors
    assert "--jobs=81" in (cluster.folder / "squeue.txt").read_text()


def test_a_sweep_has_a_folder_for_each_run(cluster: Cluster) -> None:
    cluster.install()
    (cluster.folder / "runs").mkdir()
    (cluster.folder / "runs" / "b").symlink_to("a")
    (cluster.folder / "s.yaml").write_text("- [run.name=a, train.seed=1]\n- [run.name=b, train.seed=2]\n")
    exit_code, _, message = cluster.launch(*CPUS, "--array", "s.yaml")
    assert exit_code == 2 and "run 1 to have a folder of its own" in message and "leads to that of 'a'" in message


@pytest.mark.parametrize("break_", ["\n", "\r", "\x0b", "\u2028", "\x00", "\x1b[2J"])
def test_no_line_of_the_batch_script_comes_from_a_name(
    break_: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the keys of the run, in the folder that a relative run.dir stands in, in the sweep's name and in options."""
    cluster.install()
    text = f"x{break_}touch owned"
    for key in ("run.dir", "run.name"):
        message = cluster.refusal(*CPUS, f"{key}={text}")
        assert f"{key}=" in message and "expected text in one line" in message
    for option in ("partition", "account", "time", "sbatch"):
        assert "expected" in cluster.refusal(*CPUS, f"--{option}", f"qos={text}" if option == "sbatch" else text)
    if break_ == "\x00":
        return  # no file's name
    sweep = cluster.folder / f"{text}.yaml"
    sweep.write_text(SWEEP)
    assert "expected text in one line" in cluster.refusal(*CPUS, "--array", str(sweep), "--dry-run")
    odd = cluster.folder / text
    odd.mkdir()
    monkeypatch.chdir(odd)
    message = cluster.refusal(*CPUS, "run.dir=runs", "--dry-run")
    assert "batch script: folder=" in message and "expected text in one line" in message


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((*CPUS, "--partition", "a b"), "--partition a b: expected one word"),
        ((*CPUS, "--account", "a\nb"), "expected one word"),
        ((*CPUS, "--time", "1h"), "--time 1h: expected MINUTES"),
        ((*CPUS, "--time", "2"), "--time 2: expected more than the 120 seconds of --stop-sec"),
        ((*CPUS, "--requeue", "-1"), "--requeue -1: expected an integer >= 0"),
        (("--nodes", "0", "--tasks-per-node", "2"), "--nodes 0: expected an integer >= 1"),
        ((*CPUS, "--array-parallelism", "2"), "--array-parallelism 2: expected to be used with --array"),
        ((*CPUS, "--master-port", "80"), "--master-port 80: expected a port"),
        ((*CPUS, "--sbatch", "nodes=3"), "--sbatch nodes=3: expected an option that the launcher does not set"),
        ((*CPUS, "--sbatch", "qos=a\nb"), "expected a value in one line"),
        ((*CPUS, "--sbatch", "; rm"), "expected KEY or KEY=VALUE"),
        ((*CPUS, "--sbatch", "qos=a", "--sbatch", "qos=b"), "expected qos once"),
        (("--nodes", "2", "--tasks-per-node", "2", "--cluster", "local"), "--nodes 2: expected 1 with --cluster local"),
        ((*CPUS, "--cluster", "local", "--time", "90"), "--time 90: expected no such option with --cluster local"),
        ((*CPUS, "--array", "absent.yaml"), "absent.yaml: no such file"),
        ((*CPUS, "optimizer.learning_rate=1"), "optimizer.learning_rate='1': unknown key; nearest: optimizer.lr"),
        ((*GPUS, "train.global_batch_size=40"), "train.global_batch_size"),
        ((*CPUS, "data.path=nowhere"), "nowhere: no such folder"),
        ((*CPUS, "run.name=50%j"), "expected a run folder without %"),
    ],
)
def test_what_cannot_be_meant_is_refused(cluster: Cluster, arguments: tuple[str, ...], message: str) -> None:
    cluster.install()
    assert message in cluster.refusal(*arguments)


def test_the_schedulers_own_words(cluster: Cluster) -> None:
    cluster.install(test_only="sbatch: error: invalid partition specified: nope", exit_code=1)
    message = cluster.refusal(*CPUS, "--partition", "nope")
    assert "SLURM refuses this job: invalid partition specified: nope" in message
    assert "partitions: main* high" in message


@pytest.mark.parametrize(
    "text, message",
    [
        ("- [optimizer.lr=1e-3]\n- [optimizer.lrx=1]", "run 1: command line: optimizer.lrx='1': unknown key"),
        ("- [optimizer.lr=1e-3, run.name=a]\n- [run.name=a]", "run 1 to have a run.name of its own, it is 'a' again"),
        ("grid: {train.micro_batch_size: [2, 5]}", "run 1: train.micro_batch_size=5"),
    ],
)
def test_every_run_of_a_sweep_is_checked(cluster: Cluster, text: str, message: str) -> None:
    cluster.install()
    (cluster.folder / "s.yaml").write_text(text)
    assert message in cluster.refusal(*CPUS, "--array", "s.yaml")


def test_without_slurm_a_submission_says_what_to_do(cluster: Cluster) -> None:
    exit_code, _, message = cluster.launch(*CPUS)
    assert exit_code == 2 and "no sbatch on this machine" in message and "--cluster local" in message
    assert not (cluster.folder / "runs").exists()


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("90", 5_400), ("90:30", 5_430), ("1:00:00", 3_600), ("2-12", 216_000), ("1-1:30", 91_800),
        ("1-1:30:05", 91_805), ("UNLIMITED", float("inf")),
    ],
)  # fmt: skip
def test_time_limits_as_sbatch_reads_them(text: str, seconds: float) -> None:
    assert time_limit_sec(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5", "1-", "1.5", "12:"])
def test_what_is_no_time_limit(text: str) -> None:
    with pytest.raises(ConfigError, match="expected MINUTES"):
        time_limit_sec(text)
