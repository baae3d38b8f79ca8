"""One HTML page of a comparison, readable without a network: the picture is drawn inside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TEMPLATE = "page.html.j2"


def render_page(rows: Sequence[Mapping[str, Any]], svg: str) -> str:
    """The page for ``rows`` of one run (as `xquant.evals.results.stamp` makes them) and its picture."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    first = rows[0]
    return jinja.get_template(TEMPLATE).render(
        rows=rows, first=first, environment=first["environment"], svg=Markup(svg)
    )
