"""`python -m bough.grammar.grammar_worker` is the program of `grammar_process`: it forks processes that read grammars.

Those use llguidance, within limits that the kernel enforces. The tokens that may follow are a function of grammar,
vocabulary and output alone, so a request has the same tokens wherever it runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from bough.grammar.grammar_process import Fields, Limits, Refused, from_bytes, receive, send

PR_SET_PDEATHSIG = 1
MAX_OUTPUTS = 1024  # outputs whose place in their grammar is kept
MAX_REQUEST = 2**16  # bytes of a message with a file descriptor
SECONDS_A_TOKEN = 5e-4  # CPU time to follow an output, for each token
STACK_BYTES = 512 * 2**20  # of addresses: llguidance recurses along rules that refer to one another

Answer = tuple[dict[str, Any], bytes]


def main() -> None:
    """Fork a process for each connection that comes in, and build each tokenizer. Ends with the parent's end."""
    with socket.socket(fileno=os.dup(0)) as requests, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their exit statuses are ignored
        tokenizers: list[Tokenizer] = []
        while True:
            message, (*descriptors,), _, _ = socket.recv_fds(requests, MAX_REQUEST, 1)
            if not message:
                return
            (descriptor,), request = descriptors, json.loads(message)
            if "limits" not in request:
                with open(descriptor, "rb") as file:
                    file.seek(0)
                    tokenizers.append(Tokenizer(file.read().decode(), request["num_tokens"], request["ends"]))
                continue
            parent_id = os.getpid()
            if os.fork() == 0:
                requests.close()
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == parent_id:
                    number = request["vocabulary"]
                    tokenizer = None if number is None else tokenizers[number]
                    serve_limited(socket.socket(fileno=descriptor), Limits(**request["limits"]), tokenizer)
                os._exit(0)
            os.close(descriptor)


class Tokenizer:
    """The tokens that outputs are made of, and those that end them."""

    def __init__(self, tokenizer_json: str, num_tokens: int, ends: Sequence[int]) -> None:
        self.ends, self.error = frozenset(end for end in ends if end < num_tokens), ""
        self.mask_bytes = (num_tokens + 31) // 32 * 4
        try:
            self.native = LLTokenizer(tokenizer_json, n_vocab=num_tokens, eos_token=[*ends])
        except BaseException as exc:  # a panic of native code too
            self.error = f"the model's tokenizer cannot be read for grammars: {in_one_line(str(exc))}"


def serve_limited(connection: socket.socket, limits: Limits, tokenizer: Tokenizer | None) -> None:
    """Answer messages on a deep stack until the other end is closed, with this much more memory than is used now."""

    def run() -> None:
        allowed = _pages()[0] * resource.getpagesize() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        serve(connection, limits, tokenizer)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def serve(connection: socket.socket, limits: Limits, tokenizer: Tokenizer | None) -> None:
    """Answer messages until the other end is closed, a failure leaves an unknown state, or much memory is in use."""
    worker, most_pages = Worker(limits, tokenizer), _pages()[1] + limits.memory_bytes // 2 // resource.getpagesize()
    while (message := receive(connection)) is not None:
        fields, payload = message
        is_last = False
        signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
        try:
            answer, result = worker.answer(fields, payload)
        except Refused as exc:
            answer, result = {"refused": str(exc)}, b""
        except BaseException as exc:  # pyo3 raises panics of native code as no Exception
            answer, result, is_last = {"refused": f"it cannot be read: {in_one_line(str(exc))}"}, b"", True
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_last = is_last or _pages()[1] > most_pages
        send(connection, answer | {"is_last": is_last}, result)
        if is_last:
            return


