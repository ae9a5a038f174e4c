"""GEPA: reflective evolution of prompts, by the package `gepa`, on rollouts of the store."""

from agentlightning.algorithm.gepa.gepa import GEPA as GEPA
