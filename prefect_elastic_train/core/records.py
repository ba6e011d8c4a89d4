"""Contents of a run directory's small objects, as typed values. Belongs to all processes."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from .outcomes import AttemptFailedError
from .size_limits import as_json

#: Schema of the records that this version of the package writes.
SCHEMA_VERSION = 3
#: Oldest schema of records that this version reads: that of version 0.1.0.
OLDEST_SCHEMA_VERSION = 3

Record = TypeVar("Record", bound="_Record")


# Another version of this package may have written more fields of the same schema.
class _Record(BaseModel, extra="ignore", frozen=True, ser_json_inf_nan="constants"):
    schema_version: int = SCHEMA_VERSION


class Owner(_Record):
    """The flow run that an attempt belongs to, and its driver process."""

    flow_run_id: str
    flow_name: str = ""
    flow_run_name: str = ""
    deployment_id: str = ""
    deployment_name: str = ""
    host: str = ""
    pid: int = 0
    #: From :func:`runs.heartbeat.process_start`, to distinguish the process from a later one with the same id.
    process_started_at: float = 0.0
    #: Id of the call of ``elastic_train`` that started the driver; a resumed flow run has a new one.
    supervisor: str = ""
    #: Number of the flow run's execution, counted by Prefect from 1; 0: unknown.
    execution: int = 0
    job: str = ""  # submission id of the driver's Ray job; empty for a process on the flow's machine

    @property
    def is_flow_run(self) -> bool:
        """True if the owner is a flow run.

        Outside of flows, ``flow_run_id`` is the id of the call of ``elastic_train``.
        """
        return bool(self.flow_run_name)

    def describe(self) -> str:
        """Return name, flow and id of the owner's flow run as text for an error message."""
        name = f"flow run {self.flow_run_name!r}" if self.is_flow_run else "a training outside of a flow"
        of_flow = f" of flow {self.flow_name!r}" if self.flow_name else ""
        return f"{name}{of_flow} (id {self.flow_run_id})"


