"""Says in a page what this machine can run, and the first thing to mend. Exit code 1 where something required is wrong.

    python -m tools.doctor

Works with the standard library alone, so that it can also describe a broken environment.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30

MIN_SHM_BYTES = GIB
"""Loader workers hand over batches in /dev/shm; Docker's default of 64 MiB ends in bus errors."""
MIN_DISK_BYTES = 50 * GIB
"""Three checkpoints of 1.3B parameters at 12 bytes each (weights and two moments in fp32)."""


@dataclass(frozen=True)
class Finding:
    """One line of the page. `note` limits what can be run, `wrong` stops everything; both say how to mend it."""

    topic: str
    text: str
    state: Literal["ok", "note", "wrong"] = "ok"
    mend: str = ""


def main() -> int:
    """Prints the page; returns 1 where a finding is wrong."""
    findings = [*check_python(), *check_packages(), *check_torch(), *check_tools(), *check_machine(ROOT)]
    print("\n".join(render(findings)))
    return int(any(finding.state == "wrong" for finding in findings))


def render(findings: list[Finding]) -> list[str]:
    """Returns the lines of the page, the first thing to mend last."""
    width = max(len(finding.topic) for finding in findings)
    lines = [f"{finding.state:<5}  {finding.topic:<{width}}  {finding.text}" for finding in findings]
    to_mend = sorted((f for f in findings if f.mend), key=lambda finding: finding.state != "wrong")
    advice = f"Mend first: {to_mend[0].topic}: {to_mend[0].mend}." if to_mend else "Nothing to mend."
    return [*lines, "", advice]


def check_python() -> Iterator[Finding]:
    """The interpreter against `requires-python`."""
    required = str(_project()["requires-python"]).removeprefix(">=")
    text = f"{platform.python_version()} at {sys.executable} (needs >= {required})"
    enough = sys.version_info >= tuple(int(part) for part in required.split("."))
    mend = "" if enough else f"install Python {required} or newer and run `make install PYTHON=...`"
    yield Finding("python", text, "ok" if enough else "wrong", mend)


def check_packages() -> Iterator[Finding]:
    """Installed versions against the exact pins of pyproject.toml; extras are notes."""
    project = _project()
    extras: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    groups: dict[str, list[str]] = {"": project["dependencies"], **extras}  # type: ignore[dict-item]
    for extra, pins in groups.items():
        topic = f"packages [{extra}]" if extra else "packages"
        wrong = [text for pin in pins if (text := compare_pin(pin))]
        if not wrong:
            yield Finding(topic, f"all {len(pins)} as pinned in pyproject.toml")
        for text in wrong:
            yield Finding(topic, text, "note" if extra else "wrong", "run `make install`, which installs the pins")


def compare_pin(pin: str) -> str:
    """Returns what is wrong with the installed version of `name==version`, or an empty text."""
    name, _, version = pin.partition("==")
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is absent (pin {version})"
    return "" if installed.partition("+")[0] == version else f"{name} {installed} (pin {version})"


def check_torch() -> Iterator[Finding]:
    """GPUs, CUDA and NCCL as torch sees them."""
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways, and this page is for them
        yield Finding("torch", f"cannot be imported: {error}", "wrong", "run `make install`")
        return
    driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if not torch.cuda.is_available():
        if driver:
            mend = f"update driver {driver}: torch {torch.__version__} is for CUDA {torch.version.cuda}"
            yield Finding("gpu", f"driver {driver} is there, but torch sees no GPU", "wrong", mend)
        else:
            yield Finding("gpu", "none: CPU with gloo, enough for configs/tiny*.yaml and the tests", "note")
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        text = f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        mend = "" if gpu.major >= 8 else "set train.precision=fp32, for it has no bf16 units"
        yield Finding(f"gpu {index}", text, "note" if mend else "ok", mend)
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    yield Finding("cuda", f"CUDA {torch.version.cuda}, NCCL {nccl}, driver {driver or 'unknown'}")


def check_tools() -> Iterator[Finding]:
    """Compilers (torch.compile, DeepSpeed's own kernels) and the scheduler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler:
        yield Finding("compiler", _first_line(compiler, "--version") or compiler)
    else:
        yield Finding("compiler", "no C++ compiler", "note", "install g++, or leave train.compile=false")
    yield Finding("nvcc", shutil.which("nvcc") or "absent; only DeepSpeed's optional CUDA kernels need it")
    if shutil.which("sbatch"):
        job = os.environ.get("SLURM_JOB_ID")
        version = _first_line("sinfo", "--version") or "sbatch is there, sinfo does not answer"
        yield Finding("slurm", version + (f", inside job {job}" if job else ""))
    else:
        yield Finding("slurm", "absent; runs start by python, torchrun or deepspeed")


def check_machine(folder: Path) -> Iterator[Finding]:
    """Cores, memory, shared memory and disk."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("machine", f"{platform.system()} {platform.machine()}, {cores} cores, {memory / GIB:.0f} GiB memory")
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield Finding("/dev/shm", "absent", "wrong", "mount a tmpfs on /dev/shm: loader workers share batches there")
    else:
        free = shutil.disk_usage(shm).free
        yield _enough("/dev/shm", free, MIN_SHM_BYTES, "enlarge it (docker run --shm-size=8g), or data.num_workers=0")
    free = shutil.disk_usage(folder).free
    yield _enough("disk", free, MIN_DISK_BYTES, "put run.dir and the data where there is room for checkpoints")


def _enough(topic: str, free: int, needed: int, mend: str) -> Finding:
    text = f"{free / GIB:.1f} GiB free"
    if free >= needed:
        return Finding(topic, text)
    return Finding(topic, f"{text}, advised are {needed / GIB:.0f}", "note", mend)


def _project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project: dict[str, object] = tomllib.load(file)["project"]
    return project


def _first_line(*command: str) -> str:
    """First line of a command's output; empty where it is absent, fails or does not answer."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return output.partition("\n")[0].strip()


if __name__ == "__main__":
    sys.exit(main())
