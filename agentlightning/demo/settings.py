"""Settings of the demo: sizes, rates and limits that were measured to work."""

from __future__ import annotations

from typing import Final

# Tasks.
TRAIN_TASKS: Final = 512
HELD_OUT_TASKS: Final = 256
MIN_USER_TASKS: Final = 16

# The agent.
MAX_TURNS: Final = 3  # model calls of one rollout at most
MAX_COMPLETION_LENGTH: Final = 24  # of one call; a tool call for two numbers of three digits takes 12

CONCURRENCY: Final = 8  # rollouts that one runner runs at a time; a step of 16 costs the engine little more than of 8

# The model: Llama layout, 0.23 million parameters and what the vocabulary takes.
LAYERS: Final = 2
WIDTH: Final = 96
HEADS: Final = 4
FEED_FORWARD_WIDTH: Final = 256
CONTEXT_LENGTH: Final = 256  # tokens
ROPE_THETA: Final = 100.0  # suits so short a context; with the usual 10,000 it learns to copy later
MAX_WORDS: Final = 1000  # words (with the spaces around them) of the user's questions

# The warm start.
IMITATION_BATCH: Final = 32  # conversations of one step
IMITATION_LEARNING_RATE: Final = 2.5e-3
IMITATION_MAX_STEPS: Final = 1500  # some 450 are usual
IMITATION_MEASURED_TASKS: Final = 256
SKILL_BEFORE_SETTLING: Final = 0.9  # right answers among the rollouts that use the tool; until then all show it
SETTLING_STEPS: Final = 200  # the learning rate falls to 0
MIXTURE_STEPS: Final = 120  # the last of these, in which the mixture is shown
SHARE_SHOWING_TOOL: Final = 0.25  # of the conversations of the mixture; the others answer wrongly at once
ACCURACY_AT_START: Final = (0.15, 0.33)  # what the policy must have in the end, sampled at temperature 1
GREEDY_AT_START: Final = 0.2  # and at most this, greedily

# Learning: what comes of these, `make bench-learning` shows.
STEPS: Final = 16
BATCH_SIZE: Final = 16  # tasks of one step
NUM_GENERATIONS: Final = 8  # rollouts of one task
NUM_ITERATIONS: Final = 2  # passes over the rollouts of a step
MINIBATCH_ROLLOUTS: Final = 32  # of one optimizer step
LEARNING_RATE: Final = 3e-4  # in the first step; falls to nothing over the run
EPSILON: Final = 0.2
EPSILON_HIGH: Final = 0.28
TEMPERATURE: Final = 1.0
EVAL_STEPS: Final = 8
