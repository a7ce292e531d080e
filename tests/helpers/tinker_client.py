"""Tinker's own client, told what to do by lines of JSON: `python tinker_client.py URL KEY_FILE`, in its own venv.

A line is [method, {arguments}]; the answer is {"result": ...}, or {"error": what the client raised}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tinker
from tinker import TinkerError, types


class Client:
    def __init__(self, url: str, key: str) -> None:
        self._service = tinker.ServiceClient(base_url=url, api_key=key)
        self._models: dict[str, Any] = {}
        self._samplers: dict[str, Any] = {}

    def create(self, model: str, base: str, rank: int, seed: int) -> str:
        training_client = self._service.create_lora_training_client(base, rank=rank, seed=seed).result()
        self._models[model] = training_client
        return str(training_client.model_id)

    def load(self, model: str, path: str, optimizer: bool) -> str:
        make = self._service.create_training_client_from_state
        if optimizer:
            make = self._service.create_training_client_from_state_with_optimizer
        self._models[model] = make(path).result()
        return str(self._models[model].model_id)

    def run(self, model: str, data: list[dict[str, Any]], loss: str, **more: Any) -> dict[str, Any]:
        """`only`: without a backward pass."""
        call = "forward" if more.pop("only", False) else "forward_backward"
        result = getattr(self._models[model], call)(
            [_datum(d) for d in data], loss, more.get("config")
        ).result()
        outputs = [each["logprobs"].tolist() for each in result.loss_fn_outputs]
        return {"metrics": result.metrics, "logprobs": outputs}

    def step(self, model: str, **adam: float) -> dict[str, float]:
        result = self._models[model].optim_step(types.AdamParams(**adam)).result()
        return dict(result.metrics)

    def train(self, model: str, data: list[dict[str, Any]], loss: str, lr: float) -> list[float]:
        """Both sent before one is waited for, as the client's documentation has it. Loss and gradient norm."""
        passed = self._models[model].forward_backward([_datum(d) for d in data], loss)
        stepped = self._models[model].optim_step(types.AdamParams(learning_rate=lr))
        return [passed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm:mean"]]

    def custom(self, model: str, data: list[dict[str, Any]]) -> dict[str, float]:
        """A loss that the client computes: the square of each log-prob."""

        def squares(_: Any, logprobs: list[Any]) -> Any:
            return sum((each**2).sum() for each in logprobs), {}

        result = self._models[model].forward_backward_custom([_datum(d) for d in data], squares).result()
        return dict(result.metrics)

    def save(self, model: str, name: str, overwrite: bool = False) -> str:
        return str(self._models[model].save_state(name, overwrite=overwrite).result().path)

    def sampler(self, sampler: str, model: str) -> None:
        self._samplers[sampler] = self._models[model].save_weights_and_get_sampling_client().result()

    def named_sampler(self, sampler: str, model: str, name: str) -> str:
        path = self._models[model].save_weights_for_sampler(name).result().path
        self._samplers[sampler] = self._service.create_sampling_client(model_path=path).result()
        return str(path)

    def sampler_of(self, sampler: str, **of: str) -> None:
        """`base_model` or `model_path`."""
        self._samplers[sampler] = self._service.create_sampling_client(**of).result()

    def sample(self, sampler: str, prompt: list[int], n: int = 1, **params: Any) -> list[dict[str, Any]]:
        sampling_params = types.SamplingParams(**params)
        response = (
            self._samplers[sampler].sample(types.ModelInput.from_ints(prompt), n, sampling_params).result()
        )
        return [
            {"ids": s.tokens, "logprobs": s.logprobs, "reason": s.stop_reason, "id": s.sequence_id}
            for s in response.sequences
        ]

    def logprobs(self, sampler: str, prompt: list[int]) -> list[float | None]:
        logprobs: list[float | None] = (
            self._samplers[sampler].compute_logprobs(types.ModelInput.from_ints(prompt)).result()
        )
        return logprobs

    def info(self, model: str) -> dict[str, Any]:
        info: dict[str, Any] = self._models[model].get_info().model_dump()
        return info


def _datum(of: dict[str, Any]) -> Any:
    return types.Datum(model_input=types.ModelInput.from_ints(of["ids"]), loss_fn_inputs=of["inputs"])


def main(url: str, key_file: str) -> None:
    client = Client(url, Path(key_file).read_text().strip())
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = {"result": getattr(client, method)(**arguments)}
        except (TinkerError, ValueError, RuntimeError) as e:  # what a test asks for
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
