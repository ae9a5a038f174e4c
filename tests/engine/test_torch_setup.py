"""Settings of torch that the learner makes for its whole process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from agentlightning.engine.torch_setup import leave_out_cudnn_attention


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_model_on_a_gpu_leaves_out_the_attention_that_plans_for_each_shape() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    leave_out_cudnn_attention(torch.device("cpu"))
    assert torch.backends.cuda.cudnn_sdp_enabled()
    leave_out_cudnn_attention(torch.device("cuda"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
