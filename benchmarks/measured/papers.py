"""The pages of docs/papers/: a table for each experiment, under its id, and an index of the verdicts.

A verdict is written by hand, in the experiment's section of its paper's page.
"""

import re
from functools import partial
from itertools import groupby

from xquant_lab.reproduce.experiment import Experiment
from xquant_lab.reproduce.experiments import EXPERIMENTS

from .beside import beside
from .common import RESULTS, TABLES, code, markdown, table

PAGES = RESULTS.parent.parent / "docs" / "papers"
OPEN = "not measured yet"
VERDICTS = (
    "holds",
    "holds weakly",
    "does not hold here",
    "cannot be judged on this model",
    OPEN,
)
VERDICT = re.compile(r"^\*\*Verdict: (.+?)\.\*\*", re.MULTILINE)

TABLES |= {name: partial(beside, experiment) for name, experiment in EXPERIMENTS.items()}


def paper_of(experiment: Experiment) -> str:
    """The name of its paper's page, without ``.md``."""
    return experiment.id.partition("/")[0]


def heading(experiment: Experiment) -> str:
    """What its section is called: ``Table B.1: ...``."""
    name = re.sub("(table|figure)", r"\1 ", experiment.id.partition("/")[2])
    return f"{name[0].upper()}{name[1:]}: {experiment.title}"


def anchor(words: str) -> str:
    """Where a link to a heading goes."""
    return re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")


def sections(paper: str) -> dict[str, list[str]]:
    """The sections of a page by their headings; more than one where a heading stands twice."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^## ", (PAGES / f"{paper}.md").read_text(), flags=re.MULTILINE)[1:]:
        head, _, text = part.partition("\n")
        found.setdefault(head, []).append(text)
    return found


def verdict(experiment: Experiment) -> str:
    """
    Raises:
        ValueError: not one section, or not one verdict that is known.
    """
    own = sections(paper_of(experiment)).get(heading(experiment), [])
    if len(own) != 1:
        raise ValueError(
            f"docs/papers/{paper_of(experiment)}.md has {len(own)} sections '{heading(experiment)}'"
        )
    found = VERDICT.findall(own[0])
    if len(found) != 1 or found[0] not in VERDICTS:
        raise ValueError(f"{experiment.id} needs one verdict of {', '.join(VERDICTS)}: {found}")
    return str(found[0])


def by_paper() -> list[tuple[str, list[Experiment]]]:
    """The experiments of each page."""
    groups = groupby(EXPERIMENTS.values(), paper_of)
    return [(paper, list(experiments)) for paper, experiments in groups]


@table
def papers() -> str:
    """All experiments and their verdicts, a table for each paper."""
    parts = []
    for paper, experiments in by_paper():
        body = []
        for experiment in experiments:
            needs = [experiment.needs, "calibration" if experiment.calibrates else ""]
            link = f"[{code(experiment.id)}]({paper}.md#{anchor(heading(experiment))})"
            wanted = ", ".join(filter(None, needs))
            body.append([link, experiment.title, wanted, verdict(experiment)])
        parts.append(f"### {experiments[0].paper}\n")
        parts.append(markdown(["experiment", "what it shows", "needs", "verdict"], body))
    return "\n".join(parts)


@table
def verdicts() -> str:
    """How many experiments of each paper have each verdict."""
    body = []
    for paper, experiments in by_paper():
        found = [verdict(experiment) for experiment in experiments]
        counts = [*map(found.count, VERDICTS), len(found)]
        body.append([f"[{experiments[0].paper}]({paper}.md)", *map(str, counts)])
    totals = (sum(map(int, column)) for column in zip(*(row[1:] for row in body), strict=True))
    return markdown(["paper", *VERDICTS, "all"], [*body, ["all", *map(str, totals)]])
