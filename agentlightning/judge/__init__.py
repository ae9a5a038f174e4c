"""Rewards by a model that judges: one answer by a rubric, one compared with another, or a group of answers by rank."""
