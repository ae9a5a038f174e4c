"""An update of the weights is retried only where no weight can have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentlightning.training.policies import PolicyUpdater
from agentlightning.training.updater import DrainTimeoutError
from tests.algorithm.parts import fit, two_turns


@pytest.mark.parametrize("error", [TimeoutError("the trainer gave no answer"), DrainTimeoutError("3 calls still run")])
def test_only_a_drain_that_timed_out_is_repeated(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: TimeoutError
) -> None:
    learn, updates = PolicyUpdater.update_weights, list[int]()

    def times_out_once(self: PolicyUpdater, step: int, rows: Any) -> Any:
        updates.append(step)
        if isinstance(error, DrainTimeoutError) and len(updates) > 1:
            return learn(self, step, rows)
        if not isinstance(error, DrainTimeoutError):
            learn(self, step, rows)  # the optimizer has taken its step
        raise error

    monkeypatch.setattr(PolicyUpdater, "update_weights", times_out_once)
    settings: dict[str, Any] = {"model": untrained_model, "output_dir": tmp_path, "max_steps": 1, "max_staleness": 1}
    if isinstance(error, DrainTimeoutError):
        assert fit(two_turns, ["a", "b"], **settings).steps == 1
        assert updates == [1, 1]
    else:
        with pytest.raises(TimeoutError, match=r"step 1: the update .* timed out.*gave no answer.*It is not repeated"):
            fit(two_turns, ["a", "b"], **settings)
        assert updates == [1]
