"""Settings that contradict each other are refused: the rule, both values, and what to do."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server.launcher.main import settle
from neuronserve.server.launcher.model import Export, Model
from neuronserve.server.launcher.reading import read

SMALL = Model("m", positions=8192)
EXPORTED = Model("m", positions=8192, export=Export(4, 2048, 2, "bf16"))


class Case(NamedTuple):
    flags: str
    message: str
    environ: dict[str, str] = {}  # noqa: RUF012
    model: Model = SMALL


CASES = {
    "two names of the input limit": Case(
        "--max-input-tokens 10 --max-input-length 20 --max-total-tokens 100",
        "Both `max_input_tokens` (10) and `max_input_length` (20) are set. Please define only `max_input_tokens` as "
        "`max_input_length is deprecated for naming consistency.",
    ),
    "the same, one of them from an image's variable": Case(
        "--max-input-length 20 --max-total-tokens 100",
        "Both `max_input_tokens` (10) and `max_input_length` (20) are set.",
        {"MAX_INPUT_TOKENS": "10"},
    ),
    "an input above the total": Case(
        "--max-input-tokens 200 --max-total-tokens 100",
        "`max_input_tokens`(200) must be < `max_total_tokens`(100): an input of the whole total leaves no room for an "
        "answer; set --max-input-tokens to 99 or less, or raise --max-total-tokens",
    ),
    "an input above what the model holds": Case(
        "",
        "`max_input_tokens`(9000) must be < `max_total_tokens`(8192): an input of the whole total leaves no room for "
        "an answer; set MAX_INPUT_LENGTH to 8191 or less",
        {"MAX_INPUT_LENGTH": "9000"},
    ),
    "an input of the whole total": Case(
        "--max-total-tokens 2048",
        "`max_input_tokens`(2048) must be < `max_total_tokens`(2048): an input of the whole total leaves no room for "
        "an answer; set MAX_INPUT_LENGTH to 2047 or less, or raise --max-total-tokens",
        {"MAX_INPUT_LENGTH": "2048"},
    ),
    "an input of the export's whole length": Case(
        "--max-input-tokens 2048",
        "`max_input_tokens`(2048) must be < `max_total_tokens`(2048)",
        model=EXPORTED,
    ),
    "a total with no room for an answer": Case(
        "--max-total-tokens 1", "`max_total_tokens`(1) must hold an input and an answer: set --max-total-tokens to 2"
    ),
    "a total above the model": Case(
        "--max-total-tokens 9000",
        "`max_total_tokens`(9000) must be <= the model's own limit of 8192 positions; set --max-total-tokens to 8192",
    ),
    "a total above the batch's": Case(
        "--max-total-tokens 2048 --max-batch-total-tokens 1024",
        "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 2048 and 1024; leave --max-batch-total-tokens "
        "out, or set it to a multiple of 2048",
    ),
    "a prefill that holds no prompt": Case(
        "--max-input-tokens 512 --max-total-tokens 1024 --max-batch-prefill-tokens 256",
        "`max_batch_prefill_tokens` must be >= `max_input_tokens`. Given: 256 and 512; raise "
        "--max-batch-prefill-tokens to 512, or leave it out",
    ),
    "a batch total that is no product": Case(
        "--max-batch-size 4 --max-total-tokens 1024 --max-batch-total-tokens 8192",
        "`--max-batch-total-tokens` must be set to `max_tokens`, batch size times length: "
        "--max-batch-total-tokens=8192, and 4 (--max-batch-size) times 1024 is 4096; leave --max-batch-total-tokens "
        "out, or set it to 4096",
    ),
    "a batch total that is not the export's": Case(
        "",
        "MAX_BATCH_TOTAL_TOKENS=4096, and 4 (the export) times 2048 is 8192",
        {"MAX_BATCH_TOTAL_TOKENS": "4096"},
        EXPORTED,
    ),
    "another batch than the export's": Case(
        "",
        "`--max-batch-size` must be set to `batch size`: MAX_BATCH_SIZE=8, and the export's batch size is 4; leave "
        "MAX_BATCH_SIZE out, or set it to 4",
        {"MAX_BATCH_SIZE": "8"},
        EXPORTED,
    ),
    "longer than the export": Case(
        "--max-total-tokens 4096",
        "`--max-total-tokens` must be set to `max_length` (it is per-request): --max-total-tokens=4096, and the "
        "export's sequence length is 2048; leave --max-total-tokens out, or set it to 2048",
        model=EXPORTED,
    ),
    "other cores than the export's": Case(
        "",
        "HF_NUM_CORES=8, and the export's number of cores is 2; leave HF_NUM_CORES out, or set it to 2",
        {"HF_NUM_CORES": "8"},
        EXPORTED,
    ),
    "another type than the export's": Case(
        "",
        "HF_AUTO_CAST_TYPE=float16, and the export's type is bfloat16",
        {"HF_AUTO_CAST_TYPE": "fp16"},
        EXPORTED,
    ),
    "two variables of one setting": Case(
        "",
        "MAX_BATCH_SIZE=4 and HF_BATCH_SIZE=1 are one setting and disagree: define only MAX_BATCH_SIZE",
        {"MAX_BATCH_SIZE": "4", "HF_BATCH_SIZE": "1"},
    ),
    "two keys": Case(
        "", "API_KEY and VLLM_API_KEY are one setting and disagree", {"API_KEY": "x", "VLLM_API_KEY": "y"}
    ),
    "a flag and a variable of another name": Case(
        "--max-batch-size 8",
        "--max-batch-size=8 and HF_BATCH_SIZE=4 are one setting and disagree: define only --max-batch-size",
        {"HF_BATCH_SIZE": "4"},
    ),
    "the same of the length": Case(
        "--max-total-tokens 1024",
        "--max-total-tokens=1024 and HF_SEQUENCE_LENGTH=2048 are one setting and disagree",
        {"MAX_TOTAL_TOKENS": "512", "HF_SEQUENCE_LENGTH": "2048"},
    ),
    "the same of the type": Case(
        "--dtype float16",
        "--dtype=float16 and HF_AUTO_CAST_TYPE=bfloat16 are one setting and disagree",
        {"HF_AUTO_CAST_TYPE": "bf16"},
    ),
    "the same, of SageMaker": Case(
        "--max-batch-size 8", "--max-batch-size=8 and SM_ON_BATCH_SIZE=4 are one setting", {"SM_ON_BATCH_SIZE": "4"}
    ),
    "no workers": Case("--validation-workers 0", "`validation_workers` must be > 0"),
    "no batch": Case("--max-batch-size 0", "`max_batch_size` must be > 0"),
    "no number": Case("", "MAX_TOTAL_TOKENS='many': expected a whole number", {"MAX_TOTAL_TOKENS": "many"}),
    "no port": Case("--port 70000", "--port='70000': expected a port, 1 to 65535"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused(name: str) -> None:
    case = CASES[name]

    with pytest.raises(ConfigError) as refusal:
        settle(read(case.flags.split(), case.environ), model=case.model)

    assert case.message in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "environ", "model"),
    [
        # Two names that agree, as an image that fills in what is missing leaves them.
        ("--max-input-length 512 --max-total-tokens 1024", {"MAX_INPUT_TOKENS": "512"}, SMALL),
        ("", {"MAX_BATCH_SIZE": "4", "HF_BATCH_SIZE": "4"}, SMALL),
        ("--max-batch-size 4", {"HF_BATCH_SIZE": "4"}, SMALL),
        # A flag wins over the variable of its own name.
        ("--max-batch-size 8 --dtype fp16", {"MAX_BATCH_SIZE": "4", "DTYPE": "bf16"}, SMALL),
        # Everything the export says, said once more.
        (
            "--max-batch-size 4 --max-total-tokens 2048 --max-input-tokens 2047 --max-batch-total-tokens 8192",
            {"HF_NUM_CORES": "2", "HF_AUTO_CAST_TYPE": "bfloat16"},
            EXPORTED,
        ),
        # Less than the export holds.
        ("--max-batch-size 2 --max-batch-total-tokens 4096", {"HF_NUM_CORES": "1"}, EXPORTED),
        # The number of requests at a time is no batch.
        ("--max-concurrent-requests 512 --max-batch-size 2", {}, SMALL),
        # No document's prefill rule is every document's.
        ("--max-batch-size 4 --max-total-tokens 2048 --max-batch-prefill-tokens 100000", {}, SMALL),
        # The model's own limit counts for what it was given.
        ("--max-total-tokens 8192", {}, SMALL),
    ],
)
def test_what_contradicts_nothing_is_served(flags: str, environ: dict[str, str], model: Model) -> None:
    settle(read(flags.split(), environ), model=model)
