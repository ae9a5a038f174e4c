"""An agent for any OpenEnv environment. It uses the network protocol of OpenEnv and does not import the library."""

import argparse
import json
from collections.abc import Iterable
from typing import Any, cast

import aiohttp
import openai

import agentlightning as agl

MAX_TURNS = 20
STEP_SECONDS = 60.0


class EnvironmentFailed(RuntimeError):
    """The environment server failed, so the episode says nothing about the model."""


async def send(
    socket: aiohttp.ClientWebSocketResponse, kind: str, data: object, fields: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the observation, the reward and the end that follow a reset or an action. `fields` are of the actions."""
    await socket.send_json({"type": kind, "data": data})
    message = await socket.receive(timeout=STEP_SECONDS)
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise EnvironmentFailed(f"the environment server closed the connection during {kind}")
    reply = json.loads(message.data)
    if reply["type"] == "error":
        error = reply["data"]
        if kind == "step" and is_of_model(error, data, fields):
            ended = error["code"] == "SESSION_ERROR"  # otherwise the model can try again
            return {"observation": {"error": f"invalid action: {error.get('errors')}"}, "reward": 0.0, "done": ended}
        raise EnvironmentFailed(f"{error['code']}: {error['message']}")
    return reply["data"]


def is_of_model(error: dict[str, Any], action: object, fields: Iterable[str]) -> bool:
    """Return whether the server rejected the action. Otherwise the environment itself failed."""
    if error["code"] == "SESSION_ERROR":  # it cannot send why: an exception of a validator, or an invalid character
        return "serializ" in error["message"]
    known: set[object] = {"data", *fields}  # other fields are of an observation
    if isinstance(action, dict):
        known.update(cast("dict[str, object]", action))
    return error["code"] == "VALIDATION_ERROR" and any(not e["loc"] or e["loc"][0] in known for e in error["errors"])


async def tool_of(session: aiohttp.ClientSession) -> Any:
    """Return the actions of the environment as a tool of the model."""
    async with session.get("/schema") as reply:
        schema = (await reply.json())["action"]
    schema["properties"].pop("metadata", None)  # a field of every action, which no model has to set
    return {"type": "function", "function": {"name": "step", "description": "Take one action.", "parameters": schema}}


def arguments_of(call: Any) -> object:
    """Return the action that the model wrote, or its text, which the environment rejects, if it is not JSON."""
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):  # a number with thousands of digits is a ValueError too
        return call.function.arguments


def text_of(result: dict[str, Any]) -> str:
    """Return what the model reads of an observation."""
    return json.dumps({name: value for name, value in result["observation"].items() if name != "metadata"})


@agl.rollout
async def plays(task: dict[str, Any], llm: agl.LLM) -> float:
    """Run one episode on the server `task["server"]`, reset with `task["reset"]`. Return the sum of its rewards."""
    client = openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "unused")
    async with client, aiohttp.ClientSession(task["server"], raise_for_status=True) as session:
        tool = await tool_of(session)
        fields = tool["function"]["parameters"]["properties"]
        async with session.ws_connect("/ws", max_msg_size=100 * 2**20) as socket:
            result = await send(socket, "reset", task["reset"])
            messages: list[Any] = [{"role": "user", "content": text_of(result)}]
            total = 0.0
            for _ in range(MAX_TURNS):
                create: Any = client.chat.completions.create
                answer = await create(model=llm.model, messages=messages, tools=[tool], **llm.sampling_parameters)
                message = answer.choices[0].message
                if not message.tool_calls:
                    break
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    result = await send(socket, "step", arguments_of(call), fields)
                    total += float(result["reward"] or 0.0)
                    if result["done"]:
                        return total
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text_of(result)})
            return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure a model on episodes of an environment.")
    parser.add_argument("--endpoint", required=True, help="base URL of an OpenAI-compatible server")
    parser.add_argument("--model", required=True, help="name of the model on the server")
    parser.add_argument("--server", default="http://127.0.0.1:8001", help="address of the environment server")
    parser.add_argument("--tasks", type=int, default=20, help="number of episodes")
    options = parser.parse_args()
    served = agl.LLM(endpoint=options.endpoint, model=options.model)
    trainer = agl.Trainer(strategy="shm", runner={"concurrency": 8}, initial_resources={"llm": served})
    print(trainer.evaluate(plays, [{"server": options.server, "reset": {"seed": i}} for i in range(options.tasks)]))
