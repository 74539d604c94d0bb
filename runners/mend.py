"""A store that lost its store.json gets it back: from the copy, else with the uuid that its ledger knows.

The uuid ties the folder to its ledger, to its runs in MLflow and to what waits in shared storage. A new one is made
only if nobody remembers the old one.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from runners.ledger import Ledger
from runners.schema import SCHEMA_VERSION, Finding
from runners.store import HEAD, HEAD_COPY, LEDGER_VARIABLE, is_torn, read_json, write_head


def mend(store: Path) -> Finding | None:
    """Write a torn store.json again: what was done. None, and nothing done, if it is whole or there is no store.

    Raises `UserError` for a ledger that cannot be read: a uuid that is not its own would lock the store out of it.
    """
    root = store.expanduser().resolve()
    if not is_torn(root):
        return None
    copy = read_json(root / HEAD_COPY)
    if isinstance(copy, dict) and {"uuid", "schema"} <= copy.keys():
        write_head(root, copy)
        return Finding("ok", f"{HEAD} was torn: written again from its copy")
    known = _known(root)
    write_head(root, {"uuid": known or str(uuid.uuid4()), "schema": SCHEMA_VERSION})
    text = f"{HEAD} was torn: written again with " + ("the uuid that the ledger knows" if known else "a new uuid")
    return Finding("note", text, 'if it named a "ledger" or "shared" storage of its own, put these back into it')


def _known(root: Path) -> str | None:
    """The uuid in the ledger inside the store, else in the one that the environment names."""
    urls = [f"sqlite:///{root / 'ledger.db'}"] if (root / "ledger.db").exists() else []
    for url in filter(None, (*urls, os.environ.get(LEDGER_VARIABLE))):
        ledger = Ledger(url, read_only=True)
        try:
            if found := ledger.store_uuid():
                return found
        finally:
            ledger.close()
    return None
