"""Hooks of mkdocs: files of the repository that a page links to are copied into the site."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")
linked: set[Path] = set()  # files outside of docs/, relative to the root


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Point links that leave docs/ to the copies."""
    folder = (Path(config["docs_dir"]) / page.file.src_path).parent
    up = "../" * page.file.src_path.count("/")

    def replace(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(config["docs_dir"]) or not target.is_file():
            return match[0]
        linked.add(target.relative_to(ROOT))
        return f"{match[1]}{up}repository/{target.relative_to(ROOT)}"

    return LINK.sub(replace, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    for path in linked:
        copy = Path(config["site_dir"]) / "repository" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, copy)
