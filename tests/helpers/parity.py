"""TRL and verl, which `make test` installs beside the environment: so that tests can hold ours against theirs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from launch.bootstrap import PARITY_FOLDER


@contextmanager
def importable() -> Iterator[None]:
    """They can be imported. transformers is told that there is no torchvision: neither needs it for our tests."""
    import transformers.utils
    import transformers.utils.import_utils

    with pytest.MonkeyPatch.context() as patch:
        for module in (transformers.utils, transformers.utils.import_utils):
            for name in ("is_torchvision_available", "is_torchvision_v2_available"):
                patch.setattr(module, name, lambda: False, raising=False)
        sys.path.append(str(PARITY_FOLDER))
        try:
            yield
        finally:
            sys.path.remove(str(PARITY_FOLDER))
