"""An mkdocs hook that adds Mermaid's script to the site, and to the pages that have diagrams.

The theme draws diagrams with the Mermaid that the page has loaded, and otherwise fetches one from another
site.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import Abort
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

SOURCE = Path("build/npm/node_modules/@mermaid-js/tiny/dist/mermaid.tiny.js")  # fetched by `make docs`
TARGET = "assets/javascripts/mermaid.js"


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds the script to the files of the site."""
    source = Path(config.config_file_path).parent / SOURCE
    if not source.exists():
        raise Abort(f"{SOURCE} is missing: 'make docs' fetches it")
    files.append(File.generated(config, TARGET, abs_src_path=str(source)))
    return files


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Loads the script on a page with diagrams, before the theme's own."""
    if '<pre class="mermaid">' not in html:
        return html
    return f'{html}\n<script src="{get_relative_url(TARGET, page.url)}"></script>'
