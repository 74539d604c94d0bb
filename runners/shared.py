"""Trial folders on storage that every node reaches but no node mounts: any fsspec URL, an S3 bucket above all.

The store stays a folder of the driver and the truth. Beside it, the storage holds one **mailbox an attempt**:

    <url>/<store uuid>/<trial id>/<attempt>/...     shaped like the trial's folder

The driver puts what the attempt starts from into a new mailbox (`attempts/<n>/job.json` last). The worker copies it to
a scratch folder of its node, works there as everywhere, and mirrors what it commits back: what a commit needs first,
then the file that makes it one, each in a single put. The driver copies what is committed into the store, in the
order in which a worker writes, and ends with the mailbox empty.

So an attempt is fenced by its place: whatever an older one still writes lands in a mailbox that nobody reads. A
driver that dies loses nothing either: the next one empties the mailboxes it finds (`collect`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import re
import shutil
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from runners import checkpoints
from runners.redact import shown
from runners.schema import Exit, Job, UserError
from runners.store import Store, last_attempt, read_sealed, sync_folder

MIRROR_S = 5.0
"""Seconds between two looks at what has changed, on both sides: no more than this of a lost node's commits is lost."""
PATIENCE_S = 300.0
"""How long a worker goes on trying to hand in its last word while the storage is away."""
COLLECT_S = 60.0
JOB_FILE = "job.json"
STOP_FILE = "stop"
_WHOLE_PUTS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory"}
"""Storage whose files appear whole or not at all. Elsewhere a file is put under another name and moved."""
_POINTS = re.compile(r"metrics/(\d+)-(\d+)\.jsonl")
_CHECKPOINT = re.compile(r"checkpoints/(\d+|final)/(tensors\.safetensors|meta\.json)")

T = TypeVar("T")


def _rank(path: str) -> int:
    """When a worker writes this file of a trial's folder: data before what makes it count, its last word at the end."""
    if path.startswith("metrics/"):
        return 0
    if path.startswith("checkpoints/"):
        return 2 if path.endswith("/meta.json") else 1
    if path.endswith("/outcome.json"):
        return 6
    return {"result.json": 4}.get(path, 5 if path.startswith("evals/") else 3)


