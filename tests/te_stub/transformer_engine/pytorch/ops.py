"""Names in megatron-core's annotations. The stub does not support the fused MLP."""


class Sequential: ...


class FusibleOperation: ...
