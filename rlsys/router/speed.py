"""Speed: an engine's prefill and decode speed, measured on its requests. Pure: times are arguments.

An engine prefills prompts one after another and decodes nothing meanwhile. Then each pass decodes one token of every
response, and the time of a pass grows with the number of responses. The model of both:

    prefill: seconds per prompt token = constant
    decode: seconds from one token of a response to the next = base + per_request * (requests in the engine)
"""

from __future__ import annotations

from dataclasses import dataclass, field

DECAY = 0.98
"""Factor on the weight of earlier measurements per second of work; the weight halves in 34 seconds."""
MIN_PREFILLED_TOKENS, MIN_DECODED_TOKENS = 64.0, 16.0
"""Smallest numbers of tokens for an estimate."""
MIN_PREFILL_TOKENS = 16
"""Smallest prefill that is measured. A shorter one measures the time of a pass, not the prefill rate."""
PRIOR_WEIGHT = 0.01
"""Weight of the prior that half of a pass's time is fixed and half is proportional to its responses.

The prior weighs as much as measurements whose load has a standard deviation of a tenth of its mean.
"""


@dataclass
class _Line:
    """Weighted least squares of seconds per token over the number of requests in the engine.

    The attributes are sums over tokens: 1, load, seconds, load squared, and load times seconds.
    """

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
        prior = 0.5 * seconds / load
        prior_variance = PRIOR_WEIGHT * load * load
        variance = self.load_squared / self.tokens - load * load
        covariance = self.load_seconds / self.tokens - load * seconds
        per_request = (covariance + prior_variance * prior) / (variance + prior_variance)
        per_request = min(max(per_request, 0.0), seconds / load)
        return seconds - per_request * load, per_request


@dataclass
class Speed:
    """Speed of one engine process. Owner: its EngineState, which creates a new one for each process.

    `prefill` and `decode` change only in `update`, because a strategy reads them for every request.
    """

    prefill: float | None = None
    """Seconds per prompt token; None: unknown."""
    decode: tuple[float, float] | None = None
    """(base, per_request) of the module docstring, in seconds; None: unknown."""
    _prefill_tokens: float = 0.0
    _prefill_seconds: float = 0.0
    _line: _Line = field(default_factory=_Line)
    _last: float = 0.0  # time of the end of the last prefill

    def record_prefill(self, tokens: int, start: float | None, time: float) -> None:
        """Record the prefill of a request when its first token arrives.

        Engines prefill waiting prompts before they continue decoding. So the prefill began when the request was sent,
        or when the previous prefill ended, if that was later.

        Args:
            tokens: number of prompt tokens that were not cached.
            start: time at which the request was sent; None: the engine was paused or full meanwhile.
            time: time at which the token arrived.
        """
        if tokens < MIN_PREFILL_TOKENS:
            return
        if start is not None:
            self._prefill_tokens += tokens
            self._prefill_seconds += time - max(start, self._last)
        self._last = time

    def record_decode(self, tokens: int, load: int, start: float | None, time: float) -> None:
        """Record later tokens of a request.

        Args:
            tokens: number of these tokens.
            load: number of requests in the engine.
            start: time of the previous tokens; None: unknown.
            time: time of these tokens.
        """
        if start is not None:
            self._line.add(tokens, time - start, load)

    def update(self, *, fade: bool) -> None:
        """Update the estimates. Called once per second.

        Args:
            fade: whether the engines worked in this second. The weight of older measurements then decreases, so that
                a slow engine is eventually used again.
        """
        if fade:
            self._prefill_tokens *= DECAY
            self._prefill_seconds *= DECAY
            self._line.fade()
        has_estimate = self._prefill_tokens >= MIN_PREFILLED_TOKENS and self._prefill_seconds > 0
        self.prefill = self._prefill_seconds / self._prefill_tokens if has_estimate else None
        self.decode = self._line.fit() if self._line.tokens >= MIN_DECODED_TOKENS else None

    def metrics(self, load: int) -> dict[str, object]:
        """Return the prefill speed, and the decode speed of one response, in tokens per second; None: unknown.

        Args:
            load: number of requests in the engine.
        """
        decode_seconds = None if self.decode is None else self.decode[0] + self.decode[1] * max(1, load)
        return {
            "prefill_tokens_per_s": None if not self.prefill else 1.0 / self.prefill,
            "decode_tokens_per_s": None if not decode_seconds else 1.0 / decode_seconds,
        }
