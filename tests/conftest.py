"""Fixtures and settings of more than one module."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.recording import DEFAULTS

# How long an example takes depends on what else the machine does: it decides nothing.
settings.register_profile("atom", deadline=None)
settings.load_profile("atom")


@pytest.fixture(params=["page", "slot"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test is run for both backends; a recording engine takes the one whose turn it is."""
    monkeypatch.setitem(DEFAULTS, "backend", request.param)
    return request.param
