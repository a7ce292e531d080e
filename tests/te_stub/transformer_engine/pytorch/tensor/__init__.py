"""Class of quantized tensors, for isinstance checks of parameters. The stub has no quantized parameters."""


class QuantizedTensor: ...
