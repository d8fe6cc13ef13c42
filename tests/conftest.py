"""Fixtures of more than one module."""

from __future__ import annotations

import pytest

from tests.recording import DEFAULTS


@pytest.fixture(params=["page", "slot"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test is run for both backends; a recording engine takes the one whose turn it is."""
    monkeypatch.setitem(DEFAULTS, "backend", request.param)
    return request.param
