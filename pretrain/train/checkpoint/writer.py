"""Saving a checkpoint together: every rank writes its tensors, rank 0 makes the folder whole and gives it its name."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError

from pretrain.config.schema import CheckpointConfig
from pretrain.errors import CheckpointError
from pretrain.files import failure_text, size_text, write_text
from pretrain.train.checkpoint import folders
from pretrain.train.checkpoint.find import not_shared
from pretrain.train.checkpoint.format import (
    CONFIG_NAME,
    INDEX_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    FileRecord,
    Index,
    Manifest,
    Shape,
    StoredSlice,
    StoredTensor,
    TensorSlice,
    file_record,
    index_to_text,
    untiled,
    write_tensors,
)
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.state import TrainState

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 30
"""Where a rank begins another file: also what a foreground save holds in host memory."""
_SHARED_WAIT_SEC = 10.0
"""Network file systems may show a new folder to other nodes after some seconds."""


@dataclass
class Share:
    """What one rank has written."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    slices: list[tuple[str, str, str, Shape, StoredSlice]] = field(default_factory=list)
    """name, kind, dtype, global shape, where it is"""
    error: str | None = None


class CheckpointWriter:
    """Saves the checkpoints of one run. Its methods are collective over `ranks`, and fail on all of them or on none."""

    def __init__(
        self,
        run_folder: Path,
        config: CheckpointConfig,
        config_text: str,
        ranks: Ranks,
        *,
        timeout_sec: float = 1_800.0,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """`config_text`: what config.yaml of every checkpoint holds. `timeout_sec` bounds waits of background saves."""
        self._checkpoints = folders.checkpoints_folder(run_folder)
        self._config, self._config_text, self._max_file_bytes = config, config_text, max_file_bytes
        self._ranks = ranks
        self._background_ranks = ranks.for_thread(timeout_sec) if config.background else None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._saved_step: int | None = None

    def start_from(self, step: int) -> None:
        """Prepares the folder for a run that goes on from `step`.

        Removes what interrupted saves have left, and moves checkpoints of later steps to `abandoned/`.
        Errors: CheckpointError where the folder cannot be written or is not shared by all ranks.
        """
        self.wait()
        error = None
        probe = self._checkpoints / f".shared.{self._ranks.broadcast(secrets.token_hex(8))}"
        if self._ranks.rank == 0:
            try:
                self._checkpoints.mkdir(parents=True, exist_ok=True)
                folders.remove_leftovers(self._checkpoints)
                folders.set_aside_after(self._checkpoints, step)
                probe.mkdir()
            except (OSError, CheckpointError) as caught:
                error = f"{self._checkpoints}: cannot be prepared ({caught})"
        self._ranks.raise_any(error)
        self._require_shared(probe)
        if self._ranks.rank == 0:
            probe.rmdir()
        self._saved_step = step or None

    def save(self, slices: Iterable[TensorSlice], state: TrainState) -> None:
        """Saves `slices` (over all ranks they tile every tensor once) and `state` as the checkpoint of `state.step`.

        In the foreground the checkpoint is complete on return. In the background the tensors are copied to host memory
        on return, and `wait` or the next call tells whether the save succeeded. A step that has just been saved or
        loaded is not saved again. Every rank exhausts `slices`, whatever happens, because it may be collective.

        Errors: CheckpointError; nothing of this save is left then, the others and `latest` are as they were.
        """
        self.wait()
        if state.step == self._saved_step:
            return
        state_text = state.to_json()
        began = time.perf_counter()
        self._open_partial(state.step)
        batches = _batches(slices, self._max_file_bytes)
        if self._background_ranks is None:
            self._write(self._ranks, batches, state.step, state_text, began)
            self._saved_step = state.step
        else:
            arguments = (self._background_ranks, list(batches), state.step, state_text, began)
            self._thread = threading.Thread(target=self._write_behind, args=arguments, name="checkpoint")
            self._thread.start()
            log.info("checkpoint of step %d: copied in %.1f s, being written", state.step, time.perf_counter() - began)

    def join(self) -> None:
        """Returns when no save is under way here, whether it failed or not: `wait` says that."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Returns when no save is under way; CheckpointError on all ranks if the last one failed. Due at the end."""
        self.join()
        if self._thread is None:
            return
        self._thread = None
        failure, self._failure = self._failure, None
        self._ranks.raise_any(None if failure is None else f"{type(failure).__name__}: {failure}")

    @property
    def failed(self) -> bool:
        """Whether a background save is known to have failed on this rank: then all ranks should call `wait`. Local."""
        return self._failure is not None

    def _open_partial(self, step: int) -> None:
        """Makes the empty folder to write into, and sees that every rank can reach it."""
        partial, target = folders.partial_folder(self._checkpoints, step), folders.step_folder(self._checkpoints, step)
        error = None
        if self._ranks.rank == 0:
            try:
                if os.path.lexists(partial):
                    folders.remove(partial)
                partial.mkdir(parents=True)
            except OSError as caught:
                error = f"{partial}: cannot be made ({caught})"
            if os.path.lexists(target):
                error = f"{target} exists, and checkpoints are never overwritten: move it away"
        self._ranks.raise_any(error)
        self._require_shared(partial)

    def _require_shared(self, folder: Path) -> None:
        """CheckpointError on all ranks where any does not come to see a folder that rank 0 has made."""
        deadline = time.monotonic() + _SHARED_WAIT_SEC
        while not folder.is_dir() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._ranks.raise_any(None if folder.is_dir() else not_shared(folder))

    def _write_behind(
        self, ranks: Ranks, batches: Iterable[list[TensorSlice]], step: int, state_text: str, began: float
    ) -> None:
        try:
            self._write(ranks, batches, step, state_text, began)
            self._saved_step = step
        except Exception as error:  # of any kind: `wait` raises it where it is seen
            log.error("checkpoint of step %d was not saved: %s", step, error)
            self._failure = error

    def _write(
        self, ranks: Ranks, batches: Iterable[list[TensorSlice]], step: int, state_text: str, began: float
    ) -> None:
        partial = folders.partial_folder(self._checkpoints, step)
        shares = ranks.gather(_write_share(partial, ranks.rank, batches))
        error = None
        if ranks.rank == 0:
            error = self._complete(partial, shares, step, state_text)
            if error is not None:
                shutil.rmtree(partial, ignore_errors=True)  # what stays is removed at the next start
        if error := ranks.broadcast(error):
            raise CheckpointError(f"the checkpoint of step {step} was not saved, earlier ones are untouched: {error}")
        if ranks.rank == 0:
            num_bytes, sec = sum(r.bytes for s in shares for r in s.files.values()), time.perf_counter() - began
            size, speed = size_text(num_bytes), size_text(round(num_bytes / sec))
            log.info("checkpoint of step %d: %s saved in %.1f s (%s/s)", step, size, sec, speed)
            try:
                folders.remove_old(self._checkpoints, step, self._config)
            except (OSError, CheckpointError) as caught:
                log.warning("%s: old checkpoints could not be deleted (%s)", self._checkpoints, caught)

    def _complete(self, partial: Path, shares: list[Share], step: int, state_text: str) -> str | None:
        """Adds index, state, configuration and manifest, and publishes; or says why not."""
        if errors := [share.error for share in shares if share.error]:
            return "; ".join(errors)
        index: Index = {}
        for name, kind, dtype, shape, stored in (entry for share in shares for entry in share.slices):
            tensor = index.setdefault(name, {}).setdefault(kind, StoredTensor(dtype, shape, []))
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                return f"ranks disagree about {name} ({kind}): {tensor.dtype} {tensor.shape}, {dtype} {shape}"
            tensor.slices.append(stored)
        if problem := next(untiled(index), None):
            return problem
        files = {name: record for share in shares for name, record in share.files.items()}
        texts = {INDEX_NAME: index_to_text(index), STATE_NAME: state_text, CONFIG_NAME: self._config_text}
        try:
            for name, text in texts.items():
                write_text(partial / name, text)
                files[name] = file_record(partial / name)
            write_text(partial / MANIFEST_NAME, Manifest(step, files).to_text())
            folders.publish(self._checkpoints, step)
        except (OSError, CheckpointError) as error:
            return failure_text(partial, error)
        return None


def _batches(slices: Iterable[TensorSlice], max_bytes: int) -> Iterator[list[TensorSlice]]:
    """The slices, copied to host memory, in lists of at most `max_bytes` (or of one slice that is larger)."""
    batch: list[TensorSlice] = []
    batch_bytes = 0
    for item in slices:
        if batch and batch_bytes + item.tensor.nbytes > max_bytes:
            yield batch
            batch, batch_bytes = [], 0
        copied = item.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        batch.append(TensorSlice(item.name, item.kind, item.global_shape, item.offset, copied))
        batch_bytes += copied.nbytes
    if batch:
        yield batch


def _write_share(folder: Path, rank: int, batches: Iterable[list[TensorSlice]]) -> Share:
    """Writes one file per batch; after an error the batches are still exhausted, but no longer written."""
    share = Share()
    for number, batch in enumerate(batches):
        if share.error is None:
            _write_batch(share, folder / f"tensors_{rank:05d}_{number:05d}.safetensors", batch)
        batch.clear()  # frees its memory before the next one is made
    return share


def _write_batch(share: Share, path: Path, batch: list[TensorSlice]) -> None:
    keyed = {f"{x.kind}:{x.name}@{','.join(map(str, x.offset))}": x for x in batch}
    assert len(keyed) == len(batch), "a slice was offered twice"
    for key, x in keyed.items():
        dtype = str(x.tensor.dtype).removeprefix("torch.")
        stored = StoredSlice(path.name, key, x.offset, tuple(x.tensor.shape))
        share.slices.append((x.name, x.kind, dtype, x.global_shape, stored))
    try:
        share.files[path.name] = write_tensors(path, {key: x.tensor for key, x in keyed.items()})
    except (OSError, SafetensorError, CheckpointError) as error:
        share.error = failure_text(path, error)
