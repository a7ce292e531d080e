"""Names that megatron-core's annotations look up; its fused MLP is not used here."""


class Sequential: ...


class FusibleOperation: ...
