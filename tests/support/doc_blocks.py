"""The code blocks of the documentation: found, and run as they stand.

A block that cannot be run has a line `<!-- not run: <reason> -->` directly above its fence. All other blocks of Python
and of a shell are run, and those of data formats are parsed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml
from markdown_it import MarkdownIt

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.support.processes import ROOT

PYTHON = ("python",)
SHELL = ("bash", "sh", "shell", "console")
#: How blocks of data are parsed.
DATA: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
#: Diagrams and output.
TEXT = ("", "text")
LANGUAGES = (*PYTHON, *SHELL, *DATA, *TEXT)

_MARKER = re.compile(r"<!-- not run: (?P<reason>.*) -->")
_SHELL_SECONDS = 90.0


@dataclass(frozen=True)
class DocBlock:
    """A fenced block of a page.

    Attributes:
        page: Path of the page from the repository's root.
        line: Number of its first fence, from 1.
        language: What the fence says, without what follows a blank; may be empty.
        code: What is between the fences.
        not_run: Why it is not run; None if it is.
    """

    page: str
    line: int
    language: str
    code: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_code(self) -> bool:
        """Whether it can be run at all."""
        return self.language in (*PYTHON, *SHELL)

    @property
    def is_run(self) -> bool:
        """Whether a test has to run it."""
        return self.is_code and self.not_run is None

    def parse(self) -> None:
        """Parse it, without running it.

        Raises:
            AssertionError: It is not of the language that its fence says.
        """
        try:
            if self.language in PYTHON:
                compile(self.code, str(self), "exec")
            elif self.language in SHELL:
                subprocess.run(
                    ["bash", "-n", "-c", "\n".join(_commands(self))],
                    check=True,
                    timeout=10,
                    stderr=subprocess.PIPE,
                )
            elif self.language in DATA:
                DATA[self.language](self.code)
        except (SyntaxError, ValueError, yaml.YAMLError, subprocess.CalledProcessError) as error:
            raise AssertionError(f"the block at {self} is no {self.language}: {error}") from error


def pages() -> list[Path]:
    """The pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(page: Path, text: str | None = None) -> list[DocBlock]:
    """Find the fenced blocks of a page, those in lists and quotes included.

    Args:
        page: The page, below the repository's root.
        text: What stands on it; default: read.
    """
    found: list[DocBlock] = []
    text = page.read_text() if text is None else text
    reason: tuple[int, str] | None = None
    for token in MarkdownIt("commonmark").parse(text):
        if token.map is None:
            continue
        start, end = token.map
        if token.type == "html_block" and (marker := _MARKER.fullmatch(token.content.strip())):
            reason = (end, marker["reason"])
        if token.type == "fence":
            found.append(
                DocBlock(
                    page=str(page.relative_to(ROOT)),
                    line=start + 1,
                    language=token.info.split(maxsplit=1)[0] if token.info.strip() else "",
                    code=token.content,
                    not_run=reason[1] if reason is not None and reason[0] == start else None,
                )
            )
    return found


def markers_of(page: Path) -> int:
    """Count the lines of a page that mean to be markers, whether they are followed by a block or not."""
    return sum("not run:" in line and "<!--" in line for line in page.read_text().splitlines())


def run_block(block: DocBlock, folder: Path, api_url: str) -> None:
    """Run a block in a folder; the process is in that folder already.

    Python runs as the program of a file does, in this process: to import Prefect and Ray anew takes longer than most
    blocks. The commands of a shell are a script that ends with the first one that fails.

    Args:
        block: Of Python or a shell.
        folder: Where its file is written and the shell works.
        api_url: The Prefect API of the shell's commands.

    Raises:
        AssertionError: It failed.
    """
    try:
        if block.language in PYTHON:
            file = folder / f"line_{block.line}.py"
            file.write_text(block.code)
            runpy.run_path(str(file), run_name="__main__")
        else:
            _run_shell("\n".join(_commands(block)), folder, folder / f"line_{block.line}.log", api_url)
    except (Exception, SystemExit) as error:
        raise AssertionError(f"the block at {block} fails: {error}") from error


def _run_shell(commands: str, folder: Path, log: Path, api_url: str) -> None:
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PREFECT_API_URL": api_url,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),  # as in a checkout
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-e", "-c", commands],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(_SHELL_SECONDS)
        assert code == 0, f"exit code {code}:\n{log.read_text(errors='replace')[-3000:]}"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it has started in its session goes with it
            os.killpg(process.pid, signal.SIGKILL)


def _commands(block: DocBlock) -> list[str]:
    """The commands of a block, without the prompts and the output of a console."""
    lines = block.code.replace("\\\n", "").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.strip()]
