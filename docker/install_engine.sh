#!/bin/sh
# The engine's environment in an image: what serves, and nothing of the tests. From a checkout, to the folder given.
#
#     install_engine.sh PYTHON FOLDER
set -eu

python=$1
folder=$2
source=$(cd "$(dirname "$0")/.." && pwd)

"$python" "$source/scripts/set_up.py" --product --venv "$folder"
# The wheel of vLLM is for `make wheelhouse`; what pip kept is of no use in an image.
rm -rf "$folder/wheels" "${HOME:-/root}/.cache/pip"
