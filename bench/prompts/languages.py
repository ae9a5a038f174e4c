"""The task of the bench: name the language of a short text. Ten languages, real labelled text.

The texts are the sentences of `chatterbot-corpus` 1.3.3 (BSD-3-Clause, a wheel of 0.3 MB): one folder per language, so
the folder is the label. Sentences in two folders are excluded. Each language has the same number of items in each part,
so a constant answer earns a tenth; no text is in two parts.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypedDict, cast

import yaml

LANGUAGES: Final = (
    "Dutch",
    "English",
    "French",
    "German",
    "Indonesian",
    "Italian",
    "Portuguese",
    "Russian",
    "Spanish",
    "Turkish",
)
TRAIN, VALIDATION, HELD_OUT = 16, 12, 15
"""Items per language."""
_FIRST: Final = 12
"""Number of texts drawn together with the held-out ones; the remaining texts are drawn separately, so that the held-out
texts do not change."""
_SHORTEST, _LONGEST = 10, 32
"""Least and most characters of a text: long enough to be recognised, short enough to be processed fast."""
_SEED: Final = 7


class Item(TypedDict):
    """One task of the agent, with the answer that earns the reward."""

    text: str
    language: str


@dataclass(frozen=True)
class Items:
    """The three parts."""

    train: list[Item]
    validation: list[Item]
    held_out: list[Item]


def read_items(corpus: Path) -> Items:
    """Return the items of an unpacked `chatterbot-corpus`, the same ones each time.

    Raises:
        FileNotFoundError: there is no such folder; says how to get it.
    """
    data = corpus / "chatterbot_corpus" / "data"
    if not data.is_dir():
        raise FileNotFoundError(f"{data} is not there: run `make bench-prompts`, which fetches chatterbot-corpus 1.3.3")
    texts = {language: _texts(data / language.lower()) for language in LANGUAGES}
    occurrences = Counter(text.casefold() for language_texts in texts.values() for text in language_texts)
    parts = Items([], [], [])
    for language, language_texts in texts.items():
        alone = [text for text in language_texts if occurrences[text.casefold()] == 1]
        first = random.Random(f"{_SEED} {language}").sample(alone, _FIRST + HELD_OUT)
        later = random.Random(f"{_SEED} {language} more").sample(
            [text for text in alone if text not in set(first)], TRAIN + VALIDATION - _FIRST
        )
        shown = first[:_FIRST] + later
        items = [Item(text=text, language=language) for text in (*shown, *first[_FIRST:])]
        parts.train.extend(items[:TRAIN])
        parts.validation.extend(items[TRAIN : TRAIN + VALIDATION])
        parts.held_out.extend(items[TRAIN + VALIDATION :])
    for part in (parts.train, parts.validation, parts.held_out):
        random.Random(_SEED).shuffle(part)
    return parts


def _texts(folder: Path) -> list[str]:
    texts: dict[str, str] = {}
    for file in sorted(folder.glob("*.yml")):
        try:
            document: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
        except yaml.YAMLError:
            continue  # some files of the corpus are not YAML
        conversations: list[Any] = document.get("conversations") or [] if isinstance(document, dict) else []
        for conversation in conversations:
            for line in cast("list[Any]", conversation if isinstance(conversation, list) else [conversation]):
                text = " ".join(str(line).split())
                if _SHORTEST <= len(text) <= _LONGEST and " " in text and not set(text) & set('{}\\"'):
                    texts.setdefault(text.casefold(), text)
    return list(texts.values())
