"""Doing what ``docs/quickstart.md`` says, as its reader does: files are saved, commands typed into terminals.

A block of Python whose first line is a comment with a file's name is that file. A block of a shell is typed into the
first terminal and runs to its end; with ``terminal=<name> until="<text or URL>"`` behind the language it is typed into
a terminal of its own and goes on there, and what follows on the page waits until that text is said or that URL answers.
As on all pages, what has a line ``<!-- not run: <reason> -->`` directly above it is not done.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.support.doc_blocks import PYTHON, SHELL, blocks_of
from tests.support.processes import ROOT, wait_for

PAGE = ROOT / "docs" / "quickstart.md"

_FILE = re.compile(r"# (?P<name>[a-z_]+\.py)$")
_FIRST = "first"
_END_SECONDS = 30.0


@dataclass(frozen=True)
class Step:
    """Something that the reader of the page does.

    Attributes:
        line: Where it stands.
        code: What is saved or typed.
        file: Name of the file to save; empty for commands.
        terminal: Where commands are typed.
        until: What that terminal says, or a URL that answers, when one may go on; empty: the commands end.
    """

    line: int
    code: str
    file: str = ""
    terminal: str = _FIRST
    until: str = ""


def steps(page: Path = PAGE) -> list[Step]:
    """Give what the page tells its reader to do, in its order.

    Raises:
        AssertionError: A block says neither what file it is nor what to type.
    """
    lines = page.read_text().splitlines()
    found = []
    for block in blocks_of(page):
        if not block.is_run:
            continue
        if block.language in PYTHON:
            named = _FILE.match(block.code.splitlines()[0])
            assert named, f"{block}: its first line must be a comment with a file's name"
            found.append(Step(block.line, block.code, file=named["name"]))
            continue
        assert block.language in SHELL
        _, *options = shlex.split(lines[block.line - 1])
        told = dict(option.split("=", 1) for option in options)
        assert set(told) in (set(), {"terminal", "until"}), f"{block}: {told}"
        found.append(Step(block.line, block.code, **told))
    return found


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.HTTPError:
        return False


class Terminal:
    """A shell in a folder, and what it and its programs say."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log_file = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "--noprofile", "--norc"],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._commands = 0

    @property
    def log(self) -> str:
        """Everything that was said so far."""
        return self.log_file.read_text(errors="replace")

    def type(self, code: str, timeout: float, until: str = "") -> str:
        """Type commands, and wait. The first that fails ends the shell.

        Args:
            code: The commands.
            timeout: How long to wait, in seconds.
            until: For a text that is said, or a URL that answers; empty: for the end of the commands.

        Returns:
            What was said since.

        Raises:
            AssertionError: A command failed, or it took too long.
        """
        self._commands += 1
        script = self.log_file.with_suffix(f".{self._commands}.sh")
        script.write_text(code)
        before = len(self.log)
        ended = f"-- {script.name} is done --"
        assert self.process.stdin is not None
        self.process.stdin.write(f"set -e; . {shlex.quote(str(script))} </dev/null; echo '{ended}'\n".encode())
        self.process.stdin.flush()

        def may_go_on() -> bool:
            assert self.process.poll() is None, f"this failed:\n{code}"
            return _answers(until) if until.startswith("http://") else (until or ended) in self.log[before:]

        try:
            wait_for(may_go_on, timeout, until or f"the end of:\n{code}")
        except AssertionError as error:
            raise AssertionError(f"in terminal {self.name}: {error}") from None
        return self.log[before:]

    def close(self) -> None:
        """Press Ctrl-C and close it; kill what does not end by that."""
        with contextlib.suppress(psutil.Error):
            shell = psutil.Process(self.process.pid)
            tree = [*shell.children(recursive=True), shell]
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGINT)
            _, left = psutil.wait_procs(tree, timeout=_END_SECONDS)
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.process.wait(10)


class Reader:
    """Somebody who does what the page says in a folder, terminal by terminal."""

    def __init__(self, folder: Path, environment: Mapping[str, str], logs: Path) -> None:
        self.folder = folder
        self._environment = environment
        self._logs = logs
        self._terminals: dict[str, Terminal] = {}

    def __getitem__(self, name: str) -> Terminal:
        if name not in self._terminals:
            self._terminals[name] = Terminal(name, self.folder, self._environment, self._logs / f"{name}.log")
        return self._terminals[name]

    @property
    def first(self) -> Terminal:
        """The terminal that most is typed into."""
        return self[_FIRST]

    def do(self, step: Step, timeout: float) -> str:
        """Save the file, or type the commands; give what they said."""
        if step.file:
            (self.folder / step.file).write_text(step.code)
            return ""
        return self[step.terminal].type(step.code, timeout, step.until)

    def show(self) -> None:
        """Print the last of what each terminal says, for whoever looks into a failure."""
        for terminal in self._terminals.values():
            print(f"---- terminal {terminal.name} ----\n{terminal.log[-6000:]}")

    def close(self) -> None:
        """Close the terminals, the last opened first."""
        for terminal in reversed(self._terminals.values()):
            terminal.close()


@contextlib.contextmanager
def reader(folder: Path, environment: Mapping[str, str], logs: Path) -> Iterator[Reader]:
    """Give a reader whose terminals are closed afterwards, and shown if something has failed."""
    somebody = Reader(folder, environment, logs)
    try:
        yield somebody
    except BaseException:
        somebody.show()
        raise
    finally:
        somebody.close()
