"""A hook of MkDocs: the site's pages are README.md, docs/README.md, and all that these lead to in the repository.

Each file keeps its place, so that the same links hold on the site and in the repository. A Python
file becomes a page that shows it.
"""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = "README.md"
CONTENTS = "docs/README.md"
STYLE = "docs/site/site.css"
# a search puts other pages first: these name everything
NAMES_ALL = ("docs/api.md", "CHANGELOG.md", "tests/seeds/README.md")
LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?P<target>[^)\s]+)\)")

CODE = re.compile(r"`[^`\n]+`")


def inside(page: str, target: str) -> tuple[str, str] | None:
    """Return (file or folder of the repository, anchor) of a page's link, or None if it leads out."""
    if "://" in target or target.startswith("mailto:"):
        return None
    path, _, anchor = target.partition("#")
    return (posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page), anchor


def links(page: str, text: str) -> list[tuple[str, str, str]]:
    """Return (file or folder, anchor, the link's words) of all links into the repository, in their order."""
    places = ((inside(page, link["target"]), link["text"][1:-1]) for link in LINK.finditer(text))
    return [(*place, words) for place, words in places if place]


def files_of_site() -> list[str]:
    """Return the pages, and all files that a page leads to."""
    files, to_read = [HOME, CONTENTS], [HOME, CONTENTS]
    while to_read:
        page = to_read.pop(0)
        for path, _, _ in links(page, (ROOT / page).read_text(encoding="utf-8")):
            if path not in files and (ROOT / path).is_file():
                files.append(path)
                to_read += [path] if path.endswith(".md") else []
    return files


def title(page: str) -> str:
    """Return a page's heading, without what follows a colon."""
    return re.search(r"(?m)^# (.*)$", (ROOT / page).read_text(encoding="utf-8"))[1].partition(":")[0]


def navigation() -> list[dict]:
    """Return the sections of docs/README.md, each with its links in their order, every page once."""
    _, *parts = re.split(r"(?m)^## (.*)$", (ROOT / CONTENTS).read_text(encoding="utf-8"))
    sections, seen = [], set()
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        entries = []
        for path, anchor, words in links(CONTENTS, text):
            if path.endswith(".md") and (path, anchor) not in seen:
                seen.add((path, anchor))
                entries.append({words: f"{path[:-3]}.html#{anchor}"} if anchor else {title(path): path})
        sections.append({heading: entries})
    return [{"Overview": HOME}, *sections]


def show_code(path: str) -> str:
    """Return the page of a Python file."""
    return f"# {path}\n\n```python\n{(ROOT / path).read_text(encoding='utf-8')}```\n"


def on_config(config):
    """Set the navigation."""
    config.nav = navigation()
    return config


def on_files(files, config):
    """Put the files of the site in the place of those of docs/."""
    from mkdocs.structure.files import File  # not in .venv, whose tests import this file

    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in [*files_of_site(), STYLE]:
        if path.endswith(".py"):
            files.append(File.generated(config, f"{path}.md", content=show_code(path)))
        else:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead to the page of a Python file; a folder has none, so its words stay. Code in a table needs no \\| here."""
    if page.file.src_uri in NAMES_ALL:
        page.meta["search"] = {"boost": 0.3}

    def on_site(link: re.Match) -> str:
        place = inside(page.file.src_uri, link["target"])
        if place and (ROOT / place[0]).is_dir():
            return link["text"][1:-1]
        return f"{link['text']}({link['target']}.md)" if place and place[0].endswith(".py") else link[0]

    markdown = re.sub(r"(?m)^\|.*", lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown)
    return LINK.sub(on_site, markdown)
