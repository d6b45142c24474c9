"""From what was asked, and what the model's files say, to every setting of the server: each with where it came from.

    deduce(asked, model) ──▶ Settings     a flag > a variable > the export > what follows from the others > the default

Batch and cores are the exceptions: an export holds at most its batch and runs on its own cores alone. So a smaller
batch is taken as asked, fewer cores are the export's, and what is more than the export's is left for `checks`. Pure;
refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .arguments import BY_NAME
from .model import Export, Model
from .reading import Asked

LONGEST_BY_DEFAULT = 4096
"""TGI's, for models that could do more."""

BATCH = "max_num_seqs"
INPUT = "max_input_tokens"
TOTAL = "max_total_tokens"
LENGTH = "max_model_len"
PREFILL = "max_batch_prefill_tokens"
BATCH_TOTAL = "max_batch_total_tokens"
CORES = "num_cores"


@dataclass(frozen=True)
class Chosen:
    value: object  # None: left to the device
    origin: str

    @property
    def is_given(self) -> bool:
        return self.origin.startswith("--") or self.origin.isupper()


@dataclass(frozen=True)
class Settings:
    """Filled by `deduce`, in the order they are printed."""

    values: Mapping[str, Chosen]
    model: Model

    def __getitem__(self, name: str) -> Chosen:
        return self.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def value(self, name: str) -> object:
        return self.values[name].value

    def number(self, name: str) -> int | None:
        value = self.value(name)
        return None if value is None else int(str(value))

    def text(self, name: str) -> str | None:
        value = self.value(name)
        return None if value is None else str(value)


def deduce(asked: Asked, model: Model, port: int | None = None) -> Settings:
    """`port`: the default where a platform has its own."""
    values = {
        "model_id": _given(asked, "model_id") or Chosen(model.name, "the model's directory"),
        "revision": _plain(asked, "revision"),
        "dtype": _dtype(asked, model.export),
        "quantize": _plain(asked, "quantize"),
        CORES: _cores(asked, model.export) or Chosen(1, "default"),
    }
    values |= _sizes(asked, model)
    values["max_concurrent_requests"] = _plain(asked, "max_concurrent_requests")
    values["hostname"] = _plain(asked, "hostname")
    values["port"] = _given(asked, "port") or (_plain(asked, "port") if port is None else Chosen(port, "SageMaker"))
    for name, argument in BY_NAME.items():
        is_other = argument.fate == "used" and name not in (*values, "max_batch_size", "max_input_length")
        if is_other:
            values[name] = _plain(asked, name)
    return Settings(values, model)


def _sizes(asked: Asked, model: Model) -> dict[str, Chosen]:
    batch = _batch(asked, model.export)
    total = _total(asked, model)
    length = _of_export(model.export, "sequence_length") or Chosen(total.value, TOTAL)
    if batch is None:
        batch = _quotient(asked, BATCH_TOTAL, total, f"{BATCH_TOTAL} / {TOTAL}") or Chosen(None, "the device's default")
    longest = _longest(asked)
    return {
        BATCH: batch,
        LENGTH: length,
        TOTAL: total,
        INPUT: longest or Chosen(int(str(total.value)) - 1, f"{TOTAL} - 1"),
        PREFILL: _given(asked, PREFILL) or Chosen(None, "the device's default"),
        BATCH_TOTAL: _given(asked, BATCH_TOTAL) or Chosen(None, "the batch times its length"),
    }


def _batch(asked: Asked, export: Export | None) -> Chosen | None:
    given, held = _given(asked, "max_batch_size"), _of_export(export, "batch_size")
    return given if _is_less(given, held) else held or given


def _cores(asked: Asked, export: Export | None) -> Chosen | None:
    """What was asked is the least, as in TGI's own entrypoint."""
    given, made_for = _given(asked, CORES), _of_export(export, "num_cores")
    return made_for if _is_less(given, made_for) else given or made_for


def _is_less(one: Chosen | None, other: Chosen | None) -> bool:
    return one is not None and other is not None and int(str(one.value)) < int(str(other.value))


def _total(asked: Asked, model: Model) -> Chosen:
    given = _given(asked, TOTAL) or _of_export(model.export, "sequence_length")
    if given is not None:
        return given
    batch = _batch(asked, model.export)
    if batch is not None and (found := _quotient(asked, BATCH_TOTAL, batch, f"{BATCH_TOTAL} / {BATCH}")) is not None:
        return found
    return _total_by_default(asked, model)


def _total_by_default(asked: Asked, model: Model) -> Chosen:
    """Where only the input is given and the default does not hold it: as much again for the answer, if there is room.

    TGI's entrypoint goes the other way: of a total that is known, half is the input's.
    """
    room = [] if model.positions is None else [Chosen(model.positions, "the model's config.json")]
    found = _least(*room, Chosen(LONGEST_BY_DEFAULT, "default"))
    longest = _longest(asked)
    if longest is None or _is_less(longest, found):
        return found
    if (batch_total := asked.get(BATCH_TOTAL)) is not None:
        room.append(Chosen(batch_total.value, BATCH_TOTAL))
    return _least(Chosen(2 * int(str(longest.value)), f"2 x {INPUT}"), *room)


def _longest(asked: Asked) -> Chosen | None:
    return _given(asked, INPUT) or _given(asked, "max_input_length")


def _least(*choices: Chosen) -> Chosen:
    return min(choices, key=lambda choice: int(str(choice.value)))


def _quotient(asked: Asked, name: str, by: Chosen, origin: str) -> Chosen | None:
    """None where it comes to nothing, which `checks` refuses by the two values."""
    given, divisor = asked.get(name), int(str(by.value))
    if given is None or divisor < 1:
        return None
    found = int(str(given.value)) // divisor
    return Chosen(found, origin) if found else None


def _dtype(asked: Asked, export: Export | None) -> Chosen:
    cast = _of_export(export, "auto_cast_type")
    return _first(_given(asked, "dtype"), cast and Chosen(_spelled(cast), cast.origin), Chosen("auto", "default"))


def _spelled(cast: Chosen) -> object:
    from neuronserve.neuron_worker.served_types import spell_dtype

    return spell_dtype(cast.value)


def _given(asked: Asked, name: str) -> Chosen | None:
    found = asked.get(name)
    return None if found is None else Chosen(found.value, found.origin)


def _of_export(export: Export | None, field: str) -> Chosen | None:
    value = None if export is None else getattr(export, field)
    return None if value is None else Chosen(value, "the export")


def _plain(asked: Asked, name: str) -> Chosen:
    return _given(asked, name) or Chosen(BY_NAME[name].default, "default")


def _first(*choices: Chosen | None) -> Chosen:
    return next(choice for choice in choices if choice is not None)
