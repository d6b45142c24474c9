"""A device's process that fails on demand, for tests: `<python> faulty_host.py <device folder> --socket ...`.

Runs the real host with one more backend, the arithmetic device with faults. A file `faults.json` in the model's
directory says what happens at which verb, or at a prefill or a decode; each fault strikes once and is removed, so a
restart finds none. A list is as many faults, one after the other.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any


def load_main(folder: str) -> Any:
    spec = importlib.util.spec_from_file_location("device_main", os.path.join(folder, "__main__.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def strike(what: str, model_dir: Path, socket: int) -> None:
    print(f"about to {what}", flush=True)  # and that is all, for a word that is not below
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "hang":
        (model_dir / "hanging").touch()
        time.sleep(600)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "babble":
        os.write(socket, b"loading the compiler, please wait ...")
    elif what == "answer twice":
        os.write(socket, b"NSDP" + bytes(12))
    elif what == "break":
        raise RuntimeError("a register fell off")
    elif what == "dawdle":
        time.sleep(3.5)
    elif what == "keep the lock":
        ctypes.PyDLL(None).sleep(4)  # unlike time.sleep, with Python's lock held: no thread gives a sign of life
    elif what == "leave":
        threading.Thread(target=time.sleep, args=(600,)).start()  # Python waits for it at its end
        sys.exit("no license found")
    elif what == "start a daemon":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (model_dir / "compiler").write_text(str(child.pid))
    elif what == "start a compiler":
        child = subprocess.Popen(["sleep", "600"])
        (model_dir / "compiler").write_text(str(child.pid))


def _replace(path: Path, faults: dict[str, Any]) -> None:
    """In one go: whoever watches the file never reads half of it."""
    path.with_suffix(".new").write_text(json.dumps(faults))
    path.with_suffix(".new").replace(path)


def faulty_device(device_module: Any, capabilities: Any, socket: int) -> Any:
    class FaultyDevice(device_module.ArithmeticDevice):  # type: ignore[misc]
        def load(self, model_dir: str, *arguments: Any) -> Any:
            self._dir = Path(model_dir)
            self._maybe("load")
            return super().load(model_dir, *arguments)

        def allocate(self, num_blocks: int) -> None:
            self._maybe("allocate")
            super().allocate(num_blocks)

        def compile(self, shape: Any) -> None:
            self._maybe("compile")
            super().compile(shape)

        def seal(self) -> None:
            self._maybe("seal")
            super().seal()

        def run(self, batch: Any) -> Any:
            self._maybe("run")
            self._maybe("decode" if batch.prefill is None else "prefill")
            return super().run(batch)

        def _maybe(self, verb: str) -> None:
            path = self._dir / "faults.json"
            if not path.exists():
                return
            faults = json.loads(path.read_text())
            due = faults.pop(verb, [])
            first, *rest = [due] if isinstance(due, str) else due or [None]
            if first is None:
                return
            left = {**faults, **({verb: rest} if rest else {})}
            if left:
                _replace(path, left)
            else:
                path.unlink()
            strike(first, self._dir, socket)

    return FaultyDevice(capabilities)


def main() -> None:
    folder, *arguments = sys.argv[1:]
    load_main(folder)._make_package()
    import_module("device.leash").tie_to_parent()
    arithmetic, registry = import_module("device.arithmetic"), import_module("device.registry")
    host = import_module("device.host")
    socket = int(arguments[arguments.index("--socket") + 1])
    registry.create = lambda name: faulty_device(arithmetic, arithmetic.CAPABILITIES, socket)
    host.PROTOCOL = int(os.environ.get("FAULTY_PROTOCOL", host.PROTOCOL))
    host.main(arguments)


if __name__ == "__main__":
    main()
