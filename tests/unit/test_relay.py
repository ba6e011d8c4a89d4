"""Events on their way from the controller to the driver and out of it, over real sockets and pipes."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.bounds import MAX_LINE_BYTES, whole_lines
from prefect_elastic_train.driver.relay import EventOutput, EventReceiver, LineStream
from prefect_elastic_train.elastic.sending import EventSender
from prefect_elastic_train.supervisor.child import read_lines
from tests.support.processes import wait_for


class Inbox:
    """A receiver and what it received."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.receiver = EventReceiver(self.events.append)

    def states(self) -> list[str]:
        return [event.state for event in self.events if isinstance(event, ev.StateChanged)]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    """A listening driver."""
    inbox = Inbox()
    yield inbox
    inbox.receiver.close()


class LateReceiver:
    """A port that nobody listens at until it is told to."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.receiving = (self._socket.getsockname()[1], "key")

    def lines(self, count: int) -> list[bytes]:
        """Listen, and give so many lines of what arrives."""
        self._socket.listen()
        self._socket.settimeout(10)
        connection, _ = self._socket.accept()
        connection.settimeout(10)
        with connection.makefile("rb") as file:
            return [file.readline() for _ in range(count)]

    def close(self) -> None:
        self._socket.close()


def test_events_arrive_in_order(inbox: Inbox) -> None:
    sender = EventSender(inbox.receiver.receiving)
    for number in range(500):
        sender.send(ev.StateChanged(state=str(number)))
    sender.close(5)
    wait_for(lambda: len(inbox.events) == 500, 5, "all events")
    assert inbox.states() == [str(number) for number in range(500)]


def test_close_waits_until_all_is_sent_and_takes_nothing_more(inbox: Inbox) -> None:
    sender = EventSender(inbox.receiver.receiving)
    sender.send(ev.StateChanged(state="last"))
    sender.close(5)
    sender.send(ev.StateChanged(state="too late"))
    wait_for(lambda: inbox.states() == ["last"], 5, "the last event")
    time.sleep(0.1)
    assert inbox.states() == ["last"]


@pytest.mark.parametrize("key", ["", "wrong", "x" * 500])
def test_a_sender_without_the_key_is_not_heard(inbox: Inbox, key: str) -> None:
    port, right = inbox.receiver.receiving
    impostor = EventSender((port, key))
    impostor.send(ev.StateChanged(state="forged"))
    impostor.close(5)
    friend = EventSender((port, right))
    friend.send(ev.StateChanged(state="true"))
    friend.close(5)
    wait_for(lambda: inbox.states(), 5, "an event")
    time.sleep(0.1)
    assert inbox.states() == ["true"]


def test_every_driver_has_a_key_and_a_port_of_its_own(inbox: Inbox) -> None:
    other = Inbox()
    try:
        assert inbox.receiver.receiving[0] != other.receiver.receiving[0]
        assert inbox.receiver.receiving[1] != other.receiver.receiving[1]
        assert len(other.receiver.receiving[1]) >= 32
    finally:
        other.receiver.close()


def test_what_is_no_event_is_told_and_passed_over(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    port, key = inbox.receiver.receiving
    good = ev.StateChanged(state="good").model_dump_json()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(f'{key}\nnonsense\n{{"kind": "danced"}}\n{good}\n{good[:5]}'.encode())
    wait_for(lambda: inbox.states() == ["good"], 5, "the good event")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "cannot be read and is lost: b'nonsense'" in caplog.text


def test_progress_is_dropped_and_lifecycle_is_not_while_the_driver_is_away(caplog: pytest.LogCaptureFixture) -> None:
    driver = LateReceiver()
    sender = EventSender(driver.receiving)
    started = time.monotonic()
    for number in range(3000):
        sender.send(ev.Reported(metrics={"n": number}, world_size=1))
    for number in range(50):
        sender.send(ev.WorkerFailed(errors={"0": str(number)}, retried=True))
        sender.send(ev.ControllerAlive(doing="RUNNING", seconds=1))
    assert time.monotonic() - started < 2, "sending held up the controller"
    key, *lines = driver.lines(1 + 1000 + 50)
    sender.close(5)
    driver.close()
    assert "2050 events were dropped" in caplog.text
    assert key == b"key\n"
    events = [ev.decode_event(line) for line in lines]
    assert [event.metrics["n"] for event in events if isinstance(event, ev.Reported)] == list(range(1000))
    failures = [event.errors["0"] for event in events if isinstance(event, ev.WorkerFailed)]
    assert failures == [str(number) for number in range(50)]


def test_a_sender_finds_its_driver_again_after_a_broken_connection() -> None:
    driver = LateReceiver()
    driver._socket.listen()
    sender = EventSender(driver.receiving)
    sender.send(ev.StateChanged(state="first"))
    connection, _ = driver._socket.accept()
    wait_for(lambda: b"first" in connection.recv(4096), 5, "the first event")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    driver._socket.settimeout(10)
    for number in range(5):  # what is on its way when a connection breaks may be lost
        sender.send(ev.StateChanged(state=f"later-{number}"))
        time.sleep(0.02)
    connection, _ = driver._socket.accept()
    connection.settimeout(5)
    with connection.makefile("rb") as file:
        assert file.readline() == b"key\n"
        event = ev.decode_event(file.readline())
    assert isinstance(event, ev.StateChanged)
    assert event.state.startswith("later-")
    sender.close(1)
    driver.close()


def test_closing_a_sender_whose_driver_is_gone_takes_no_longer_than_allowed() -> None:
    driver = LateReceiver()
    sender = EventSender(driver.receiving)
    sender.send(ev.StateChanged(state="unheard"))
    started = time.monotonic()
    sender.close(0.3)
    assert 0.2 < time.monotonic() - started < 2
    driver.close()


def test_an_event_that_cannot_be_written_does_not_stop_the_ones_after_it(inbox: Inbox) -> None:
    sender = EventSender(inbox.receiver.receiving)
    sender.send(ev.WorkerFailed(errors={"0": "no such file: 'caf\udce9'"}, retried=True))
    sender.send(ev.StateChanged(state="after"))
    sender.close(2)
    wait_for(lambda: inbox.states() == ["after"], 3, "the event after it")


class Output:
    """A driver's standard output, and the lines that come out of it."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self._writer = os.fdopen(write, "w")
        self._reader = os.fdopen(read, "rb")
        self.events = EventOutput(self._writer)

    def lines(self) -> list[str]:
        """Close the output and give all that came out of it."""
        found: list[bytes] = []
        reading = threading.Thread(target=lambda: found.extend(self._reader.readlines()))
        reading.start()
        self.events.close(5)
        os.close(self.events._descriptor)
        self._writer.close()
        reading.join(5)
        self._reader.close()
        return [line.decode() for line in found]


