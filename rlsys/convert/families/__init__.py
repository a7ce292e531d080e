"""Name tables of the model families, between Hugging Face folders and Megatron-Core's GPTModel.

Each module of this package defines a tuple `FAMILIES`. To add a family, add a module, and a line in
tests/helpers/tiny.py.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from pkgutil import iter_modules

from rlsys.convert.rules import Family
from rlsys.core.errors import UserError

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for module in iter_modules(__path__)
    for family in import_module(f"{__name__}.{module.name}").FAMILIES
}
"""Supported families, by architecture in config.json."""

_NO_PACKING = "megatron-core 0.16.1 does not support packed sequences with its sparse attention"
_UNSOLVED = "the engine's log-probs differ from those of transformers by 0.65 nat, for an unknown reason"
UNSUPPORTED: dict[str, str] = {
    "DeepseekV32ForCausalLM": _NO_PACKING,
    "GlmMoeDsaForCausalLM": _NO_PACKING,
    "DeepseekV4ForCausalLM": "megatron-core 0.16.1 does not have its layers",
    "MiMoV2FlashForCausalLM": "the conversion has not been compared with transformers",
    "Qwen3_5ForConditionalGeneration": _UNSOLVED,
    "Qwen3_5MoeForConditionalGeneration": _UNSOLVED,
}
"""Reasons why known architectures are not supported, by architecture."""


def family_of(architecture: str) -> Family:
    """Return the family of an architecture.

    Raises:
        UserError: The architecture has no name table.
    """
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    prefix = f"config.json: architecture {architecture!r}"
    if reason := UNSUPPORTED.get(architecture):
        raise UserError(f"{prefix} is not supported: {reason}")
    matches = difflib.get_close_matches(architecture, FAMILIES, n=1)
    hint = f"; did you mean {matches[0]}?" if matches else ""
    raise UserError(f"{prefix} is unknown; expected one of {', '.join(FAMILIES)}{hint}")