class Shared:
    """Mailboxes below `url` for the trials of one store. One instance may be used from several threads."""

    def __init__(self, url: str, store_uuid: str) -> None:
        self.url, self.uuid = url, store_uuid
        self._fs, root = _open(url)
        self._root = posixpath.join(root, store_uuid)
        self._known: dict[tuple[str, int], dict[str, Any]] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def __reduce__(self) -> Any:
        return Shared, (self.url, self.uuid)

    # ---- files of a mailbox ------------------------------------------------------------------------------------

    def _box(self, trial_id: str, attempt: int) -> str:
        return posixpath.join(self._root, trial_id, str(attempt))

    def _list(self, folder: str) -> dict[str, Any]:
        """Files below `folder`: relative path -> what changes when the file does."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(folder, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._fs._strip_protocol(folder)) + 1
        return {path[start:]: _version(info) for path, info in found.items() if not _is_hidden(path[start:])}

    def _put(self, folder: str, path: str, data: bytes) -> None:
        target = posixpath.join(folder, path)
        protocol = self._fs.protocol
        if not _WHOLE_PUTS.isdisjoint([protocol] if isinstance(protocol, str) else protocol):
            self._fs.pipe_file(target, data)
            return
        head, name = posixpath.split(target)
        self._fs.makedirs(head, exist_ok=True)
        temporary = posixpath.join(head, f".{name}.{uuid.uuid4().hex[:8]}")
        self._fs.pipe_file(temporary, data)
        self._fs.mv(temporary, target)

    def _get(self, folder: str, path: str) -> bytes:
        return self._fs.cat_file(posixpath.join(folder, path))

    def _remove(self, folder: str, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(posixpath.join(folder, path))

    def _clear(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(folder, recursive=True)

    def attempts(self, trial_id: str) -> list[int]:
        """Attempts of the trial that have a mailbox, rising."""
        return sorted(
            {int(first) for path in self._list(posixpath.join(self._root, trial_id)) if (first := _first(path))}
        )

    # ---- the driver's side -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Write, read and remove a file. Raises `UserError` where that cannot be done."""
        name, word = f".check-{uuid.uuid4().hex[:8]}", uuid.uuid4().bytes
        try:
            self._put(self._root, name, word)
            is_same = self._get(self._root, name) == word
            self._remove(self._root, name)
        except Exception as error:
            raise UserError(f"cannot use the shared storage {self.url}: {_said(error)}", Exit.ENVIRONMENT) from error
        if not is_same:
            raise UserError(
                f"the shared storage {self.url} gives back other bytes than were put there", Exit.ENVIRONMENT
            )

    def send(self, job: Job, description: bytes) -> None:
        """Put all that the attempt starts from into its mailbox; `description` of the job comes last.

        Mailboxes of older attempts go: whatever they held that counts is in the store.
        """
        folder, box = Path(job.folder), self._box(job.trial.id, job.attempt)
        for path in sorted(_files(folder), key=_rank):
            if not path.startswith(("attempts/", "progress.json")):
                self._put(box, path, (folder / path).read_bytes())
        self._put(box, f"attempts/{job.attempt}/{JOB_FILE}", description)
        for older in self.attempts(job.trial.id):
            if older < job.attempt:
                self._clear(self._box(job.trial.id, older))

    def ask_to_stop(self, job: Job) -> None:
        self._put(self._box(job.trial.id, job.attempt), f"attempts/{job.attempt}/{STOP_FILE}", b"")

    def receive(self, folder: Path, trial_id: str, attempt: int) -> None:
        """Copy what the attempt has committed into the trial's folder of the store. Doing it again changes nothing."""
        with self._locks[trial_id]:
            if last_attempt(folder) > attempt:
                return  # fenced: a newer attempt has the folder
            box = self._box(trial_id, attempt)
            listing = self._list(box)
            if f"attempts/{attempt}/{JOB_FILE}" in listing:
                known = self._known.setdefault((trial_id, attempt), {})
                _Intake(folder, attempt, listing, known, lambda path: self._get(box, path)).run()

    def close(self, trial_id: str, attempt: int) -> None:
        """Empty the mailbox of an attempt whose last word has been received."""
        self._known.pop((trial_id, attempt), None)
        self._clear(self._box(trial_id, attempt))

    def collect(self, store: Store, is_held: Callable[[str], bool]) -> int:
        """Take in what an earlier driver left in the mailboxes, of trials that nobody holds: how many there were."""
        newest: dict[str, int] = {}
        for path in patiently(lambda: self._list(self._root), COLLECT_S):
            trial_id, _, rest = path.partition("/")
            newest[trial_id] = max(newest.get(trial_id, 0), _first(rest))
        for trial_id, attempt in newest.items():
            folder = store.trial_folder(trial_id)
            if is_held(trial_id) or not folder.is_dir():
                continue
            patiently(functools.partial(self.receive, folder, trial_id, attempt), COLLECT_S)
            if (folder / "attempts" / str(attempt) / "outcome.json").exists():
                for number in self.attempts(trial_id):
                    self.close(trial_id, number)
        return len(newest)

    # ---- the worker's side -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def working_copy(self, trial_id: str, attempt: int, scratch: Path) -> Iterator[Path]:
        """The trial's folder on this node, mirrored back until the end of the context.

        Raises `OSError` if the last word could not be handed in for `PATIENCE_S`.
        """
        box, folder = self._box(trial_id, attempt), scratch / trial_id
        sent = patiently(lambda: self._list(box))
        for path in sent:
            data = patiently(functools.partial(self._get, box, path))
            _write(folder / path, data)
        mirror = _Mirror(self, folder, trial_id, attempt, sent)
        mirror.start()
        try:
            yield folder
        finally:
            mirror.over.set()
            mirror.join()
            patiently(mirror.once)
            shutil.rmtree(folder, ignore_errors=True)


