"""Every form of a cache against every promise: each is kept, or refused by one line that the table names."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from .forms import FORMS, Form
from .promise import Promise
from .refusals import PROMISES, REFUSED

COMPILED = {"padding", "reset", "threads"}
"""Promises that `make test` asks of compiled models, where each takes as long as of all other forms; of the
others `make matrix` does."""


def cells() -> Iterator[Any]:
    for promise in PROMISES.values():
        for form in FORMS.values():
            long = form.name.endswith("compiled") and promise.name not in COMPILED
            marks = [pytest.mark.long] if long else []
            yield pytest.param(promise, form, id=f"{promise.name}-{form.name}", marks=marks)


@pytest.mark.cases(40)
@pytest.mark.parametrize(("promise", "form"), cells())
def test_cell(promise: Promise, form: Form) -> None:
    line = REFUSED.get(promise.name, {}).get(form.name)
    if line is None:
        with ExitStack() as stack:
            promise.keep(form, stack)
        return
    said = []
    for _ in range(2):
        with (
            pytest.raises((ValueError, TypeError, AttributeError), match=f"^{line}") as found,
            ExitStack() as stack,
        ):
            promise.keep(form, stack)
        said.append(str(found.value))
    assert said[0] == said[1] and "\n" not in said[0]


def test_what_is_refused_is_something_of_some_form() -> None:
    assert REFUSED.keys() <= PROMISES.keys()
    assert all(forms.keys() <= FORMS.keys() for forms in REFUSED.values())