class Fingerprint(_Record):
    """Identity of a training: its loop, its framework, and a digest of each value of its configuration."""

    loop: str
    #: Import path of the loop, ``<module or file>:<function>``; empty if it was pickled by value. It only
    #: distinguishes loops of the same name: a loop that was moved is the same.
    path: str = ""
    framework: str
    config: dict[str, str] = {}
    #: Types in values of the configuration that have no stable digest and are compared by name only, by key.
    opaque: dict[str, str] = {}

    def may_be_loop_of(self, other: Fingerprint) -> bool:
        """Return True if the train loops of this fingerprint and of ``other`` may be the same.

        Their names and frameworks must be equal. Their import paths must be equal if both are known.
        """
        may_be_same_path = self.path == other.path or "" in (self.path, other.path)
        return may_be_same_path and (self.loop, self.framework) == (other.loop, other.framework)

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the changes of loop, framework and configuration from this fingerprint to ``other``, each as text.

        The list is empty for the same training.
        """
        changes = []
        if self.loop != other.loop:
            changes.append(f"train loop {self.loop!r} became {other.loop!r}")
        if self.framework != other.framework:
            changes.append(f"framework {self.framework!r} became {other.framework!r}")
        for key in sorted(dict(self.config.items() ^ other.config.items())):
            change = "changed" if key in self.config else "was added"
            if key not in other.config:
                change = "was removed"
            changes.append(f"train_loop_config[{key!r}] {change}")
        return changes

    def uncompared(self, other: Fingerprint) -> str:
        """Return a warning about values of the configuration that have no stable digest; empty if there are none.

        Such a value cannot be compared with that of the same name in the fingerprint ``other``.
        """
        opaque = sorted((self.opaque | other.opaque).items())
        keys = [f"train_loop_config[{key!r}] ({types})" for key, types in opaque if key in other.config]
        advice = "cannot be compared with those that the run was trained with; if they changed, use another run_name"
        return f"{', '.join(keys)} {advice}" if keys else ""


class RunRecord(_Record):
    """``run.json``: identity of the run and its creator.

    ``<storage>/.elastic_train/completed/…`` has copies of it for the newest completed runs.
    """

    name: str
    id: str
    created_at: float = Field(default_factory=time.time)
    creator: Owner
    fingerprint: Fingerprint
    resume_from: str = ""
    #: The checkpoint that ``resume_from`` selected, as ``<run>@<folder>``; empty: there was none; None: not searched.
    source: str | None = None
    #: Name of the training within its flow, the same in each flow run; see :func:`runs.fingerprints.training_name`.
    training_name: str = ""
    versions: dict[str, str] = {}


class AttemptRecord(_Record):
    """``attempts/<n>.json``: the start of an attempt. The existence of this object fences off all earlier attempts."""

    attempt: int
    run_id: str = ""
    owner: Owner
    #: Fingerprint of this attempt, which may differ from the run's after a resume.
    fingerprint: Fingerprint | None = None
    started_at: float = Field(default_factory=time.time)
    confirmed: bool = True  # ``base`` was still the newest commit at a second read; until then it is ignored
    #: Attempt and sequence of the commit that it starts from; None: from scratch.
    base: tuple[int, int] | None = None
    dropped: list[str] = []
    repairs: list[str] = []
    versions: dict[str, str] = {}
    #: The metric that ranks its checkpoints, best last in its commits; empty: by age.
    score_attribute: str = ""


class EndedRecord(_Record):
    """``ended/<n>.json``: the outcome, message and result of an attempt that has ended."""

    attempt: int
    outcome: str
    at: float = Field(default_factory=time.time)
    message: str = ""
    result: dict[str, Any] | None = None
    #: Message about the budget that the attempt exhausted; empty if none. No automatic restart follows an exhausted
    #: budget, and a manual retry has new budgets.
    exhausted_budget: str = ""


class CommitRecord(_Record):
    """``commits/<attempt>-<sequence>.json``: a commit, with Ray Train's snapshot and the files of its checkpoints.

    The snapshot of an incremental commit lists only the checkpoints after those of the full commit of the same attempt
    with sequence ``since``.
    """

    attempt: int
    sequence: int
    at: float = Field(default_factory=time.time)
    trained: float = 0.0  # seconds that the worker groups of the attempt had trained
    since: int = 0  # 0: a full commit
    snapshot: dict[str, Any]
    manifest: dict[str, dict[str, int]]  # by checkpoint folder: path and size in bytes of each file

    @property
    def id(self) -> tuple[int, int]:
        """The attempt that wrote the commit, and the commit's sequence number in that attempt."""
        return self.attempt, self.sequence

    @property
    def latest(self) -> Any:
        """Ray's result of the latest checkpoint, with ``checkpoint_dir_name`` and ``metrics``.

        Restarted worker groups and new attempts start from this checkpoint.
        """
        return self.snapshot["latest_checkpoint_result"]

    @property
    def checkpoint(self) -> str:
        """Name of the latest checkpoint's folder."""
        return str(self.latest["checkpoint_dir_name"])


class Heartbeat(_Record):
    """``heartbeat.json``: the time at which the driver of an attempt last wrote it."""

    attempt: int
    at: float = Field(default_factory=time.time)


def encode(record: _Record) -> bytes:
    """Return a record as the bytes of its object in the run directory."""
    return as_json(record).encode()


def decode(record_type: type[Record], data: bytes | None) -> Record | None:
    """Return the record of a type that an object's bytes hold; None if there are no bytes or if they are torn.

    Raises:
        AttemptFailedError: A version of this package with another schema wrote the record; outcome ``invalid``.
    """
    if data is None:
        return None
    try:
        version = _Record.model_validate_json(data).schema_version
        if OLDEST_SCHEMA_VERSION <= version <= SCHEMA_VERSION:
            return record_type.model_validate_json(data)
    except ValidationError:
        return None
    raise AttemptFailedError(
        f"the run was written by another version of prefect-elastic-train (schema {version}, this one reads "
        f"{OLDEST_SCHEMA_VERSION} to {SCHEMA_VERSION}); continue with that version, or use another run_name"
    )
