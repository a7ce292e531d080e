"""LaunchPlan, ports, run folder, preflight, set-up: what is decided before a process starts."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch import rundir
from launch.backends.local import LocalBackend
from launch.describe import describe_arithmetic, describe_idle, describe_plan, evaluations, mode
from launch.plan import LaunchPlan, Node, Ports, build_plan, build_sft_plan
from launch.ports import choose_ports, free_ports
from launch.rundir import open_run_dir
from rlsys.config import Config, load_config
from rlsys.config.sidecar_servers import teacher_config
from rlsys.core.errors import UserError
from rlsys.engine.launch_args import engine_command as served_by
from rlsys.planner.layout import NodeShare, lay_out
from rlsys.planner.model_preflight import check_model

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"


def config(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


def engine_command(c: Config, index: int, port: int) -> tuple[list[str], dict[str, str]]:
    return ["python", "-m", "engine", str(index), str(port)], {"SOME": "1 2"}


def planned(*overrides: str) -> LaunchPlan:
    c = config(*overrides)
    layout, n = lay_out(c), c.launch.nodes
    nodes = [Node(f"n{i}", f"10.0.0.{i}") for i in range(n)] if n > 1 else [Node("localhost")]
    ports = Ports([5000 + i for i in range(c.engine.count)], 6100, tuple(range(7000, 7008)), 6200, 6300)
    return build_plan(c, layout, nodes, ports, engine_command)


def chosen(*overrides: str) -> Ports:
    c = config(*overrides)
    return choose_ports(
        c, lay_out(c), lambda need: {i: free_ports(c.engine.host, n) for i, n in need.items()}
    )


def quiet(_: str) -> None: ...


def test_the_plan_names_every_process_in_order() -> None:
    plan = planned("engine.count=2", "parallel.ep=2")
    assert [r.name for r in plan.roles] == ["engine-0", "engine-1", "rollout", "trainer"]
    engine, rollout, trainer = plan.roles[1], plan.roles[2], plan.roles[3]
    assert engine.ready_url == "http://127.0.0.1:5001/health"
    assert rollout.argv[-4:] == ["--engine", "http://127.0.0.1:5000", "--engine", "http://127.0.0.1:5001"]
    assert trainer.argv[trainer.argv.index("--ranks") + 1 :][:3] == ["2", "--address", "127.0.0.1"]
    expected = {"HOME": "/h", "SOME": "1 2", "OMP_NUM_THREADS": "1"}
    assert plan.environment(engine, {"HOME": "/h"}).items() >= expected.items()
    assert "engine-1    SOME='1 2' python -m engine 1 5001" in describe_plan(plan)


GPUS_8 = (
    "weights.method=broadcast",
    "model.dtype=bfloat16",
    "launch.gpus_per_node=8",
    "rollout.groups_per_step=24",
)


def test_idle_gpus_are_reported() -> None:
    def idle(*overrides: str) -> list[str]:
        return describe_idle(config(*GPUS_8, *overrides), planned(*GPUS_8, *overrides))

    assert idle("parallel.dp=8", "engine.count=8") == []
    assert idle("parallel.dp=6", "engine.count=6") == ["IDLE: 2 (localhost 6,7) of 8 GPUs: no role has them"]
    assert idle("parallel.dp=6", "engine.count=4") == [
        "IDLE: 2 (localhost 6,7) of 8 GPUs: no role has them",
        "IDLE while samples are generated: 2 (localhost 4,5) of 8 GPUs: no engine has them",
    ]
    assert idle("parallel.dp=4", "engine.count=2", "engine.tp=4") == [
        "IDLE while the trainer works: 4 (localhost 4,5,6,7) of 8 GPUs: no trainer has them"
    ]
    apart = ("launch.placement=disaggregated", "rollout.max_staleness=2")
    assert idle(*apart, "parallel.dp=4", "engine.count=4") == []
    assert idle(*apart, "parallel.dp=4", "engine.count=3") == [
        "IDLE: 1 (localhost 7) of 8 GPUs: no role has them"
    ]
    assert describe_idle(config("parallel.dp=2"), planned("parallel.dp=2")) == [], "without GPUs"


def test_idle_gpus_of_many_nodes_are_counted() -> None:
    many = ("launch.backend=slurm", "launch.nodes=6", "parallel.dp=4")
    (idle_line, generated) = describe_idle(config(*GPUS_8, *many), planned(*GPUS_8, *many))
    assert idle_line.startswith("IDLE: 44 (n0 4,5,6,7; n1 0,1,2,3,4,5,6,7; n2 0")
    assert idle_line.endswith("; and of 2 more nodes) of 48 GPUs: no role has them")
    assert generated == "IDLE while samples are generated: 3 (n0 1,2,3) of 48 GPUs: no engine has them"


def test_the_reference_is_a_planned_role_or_an_external_server() -> None:
    plan = planned("engine.reference=own", "engine.count=2")
    assert [r.name for r in plan.roles] == ["engine-0", "engine-1", "reference", "rollout", "trainer"]
    reference, rollout = plan.roles[2], plan.roles[3]
    assert reference.argv[-4:-2] == ["2", "6200"]
    assert rollout.argv[-2:] == ["--reference", "http://127.0.0.1:6200"]
    plan = planned("engine.reference=http://judge:30000")
    assert [r.name for r in plan.roles] == ["engine-0", "rollout", "trainer"]
    assert plan.roles[1].argv[-2:] == ["--reference", "http://judge:30000"]
    with pytest.raises(UserError, match=r"engine.reference = own: the plan has no GPU"):
        planned("engine.reference=own", "launch.gpus_per_node=1")


def test_the_teacher_is_a_planned_role_or_an_external_server() -> None:
    """Of its own folder, and with nothing that only engines of the policy need."""
    taught = "algo.teacher={path: /models/teacher, engine: %s}"
    c = config(
        taught % "own", "engine.count=2", "engine.return_routes=true", "engine.extra_args=[--log-requests]"
    )
    argv, _ = served_by(teacher_config(c), 0, 1)
    assert argv[argv.index("--model-path") + 1] == "/models/teacher"
    assert not {"--enable-return-routed-experts", "--log-requests"} & set(argv)
    plan = planned(taught % "own", "engine.count=2")
    assert [r.name for r in plan.roles] == ["engine-0", "engine-1", "teacher", "rollout", "trainer"]
    teacher, rollout = plan.roles[2], plan.roles[3]
    assert teacher.argv[-1].endswith("teacher.yaml")
    assert rollout.argv[-2:] == ["--teacher", "http://127.0.0.1:6300"]
    assert [r.name for r in plan.router_engines()] == ["engine-0", "engine-1"]
    plan = planned(taught % "http://judge:30000")
    assert [r.name for r in plan.roles] == ["engine-0", "rollout", "trainer"]
    assert plan.roles[1].argv[-2:] == ["--teacher", "http://judge:30000"]
    with pytest.raises(
        UserError, match=r"algo.teacher.engine = own: the plan has no GPU .* the teacher's weights"
    ):
        planned(taught % "own", "launch.gpus_per_node=1")


def test_fine_tuning_needs_only_the_trainer() -> None:
    assert [
        r.name for r in build_sft_plan(config(), lay_out(config()), [Node("localhost")], Ports([])).roles
    ] == ["trainer"]


def test_the_arithmetic_is_spelled_out() -> None:
    arithmetic = describe_arithmetic(
        config("rollout.groups_per_step=16", "rollout.group_size=8", "trainer.steps=60", "eval.interval=10")
    )
    text = dict(arithmetic)
    assert text["one step trains"] == "16 groups x 8 samples = 128 samples"
    assert text["in flight"].startswith("256 samples (over_provision 2)")
    assert (
        text["whole run"]
        == "60 steps = 7680 samples, 7 evaluations of 128 prompts, or of all in a held-out file"
    )


@pytest.mark.parametrize(("steps", "every", "expected"), [(60, 10, 7), (61, 10, 8), (5, 10, 2), (0, 10, 1)])
def test_evaluations(steps: int, every: int, expected: int) -> None:
    assert evaluations(config(f"trainer.steps={steps}", f"eval.interval={every}")) == expected


def test_three_numbers_make_the_mode() -> None:
    assert mode(config("rollout.over_provision=1", "rollout.max_staleness=0")) == "synchronous, on-policy"
    assert mode(config()).startswith("APRIL")
    assert mode(config("launch.placement=disaggregated")).startswith("asynchronous")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf"engine\.port = {port}: port {port} of 127\.0\.0\.1 is in use"):
            LocalBackend(config(f"engine.port={port}"), 0)


def test_free_ports_differ() -> None:
    ports = chosen("engine.count=4")
    assert len({*ports.engines, ports.trainer_rendezvous}) == 5


def test_ports_of_one_run_differ_even_if_its_nodes_are_one_machine() -> None:
    layout = lay_out(c := config("engine.count=2", "launch.nodes=2", "launch.backend=slurm"))
    requests: list[dict[int, int]] = []

    def free(need: Mapping[int, int]) -> dict[int, list[int]]:
        """The first time every node has the same ones."""
        requests.append(dict(need))
        first = len(requests) == 1
        return {i: [*range(20000, 20000 + n)] if first else free_ports("", n) for i, n in need.items()}

    ports = choose_ports(c, layout, free)
    assert requests == [{0: 5, 1: 2}, {1: 2}], "all nodes at once; then only those that lack some"
    every = [*ports.engines, *ports.engine_rendezvous, ports.trainer_rendezvous]
    assert len(set(every)) == len(every) == 5


def test_ranks_and_engines_of_cpu_nodes() -> None:
    two = lay_out(config("launch.nodes=2", "launch.backend=slurm", "parallel.ep=2", "engine.count=3"))
    assert two.trainer == [NodeShare(0, 1), NodeShare(1, 1)]
    assert two.engines == [[NodeShare(0, 1)], [NodeShare(1, 1)], [NodeShare(0, 1)]]
    apart = lay_out(
        config("launch.nodes=3", "launch.backend=slurm", "parallel.ep=4", "launch.placement=disaggregated")
    )
    assert apart.trainer == [NodeShare(0, 2), NodeShare(1, 2)]
    assert apart.engines == [[NodeShare(2, 1)]]


def gpus(nodes: int, per_node: int, *overrides: str) -> Config:
    where = (f"launch.nodes={nodes}", f"launch.gpus_per_node={per_node}", "launch.backend=slurm")
    return config(*where, *overrides)


def test_colocated_trainer_and_engines_share_the_gpus() -> None:
    layout = lay_out(gpus(2, 4, "parallel.ep=8", "engine.count=2", "engine.tp=4"))
    every = [NodeShare(0, 4, (0, 1, 2, 3)), NodeShare(1, 4, (0, 1, 2, 3))]
    assert layout.trainer == every
    assert layout.engines == [[every[0]], [every[1]]]


def test_disaggregated_splits_may_be_uneven() -> None:
    layout = lay_out(
        gpus(2, 8, "parallel.ep=2", "parallel.dp=10", "engine.count=3", "engine.tp=2",
             "launch.placement=disaggregated", "rollout.groups_per_step=20", "rollout.group_size=2")
    )  # fmt: skip
    assert layout.trainer == [NodeShare(0, 8, tuple(range(8))), NodeShare(1, 2, (0, 1))]
    assert layout.engines == [[NodeShare(1, 2, (2, 3))], [NodeShare(1, 2, (4, 5))], [NodeShare(1, 2, (6, 7))]]


def test_an_engine_occupies_part_of_one_node_or_several_whole_nodes() -> None:
    apart = "launch.placement=disaggregated"
    assert lay_out(gpus(2, 4, apart, "engine.tp=4")).engines == [[NodeShare(1, 4, (0, 1, 2, 3))]]
    node_shares = [NodeShare(1, 4, (0, 1, 2, 3)), NodeShare(2, 4, (0, 1, 2, 3))]
    assert lay_out(gpus(3, 4, apart, "engine.tp=8")).engines == [node_shares]
    with pytest.raises(
        UserError, match=r"engine\.tp = 6: expected at most launch\.gpus_per_node = 4, or a multiple"
    ):
        lay_out(gpus(3, 4, apart, "engine.tp=6"))


def test_an_impossible_layout_is_reported_with_required_and_available_counts() -> None:
    with pytest.raises(
        UserError, match=r"gpus_per_node = 4 GPUs: expected at least 8, one for each trainer rank"
    ):
        lay_out(gpus(1, 4, "parallel.ep=8"))
    with pytest.raises(UserError, match=r"3 engines .* and 2 trainer ranks .* no GPUs are free for engine 2"):
        lay_out(gpus(1, 4, "parallel.ep=2", "engine.count=3", "launch.placement=disaggregated"))
    with pytest.raises(UserError, match=r"launch\.nodes = 2 needs launch\.backend = slurm or ray"):
        config("launch.nodes=2")


def test_nodes_of_a_trainer_meet_and_an_engine_spans_two() -> None:
    plan = planned(
        "launch.nodes=4", "launch.gpus_per_node=2", "launch.backend=slurm", "parallel.ep=4",
        "launch.placement=disaggregated", "engine.tp=4", "weights.method=disk",
    )  # fmt: skip
    names = ["engine-0.0", "engine-0.1", "rollout", "trainer-0", "trainer-1"]
    assert [(r.name, r.node) for r in plan.roles] == list(zip(names, (2, 3, 0, 0, 1), strict=True))
    head, tail = plan.unit("engine-0")
    assert (head.ready_url, tail.ready_url) == ("http://10.0.0.2:5000/health", None)
    assert tail.argv[-6:] == ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.2:7000"]
    first, second = plan.unit("trainer")
    assert first.argv[first.argv.index("--address") + 1] == "10.0.0.0"
    meet = ["--first", "2", "--world", "4", "--meet", "10.0.0.0:6100"]
    assert second.argv[second.argv.index("--address") + 1 :][:7] == ["10.0.0.1", *meet]
    assert second.gpus == (0, 1)
    assert "node 1 (n1):\ntrainer-1   [GPU 0,1] " in describe_plan(plan)


@pytest.mark.parametrize("method", ["auto", "broadcast", "disk"])
def test_an_engine_on_another_node_than_the_trainer_is_planned(method: str) -> None:
    apart = ("launch.nodes=2", "launch.backend=slurm", "launch.placement=disaggregated")
    assert planned(*apart, f"weights.method={method}").roles[0].node == 1


def test_ports_beyond_the_last_are_refused() -> None:
    with pytest.raises(UserError, match=r"port = 65534: 4 engines use ports up to 65537"):
        chosen("engine.port=65534", "engine.count=4")


def test_a_nonlocal_engine_host_is_refused() -> None:
    with pytest.raises(UserError, match=r"engine\.host = '192\.0\.2\.1': cannot listen on port"):
        chosen("engine.host=192.0.2.1")


def begin(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"kind": "run", "event": "start", "step": 0, "time": 1.0}\n')


def test_a_run_that_never_began_does_not_hold_its_folder(tmp_path: Path) -> None:
    where = f"run.dir={tmp_path / 'run'}"
    with open_run_dir(config(where, "data.source=misspelt"), quiet):
        pass
    with open_run_dir(config(where), quiet) as run:
        assert not run.resumed
        assert load_config(run.path / "config.yaml").data.source != "misspelt"


def test_a_run_folder_is_created_once_and_resumed_with_other_steps(tmp_path: Path) -> None:
    where = f"run.dir={tmp_path / 'run'}"
    with open_run_dir(config(where), quiet) as run:
        assert not run.resumed
        begin(run.path)
    with open_run_dir(config(where, "trainer.steps=99"), quiet) as run:
        assert run.resumed
        assert load_config(run.path / "config.yaml").trainer.steps == 99


def test_a_run_folder_of_another_config_names_the_differing_field(tmp_path: Path) -> None:
    where = f"run.dir={tmp_path / 'run'}"
    with open_run_dir(config(where), quiet) as run:
        begin(run.path)
    text_before = (tmp_path / "run/config.yaml").read_text()
    with (
        pytest.raises(UserError, match=r"another config \(rollout\.group_size = 8 in the run, 4 now\)"),
        open_run_dir(config(where, "rollout.group_size=4"), quiet),
    ):
        pass
    assert (tmp_path / "run/config.yaml").read_text() == text_before


def test_an_evaluation_before_the_first_start_is_no_run(tmp_path: Path) -> None:
    where = tmp_path / "run"
    (where / "evaluations" / "model-0").mkdir(parents=True)
    with open_run_dir(config(f"run.dir={where}"), quiet) as run:
        assert not run.resumed


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with (
        pytest.raises(UserError, match=r"contains thesis\.tex but no config\.yaml"),
        open_run_dir(config(f"run.dir={tmp_path}"), quiet),
    ):
        pass


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    c = config(f"run.dir={tmp_path / 'run'}")
    with (
        open_run_dir(c, quiet),
        pytest.raises(UserError, match=f"in use by process {os.getpid()}"),
        open_run_dir(c, quiet),
    ):
        pass


def test_processes_of_a_dead_owner_are_waited_for_then_named(tmp_path: Path) -> None:
    c = config(f"run.dir={tmp_path}", "launch.grace_seconds=0.1")
    messages: list[str] = []
    fd = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"999999999\n")  # no process has that id
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="in use by process 999999999"), open_run_dir(c, messages.append):
        pass
    os.close(fd)
    assert messages == ["waiting for the processes of an earlier, killed run to end"]
    with open_run_dir(c, messages.append) as run:
        assert not run.resumed


def test_a_lock_of_another_machine_is_waited_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = config(f"run.dir={tmp_path}", "launch.grace_seconds=600")
    monkeypatch.setattr(rundir, "DEAD_HOST_SECONDS", 0.0)
    fd = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    os.write(fd, f"{os.getpid()} node7\n".encode())  # a process here has that id, which means nothing
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} of node7"), open_run_dir(c, quiet):
        pass
    os.close(fd)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The quickstart's, whose tensors nobody looks at here."""
    shutil.copytree(QUICKSTART.parent / "models/quickstart-moe", tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_model_folder_that_fits(model: Path) -> None:
    check_model(config(f"model.path={model}", "parallel.ep=2"))
    check_model(config(f"model.path={model}", "parallel.pp=2"))  # two layers, then one


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.path=/no/such"], r"model\.path = /no/such: no such folder"),
        (["model.path=/dev/null"], "not a folder"),
        (["model.path=/"], r"contains no config\.json; expected a Hugging Face model folder"),
        (["parallel.ep=16"], r"parallel\.ep = 16 does not divide experts = 8 of"),
        (["parallel.pp=4"], r"parallel\.pp = 4: expected at most the 3 layers of"),
        (
            ["parallel.pp=3", "parallel.vpp=2"],
            r"parallel\.pp \* vpp = 6 does not divide layers = 3 of",
        ),
        (["parallel.tp=4"], r"parallel\.tp = 4 does not divide key-value heads = 2 of"),
        (["engine.tp=3"], r"engine\.tp = 3 does not divide attention heads = 4 of"),
        (
            ["trainer.balance_rate=0.1"],
            r"balance_rate = 0\.1: expected 0, because the routers of .* have no bias",
        ),
        (
            ["rollout.max_response_tokens=2048"],
            r"max_response_tokens = 2048: expected less than the context of 1024 tokens",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_reported_before_the_launch(
    model: Path, overrides: list[str], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        check_model(config(f"model.path={model}", *overrides))


def told_by(model: Path) -> str:
    with pytest.raises(UserError) as e:
        check_model(config(f"model.path={model}"))
    return str(e.value)


def test_an_incomplete_model_folder_is_reported(model: Path) -> None:
    (model / "tokenizer.json").rename(model / "elsewhere.json")
    assert "contains no vocabulary; expected tokenizer.json" in told_by(model)
    (model / "elsewhere.json").rename(model / "tokenizer.json")
    weights = model / "model.safetensors"
    weight_bytes = weights.read_bytes()
    for damaged, message in (
        (
            weight_bytes[:-100],
            f"it has {len(weight_bytes) - 100} bytes; expected {len(weight_bytes)}",
        ),
        (weight_bytes + b"0", "not a whole safetensors file: it has"),
        (weight_bytes[:50], "it ends within its header"),
        (weight_bytes[:5], "it ends within its header"),
        (b"", "it ends within its header"),
        (weight_bytes[:8] + b"?" + weight_bytes[9:], "its header is damaged"),
    ):
        weights.write_bytes(damaged)
        assert message in told_by(model)
    weights.write_bytes(weight_bytes)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (
        "1 of the files in model.safetensors.index.json are missing, first: model-2.safetensors"
        in told_by(model)
    )


def test_an_unsupported_model_is_reported(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    for changed, message in (
        (
            {**raw, "architectures": ["GPT2LMHeadModel"]},
            "architecture 'GPT2LMHeadModel' is unknown",
        ),
        ({**raw, "hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"architectures": raw["architectures"]}, "is missing"),
    ):
        (model / "config.json").write_text(json.dumps(changed))
        assert message in told_by(model)
    (model / "config.json").write_text("{")
    assert "config.json: not readable as JSON" in told_by(model)
    (model / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 4}))
    assert "tensor(s) are missing, first: model.layers.3.input_layernorm.weight" in told_by(model)
    (model / "config.json").write_text(json.dumps({**raw, "vocab_size": 192}))
    assert "model.embed_tokens.weight has shape (128, 128); expected (192, 128)" in told_by(model)


def test_ranks_of_one_machine_meet_in_a_file_and_the_rollout_process_has_no_port() -> None:
    """torchrun's rendezvous listens on all addresses, and unpickles what it is sent (security A1). A port can be
    bound by another user before the rollout process does, who would get the run's key (A3)."""
    for ranks in ("parallel.ep=1", "parallel.ep=2"):
        words = [word for role in planned(ranks).roles for word in role.argv]
        assert "torch.distributed.run" not in words
        rollout = next(role for role in planned(ranks).roles if role.kind == "rollout")
        assert "--port" not in rollout.argv and "http" not in str(rollout.ready_url)
