"""tools/follow_docs.py: which blocks of a page are run, and what becomes of one that fails."""

import socket
import subprocess
import sys
from pathlib import Path

import follow_docs
import pytest
from follow_docs import WAYS, Block, Clock, Engine

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "tools"

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


SERVES = """
python - <<'END'
import http.server

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"choices": [{"text": "MODEL"}]}' if "MODEL" in asked else b"{}")

http.server.HTTPServer(("127.0.0.1", PORT), Answer).serve_forever()
END
"""


def follow(page: Path, text: str) -> subprocess.CompletedProcess[str]:
    page.write_text(text)
    return run(page)


def run(*pages: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "follow_docs.py"), *map(str, pages)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("code", [0, 1])
def test_a_session_that_ends_is_a_failure(tmp_path: Path, code: int) -> None:
    page = f"```python\nimport os\nos._exit({code})\n```\n\n```python\nprint(1)\n```\n"
    found = follow(tmp_path / "page.md", page)
    assert "2 blocks, 1 failed" in found.stdout
    assert "the session ended" in found.stderr


def test_a_server_is_asked_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(follow_docs, "SERVER", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(follow_docs, "packaged_folder", lambda: tmp_path / "model")
    code = SERVES.replace("PORT", str(port))
    well, printed = Engine(tmp_path).run(Block(tmp_path, 1, "sh", code, "server"))
    assert well and str(tmp_path / "model") in printed
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    well, printed = Engine(tmp_path).run(Block(tmp_path, 1, "sh", "echo no model", "server"))
    assert not well and printed == "no model\nthe server ended\n"


def test_every_way_leads_over_pages_that_exist() -> None:
    pages = [page for way in WAYS.values() for page in way]
    assert len(WAYS) == 4 and len(pages) == len(set(pages))
    assert all((ROOT / "docs" / f"{page}.md").is_file() for page in pages)


def test_the_first_result_is_what_follows_the_install() -> None:
    page, other, clock = Path("README.md"), Path("other.md"), Clock()
    for block, seconds in [
        (Block(page, 1, "sh", "pip", "setup"), 90.0),
        (Block(page, 2, "python", "first"), 20.0),
        (Block(page, 3, "python", "second"), 5.0),
        (Block(other, 1, "sh", "third"), 7.0),
    ]:
        clock.add(block, seconds)
    assert clock.first == 20 and clock.pages == {page: 115.0, other: 7.0}
    assert "20.0 s  from the install" in list(clock.lines())[-1]
