"""Fixtures that the tests of the OpenAI endpoints share."""

from __future__ import annotations

import pytest

from atom.tokenizer import Tokenizer
from tests.openai_server import ScriptedEngine, Server
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_fixture(tmp_path_factory) -> Tokenizer:
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module", name="shared_server")
def shared_server_fixture(tokenizer):
    with Server(ScriptedEngine(tokenizer)) as server:
        yield server


@pytest.fixture(name="server")
def server_fixture(shared_server, tokenizer):
    """The module's server, its engine as new."""
    engine = shared_server.engine
    engine.__dict__.update(ScriptedEngine(tokenizer).__dict__)
    yield shared_server
    assert engine.running == 0
