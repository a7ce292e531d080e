"""Built-in weight transports: the values of weights.method, with the classes and assumed rates of the transports."""

from __future__ import annotations

from typing import NamedTuple

from pydantic_core import PydanticKnownError


class WeightMethod(NamedTuple):
    """A value of weights.method.

    Attributes:
        transport: import path of a subclass of rlsys.weights.weight_transport.WeightTransport.
        rate: assumed speed of a push in GB/s.
    """

    transport: str
    rate: float


WEIGHT_METHODS = {
    "auto": WeightMethod("rlsys.weights.gathered_push:GatheredPush", 20.0),
    "broadcast": WeightMethod("rlsys.weights.gathered_push:GatheredPush", 10.0),
    "sharded": WeightMethod("rlsys.weights.sharded_push:ShardedPush", 10.0),
    "disk": WeightMethod("rlsys.weights.disk_push:DiskPush", 1.0),
    "disk_delta": WeightMethod("rlsys.weights.disk_push:DiskPush", 1.0),
    "adapter": WeightMethod("rlsys.weights.adapter_push:AdapterPush", 20.0),
}


def check_method(value: str) -> str:
    """Return `value` if it is the name of a built-in transport or an import path.

    Raises:
        PydanticKnownError: `value` is neither.
    """
    if value in WEIGHT_METHODS or ":" in value:
        return value
    names = ", ".join(repr(name) for name in WEIGHT_METHODS)
    raise PydanticKnownError(
        "literal_error", {"expected": f"{names}, package.module:Class, or path/to/file.py:Class"}
    )