class Worker:
    """The operations."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer | None) -> None:
        self._limits, self._tokenizer = limits, tokenizer
        self._parser_limits = LLParserLimits(
            max_lexer_states=limits.max_lexer_states,
            step_lexer_fuel=limits.step_lexer_fuel,
            step_max_items=limits.step_max_items,
            verbose_errors=False,
        )
        self._compiled: Compiled | None = None
        self._outputs: OrderedDict[int, Output] = OrderedDict()

    def answer(self, fields: Fields, payload: bytes) -> Answer:
        """The answer to a message. Raises Refused."""
        match fields:
            case {"operation": "write_regex", "regex": regex}:
                with cpu_time(self._limits.check_seconds):
                    return {"grammar": LLMatcher.grammar_from_regex(regex)}, b""
            case {"operation": "write_schema", "schema": schema, "spacing": spacing}:
                return {"grammar": self._written(schema, spacing)}, b""
            case {"operation": "write_lark", "rules": rules}:
                return {"grammar": self._rewritten(rules)}, b""
            case {"operation": "check", "grammar": grammar}:
                self._check(grammar)
                return {}, b""
            case {"operation": "compile", "grammar": grammar}:
                self._compile(grammar)
                return {}, b""
            case {"operation": "masks"}:
                return self._masks(fields, payload)
        raise Refused("the operation is not known")

    def _rewritten(self, rules: str) -> str:
        with cpu_time(self._limits.check_seconds):
            try:
                return gbnf_to_lark(rules)
            except Exception as exc:  # the reader's own errors, and those of unexpected values
                raise Refused(in_one_line(str(exc))) from exc

    def _written(self, schema: str, spacing: Mapping[str, object]) -> str:
        try:
            with cpu_time(self._limits.check_seconds):
                return LLMatcher.grammar_from_json_schema(schema, overrides=spacing)  # type: ignore[arg-type]
        except ValueError as exc:  # numbers, depths and characters that Python's reader lets through
            raise Refused(in_one_line(str(exc))) from exc

    def _check(self, grammar: str) -> None:
        with cpu_time(self._limits.check_seconds):
            is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=self._parser_limits)
        if is_error:
            raise Refused(in_one_line(messages[0]))

    def _compile(self, grammar: str) -> Compiled:
        """The grammar, ready to use; a process with a vocabulary has one."""
        if self._compiled is not None and not self._compiled.is_spent:
            return self._compiled
        assert self._tokenizer is not None, "masks are asked of processes with a vocabulary"
        if self._tokenizer.error:
            raise Refused(self._tokenizer.error)
        with cpu_time(self._limits.compile_seconds):
            matcher = LLMatcher(self._tokenizer.native, grammar, log_level=0, limits=self._parser_limits)
        require_working(matcher)
        self._compiled = Compiled(matcher)
        return self._compiled

    def _masks(self, fields: Fields, payload: bytes) -> Answer:
        """Masks after paths below an output, one after another; `lengths` has 0 for paths that are not allowed."""
        output = self._output(fields)
        if output is None:
            return {"is_unknown": True}, b""
        tokens, num_output = from_bytes(payload), fields["num_output"]
        with cpu_time(self._limits.mask_seconds + len(tokens) * SECONDS_A_TOKEN):
            output.stand_on(tokens[:num_output])
        masks, begin = [], num_output
        for num_path in fields["num_of_paths"]:
            with cpu_time(self._limits.mask_seconds):
                masks.append(output.after(tokens[begin : begin + num_path]))
            begin += num_path
        return {"lengths": [len(mask or b"") for mask in masks]}, b"".join(mask or b"" for mask in masks)

    def _output(self, fields: Fields) -> Output | None:
        """The output with this number; a new one if a grammar is given."""
        number = fields["number"]
        if (output := self._outputs.get(number)) is None or not output.is_working:
            if "grammar" not in fields:
                return None
            assert self._tokenizer is not None, "masks are asked of processes with a vocabulary"
            compiled = self._compile(fields["grammar"])
            output = self._outputs[number] = Output(compiled, self._tokenizer, self._limits)
        self._outputs.move_to_end(number)
        if len(self._outputs) > MAX_OUTPUTS:
            self._outputs.popitem(last=False)
        return output


class Compiled:
    """A grammar's matcher at the beginning of an output; copies of it move along outputs.

    Copies share their lexer's states and so its limit. Once one has reached the limit, the grammar is compiled again;
    the other copies end when they need a new state.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.is_spent = False


