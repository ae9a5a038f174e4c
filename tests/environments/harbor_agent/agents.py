"""An agent of Harbor that runs a script in its sandbox, with the model in the usual variables."""

from __future__ import annotations

from typing import Any

from harbor.agents.base import BaseAgent  # type: ignore[import-not-found]

ASK = """python3 - <<'EOF'
import json, os, urllib.request
body = json.dumps({"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "What is 6 times 7?"}]})
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)).status)
EOF
"""
"""A script that calls the model once."""


class Script(BaseAgent):
    """Runs `script` with bash; an exit code other than 0 is an error."""

    def __init__(self, *args: Any, script: str, **kwargs: Any) -> None:
        self.script = script
        super().__init__(*args, **kwargs)

    @staticmethod
    def name() -> str:
        return "script"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        env = {**self.extra_env, "MODEL": str(self.model_name).split("/")[-1]}
        result = await environment.exec(self.script, env=env)
        if result.return_code != 0:
            raise RuntimeError(f"ended with {result.return_code}: {result.stderr}")


class AskOnce(Script):
    """Calls the model once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, script=ASK, **kwargs)
