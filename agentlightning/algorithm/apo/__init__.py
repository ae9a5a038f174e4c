"""APO: automatic prompt optimization, a beam search with critiques and edits by a model."""

from agentlightning.algorithm.apo.apo import APO as APO
