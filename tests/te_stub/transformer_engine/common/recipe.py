"""Names that megatron-core subclasses or looks up. The stub does not support FP8."""


class Recipe: ...


class DelayedScaling(Recipe): ...


class Float8CurrentScaling(Recipe): ...


class Float8BlockScaling(Recipe): ...


class MXFP8BlockScaling(Recipe): ...


class Format:
    E4M3 = "e4m3"
    HYBRID = "hybrid"
