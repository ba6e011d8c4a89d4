"""Hooks of the site's build (``mkdocs.yml``): anchors and links as on GitHub, and the text of docstrings."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from importlib.metadata import metadata
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import griffe
from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
#: Weights of pages in the search, by the beginning of their paths: the guide counts most, the inside least. The page of
#: the Python API is long, and would come first for most words.
_WEIGHTS = {
    "guide/": 1.2,
    "reference/python": 0.6,
    "reference/outcomes": 0.6,
    "architecture": 0.4,
    "benchmarks": 0.4,
    "decisions": 0.4,
    "soak": 0.4,
}


class Anchors:
    """The anchors of a page's headings as GitHub makes them, which counts equal ones as ``-1``, ``-2``."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._slugify = slugify(case="lower")

    def __call__(self, heading: str, separator: str) -> str:
        """Return the anchor of the next heading of the page."""
        anchor = self._slugify(heading, separator)
        self.seen[anchor] += 1
        count = self.seen[anchor] - 1
        return f"{anchor}-{count}" if count else anchor


class LinksOut(Treeprocessor):
    """Turn relative links to files outside of ``docs/`` into links to the repository on GitHub."""

    def __init__(self) -> None:
        super().__init__()
        urls = dict(url.split(", ", 1) for url in metadata("prefect-elastic-train").get_all("Project-URL") or ())
        self._repository, _, self._branch = urls["Documentation"].removesuffix("/docs").partition("/tree/")
        self.page = ""

    def run(self, root: Element) -> None:
        """Rewrite the links of a page."""
        for element in root.iter("a"):
            target, hash_sign, anchor = element.get("href", "").partition("#")
            path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(self.page), target))
            if re.match(r"\w+:", target) or path.startswith(("docs/", "../")) or path == "docs":
                continue
            if (ROOT / path).exists():  # MkDocs warns of a link to a file that does not exist
                kind = "tree" if (ROOT / path).is_dir() else "blob"
                element.set("href", f"{self._repository}/{kind}/{self._branch}/{path}{hash_sign}{anchor}")


class LinksOutExtension(Extension):
    """Has ``LinksOut`` run before MkDocs checks the links."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register it; the check has priority 0."""
        md.treeprocessors.register(_links, "links_out", priority=1)


class Docstrings(griffe.Extension):
    """Make Markdown of the reStructuredText in docstrings, and a function of the object ``elastic_train``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring:
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
            text = re.sub(r"``([^`]+)``", r"`\1`", text)
            obj.docstring.value = re.sub(r"(?m)^( *\S.*)::$", r"\1:", text)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Document ``elastic_train`` with the docstring of its class, and the types and defaults of its options."""
        task, options = pkg["orchestration.task"], pkg["orchestration.arguments.TrainOptions"]
        text, call = task["_ElasticTrain"].docstring, task["_ElasticTrain.__call__"]
        entries = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text.value, re.MULTILINE))
        parameters = [call.parameters["train_loop"]]
        for name, option in options.attributes.items():
            default = next(iter(re.findall(r'Default: `*(False|"\w+")', entries[name])), "None")
            keyword_only = griffe.ParameterKind.keyword_only
            parameters += [griffe.Parameter(name, annotation=option.annotation, kind=keyword_only, default=default)]
        function = griffe.Function("elastic_train", parameters=griffe.Parameters(*parameters), returns=call.returns)
        function.docstring = griffe.Docstring(
            text.value, lineno=text.lineno, parent=function, parser=text.parser, parser_options=text.parser_options
        )
        task.set_member("elastic_train", function)


_anchors, _links = Anchors(), LinksOut()


def on_config(config: Any) -> Any:
    """Add the anchors and the links to the settings of Markdown."""
    config.mdx_configs["toc"]["slugify"] = _anchors
    config.markdown_extensions.append(LinksOutExtension())
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Let the long names in tables break at their underscores."""
    return re.sub(r"(?s)<td>.*?</td>", lambda cell: re.sub(r"_(?=[^<>]*</code>)", "_<wbr>", cell[0]), html)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Begin a page."""
    _anchors.seen.clear()
    _links.page = page.file.src_uri
    for beginning, weight in _WEIGHTS.items():
        if page.file.src_uri.startswith(beginning):
            page.meta.setdefault("search", {"boost": weight})
    return markdown
