"""Rewards by a model that judges: one answer by a rubric, one against another, or the answers of a group by rank."""
