"""The loop's name of a checkpoint and its folder's, which is never used twice."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.core.checkpoint_names import age_of, loop_name, physical_name, written_by
from prefect_elastic_train.loop import RunContext
from prefect_elastic_train.worker.checkpoints import use_unique_folders
from prefect_elastic_train.worker.worker_callbacks import WorkerHooks

_numbers = st.tuples(st.integers(0, 20_000), st.integers(0, 300), st.integers(0, 20_000))


@given(st.text(min_size=1), st.text(min_size=1), _numbers, _numbers)
def test_folders_differ_and_lead_back_to_name_and_attempt(
    name: str, other: str, numbers: tuple[int, int, int], others: tuple[int, int, int]
) -> None:
    folder = physical_name(name, *numbers)
    assert (loop_name(folder), written_by(folder), age_of(folder)) == (name, numbers[0], numbers)
    assert (folder == physical_name(other, *others)) == ((name, numbers) == (other, others))


def test_any_other_folder_is_its_own_name_and_nobodys() -> None:
    for folder in ("checkpoint_2026-11-22", "epoch-3.a0001", "epoch.a01.g01.r0001", ".a0001.g01.r0001", ""):
        assert (loop_name(folder), written_by(folder)) == (folder, -1)


def test_a_worker_takes_the_folder_that_the_ranks_agree_on_and_never_offers_one_twice() -> None:
    sent: list[str] = []

    def agree(name: str) -> str:
        sent.append(name)
        return sent[0]

    storage = SimpleNamespace(make_default_checkpoint_dir_name=lambda: "checkpoint_now")
    worker: Any = SimpleNamespace(_sync_checkpoint_dir_name_across_ranks=agree, storage_context=storage)
    use_unique_folders(worker, 3, 2)
    for name in ("latest", "latest/", None, f"a/{'ü' * 200}"):
        assert worker._sync_checkpoint_dir_name_across_ranks(name) == "latest.a0003.g02.r0001"
    assert sent[:3] == ["latest.a0003.g02.r0001", "latest.a0003.g02.r0002", "checkpoint_now.a0003.g02.r0003"]
    assert (sent[3][:3], sent[3][-16:]) == ("a/ü", "ü.a0003.g02.r0004"[-16:])
    assert len(sent[3].rpartition("/")[2].encode()) in (254, 255), "what is too long for a disk is cut"


def test_each_worker_group_of_an_attempt_has_another_number() -> None:
    callback = WorkerHooks(RunContext("run", "", 1, "", ""))
    assert [(callback.begin_group(0), callback.group) for _ in range(2)] == [(None, 1), (None, 2)]
