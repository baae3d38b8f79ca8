"""tools/follow_docs.py: which blocks of a page are run, and what becomes of one that fails."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "tools"
GOOD = """
```python
name = "written"
```

```text
shown only
```

<!-- run: never, a GPU -->
```sh
false
```

```sh
test -f pyproject.toml
```

```python
print(name)
```
"""


def follow(page: Path, text: str) -> subprocess.CompletedProcess[str]:
    page.write_text(text)
    return run(page)


def run(*pages: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "follow_docs.py"), *map(str, pages)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_page_is_followed(tmp_path: Path) -> None:
    """Its Python blocks are one session, in a clone of the checkout."""
    found = follow(tmp_path / "page.md", GOOD)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "4 blocks, 0 failed" in found.stdout
    assert "(a GPU)" in found.stdout


@pytest.mark.long
@pytest.mark.parametrize("block", ["```sh\nfalse\ntrue\n```", "```python\nprint(missing)\n```"])
def test_a_block_that_fails_is_shown(tmp_path: Path, block: str) -> None:
    found = follow(tmp_path / "page.md", block + "\n")
    assert found.returncode == 1
    assert "1 blocks, 1 failed" in found.stdout


@pytest.mark.parametrize("block", ["    indented\n", "```\nwithout a kind\n```\n"])
def test_a_block_says_what_it_is(tmp_path: Path, block: str) -> None:
    found = follow(tmp_path / "page.md", block)
    assert found.returncode == 1
    assert "page.md:1:" in found.stderr


@pytest.mark.long
def test_pages_share_no_names(tmp_path: Path) -> None:
    first, second = tmp_path / "first.md", tmp_path / "second.md"
    first.write_text("```python\nname = 1\n```\n")
    second.write_text("```python\nprint(name)\n```\n")
    found = run(first, second)
    assert "2 blocks, 1 failed" in found.stdout
    assert "NameError" in found.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize("code", [0, 1])
def test_a_session_that_ends_is_a_failure(tmp_path: Path, code: int) -> None:
    page = f"```python\nimport os\nos._exit({code})\n```\n\n```python\nprint(1)\n```\n"
    found = follow(tmp_path / "page.md", page)
    assert "2 blocks, 1 failed" in found.stdout
    assert "the session ended" in found.stderr
