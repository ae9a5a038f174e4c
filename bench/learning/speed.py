"""Three figures of learning, apart: tokens of updates and of decoding per CPU second, CPU milliseconds per model call.

All three are of the demo's model and its lengths. A model call of the path goes from the agent's client in a runner
process through gateway and engine to the stored span and back into the loop; the computation of engine and learner is
subtracted, by their own figures.
"""

from __future__ import annotations

import random
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import agentlightning as agl
from agentlightning.adapter.rows.samples import Sample
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder, generate
from agentlightning.engine.torch_setup import one_thread
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import UpdateSettings
from bench.learning.game_policy import ask

ROWS, PROMPT_TOKENS, REPLY_TOKENS = 128, 16, 16
TASKS, GENERATIONS, PATH_STEPS = 8, 8, (2, 8)


@dataclass(frozen=True)
class Speed:
    """Figures per CPU second, as named."""

    update_tokens: float
    """Tokens of rows that one pass of the learner processes, per CPU second."""
    decode_tokens: float
    """Tokens that the engine draws, per CPU second."""
    path_milliseconds: float
    """CPU milliseconds of all processes per model call, without decoding and update."""


def measure_speed() -> Speed:
    """Measure all three, in some ten CPU seconds."""
    tokenizer = make_tokenizer()
    policy = Policy(make_model(tokenizer), tokenizer, learning_rate=1e-5)
    rng = random.Random(0)
    prompts = [[rng.randrange(20, 60) for _ in range(PROMPT_TOKENS)] for _ in range(ROWS)]
    with one_thread():
        completions = [Completion(prompt, REPLY_TOKENS, seed=n) for n, prompt in enumerate(prompts)]
        generate(Decoder(policy.model, []), completions[:8])
        began = time.process_time()
        generate(Decoder(policy.model, []), completions[8:])
        decode = (ROWS - 8) * REPLY_TOKENS / (time.process_time() - began)
    mask, none = [0] * PROMPT_TOKENS + [1] * REPLY_TOKENS, [0.0] * PROMPT_TOKENS
    rows = [
        Sample(f"r{n}", "a", [*c.prompt_ids, *c.token_ids], mask, [*none, *c.logprobs], ["c"], [0])
        for n, c in enumerate(completions)
    ]
    policy.update(rows[:8], [1.0] * 8)
    began = time.process_time()
    policy.update(rows, [1.0 if n % 2 else -1.0 for n in range(ROWS)], UpdateSettings(num_iterations=4))
    update = 4 * ROWS * (PROMPT_TOKENS + REPLY_TOKENS) / (time.process_time() - began)
    return Speed(update, decode, _path(policy, decode, update))


@agl.rollout
def two_calls(task: int, llm: agl.LLM) -> float:
    """Make two model calls; the second continues the first."""
    messages = [{"role": "user", "content": f"What is {task} plus 1?"}]
    messages.append({"role": "assistant", "content": ask(llm, messages)})
    messages.append({"role": "user", "content": "Add 2 and 3."})
    return float(len(ask(llm, messages)))


def _path(policy: Policy, decode: float, update: float) -> float:
    """Return the milliseconds per call: the difference of a longer and a shorter run with the same start."""
    costs: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        policy.save(model)
        for steps in PATH_STEPS:
            before = _cpu_seconds()
            calls, drawn, learned = _run(model, Path(folder) / str(steps), steps)
            costs.append((_cpu_seconds() - before - drawn / decode - learned / update, calls))
    (short, few), (long, many) = costs
    return 1000 * (long - short) / (many - few)


def _run(model: Path, folder: Path, steps: int) -> tuple[int, float, float]:
    """Return calls, tokens drawn, and tokens of the rows of a run."""
    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=model,
            max_steps=steps,
            batch_size=TASKS,
            num_generations=GENERATIONS,
            max_completion_length=8,
            learning_rate=1e-6,
            output_dir=folder,
            progress="none",
        ),
        store=agl.SQLiteLightningStore(folder.with_suffix(".db")),
        strategy={"type": "cs", "server_port": 0},
        runner={"concurrency": 4},
        n_runners=2,
    )
    trainer.fit(two_calls, train_dataset=list(range(TASKS)))
    figures = trainer.result.metrics
    drawn = sum(f.tokens_per_second * sum(f.seconds.values()) for f in figures)
    return sum(f.calls_captured for f in figures), drawn, 3 * sum(f.update.get("tokens", 0) for f in figures)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