def test_events_leave_as_tagged_lines_between_whatever_else_is_printed() -> None:
    output = Output()
    stream = LineStream(output.events.write_text, 1)
    print("epoch 1", file=stream)
    output.events.put(ev.StateChanged(state="RUNNING"))
    print("epoch 2", file=stream)
    lines = output.lines()
    events = [ev.decode_event(line[len(ev.EVENT_TAG) :]) for line in lines if line.startswith(ev.EVENT_TAG)]
    assert [event.state for event in events if isinstance(event, ev.StateChanged)] == ["RUNNING"]
    assert [line for line in lines if not line.startswith(ev.EVENT_TAG)] == ["epoch 1\n", "epoch 2\n"]


def test_lines_of_several_threads_and_events_leave_whole() -> None:
    output = Output()
    stream = LineStream(output.events.write_text, 1)
    reading: list[list[str]] = []
    collector = threading.Thread(target=lambda: reading.append(output._reader.readlines()))  # type: ignore[arg-type]
    collector.start()

    def chat(name: str) -> None:
        for number in range(300):
            for piece in (f"<{name} ", str(number), " " + name * 50):
                stream.write(piece)
            stream.write(">\n")
            output.events.put(ev.StateChanged(state=f"{name}{number}"))

    threads = [threading.Thread(target=chat, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    output.events.close(10)
    os.close(output.events._descriptor)
    output._writer.close()
    collector.join(10)
    lines = [line.decode() for line in reading[0]]  # type: ignore[attr-defined]
    expected = {f"<{name} {number} {name * 50}>\n" for name in "abcd" for number in range(300)}
    assert {line for line in lines if not line.startswith(ev.EVENT_TAG)} == expected
    states = [ev.decode_event(line[len(ev.EVENT_TAG) :]) for line in lines if line.startswith(ev.EVENT_TAG)]
    assert len(states) == 1200
    assert None not in states
    assert len(lines) == 2400


def test_a_line_in_pieces_is_handed_on_when_it_is_complete() -> None:
    written: list[str] = []
    stream = LineStream(written.append, 1)
    assert stream.write("one ") == 4
    stream.flush()
    assert written == []
    stream.write("two\nthree\nfo")
    stream.write("ur\n")
    assert written == ["one two\nthree\nfour\n"], "whole, since what the first line is, the others are, too"


def test_the_stream_stands_in_for_standard_output() -> None:
    written: list[str] = []
    stream: Any = LineStream(written.append, 7)
    print("a", "b", sep="-", file=stream, flush=True)
    stream.writelines(["c\n", "d\n"])
    assert "".join(written) == "a-b\nc\nd\n"
    assert stream.fileno() == 7
    assert not stream.isatty()
    assert stream.writable()
    assert stream.encoding == "utf-8"


def test_a_driver_whose_supervisor_is_gone_is_not_held_up_by_its_output() -> None:
    output = Output()
    output._reader.close()
    output.events.put(ev.StateChanged(state="unheard"))
    started = time.monotonic()
    output.events.close(5)
    assert time.monotonic() - started < 3


def test_the_lines_of_a_child_arrive_with_their_source_and_then_its_end() -> None:
    code = "import sys; print('out'); sys.stdout.flush(); sys.stdout.buffer.write(b'no newline \\xff')"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    lines: queue.Queue[Any] = queue.Queue()
    assert child.stdout is not None
    read_lines(child.stdout, "driver", lines).join(10)
    child.wait(10)
    assert [lines.get_nowait() for _ in range(3)] == [
        ("driver", b"out"),
        ("driver", b"no newline \xff"),
        ("driver", None),
    ]


def test_a_line_longer_than_any_event_is_cut_with_a_note_wherever_the_pieces_end() -> None:
    text = b"x" * (MAX_LINE_BYTES + 1_000_000) + b"\nshort\n\nrest"
    cut = b"x" * MAX_LINE_BYTES + " [… 1,000,000 bytes left out …]".encode()
    for size in (997, 65_536, len(text)):
        pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
        assert [*whole_lines(pieces)] == [cut, b"short", b"", b"rest"]
        assert [*whole_lines(pieces, with_rest=False)] == [cut, b"short", b""]
