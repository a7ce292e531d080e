"""Speed: an engine's prefill and decode speed, measured on its requests. Pure: times are arguments.

An engine processes prompts one after another and decodes nothing meanwhile; then it decodes one token of every
response in a pass, whose time grows with their number. So prefill has a rate, and decoding a line: seconds from
one token of a response to the next = base + per_request * (requests in the engine).
"""

from __future__ import annotations

from dataclasses import dataclass, field

DECAY = 0.98
"""Weight of earlier measurements after one second of work: half after 34 seconds."""
MIN_READ_TOKENS, MIN_WRITTEN_TOKENS = 64.0, 16.0
"""Fewest tokens for an estimate."""
MIN_PREFILL_TOKENS = 16
"""Shorter prefills measure a pass rather than the prefill rate: the rest was cached."""
PRIOR_WEIGHT = 0.01
"""Weight of the prior that half of a pass's time is fixed and half is due to its responses.

Loads whose variation is a tenth of their mean have the same weight.
"""


@dataclass
class _Line:
    """Weighted least squares of seconds per token over the number of requests in the engine."""

    tokens: float = 0.0
    load: float = 0.0
    seconds: float = 0.0
    load_squared: float = 0.0
    load_seconds: float = 0.0

    def add(self, tokens: int, seconds: float, load: int) -> None:
        self.tokens += tokens
        self.load += tokens * load
        self.seconds += seconds
        self.load_squared += tokens * load * load
        self.load_seconds += seconds * load

    def fade(self) -> None:
        self.tokens *= DECAY
        self.load *= DECAY
        self.seconds *= DECAY
        self.load_squared *= DECAY
        self.load_seconds *= DECAY

    def fit(self) -> tuple[float, float]:
        """Return (base, per_request), both non-negative."""
        load, seconds = self.load / self.tokens, self.seconds / self.tokens
        guess, doubt = 0.5 * seconds / load, PRIOR_WEIGHT * load * load
        variance = self.load_squared / self.tokens - load * load
        covariance = self.load_seconds / self.tokens - load * seconds
        per_request = (covariance + doubt * guess) / (variance + doubt)
        per_request = min(max(per_request, 0.0), seconds / load)
        return seconds - per_request * load, per_request


@dataclass
class Speed:
    """Speed of one server process. Owner: its EngineState, which creates a new one for another process.

    `read` and `write` change only in `update`: a strategy reads them for every request.
    """

    read: float | None = None
    """Seconds per prompt token; None: unknown."""
    write: tuple[float, float] | None = None
    """(base, per_request), see above; None: unknown."""
    _read_tokens: float = 0.0
    _read_seconds: float = 0.0
    _line: _Line = field(default_factory=_Line)
    _last: float = 0.0  # when a prompt had been read

    def record_prefill(self, tokens: int, start: float | None, time: float) -> None:
        """Record a request's first token.

        The prompt was processed since it was sent, or since the previous prompt was finished: engines prefill
        before they continue decoding.

        Args:
            tokens: prompt tokens that were not cached.
            start: when the request was sent; None: the engine was paused or full meanwhile.
            time: when the token arrived.
        """
        if tokens < MIN_PREFILL_TOKENS:
            return
        if start is not None:
            self._read_tokens += tokens
            self._read_seconds += time - max(start, self._last)
        self._last = time

    def record_decode(self, tokens: int, load: int, start: float | None, time: float) -> None:
        """Record further tokens of a request, with `load` requests in the engine."""
        if start is not None:
            self._line.add(tokens, time - start, load)

    def update(self, *, fade: bool) -> None:
        """Update the estimates.

        Args:
            fade: one second of work has passed; older measurements lose weight, so that an engine avoided for
                being slow is tried again.
        """
        if fade:
            self._read_tokens *= DECAY
            self._read_seconds *= DECAY
            self._line.fade()
        measured = self._read_tokens >= MIN_READ_TOKENS and self._read_seconds > 0
        self.read = self._read_seconds / self._read_tokens if measured else None
        self.write = self._line.fit() if self._line.tokens >= MIN_WRITTEN_TOKENS else None

    def metrics(self, load: int) -> dict[str, object]:
        """Return tokens per second of prompts, and of one response with `load` requests in the engine."""
        writes = None if self.write is None else self.write[0] + self.write[1] * max(1, load)
        return {
            "prefill_tokens_per_s": None if not self.read else 1.0 / self.read,
            "decode_tokens_per_s": None if not writes else 1.0 / writes,
        }
