"""Follows README.md and the pages of docs/ to the letter: runs each command and each snippet, in order.

    python tools/follow_docs.py                 # in this environment, what takes seconds
    python tools/follow_docs.py --slow          # also what takes minutes
    python tools/follow_docs.py --fresh --slow  # in an empty environment, which the README's commands fill
    python tools/follow_docs.py --fresh --way laptop  # what one kind of user reads, see WAYS
    python tools/follow_docs.py --vllm docs/serving.md  # also what wants vLLM, which the page installs

Blocks run in a clone of this checkout. A block of code says what it is: ``sh`` and ``python`` are run, and
a page's Python blocks are one session; ``text`` and other kinds are shown only. A comment before a block says
more:

    <!-- run: slow -->            takes more than some seconds
    <!-- run: setup -->           installs: only in an empty environment
    <!-- run: vllm -->            wants the environment `vllm` that such a block makes
    <!-- run: server -->          starts a server there, which is asked something and stopped
    <!-- run: never, a GPU -->    cannot be run here, and why

In blocks for vLLM, MODEL is the folder of a small model, and FOLDER an empty one.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import click
from markdown_it import MarkdownIt

from xquant.load import packaged_folder

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("sh", "python")
WAYS = {
    "laptop": ("start", "choose", "behaviour"),
    "research": ("methods/index", "papers/index", "evaluation", "calibration", "add-a-method"),
    "platform": ("plan", "serving", "at-rest", "across-machines", "models"),
    "doubt": ("quality", "speed", "rivals", "format", "evaluation-tasks"),
}
"""The pages that follow the README for someone on a laptop, someone who does research, someone who plans and
serves for others, and someone who doubts every claim."""
SHOWN = ("text", "json", "toml", "yaml", "bibtex")
RULE = re.compile(r"<!-- run: (slow|setup|vllm|server|never)(?:, (.+?))? -->\s*$")
SERVER, PATIENCE = "http://127.0.0.1:8000", 300
"""Where vLLM serves when it is told nothing else, and for how many seconds its start is waited for."""
# Sessions are forks of one process, so that pages wait once for what all of them import. A session runs what
# it is given, one JSON string a line, and says after each whether it went well; null ends it.
SESSIONS = """
import json, os, sys, traceback

try:
    from xquant import KVCache, load_model
except ImportError:
    pass  # the page's own import says what is missing

def session():
    names, code = {"__name__": "__main__"}, ""
    while code is not None:
        code = json.loads(sys.stdin.readline() or os._exit(1))
        try:
            exec(compile(code or "", "snippet", "exec"), names)
            print(chr(0) + "well", flush=True)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            print(chr(0) + "failed", flush=True)
    os._exit(3)

while True:
    child = os.fork()
    if child == 0:
        session()
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 3:
        break
"""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: Path
    line: int
    kind: str
    code: str
    rule: str = ""
    why: str = ""

    def __str__(self) -> str:
        first = self.code.strip().splitlines()[0]
        return f"{os.path.relpath(self.page, ROOT)}:{self.line}  {first[:70]}"


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page that can be run.

    Raises:
        ValueError: a block that does not say what it is.
    """
    before = ""
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        line = token.map[0] + 1 if token.map else 0
        where = f"{os.path.relpath(page, ROOT)}:{line}"
        if token.type == "code_block":
            raise ValueError(f"{where}: an indented block does not say what it is: use a fence")
        if token.type == "fence":
            kind = token.info.split(" ")[0]
            if kind not in (*KINDS, *SHOWN):
                raise ValueError(f"{where}: a block of kind '{kind}': one of {', '.join(KINDS + SHOWN)}")
            found = RULE.search(before)
            rule, why = found.groups(default="") if found else ("", "")
            if kind in KINDS:
                yield Block(page, line, kind, token.content, rule, why)
        if token.type in ("html_block", "fence", "inline"):
            before = token.content if token.type == "html_block" else ""


@dataclass
class Clock:
    """How long pages took, and when an environment that was filled gave its first result."""

    pages: dict[Path, float] = field(default_factory=dict)
    installed: bool = False
    first: float | None = None

    def add(self, block: Block, seconds: float) -> None:
        self.pages[block.page] = self.pages.get(block.page, 0) + seconds
        if block.rule == "setup":
            self.installed = True
        elif self.installed and self.first is None:
            self.first = seconds

    def lines(self) -> Iterator[str]:
        for page, seconds in self.pages.items():
            yield f"{seconds:9.1f} s  all of {os.path.relpath(page, ROOT)}"
        if self.first is not None:
            yield f"{self.first:9.1f} s  from the install to the first result"


