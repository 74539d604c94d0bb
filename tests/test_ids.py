"""Ids are for ever: results are found again by them. ids.json holds some, and what every parameter's default was.

If a default changes, its file's REVISION has to change too: the id leaves defaults out, so an old result would be taken
for a new one. After a change that is meant to make new trials:  python tests/test_ids.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sweeps.catalog import Block, Catalog
from sweeps.plan import load

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "ids.json"


def blocks() -> dict[str, Block]:
    catalog = Catalog()
    found = [catalog.block(kind, name) for kind in ("mechanism", "task") for name in catalog.names(kind)]
    return {block.title: block for block in [*found, catalog.block("model"), catalog.block("train")]}


def defaults(block: Block) -> dict[str, Any]:
    """Every default, those of blocks inside it too."""
    own = {name: param.default for name, param in block.params.items() if not param.is_required}
    inner = {
        f"{param}.{option}.{name}": default
        for param, options in block.blocks.items()
        for option, sub in options.items()
        for name, default in defaults(sub).items()
    }
    return own | inner


def now() -> dict[str, Any]:
    trials = {f"{m.cell}, seed {m.trial.seed}": m.trial.id for m in load(str(DATA / "golden.yaml")).members}
    catalogue = {
        title: {"revision": block.revision, "defaults": defaults(block), "derived": block.derived}
        for title, block in blocks().items()
    }
    return {"trials": trials, "catalogue": catalogue}


def test_ids_are_what_they_were() -> None:
    golden, found = json.loads(GOLDEN.read_text()), now()
    assert found["trials"] == golden["trials"]


def test_a_changed_default_has_a_new_revision() -> None:
    golden, found = json.loads(GOLDEN.read_text())["catalogue"], now()["catalogue"]
    for title, before in golden.items():
        assert title in found, f"{title} is gone, and with it the meaning of its results"
        after = found[title]
        if after["revision"] != before["revision"]:
            continue
        changed = {name: (value, after["defaults"].get(name, "gone")) for name, value in before["defaults"].items()}
        assert {name: pair for name, pair in changed.items() if pair[0] != pair[1]} == {}, title
        assert after["derived"] == before["derived"], title


def test_the_golden_file_knows_everything_there_is() -> None:
    golden, found = json.loads(GOLDEN.read_text()), now()
    assert golden["catalogue"].keys() == found["catalogue"].keys()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(now(), indent=1, sort_keys=True) + "\n")
