"""Validation of requests to an engine: one set of rules for router, gateway, agents and the Tinker server."""

from rlsys.engine_requests.fields import short
from rlsys.engine_requests.limits import ANY_ENGINE, DEATHS_POISONOUS, RESERVED_TOKENS, Limits, RefusedPrompt
from rlsys.engine_requests.requests import API_FIELDS, INERT, check_request, prompt_count
from rlsys.engine_requests.sampling import ALIASES, SAMPLING, check_sampling, check_stop, check_turn

__all__ = [
    "ALIASES",
    "ANY_ENGINE",
    "API_FIELDS",
    "DEATHS_POISONOUS",
    "INERT",
    "RESERVED_TOKENS",
    "SAMPLING",
    "Limits",
    "RefusedPrompt",
    "check_request",
    "check_sampling",
    "check_stop",
    "check_turn",
    "prompt_count",
    "short",
]
