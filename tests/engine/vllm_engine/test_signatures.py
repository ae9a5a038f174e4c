"""Every request to vLLM and every field read of its answers is in the stored signatures of the real package."""

from __future__ import annotations

import copy
import json
from typing import Any

from agentlightning.engine import vllm, vllm_server
from agentlightning.llm_proxy.dialects.token_fields import IDS
from agentlightning.llm_proxy.endpoints.engines import VLLM
from tests.engine.vllm_engine.signatures import STORED, lost_entries

OFFERED: dict[str, Any] = json.loads(STORED.read_text())


def test_requests_have_the_fields_that_ask_for_tokens() -> None:
    assert set(VLLM.asks["chat/completions"]) <= set(OFFERED["classes"]["ChatCompletionRequest"])


def test_replies_have_the_fields_that_tokens_are_read_from() -> None:
    classes = OFFERED["classes"]
    prompt, completion = IDS
    assert classes["ChatCompletionResponse"][prompt] == "list[int] | None"
    assert classes["ChatCompletionStreamResponse"][prompt] == "list[int] | None"
    for choice in ("ChatCompletionResponseChoice", "ChatCompletionResponseStreamChoice"):
        assert classes[choice][completion] == "list[int] | None"
        assert classes[choice]["logprobs"].startswith("ChatCompletionLogProbs |")
    assert classes["ChatCompletionLogProb"]["logprob"] == "float"
    assert "content" in classes["ChatCompletionLogProbs"]


def test_the_server_has_the_routes_variables_and_metrics_that_steer_it() -> None:
    posted = ("pause", "resume", "sleep", "wake_up", "reset_prefix_cache", "v1/load_lora_adapter", "collective_rpc")
    assert {f"GET /{route}" for route in ("health", "v1/models", "is_sleeping")} <= set(OFFERED["routes"])
    assert {f"POST /{route}" for route in posted} <= set(OFFERED["routes"])
    assert "weights_path" in OFFERED["functions"]["GPUModelRunner.reload_weights"]
    variables = {*vllm_server.SWITCHES, "VLLM_API_KEY", "VLLM_ALLOW_INSECURE_SERIALIZATION"}
    assert variables <= set(OFFERED["variables"])
    assert {"vllm:request_success", "vllm:prompt_tokens", "vllm:generation_tokens"} <= set(OFFERED["metrics"])


def test_the_transfer_by_cuda_ipc_has_its_classes() -> None:
    assert OFFERED["classes"]["IPCTrainerInitInfo"]["packed"] == "bool"
    assert OFFERED["functions"]["ModuleSource.__init__"] == ["module"]
    assert {"client", "source"} <= set(OFFERED["functions"]["WeightTransferTrainerFactory.trainer_init"])
    assert OFFERED["functions"]["TrainerWeightTransferEngine.send_weights"] == []
    assert "IpcSync" in vars(vllm)


def test_what_a_later_version_drops_is_named() -> None:
    later = copy.deepcopy(OFFERED) | {"vllm": "9.9"}
    del later["classes"]["ChatCompletionRequest"]["return_token_ids"]
    later["arguments"].remove("--enable-sleep-mode")
    later["routes"]["POST /new"] = []
    assert lost_entries(OFFERED, later) == [
        "classes: vLLM 9.9 has no longer ChatCompletionRequest.return_token_ids bool | None",
        "arguments: vLLM 9.9 has no longer --enable-sleep-mode",
    ]
