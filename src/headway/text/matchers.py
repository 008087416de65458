"""Compiled grammars: which tokens may come next in an output.

llguidance does the work. It is imported when the first grammar is compiled. Its limits count work,
not time, so every process comes to the same answer.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from headway.errors import InvalidRequestError
from headway.text.thinking import BudgetedMatcher, budget_of
from headway.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_UNUSED = 64
MAX_UNUSED_CHARS = 4 * 1024**2
"""Compiled grammars that are kept though no live request uses them."""
_MAX_REASON_CHARS = 300
_STACK_BYTES = 64 * 1024**2
_STACK_LOCK = threading.Lock()
_QUOTED_LINE = re.compile(r"\s*(\d+ \||\^+$|<non-verbose/>)")


class _TokenTable:
    """The tokens of a model in the form that llguidance reads."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class OutputMatcher:
    """The state of one output in its grammar; for one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def consume(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the output; raise ValueError if the grammar does not allow them."""
        if not self._matcher.consume_tokens(list(token_ids)):
            raise ValueError(_reason(self._matcher.get_error()))

    def write_mask(self, mask: np.ndarray) -> None:
        """Write which tokens may be next; raise ValueError if a limit is reached."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise ValueError(_reason(self._matcher.get_error()))

    @property
    def is_accepting(self) -> bool:
        """Whether the output is complete."""
        return self._matcher.is_accepting()


class Matchers:
    """Compiles grammars for the tokens of one model; safe to share between threads.

    Keeps the grammars that live requests use, and those used last.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._tokens: LLTokenizer | None = None
        self._tokens_lock = threading.Lock()
        self._lock = threading.Lock()
        """Guards what follows; held for moments only."""
        self._num_users: Counter[str] = Counter()
        """Live requests by grammar, compiled or not."""
        self._used: dict[str, LLMatcher] = {}
        self._unused: OrderedDict[str, LLMatcher] = OrderedDict()
        """Compiled grammars without a live request; the one used last is at the end."""
        self._num_unused_chars = 0

    def prepare(self) -> None:
        """Read the tokens of the model: half a second in which other threads do not run."""
        self._prepared()

    def check(self, grammar: str, *, is_kept: bool = True) -> None:
        """Raise InvalidRequestError if a grammar cannot be honoured.

        One that is not kept takes no room from the grammars of others.
        """
        try:
            if is_kept:
                self.matcher(grammar)
            else:
                tokens = self._prepared()
                _run_deep(lambda: _compile(grammar, tokens))
        except InvalidRequestError:
            raise
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def is_compiled(self, grammar: str) -> bool:
        # Without the lock: threads that must not wait ask this.
        return grammar in self._used or grammar in self._unused

    def keep(self, grammar: str) -> None:
        """Keep a grammar, compiled or yet to be, until a live request releases it."""
        with self._lock:
            self._num_users[grammar] += 1
            if grammar in self._unused:
                self._used[grammar] = self._unused.pop(grammar)
                self._num_unused_chars -= len(grammar)

    def release(self, grammar: str) -> None:
        """Undo `keep`, because the request has ended."""
        with self._lock:
            self._num_users[grammar] -= 1
            if not self._num_users[grammar]:
                del self._num_users[grammar]
                compiled = self._used.pop(grammar, None)
                if compiled is not None:
                    self._store(grammar, compiled)

    def matcher(self, grammar: str) -> OutputMatcher | BudgetedMatcher:
        """Return a matcher before the first token; raise ValueError if it cannot be compiled."""
        found, budget = self._output_matcher(grammar), budget_of(grammar)
        if budget is None:
            return found
        return BudgetedMatcher(found, budget, self._load_tokenizer().token_bytes)

    def _output_matcher(self, grammar: str) -> OutputMatcher:
        with self._lock:
            compiled = self._find(grammar)
        if compiled is None:
            tokens = self._prepared()
            compiled = _run_deep(lambda: _compile(grammar, tokens))
            with self._lock:
                if self._find(grammar) is None:
                    self._store(grammar, compiled)
        # Copied under the lock: nobody else may use a matcher meanwhile.
        with self._lock:
            return OutputMatcher(compiled.deep_copy())

    def _prepared(self) -> LLTokenizer:
        with self._tokens_lock:
            if self._tokens is None:
                tokenizer = self._load_tokenizer()
                try:
                    self._tokens = read_tokens(tokenizer, self._vocab_size)
                except Exception as error:  # whatever a library in another language may raise
                    raise InvalidRequestError(
                        f"structured output is not possible with this model's tokens: {error}"
                    ) from error
            return self._tokens

    def _find(self, grammar: str) -> LLMatcher | None:
        if grammar in self._unused:
            self._unused.move_to_end(grammar)
            return self._unused[grammar]
        return self._used.get(grammar)

    def _store(self, grammar: str, compiled: LLMatcher) -> None:
        """Keep a compiled grammar; forget those unused for longest if they are too many."""
        if grammar in self._num_users:
            self._used[grammar] = compiled
            return
        self._unused[grammar] = compiled
        self._num_unused_chars += len(grammar)
        while len(self._unused) > MAX_UNUSED or (
            self._num_unused_chars > MAX_UNUSED_CHARS and len(self._unused) > 1
        ):
            oldest, _ = self._unused.popitem(last=False)
            self._num_unused_chars -= len(oldest)


def read_tokens(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Return the tokens of a model as llguidance needs them; takes half a second."""
    from llguidance import LLTokenizer

    if not tokenizer.eos_token_ids:
        raise ValueError("no token ends an output")
    table = _TokenTable(tokenizer, vocab_size)
    return LLTokenizer(
        table,  # pyright: ignore[reportArgumentType]
        n_vocab=vocab_size,
        eos_token=list(tokenizer.eos_token_ids),
    )


def _run_deep(work: Callable[[], LLMatcher]) -> LLMatcher:
    """Run in a thread with a large stack: compiling recurses along rules and references.

    llguidance does not bound that depth: 1,500 references in a row end a process with the usual
    stack of 8 MiB. The bounds in `grammar.py` fit this stack with a factor of five.
    """
    outcome: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="compile-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return outcome.result()


def _limits(grammar: str) -> LLParserLimits:
    """Return the most work of one mask, counted, so that every process comes to the same end.

    The longest masks that could be provoked took 3 ms by a schema and 6 ms by a Lark grammar, whose
    rules may be ambiguous: then an item costs as much as many items of a schema.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        step_max_items=10_000 if "%json" in grammar else 3000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _compile(grammar: str, tokens: LLTokenizer) -> LLMatcher:
    """Compile, and compute the first mask: some errors show only then."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, grammar, log_level=0, limits=_limits(grammar))
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if not matcher.is_error() and not any(mask):
            raise ValueError("no output can follow the grammar")
    if matcher.is_error():
        raise ValueError(_reason(matcher.get_error()))
    if warnings := matcher.get_grammar_warnings():
        raise ValueError(_reason(warnings[0]))
    return matcher


def _reason(error: str) -> str:
    """Return an error of llguidance in one line, without the lines of the grammar it quotes."""
    lines = [line.strip() for line in error.splitlines() if not _QUOTED_LINE.match(line)]
    text = " ".join(line for line in lines if line)
    text = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", text)
    return text[:_MAX_REASON_CHARS]
