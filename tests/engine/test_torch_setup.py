"""Settings of torch that the learner makes for its whole process."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import psutil
import pytest
import torch

from agentlightning.engine.torch_setup import leave_out_cudnn_attention, return_freed_memory


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the call")
def test_the_memory_of_many_freed_tensors_goes_back_to_the_system() -> None:
    tensors = [torch.ones(25_000) for _ in range(2_000)]  # 100 kB each, so that they share a heap
    held, last = psutil.Process().memory_info().rss, tensors.pop()  # the last one keeps the end of the heap in use
    del tensors
    return_freed_memory()
    assert psutil.Process().memory_info().rss < held - 150_000_000
    assert last.numel() == 25_000
