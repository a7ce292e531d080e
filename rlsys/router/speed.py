"""How fast an engine reads prompts and writes tokens, as its own requests show. Pure: times are arguments.

An engine reads prompts one after another, and writes nothing meanwhile; then it writes one token of every response in
a pass, which takes the longer the more there are. So reading has a rate, and writing a line: seconds from one token
of a response to its next = alone + further * (requests in the engine).
"""

from __future__ import annotations

from dataclasses import dataclass, field

FADES_TO = 0.98
"""What a second of work leaves of what was seen before: half of it after 34 seconds."""
ENOUGH_READ, ENOUGH_WRITTEN = 64.0, 16.0
"""Tokens that must have been seen; fewer say too little."""
SHORT = 16
"""Fewer tokens of a prompt say more of a pass than of reading: the rest was in the cache."""
DOUBT = 0.01
"""Of the line: loads that differ by a tenth of their mean count as much as the guess that half of a pass's time
belongs to the pass, and half to its responses."""


@dataclass
class _Line:
    """Least squares over tokens, each seen with so many requests in the engine."""

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
        self.tokens *= FADES_TO
        self.load *= FADES_TO
        self.seconds *= FADES_TO
        self.load_squared *= FADES_TO
        self.load_seconds *= FADES_TO

    def fit(self) -> tuple[float, float]:
        """(alone, further), neither below 0."""
        load, seconds = self.load / self.tokens, self.seconds / self.tokens
        guess, doubt = 0.5 * seconds / load, DOUBT * load * load
        variance = self.load_squared / self.tokens - load * load
        covariance = self.load_seconds / self.tokens - load * seconds
        further = (covariance + doubt * guess) / (variance + doubt)
        further = min(max(further, 0.0), seconds / load)
        return seconds - further * load, further


@dataclass
class Speed:
    """Of one server process. Owner: its EngineState, which begins a new one with another process.

    What `settle` has found holds until the next time: a strategy reads it for every request.
    """

    read: float | None = None
    """Seconds to read a token of a prompt; None: not known."""
    write: tuple[float, float] | None = None
    """(alone, further), see above; None: not known."""
    _read_tokens: float = 0.0
    _read_seconds: float = 0.0
    _line: _Line = field(default_factory=_Line)
    _last: float = 0.0  # when a prompt had been read

    def began(self, tokens: int, since: float | None, now: float) -> None:
        """A request's first token came; `tokens` of its prompt were not in the cache. `since`: when it was sent;
        None: the engine rested meanwhile, or was full.

        It was being read since then, or since the prompt before it had been read: engines read before they write on.
        """
        if tokens < SHORT:
            return
        if since is not None:
            self._read_tokens += tokens
            self._read_seconds += now - max(since, self._last)
        self._last = now

    def went_on(self, tokens: int, load: int, since: float | None, now: float) -> None:
        """Further tokens of a request came, so long after those before, with `load` requests in the engine."""
        if since is not None:
            self._line.add(tokens, now - since, load)

    def settle(self, *, fade: bool) -> None:
        """`fade`: a second of work has passed. What is not seen again is forgotten: an engine that nobody asks
        because it was slow is asked again."""
        if fade:
            self._read_tokens *= FADES_TO
            self._read_seconds *= FADES_TO
            self._line.fade()
        known = self._read_tokens >= ENOUGH_READ and self._read_seconds > 0
        self.read = self._read_seconds / self._read_tokens if known else None
        self.write = self._line.fit() if self._line.tokens >= ENOUGH_WRITTEN else None

    def told(self, load: int) -> dict[str, object]:
        """For people: tokens a second, of prompts, and of one response with `load` requests in the engine."""
        writes = None if self.write is None else self.write[0] + self.write[1] * max(1, load)
        return {
            "prefill_tokens_per_s": None if not self.read else 1.0 / self.read,
            "decode_tokens_per_s": None if not writes else 1.0 / writes,
        }