class Engine:
    """Runs blocks for vLLM in a folder, in the environment that one of them makes there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = {"MODEL": str(packaged_folder()), "FOLDER": str(folder / "blocks")}

    def run(self, block: Block) -> tuple[bool, str]:
        """Whether it went well, and what it printed."""
        code = re.sub(r"\b(MODEL|FOLDER)\b", lambda found: self.names[found[1]], block.code)
        command = ["python", "-c", code] if block.kind == "python" else ["bash", "-e", "-c", code]
        path = f"{self.folder / 'vllm' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        with tempfile.TemporaryFile("w+") as printed:
            started = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            well, answer = self._ask(started) if block.rule == "server" else (started.wait() == 0, "")
            printed.seek(0)
            return well, printed.read() + answer

    def _ask(self, server: subprocess.Popen[bytes]) -> tuple[bool, str]:
        """Whether a server becomes well and completes a text; it is stopped."""
        body = {"model": self.names["MODEL"], "prompt": "The cache", "max_tokens": 8}
        wanted = urllib.request.Request(
            f"{SERVER}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            for _ in range(PATIENCE):
                if server.poll() is not None:
                    return False, "the server ended\n"
                if serves():
                    break
                time.sleep(1)
            answer = urllib.request.urlopen(wanted).read().decode()
            return bool(json.loads(answer)["choices"][0]["text"]), f"{answer}\n"
        except (OSError, ValueError, LookupError) as error:
            return False, f"{error}\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            server.wait()
            while serves():  # processes of its own may end later
                time.sleep(0.1)


def serves() -> bool:
    """Whether a server says that it is well."""
    try:
        urllib.request.urlopen(f"{SERVER}/health").close()
    except OSError:
        return False
    return True


class Follower:
    """Runs blocks in a folder and an environment. The Python session begins anew with each page."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.page: Path | None = None
        self.sessions: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> tuple[bool, str]:
        """Whether it went well, and what it printed."""
        if block.rule in ("vllm", "server"):
            return Engine(self.folder).run(block)
        if block.rule == "setup":
            self.end()  # what was imported may be another one now
        elif block.page != self.page and self.sessions is not None:
            self._ask(None)
        self.page = block.page
        return self._shell(block.code) if block.kind == "sh" else self._python(block.code)

    def _shell(self, code: str) -> tuple[bool, str]:
        found = subprocess.run(
            ["bash", "-e", "-c", code],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return found.returncode == 0, found.stdout

    def _python(self, code: str) -> tuple[bool, str]:
        if self.sessions is None:
            self.sessions = subprocess.Popen(
                ["python", "-c", SESSIONS],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return self._ask(code)

    def _ask(self, code: str | None) -> tuple[bool, str]:
        """Give the session a line and wait for the answer, so that none reads what is the next one's."""
        assert self.sessions is not None
        assert self.sessions.stdin is not None and self.sessions.stdout is not None
        self.sessions.stdin.write(json.dumps(code) + "\n")
        self.sessions.stdin.flush()
        printed: list[str] = []
        for line in self.sessions.stdout:
            if line.startswith("\0"):
                return line == "\0well\n", "".join(printed)
            printed.append(line)
        self.end()
        return False, "".join(printed) + "the session ended\n"

    def end(self) -> None:
        if self.sessions is not None:
            self.sessions.communicate()  # without input the session ends, and with it the others
            self.sessions = None


def environment(folder: Path, fresh: bool) -> dict[str, str]:
    """Where Python and the commands are: beside this Python, or in an empty environment in ``folder``.

    The versions of constraints.txt hold for what is installed there.
    """
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    binaries = Path(sys.executable).parent
    if fresh:
        venv.create(folder / "environment", with_pip=True)
        binaries = folder / "environment" / "bin"
        found |= {
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            "XQUANT_CACHE": str(folder / "cache"),
        }
    found["PATH"] = f"{binaries}{os.pathsep}{found['PATH']}"
    found["VIRTUAL_ENV"] = str(binaries.parent)
    return found


@click.command()
@click.argument("pages", nargs=-1, type=click.Path(exists=True, path_type=Path, resolve_path=True))
@click.option("--slow", is_flag=True, help="Also run what takes minutes.")
@click.option("--fresh", is_flag=True, help="Begin with an empty environment.")
@click.option("--vllm", is_flag=True, help="Also run what vLLM needs: gigabytes and minutes.")
@click.option("--show", is_flag=True, help="Show what each block prints.")
@click.option("--way", type=click.Choice(list(WAYS)), help="The README and the pages that such a user reads.")
def main(pages: tuple[Path, ...], slow: bool, fresh: bool, vllm: bool, show: bool, way: str | None) -> None:
    """Run each command and snippet of PAGES; by default of README.md and all of docs/."""
    readme, docs = ROOT / "README.md", ROOT / "docs"
    if way:
        pages = (readme, *(docs / f"{page}.md" for page in WAYS[way]), *pages)
    chosen = pages or (readme, *sorted(docs.rglob("*.md")))
    # An empty environment is filled by what the README says.
    if fresh and readme not in chosen:
        chosen = (readme, *chosen)
    try:
        blocks = [block for page in chosen for block in blocks_of(page)]
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    wanted = {"": True, "slow": slow, "setup": fresh, "vllm": vllm, "server": vllm, "never": False}
    failed, clock = 0, Clock()
    with tempfile.TemporaryDirectory(prefix="follow-docs-") as place:
        folder = Path(place) / "checkout"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        follower = Follower(folder, environment(Path(place), fresh))
        for block in blocks:
            if not wanted[block.rule]:
                click.echo(f"  skipped  {block}  ({block.why or block.rule})")
                continue
            started = time.perf_counter()
            well, printed = follower.run(block)
            seconds = time.perf_counter() - started
            clock.add(block, seconds)
            click.echo(f"{'ok' if well else 'FAILED':>6} {seconds:5.1f} s  {block}")
            if not well:
                failed += 1
                click.echo(f"{block.code}\n{printed}", err=True)
            elif show:
                click.echo(printed)
        follower.end()
    click.echo("\n".join(clock.lines()))
    click.echo(f"{len(blocks)} blocks, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
