"""An environment of Harbor that writes down its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult  # type: ignore[import-not-found]
from harbor.environments.capabilities import EnvironmentCapabilities  # type: ignore[import-not-found]


class Recorded(BaseEnvironment):
    """Has no sandbox at all."""

    def __init__(self, *args: Any, told: str, stop_seconds: float = 0, fails: str = "", **kwargs: Any) -> None:
        self.told, self.stop_seconds, self.fails = Path(told), stop_seconds, fails
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "recorded"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        pass

    async def stop(self, delete: bool) -> None:
        await asyncio.sleep(self.stop_seconds)
        if self.session_id == self.fails:
            raise RuntimeError("not found")
        with self.told.open("a") as file:
            file.write(f"{self.session_id} {delete=}\n")

    async def upload_file(self, source_path: Any, target_path: str) -> None:
        pass

    async def upload_dir(self, source_dir: Any, target_dir: str) -> None:
        pass

    async def download_file(self, source_path: str, target_path: Any) -> None:
        pass

    async def download_dir(self, source_dir: str, target_dir: Any) -> None:
        pass

    async def exec(self, command: str, *args: Any, **kwargs: Any) -> ExecResult:
        if command == "wait":
            self.told.with_suffix(".waits").touch()
            await asyncio.sleep(60)
        return ExecResult(stdout="", stderr="", return_code=0)
