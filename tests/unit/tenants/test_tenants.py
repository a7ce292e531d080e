"""Tinker's protocol without a model: its messages, its losses, its keys, and the ledger that a kill leaves."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.cli.main import main
from rlsys.cli.tenants import read_options
from rlsys.core.errors import UserError
from rlsys.tenants.keys import Keys, check_names, key_file, key_of
from rlsys.tenants.learner import check_data, find_loss
from rlsys.tenants.ledger import Change, Conflict, Ledger, Request
from rlsys.tenants.losses import LOSSES, token_losses
from rlsys.tenants.messages import (
    Datum,
    SampledSequence,
    UnsupportedRequest,
    read_request,
    sample_result,
    train_result,
)
from rlsys.tenants.requests import CreateModel, Sample, SaveWeights, read
from rlsys.tenants.sampler import build_body, check_sample
from rlsys.tenants.wire import (
    BadMessage,
    blob,
    double,
    fields,
    put_bytes,
    put_double,
    put_number,
    signed,
)

# -- messages -----------------------------------------------------------------------------------------------


def tensor(values: np.ndarray, dtype: int) -> bytes:
    """As protobuf packs the shape."""
    return put_bytes(1, values.tobytes()) + put_number(3, dtype) + put_bytes(4, bytes([len(values)]))


def a_request(**changes: bytes) -> bytes:
    ids = put_bytes(1, put_bytes(1, np.array([7, 8, 9], np.int32).tobytes()))
    inputs = {
        "target_tokens": tensor(np.array([8, 9, 2]), 2),
        "weights": tensor(np.array([0, 1, 0.5], np.float32), 1),
    } | changes
    entries = b"".join(put_bytes(2, put_bytes(1, k) + put_bytes(2, v)) for k, v in inputs.items())
    config = put_bytes(7, put_bytes(1, "beta") + put_bytes(2, put_double(1, 0.25)))
    head = put_bytes(1, "s:train:0") + put_number(2, 3) + put_bytes(4, "cross_entropy") + put_number(6, 1)
    return head + put_bytes(3, put_bytes(1, ids) + entries) + config


def test_a_training_request_is_read() -> None:
    request = read_request(a_request())
    assert (request.model_id, request.seq_id, request.loss, request.forward_only) == (
        "s:train:0",
        3,
        "cross_entropy",
        True,
    )
    assert request.params == {"beta": 0.25}
    (datum,) = request.data()
    assert datum.ids == [7, 8, 9]
    assert datum.inputs["target_tokens"].tolist() == [8, 9, 2]
    assert datum.inputs["weights"].tolist() == [0, 1, 0.5]


def test_unsupported_requests_are_rejected_with_the_reason() -> None:
    sparse = put_bytes(2, b"") + put_number(3, 2)
    with pytest.raises(UnsupportedRequest, match="target_tokens is sparse"):
        read_request(a_request(target_tokens=sparse)).data()
    image = put_bytes(3, put_bytes(1, put_bytes(2, b"")))
    with pytest.raises(UnsupportedRequest, match="an image or a sound"):
        read_request(image).data()
    text = put_bytes(7, put_bytes(1, "kind") + put_bytes(2, put_bytes(2, "x")))
    with pytest.raises(UnsupportedRequest, match="kind is a text"):
        read_request(text)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_only_raise_request_errors(data: bytes) -> None:
    with contextlib.suppress(BadMessage, UnsupportedRequest):
        read_request(data).data()


@given(st.integers(0, len(a_request()) - 1), st.integers(0, 255))
def test_a_damaged_request_is_refused_or_read(place: int, byte: int) -> None:
    damaged = bytearray(a_request())
    damaged[place] = byte
    for data in (bytes(damaged), a_request()[:place]):
        with contextlib.suppress(BadMessage, UnsupportedRequest):
            read_request(data).data()


def test_encoded_results_match_the_client_format() -> None:
    result = dict(
        fields(train_result([np.array([-1, -2], np.float32), np.array([-3], np.float32)], {"loss:sum": 6.0}))
    )
    record = dict(fields(blob(result[2])))
    entry = dict(fields(blob(record[2])))
    batched = dict(fields(blob(entry[2])))
    assert (entry[1], record[3]) == (b"logprobs", 2)
    assert np.frombuffer(blob(batched[1]), np.float32).tolist() == [-1, -2, -3]
    assert np.frombuffer(blob(batched[2]), np.int64).tolist() == [0, 8, 12], "in bytes"
    metric = dict(fields(blob(result[3])))
    assert (metric[1], double(metric[2])) == (b"loss:sum", 6.0)
    sampled = list(
        fields(
            sample_result(
                [SampledSequence([5, 2], [-0.5, -1], True), SampledSequence([5], [-1], False)], [math.nan, -1]
            )
        )
    )
    first, second = (dict(fields(blob(value))) for number, value in sampled if number == 1)
    assert (first.get(1, 0), second[1]) == (0, 1), "stopped; too long"
    assert np.frombuffer(blob(first[2]), np.int32).tolist() == [5, 2]


@given(st.integers(-(2**63), 2**63 - 1))
def test_numbers_round_trip(value: int) -> None:
    ((number, field_value),) = fields(put_number(9, value))
    assert (number, signed(field_value)) == (9, value)


# -- losses -------------------------------------------------------------------------------------------------


def test_losses_are_those_of_the_protocol() -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    inputs = {
        "weights": torch.tensor([0.0, 1.0, 2.0, 0.0]),
        "logprobs": torch.tensor([-1.0, -2.5, -0.1, -1.0]),
        "advantages": torch.tensor([0.0, 1.0, -1.0, 2.0]),
    }
    ratio = (logp - inputs["logprobs"]).exp().detach()
    advantages = inputs["advantages"]
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    expected = {
        "cross_entropy": -logp * inputs["weights"],
        "importance_sampling": -ratio * advantages,
        "ppo": -clipped,
        "cispo": -ratio.clamp(0, 4) * advantages * logp,
        "dro": torch.where(
            advantages != 0, -(logp * advantages - 0.05 * (logp - inputs["logprobs"]) ** 2), 0.0
        ),
    }
    assert expected.keys() == LOSSES.keys()
    for name, expected_losses in expected.items():
        losses = token_losses(LOSSES[name], logp, inputs, {"beta": 0.1} if name == "dro" else {})
        torch.testing.assert_close(losses.detach(), expected_losses.detach())


def test_a_loss_has_its_own_parameters_only() -> None:
    with pytest.raises(UserError, match="expected one of cross_entropy"):
        find_loss("gspo", {})
    with pytest.raises(UserError, match="beta: not a parameter of ppo"):
        find_loss("ppo", {"beta": 1.0})
    with pytest.raises(UserError, match="beta is missing; dro requires it"):
        find_loss("dro", {})


def datum(**changes: list[float]) -> Datum:
    inputs = {"target_tokens": np.array([2, 3]), "weights": np.ones(2, np.float32)}
    return Datum([1, 2], inputs | {k: np.array(v) for k, v in changes.items()})


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (datum(target_tokens=[2, 96]), "target_tokens has the id 96; expected 0 to 95"),
        (datum(target_tokens=[2, -1]), "target_tokens has the id -1"),
        (datum(target_tokens=[2.0, 3.0]), "target_tokens have the type float"),
        (datum(weights=[1.0]), "1 weights for 2 tokens"),
        (datum(weights=[1.0, math.nan]), r"weights\[1\] = nan; expected a finite number"),
        (
            datum(mask=[1.0, 1.0]),
            "loss_fn_inputs mask, target_tokens, weights; expected target_tokens, weights",
        ),
        (Datum([], {}), "0 tokens; expected 1 to 15"),
        (Datum(list(range(16)), {}), "16 tokens; expected 1 to 15"),
    ],
)
def test_untrainable_data_is_rejected(wrong: Datum, told: str) -> None:
    check_data([datum()], LOSSES["cross_entropy"], 96, 16)
    with pytest.raises(UserError, match=told):
        check_data([datum(), wrong], LOSSES["cross_entropy"], 96, 16)


# -- requests in JSON ---------------------------------------------------------------------------------------


def test_unknown_fields_and_names_that_leave_their_folder_are_rejected() -> None:
    with pytest.raises(UserError, match="galore: Extra inputs"):
        read(CreateModel, b'{"session_id": "s", "model_seq_id": 0, "base_model": "m", "galore": 1}')
    for name in ("../key", "a/b", ".hidden", "", "x" * 101):
        with pytest.raises(UserError, match="path"):
            read(SaveWeights, f'{{"model_id": "m", "seq_id": 1, "path": "{name}"}}'.encode())
    with pytest.raises(UserError, match="the body"):
        read(SaveWeights, b"\xff")


def asked(ids: list[int], **params: object) -> Sample:
    prompt = {"chunks": [{"tokens": ids, "type": "encoded_text"}]}
    return Sample.model_validate(
        {"sampling_session_id": "s", "seq_id": 0, "prompt": prompt, "sampling_params": params}
    )


def test_invalid_sampling_requests_are_rejected_before_the_engine() -> None:
    for ids, params, message in (
        ([], {}, "the prompt is empty"),
        ([128], {}, "token id 128 is outside"),
        ([-1], {}, "token id -1 is outside"),
        ([1], {"stop": [500]}, "token id 500 is outside"),
        ([1] * 30, {"max_tokens": 3}, "30 tokens and max_tokens = 3: expected at most 32"),
        ([1], {"top_k": 0}, "top_k = 0"),
    ):
        with pytest.raises(UserError, match=message):
            check_sample(asked(ids, **params), 128, 32)
    assert check_sample(asked([1] * 30), 128, 32).sampling_params.max_tokens == 2


def test_stops_and_seeds_are_sglangs() -> None:
    def sampling(**params: object) -> dict[str, object]:
        sampling_params: dict[str, object] = build_body(asked([1], **params), "a", 2)["sampling_params"]
        return sampling_params

    assert "ignore_eos" not in sampling()
    assert sampling(stop=[])["ignore_eos"] is True
    assert (sampling(stop="x")["stop"], sampling(stop=[3])["stop_token_ids"]) == (["x"], [3])
    assert sampling(seed=5)["sampling_seed"] == 7
    assert build_body(asked([1]), "a", 0)["lora_path"] == "a"
    assert "lora_path" not in build_body(asked([1]), None, 0)


# -- keys ---------------------------------------------------------------------------------------------------


def test_each_tenant_has_a_key_that_survives_restarts(tmp_path: Path) -> None:
    tenant_keys = {name: key_of(tmp_path, name) for name in ("alice", "bob")}
    assert tenant_keys["alice"] != tenant_keys["bob"]
    assert tenant_keys == {name: key_of(tmp_path, name) for name in tenant_keys}, "over a restart"
    keys = Keys(tenant_keys)
    assert [keys.tenant(tenant_keys[name]) for name in tenant_keys] == ["alice", "bob"]
    for credential in ("", "tml-", tenant_keys["alice"][:-1], tenant_keys["alice"] + "0", "\udcff"):
        assert keys.tenant(credential) is None
    file = key_file(tmp_path, "alice")
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(UserError, match="other users may access it"):
        key_of(tmp_path, "alice")


def test_names_of_tenants_are_folders() -> None:
    for names, message in ((["../x"], "lower-case letters"), (["a", "a"], "occurs 2 times")):
        with pytest.raises(UserError, match=message):
            check_names(names)


# -- the ledger ---------------------------------------------------------------------------------------------


def test_a_request_is_accepted_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.accept("m", 1, "optim_step", b"x")
    assert not ledger.accept("m", 1, "optim_step", b"x"), "sent again"
    with pytest.raises(Conflict, match="another request has the number 1"):
        ledger.accept("m", 1, "optim_step", b"y")
    with pytest.raises(Conflict):
        ledger.accept("m", 1, "forward", b"x")


def test_the_ledger_after_a_kill_lists_the_unfinished_requests(tmp_path: Path) -> None:
    """Result and state are one transaction; a state that nothing names is swept away."""
    ledger = Ledger(tmp_path)
    ledger.add_model("m")
    kinds = [
        "create_model",
        "forward_backward",
        "optim_step",
        "forward_backward",
        "forward_backward",
        "optim_step",
    ]
    for seq, kind in enumerate(kinds):
        ledger.accept("m", seq, kind, kind.encode())
    for seq, updates in ((0, 0), (1, 0), (2, 1), (3, 1)):
        change = None
        if kinds[seq] != "forward_backward":
            change = Change("m", updates, ledger.write_state("m", seq, b"state %d" % seq))
        ledger.finish(Request("m", seq, kinds[seq]), b"result %d" % seq, change=change)
    ledger.write_state("m", 5, b"of a step that was not committed")
    again = Ledger(tmp_path)
    again.sweep()
    (row,) = again.models()
    assert (row.applied, row.updates, again.next_seq("m")) == (2, 1, 4)
    assert again.state_file(row.state or "").read_bytes() == b"state 2"
    assert [p.name for p in (tmp_path / "states").iterdir()] == [row.state]
    assert [r.seq for r in again.done_since("m", row.applied, "forward_backward")] == [3], (
        "gradients were in memory"
    )
    unfinished_requests = again.unfinished()
    assert [(r.seq, r.tries) for r in unfinished_requests] == [(4, 1), (5, 0)]
    assert [r.tries for r in again.unfinished()] == [2, 0]
    assert again.body(unfinished_requests[0]) == b"forward_backward"
    assert again.result("m", 2) == ("optim_step", "done", b"result 2")
    assert again.result("m", 4) == ("forward_backward", None, b"")
    assert again.result("m", 9) is None


# -- the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["parallel.tp=2", "parallel.world_size=2"], "parallel"),
        (["trainer.lora=null"], "weights.method = adapter: expected trainer.lora"),
        (["engine.count=2"], "engine.count = 2"),
    ],
)
def test_a_config_that_cannot_serve_tenants_is_rejected(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tenants", "configs/quickstart_lora.yaml", "--tenant", "a", "--port", "8000"]
    assert main([*command, f"run.dir={tmp_path}/run", *words]) == 2
    assert told in capsys.readouterr().err


def test_the_engine_takes_adapters_of_several_tenants() -> None:
    from rlsys.cli.main import make_parser

    words = ["tenants", "configs/quickstart_lora.yaml", "--tenant", "a", "--tenant", "b", "--port", "8000"]
    options = read_options(make_parser().parse_args(words))
    assert options.config.weights.method == "adapter"
    assert options.config.engine.extra_args[:2] == ["--max-loras-per-batch", "8"]
    assert options.arguments == ["--host", "127.0.0.1", "--port", "8000", "--tenant", "a", "--tenant", "b"]
