"""The process that `rlsys eval` starts."""

from __future__ import annotations

import sys

import pytest

from rlsys.rollout import evaluation


@pytest.mark.parametrize(
    ("given", "missing"), [([], "--config, --engine"), (["--config", "c.yaml"], "--engine")], ids=str
)
def test_it_names_what_it_was_not_given(
    given: list[str], missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluation", *given])
    with pytest.raises(SystemExit) as ended:
        evaluation.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().endswith(f"the following arguments are required: {missing}")
