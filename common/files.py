"""Files that are whole or not there: write beside, then replace."""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

BytesT = TypeVar("BytesT", bytes, bytearray)


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Write beside, then replace: a reader sees the old file or the new one, never half of one.

    `durable`: it is on the disk when this returns, and survives a loss of power.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)  # on a full disk its space is needed
        raise
    if durable:
        sync(path.parent)


SHA256_DIGITS = 64


def sealed(content: BytesT) -> BytesT:
    """With its SHA-256 in hexadecimal digits behind it."""
    return content + hashlib.sha256(content).hexdigest().encode()


def is_sealed(content: BytesT) -> bool:
    """Whether it is what `sealed` once returned."""
    body, digest = memoryview(content)[:-SHA256_DIGITS], bytes(content[-SHA256_DIGITS:])
    return hashlib.sha256(body).hexdigest().encode() == digest


def sync(path: Path) -> None:
    """Have the kernel write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict[str, Any], durable: bool = True) -> None:
    """JSON has no NaN and no infinity: they become null."""
    content = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in content.items()}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    with replacing(path, durable) as file:
        file.write(text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file, or none that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
