"""Value layers: one linear layer, next to the policy's output layer or in place of a critic's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class ValueLayer(torch.nn.Linear):
    """Linear layer from hidden states to one value per token.

    Starts at 0, so that the first advantages are plain rewards.

    It is called like Megatron's output layer and can replace it on the last pipeline stage.
    """

    def __init__(self, module: GPTModel) -> None:
        super().__init__(module.config.hidden_size, 1, dtype=module.config.params_dtype)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)
        self._sequence_parallel = module.config.sequence_parallel
        for parameter in self.parameters():
            # Under sequence parallelism each rank has its own tokens: Megatron sums such gradients.
            parameter.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """Map `[P or P / tp, 1, H]` to `[P, 1, 1]`, without bias."""
        out = super().forward(hidden)
        if self._sequence_parallel:
            out = gather_from_sequence_parallel_region(out, tensor_parallel_output_grad=False)
        return out, None


class ValueHead(ValueLayer):
    """A critic on the policy's own trunk.

    The value loss changes the policy's weights too, scaled by the coefficient of the loss term `value`. It costs
    hidden_size + 1 parameters instead of a second model.
    """

    def __init__(self, module: GPTModel) -> None:
        super().__init__(module)
        self._hidden: Tensor | None = None
        module.output_layer.register_forward_pre_hook(self._keep)

    def _keep(self, _: Any, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0]

    def values(self) -> Tensor:
        """Return the values of the tokens of the last forward pass, `[P]` float32.

        The expected return after each token.
        """
        assert self._hidden is not None, "no forward pass came before"
        hidden, self._hidden = self._hidden, None
        return self(hidden)[0][:, 0, 0].float()
