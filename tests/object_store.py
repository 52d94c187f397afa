"""An S3 server on loopback, and what NIXL's OBJ plugin needs to reach it. For tests and benchmarks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUCKET = "hisparse-blocks"
CREDENTIALS = {"access_key": "key", "secret_key": "secret", "region": "us-east-1"}
START_TIMEOUT_S = 60
# Used by the plugin for transfers between a store and GPU memory only; part of CUDA, not of the wheel.
MISSING_LIBRARY = "libcuobjclient.so.1"


def has_server() -> bool:
    """True if moto's server is installed."""
    return importlib.util.find_spec("moto") is not None and importlib.util.find_spec("flask") is not None


@contextmanager
def object_store(port: int) -> Iterator[dict[str, object]]:
    """Options of a tier in an empty bucket of a running server."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _create_bucket(port)
        yield {"type": "obj", "bucket": BUCKET, "endpoint": f"127.0.0.1:{port}", "scheme": "http", **CREDENTIALS}
    finally:
        process.kill()
        process.wait()


def library_path(directory: Path) -> str:
    """A directory for LD_LIBRARY_PATH with functions that the plugin names and does not call for host memory."""
    plugin = next(Path(_site_packages()).glob("nixl_cu*.libs/nixl/libplugin_OBJ.so"))
    names = subprocess.check_output(["nm", "-D", "--undefined-only", plugin], text=True).split()
    source = "\n".join(f"void {name}(void) {{ __builtin_trap(); }}" for name in names if "cuObj" in name)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{MISSING_LIBRARY}", "-xc", "-", "-o", MISSING_LIBRARY]
    subprocess.run(command, input=source, text=True, check=True, cwd=directory)
    return str(directory)


def _site_packages() -> Path:
    return Path(importlib.util.find_spec("vllm").origin).parents[1]


def _create_bucket(port: int) -> None:
    import boto3
    from botocore.exceptions import EndpointConnectionError

    access_key, secret_key, region = CREDENTIALS.values()
    names = {"aws_access_key_id": access_key, "aws_secret_access_key": secret_key, "region_name": region}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **names)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            return
        except EndpointConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
