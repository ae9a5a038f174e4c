"""The player of the game of `game.py`: an agent, a tiny model that starts with a bad habit, and its exact value."""

from __future__ import annotations

import functools
import json
import random
import urllib.request
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import agentlightning as agl
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.engine.chat import ChatFormat
from agentlightning.engine.torch_setup import one_thread
from agentlightning.training.learner.policy import Policy
from bench.learning.game import NUMBERS, TURNS, Game, History, hint, histories, reward, value_of

WARM_START_STEPS = 500
WARM_START_LEARNING_RATE = 2e-3
MIXTURE = 0.4
CAREFUL = 0.3
WARM_START_BATCH = 32


@agl.rollout
def play(task: Game, llm: agl.LLM) -> float:
    """Play one game; the reward is that of `game.reward`."""
    messages = [{"role": "user", "content": "?"}]
    number = 0
    for turn in range(1, TURNS + 1):
        text = ask(llm, messages)
        if text not in map(str, NUMBERS):
            return 0.0
        number = int(text)
        if number == task["hidden"]:
            return reward(number, number, turn)
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": hint(number, task["hidden"])},
        ]
    return reward(number, task["hidden"], TURNS)


def ask(llm: agl.LLM, messages: list[dict[str, str]]) -> str:
    """Make one model call and return the text of the reply."""
    body = {"model": llm.model, "messages": messages, **llm.sampling_parameters}
    request = urllib.request.Request(
        f"{llm.endpoint}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def make_player(folder: Path, seed: int) -> float:
    """Write a model that has seen careful and careless games, and return its exact value.

    It imitates careful games until it knows them, and then, while the learning rate falls, mostly careless ones.
    """
    tokenizer = make_tokenizer(["lower", "higher"])
    model = make_model(tokenizer, seed)
    chat_format = ChatFormat(tokenizer)
    row_of = functools.cache(functools.partial(_row, chat_format))
    rng = random.Random(f"game {seed}")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=WARM_START_LEARNING_RATE, betas=(0.9, 0.98))
    with one_thread():
        for step in range(WARM_START_STEPS):
            remaining = 1 - step / WARM_START_STEPS
            for group in optimizer.param_groups:
                group["lr"] = WARM_START_LEARNING_RATE * min(1.0, 2 * remaining, (step + 1) / 30)
            games = [_shown_game(rng, 1.0 if remaining > MIXTURE else CAREFUL) for _ in range(WARM_START_BATCH)]
            tokens, mask = _batch([row_of(game) for game in games])
            logits = cast("Any", model)(input_ids=tokens).logits[:, :-1][mask[:, 1:]]  # (N, V)
            optimizer.zero_grad(set_to_none=True)
            cast("Any", cross_entropy(logits, tokens[:, 1:][mask[:, 1:]])).backward()
            optimizer.step()
    Policy(model, tokenizer).save(folder)
    return player_value(model, tokenizer)


def _shown_game(rng: random.Random, careful: float) -> History:
    """Return a game of a careful player, who names numbers that fit all answers, or of one who repeats the first."""
    hidden, heeds = rng.choice(NUMBERS), rng.random() < careful
    history: History = ()
    while len(history) < TURNS and (not history or history[-1][0] != hidden):
        fitting = [n for n in NUMBERS if all(s != n and hint(s, n) == where for s, where in history)]
        number = rng.choice(fitting) if heeds or not history else history[0][0]
        history = (*history, (number, hint(number, hidden)))
    return history


def _batch(shown: list[tuple[list[int], list[bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows padded on the right, and the mask of the player's tokens: (B, T) each."""
    length = max(len(row) for row, _ in shown)
    tokens = torch.tensor([row + [0] * (length - len(row)) for row, _ in shown])
    return tokens, torch.tensor([mask + [False] * (length - len(mask)) for _, mask in shown])


def _row(chat_format: ChatFormat, game: History) -> tuple[list[int], list[bool]]:
    """Return a game as tokens, and the mask of the player's: (T,) each."""
    row: list[int] = []
    mask: list[bool] = []
    for turn, (number, _) in enumerate(game):
        prompt = _prompt(chat_format, game[:turn])
        reply = chat_format.prompt_ids([{"role": "assistant", "content": str(number)}], None)[1:-1]
        mask += [False] * (len(prompt) - len(row)) + [True] * len(reply)
        row = prompt + reply
    return row, mask


def player_value(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the expected reward of a model, sampled at temperature 1, from its probabilities of every reply."""
    chat_format = ChatFormat(tokenizer)
    all_histories = histories()
    digits = [_token(tokenizer, number) for number in NUMBERS]
    says: dict[History, list[float]] = {}
    with torch.inference_mode(), one_thread():
        for history in all_histories:
            prompt = _prompt(chat_format, history)
            rows = torch.tensor([[*prompt, digit] for digit in digits])  # (N, T)
            likely = cast("Any", model)(input_ids=rows).logits[:, -2:].float().softmax(-1)  # (N, 2, V)
            ends = likely[:, 1, tokenizer.eos_token_id]  # (N,)
            says[history] = (likely[0, 0, digits] * ends).tolist()
    return value_of(lambda history: says[history])


def _prompt(chat_format: ChatFormat, history: History) -> list[int]:
    messages = [{"role": "user", "content": "?"}]
    for number, where in history:
        messages += [{"role": "assistant", "content": str(number)}, {"role": "user", "content": where}]
    return chat_format.prompt_ids(messages, None)


def _token(tokenizer: PreTrainedTokenizerBase, number: int) -> int:
    return cast("int", tokenizer.convert_tokens_to_ids(str(number)))
