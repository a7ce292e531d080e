"""Generator of samples with several sequences and turn rewards. After a crash it starts again, as an agent does."""

from __future__ import annotations

from rlsys.config import Config
from rlsys.core.spans import TurnReward
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import Tokenizer
from rlsys.generators.generator import Generator
from rlsys.generators.turns import GenerateTurn
from tests.helpers.scripted_engine import EOS

SEQUENCES, MOST = 3, 20
MARKS = [TurnReward(0.5), TurnReward(0.25, False)]


def several(config: Config, tokenizer: Tokenizer | None, speak: GenerateTurn) -> Generator:
    async def generate(sample: Sample, prompt: Prompt) -> None:
        for number in range(SEQUENCES):
            if number == len(sample.sequences):
                sample.begin([5, 6, number], parent=number - 1, aside=number == 1)
            sequence = sample.sequences[number]
            if not sequence.tokens or (sequence.response_ids[-1] != EOS and sequence.tokens < MOST):
                await speak(sequence, max_tokens=MOST)
            sequence.status = Status.PARKED
            sequence.last_turn = number + 1
        sample.turn_rewards, sample.status = MARKS, Status.FINISHED

    return generate