class Output:
    """An output that follows a grammar, and the tokens that may follow at each place of a tree below it."""

    def __init__(self, compiled: Compiled, tokenizer: Tokenizer, limits: Limits) -> None:
        self._compiled = compiled
        self._matcher, self._tokenizer, self._limits = compiled.matcher.deep_copy(), tokenizer, limits
        self._tokens: list[int] = []  # consumed by the matcher, like the path below them
        self._path: list[int] = []
        self._num_masks, self._seconds = 0, 0.0  # CPU time of these

    @property
    def is_working(self) -> bool:
        """Whether the matcher still works; once the output has become too complex, it does not."""
        return not self._matcher.is_error()

    def stand_on(self, tokens: list[int]) -> None:
        """Continue from an output. Raises Refused if it does not follow the grammar."""
        if tokens == self._tokens:
            return
        self._matcher.rollback(len(self._path))
        self._path = []
        if tokens[: len(self._tokens)] != self._tokens:
            self._matcher.reset()
            self._tokens = []
        new = tokens[len(self._tokens) :]
        num_followed = self._matcher.try_consume_tokens(new)
        self._tokens += new[:num_followed]
        if num_followed < len(new):
            self._require_working()
            number = len(self._tokens)
            raise Refused(f"must allow the output so far, but its token {number}, {new[num_followed]}, is not allowed")

    def after(self, path: list[int]) -> bytes | None:
        """Bits of the tokens that may follow a path below the output; None if the path itself is not allowed.

        Raises Refused if the grammar has become too complex.
        """
        began = time.thread_time()
        # The matcher is not asked about end tokens: it accepts optional ones, and does not count them.
        ends = self._tokenizer.ends
        inside = list(takewhile(lambda token: token not in ends, path))
        if not self._follows(inside):
            return None
        may_end, has_ended = self._matcher.is_accepting(), len(inside) < len(path)
        if has_ended and not may_end:
            return None
        bits = bytearray(self._tokenizer.mask_bytes if has_ended else self._matcher.compute_bitmask())
        self._require_working()
        for end in ends:
            bits[end // 8] = bits[end // 8] & ~(1 << end % 8) | may_end << end % 8
        self._require_quick(time.thread_time() - began)
        return bytes(bits)

    def _follows(self, path: list[int]) -> bool:
        """Move the matcher to the end of a path; whether the grammar allows it."""
        num_common = next((i for i, (a, b) in enumerate(zip(self._path, path, strict=False)) if a != b), None)
        num_common = min(len(self._path), len(path)) if num_common is None else num_common
        self._matcher.rollback(len(self._path) - num_common)
        new = path[num_common:]
        num_followed = self._matcher.try_consume_tokens(new)
        self._path = path[: num_common + num_followed]
        self._require_working()
        return num_followed == len(new)

    def _require_working(self) -> None:
        if self._matcher.is_error():
            self._compiled.is_spent = True
            require_working(self._matcher)

    def _require_quick(self, seconds: float) -> None:
        """Each mask of an ambiguous grammar may be within the limits, while together they delay everybody's sweeps."""
        self._num_masks, self._seconds = self._num_masks + 1, self._seconds + seconds
        limits = self._limits
        if self._seconds > 2 * limits.mask_seconds + limits.average_mask_seconds * self._num_masks:
            raise Refused(
                "must be a grammar that can be followed: it is too ambiguous, as a mask takes "
                f"{self._seconds / self._num_masks:.3f} s on average"
            )


def require_working(matcher: LLMatcher) -> None:
    """Raise Refused if a grammar cannot be compiled, or an output has become too complex for it."""
    if matcher.is_error():
        raise Refused(f"must be a grammar that can be followed: {in_one_line(matcher.get_error())}")


def in_one_line(message: str) -> str:
    """A message of llguidance, which may have many lines, some of them markers below others."""
    return " ".join(message.split())[:300]


@contextmanager
def cpu_time(seconds: float) -> Iterator[None]:
    """The kernel ends the process if the block takes longer."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _pages() -> tuple[int, int]:
    """Pages of addresses, and of memory, of this process."""
    with open("/proc/self/statm") as file:
        size, resident, *_ = file.read().split()
    return int(size), int(resident)


if __name__ == "__main__":
    main()
