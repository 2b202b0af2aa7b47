"""What `mkdocs build` does to a page: links that leave docs/ lead to the repository."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn `[text](../file)` into a link to the repository, or into its text if there is no URL."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        text, name, anchor = link.groups()
        target = (folder / name).resolve()
        if target.is_relative_to(ROOT / "docs") or not target.exists():
            return link.group()  # of this site, or wrong, which mkdocs reports
        if not config.repo_url:
            return text
        kind = "tree" if target.is_dir() else "blob"
        path = target.relative_to(ROOT).as_posix()
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{path}{anchor or ''})"

    return re.sub(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)", replace, markdown)
