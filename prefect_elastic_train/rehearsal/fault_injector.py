"""Scenarios of a rehearsal: an undisturbed training, and one into which faults are injected."""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise

import psutil

from prefect_elastic_train.core.request import DRIVER_MODULE

from .certificate import InjectedFault
from .sandbox import Sandbox, Scenario
from .schedule import DRAIN, DRIVER, FREEZE, GROWTH, NODE, STORAGE, WORKER, PlannedFault
from .trace import Trace

#: Duration of the faults that end: an outage of the storage, and the time until a drained node is killed.
_FAULT_SECONDS = {STORAGE: 6.0, DRAIN: 20.0}


def run_undisturbed(trace: Trace, seconds: float) -> Scenario:
    """Scenario without faults: let a training run for ``seconds`` after its first report, and then stop it.

    Without a checkpoint by then, it runs for twice that time. A failure of a worker also stops it.
    """
    while not trace.worker_failures:
        times = trace.progress_times
        if times and times[-1] - times[0] > (seconds if trace.saves else 2 * seconds):
            return
        yield


@dataclass
class FaultInjector:
    """Injector of the planned faults of a training in a rehearsal.

    Each fault is injected after a checkpoint that is newer than the recovery from the previous fault.

    Attributes:
        faults: The faults that are left to inject.
        counter: Name of the metric that counts the progress; empty: none.
        target: Progress at a checkpoint with which the training may stop, unless it is recovering from a fault.
        timeout_seconds: Time limit for the recovery from a fault, and from there to the next fault.
        log: Called with each line of progress.
        injected: The faults that were injected.
    """

    sandbox: Sandbox
    faults: list[PlannedFault]
    counter: str
    target: float
    timeout_seconds: float
    log: Callable[[str], None]
    injected: list[InjectedFault] = field(default_factory=list)

    def inject_faults(self, trace: Trace) -> Scenario:
        """Scenario with faults: inject the planned faults into a training one by one, and then stop it.

        The training is stopped when it is far enough, does not recover from a fault, or makes no progress in time.
        """
        min_save = 0
        since = time.monotonic()
        while not trace.saves or trace.saves[-1].progress(self.counter) < self.target:
            waited = time.monotonic() - since
            if waited > self.timeout_seconds:
                return
            has_new_save = any(save.number > min_save for save in trace.saves)
            if self.faults and has_new_save and waited > self.faults[0].wait_seconds:
                with suppress(psutil.Error):  # the target has exited by itself; the fault is tried again
                    yield from self._inject(self.faults[0], trace)
                    if not self.injected[-1].recovered:
                        return
                    min_save = len(trace.reports) + 1
                    since = time.monotonic()
            yield

    def _inject(self, fault: PlannedFault, trace: Trace) -> Scenario:
        """Inject one fault into a training, wait for new progress after it, and record the result in ``injected``.

        If the loop returned before it made new progress, the fault stays planned for the next training.
        """
        began_at = time.time()
        before = trace.model_copy(deep=True)
        cleanup = ExitStack()
        description = self._start(fault, trace, cleanup)
        self.log(f"{fault.kind}: {description}")
        recovered = False
        try:
            while not recovered and time.time() - began_at <= self.timeout_seconds:
                yield
                if time.time() - began_at > _FAULT_SECONDS.get(fault.kind, 0.0):
                    cleanup.close()
                    recovered = self._has_recovered(fault, before, trace)
        finally:
            cleanup.close()
            if recovered or not trace.is_complete:  # else the loop returned too early, and the next training repeats it
                times = [began_at, *(at for at in trace.progress_times if at > began_at), time.time()]
                injected = InjectedFault(
                    kind=fault.kind,
                    what=description,
                    recovered=recovered,
                    seconds=round(max(later - earlier for earlier, later in pairwise(times)), 1),
                    redone=trace.redone - before.redone,
                    workers=len(trace.ranks),
                )
                self.injected.append(injected)
                self.faults.remove(fault)
                self.log(f"{fault.kind}: {injected.outcome}")

    def _has_recovered(self, fault: PlannedFault, before: Trace, trace: Trace) -> bool:
        """Return True if a training has recovered from a fault.

        After an outage of the storage it must have a new checkpoint. After any other fault, a new worker group must
        have made progress; after a growth, with more workers.

        Args:
            fault: The fault.
            before: Trace of the training before the fault.
            trace: Trace of the training now.
        """
        if fault.kind == STORAGE:
            return any(save.number > len(before.progress_times) for save in trace.saves)
        is_new_group = trace.group_count > before.group_count and trace.progress_times[-1] >= trace.started_at
        return is_new_group and (fault.kind != GROWTH or len(trace.ranks) > len(before.ranks))

    def _start(self, fault: PlannedFault, trace: Trace, cleanup: ExitStack) -> str:
        """Begin a fault, such as killing a rank or adding a node, and return its description for the certificate.

        A function that ends the fault is added to ``cleanup``.
        Raise psutil.Error if the process to kill or suspend has exited.
        """
        if fault.kind in (WORKER, FREEZE):
            process_name, rank = fault.choose([*trace.ranks.items()])  # in the order of the ranks
            process = psutil.Process(int(process_name.rpartition(":")[2]))
            if fault.kind == WORKER:
                process.kill()
                return f"rank {rank} was killed"
            process.suspend()
            return f"rank {rank} was suspended"
        if fault.kind == DRIVER:
            drivers = [child for child in psutil.Process().children() if DRIVER_MODULE in child.cmdline()]
            if not drivers:
                raise psutil.NoSuchProcess(0)
            min(drivers, key=psutil.Process.create_time).kill()  # a younger one is the pre-started driver
            return "the driver was killed"
        if fault.kind == STORAGE:
            self.sandbox.outage.touch()
            cleanup.callback(self.sandbox.outage.unlink)
            return f"the storage did not answer for {_FAULT_SECONDS[STORAGE]:g} s"
        if fault.kind == GROWTH:
            self.sandbox.add_node()
            return "a node was added"
        node_id = fault.choose(self.sandbox.nodes.ids)
        if fault.kind == NODE:
            self._remove_node(node_id)
            return "a node was killed"
        self.sandbox.nodes.drain(node_id, _FAULT_SECONDS[DRAIN])
        cleanup.callback(self._remove_node, node_id)
        return f"a node was drained, and killed after {_FAULT_SECONDS[DRAIN]:g} s"

    def _remove_node(self, node_id: str) -> None:
        """Kill a node of the sandbox, and add another one if the training cannot continue without it."""
        self.sandbox.nodes.remove(node_id)
        if not self.sandbox.can_shrink:
            self.sandbox.add_node()
