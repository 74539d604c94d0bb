"""An S3-compatible server of the tests' own, in a thread, with one empty bucket and made-up keys."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator

BUCKET = "memsweep-tests"
SECRET = "s3-SECRET-of-the-tests"


def missing() -> str | None:
    """Why there can be no server here, or None."""
    gone = [name for name in ("s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(gone)} not installed: pip install 'memsweep[test-s3]'" if gone else None


@contextlib.contextmanager
def server() -> Iterator[str]:
    """`s3://…` of an empty bucket, with the environment that reaches it, for this process and those it starts."""
    import fsspec
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    made = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "MLFLOW_S3_ENDPOINT_URL": f"http://{host}:{port}",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        made.stop()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
