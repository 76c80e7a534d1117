"""Brings files from outside of docs/ into the site, and leads links to them there. Owns no text of its own.

A README or CHANGELOG of a package becomes a page. Any other file of the repository that a page links to becomes a page
that shows it, and a folder without a README a list of its files. mkdocs calls the functions whose names begin with
`on_`; every link that leads nowhere stops the build, because the site is built with `strict: true`.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {  # path in the repository: path in the site
    **{f"packages/{path.name}/README.md": f"packages/{path.name}.md" for path in sorted(ROOT.glob("packages/*"))},
    **{f"packages/{path.name}/CHANGELOG.md": f"changes/{path.name}.md" for path in sorted(ROOT.glob("packages/*"))},
    "tests/fuzz/README.md": "shown/tests/fuzz/README.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "readme.md",
    "examples/README.md": "examples.md",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash", ".cpp": "cpp"}
WIDE = "---\nhide: [navigation, toc]\n---\n\n"  # of a page that shows a file: no columns beside it
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of PAGES, and every file that these or docs/ link to."""
    origins = {source: target for source, target in PAGES.items() if (ROOT / source).exists()}
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + list(origins)
    for source in waiting:
        for wanted in linked(source):
            if wanted not in origins and not wanted.startswith("docs/"):
                origins[wanted] = place(wanted)
                waiting += [wanted] if wanted.endswith(".md") else []
    for source, target in origins.items():
        if files.get_file_from_path(target) is None:
            files.append(made(config, source, target))
    config.extra["origins"] = origins
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Leads each link to another file of the repository to the page that shows it."""
    origins = config.extra["origins"]
    here = next((source for source, target in origins.items() if target == page.file.src_uri), None)
    if here is None or (ROOT / "docs" / page.file.src_uri).exists():
        here = f"docs/{page.file.src_uri}"

    def replaced(link: re.Match[str]) -> str:
        wanted = resolved(here, link[2])
        if wanted is None:
            return link[0]
        target = wanted.removeprefix("docs/") if wanted.startswith("docs/") else origins.get(wanted)
        if target is None:
            return link[0]
        path = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
        return f"{link[1]}{path}{link[3] or ''})"

    return outside_of_code(markdown, replaced)


def outside_of_code(markdown: str, replaced: Any) -> str:
    parts = FENCE.split(markdown)
    return "".join(part if FENCE.match(part) else LINK.sub(replaced, part) for part in parts)


def linked(source: str) -> list[str]:
    """What the file links to, as paths of the repository. Only Markdown links to anything."""
    found: list[str | None] = []
    if source.endswith(".md"):
        text = (ROOT / source).read_text(encoding="utf-8")
        outside_of_code(text, lambda link: found.append(resolved(source, link[2])) or link[0])
    return [path for path in found if path]


def resolved(source: str, link: str) -> str | None:
    """The link as a path from the root of the repository, or None if it leads out of it or nowhere."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if (ROOT / path / "README.md").is_file():
        path = posixpath.join(path, "README.md")
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def place(source: str) -> str:
    """Where the site shows a file or a folder; pictures stay files."""
    if source in PAGES:
        return PAGES[source]
    picture = os.path.splitext(source)[1] in (".png", ".svg")
    return f"shown/{source}" if picture or source.endswith(".md") else f"shown/{source}.md"


def made(config: Any, source: str, target: str) -> File:
    """The file of the site for a file or a folder of the repository."""
    path = ROOT / source
    if path.suffix in (".png", ".svg"):
        return File.generated(config, target, content=path.read_bytes())
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.is_file())
        text = "\n\n".join(f"## {name}\n\n{fenced(path / name)}" for name in names)
        return File.generated(config, target, content=f"{WIDE}# {source}\n\n{text}\n")
    if path.suffix == ".md":
        return File.generated(config, target, content=path.read_text(encoding="utf-8"))
    return File.generated(config, target, content=f"{WIDE}# {source}\n\n{fenced(path)}\n")


def fenced(path: Path) -> str:
    language = LANGUAGES.get(path.suffix, "")
    return f"``````{language}\n{path.read_text(encoding='utf-8')}\n``````"
