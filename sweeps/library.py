"""Where a spec is found: under the current directory first, then among the specs that come with memsweep."""

from __future__ import annotations

from pathlib import Path

from runners.schema import UserError
from sweeps.reader import near

SHIPPED = Path(__file__).resolve().parent / "specs"


def names() -> list[str]:
    """The shipped specs, by name."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find(spec: str, beside: Path | None = None) -> tuple[Path, str]:
    """The file of `spec` and how to call it in messages.

    `spec` is a path; or `specs/NAME.yaml`, `NAME.yaml` or `NAME`, which also reach the shipped specs. With `beside`
    (the folder of a spec that extends this one) that folder comes first. Raises `UserError` with the nearest name.
    """
    if not spec.strip() or "\0" in spec:
        raise UserError(f"{spec!r} is no name of a spec")
    name = Path(spec)
    tried = [folder / f for folder in ([beside] if beside else []) for f in (spec, f"{spec}.yaml")]
    tried += [name, Path(f"{spec}.yaml"), Path("specs") / f"{spec}.yaml"]
    for path in tried:
        try:
            if path.is_file() or (path == name and path.exists() and spec not in names()):
                return path, str(path)
        except OSError as error:
            raise UserError(f"{spec}: cannot be read: {error.strerror}") from error
    stem = name.stem if name.suffix == ".yaml" else name.name
    if name.parent in (Path("."), Path("specs")) and stem in names():
        return SHIPPED / f"{stem}.yaml", f"specs/{stem}.yaml"
    here = sorted(str(path) for path in [*Path(".").glob("*.yaml"), *Path("specs").glob("*.yaml")])
    raise UserError(f"{spec}: there is no such file, and no shipped spec of that name{near(stem, [*names(), *here])}")


def copy(name: str, to: Path, *, force: bool = False) -> Path:
    """Copy a shipped spec to a file or into a folder, which is made. Refuses to overwrite a file without `force`."""
    if name not in names():
        raise UserError(f"there is no shipped spec {name!r}{near(name, names())}")
    target = to if to.suffix in (".yaml", ".yml") else to / f"{name}.yaml"
    if target.exists() and not force:
        raise UserError(f"{target} is already there; --force overwrites it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from error
    return target
