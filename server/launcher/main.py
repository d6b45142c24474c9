"""`text-generation-launcher`: TGI's command line on this engine.

    arguments, variables ─ read ─▶ Asked ─ deduce ─▶ Settings ─ check ─ command ─▶ `vllm serve …` ─ start ─▶ the server
                                     model's files ──┘

Until the last step neither vLLM nor torch is loaded, so `--help` and a refusal are quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from neuronserve.neuron_worker.errors import ConfigError

from . import checks, sagemaker
from .command import Command, command, is_json, look
from .deduce import Settings, deduce
from .model import Model
from .model import look as look_at_model
from .reading import Asked, read
from .start import become, say, table

NO_MODEL = "No model id provided ! Either specify it using --model-id cmdline or MODEL_ID env var"


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return launch(list(sys.argv[1:] if argv is None else argv), os.environ)
    except ConfigError as error:
        text = str(error).replace('"', '\\"')  # as TGI's launcher quotes its own
        print(f'Error: ArgumentValidation("{text}")', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def launch(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    words, is_sagemaker = sagemaker.without_serve(argv)
    environ = sagemaker.environment(environ) if is_sagemaker else environ
    asked = read(words, environ)
    if asked.wants_environment:
        print(runtime(environ))
        return 0
    settings = settle(asked, is_sagemaker)
    made, lines = prepare(settings, asked, environ)
    say(lines, is_json(settings))
    become(made, environ)


def settle(asked: Asked, is_sagemaker: bool = False, model: Model | None = None) -> Settings:
    """`model`: where its files have been read already."""
    checks.check_asked(asked)
    found = model or _model(asked, is_sagemaker)
    settings = deduce(asked, found, sagemaker.PORT if is_sagemaker else None)
    checks.check(settings, asked)
    return settings


def prepare(settings: Settings, asked: Asked, environ: Mapping[str, str]) -> tuple[Command, list[str]]:
    """(the command, the lines that say what it came from)."""
    device = look(settings, environ)
    made = command(settings, device, environ, asked.server_arguments)
    notes = [
        *asked.unused,
        *checks.idle(asked),
        *checks.remarks(settings, asked),
        *checks.warnings(settings.model),
        *made.notes,
    ]
    return made, [*table(settings, device.max_num_seqs), *notes]


def _model(asked: Asked, is_sagemaker: bool) -> Model:
    name = asked.text("model_id") or sagemaker.model_directory()
    if name is None:
        raise ConfigError(sagemaker.NO_MODEL if is_sagemaker else NO_MODEL)
    if (token := asked.text("hf_token")) is not None:  # the hub's library reads it there, whatever it was called
        os.environ["HF_TOKEN"] = token
    cache = asked.text("weights_cache_override") or asked.text("huggingface_hub_cache")
    return look_at_model(name, asked.text("revision"), cache)


def runtime(environ: Mapping[str, str]) -> str:
    """For --env."""
    from neuronserve.neuron_worker import doctor

    return f"Runtime environment:\n{doctor.examine({}, environ).text}"


if __name__ == "__main__":
    sys.exit(main())
