"""What mkdocs does beside its configuration (`hooks` in mkdocs.yml).

Pages link to files outside docs/ by a relative path, which works where a repository host shows them. On the
site such a link becomes one to the repository.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

BRANCH = "main"
LINK = re.compile(r"(\]\()(\.\./[^)\s]+)(\))")
CODE = re.compile(r"<code>([^<]*)</code>")
MARKER = re.compile(r"^<!-- (table: .*|printed|run: .*|end) -->$", re.MULTILINE)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links that leave docs/ go to the repository; the marks around tables go."""
    docs = Path(config.docs_dir)
    folder = posixpath.join(docs.name, posixpath.dirname(page.file.src_uri))

    def to_repository(match: re.Match[str]) -> str:
        path, hash_, anchor = match[2].partition("#")
        target = posixpath.normpath(posixpath.join(folder, path))
        if target.startswith(f"{docs.name}/"):
            return match[0]
        if not (docs.parent / target).exists():
            raise PluginError(f"{page.file.src_uri} links to {target}, which is not there")
        kind = "tree" if (docs.parent / target).is_dir() else "blob"
        return f"{match[1]}{config.repo_url}/{kind}/{BRANCH}/{target}{hash_}{anchor}{match[3]}"

    return LINK.sub(to_repository, MARKER.sub("", markdown))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """A method's name in a table may break after a colon or a comma."""

    def breaking(match: re.Match[str]) -> str:
        return "<code>" + re.sub("([:,])", r"\1<wbr>", match[1]) + "</code>"

    return TABLE.sub(lambda table: CODE.sub(breaking, table[0]), html)
