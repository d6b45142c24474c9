"""Which cores the servers of this machine have named: two that name the same core are told so, by number.

The runtime says of such a core that it is busy, after minutes of loading and without a name. A claim is a locked file
per core, which the kernel unlocks when its process ends, however it ends. Claims reach as far as the directory of
temporary files does: not across containers.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from .errors import LoadError

logger = logging.getLogger(__name__)

FOLDER = Path(tempfile.gettempdir()) / "neuronserve-cores"

_held: dict[int, IO[str]] = {}  # of this process, until its end: so does the runtime


def claim(cores: Iterable[int], said_by: str) -> None:
    """`LoadError` names the first core that another process has claimed, and the process."""
    for core in cores:
        if core in _held:
            continue
        try:
            FOLDER.mkdir(mode=0o1777, exist_ok=True)
            file = (FOLDER / str(core)).open("a+")
        except OSError as error:  # another user's folder, or nowhere to write: the runtime will say it
            logger.warning(
                "%s: whether another server uses these cores is not checked, claims cannot be written (%s)",
                *(said_by, error),
            )
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            raise LoadError(
                f"{said_by}: core {core} is already used by {owner or 'another process'}; give each server cores of "
                "its own"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} ({said_by})")
        file.flush()
        _held[core] = file
