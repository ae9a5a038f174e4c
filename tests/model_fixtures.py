"""Tiny real models, untrained, and the engine that serves them; a plugin of every test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from agentlightning.engine.engine import InferenceEngine
    from agentlightning.training.learner.policy import Policy


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that knows nothing."""
    from tests.algorithm.parts import save_untrained_model

    return save_untrained_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model of the demo before its warm start."""
    from agentlightning.demo.model import make_model, make_tokenizer
    from agentlightning.engine.torch_setup import no_progress_bar

    folder = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer()
    with no_progress_bar():
        make_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def policy(model_folder: Path) -> Policy:
    from agentlightning.training.learner.policy import Policy

    return Policy.load(model_folder, learning_rate=1e-3)


@pytest.fixture
def engine(policy: Policy) -> Iterator[InferenceEngine]:
    from agentlightning.engine.engine import InferenceEngine

    made = InferenceEngine(policy, max_batch=8, max_new_tokens=16)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def byte_engine() -> Iterator[InferenceEngine]:
    """A running engine whose tokens are bytes."""
    from agentlightning.engine.engine import InferenceEngine
    from tests.engine.byte_policy import byte_policy

    made = InferenceEngine(byte_policy(), max_batch=8, max_new_tokens=64)
    made.start()
    yield made
    made.stop()
