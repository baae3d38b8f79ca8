"""Shelf: sets of tensors under names, as files of one folder that several processes share."""

import errno
import os
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..files import remove_unfinished, replacing
from .digest import BLANK, is_intact, with_digest

Tensors = dict[str, Tensor]

MOST = 20 * 10**9
"""Bytes that a folder may take, where nobody says how many and the disk has room for twice as many."""
_SUFFIX = ".safetensors"
_POLL = 0.005
"""Seconds between two looks at whether the lock is free."""


class Shelf:
    """A folder of files that together take at most ``limit`` bytes; the least recently used go first.

    A reader takes no lock: a file appears whole, and one that is removed while it is read stays readable.
    Writers hold the folder's lock, which the system releases when a process dies. So there is at most one
    unfinished file, and whoever writes next removes it. A file holds its SHA-256; one that was altered is
    removed by whoever reads it, with a warning, and so is what is no file.

    A disk that is full or broken, and a folder that is gone, fail nobody: what cannot be put is left out, and
    what cannot be read is not there. A warning says why, once for each reason.

    Names that come in order are a chain: each is of use only with those before it. They are used, and so
    dropped, in such an order that a chain loses its end first.

    Args:
        folder: made where it is missing.
        limit: bytes of all files in it. None: `MOST`, or half of what the disk has for them, if that is less.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.folder = folder
        self.damaged = 0  # files, that were found by this object
        self._told: set[tuple[str, str]] = set()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / ".lock", poll_interval=_POLL)
        with self._lock:
            remove_unfinished(folder)
            if not os.access(folder, os.W_OK | os.X_OK):  # but a lock that was there may be taken
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            files = self._files()
            self.limit = _usual(folder, files) if limit is None else limit
            self._make_room(0, files, set())
        self.room = self.limit - _total(files)
        """Bytes that were left of the limit when this object last wrote."""

    def __contains__(self, name: str) -> bool:
        with self._going_on("read"):
            path = self._path(name)
            return path.exists() and not _holds_other(path)
        return False

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return _total(self._seen())

    def names(self) -> list[str]:
        """Of all files."""
        return list(self._seen())

    def get(self, name: str) -> Tensors | None:
        """What was put under a name; None where nothing is, or where it is damaged."""
        content = None
        with self._going_on("read"):
            if self._is_clear(name):
                content = self._path(name).read_bytes()
        if content is None:
            return None
        why = "its bytes were altered"
        if is_intact(content):
            try:
                with torch.device("cpu"):  # where it puts empty tensors is the default device
                    return load(content)
            except SafetensorError as error:
                why = str(error)[:160]
        self.discard(name, why)
        return None

    def discard(self, name: str, why: str) -> None:
        """Remove a file that is not as it must be, with a warning."""
        path = self._path(name)
        self.damaged += 1
        try:
            path.unlink(missing_ok=True)
            then = "it is removed"
        except OSError as error:
            then = f"it cannot be removed ({error.strerror})"
        warnings.warn(f"'{path}' is damaged ({why}): {then}", stacklevel=3)

    def _is_clear(self, name: str) -> bool:
        """Whether a file is or can be put under a name; what else is there is removed if it can be."""
        path = self._path(name)
        if _holds_other(path):
            self.discard(name, "it is no file")
        return not _holds_other(path)

    def touch(self, names: Sequence[str]) -> None:
        """Note that a chain was used just now."""
        now = time.time_ns()
        for place, name in enumerate(names):
            try:
                os.utime(self._path(name), ns=(now - place, now - place))
            except FileNotFoundError:
                return
            except OSError:  # it is another user's, who says when it was used, or nobody writes here now
                continue

    def put(self, names: Sequence[str], make: Callable[[int], Tensors]) -> int:
        """Put a chain, as much of it as there is room for.

        Args:
            make: gives the tensors of the name at this place; asked for those that are not there.

        Returns:
            how many of the names are there now, from the first on.
        """
        there = 0
        with self._going_on("written to"):
            self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            with self._lock:
                files, own = self._files(), set(names)
                for place, name in enumerate(names):
                    if name not in files:
                        content = with_digest(save(make(place), {"sha256": BLANK}))
                        if not self._make_room(len(content), files, own) or not self._is_clear(name):
                            break
                        with replacing(self._path(name)) as file:
                            file.write_bytes(content)
                        files[name] = time.time_ns(), len(content)
                    there = place + 1
                self.touch(names[:there])
                self.room = self.limit - _total(files)
        return there

    def clear(self) -> None:
        """Remove all files.

        Raises:
            OSError: one cannot be removed.
        """
        with self._lock:
            for name in self._files():
                self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"

    @contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """Whoever needs the folder does without it where the system fails; why is told once."""
        try:
            yield
        except OSError as error:
            told = what, error.strerror or str(error)
            usual = what == "read" and isinstance(error, FileNotFoundError)  # somebody dropped it just now
            if told not in self._told and not usual:
                self._told.add(told)
                message = f"'{self.folder}' cannot be {what} ({told[1]}): what fails is left out, every time"
                warnings.warn(message, RuntimeWarning, stacklevel=4)

    def _seen(self) -> dict[str, tuple[int, int]]:
        """As `_files`, or nothing where the folder cannot be read."""
        with self._going_on("read"):
            return self._files()
        return {}

    def _files(self) -> dict[str, tuple[int, int]]:
        """When each file was used, in nanoseconds, and its bytes."""
        found = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                    try:
                        state = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # removed just now
                        continue
                    found[entry.name.removesuffix(_SUFFIX)] = state.st_mtime_ns, state.st_size
        return found

    def _make_room(self, size: int, files: dict[str, tuple[int, int]], keep: set[str]) -> bool:
        """Remove files until ``size`` bytes more fit, but none of those to ``keep``. The lock is held.

        Returns:
            whether they fit now.
        """
        total = size + _total(files)
        for name in sorted(files.keys() - keep, key=lambda name: files[name]):
            if total <= self.limit:
                break
            self._path(name).unlink(missing_ok=True)
            total -= files.pop(name)[1]
        return total <= self.limit


def _total(files: dict[str, tuple[int, int]]) -> int:
    return sum(nbytes for _, nbytes in files.values())


def _usual(folder: Path, files: dict[str, tuple[int, int]]) -> int:
    """The limit of a folder for which nobody gave one; the same for whoever opens it next."""
    room = shutil.disk_usage(folder).free + _total(files)
    return min(MOST, room // 2)


def _holds_other(path: Path) -> bool:
    """Whether what is there is no file itself: a folder, or what leads to one or to nothing."""
    try:
        return not stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False
