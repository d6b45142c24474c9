"""`<python> <this folder> --backend ...`: the device's process, in an interpreter that has nothing of ours installed.

`remote.RemoteDevice` starts it. The package is made from its folder alone: neither the folder nor its parent may
lie on the path, where our module names (`platform`, `errors`, ...) would hide other people's.
Written for any Python 3, so that one that is too old can say so.
"""

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
NAME = "device"


def _make_package() -> None:
    import importlib.util

    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != FOLDER]
    spec = importlib.util.spec_from_file_location(
        NAME, os.path.join(FOLDER, "__init__.py"), submodule_search_locations=[FOLDER]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036
        version = sys.version.split()[0]
        sys.exit("{} is Python {}; the device's side needs 3.10 or newer".format(sys.executable, version))  # noqa: UP032
    _make_package()
    from importlib import import_module

    import_module(NAME + ".leash").tie_to_parent()
    try:
        host = import_module(NAME + ".host")
    except ImportError as error:
        sys.exit("{} cannot run the device's side: {}; it needs numpy".format(sys.executable, error))  # noqa: UP032
    host.main(sys.argv[1:])


if __name__ == "__main__":
    main()
