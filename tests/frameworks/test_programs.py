"""Programs in processes of their own, told of the gateway by environment variables: bash with curl, and two clients."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys

import pytest

import agentlightning as agl
from tests.frameworks.harness import TASKS
from tests.frameworks.suite import ONE_CALL, TOOL_LOOP, Promise, keeps, rollout_of
from tests.stubs.processes import run_program

BASH = r"""
set -euo pipefail
messages=$(jq -n --arg task "$TASK" '[{role: "user", content: $task}]')
tools='[{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}]'
while true; do
  message=$(jq -n --arg model "$MODEL" --argjson messages "$messages" --argjson tools "$tools" \
      '{model: $model, messages: $messages, tools: $tools}' |
    curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -d @- \
      -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" |
    jq '.choices[0].message')
  messages=$(jq --argjson message "$message" '. + [$message]' <<<"$messages")
  call=$(jq '.tool_calls[0] // empty' <<<"$message")
  if [ -z "$call" ]; then
    jq -r .content <<<"$message"
    exit
  fi
  result=$(jq -r '.function.arguments | fromjson | .a * .b' <<<"$call")
  messages=$(jq --argjson call "$call" --arg result "$result" \
    '. + [{role: "tool", tool_call_id: $call.id, content: $result}]' <<<"$messages")
done
"""

STREAMED_BASH = r"""
set -euo pipefail
jq -n --arg model "$MODEL" --arg task "$TASK" \
    '{model: $model, stream: true, messages: [{role: "user", content: $task}]}' |
  curl -sSN --fail-with-body "$OPENAI_BASE_URL/chat/completions" -d @- \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" |
  sed -n 's/^data: //p'
"""

OPENAI = """
import os
from openai import OpenAI

messages = [{"role": "user", "content": os.environ["TASK"]}]
completion = OpenAI().chat.completions.create(model=os.environ["MODEL"], messages=messages)
print(completion.choices[0].message.content)
"""

ANTHROPIC = """
import os
from anthropic import Anthropic

messages = [{"role": "user", "content": os.environ["TASK"]}]
message = Anthropic().messages.create(model=os.environ["MODEL"], max_tokens=100, messages=messages)
print(message.content[0].text)
"""


def run(command: list[str], task: str, llm: agl.LLM) -> str:
    """Run a program to its end; it gets the gateway by its environment alone."""
    url, key = llm.get_base_url(), llm.api_key or "unused"
    variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
    return run_program(*command, MODEL=llm.model, TASK=task, **variables).stdout.strip()


needs_curl = pytest.mark.skipif(
    any(shutil.which(program) is None for program in ("bash", "curl", "jq")),
    reason="bash, curl and jq are not all here",
)


@needs_curl
@keeps(TOOL_LOOP)
def test_a_tool_loop_in_bash_with_curl(task: str, llm: agl.LLM) -> str:
    return run(["bash", "-c", BASH], task, llm)


FRAMES = [["", "One", " word", " after", " the", " other.", ""]] * 2


@needs_curl
@keeps(Promise("stream", lambda _: "One word after the other.", FRAMES))
def test_curl_reads_a_stream_to_its_last_frame(task: str, llm: agl.LLM) -> list[str]:
    *frames, done = run(["bash", "-c", STREAMED_BASH], task, llm).splitlines()
    assert done == "[DONE]"
    return [json.loads(frame)["choices"][0]["delta"].get("content", "") for frame in frames]


@pytest.mark.parametrize(("package", "program"), [("openai", OPENAI), ("anthropic", ANTHROPIC)])
def test_a_client_that_is_told_by_its_environment(package: str, program: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-frameworks")

    def by_environment(task: str, llm: agl.LLM) -> str:
        return run([sys.executable, "-c", program], task, llm)

    ONE_CALL.but(tasks=TASKS[:1], direct=False).check(rollout_of(by_environment))
