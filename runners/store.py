"""The store: one folder that holds every trial, every frozen plan, the ledger and MLflow's files.

    store.json, .store.json                     uuid, schema version; optionally where ledger and shared storage are;
                                                and its copy, for the day the first is torn
    trials/<id>/settings.json                   what the trial is
    trials/<id>/attempts/<n>/{log.txt, error.txt, usage.jsonl, outcome.json}
    trials/<id>/checkpoints/{<step>, final}/    see runners/checkpoints.py
    trials/<id>/metrics/<from>-<to>.jsonl       points that belong to the checkpoint at <to>
    trials/<id>/result.json                     the commit point of the training
    trials/<id>/evals/<slice id>.json           the commit point of one evaluation
    sweeps/<name>/<revision>/{spec.yaml, plan.jsonl, report/}
    ledger.db, mlflow.db, mlartifacts/

Paths inside are relative to the folder, so it may be moved. Standard library only: reading a store costs no import.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.schema import FOLDER, SCHEMA_VERSION, EvalSlice, Exit, Plan, Trial, UserError, canonical_json

DEFAULT_FOLDER = "memsweep-runs"
STORE_VARIABLE = "MEMSWEEP_STORE"
LEDGER_VARIABLE = "MEMSWEEP_LEDGER"
"""Environment variable with the ledger's database URL; wins over `"ledger"` in store.json (it may hold a password)."""

HEAD, HEAD_COPY = "store.json", ".store.json"
ASIDE = "aside"
"""In an attempt's folder: what it found and did not want. Such an attempt begins a new generation of the trial."""
_SHARED_FILESYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "fuse.sshfs",
    "afs",
    "glusterfs",
    "fuse.gluster",
)
_REVISION = re.compile(r"\d{4,}")
_POINTS = re.compile(r"(\d+)-(\d+)\.jsonl")


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, *, keep_existing: bool = False, durable: bool = True, mode: int = 0o666) -> bool:
    """Put `text` at `path` whole or not at all: temporary name, fsync, rename, fsync of the folder.

    With `keep_existing` the first writer wins and a later one gets False: the commit of a result. On a file system
    without hard links this falls back to "look, then rename". `mode` is that of a new file, less the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if keep_existing:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError:
                if path.exists():
                    return False
                os.replace(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)
    return True


def write_json(path: Path, value: Any, *, keep_existing: bool = False, durable: bool = True, mode: int = 0o666) -> bool:
    """`write_text` of `value` as indented JSON. NaN and infinity are refused: they are not JSON."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return write_text(path, text, keep_existing=keep_existing, durable=durable, mode=mode)


def read_json(path: Path | str) -> Any | None:
    """The JSON value at `path`, or None if there is no file or it is torn."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """`value` with its checksum: SHA-256 of its canonical JSON without `checksum`."""
    body = {key: item for key, item in value.items() if key != "checksum"}
    return {**body, "checksum": hashlib.sha256(canonical_json(body).encode()).hexdigest()}


def read_sealed(path: Path | str) -> dict[str, Any] | None:
    """What `write_json(path, seal(...))` wrote, or None if it is missing, torn or altered.

    Raises `UserError` for a file of a newer schema.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("schema"), int) and value["schema"] > SCHEMA_VERSION:
        raise _newer(path, value["schema"])
    body = {key: item for key, item in value.items() if key != "checksum"}
    # Most files hold their canonical form: without making it anew this takes half the time.
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    if hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() == value.get("checksum"):
        return value
    try:
        return value if seal(body)["checksum"] == value.get("checksum") else None
    except ValueError:
        return None


def _newer(path: Path | str, schema: int) -> UserError:
    return UserError(
        f"{path} has schema {schema}; this memsweep reads up to {SCHEMA_VERSION}: upgrade memsweep", Exit.ENVIRONMENT
    )


