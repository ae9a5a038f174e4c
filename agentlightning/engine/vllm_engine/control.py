"""The calls by which the learner steers a vLLM server: health, pause, sleep, weights, counts of tokens.

Source: vLLM 0.33, `entrypoints/serve/dev`, `entrypoints/serve/lora` and `entrypoints/rl/online`. All but `/health`,
`/version` and `/metrics` are there only with `VLLM_SERVER_DEV_MODE=1`, those of adapters only with
`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal
from urllib.parse import urlencode

from agentlightning.errors import EngineError

_HEALTH_SECONDS: Final = 5.0
_LONGEST_TEXT: Final = 500

SleepLevel = Literal[1, 2]
"""1 keeps the weights in the memory of the CPU, 2 drops them."""


class VLLMControl:
    """One vLLM server, by its address. May be used from any thread. Whatever it does not do is an `EngineError`."""

    def __init__(self, address: str, *, api_key: str | None = None) -> None:
        self.address = address.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def is_healthy(self) -> bool:
        """Return whether the server answers and its engine lives."""
        try:
            self._ask("GET", "/health", timeout=_HEALTH_SECONDS)
        except EngineError:
            return False
        return True

    def version(self) -> str:
        """Return the version of vLLM."""
        return str(json.loads(self._ask("GET", "/version", timeout=_HEALTH_SECONDS))["version"])

    def models(self) -> list[str]:
        """Return the names that requests may ask for: the model's, and those of adapters."""
        found = json.loads(self._ask("GET", "/v1/models", timeout=_HEALTH_SECONDS))
        return [str(model["id"]) for model in found["data"]]

    # --- while the weights change ------------------------------------------------------------------------------------

    def pause(self, timeout: float) -> None:
        """Let what is in flight end, and begin nothing new."""
        self._ask("POST", "/pause", {"mode": "wait"}, timeout=timeout)

    def resume(self, timeout: float) -> None:
        """Go on after `pause`."""
        self._ask("POST", "/resume", timeout=timeout)

    def sleep(self, level: SleepLevel, timeout: float) -> None:
        """Let what is in flight end, and give the GPU's memory back."""
        self._ask("POST", "/sleep", {"level": level, "mode": "wait"}, timeout=timeout)

    def wake_up(self, tags: Sequence[Literal["weights", "kv_cache"]], timeout: float) -> None:
        """Take the memory of the weights or of the key-value cache again."""
        self._ask("POST", "/wake_up", {"tags": list(tags)}, timeout=timeout)

    def is_sleeping(self) -> bool:
        """Return whether the server sleeps."""
        return bool(json.loads(self._ask("GET", "/is_sleeping", timeout=_HEALTH_SECONDS))["is_sleeping"])

    def forget_prefixes(self, timeout: float) -> None:
        """Drop the keys and values of prompts that older weights computed."""
        answer = self._ask("POST", "/reset_prefix_cache", timeout=timeout)
        if not json.loads(answer).get("success"):
            raise EngineError(
                f"The vLLM server at {self.address} did not drop its cache of prefixes, whose keys and values are of "
                "older weights: something else than this run makes calls there"
            )

    # --- weights -----------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str, timeout: float) -> None:
        """Serve the adapter in a folder under a name, in the place of one that had it."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        self._ask("POST", "/v1/load_lora_adapter", body=body, timeout=timeout)

    def reload_weights(self, path: str, timeout: float) -> None:
        """Serve the weights of a folder, which the server reads."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._ask("POST", "/collective_rpc", body=body, timeout=timeout)

    # --- figures -----------------------------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int, int]:
        """Return requests finished, prompt tokens and completion tokens since the server started."""
        from prometheus_client.parser import text_string_to_metric_families

        names = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        sums = dict.fromkeys(names, 0.0)
        text = self._ask("GET", "/metrics", timeout=_HEALTH_SECONDS).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in sums:
                    sums[sample.name] += sample.value
        requests, prompt, completion = (int(sums[name]) for name in names)
        return requests, prompt, completion

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        timeout: float,
    ) -> bytes:
        url = self.address + path + (f"?{urlencode(query, doseq=True)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=self._headers, method=method)
        what = f"{method} {path} of the vLLM server at {self.address}"
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace").strip()[:_LONGEST_TEXT]
            raise EngineError(
                f"{what} was answered with {error.code}: {text or error.reason}{_advice(error, path)}"
            ) from None
        except OSError as error:  # URLError and TimeoutError are of this kind
            raise EngineError(f"{what} was not answered within {timeout:g} s: {error}") from None


def _advice(error: urllib.error.HTTPError, path: str) -> str:
    if error.code == 404:
        variable = "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if "lora" in path else "VLLM_SERVER_DEV_MODE"
        return f". The server offers it when it was started with {variable}=1 in its environment"
    if error.code in (401, 403):
        return ". Its API key is read from the environment variable VLLM_API_KEY"
    return ""