class _Mirror(threading.Thread):
    """Makes an attempt's mailbox agree with its folder every `MIRROR_S`, and hears there of a stop or a takeover."""

    def __init__(self, shared: Shared, folder: Path, trial_id: str, attempt: int, sent: Iterable[str]) -> None:
        super().__init__(name="mirror", daemon=True)
        self._shared, self._folder, self._trial, self._attempt = shared, folder, trial_id, attempt
        self._box = shared._box(trial_id, attempt)
        self._sent = {path: there for path, there in _files(folder).items() if path in set(sent)}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(MIRROR_S):
            with contextlib.suppress(Exception):  # the storage is away: the next round, or the last one, tries again
                self.once()

    def once(self) -> None:
        self._hear()
        there = self._look()
        for path in sorted(there, key=_rank):
            if self._sent.get(path) == there[path]:
                continue
            try:
                data = (self._folder / path).read_bytes()
            except FileNotFoundError:
                return self.once()  # dropped for a newer one meanwhile: its other half may not go out
            self._shared._put(self._box, path, data)
            self._sent[path] = there[path]
        for path in [path for path in self._sent if path not in there]:
            self._shared._remove(self._box, path)
            del self._sent[path]

    def _look(self) -> dict[str, tuple[int, int]]:
        """The folder's files. What makes others count is there only if it was before the others were listed."""
        first, again = _files(self._folder), _files(self._folder)
        return {path: seen for path, seen in again.items() if _rank(path) < 2 or path in first}

    def _hear(self) -> None:
        mine = self._folder / "attempts"
        listing = self._shared._list(posixpath.join(self._shared._root, self._trial))
        newest = max(map(_first, listing), default=0)
        if f"{self._attempt}/attempts/{self._attempt}/{STOP_FILE}" in listing:
            (mine / str(self._attempt) / STOP_FILE).touch()
        if newest > self._attempt:  # its worker ends by itself when it sees this
            (mine / str(newest)).mkdir(parents=True, exist_ok=True)


class Courier:
    """Receives, while its context lasts, what running jobs commit, and hands them the word to stop."""

    def __init__(self, shared: Shared | None, running: Callable[[], list[Job]], say: Callable[[str], None]) -> None:
        self._shared, self._running, self._say = shared, running, say
        self._over = threading.Event()
        self._asked: set[tuple[str, int]] = set()
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    def __enter__(self) -> Courier:
        if self._shared is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._shared is not None:
            self._thread.join(10)

    def ask_to_stop(self, job: Job) -> None:
        if self._shared is not None and (job.trial.id, job.attempt) not in self._asked:
            with contextlib.suppress(Exception):  # asked again at the next call
                self._shared.ask_to_stop(job)
                self._asked.add((job.trial.id, job.attempt))

    def _run(self) -> None:
        assert self._shared is not None
        while not self._over.wait(MIRROR_S):
            for job in self._running():
                try:
                    self._shared.receive(Path(job.folder), job.trial.id, job.attempt)
                    self._is_away = False
                except Exception as error:
                    if not self._is_away:
                        self._say(f"the shared storage cannot be read ({_said(error)}); trials go on meanwhile")
                    self._is_away = True


