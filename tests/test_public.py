"""The names of ``xquant``, whatever was imported before."""

import subprocess
import sys

import pytest

import xquant

CHECK = """
import xquant, xquant.calibrators.run, xquant.cli, xquant.contents.report, xquant.load
for name in xquant.__all__ * 2:
    assert callable(getattr(xquant, name)), name
"""


def test_every_name_is_there_and_stays_what_it_is() -> None:
    """A module of the same name would take its place when it is first imported."""
    subprocess.run([sys.executable, "-c", CHECK], check=True)


def test_every_name_is_listed() -> None:
    assert set(xquant.__all__) <= set(dir(xquant))


def test_a_name_that_the_laboratory_has_now() -> None:
    with pytest.warns(DeprecationWarning, match="xquant_lab"):
        found = xquant.Pyramid
    assert found.name == "pyramid"
