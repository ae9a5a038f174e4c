"""An environment of Harbor that writes down its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult  # type: ignore[import-not-found]
from harbor.environments.capabilities import EnvironmentCapabilities  # type: ignore[import-not-found]


class Recorded(BaseEnvironment):
    """Has no sandbox at all."""

    def __init__(self, *args: Any, told: str, **kwargs: Any) -> None:
        self.told = Path(told)
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
        return ExecResult(stdout="", stderr="", return_code=0)