class _Intake:
    """One look into a mailbox: what is committed there goes into the store's folder, in the order of writing."""

    def __init__(
        self, folder: Path, attempt: int, listing: dict[str, Any], known: dict[str, Any], get: Callable[[str], bytes]
    ) -> None:
        self._folder, self._listing, self._known, self._get = folder, listing, known, get
        self._is_set_aside = f"attempts/{attempt}/old-result.json" in listing  # to be trained again

    def run(self) -> None:
        whole = [name for name in self._checkpoints() if self._is_whole(name)]
        steps = [int(name) for name in whole if name.isdecimal()]
        is_trained = "result.json" in self._listing
        if self._is_set_aside and "result.json" not in self._known:
            (self._folder / "result.json").unlink(missing_ok=True)
        for path in self._new(0):
            found = _POINTS.fullmatch(path)
            if found and (is_trained or (steps and int(found[2]) <= max(steps))):
                self._take(path)
        for name in whole:
            self._take_checkpoint(name)
        for path in (path for rank in range(3, 7) for path in self._new(rank)):
            self._take(path)
        self._tidy(is_trained)

    def _checkpoints(self) -> list[str]:
        return sorted({found[1] for path in self._listing if (found := _CHECKPOINT.fullmatch(path))})

    def _is_whole(self, name: str) -> bool:
        return all(f"checkpoints/{name}/{part}" in self._listing for part in ("tensors.safetensors", "meta.json"))

    def _new(self, rank: int) -> list[str]:
        return [p for p, v in sorted(self._listing.items()) if _rank(p) == rank and self._known.get(p) != v]

    def _take(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # replaced meanwhile: the next look sees what by
            data = self._get(path)
            if path != "result.json" or read_sealed(self._folder / path) is None:  # the first commit wins
                _write(self._folder / path, data)
            self._known[path] = self._listing[path]

    def _take_checkpoint(self, name: str) -> None:
        paths = [f"checkpoints/{name}/{part}" for part in ("tensors.safetensors", "meta.json")]
        if all(self._known.get(path) == self._listing[path] for path in paths):
            return
        home = self._folder / "checkpoints"
        temporary = home / f".{name}.{uuid.uuid4().hex[:8]}"
        try:
            for path in paths:
                _write(temporary / posixpath.basename(path), self._get(path))
            if (home / name).exists():
                os.rename(home / name, home / f".old-{uuid.uuid4().hex[:8]}")
            os.rename(temporary, home / name)
            sync_folder(home)
            self._known.update({path: self._listing[path] for path in paths})
        except FileNotFoundError:
            pass  # dropped meanwhile for a newer one
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _tidy(self, is_trained: bool) -> None:
        """Drop what the worker dropped: points after the checkpoint it went on from, and old checkpoints."""
        for path in (self._folder / "metrics").glob("*.jsonl"):
            if f"metrics/{path.name}" not in self._listing:
                path.unlink()
        checkpoints.prune(self._folder / "checkpoints", keep=0 if is_trained else checkpoints.KEEP)
        if "progress.json" not in self._listing:
            (self._folder / "progress.json").unlink(missing_ok=True)


def _open(url: str) -> tuple[Any, str]:
    """The file system of `url`, and the path there. Raises `UserError` for a URL that cannot be used."""
    from fsspec.core import url_to_fs

    scheme, found, rest = url.partition("://")
    if not found:
        raise UserError(
            f"--shared {url}: give a URL, as s3://bucket/folder; a folder that every node mounts needs no --shared"
        )
    if re.match(r"[^/@:]*:(?!\d*/).*@", rest):  # a user alone, or a port, is no secret
        raise UserError(
            f"--shared {shown(url)}: the URL is kept and shown, so leave the password out of it. Every node takes its "
            "own from the environment (AWS_…, FSSPEC_…) or from its role"
        )
    try:
        fs, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        extra = ": pip install 'memsweep[s3]'" if scheme in ("s3", "s3a") else ""
        raise UserError(f"--shared {url}: {error}{extra}", Exit.ENVIRONMENT) from error
    except ValueError as error:
        raise UserError(f"--shared {url}: {error}") from error
    return fs, root.rstrip("/")


def _version(info: dict[str, Any]) -> Any:
    """Something that changes whenever the file does, of what the file system tells about it."""
    parts = [str(info.get(name)) for name in ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created", "ino")]
    return (info.get("size"), *parts)


def _first(path: str) -> int:
    head = path.split("/", 1)[0]
    return int(head) if head.isdecimal() else 0


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Files below `folder` but for temporary ones: relative path -> (size, time of change in ns)."""
    found = {}
    for home, names, files in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(".")]
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                path = Path(home, name)
                stat = path.stat()
                if not name.startswith("."):
                    found[path.relative_to(folder).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return found


def _write(path: Path, data: bytes) -> None:
    """Put `data` at `path` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def patiently(act: Callable[[], T], seconds: float = PATIENCE_S) -> T:
    """`act`, again and again while the storage is away. Raises `OSError` after `seconds` of that."""
    end, pause = time.monotonic() + seconds, 0.5
    while True:
        try:
            return act()
        except Exception as error:
            if time.monotonic() > end:
                raise OSError(f"the shared storage was away for {seconds:.0f} s: {_said(error)}") from error
            time.sleep(pause)
            pause = min(2 * pause, 20.0)


def _said(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}"[:300] if text else type(error).__name__
