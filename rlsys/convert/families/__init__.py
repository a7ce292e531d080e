"""The name table of each model family, read in both directions: Hugging Face <-> Megatron-Core's GPTModel.

Each file of this folder has a tuple `FAMILIES`. To add a family, add a file, and a line in tests/helpers/tiny.py.
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

_NO_PACKING = "its sparse attention cannot take packed sequences in megatron-core 0.16.1"
_UNSOLVED = "the engine's log-probs are far from those of transformers (0.65 nat), and it is not known why"
UNSUPPORTED: dict[str, str] = {
    "DeepseekV32ForCausalLM": _NO_PACKING,
    "GlmMoeDsaForCausalLM": _NO_PACKING,
    "DeepseekV4ForCausalLM": "megatron-core 0.16.1 has no such layers",
    "MiMoV2FlashForCausalLM": "it was never compared with transformers",
    "Qwen3_5ForConditionalGeneration": _UNSOLVED,
    "Qwen3_5MoeForConditionalGeneration": _UNSOLVED,
}
"""Known architectures that cannot be trained here -> the reason."""


def family_of(architecture: str) -> Family:
    """Return the family of an architecture.

    Raises:
        UserError: the architecture has no name table.
    """
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    prefix = f"config.json: architecture {architecture!r}"
    if reason := UNSUPPORTED.get(architecture):
        raise UserError(f"{prefix} is not supported: {reason}")
    matches = difflib.get_close_matches(architecture, FAMILIES, n=1)
    hint = f"; did you mean {matches[0]}?" if matches else ""
    raise UserError(f"{prefix} has no conversion table; known: {', '.join(FAMILIES)}{hint}")
