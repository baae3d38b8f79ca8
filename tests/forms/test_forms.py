"""Every form of a cache against every promise: each is kept, or refused by one line that the table names."""

from contextlib import ExitStack

import pytest

from .forms import FORMS, Form
from .promise import Promise
from .refusals import PROMISES, REFUSED


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("promise", PROMISES.values(), ids=PROMISES)
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
