"""Write what the wheel says of the software in it: `python -m tests.packaging.bill`.

`release/agl-framework.cdx.json` is a bill of materials (CycloneDX 1.6): the scripts that are built into the page, with
licence and checksum, and what the package requires. `release/LICENSES-OF-THE-PAGE.txt` has their licence texts, out of
`dashboard/node_modules` (`make dashboard`). The same input gives the same bytes.
"""

from __future__ import annotations

import base64
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BILL = ROOT / "release/agl-framework.cdx.json"
TEXTS = ROOT / "release/LICENSES-OF-THE-PAGE.txt"
PAGE = ROOT / "dashboard"
TYPES_ONLY = ("@types/react", "csstype", "tagged-tag", "type-fest")
"""Packages that a compiler reads, and of which nothing is in the page."""
RULE = "=" * 80 + "\n"


def scripts() -> dict[str, dict[str, Any]]:
    """Return the packages whose code is in the page, by name, as the lock file describes them."""
    packages = json.loads((PAGE / "package-lock.json").read_text())["packages"]
    parts = {path.rpartition("node_modules/")[2]: one for path, one in packages.items() if path and not one.get("dev")}
    return {name: parts[name] for name in sorted(parts) if name not in TYPES_ONLY}


def bill() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = re.search(r'VERSION = "(.*)"', (ROOT / "agentlightning/utils/version.py").read_text())
    assert version is not None
    own = f"pkg:pypi/{project['name']}@{version[1]}"
    components = [_script(name, one) for name, one in scripts().items()]
    components += [_requirement(text) for text in sorted(project["dependencies"], key=str.lower)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": project["name"],
                "version": version[1],
                "purl": own,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [one["bom-ref"] for one in components]}],
    }


def _script(name: str, locked: dict[str, Any]) -> dict[str, Any]:
    purl = f"pkg:npm/{name.replace('@', '%40')}@{locked['version']}"
    kind, _, digest = locked["integrity"].partition("-")
    assert kind == "sha512", f"{name} has a checksum by {kind}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": locked["version"],
        "purl": purl,
        "licenses": [{"license": {"id": locked["license"]}}],
        "hashes": [{"alg": "SHA-512", "content": base64.b64decode(digest).hex()}],
        "properties": [{"name": "agentlightning:how", "value": "built into agentlightning/dashboard/static"}],
    }


def _requirement(text: str) -> dict[str, Any]:
    needed = Requirement(text)
    purl = f"pkg:pypi/{needed.name}"
    properties = [{"name": "agentlightning:how", "value": "installed beside it"}]
    properties += [{"name": "agentlightning:versions", "value": str(needed.specifier)}]
    properties += [{"name": "agentlightning:where", "value": str(needed.marker)}] if needed.marker else []
    return {"type": "library", "bom-ref": purl, "name": needed.name, "purl": purl, "properties": properties}


def texts(modules: Path) -> str:
    """Return the licences of the page's scripts, each text once with the packages that it is for."""
    by_text: dict[str, list[str]] = {}
    for name, one in scripts().items():
        files = sorted(path for path in (modules / name).iterdir() if re.match(r"(?i)licen[sc]e|copying", path.name))
        text = files[0].read_text().strip() if files else f"Licence: {one['license']}. The package has no text of it."
        by_text.setdefault(text, []).append(f"{name} {one['version']}")
    head = "The page of the dashboard (agentlightning/dashboard/static) contains these packages.\n\n"
    return head + "\n".join(f"{RULE}{', '.join(names)}\n{RULE}\n{text}\n" for text, names in by_text.items())


def main() -> None:
    """Write both files; the texts only where the page's packages are installed."""
    BILL.write_text(json.dumps(bill(), indent=2) + "\n")
    if (PAGE / "node_modules").is_dir():
        TEXTS.write_text(texts(PAGE / "node_modules"))


if __name__ == "__main__":
    main()
