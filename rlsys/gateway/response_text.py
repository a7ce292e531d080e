"""ResponseText: decodes the tokens of a response, all at once or as they arrive."""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.data.tokenizer import LONGEST_CHARACTER
from rlsys.gateway.api_requests import GenerationRequest
from rlsys.gateway.served_model import ServedModel


class ResponseText:
    """Decodes the tokens of one response.

    Text that may be the start of a stop text or of a character is withheld until later tokens decide.
    """

    def __init__(self, request: GenerationRequest, model: ServedModel) -> None:
        self._request, self._model = request, model
        self._stop_texts = () if request.keep_stop else request.stop_texts
        self._decoded = 0
        """Number of ids whose text is in `_text`."""
        self._context = 0
        """Index of the id at which decoding starts, because the text of a token may depend on the previous token."""
        self._text = ""
        self.sent_text = ""
        """Text that `advance` and `conclude` have returned."""

    def final(self, ids: Sequence[int], *, at_stop: bool) -> str:
        """Return the text of a complete response. `at_stop`: whether a stop token or stop text ended it."""
        if at_stop and not self._request.keep_stop and ids and ids[-1] in self._request.stop_ids:
            ids = ids[:-1]
        text = self._model.decode(ids, skip_special=self._request.skip_special)
        return text[: self.stop_position(text)] if at_stop else text

    def advance(self, ids: Sequence[int]) -> str:
        """Return the text that can be sent since the last call, while the response is generated.

        Args:
            ids: all tokens of the response so far.
        """
        skip = self._request.skip_special
        known_text = self._model.decode(ids[self._context : self._decoded], skip_special=skip)
        text = self._model.decode(ids[self._context :], skip_special=skip)
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or len(ids) - self._decoded >= LONGEST_CHARACTER:
            self._text += text[len(known_text) :]
            self._context, self._decoded = self._decoded, len(ids)
        if ids and ids[-1] in self._request.stop_ids:
            return ""
        return self._send(self._text[: self._certain_length()])

    def conclude(self, ids: Sequence[int], *, at_stop: bool) -> str:
        """Return the text of a complete response that `advance` has not returned. `at_stop`: as in `final`."""
        return self._send(self.final(ids, at_stop=at_stop))

    def _send(self, text: str) -> str:
        new_text = text[len(self.sent_text) :]
        self.sent_text += new_text
        return new_text

    def stop_position(self, text: str) -> int | None:
        """Return the position of the first stop text in `text`; None if it contains none."""
        positions = [position for stop in self._stop_texts if (position := text.find(stop)) >= 0]
        return min(positions, default=None)

    def _certain_length(self) -> int:
        """Return the length of the part of `_text` that cannot be the start of a stop text."""
        text = self._text
        if (position := self.stop_position(text)) is not None:
            return position
        overlaps = (
            n
            for stop in self._stop_texts
            for n in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:n])
        )
        return len(text) - max(overlaps, default=0)
