"""Rounds of a benchmark: trials take turns, so that what slows the machine down slows all of them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from xquant.progress import Progress

from . import capacity
from .clocks import Clock, Job
from .contenders import Peer
from .trials import Settings, Trial

HOPELESS = 2.0
"""A trial that takes so many times as long as another of its name is given up."""
FAR = 4.0
"""And so is a peer that takes so many times as long as the full cache."""
STEP, ATTENTION = "step", "attend"
"""The jobs that are timed, by the names of `Contender`'s methods."""

MakeClock = Callable[[Job, torch.device], Clock]
Told = Callable[[], None]


def nobody() -> None:
    """A `Told` that tells nobody."""


class Rounds:
    """All turns of some trials at some jobs.

    Trials that turn out hopeless while they warm up are given up, so that the benchmark does not wait for the
    worst settings most of the time. They keep the times of the warm-up.

    Args:
        jobs: the first one decides who is hopeless.
        tolerant: a trial that raises has failed, and the others go on.
        frees: those that are given up are of no further use.
    """

    def __init__(
        self,
        every: Sequence[Trial],
        jobs: Sequence[str],
        kind: MakeClock,
        settings: Settings,
        tolerant: bool = False,
        frees: bool = True,
    ) -> None:
        self._every, self._jobs, self._tolerant, self._frees = every, jobs, tolerant, frees
        self._warm_up, self._total = settings.warm_up, settings.warm_up + settings.rounds
        self._clocks: list[dict[str, Clock]] = []
        for trial in every:
            trial.slow = False
            self._clocks.append({})
            self._forget(trial)
            if trial.contender is not None:
                asked = [job for job in jobs if job != ATTENTION or trial.contender.alone]
                place = trial.contender.device
                self._clocks[-1] |= {job: kind(getattr(trial.contender, job), place) for job in asked}

    def run(self, progress: Progress, told: Told) -> None:
        """Take all turns. ``told`` is called after every round that counts."""
        count = len(self._every)
        for i, trial in enumerate(self._every):
            if trial.compiled:  # a stage of its own: it may take a minute, and says nothing of other turns
                progress(0, 1, f"compiling {trial.what}")
            else:
                progress(i, count, trial.what)
            self._turn(i, first=True)
        for number in range(1, self._total):
            if number == self._warm_up:
                self._give_up()
            for i, trial in enumerate(self._every):
                progress((number - 1) * count + i, (self._total - 1) * count, trial.what)
                if number == self._warm_up and not trial.slow:
                    self._forget(trial)
                self._turn(i)
            if number >= self._warm_up:
                told()

    def _forget(self, trial: Trial) -> None:
        trial.seconds |= {job: [] for job in self._jobs}

    def _turn(self, place: int, first: bool = False) -> None:
        trial, clocks = self._every[place], self._clocks[place]
        if trial.failed or trial.slow:
            return
        with trial.noting_failure() if self._tolerant else nullcontext():
            for job, clock in clocks.items():
                if first:
                    clock.settle()
                    trial.timed_by[job] = clock.how
                trial.seconds[job].append(clock())
            if trial.contender is not None:
                trial.contender.rewind()
        if trial.failed:
            clocks.clear()
            capacity.release()

    def _give_up(self) -> None:
        """Go on without the trials that are `HOPELESS`, and the peers that are `FAR` behind."""
        found = [min(trial.seconds[self._jobs[0]], default=0.0) for trial in self._every]
        best: dict[str, float] = {}
        for trial, taken in zip(self._every, found, strict=True):
            if not trial.failed:
                best[trial.name] = min(taken, best.get(trial.name, taken))
        for trial, taken, clocks in zip(self._every, found, self._clocks, strict=True):
            if trial.failed:
                continue
            far = isinstance(trial.contender, Peer) and taken > FAR * best.get("full", taken)
            if far:
                trial.behind = taken / best["full"]
            if far or taken > HOPELESS * best[trial.name]:
                trial.slow = True
                clocks.clear()
                if self._frees:
                    trial.free()
        capacity.release()