def read_points(folder: Path, up_to: int | None = None) -> Iterator[tuple[int, dict[str, float], float]]:
    """Committed points of the trial in `folder`: (step, metrics, time in s), no metric twice at one step.

    `up_to` is the last committed step (that of the result or of the newest checkpoint); later points belong to
    nothing that can be resumed. The time is that of the file: it orders nothing, it is for people.
    """
    inside = os.path.join(folder, "metrics")
    try:
        files = [(int(m[1]), int(m[2]), name) for name in os.listdir(inside) if (m := _POINTS.fullmatch(name))]
    except (FileNotFoundError, NotADirectoryError):
        return
    seen: dict[int, set[str]] = {}
    for _first, end, name in sorted(files):
        if up_to is not None and end > up_to:
            continue
        with open(os.path.join(inside, name), encoding="utf-8") as file:
            time, lines = os.fstat(file.fileno()).st_mtime, file.read().splitlines()
        for point in _values(lines):
            step, metrics = point["step"], point["metrics"]
            if (before := seen.get(step)) is None:
                seen[step] = set(metrics)
            else:
                metrics = {name: value for name, value in metrics.items() if name not in before}
                before.update(metrics)
            if metrics:
                yield step, metrics, time


def _values(lines: list[str]) -> Iterable[Any]:
    """The JSON value of each line, up to one that is torn, where it raises ValueError."""
    try:
        values: list[Any] = json.loads(f"[{','.join(lines)}]")
        return values
    except ValueError:
        return map(json.loads, lines)


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_head(root: Path) -> dict[str, Any] | None:
    """What store.json says, or its copy if it is torn; None if the folder has no store.json, or both are torn."""
    if not (root / HEAD).is_file():
        return None
    return next(filter(None, (_head(root / name) for name in (HEAD, HEAD_COPY))), None)


def is_torn(root: Path) -> bool:
    """Whether the store at `root` has lost store.json to a crash or a full disk: `runners/mend.py` makes it again."""
    if (root / HEAD).is_file():
        return _head(root / HEAD) is None
    return _head(root / HEAD_COPY) is not None or any(root.glob("sweeps/*/*/plan.jsonl"))


def write_head(root: Path, head: dict[str, Any]) -> None:
    """Write store.json and its copy, which nobody may read who may not read store.json: it may hold a password."""
    for name in (HEAD, HEAD_COPY):
        write_json(root / name, head, mode=_mode(root))


def _head(path: Path) -> dict[str, Any] | None:
    head = read_json(path)
    is_whole = isinstance(head, dict) and isinstance(head.get("uuid"), str) and isinstance(head.get("schema"), int)
    return head if is_whole else None


def _mode(root: Path) -> int:
    try:
        return (root / HEAD).stat().st_mode & 0o666
    except FileNotFoundError:
        return 0o666


def _keep_copy(root: Path) -> None:
    """Bring the copy of store.json up to date, or store.json, if it is torn. A store that only reads may lack it."""
    head = read_head(root)
    if head is not None and any(_head(root / name) != head for name in (HEAD, HEAD_COPY)):
        with contextlib.suppress(OSError):
            write_head(root, head)


