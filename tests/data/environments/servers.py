"""Toys of other people's packages, each run in a venv of its own: `python servers.py NAME [PORT]`."""

import sys


def mcp_sums():
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("sums")

    @server.tool()
    def add(terms: list[int]) -> str:
        """Adds whole numbers."""
        return str(sum(terms))

    @server.tool()
    def judge(answer: str, task: str) -> str:
        """What the answer to the task is worth."""
        import json

        return "1.0" if answer.strip() == str(json.loads(task)["answer"]) else "0.0"

    server.run(transport="stdio")


def openenv_echo(port):
    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Said(Action):
        message: str

    class Heard(Observation):
        heard: str

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.turns = 0

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.turns, self.seed = 0, seed
            return Heard(heard=f"seed {seed}", done=False, reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            self.turns += 1
            reward = len(action.message) / 10
            return Heard(heard=action.message, done=self.turns == 2, reward=reward)

        @property
        def state(self):
            return State(step_count=self.turns)

    app = create_app(Echo, Said, Heard, env_name="echo", max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


def load_environment():
    """Of verifiers: a number is guessed with hints, within three turns."""
    import verifiers as vf
    from datasets import Dataset

    class Guess(vf.MultiTurnEnv):
        @vf.stop
        async def found(self, state):
            replies = [m for t in state["trajectory"] for m in t["completion"]]
            return bool(replies) and replies[-1].content.strip() == state["answer"]

        async def env_response(self, messages, state, **kwargs):
            lower = int(messages[-1].content) < int(state["answer"])
            return [{"role": "user", "content": "higher" if lower else "lower"}]

    async def right(completion, answer):
        return 1.0 if completion[-1].content.strip() == answer else 0.0

    async def brief(completion):
        return 1.0 / len(completion)

    rows = [{"question": f"guess {i}", "answer": str(i)} for i in range(10)]
    rubric = vf.Rubric(funcs=[right, brief], weights=[1.0, 0.5])
    return Guess(
        dataset=Dataset.from_list(rows), rubric=rubric, max_turns=3, system_prompt="a number below ten"
    )


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
