"""Whether the files of this package are its own: another distribution may install into the same folder."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackagePath
from pathlib import Path

DISTRIBUTION = "agl-framework"
PACKAGE = "agentlightning"
_SHOWN = 3
_MEND = f"uninstall both, then install {DISTRIBUTION} again"


def misplaced(package: Path, distributions: Iterable[Distribution]) -> Iterator[str]:
    """Say what in the folder of the package is not of its distribution; nothing where all is well.

    `package` is the folder that is imported. A checkout, which no distribution lists, has no files to compare.
    """
    own: list[Distribution] = []
    for distribution in distributions:
        name = distribution.metadata["Name"] or ""
        if name.lower().replace("_", "-") == DISTRIBUTION:
            own.append(distribution)
        elif files := _files_in_place(distribution, package):
            mend = f"{_MEND}: pip uninstall {name} {DISTRIBUTION}"
            yield f"{name} {distribution.version} has {_some(files)} there; {mend}"
    for distribution in own[:1]:
        yield from _foreign_files(package, distribution)


def _files_in_place(distribution: Distribution, package: Path) -> list[str]:
    files = [file for file in distribution.files or () if file.parts[:1] == (PACKAGE,)]
    return [str(file) for file in files if package in Path(str(distribution.locate_file(file))).parents]


def _foreign_files(package: Path, distribution: Distribution) -> Iterator[str]:
    listed = {Path(str(distribution.locate_file(file))): file for file in distribution.files or ()}
    listed = {path: file for path, file in listed.items() if path.suffix == ".py" and PACKAGE in path.parts}
    if not listed:
        return
    if package / "__init__.py" not in listed:
        yield f"{package} is imported, and {DISTRIBUTION} {distribution.version} is installed elsewhere"
        return
    here = sorted(package.rglob("*.py"))
    strange = [str(path.relative_to(package.parent)) for path in here if path not in listed]
    if strange:
        yield f"{_some(strange)} there, of no installed distribution; {_MEND}"
    changed = [
        str(path.relative_to(package.parent)) for path in here if path in listed and _differs(path, listed[path])
    ]
    if changed:
        yield f"{_some(changed)} there, not as {DISTRIBUTION} {distribution.version} has installed it; {_MEND}"


def _differs(path: Path, file: PackagePath) -> bool:
    if file.hash is None or file.hash.mode != "sha256":
        return False
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
    return digest != file.hash.value


def _some(files: list[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return f"{', '.join(files[:_SHOWN])}{more}"
