"""The code blocks of the documentation: found, and run as they stand.

A block that cannot be run has a line `<!-- not run: <reason> -->` directly above its fence. All other blocks of Python
and of a shell are run, and those of data formats are parsed.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml
from markdown_it import MarkdownIt

from tests.support.processes import ROOT, spawn

#: Languages of the blocks that can be run.
CODE = ("python", "bash")
#: The last two are diagrams and output.
LANGUAGES = (*CODE, "yaml", "toml", "", "text")

_MARKER = re.compile(r"<!-- not run: (?P<reason>.*) -->")
_SHELL_SECONDS = 90.0


@dataclass(frozen=True)
class DocBlock:
    """A fenced block of a page: at a line, from 1, of a language, which may be empty; and why it is not run, if so."""

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
        return self.language in CODE

    @property
    def is_run(self) -> bool:
        """Whether a test has to run it."""
        return self.is_code and self.not_run is None

    def parse(self) -> None:
        """Parse it, without running it; an `AssertionError` if it is not of the language that its fence says."""
        try:
            if self.language == "python":
                compile(self.code, str(self), "exec")
            elif self.language == "bash":
                subprocess.run(["bash", "-n", "-c", self.code], check=True, timeout=10, stderr=subprocess.PIPE)
            elif self.language == "yaml":
                list(yaml.safe_load_all(self.code))
        except (SyntaxError, ValueError, yaml.YAMLError, subprocess.CalledProcessError) as error:
            raise AssertionError(f"the block at {self} is no {self.language}: {error}") from error


def pages() -> list[Path]:
    """Return the pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page_id(page: Path) -> str:
    """Return the name of a page for test ids: its path below ``docs/``."""
    return str(page.relative_to(ROOT)).removeprefix("docs/").removesuffix(".md").lower()


def blocks_of(page: Path) -> list[DocBlock]:
    """The fenced blocks of a page, those in lists and quotes included."""
    found: list[DocBlock] = []
    reason: tuple[int, str] | None = None
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        if token.map is None:
            continue
        start, end = token.map
        if token.type == "html_block" and (marker := _MARKER.fullmatch(token.content.strip())):
            reason = (end, marker["reason"])
        if token.type == "fence":
            language = next(iter(token.info.split()), "")
            not_run = reason[1] if reason is not None and reason[0] == start else None
            found.append(DocBlock(str(page.relative_to(ROOT)), start + 1, language, token.content, not_run))
    return found


def markers_of(page: Path) -> int:
    """The number of lines of a page that mean to be markers, whether they are followed by a block or not."""
    return sum("not run:" in line and "<!--" in line for line in page.read_text().splitlines())


def run_block(block: DocBlock, folder: Path, api_url: str) -> None:
    """Run a block in a folder that the process is in; an `AssertionError` if it fails.

    Python runs as the program of a file does, in this process: to import Prefect and Ray anew takes longer than most
    blocks. The commands of a shell are a script that ends with the first one that fails.
    """
    try:
        if block.language == "python":
            file = folder / f"line_{block.line}.py"
            file.write_text(block.code)
            runpy.run_path(str(file), run_name="__main__")
        else:
            _run_shell(block.code, folder, folder / f"line_{block.line}.log", api_url)
    except (Exception, SystemExit) as error:
        raise AssertionError(f"the block at {block} fails: {error}") from error


def _run_shell(commands: str, folder: Path, log: Path, api_url: str) -> None:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = os.pathsep.join([str(folder), str(ROOT)])  # as in a checkout
    environment = {**os.environ, "PATH": programs, "PREFECT_API_URL": api_url, "PYTHONPATH": modules}
    shell = spawn("bash", "-e", "-c", commands, log=log, folder=folder, env=environment, stdin=subprocess.DEVNULL)
    try:
        code = shell.wait(_SHELL_SECONDS)
        assert code == 0, f"exit code {code}:\n{log.read_text(errors='replace')[-3000:]}"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it has started in its session goes with it
            os.killpg(shell.pid, signal.SIGKILL)
