"""The images' health check: exit 0 when the server answers GET /health with 200. Standard library alone."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path

PORT_FILE = Path("/tmp/neuronserve.port")
"""Left by the entrypoint."""

TIMEOUT_S = 4


def problem(port: int) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=TIMEOUT_S) as answer:
            return None if answer.status == 200 else f"/health answered {answer.status}"
    except urllib.error.HTTPError as error:
        return f"/health answered {error.code}"
    except OSError as error:
        return f"port {port}: {error}"


def main() -> int:
    if not PORT_FILE.exists():
        print("the entrypoint has not run", file=sys.stderr)
        return 1
    if found := problem(int(PORT_FILE.read_text())):
        print(found, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
