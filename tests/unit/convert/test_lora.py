"""Adapters: which matrices have one, what their factors are called, what is refused, what they cost."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from rlsys.algo.preflight import check
from rlsys.config import Config, load_config
from rlsys.config.mistakes import ConfigError
from rlsys.config.trainer import LoraConfig
from rlsys.convert.adapters import adapted, check_lora, factors, matrices
from rlsys.convert.config import HFConfig
from rlsys.convert.peft import adapter_config, write_adapter
from rlsys.core.errors import UserError
from rlsys.core.weight_updates import EngineAddress, WeightUpdate
from rlsys.engine import launch_args
from rlsys.planner.memory import budget, checkpoint_host, describe_memory, model_size
from rlsys.planner.weight_update_cost import short
from rlsys.weights.adapter_push import AdapterPush
from rlsys.weights.checksums import base_layer_name
from tests.helpers import tiny

HERE = Path(__file__).parents[3]
RANK_4 = LoraConfig(rank=4, alpha=8)


def model(name: str) -> HFConfig:
    return HFConfig.of(tiny.raw_config(tiny.TINY[name]), name)


def config(*overrides: str) -> Config:
    return load_config(HERE / "configs/quickstart_lora.yaml", list(overrides))


def test_each_matrix_has_two_factors_under_pefts_names() -> None:
    """Query, key and value three pairs, each expert its own; cut where the matrix is."""
    factor_shapes = {
        name: (e.rule.shard_axis, shape)
        for e in factors(model("qwen3-moe"), RANK_4)
        for name, shape in e.hf.items()
    }
    layer = "base_model.model.model.layers.3."
    assert factor_shapes[f"{layer}self_attn.k_proj.lora_A.weight"] == (None, (4, 64))
    assert factor_shapes[f"{layer}self_attn.k_proj.lora_B.weight"] == (0, (48, 4)), "two heads of 24"
    assert factor_shapes[f"{layer}self_attn.o_proj.lora_A.weight"] == (1, (4, 96)), "its columns are cut"
    assert factor_shapes[f"{layer}self_attn.o_proj.lora_B.weight"] == (None, (64, 4))
    assert factor_shapes[f"{layer}mlp.experts.7.down_proj.lora_A.weight"] == (1, (4, 32))
    assert len(factor_shapes) == 2 * 4 * (4 + 8 * 3)


def test_targets_choose_by_the_last_part_of_a_name() -> None:
    lora = LoraConfig(rank=4, targets=("q_proj", "v_proj"))
    pairs = [pair for _, of_parameter in adapted(model("qwen3-moe"), lora) for pair in of_parameter]
    assert Counter(pair.part for pair in pairs) == {0: 4, 2: 4}, (
        "of query, key and value the first and the last"
    )
    assert adapter_config(Path("base"), lora, model("qwen3"))["target_modules"] == ["q_proj", "v_proj"]
    assert matrices(model("deepseek-v3"))[:3] == ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]


def test_an_adapter_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    lora, weight = LoraConfig(rank=4), torch.arange(6.0).view(2, 3)
    for factor in (weight, weight.T):  # the second takes the place of the first
        write_adapter(tmp_path / "adapter", Path("base"), lora, model("qwen3"), [("a.lora_A.weight", factor)])
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert torch.equal(load_file(tmp_path / "adapter/adapter_model.safetensors")["a.lora_A.weight"], weight.T)
    adapter_config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["base_model_name_or_path"]) == (4, "base")


@pytest.mark.parametrize(
    ("family", "overrides", "told"),
    [
        ("qwen3-moe", {"targets": ["q_prj"]}, "trainer.lora.targets contains q_prj; .*did you mean q_proj?"),
        (
            "qwen3-moe",
            {"targets": ["gate"]},
            "trainer.lora.targets contains gate; expected matrices of .*: q_proj, k_proj",
        ),
        ("deepseek-v3", {"weights": "adapter"}, "DeepseekV3ForCausalLM; expected one of Qwen2ForCausalLM"),
        ("gpt-oss", {}, "the experts of .* are stacked in one tensor.*q_proj, k_proj, v_proj, o_proj"),
    ],
)
def test_adapters_unsupported_by_the_model_are_refused(
    family: str, overrides: dict[str, Any], told: str
) -> None:
    method = {"method": overrides.pop("weights", "auto")}
    configuration = Config.model_validate(
        {"model": {"path": "m"}, "trainer": {"lora": {"rank": 4, **overrides}}, "weights": method}
    )
    with pytest.raises(UserError, match=told):
        check_lora(configuration, model(family))


def test_expert_tensor_parallelism_above_tp_is_refused_with_adapters() -> None:
    configuration = config("parallel.etp=2")
    with pytest.raises(
        UserError, match=r"parallel.etp = 2 with adapters of experts: .* at most parallel.tp = 1"
    ):
        check_lora(configuration, HFConfig.read(configuration.model.path))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.lora.rank=0", "trainer.lora.rank = 0: expected at least 1"),
        ("trainer.lora.alpha=0", "trainer.lora.alpha = 0"),
        ("trainer.lora.ranks=4", "did you mean trainer.lora.rank"),
        ("trainer.lora.targets=[]", "trainer.lora.targets"),
        ("trainer.optimizer=muon", "trainer.lora trains only adapters: trainer.optimizer = muon"),
        ("trainer.balance_rate=0.01", "trainer.balance_rate = 0.01 moves the routers' biases"),
        ("algo.critic={}", "algo.critic trains a second model"),
        ("trainer.lora=null weights.method=adapter", "weights.method = adapter: expected trainer.lora"),
        ("weights.method=adapter launch.release_memory=true", "would drop the weights of model.path"),
        (
            "weights.method=adapter router.interruption=retract launch.placement=disaggregated",
            "router.interruption = retract keeps samples in flight, so engines cannot replace their adapter",
        ),
        (
            "weights.method=adapter launch.nodes=2 launch.backend=slurm",
            "launch.nodes = 2; expected weights.method = auto",
        ),
    ],
)
def test_settings_incompatible_with_adapters_are_refused(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(*override.split())


def test_values_are_refused() -> None:
    configuration = config("algo.advantage=gae", "algo.loss=[clip, value]")
    with pytest.raises(
        UserError, match=r"trainer.lora trains only adapters, and values need a separate layer"
    ):
        check(configuration)


def test_optimizer_and_checkpoints_contain_only_the_adapters() -> None:
    full_config, lean = config("trainer.lora=null"), config()
    hf = HFConfig.read(lean.model.path)
    size, trained = model_size(hf), sum(e.elements for e in factors(hf, LoraConfig(rank=16)))
    assert budget(lean, size).optimizer == pytest.approx(8 * trained)
    assert budget(lean, size).gradients == pytest.approx(4 * trained)
    assert budget(lean, size).weights == budget(full_config, size).weights + 4 * trained
    share = trained / size.total
    assert checkpoint_host(lean, size) == pytest.approx(share * checkpoint_host(full_config, size))
    pushed = config("weights.method=adapter")
    assert ("a weight push", f"{short(4 * trained / 1e9)} GB to each engine") in [
        (name, text.split(",")[0]) for name, text in describe_memory(pushed, hf)
    ]
    assert ("trained", "adapters of rank 16") in [
        (name, text.split(", ")[-1].split(";")[0]) for name, text in describe_memory(lean, hf)
    ]


def test_engines_of_an_adapter_push_serve_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_args, "have_cuda", lambda: False)
    argv, _ = launch_args.engine_command(
        config("weights.method=adapter", "trainer.lora.targets=[q_proj]"), 0, 3100
    )
    position = argv.index("--enable-lora")
    assert argv[position : position + 3] == ["--enable-lora", "--max-lora-rank", "16"]
    assert argv[argv.index("--lora-target-modules") + 1] == "q_proj"
    assert argv[argv.index("--lora-backend") + 1] == "torch_native"
    assert "--enable-lora" not in launch_args.engine_command(config(), 0, 3100)[0], (
        "merged pushes need nothing"
    )


def test_an_engine_wraps_its_experts() -> None:
    assert base_layer_name("model.layers.0.mlp.experts.w13_weight") == (
        "model.layers.0.mlp.experts.base_layer.w13_weight"
    )
    assert (
        base_layer_name("model.layers.0.self_attn.o_proj.weight") == "model.layers.0.self_attn.o_proj.weight"
    )


class Loads(BaseHTTPRequestHandler):
    """What of SGLang takes an adapter: it refuses to forget one that it does not know, and to load one twice."""

    known: ClassVar[dict[int, bool]] = {}
    loaded: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        port, loads = self.server.server_port, self.path == "/load_lora_adapter_from_tensors"  # type: ignore[attr-defined]
        ok = self.known.get(port, False) != loads
        if ok:
            self.known[port] = loads
            self.loaded.extend([body] * loads)
        answer = json.dumps({"success": ok, "message": "" if ok else "no"}).encode()
        self.send_response(200 if ok else 400)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.gate
def test_a_push_replaces_the_old_adapter_and_excludes_engines_that_refuse() -> None:
    """Also by an engine that took one in a push that failed afterwards (`holds` -1); one that has just started knows
    none and says so. One that should know one and does not is not what it seems."""
    Loads.loaded.clear()
    servers = [HTTPServer(("127.0.0.1", 0), Loads) for _ in range(4)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    urls = [f"http://127.0.0.1:{server.server_port}" for server in servers]
    for server, knows in zip(servers, (True, True, False, False), strict=True):
        Loads.known[server.server_port] = knows
    engines = [EngineAddress(url, 1, holds) for url, holds in zip(urls, (4, -1, -1, 4), strict=True)]
    hf = model("qwen3")
    push = AdapterPush(config("weights.method=adapter"), hf, rank=0)
    tensors = [
        ("base_model.model.a.lora_A.weight", torch.ones(2, 3)),
        ("base_model.model.a.lora_B.weight", torch.zeros(3, 2)),
    ]
    assert push.push(iter(tensors), WeightUpdate(5, engines, [])) == 4 * 12
    assert list(push.excluded) == [urls[3]]
    assert len(Loads.loaded) == 3
    payload = Loads.loaded[0]
    assert payload["lora_name"] == "policy" and payload["config_dict"]["r"] == 16
    ones_digest = hashlib.sha256(torch.ones(6).numpy().tobytes()).hexdigest()
    assert payload["expected_checksums"]["base_model.model.a.lora_A.weight"] == ones_digest
    for server in servers:
        server.shutdown()
        server.server_close()
