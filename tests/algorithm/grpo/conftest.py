"""A tiny real policy, untrained, and the engine that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning.algorithm.grpo.engine.engine import InferenceEngine
from agentlightning.algorithm.grpo.learner.policy import Policy
from agentlightning.algorithm.grpo.learner.torch_setup import no_progress_bar
from agentlightning.demo.model import make_model, make_tokenizer
from tests.algorithm.grpo.engine.byte_policy import byte_policy


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer()
    with no_progress_bar():
        make_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def policy(model_folder: Path) -> Policy:
    return Policy.load(model_folder, learning_rate=1e-3)


@pytest.fixture
def engine(policy: Policy) -> Iterator[InferenceEngine]:
    made = InferenceEngine(policy, max_batch=8, max_new_tokens=16)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def byte_engine() -> Iterator[InferenceEngine]:
    made = InferenceEngine(byte_policy(), max_batch=8, max_new_tokens=64)
    made.start()
    yield made
    made.stop()
