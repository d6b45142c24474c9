"""vLLM's executor of one worker, which calls it directly: the one call that every step makes takes no detour.

vLLM's own goes by the method's name, through a wrapper, to a future with a lock and a condition. All of it is code and
memory that a step finds cold, after the device has read a hundred megabytes of weights: 50 us of 300. It can go when
vLLM's calls its worker directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Done:
    """What vLLM asks of a future, where the result is there: nobody waits for it, so nothing to wait with is made."""

    known: Any

    def result(self, timeout: float | None = None) -> Any:
        return self.known

    def exception(self, timeout: float | None = None) -> None:
        return None

    def done(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)


class NeuronExecutor(UniProcExecutor):
    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """An exception comes at once, as vLLM's does when a step has failed by the time it is asked for."""
        output = self.driver_worker.worker.execute_model(scheduler_output)
        return Done(output) if non_block else output
