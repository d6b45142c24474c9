"""The XLA/TPU image's own variables. They start the same server: TPUs are not driven here.

`HF_BATCH_SIZE`, `HF_SEQUENCE_LENGTH`, `MAX_BATCH_SIZE` and `QUANTIZATION` stand in the table of arguments, because the
Neuron images had most of them too.
"""

from __future__ import annotations

from neuronserve.neuron_worker.values import boolean

from .arguments import Argument

_NAMES = {
    "SKIP_WARMUP": "every shape is prepared before the server is ready, or the first requests would wait for it",
    "DBG_COMPILE": "every shape that is prepared is in the log anyway",
    "JETSTREAM_PT_DISABLE": "there is one engine here, and it is not JetStream",
}

ARGUMENTS = tuple(
    Argument(name.lower(), "", boolean, fate="no effect", why=why, variables=(name,), has_flag=False, harmless=(False,))
    for name, why in _NAMES.items()
)
