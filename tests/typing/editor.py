"""An editor of a user: asks the language server of pyright about a program, as an editor does while one types."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SERVER = str(Path(sys.executable).parent / "basedpyright-langserver")


class Editor:
    """One open file; positions are those of the first occurrence of a text, at its end. Close it with `with`."""

    def __init__(self, file: Path) -> None:
        self._file, self._calls = file, 0
        self._server = subprocess.Popen([SERVER, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        folders = [{"uri": file.parent.as_uri(), "name": "program"}]
        self._call("initialize", processId=None, rootUri=None, capabilities={}, workspaceFolders=folders)
        self._send("initialized")
        self._uri, self._text = file.as_uri(), file.read_text()
        document = {"uri": self._uri, "languageId": "python", "version": 1, "text": self._text}
        self._send("textDocument/didOpen", textDocument=document)

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.kill()
        self._server.communicate()

    def completions(self, text: str) -> list[str]:
        """Return the labels that are offered after `text`."""
        found = self._at("textDocument/completion", text)
        return [item["label"] for item in (found["items"] if isinstance(found, dict) else found)]

    def hover(self, text: str) -> str:
        """Return what is shown over the last word of `text`."""
        found = self._at("textDocument/hover", text, back=1)
        return found["contents"]["value"] if found else ""

    def _at(self, method: str, text: str, back: int = 0) -> Any:
        before = self._text[: self._text.index(text) + len(text) - back]
        place = {"line": before.count("\n"), "character": len(before) - before.rfind("\n") - 1}
        return self._call(method, textDocument={"uri": self._uri}, position=place)

    def _send(self, method: str, **params: Any) -> None:
        self._write({"method": method, "params": params})

    def _call(self, method: str, **params: Any) -> Any:
        self._calls += 1
        self._write({"id": self._calls, "method": method, "params": params})
        while (message := self._read()).get("id") != self._calls or "method" in message:
            if {"id", "method"} <= message.keys():  # the server asks for settings
                self._write({"id": message["id"], "result": None})
        return message["result"]

    def _write(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._server.stdin is not None
        self._server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._server.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        length = 0
        while line := self._server.stdout.readline().strip():
            if line.startswith(b"Content-Length:"):
                length = int(line.split(b":")[1])
        return json.loads(self._server.stdout.read(length))
