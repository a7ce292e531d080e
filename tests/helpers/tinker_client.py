"""Remote control of Tinker's client in its own venv: `python tinker_client.py URL KEY_FILE`.

Each line of standard input is [method, {arguments}] as JSON. The response on standard output is {"result": ...} or
{"error": the exception of the client}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tinker
from tinker import TinkerError, types


class Client:
    """Tinker's clients by name. The methods are the commands of standard input."""

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
        """Run a forward and a backward pass, or with `only` a forward pass. Return metrics and log-probs."""
        call = "forward" if more.pop("only", False) else "forward_backward"
        result = getattr(self._models[model], call)(
            [_datum(d) for d in data], loss, more.get("config")
        ).result()
        outputs = [output["logprobs"].tolist() for output in result.loss_fn_outputs]
        return {"metrics": result.metrics, "logprobs": outputs}

    def step(self, model: str, **adam: float) -> dict[str, float]:
        result = self._models[model].optim_step(types.AdamParams(**adam)).result()
        return dict(result.metrics)

    def train(self, model: str, data: list[dict[str, Any]], loss: str, lr: float) -> list[float]:
        """Send both requests of a step before the first response, as the client's documentation recommends.

        Returns:
            The loss and the gradient norm.
        """
        pass_future = self._models[model].forward_backward([_datum(d) for d in data], loss)
        step_future = self._models[model].optim_step(types.AdamParams(learning_rate=lr))
        return [pass_future.result().metrics["loss:sum"], step_future.result().metrics["grad_norm:mean"]]

    def custom(self, model: str, data: list[dict[str, Any]]) -> dict[str, float]:
        """Use a custom loss on the client: the sum of the squares of log-probs."""

        def squares(_: Any, logprobs: list[Any]) -> Any:
            return sum((values**2).sum() for values in logprobs), {}

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

    def sampler_of(self, sampler: str, **source: str) -> None:
        """Create a sampling client. `source`: `base_model` or `model_path`."""
        self._samplers[sampler] = self._service.create_sampling_client(**source).result()

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


def _datum(fields: dict[str, Any]) -> Any:
    return types.Datum(model_input=types.ModelInput.from_ints(fields["ids"]), loss_fn_inputs=fields["inputs"])


def main(url: str, key_file: str) -> None:
    client = Client(url, Path(key_file).read_text().strip())
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            response = {"result": getattr(client, method)(**arguments)}
        except (TinkerError, ValueError, RuntimeError) as e:  # errors that tests provoke
            response = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(response), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
