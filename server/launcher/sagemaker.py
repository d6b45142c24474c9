"""What SageMaker adds: the word `serve`, port 8080, a directory of model files, and variables of its own.

text-generation-launcher serve          what the platform runs
HF_MODEL_ID, HF_MODEL_REVISION, …       further names of TGI's variables, in the table of arguments
SM_ON_X_Y=v                             --x-y v of the server, of which SM_ON_MODEL and a few more are known by name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .arguments import ARGUMENTS as TGI_ARGUMENTS
from .arguments import Argument

PORT = 8080
MODEL_DIRECTORY = Path("/opt/ml/model")
NO_MODEL = "HF_MODEL_ID must be set"
PREFIX = "SM_ON_"

ARGUMENTS = (
    Argument(
        "sm_num_gpus",
        "",
        fate="no effect",
        why="it counts GPUs; HF_NUM_CORES says how many cores work as one",
        variables=("SM_NUM_GPUS",),
        has_flag=False,
    ),
    Argument(
        "sm_on_task",
        "",
        fate="refused",
        why="this server generates text: leave it out",
        variables=("SM_ON_TASK",),
        harmless=("generate", "text-generation"),
        has_flag=False,
    ),
    Argument(
        "sm_on_allow_non_cached_model",
        "",
        fate="no effect",
        why="a model that is not in the cache is compiled",
        variables=("SM_ON_ALLOW_NON_CACHED_MODEL",),
        has_flag=False,
    ),
)


def without_serve(argv: Sequence[str]) -> tuple[list[str], bool]:
    """(the arguments, whether SageMaker's word stood before them)."""
    if argv and argv[0] == "serve":
        return list(argv[1:]), True
    return list(argv), False


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without PORT, which an image may set for other hosts: SageMaker asks at its own."""
    return {name: value for name, value in environ.items() if name != "PORT"}


def model_directory(directory: Path = MODEL_DIRECTORY) -> str | None:
    """Where the platform has put the model's files, if it has."""
    return str(directory) if (directory / "config.json").is_file() else None


def server_arguments(environ: Mapping[str, str]) -> list[str]:
    """Of every SM_ON_ variable that the table does not know: an argument of the server; an empty one is a switch."""
    known = {variable for argument in (*TGI_ARGUMENTS, *ARGUMENTS) for variable in argument.variables}
    words: list[str] = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            flag = f"--{name.removeprefix(PREFIX).lower().replace('_', '-')}"
            words += [flag, environ[name]] if environ[name] else [flag]
    return words
