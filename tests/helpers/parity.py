"""Access to TRL and verl, the reference implementations of parity tests. `make test` installs them in a separate
folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from launch.bootstrap import PARITY_FOLDER


@contextmanager
def importable() -> Iterator[None]:
    """Make TRL and verl importable. transformers reports no torchvision, which the parity tests do not need."""
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
