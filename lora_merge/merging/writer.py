"""Carries out a plan: streams every shard through its operations into a folder, hashing what it reads and what it writes.

For each file several things run at once: a surveyor takes the block scales of what will be quantized, a few tensors ahead; a
pool of workers, which the files share, computes blocks of rows; one thread writes them in order, a second one hashes them with
what they were made from, a third has the disk take what is written. Memory holds a few blocks per worker and the bound form of a
few tensors, whatever the model's size.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from lora_merge.console import Progress, no_progress
from lora_merge.merging.binding import bind
from lora_merge.merging.digests import file_digest
from lora_merge.merging.errors import MergeError
from lora_merge.merging.output_file import OutputFile
from lora_merge.merging.plan import MergePlan, ShardPlan
from lora_merge.merging.shard_digests import shard_digests
from lora_merge.merging.side_files import SideFile
from lora_merge.merging.staging import sync_folder
from lora_merge.merging.streaming import Binder, ShardStream

_SYNC_BYTES = 1 << 28


@dataclass(frozen=True)
class WrittenFiles:
    """Hexadecimal SHA-256 by file name: of the base's weight files as read, and of everything written."""

    base: dict[str, str]
    output: dict[str, str]


def shards_at_once(jobs: int) -> int:
    """Files in work at the same time: a file is hashed in order, by one core as it is read and by another as it is written."""
    return max(1, jobs // 2)


def write_plan(
    plan: MergePlan, folder: Path, *, jobs: int, binder: Binder = bind, progress: Progress = no_progress
) -> WrittenFiles:
    """Write every file of ``plan`` into ``folder`` and make them durable.

    Args:
        jobs: worker threads that compute.
        binder: where the arithmetic runs.
        progress: told of tensor bytes written.

    Raises:
        MergeError: a read or write failed, the base changed meanwhile, a result is not finite.
    """
    base, output = {}, {}
    before = {shard.file: _identity(plan.base.folder.path / shard.file) for shard in plan.shards}
    with (
        ThreadPoolExecutor(jobs) as workers,
        ThreadPoolExecutor(1) as syncer,
        ThreadPoolExecutor(shards_at_once(jobs)) as shards,
    ):
        crew = _Crew(workers, syncer, jobs, len(plan.shards), binder, progress)
        writing = {shard.file: shards.submit(_write_shard, shard, plan, folder / shard.file, crew) for shard in plan.shards}
        try:
            for file in plan.side_files:
                output[file.name] = write_side_file(file, folder)
            for finished in wait(writing.values(), return_when=FIRST_EXCEPTION).done:
                finished.result()  # raises where that one failed
        except BaseException:
            crew.stop.set()
            for shard_in_work in writing.values():
                shard_in_work.cancel()
            raise
        for name, shard_in_work in writing.items():
            base[name], output[name], durable = shard_in_work.result()
            durable.result()
    for name, identity in before.items():
        path = plan.base.folder.path / name
        if _identity(path) != identity:
            raise MergeError(f"{path}: changed while the base was merged; merge again when nothing writes to it")
    return WrittenFiles(base, output)


def check_disk(plan: MergePlan, out: Path) -> None:
    """Raise :class:`MergeError` unless the disk of ``out`` has room for the plan."""
    parent = out.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    needed = plan.disk_bytes
    if free < needed:
        raise MergeError(f"{out}: needs {needed:,} bytes, its disk has {free:,} free; make room or choose another disk")


@dataclass(frozen=True)
class _Crew:
    """What the shards in work share. ``files``: how many there are in all; ``stop`` is set when one of them has failed."""

    workers: ThreadPoolExecutor
    syncer: ThreadPoolExecutor
    jobs: int
    files: int
    binder: Binder
    progress: Progress
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def ahead(self) -> int:
        """Blocks of a shard that are computed before they can be written."""
        return 2 + 2 * self.jobs // shards_at_once(self.jobs)

    @property
    def hashing_cores(self) -> int:
        """Cores for hashing one file as it is read and as it is written: 2 where that leaves half of them to the arithmetic."""
        return 2 if self.jobs >= 4 * min(self.files, shards_at_once(self.jobs)) else 1


def _write_shard(shard: ShardPlan, plan: MergePlan, target: Path, crew: _Crew) -> tuple[str, str, Future[None]]:
    """Write one file; the digests of the base's file and of it, and when it is durable."""
    path = plan.base.folder.path / shard.file
    with (
        ShardStream(shard, path, crew.workers, crew.ahead, crew.binder) as stream,
        closing(shard_digests(stream.base, crew.hashing_cores)) as digests,
        ThreadPoolExecutor(1) as hasher,
        OutputFile(target, shard.nbytes) as file,
    ):
        hashing: deque[Future[None]] = deque()
        syncing: Future[None] | None = None
        synced = 0
        for block in stream:
            if crew.stop.is_set():
                raise MergeError(f"{shard.file}: given up, since another file failed")
            file.append(block)
            hashing.append(hasher.submit(digests.add, block))
            crew.progress(len(block.content))
            if len(hashing) > crew.ahead:
                hashing.popleft().result()
            if file.cached_bytes - synced >= _SYNC_BYTES and (syncing is None or syncing.done()):
                # What lies in the page cache goes to the disk while the rest is computed, not all of it at the end.
                syncing, synced = crew.syncer.submit(sync_file, target), file.cached_bytes
        file.finish()
        for pending in hashing:
            pending.result()
        read, written = hasher.submit(digests.finish).result()
        return read, written, crew.syncer.submit(sync_file, target)


def _identity(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced, grown or written to."""
    try:
        now = path.stat()
    except OSError as error:
        raise MergeError(f"{path}: disappeared while the base was merged: {error.strerror or error}") from error
    return (now.st_size, now.st_mtime_ns, now.st_dev, now.st_ino)


def write_side_file(file: SideFile, folder: Path) -> str:
    """Write one file beside the weights, durably; its hexadecimal SHA-256."""
    target = folder / file.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.content is not None:
            target.write_bytes(file.content)
        elif file.source is not None:
            shutil.copyfile(file.source, target)
    except OSError as error:
        raise MergeError(f"{file.name}: cannot be written: {error.strerror or error}") from error
    sync_file(target)
    try:
        for inside in target.relative_to(folder).parents[:-1]:
            sync_folder(folder / inside)
    except OSError as error:
        raise MergeError(f"{file.name}: its folder could not be made durable: {error.strerror or error}") from error
    return file_digest(target)


def sync_file(path: Path) -> None:
    """Make a file durable."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MergeError(f"{path.name}: could not be made durable: {error.strerror or error}") from error
