"""Start a vLLM server, wait for it, request text with token ids once, and end the server.

    python examples/minimal/vllm_server.py Qwen/Qwen2.5-0.5B-Instruct

Other arguments, such as `--max-model-len 4096`, go to vLLM. `--command` replaces the command line `agl vllm`,
`--seconds` limits the time until the server answers. It needs a GPU and the extra `vllm`; `CUDA_VISIBLE_DEVICES`
selects the GPU, `HF_HOME` is the folder of models.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path

import openai

from agentlightning.engine.vllm_server import VLLMProcess


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Start a vLLM server, send one request, and end it.", allow_abbrev=False
    )
    parser.add_argument("model", help="model name on the Hugging Face Hub, or a folder")
    parser.add_argument("--command", default="", help="command that starts the server; agl vllm by default")
    parser.add_argument("--seconds", type=float, default=600.0)
    args, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        server = VLLMProcess(
            lambda: [args.model, "--served-model-name", "model", *others],
            command=shlex.split(args.command),
            log=Path(folder, "vllm.log"),
            start_seconds=args.seconds,
        )
        server.start()  # returns when GET /health answers; an error contains the last lines of the log
        try:
            print("ready:", server.control.is_healthy())
            with openai.OpenAI(base_url=f"{server.control.address}/v1", api_key=server.api_key) as client:
                reply = client.chat.completions.create(
                    model="model",
                    messages=[{"role": "user", "content": "What is 3 plus 4?"}],
                    max_completion_tokens=5,
                    extra_body={"return_token_ids": True},
                )
            print("tokens:", len((reply.choices[0].model_extra or {})["token_ids"]))
        finally:
            server.stop()
        print("ended:", not server.control.is_healthy())


if __name__ == "__main__":
    main()
