"""The prompts that were written by hand: starting points of a search, and the best known one."""

from __future__ import annotations

from typing import Final

from bench.prompts.languages import LANGUAGES

STARTING: Final = (
    "{text}",
    "What language is this? {text}",
    "Name the language of the text in one word.\nText: {text}\nLanguage:",
    f"Answer with the language of the text, one of: {', '.join(LANGUAGES)}.\nUser: {{text}}",
    "You are an expert of languages. Name the language of the text.\nUser: {text}",
    "User: {text}\nIn which language is that?",
)
"""Prompts that a user may start with, before seeing the model's answers."""

_EXAMPLES: Final = {
    "Seras feliz": "Spanish",
    "Qui es-tu ?": "French",
    "Evet öyle.": "Turkish",
    "Sei emotivo": "Italian",
    "Wat neem je mee op reis?": "Dutch",
    "Ты испытываешь жажду?": "Russian",
    "Wa'alaikum salam warohmatullah": "Indonesian",
    "what is your favorite investment": "English",
    "coloque atrás da geladeira": "Portuguese",
    "Überhaupt nicht. So anstregend!": "German",
}
BEST_KNOWN: Final = (
    "Name the language of the text.\n"
    + "".join(f"User: {text}\nAssistant: {language}\n" for text, language in _EXAMPLES.items())
    + "User: {text}"
)
"""The best of about twenty prompts that were tried by hand: with and without a list of the languages, with examples in
one message and as turns. One example per language, as turns, is best; among five draws of such examples from the
training tasks this is the best one."""
