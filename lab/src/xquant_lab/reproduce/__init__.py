"""The tables and figures of the papers measured again, on any model, beside what the papers print.

One file a paper declares its experiments, `experiments` lists them, and ``figures/`` holds the papers' own
figures. What they are called stands here, where a wrong id is refused without waiting for torch.
"""

_PARTS = {
    "xquant": "table1 table2 table3 table4 tableB.1 tableB.2 figure1 figure3 figureB.2 figureB.3",
    "crosslayer": "table1 table2 table3 table4 table5 table6 table7 table8 figure2 figure3",
    "kvquant": "table1 table2 table3 table4 table5 table6 table7 table8 table9 table10 table11 table12"
    " table13 table14 table15 table16 table17 table18 table19 table20 table21 table22 figure1 figure2"
    " figure3 figure4",
}
IDS = tuple(f"{paper}/{part}" for paper, parts in _PARTS.items() for part in parts.split())
"""Of `experiments.EXPERIMENTS`, in its order."""


def check_id(name: str) -> None:
    """Raise ValueError where no experiment has this id."""
    if name not in IDS:
        raise ValueError(f"there is no experiment '{name}': 'xquant reproduce --list' shows them")
