"""Settings of the demo: sizes, rates and limits, tuned by measurement."""

from __future__ import annotations

from typing import Final

# Tasks.
TRAIN_TASKS: Final = 512
HELD_OUT_TASKS: Final = 256
MIN_USER_TASKS: Final = 30  # a fifth, 6, is held out: with fewer pairs, no sign test has p < 0.05 (6: p = 0.031)

# The agent.
MAX_TURNS: Final = 3  # largest number of model calls of a rollout
MAX_COMPLETION_LENGTH: Final = 24  # tokens of a call; a tool call with two 3-digit numbers takes 12

CONCURRENCY: Final = 8  # concurrent rollouts of a runner; an engine step of 16 takes little longer than one of 8

# The model: Llama layout, 0.23 million parameters plus the vocabulary.
LAYERS: Final = 2
WIDTH: Final = 96
HEADS: Final = 4
FEED_FORWARD_WIDTH: Final = 256
CONTEXT_LENGTH: Final = 256  # tokens
ROPE_THETA: Final = 100.0  # for a short context; with the usual 10,000 the model learns to copy later
MAX_WORDS: Final = 1000  # words (with the spaces around them) of the user's questions

# The warm start.
IMITATION_BATCH: Final = 32  # conversations of one step
IMITATION_LEARNING_RATE: Final = 2.5e-3
IMITATION_MAX_STEPS: Final = 1500  # about 450 are usual
IMITATION_MEASURED_TASKS: Final = 256
SKILL_BEFORE_SETTLING: Final = 0.9  # share of right answers with the tool; until then all conversations use it
SETTLING_STEPS: Final = 200  # the learning rate falls to 0
MIXTURE_STEPS: Final = 120  # the last of these steps, which train on the mixture
SHARE_SHOWING_TOOL: Final = 0.25  # share of the mixture with the tool; the rest answers wrongly at once
ACCURACY_AT_START: Final = (0.15, 0.33)  # accuracy of the policy after the warm start, sampled at temperature 1
GREEDY_AT_START: Final = 0.2  # largest greedy accuracy after the warm start

# Learning: `make bench-learning` shows the result of these values.
STEPS: Final = 16
BATCH_SIZE: Final = 16  # tasks of one step
NUM_GENERATIONS: Final = 8  # rollouts of one task
NUM_ITERATIONS: Final = 2  # passes over the rollouts of a step
MINIBATCH_ROLLOUTS: Final = 32  # of one optimizer step
LEARNING_RATE: Final = 3e-4  # in the first step; falls to 0 over the run
EPSILON: Final = 0.2
EPSILON_HIGH: Final = 0.28
TEMPERATURE: Final = 1.0
EVAL_STEPS: Final = 8
