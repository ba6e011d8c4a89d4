"""What a run directory's small objects contain, as typed values."""

from __future__ import annotations

import time
import uuid
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from prefect_elastic_train.core.bounds import as_json
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome

SCHEMA_VERSION = 2  # what this version of the package writes; what an older one has written is refused

Record = TypeVar("Record", bound="_Record")


# Another version of this package may have written more fields than we know.
class _Record(BaseModel, extra="ignore", frozen=True, ser_json_inf_nan="constants"):
    schema_version: int = SCHEMA_VERSION


class Owner(_Record):
    """The flow run that an attempt works for, and the driver process that does it."""

    flow_run_id: str
    flow_name: str = ""
    flow_run_name: str = ""
    deployment_id: str = ""
    deployment_name: str = ""
    host: str = ""
    pid: int = 0
    #: As :func:`runs.liveness.process_start` says, by which a process is told from a later one of the same id.
    process_started_at: float = 0.0
    #: The call of ``elastic_train`` that started the driver; a flow run that was resumed has a new one.
    supervisor: str = ""
    #: Number of the flow run's execution, as Prefect counts them from 1; 0: not known.
    execution: int = 0
    job: str = ""  # submission id of the Ray job that the driver is; empty for a process of the flow's own machine

    @property
    def is_flow_run(self) -> bool:
        """Whether there is such a flow run; outside of flows the id stands for the call of ``elastic_train``."""
        return bool(self.flow_run_name)

    def describe(self) -> str:
        """The flow run in words, for an error message."""
        name = f"flow run {self.flow_run_name!r}" if self.is_flow_run else "a training outside of a flow"
        of_flow = f" of flow {self.flow_name!r}" if self.flow_name else ""
        return f"{name}{of_flow} (id {self.flow_run_id})"


class Fingerprint(_Record):
    """What tells one training from another; of the configuration a digest of each value."""

    loop: str
    #: Where the loop is imported from, ``<module or file>:<function>``; empty if it went by value. Only for telling
    #: loops of the same name apart: one that is moved is the same.
    path: str = ""
    framework: str
    config: dict[str, str] = Field(default_factory=dict)
    #: By key of the configuration, the types in its value that have no stable value and are digested by name only.
    opaque: dict[str, str] = Field(default_factory=dict)

    def may_be_loop_of(self, other: Fingerprint) -> bool:
        """Return whether the loop may be that of ``other``, as far as names and places tell."""
        paths = {path for path in (self.path, other.path) if path}
        return (self.loop, self.framework) == (other.loop, other.framework) and len(paths) <= 1

    def differences(self, other: Fingerprint) -> list[str]:
        """Return in words what differs in ``other``; empty if nothing does."""
        named = {"train loop": (self.loop, other.loop), "framework": (self.framework, other.framework)}
        found = [f"{what} {before!r} became {after!r}" for what, (before, after) in named.items() if before != after]
        for key in sorted(self.config.keys() | other.config.keys()):
            before, after = self.config.get(key), other.config.get(key)
            change = "was added" if before is None else "was removed" if after is None else "changed"
            found += [f"train_loop_config[{key!r}] {change}"] if before != after else []
        return found

    def uncompared(self, other: Fingerprint) -> str:
        """Return a warning naming the values that cannot be compared with those of ``other``; empty without any."""
        opaque = sorted((self.opaque | other.opaque).items())
        named = [f"train_loop_config[{key!r}] ({types})" for key, types in opaque if key in other.config]
        advice = "cannot be compared with what the run was trained with; if they changed, give another run_name"
        return f"{', '.join(named)} {advice}" if named else ""


class RunRecord(_Record):
    """``run.json``: what the run is and who created it."""

    name: str
    id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    created_at: float = Field(default_factory=time.time)
    creator: Owner
    fingerprint: Fingerprint
    resume_from: str = ""
    #: What ``resume_from`` came to, as ``<run>@<checkpoint folder>``: empty for nothing; None if it was not looked for.
    source: str | None = None
    #: Which training of its flow run it is, the same in each night's flow run; see :func:`runs.identity.training_part`.
    part: str = ""
    versions: dict[str, str] = Field(default_factory=dict)


class CompletedRuns(_Record):
    """``<storage>/.elastic_train/completed/…``: runs of one training of a deployment that completed, newest first."""

    runs: list[RunRecord] = Field(default_factory=list)


class AttemptRecord(_Record):
    """``attempts/<n>.json``: a driver attempt; its existence fences off all earlier ones."""

    attempt: int
    run_id: str = ""
    owner: Owner
    #: What it trained with, which a resumed run may have changed since it was created.
    fingerprint: Fingerprint | None = None
    started_at: float = Field(default_factory=time.time)
    confirmed: bool = True  # whether its base was the newest commit at a second look, too; until then it binds nobody
    #: Attempt and sequence of the commit that it starts from; None for the beginning.
    base: tuple[int, int] | None = None
    dropped: list[str] = Field(default_factory=list)
    repairs: list[str] = Field(default_factory=list)
    versions: dict[str, str] = Field(default_factory=dict)
    #: The metric by which it ranks checkpoints, the best last in its commits; empty for the newest.
    score_attribute: str = ""


class EndedRecord(_Record):
    """``ended/<n>.json``: how an attempt ended."""

    attempt: int
    outcome: str
    at: float = Field(default_factory=time.time)
    message: str = ""
    result: dict[str, Any] | None = None
    #: Which budget was used up after it, in words: no automatic restart follows, and a person's retry has fresh ones.
    verdict: str = ""


class CommitRecord(_Record):
    """``commits/<attempt>-<sequence>.json``: Ray's snapshot and the files of its checkpoints.

    The snapshot of an incremental commit has only ``added``: a snapshot of the checkpoints after an earlier full commit
    of the same attempt, whose sequence is ``since``.
    """

    attempt: int
    sequence: int
    at: float = Field(default_factory=time.time)
    trained: float = 0.0  # for how many seconds the worker groups of the attempt have trained by then
    snapshot: dict[str, Any]
    manifest: dict[str, dict[str, int]]  # for each checkpoint, path and size in bytes of its files


class Heartbeat(_Record):
    """``heartbeat.json``: a counter that moves while the attempt lives. Its times are for people only."""

    attempt: int
    beat: int
    interval_seconds: float
    at: float = Field(default_factory=time.time)


def encode(record: _Record) -> bytes:
    """A record as the bytes of its object."""
    return as_json(record, indent=1).encode()


def decode(record_type: type[Record], data: bytes | None) -> Record | None:
    """Read a record; None if there is none or if it is torn. One of an older version is refused."""
    if data is None:
        return None
    try:
        record = record_type.model_validate_json(data)
    except ValidationError:
        return None
    if record.schema_version < SCHEMA_VERSION:
        raise AttemptFailedError(
            f"the run was written by an older version of prefect-elastic-train (schema {record.schema_version}, this "
            f"one reads {SCHEMA_VERSION}); go on with that version, or give another run_name",
            outcome=Outcome.INVALID,
        )
    return record