def shared_filesystem(path: Path, mounts: str | None = None) -> str | None:
    """The type of the network file system that holds `path`, or None if it is local (or cannot be told).

    `mounts` stands in for /proc/mounts in tests.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
    found, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if len(point) >= len(found) and path.is_relative_to(point):
            found, kind = point, fields[2]
    return kind if kind.startswith(_SHARED_FILESYSTEMS) else None


@dataclass(frozen=True)
class Store:
    """An open store. Make one with `Store.create` (may write) or `Store.open` (never writes)."""

    root: Path
    uuid: str
    ledger: str | None = None
    shared: str | None = None
    """Storage that hands trials to workers which do not see the store; see `runners/shared.py`."""

    @classmethod
    def open(cls, root: Path | str) -> Store:
        """The store at `root`, which must exist. Raises `UserError` if it does not or is of a newer schema."""
        root = Path(root).expanduser().resolve()
        head = read_head(root)
        if head is None and is_torn(root):
            raise UserError(
                f"the store at {root} has a store.json that is torn or gone: "
                f"`sweep doctor --rebuild --store {shlex.quote(str(root))}` makes it again from what is there",
                Exit.ENVIRONMENT,
            )
        if head is None:
            raise UserError(
                f"no memsweep store at {root}: it has no store.json; `sweep launch` makes one there, "
                "`--store FOLDER` names another",
                Exit.ENVIRONMENT,
            )
        if head["schema"] > SCHEMA_VERSION:
            raise _newer(root / HEAD, head["schema"])
        return cls(root, head["uuid"], head.get("ledger"), head.get("shared"))

    @classmethod
    def create(cls, root: Path | str) -> Store:
        """The store at `root`, made if the folder is missing or empty. Two makers at once get the same store."""
        root = Path(root).expanduser().resolve()
        head = root / HEAD
        try:
            if not head.exists() and not is_torn(root):
                if (
                    root.is_dir()
                    and any(not path.name.startswith(".") for path in root.iterdir())
                    and not head.exists()
                ):
                    raise UserError(
                        f"{root} is a folder with other things in it and no store.json: choose a new or empty folder "
                        "for --store",
                        Exit.ENVIRONMENT,
                    )
                root.mkdir(parents=True, exist_ok=True)
                write_json(head, {"uuid": str(uuid.uuid4()), "schema": SCHEMA_VERSION}, keep_existing=True)
        except OSError as error:
            raise UserError(f"cannot make a store at {root}: {error.strerror or error}", Exit.ENVIRONMENT) from error
        opened = cls.open(root)
        _keep_copy(root)
        return opened

    def ledger_url(self) -> str:
        """Database URL of the ledger. Raises `UserError` for SQLite on a network file system."""
        url = os.environ.get(LEDGER_VARIABLE) or self.ledger or f"sqlite:///{self.root / 'ledger.db'}"
        if not url.startswith("sqlite:"):
            return url
        path = Path(url.removeprefix("sqlite:///"))
        kind = shared_filesystem(path if path.is_absolute() else path.resolve())
        if kind:
            raise UserError(
                f"the ledger {path} is on a {kind} file system, where SQLite can lose data. Either keep the ledger on "
                f"a local disk of one host and share only the trial folders ({LEDGER_VARIABLE}=sqlite:////local/"
                f'{self.uuid[:8]}.db, or "ledger" in store.json), or use PostgreSQL '
                f"({LEDGER_VARIABLE}=postgresql+psycopg2://…)",
                Exit.ENVIRONMENT,
            )
        return url

    def keep_shared(self, url: str) -> None:
        """Note in store.json that trials go through `url`, so that a later launch looks there for what was left."""
        head = read_head(self.root) or {"uuid": self.uuid, "schema": SCHEMA_VERSION}
        if head.get("shared") != url:
            write_head(self.root, head | {"shared": url})

    @property
    def mlflow_uri(self) -> str:
        """Where MLflow's own database is if the user names no server."""
        return f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def mlflow_artifacts(self) -> Path:
        return self.root / "mlartifacts"

    def trial_folder(self, trial_id: str) -> Path:
        return self.root / "trials" / trial_id

    def trial_ids(self) -> list[str]:
        return [path.name for path in _files(self.root / "trials")]

    def result(self, trial_id: str) -> dict[str, Any] | None:
        """The trial's committed result, or None. See `runners/trial.py` for its fields."""
        return read_sealed(self.trial_folder(trial_id) / "result.json")

    def evaluation(self, trial_id: str, slice_id: str) -> dict[str, Any] | None:
        """The committed evaluation of one slice, or None."""
        return read_sealed(self.trial_folder(trial_id) / "evals" / f"{slice_id}.json")

    def missing_slices(self, trial_id: str, slices: tuple[EvalSlice, ...]) -> tuple[EvalSlice, ...]:
        """Those of `slices` that have no valid evaluation yet."""
        return tuple(s for s in slices if self.evaluation(trial_id, s.id) is None)

    def last_attempt(self, trial_id: str) -> int:
        """The highest attempt number that left a folder; 0 if none did."""
        return last_attempt(self.trial_folder(trial_id))

    def progress(self, trial_id: str) -> dict[str, Any] | None:
        """What a running worker last said: attempt, step, steps, metrics, time. Live only, never a result."""
        return read_json(self.trial_folder(trial_id) / "progress.json")

    def check_settings(self, trial: Trial) -> None:
        """Write the trial's settings.json, or compare it with the one that is there.

        A parameter that only one side has is one that was added or dropped with a default that keeps the old
        behaviour (ids leave defaults out). Raises `UserError` where both sides have one and differ.
        """
        path = self.trial_folder(trial.id) / "settings.json"
        there = read_json(path)
        if there is None:
            write_json(path, trial.settings())
            return
        differences = _differences(there, trial.settings())
        wrong = [name for name, a, b in differences if a != b and name != f"task.{FOLDER}"]
        if wrong:
            name = wrong[0]
            raise UserError(
                f"two different settings share the trial id {trial.id}: {name} differs between this plan and {path}. "
                "A default changed without a new REVISION, or the file was edited; the launch stops, nothing is "
                "overwritten. Use another --store, or restore the file",
                Exit.ENVIRONMENT,
            )

    def sweeps(self) -> list[str]:
        return [path.name for path in _files(self.root / "sweeps")]

    def revisions(self, sweep: str) -> list[int]:
        names = (path.name for path in _files(self.root / "sweeps" / sweep))
        return sorted(int(name) for name in names if _REVISION.fullmatch(name))

    def revision_folder(self, sweep: str, revision: int) -> Path:
        return self.root / "sweeps" / sweep / f"{revision:04d}"

    def plan(self, sweep: str, revision: int | None = None) -> tuple[int, Plan]:
        """A frozen plan (the latest without `revision`). `UserError` for an unknown one, naming those there are."""
        revisions = self.revisions(sweep)
        if not revisions or (revision is not None and revision not in revisions):
            names = ", ".join(self.sweeps()) or "none yet"
            what = f"sweep {sweep!r}" + (f" revision {revision}" if revisions else "")
            raise UserError(f"no {what} in the store {self.root}; it has: {revisions or names}")
        number = revision or revisions[-1]
        text = (self.revision_folder(sweep, number) / "plan.jsonl").read_text(encoding="utf-8")
        return number, Plan.from_lines(text.splitlines())

    def freeze(self, plan: Plan) -> tuple[int, bool]:
        """Keep `plan` as a revision: (its number, whether it is new). An unchanged plan keeps its number."""
        text = "\n".join(plan.to_lines()) + "\n"
        parent = self.root / "sweeps" / plan.sweep
        parent.mkdir(parents=True, exist_ok=True)
        temporary = parent / f".{uuid.uuid4().hex[:8]}"
        try:
            while True:
                latest = max(self.revisions(plan.sweep), default=0)
                if latest and (self.revision_folder(plan.sweep, latest) / "plan.jsonl").read_text("utf-8") == text:
                    return latest, False
                if not temporary.exists():
                    temporary.mkdir()
                    write_text(temporary / "spec.yaml", plan.source)
                    write_text(temporary / "plan.jsonl", text)
                # Another driver may freeze the same plan now: then the rename fails and the loop finds its revision.
                with contextlib.suppress(OSError):
                    os.rename(temporary, self.revision_folder(plan.sweep, latest + 1))
                    sync_folder(parent)
                    return latest + 1, True
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def last_attempt(folder: Path) -> int:
    """The highest attempt number below a trial's folder; 0 if there is none."""
    return max((int(path.name) for path in _files(folder / "attempts") if path.name.isdecimal()), default=0)


def generation(folder: Path) -> int:
    """The attempt that last began a trial's training anew, with nothing of what was there; 0 if none did."""
    begun = (path for path in _files(folder / "attempts") if path.name.isdecimal() and (path / ASIDE).is_dir())
    return max((int(path.name) for path in begun), default=0)


def _differences(a: Any, b: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, value in a, value in b) of every leaf that both have."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a.keys() & b.keys():
            yield from _differences(a[key], b[key], f"{at}.{key}" if at else key)
    else:
        yield at, _plain(a), _plain(b)


def _plain(value: Any) -> str:
    return canonical_json(value)
