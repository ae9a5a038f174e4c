"""Five families of tokenizers, each made on the spot from a small corpus: what they share with their big relatives is
how text becomes tokens, where tokens may merge, and what is lost on the way."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = (
    *("<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
)
END = "<|end|>"
WORDS = (
    "the answer is forty two and the other answers are not known to anybody here",
    "look at the weather in Paris and in London, then tell me which town is warmer today",
    "calculator search weather town query number result thinking about it step by step",
    'tool {"name": "search", "arguments": {"query": "weather in Paris", "limit": 3}}',
    "User: System: Assistant: Tool: you are a helpful agent; be brief.",
    "naïve café e\u0301te\u0301 \u00e9t\u00e9 Ångström ﬁne ½",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "👩\u200d👩\u200d👧 🏳️\u200d🌈 👍🏽 😀😀",
    "０１２ 漢字 かな\n\n  indented\ttext\n",
    "0123456789 []{}()<>,.:;!?'\"-_/\\|=+*&%$#@~^`",
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ",
)
"""Words for making the tokenizers and for the policy's replies; they contain every letter of the tests."""


@dataclass(frozen=True)
class Family:
    """One tokenizer with what the tests must know of it."""

    name: str
    tokenizer: Tokenizer
    piece: Callable[[str, int], tuple[str, str]]
    """Cuts a token's spelling at a place into the spellings of two tokens."""
    plain: Callable[[str], str]
    """Returns a text without the parts that the tokenizer cannot keep."""

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def otherwise(self, ids: list[int], random: Random) -> list[int]:
        """Return the same text in other tokens, some of them cut in two, as a policy may well sample it."""
        spoken: list[int] = []
        for id in ids:
            parts = self._halves(id, random) if random.random() < 0.5 else None
            spoken.extend(parts or [id])
        return spoken if self.decode(spoken) == self.decode(ids) else ids

    def _halves(self, id: int, random: Random) -> list[int] | None:
        spelling = self.tokenizer.id_to_token(id)
        if spelling in SPECIAL or len(spelling) < 2:
            return None
        cuts = [self.piece(spelling, place) for place in range(1, len(spelling))]
        id_pairs = [[self.tokenizer.token_to_id(part) for part in cut] for cut in cuts]
        whole = [cut for cut in id_pairs if None not in cut]
        return random.choice(whole) if whole else None

    def noise(self, length: int, random: Random) -> list[int]:
        """Return tokens of a policy that has learned nothing: any but the special ones, whose text can be spelled.

        (Some families have tokens whose text no text is tokenised to: `##x` after a comma, a space before all.)
        """
        special = {self.tokenizer.token_to_id(token) for token in SPECIAL}
        ordinary = [id for id in range(self.tokenizer.get_vocab_size()) if id not in special]
        while True:
            token_ids = [random.choice(ordinary) for _ in range(length)]
            text = self.decode(token_ids)
            if self.decode(self.encode(text)) == text:
                return token_ids
            length = max(1, length - 1)


def _cut(spelling: str, place: int) -> tuple[str, str]:
    return spelling[:place], spelling[place:]


def _cut_word(spelling: str, place: int) -> tuple[str, str]:
    return spelling[:place], "##" + spelling[place:]


def _with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _byte_level(merges: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(WORDS if merges else [], trainer)
    return _with_special_tokens(tokenizer)


def _sentence_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(WORDS * 2, trainer)
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    vocabulary = [(piece, -2.0 - 0.02 * place) for place, (piece, _) in enumerate(learned)]
    vocabulary += [(f"<0x{byte:02X}>", -30.0) for byte in range(256)]
    whole = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    whole.normalizer, whole.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    whole.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_special_tokens(whole)


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    letters = sorted({letter for text in WORDS for letter in tokenizer.normalizer.normalize_str(text)} - {" "})
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=["<unk>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator([*WORDS, *("".join(letters[at:]) for at in range(len(letters)))], trainer)
    return _with_special_tokens(tokenizer)


def _characters() -> Tokenizer:
    letters = sorted({letter for text in (*WORDS, *SPECIAL) for letter in text} | {"\n", "\ufffd"})
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0} | {letter: n + 1 for n, letter in enumerate(letters)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _with_special_tokens(tokenizer)


def _as_it_is(text: str) -> str:
    return text


def _compatible(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2581", " ")


def _without_space(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text.lower())
    return "".join(c for c in decomposed if not c.isspace() and unicodedata.category(c) not in ("Mn", "Cf", "Cc"))


@cache
def families() -> dict[str, Family]:
    """Return the families by name; made once."""
    made = (
        Family("byte-level BPE", _byte_level(400), _cut, _as_it_is),
        Family("sentence piece", _sentence_piece(), _cut, _compatible),
        Family("word piece", _word_piece(), _cut_word, _without_space),
        Family("bytes", _byte_level(0), _cut, _as_it_is),
        Family("characters", _characters(), _cut, _as_it_is),
    )
    return {family.name: family for family in made}


NAMES = ("byte-level BPE", "sentence piece", "word piece", "bytes", "characters")
