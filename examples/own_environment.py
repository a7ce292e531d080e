"""A custom environment: after a wrong answer the model may try once more.

    rlsys train examples/own_environment.yaml

`second_chance(config, tokenizer, generate_turn)` makes a generator. `generate_turn(sample)` is one turn of the model,
over all interruptions. `sample.observe` appends the environment's output, which is never trained. A generator must
derive its state from the sample's tokens: after a crash it is called again with the saved ones.
"""

from rlsys.config import Config
from rlsys.core.types import Prompt, Response, Sample, Status
from rlsys.data import Tokenizer
from rlsys.generators.generator import Generator
from rlsys.generators.turns import GenerateTurn
from rlsys.rewards.answer import final_answer


def second_chance(config: Config, tokenizer: Tokenizer, generate_turn: GenerateTurn) -> Generator:
    """Return a generator that lets the model try again once after a wrong answer."""
    retry_ids = tokenizer.encode("<user>again<assistant>")
    max_first_turn = config.rollout.max_response_tokens - len(retry_ids)

    def is_right(sample: Sample, prompt: Prompt) -> bool:
        response = Response(tokenizer.decode(sample.response_ids), finished=True)
        return final_answer(response) == prompt.entry["answer"]

    async def generate(sample: Sample, prompt: Prompt) -> None:
        ended = bool(sample.response_ids) and sample.response_ids[-1] in tokenizer.stop_ids
        if not sample.observed and not ended:
            await generate_turn(sample)
            if sample.status is not Status.FINISHED or is_right(sample, prompt):
                return
            if len(sample.response_ids) >= max_first_turn:
                return
            sample.status = Status.PARKED  # the turn has ended, the sample has not
        if not sample.observed:
            sample.observe(retry_ids)
        await generate_turn(sample)

    return generate
