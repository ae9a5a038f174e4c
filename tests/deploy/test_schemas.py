"""The Kubernetes manifests by the schemas of Kubernetes, unknown fields refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.deploy.recipes import CLUSTER, MANIFESTS, documents

needs_schemas = pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="The schemas are not installed: pip install kubernetes-validate (make test-frameworks has them)",
)
OLDEST, NEWEST = "1.29.0", "1.34.0"


@needs_schemas
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize(
    "document",
    list(documents([*MANIFESTS, CLUSTER / "kubernetes.yaml"])),
    ids=lambda each: f"{each['kind']}-{each['metadata']['name']}",
)
def test_a_manifest_is_what_kubernetes_expects(document: dict[str, Any], version: str) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(document, version, strict=True)


@needs_schemas
def test_a_misspelt_field_would_be_found() -> None:
    import kubernetes_validate

    [deployment, *_] = [document for document in documents() if document["kind"] == "Deployment"]
    deployment["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)
