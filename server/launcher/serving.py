"""`vllm serve`, as the launcher's process becomes it: TGI's log lines, and JSON ones where they are asked for.

python -m neuronserve.server.launcher.serving serve MODEL …
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import json_log

FORMAT_KEY = "LOG_FORMAT"
CONFIG_KEY = "VLLM_LOGGING_CONFIG_PATH"
LEVEL_KEY = "VLLM_LOGGING_LEVEL"


@contextmanager
def json_lines() -> Iterator[None]:
    """Everything this process and those under it write, as JSON; before vLLM is imported, which sets up its log.

    The streams stay as they are made here: the last line of all is the one that tells of an error.
    """
    sys.stdout, sys.stderr = json_log.JsonLines(sys.stdout, "stdout"), json_log.JsonLines(sys.stderr, "stderr")
    with tempfile.TemporaryDirectory(prefix="neuronserve-") as folder:
        file = Path(folder) / "logging.json"
        file.write_text(json.dumps(json_log.configuration(os.environ.get(LEVEL_KEY, "INFO"))))
        os.environ[CONFIG_KEY] = str(file)
        yield


def serve() -> None:
    from . import moments

    sys.argv[0] = "vllm"  # an error that nobody catches is one line in vLLM's own program
    moments.install()
    vllm: Any = importlib.import_module("vllm.entrypoints.cli.main")
    vllm.main()


def main() -> None:
    wants_json = os.environ.get(FORMAT_KEY, "").upper() == "JSON" and not os.environ.get(CONFIG_KEY)
    if not wants_json:
        serve()
        return
    with json_lines():
        serve()


if __name__ == "__main__":
    main()
