"""The search of APO: beams of prompts, critiques and edits."""
