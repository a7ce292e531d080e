"""The class of quantised tensors, to ask whether a parameter is one: none is."""


class QuantizedTensor: ...
