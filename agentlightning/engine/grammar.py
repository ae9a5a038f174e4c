"""Constrained decoding with llguidance: compiled grammars, and the state of each completion in its grammar.

llguidance (MIT, one wheel of 3 MB for Python 3.9 and later, no dependencies, no CUDA) computes the mask of the next
token during decoding; a grammar is not compiled against the vocabulary. It is part of the extra `grpo` and is loaded
with the first request that needs it.

A forced tool call has the format of chat templates (`chat.py`), with its arguments in the format of `json.dumps`, so
that a template that renders the call again produces the same text, and the row continues.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

from transformers import PreTrainedTokenizerBase

from agentlightning.engine.chat import CALL_CLOSING, CALL_OPENING
from agentlightning.engine.completion import GrammarError, GrammarState, shortened
from agentlightning.engine.request import Constraint, JsonShape, RequestError

MAX_GRAMMAR_BYTES: Final = 256 * 1024
COMPILE_SECONDS: Final = 10.0
_KEPT: Final = 64  # compiled grammars; agents send the same tools with every call
_SPELLING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiles the grammars of one tokenizer, on its own thread. Belongs to one loop."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos_ids = sorted(eos_ids)
        self._llguidance: Any = None
        self._ll_tokenizer: Any = None
        self._compiled: OrderedDict[str, GrammarState] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agl-grammar")
        special = set(tokenizer.all_special_ids)
        added = cast("dict[int, Any]", getattr(tokenizer, "added_tokens_decoder", {}))
        self._special = {str(token): number for number, token in added.items() if number in special or token.special}

    async def state(self, constraint: Constraint) -> GrammarState:
        """Return the state before the first token.

        Raises:
            RequestError: 400, the grammar is too large, takes too long, or the library rejects it (with its message);
                501, the library is not installed.
        """
        text, param = lark_of(constraint, self._special), constraint.param
        if len(text) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"the schemas of {param!r} have {len(text)} bytes; the limit is {MAX_GRAMMAR_BYTES}",
                param=param,
                code="schema_too_large",
            )
        if text not in self._compiled:
            try:
                compiling = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, text)
                self._compiled[text] = await asyncio.wait_for(compiling, COMPILE_SECONDS)
            except TimeoutError:
                message = f"the schemas of {param!r} took more than {COMPILE_SECONDS:.0f} s to compile"
                raise RequestError(message, param=param, code="schema_too_complex") from None
            except GrammarError as error:
                message = f"{param!r} cannot be compiled: {error}"
                raise RequestError(message, param=param, code="invalid_schema") from error
        self._compiled.move_to_end(text)
        state = self._compiled[text].fresh()
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return state

    def close(self) -> None:
        """End the thread without waiting for a compilation."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, text: str) -> GrammarState:
        if self._ll_tokenizer is None:
            self._llguidance = _library()
            self._ll_tokenizer = _ll_tokenizer(self._llguidance, self._tokenizer, self._vocabulary, self._eos_ids)
        matchers, limits = self._llguidance.LLMatcher, self._llguidance.LLParserLimits(verbose_errors=False)
        grammar = matchers.grammar_from_lark(text)
        if problem := matchers.validate_grammar(grammar, self._ll_tokenizer, limits=limits):
            raise GrammarError(shortened(problem))
        matcher = matchers(self._ll_tokenizer, grammar, log_level=0, limits=limits)
        unknown = cast("int | None", self._tokenizer.unk_token_id)
        return GrammarState(matcher, None if unknown in self._eos_ids else unknown)


def lark_of(constraint: Constraint, special: Mapping[str, int]) -> str:
    """Return the grammar in the Lark dialect of llguidance. `special` has the special tokens of the tokenizer, with
    their ids."""
    starts, rules = list[str](), list[str]()
    if constraint.value is not None:
        starts.append("value")
        rules.append(f"value: {_json_of(constraint.value)}")
    if constraint.functions:
        starts.append('call ("\\n"? call)*' if constraint.several else "call")
        names = " | ".join(f"f{number}" for number in range(len(constraint.functions)))
        rules.append(f'call: opening "\\n"? ({names}) "\\n"? closing')
        for name, text in (("opening", CALL_OPENING), ("closing", CALL_CLOSING)):
            spelt = json.dumps(text)
            rules.append(f"{name}: <[{special[text]}]> | {spelt}" if text in special else f"{name}: {spelt}")
    for number, (name, arguments) in enumerate(constraint.functions):
        head = f'{{"name": {json.dumps(name)}, "arguments": '
        rules.append(f'f{number}: {json.dumps(head)} a{number} "}}"')
        rules.append(f"a{number}: {_json_of(arguments)}")
    return "\n".join([f"start: {' | '.join(starts)}", *rules]) + "\n"


def _json_of(shape: JsonShape) -> str:
    own = shape.schema.get("x-guidance")
    options = {**(own if isinstance(own, dict) else {}), **_SPELLING, "lenient": not shape.strict}
    return f"%json {json.dumps({**shape.schema, 'x-guidance': options})}"


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise RequestError(
            "tool_choice 'required' or with a function, and JSON replies, require the package llguidance, which is not "
            f"installed ({error}). Run pip install 'agl-framework[grpo]', or omit these fields of the request",
            status=501,
            code="missing_package",
        ) from error


def _ll_tokenizer(library: Any, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos_ids: list[int]) -> Any:
    """Return the vocabulary for the library: as bytes if the library knows the kind of tokenizer."""
    own = copy.deepcopy(tokenizer)  # a fast tokenizer must not be used by two threads at once
    try:
        return importlib.import_module("llguidance.hf").from_tokenizer(own, n_vocab=vocabulary, eos_token=eos_ids)
    except ValueError:  # an unknown decoder: each token then represents its own text
        wrapper = library.TokenizerWrapper(_Vocabulary(own))
        return library.LLTokenizer(wrapper, n_vocab=max(vocabulary, len(own)), eos_token=eos_ids)


class _Vocabulary:
    """The members of a tokenizer that `llguidance.TokenizerWrapper` reads, for one whose tokens are texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.all_special_ids)
        decoded = tokenizer.batch_decode([[number] for number in range(len(tokenizer))], skip_special_tokens=False)
        self.tokens = [text.encode() for text in decoded]

    def __call__(self, text: bytes | str) -> list[int]:
        whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return cast("list[int]", self._tokenizer(whole, add_special_tokens=False)["input_ids"])
