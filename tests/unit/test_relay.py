"""Events on their way from the controller to the driver and out of it, over real sockets and pipes."""

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from prefect_elastic_train.controller.event_queue import EventSender, ReceiverAddress
from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.size_limits import MAX_LINE_BYTES, whole_lines
from prefect_elastic_train.driver import event_relay
from prefect_elastic_train.driver.event_relay import EventOutput, EventReceiver, EventRecorder, LineStream
from prefect_elastic_train.report.run_report import RunReport
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.history import HistoryWriter, read_history
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.processes import wait_for
from tests.unit.support import SteppedStore, spec


class Inbox(EventReceiver):
    """A receiver that keeps what it received."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        super().__init__(self.events.append)

    def states(self) -> list[str]:
        """The states that it was told."""
        return [event.state for event in self.events if isinstance(event, ev.StateChanged)]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    """A listening driver."""
    with closing(Inbox()) as inbox:
        yield inbox


def test_events_arrive_in_order_all_that_were_sent_before_the_close_and_none_that_cannot_be_written(
    inbox: Inbox,
) -> None:
    sender = EventSender(inbox.address, lambda: None)
    for number in range(500):
        sender.put(ev.StateChanged(state=str(number)))
    sender.put(ev.LoopWarned(problem="ranks-wait", message="no such file: 'caf\udce9'"))
    sender.put(ev.StateChanged(state="last"))
    sender.close(5)
    sender.put(ev.StateChanged(state="too late"))
    wait_for(lambda: "last" in inbox.states(), 5, "the last event")
    assert inbox.states() == [*map(str, range(500)), "last"]


@pytest.mark.parametrize("key", ["", "wrong", "x" * 500])
def test_a_sender_without_the_key_is_not_heard_and_what_is_no_event_is_told_and_passed_over(
    inbox: Inbox, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    good, forged = (ev.StateChanged(state=state).model_dump_json() for state in ("good", "forged"))
    own = inbox.address.key
    for sent in (f"{key}\n{forged}\n", f'{own}\nnonsense\n{{"kind": "danced"}}\n{good}\n{good[:5]}'):
        with socket.create_connection(("127.0.0.1", inbox.address.port), timeout=5) as connection:
            connection.sendall(sent.encode())
    wait_for(inbox.states, 5, "the good event")
    inbox.finish(5)
    assert inbox.states() == ["good"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "cannot be read and is lost: b'nonsense" in caplog.text
    with closing(Inbox()) as other:
        assert other.address.key != own


def test_progress_is_dropped_and_lifecycle_is_not_until_a_sender_finds_its_driver_and_again_when_it_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lifecycle = [ev.StateChanged(state=str(number)) for number in range(50)]
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))  # nobody listens yet
        late.settimeout(10)

        def lines(count: int) -> list[bytes]:
            """Listen, return so many lines of what arrives, and break the connection off."""
            late.listen()
            connection, _ = late.accept()
            connection.settimeout(10)
            with connection, connection.makefile("rb") as file:
                return [file.readline() for _ in range(count)]

        sender = EventSender(ReceiverAddress(late.getsockname()[1], "key"), lambda: None)
        started = time.monotonic()
        for number in range(3000):
            sender.put(ev.ControllerAlive(doing="RUNNING", seconds=number))
        for event in lifecycle:
            sender.put(event)
        assert time.monotonic() - started < 2, "sending held up the controller"
        key, *rest = lines(1 + 1000 + 50)
        assert key == b"key\n"
        events = [ev.decode_event(line) for line in rest]
        assert [event.seconds for event in events[:1000] if isinstance(event, ev.ControllerAlive)] == [*range(1000)]
        assert events[1000:] == lifecycle
        for number in range(5):  # what is on its way when a connection breaks may be lost
            sender.put(ev.StateChanged(state=f"later-{number}"))
            time.sleep(0.02)
        key, line = lines(2)
        assert (key, b"later-" in line) == (b"key\n", True)
    sender.put(ev.StateChanged(state="unheard"))
    started = time.monotonic()
    sender.close(0.3)
    assert time.monotonic() - started < 2
    assert "2000 events were dropped" in caplog.text


def test_lines_of_several_threads_and_events_leave_whole(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w") as file:
        output = EventOutput(file)
    stream = LineStream(output.write_text, 1)

    def chat(name):
        for number in range(300):
            for piece in (f"<{name} ", str(number), " " + name * 50, ">\n"):
                stream.write(piece)
            output.put(ev.StateChanged(state=f"{name}{number}"))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(chat, "abcd"))
    output.close(10)
    written = {*(tmp_path / "output").read_text().splitlines()} - {""}
    events = {line for line in written if line.startswith(ev.EVENT_TAG)}
    said = [(name, number) for name in "abcd" for number in range(300)]
    states = {ev.decode_event(line.removeprefix(ev.EVENT_TAG)).state for line in events}
    assert states == {f"{name}{number}" for name, number in said}
    assert written - events == {f"<{name} {number} {name * 50}>" for name, number in said}


def test_a_stream_stands_in_for_standard_output_and_hands_lines_on_when_they_are_complete() -> None:
    written = []
    stream = LineStream(written.append, 7)
    assert stream.write("one ") == 4
    stream.write("two\nthree\nfo")
    assert written == []
    print("u", "r", sep="", file=stream, flush=True)
    assert written == ["one two\nthree\nfour\n"], "whole, since what the first line is, the others are, too"
    assert (stream.fileno(), stream.isatty(), stream.writable(), stream.encoding) == (7, False, True, "utf-8")


def test_a_driver_whose_supervisor_is_gone_is_not_held_up_by_its_output() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        output = EventOutput(stream)
    os.close(read)
    output.put(ev.StateChanged(state="unheard"))
    started = time.monotonic()
    output.close(5)
    assert time.monotonic() - started < 3


def test_a_line_longer_than_any_event_is_cut_with_a_note_wherever_the_pieces_end() -> None:
    text = b"x" * (MAX_LINE_BYTES + 1_000_000) + b"\nshort\n\nrest"
    cut = b"x" * MAX_LINE_BYTES + " [… the rest is left out …]".encode()
    for size in (997, 65_536, len(text)):
        pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
        assert [*whole_lines(pieces)] == [cut, b"short", b"", b"rest"]
        assert [*whole_lines(pieces, with_rest=False)] == [cut, b"short", b""]


def test_a_new_driver_knows_what_was_before_and_reads_the_newest_of_it(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_relay, "_SUMMARY_EVENTS", 40)
    monkeypatch.setattr(event_relay, "_DETAILS_SECONDS", 3600)  # not while the folder is deleted
    requests = []
    counting = SteppedStore(store.path, requests.append)
    for attempt in range(1, 11):  # of which the first trains for long
        with open(os.devnull, "w") as nowhere:
            recorder = EventRecorder(EventOutput(nowhere), Details(), counting, spec())
        recorder.attempt = attempt
        recorder.history = HistoryWriter(store, attempt)
        requests.clear()
        if attempt > 1:
            recorder.recall_history()
        read = [request for request in requests if request.startswith(f"read {layout.EVENTS}")]
        recorder.emit(ev.AttemptStarted(run_name="mnist", run_uri=store.uri))
        recorder.emit(ev.WorkerGroupStarted(world_size=2))
        for number in range(199 if attempt == 1 else 9):
            metrics = {"loss": 1.0 / (number + attempt), "text": "x" * 3000}
            recorder.emit(ev.CheckpointCommitted(checkpoint=f"c{number}", size_bytes=1, metrics=metrics))
        recorder.emit(ev.WorkerFailed(retried=True))
        recorder.close()
    assert len(read) <= 5
    everything = RunReport(run_name="mnist")
    for event in read_history(store):
        if isinstance(event, ev.RunRecalled):
            assert RunReport.model_validate(event.report) == everything
        else:
            everything.add(event)
    assert (everything.tally.worker_failures, everything.position) == (10, 199 + 9 * 9)
