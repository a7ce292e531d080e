"""`rlsys import` lists what a script leaves open and exits with 3; it fills nothing in and ends for every input."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsys.cli import main
from rlsys.config import load_config

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "Qwen3-30B-A3B"
INCOMPLETE = 3
SLIME = (
    f"python3 train.py --hf-checkpoint {MODEL} --prompt-data train.jsonl --apply-chat-template --rollout-shuffle "
    "--rm-type math --num-rollout 4 --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 512 "
    "--advantage-estimator grpo --actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate "
    "--rollout-num-gpus-per-engine 1"
)
"""A whole command; `--lr` and what a case adds follow."""
VERL = (
    f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path={MODEL} data.train_files=train.jsonl "
    "data.val_files=test.jsonl data.train_batch_size=8 actor_rollout_ref.rollout.n=4 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=8 algorithm.adv_estimator=grpo trainer.n_gpus_per_node=2 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.total_training_steps=4"
)


@dataclass(frozen=True)
class Import:
    code: int
    said: str
    config: dict[str, Any]
    text: str


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """An import that does not end fails its test."""

    def stop(signum: int, frame: object) -> None:
        raise AssertionError("the import did not end within 60 s")

    previous_handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous_handler)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the scripts' data is."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(400)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(
    framework: str,
    script: str,
    capsys: pytest.CaptureFixture[str],
    name: str = "command.txt",
    out: str = "out.yaml",
) -> Import:
    Path(name).write_text(script)
    try:
        code = main.main(["import", framework, name, "--out", out])
    except (RecursionError, ValueError, ArithmeticError, TypeError, AttributeError) as e:
        raise AssertionError(f"a traceback instead of one line: {type(e).__name__}: {str(e)[:200]}") from None
    captured = capsys.readouterr()
    text = Path(out).read_text() if Path(out).exists() else ""
    return Import(code, captured.out + captured.err, yaml.safe_load(text) if text else {}, text)


def field(config: dict[str, Any], place: str) -> Any:
    for part in place.split("."):
        config = config.get(part, {}) if isinstance(config, dict) else {}
    return None if config == {} else config


def incomplete(made: Import, theirs: str, *places: str) -> None:
    """`theirs` is listed on the terminal and in the file, and the fields that it decides are not in the config."""
    assert made.code == INCOMPLETE, made.said
    assert theirs in made.said
    listed = [line for line in made.text.splitlines() if line.startswith("# MISSING:")]
    assert any(theirs in line for line in listed), made.text
    for field_name in places:
        assert field(made.config, field_name) is None, field_name


@pytest.mark.parametrize("framework", ["slime", "verl"])
def test_a_whole_script_is_translated(
    framework: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lr = {"slime": "--lr 1e-6", "verl": "actor_rollout_ref.actor.optim.lr=1e-6"}[framework]
    result = run(framework, f'{SLIME if framework == "slime" else VERL} {lr} "$@"', capsys, "run.sh")
    assert result.code == 0, result.said
    assert field(result.config, "trainer.lr") == 1e-6
    load_config(Path("out.yaml"), [])


HOLES = {
    "unset": ("", "$LR"),
    "argument": ("", "$1"),
    "nothing": ("", ""),
    "command": ("", "$(python lr.py)"),
    "backticks": ("LR=`python lr.py`\n", "$LR"),
    "in a function": ("f() { LR=$NONE; }\nf\n", "$LR"),
    "quoted": ("", '"${LR}"'),
    "empty": ("", '""'),
    "removed": ("LR=1e-6\nunset LR\n", "$LR"),
    "subshell": ("(LR=5e-5)\n", "$LR"),
    "filtered": ("LR=$(python lr.py | head -1 | cut -c1)\n", "$LR"),
    "arithmetic": ("LR=$((NONE * 2))\n", "$LR"),
}


@pytest.mark.parametrize("case", HOLES)
def test_world_01_a_hole_in_a_learning_rate_of_slime(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, value = HOLES[case]
    result = run("slime", f"{prefix}{SLIME} --lr {value} --weight-decay 0.1\n", capsys, "run.sh")
    incomplete(result, "--lr", "trainer.lr")


@pytest.mark.parametrize("case", ["unset", "command", "empty"])
def test_world_01_a_hole_in_a_batch_size_of_verl(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, value = HOLES[case]
    result = run("verl", f"{prefix}{VERL} data.train_batch_size={value}\n", capsys, "run.sh")
    incomplete(result, "data.train_batch_size", "rollout.groups_per_step", "algo.minibatches")


VALUES = {
    "branch": ("MODE=small\nif [ $MODE = small ]; then LR=1e-6; else LR=5e-5; fi\n", "$LR"),
    "choice": ("case $MODE in small) LR=1e-6;; *) LR=5e-6;; esac\n", "$LR"),
    "lower case": ("LR=1E-6\n", "${LR,,}"),
    "function": ("LR=5e-6\nset_lr() { LR=1e-6; }\nset_lr\n", "$LR"),
    "indirect": ("NAME=LR\nLR=1e-6\n", "${!NAME}"),
    "element": ("LR=(5e-6 1e-6)\n", "${LR[1]}"),
    "here string": ("read -r A LR <<<'x 1e-6'\n", "$LR"),
    "printed": ("", "$(echo 1e-6)"),
}


def test_values_computed_by_bash_are_evaluated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assignments = "".join(
        f"{text}L{i}={value}\nunset LR\n" for i, (text, value) in enumerate(VALUES.values())
    )
    variables = " ".join(f"$L{i}" for i in range(len(VALUES)))
    script = f"{assignments}for L in {variables}; do [ $L = 1e-6 ] || exit 9; done\n{SLIME} --lr $L"
    result = run("slime", script, capsys, "run.sh")
    assert (result.code, field(result.config, "trainer.lr")) == (0, 1e-6), result.said


def test_world_01_an_unknown_value_leaves_dependent_fields_incomplete(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = "--actor-num-gpus-per-node $N --rollout-num-gpus $N"
    result = run("slime", f"{SLIME} --lr 1e-6 {gpus}", capsys)
    incomplete(result, "--actor-num-gpus-per-node", "launch.gpus_per_node", "engine.count", "parallel.dp")
    result = run("slime", f"{SLIME} --lr 1e-6 --save $OUT/run1", capsys, out="saved.yaml")
    incomplete(result, "--save", "run.dir")


@pytest.mark.parametrize("more", ["", "--colocate", "--lr 1e-6"])
def test_world_01_an_unknown_argument_makes_the_import_incomplete(
    more: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be an option that changes anything."""
    result = run("slime", f"{SLIME} --lr 1e-6 {more} $EXTRA_ARGS", capsys)
    incomplete(result, "$EXTRA_ARGS")
    assert field(result.config, "trainer.lr") == 1e-6
    incomplete(run("verl", f"{VERL} $EXTRA_ARGS", capsys, out="verl.yaml"), "$EXTRA_ARGS")


@pytest.mark.parametrize("join", ["\n", " && "])
def test_world_01_a_second_command(join: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = f"{SLIME} --lr 5e-5 --num-rollout 900"
    result = run("slime", f"{SLIME} --lr 1e-6{join}{second}", capsys, "run.sh")
    incomplete(result, "command")
    assert (field(result.config, "trainer.lr"), field(result.config, "trainer.steps")) == (1e-6, 4)


def test_world_20_options_passed_to_a_shell_function_are_imported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f'run() {{ "$@" --lr 1e-6; }}\nrun {SLIME}\n'
    assert run("slime", script, capsys, "run.sh").code == 0


def test_world_01_a_missing_sourced_file_makes_the_import_incomplete(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"source settings.sh\n{SLIME} --lr $LR"
    incomplete(run("slime", script, capsys, "run.sh"), "--lr", "trainer.lr")
    Path("settings.sh").write_text("LR=3e-6\n")
    result = run("slime", script, capsys, "run.sh", out="here.yaml")
    assert (result.code, field(result.config, "trainer.lr")) == (0, 3e-6), result.said


@pytest.mark.parametrize(
    ("command", "listed"),
    [
        (f"{SLIME} --lr 1e-6 --eval-prompt-data aime a.jsonl math --eval-interval 2", "--eval-prompt-data"),
        (f"{SLIME} --lr 1e-6 --prompt-data 'train.jsonl@[0:100]'", "--prompt-data"),
        (f"{SLIME} --lr 1e-6 --colocate yes", "yes"),
    ],
)
def test_world_01_unsupported_options_make_the_import_incomplete(
    command: str, listed: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    incomplete(run("slime", command, capsys), listed)


@pytest.mark.parametrize("value", ["", "null"])
def test_world_01_an_undefined_batch_size_makes_the_import_incomplete(
    value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("verl", f"{VERL} data.train_batch_size={value}", capsys)
    incomplete(result, "data.train_batch_size", "rollout.groups_per_step")


# Sections and options that are not known


@pytest.mark.parametrize(
    "setting",
    [
        "distillation.loss.topk=32",
        "async_training.staleness_threshold=0.5",
        "rollout.total_rollout_steps=100",
        "val_custom_reward_function.path=v.py",
        "reward.reward_model.enable=True",
        "made_up.section.of.verl=3",
        "+made.up=1",
        "++made.up=1",
        "~algorithm.kl_ctrl",
        "~algorithm.kl_ctrl.kl_coef=0.1",
        "--config-name=my_own_config",
        "--config-path=/etc/verl",
        "data.image_key=images",
        "data.train_max_samples=100",
        "trainer.critic_warmup=10",
        "actor_rollout_ref.actor.made_up=3",
        "algorithm.adv_estimator=made_up",
        "actor_rollout_ref.actor.loss_agg_mode=made-up",
        "reward_model.reward_manager=batch",
    ],
)
def test_world_02_each_untranslated_verl_setting_is_listed(
    setting: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("verl", f"{VERL} {setting}", capsys)
    incomplete(result, setting.lstrip("+").partition("=")[0])


def test_world_02_the_present_names_of_rewards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    )
    result = run(
        "verl",
        f"{VERL} reward.custom_reward_function.path=my.py reward.custom_reward_function.name=f "
        "reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True "
        "+reward.reward_kwargs.overlong_buffer_cfg.len=64 +reward.reward_kwargs.max_resp_len=512",
        capsys,
    )
    assert result.code == 0, result.said
    assert field(result.config, "data.reward") == "my.py:f"
    assert field(result.config, "algo.shaping") == [
        {"name": "overlong", "cap": 512, "buffer": 64, "factor": 1.0}
    ]


def test_world_02_a_batch_size_of_zero(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run("verl", f"{VERL} data.train_batch_size=0", capsys)
    incomplete(result, "data.train_batch_size", "rollout.groups_per_step")


@pytest.mark.parametrize(
    "option",
    [
        "--made-up-option 3",
        "--custom-loss-function-path a.b",
        "--rollout-function-path my.rollout.generate",
        "--multimodal-keys {}",
        "--mask-offpolicy-in-partial-rollout",
        "--freeze-params-name-list embed",
        "--use-opsm",
        "--advantage-estimator made_up",
        "--rm-type made_up",
        "--lr-decay-style WSD",
        "--attention-dropout 0.1",
        "--ref-update-interval 4",
        "--qk-clip",
    ],
)
def test_field_07_an_option_that_changes_the_method(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    incomplete(run("slime", f"{SLIME} --lr 1e-6 {option}", capsys), option.split()[0])


SPEED = {
    "slime": (
        "--moe-enable-deepep",
        "--moe-token-dispatcher-type flex",
        "--moe-permute-fusion",
        "--overlap-grad-reduce",
        "--use-precision-aware-optimizer",
    ),
    "verl": (
        "actor_rollout_ref.model.use_fused_kernels=True",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep=True",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True",
        "actor_rollout_ref.model.use_liger=True",
    ),
}


@pytest.mark.parametrize(("framework", "setting"), [(f, s) for f, several in SPEED.items() for s in several])
def test_field_07_an_option_that_affects_only_speed_gets_a_warning(
    framework: str, setting: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = {"slime": f"{SLIME} --lr 1e-6", "verl": VERL}[framework]
    result = run(framework, f"{command} {setting}", capsys)
    assert result.code == 0, result.said
    warnings = [line for line in result.said.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1 and setting.split()[0].lstrip("+").partition("=")[0] in warnings[0], result.said
    assert "always" not in warnings[0]


def test_field_07_options_of_sglang_are_passed_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--sglang-mem-fraction-static 0.7 --sglang-disable-radix-cache --sglang-dp-size 2 --sglang-ep-size 2 "
        "--sglang-cuda-graph-bs 1 2 4 8 16 24 --sglang-speculative-algorithm EAGLE"
    )
    result = run("slime", f"{SLIME} --lr 1e-6 {options}", capsys)
    assert result.code == 0, result.said
    assert field(result.config, "engine.extra_args") == [
        "--disable-radix-cache", "--dp-size", "2", "--ep-size", "2",
        "--cuda-graph-bs", "1", "2", "4", "8", "16", "24", "--speculative-algorithm", "EAGLE",
    ]  # fmt: skip
    assert field(result.config, "engine.memory_fraction") == 0.7


def test_field_03_the_pool_is_sized_only_by_the_script(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for framework, command in (("slime", f"{SLIME} --lr 1e-6"), ("verl", VERL)):
        result = run(framework, command, capsys, out=f"{framework}.yaml")
        assert result.code == 0 and field(result.config, "engine.max_total_tokens") is None, result.said
    result = run("slime", f"{SLIME} --lr 1e-6 --sglang-max-total-tokens 300000", capsys)
    assert field(result.config, "engine.max_total_tokens") == 300000


@pytest.mark.parametrize(
    "option",
    ["--loss-type sft_loss", "--rollout-function-path slime.rollout.sft_rollout.generate_rollout"],
)
def test_field_06_fine_tuning_becomes_a_config_of_rlsys_sft(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --calculate-per-token-loss --num-epoch 3"
    batch = "--rollout-batch-size 16 --global-batch-size 16 --input-key messages"
    command = SLIME.replace("--num-rollout 4", "")
    result = run("slime", f"{command} {options} {batch} {option}", capsys)
    assert result.code == 0 and "rlsys sft out.yaml" in result.said, result.said
    sft = {"traces": "chats", "params": {"path": "train.jsonl", "batch": 16}, "schedule": "cosine"}
    assert field(result.config, "sft") == {**sft, "lr_end": pytest.approx(0.1)}
    assert load_config(Path("out.yaml"), []).trainer.steps == 3 * 400 // 16
    assert {"algo", "rollout", "engine"}.isdisjoint(result.config)


def test_field_06_verls_sft_trainer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=train.jsonl optim.lr=1e-5 "
        "model.path=m data.messages_key=messages trainer.total_epochs=2 data.train_batch_size=40"
    )
    result = run("verl", command, capsys)
    assert result.code == 0, result.said
    assert field(result.config, "sft.params") == {"path": "train.jsonl", "batch": 40}
    assert field(result.config, "sft.schedule") == "constant"
    first = command.replace("sft_trainer", "fsdp_sft_trainer").replace("optim.lr=1e-5", "")
    result = run("verl", first, capsys, out="first.yaml")
    assert (field(result.config, "sft.schedule"), field(result.config, "trainer.lr")) == ("cosine", 1e-5)
    incomplete(run("verl", f"{command} optim.made_up=3", capsys, out="other.yaml"), "optim.made_up")


def test_field_06_distillation_has_a_teacher(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "python3 -m sglang.launch_server --model-path /m/teacher --port 13141 &\n"
        f"{SLIME} --lr 1e-6 --use-opd --opd-type sglang --opd-kl-coef 0.5 --rm-url http://127.0.0.1:13141/generate "
        "--custom-rm-path slime.rollout.on_policy_distillation.reward_func "
        "--custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards"
    )
    result = run("slime", script, capsys, "run.sh")
    assert result.code == 0, result.said
    assert field(result.config, "algo.teacher") == {"path": "/m/teacher", "engine": "http://127.0.0.1:13141"}
    assert field(result.config, "algo.loss") == [{"name": "distill", "weight": 0.5}]
    section = "distillation.teacher_models.teacher_model"
    options = f"distillation.enabled=True {section}.model_path=/m/teacher distillation.nnodes=1"
    loss = "distillation.distillation_loss"
    result = run(
        "verl", f"{VERL} {options} {loss}.loss_mode=forward_kl_topk {loss}.topk=16", capsys, out="verl.yaml"
    )
    assert result.code == 0, result.said
    teacher = {"path": "/m/teacher", "engine": "own", "direction": 0.0, "top_k": 16, "tail_bucket": False}
    assert field(result.config, "algo.teacher") == teacher
    assert [term["name"] for term in field(result.config, "algo.loss")] == ["dual_clip", "distill"]
    incomplete(
        run("verl", f"{VERL} {options} {loss}.loss_max_clamp=10", capsys, out="c.yaml"),
        f"{loss}.loss_max_clamp",
    )


def test_field_06_options_with_a_counterpart_are_translated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--lr 1e-6 --min-lr 1e-7 --lr-warmup-fraction 0.5 --lr-decay-style cosine"
    result = run("slime", f"{SLIME} {options}", capsys)
    assert result.code == 0, result.said
    trainer = field(result.config, "trainer")
    assert (trainer["lr_end"], trainer["schedule"]) == (pytest.approx(0.1), "cosine")
    assert load_config(Path("out.yaml"), []).trainer.warmup_steps == 2


def test_verls_corrections(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = "algorithm.rollout_correction"
    settings = ("is=sequence", "is_threshold=2.0", "rs=token_k1,seq_max_k2", "rs_threshold=0.5_2.0,2.5")
    options = " ".join(f"{section}.rollout_{setting}" for setting in settings)
    result = run("verl", f"{VERL} {options}", capsys)
    assert result.code == 0, result.said
    assert field(result.config, "algo.corrections") == [
        {"name": "tis", "cap": 2.0, "level": "sequence"},
        {"name": "rejection", "kind": "k1", "level": "token", "low": math.log(0.5), "high": math.log(2.0)},
        {"name": "rejection", "kind": "k2", "level": "sequence_max", "high": 2.5},
    ]
    result = run("verl", f"{VERL} {section}.bypass_mode=True", capsys, out="mu.yaml")
    assert (result.code, field(result.config, "algo.anchor")) == (0, "mu"), result.said


def test_verls_asynchronous_trainers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engines = "rollout.nnodes=1 rollout.n_gpus_per_node=4 actor_rollout_ref.hybrid_engine=False"
    one_step = VERL.replace("verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo")
    result = run("verl", f"{one_step} {engines}", capsys)
    assert result.code == 0, result.said
    assert (field(result.config, "rollout.max_staleness"), field(result.config, "engine.count")) == (1, 4)
    assert field(result.config, "algo.anchor") == "mu"  # its config has bypass_mode
    full = VERL.replace("verl.trainer.main_ppo", "verl.experimental.fully_async_policy.fully_async_main")
    sizes = "async_training.require_batches=2 async_training.trigger_parameter_sync_step=3"
    sizes += " rollout.total_rollout_steps=480"
    result = run("verl", f"{full} {engines} {sizes} data.gen_batch_size=1", capsys, out="full.yaml")
    assert result.code == 0, result.said
    assert (field(result.config, "rollout.groups_per_step"), field(result.config, "trainer.steps")) == (
        48,
        10,
    )
    assert field(result.config, "algo.minibatches") == 6
    warm = f"{sizes} actor_rollout_ref.actor.optim.lr_warmup_steps=10"  # updates of a mini-batch
    result = run("verl", f"{full} {engines} {warm}", capsys, out="warm.yaml")
    assert (result.code, field(result.config, "trainer.warmup_steps")) == (0, 4), result.said


def test_field_05_rows_with_images(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verl's default image_key reads the column `images`, so no option of the script names it."""
    rows = [{"prompt": f"<image>{i}+1=", "images": ["a.png"], "answer": str(i + 1)} for i in range(40)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    incomplete(run("verl", VERL, capsys), "images")


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen3-VL-30B-A3B-Instruct", "/models/Qwen2.5-VL-7B", "/m/Some-Omni-3B"]
)
def test_field_05_a_vision_model(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    incomplete(run("verl", VERL.replace(str(MODEL), model), capsys), model)


# What people write


def test_world_21_a_path_is_printed_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = "/a/very/long/folder/name/" * 6 + "dapo-math-17k.jsonl"
    result = run("slime", f"{SLIME} --lr 1e-6 --eval-prompt-data aime {path}", capsys)
    assert path in result.said


# Bounds


def test_security_a13_a_yaml_file_is_not_cut_off(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"hf_checkpoint: {MODEL}\nprompt_data: train.jsonl\n" + "# padding\n" * 500_000 + "lr: 1.0e-6\n"
    result = run("slime", text, capsys, name="run.yaml")
    assert result.code == 2 and result.said.count("\n") == 1 and result.text == "", result.said


@pytest.mark.parametrize("text", ["A='", "A=(", "$(", "A=$((9**9**9", "fi"])
def test_a_script_that_bash_refuses_is_one_line(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("slime", f"{text}\n{SLIME} --lr 1e-6", capsys, "run.sh")
    assert result.code == 2 and result.said.count("\n") == 1, result.said
    assert result.said.startswith("rlsys: error: run.sh: no training command"), result.said


@pytest.mark.parametrize(
    "value", ["1e999", "-1e999", ".nan", "9" * 5000, "1" * 400, "[" * 3000, "fast", "[1,2]"]
)
def test_security_a13_a_number_that_is_none(
    value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("verl", f"{VERL} data.train_batch_size={value}", capsys)
    assert result.code == 2 and result.said.count("\n") == 1, result.said
    assert "data.train_batch_size" in result.said and len(result.said) < 500


_NAMES = "bcdefghij"
YAML = {
    "lists": "[" * 3000,
    "mappings": "a: " + "{a: " * 3000,
    "aliases": "a: &a {x: 1}\n"
    + "".join(
        f"{name}: &{name} {{{', '.join(f'k{j}: *{before}' for j in range(9))}}}\n"
        for before, name in zip("a" + _NAMES, _NAMES, strict=False)
    ),
    "date": "a: 2026-99-99",
    "digits": "a: " + "9" * 5000,
    "list": "- 1",
}


@pytest.mark.parametrize("framework", ["slime", "verl"])
@pytest.mark.parametrize("case", YAML)
def test_security_a13_untrusted_yaml_is_rejected_in_one_line(
    framework: str, case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(framework, YAML[case], capsys, name="run.yaml")
    assert result.code == 2 and result.said.count("\n") == 1, result.said


@pytest.mark.parametrize("name", ["pipe.sh", "pipe.yaml", "zero.txt", "folder.sh"])
def test_a_file_that_is_not_regular_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for pipe in ("pipe.sh", "pipe.yaml"):
        os.mkfifo(tmp_path / pipe)
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "folder.sh").mkdir()
    assert main.main(["import", "slime", str(tmp_path / name), "--out", str(tmp_path / "y.yaml")]) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert f"{name}: {'Is a directory' if name == 'folder.sh' else 'not a regular file'}" in stderr


MIS = """use_tis: true
use_rs: true
tis_level: "token"
rs_level: "token"
tis_mode: "truncate"
tis_lower_bound: 0.5
tis_upper_bound: 2.0
rs_lower_bound: null
rs_upper_bound: null
rs_veto_threshold: 1.0e-4
tis_batch_normalize: true
"""
CORRECTED = "--use-tis --custom-tis-function-path examples.mis.compute_mis_weights_with_cp"


def test_slimes_corrections_of_a_yaml_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script calls its repository by another path; the options of the file are options of the command."""
    (folder / "examples").mkdir()
    (folder / "examples" / "mis.yaml").write_text(MIS)
    script = f"{SLIME} --lr 1e-6 {CORRECTED} --custom-config-path"
    result = run("slime", f"{script} /root/slime/examples/mis.yaml", capsys, "run.sh")
    assert result.code == 0, result.said
    assert field(result.config, "algo.corrections") == [
        {"name": "tis", "cap": 2.0, "normalise": True},
        {"name": "icepop", "weighted": False, "low": 0.5, "high": 2.0, "level": "token", "veto": 1e-4},
    ]
    (folder / "examples" / "mis.yaml").write_text(MIS.replace("truncate", "mask"))
    result = run("slime", f"{script} examples/mis.yaml", capsys, "run.sh", "mask.yaml")
    incomplete(result, "--tis-batch-normalize", "algo.corrections")
    result = run("slime", f"{script} /etc/hostname", capsys, "run.sh", "host.yaml")
    incomplete(result, "--custom-config-path")


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ("--custom-rm-path my.reward --reward-key score --eval-reward-key acc", ""),
        ("--reward-key format", "--reward-key"),
        ("--eval-input-key prompt --input-key prompt", ""),
        ("--custom-rm-path examples.on_policy_distillation.phase1.rm.reward_func", ""),
        ("--rollout-max-context-len 4096", "--rollout-max-context-len"),
    ],
)
def test_slimes_keys_and_functions(
    more: str, missing: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("slime", f"{SLIME} --lr 1e-6 {more}", capsys)
    if missing:
        incomplete(result, missing)
    else:
        assert result.code == 0, result.said


def test_slimes_variables_of_the_environment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variables = '{"env_vars": {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}}'
    script = f"ray job submit --runtime-env-json='{variables}' -- {SLIME} --lr 1e-6"
    incomplete(run("slime", script, capsys, "run.sh"), "OPEN_TRAINING_INT4_FAKE_QAT_FLAG")


def test_held_out_rows_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warning = "check: data.params: the run holds out one row in eight"
    assert warning in run("slime", f"{SLIME} --lr 1e-6", capsys).said
    evaluation_option = "--eval-prompt-data test test.jsonl"
    assert warning not in run("slime", f"{SLIME} --lr 1e-6 {evaluation_option}", capsys, out="held.yaml").said


def test_slimes_evaluation_rows_have_keys_of_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = "--input-key prompt --label-key answer --eval-input-key question"
    sets = "--eval-interval 5 --eval-prompt-data sums test.parquet"
    result = run("slime", f"{SLIME} --lr 1e-6 {keys} {sets}", capsys)
    assert result.code == 0, result.said
    assert field(result.config, "data.keys") == {"prompt": "prompt", "answer": "answer"}
    assert field(result.config, "data.params.heldout_keys") == {"prompt": "question", "answer": "answer"}
    result = run(
        "slime", f"{SLIME} --lr 1e-6 {keys.replace('question', 'prompt')} {sets}", capsys, out="same.yaml"
    )
    assert result.code == 0 and field(result.config, "data.params.heldout_keys") is None


def test_slimes_stop_ids_that_the_model_does_not_have(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("slime", f"{SLIME} --lr 1e-6 --rollout-stop-token-ids 7 9", capsys)
    assert result.code == 0, result.said
    assert field(result.config, "rollout.stop_ids") == [7, 9]


def test_slimes_longest_conversation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate = "--custom-generate-function-path examples.agent.generate --rollout-max-context-len 4096"
    result = run("slime", f"{SLIME} --lr 1e-6 {generate}", capsys)
    assert result.code == 0, result.said
    limits = {"rollout_max_context_len": 4096, "eval_max_context_len": 4096}
    assert field(result.config, "rollout.generator_params") == limits
    assert field(result.config, "data.params.max_prompt_tokens") == 4095


# Defaults of the other framework that decide the method

ACTOR = "actor_rollout_ref.actor"
RATIO = "algorithm.rollout_correction.rollout"
MEGATRON = f"{ACTOR}.megatron.override_transformer_config"
DISTILLATION = (
    "distillation.enabled=True distillation.teacher_models.t.model_path=/m/t distillation.distillation_loss"
)
TOPK = {"direction": 0.0, "tail_bucket": False}
GAE = {"name": "gae", "gamma": 1.0, "lam": 1.0}
CLIPPED = {"name": "dual_clip", "dual": 3.0, "clip_low": 0.2, "clip_high": 0.2}
SAMPLED = {"name": "distill_pg", "clip_low": 0.2, "clip_high": 0.2, "dual": 3.0}
VERL_FIELDS: list[tuple[str, str, Any]] = [
    ("", "algo.loss", [{"name": "dual_clip", "dual": 3.0, "clip_low": 0.2, "clip_high": 0.2}]),
    (
        f"{ACTOR}.clip_ratio=0.3 {ACTOR}.clip_ratio_high=0.28",
        "algo.loss",
        [{"name": "dual_clip", "dual": 3.0, "clip_low": 0.2, "clip_high": 0.28}],
    ),
    (
        f"algorithm.adv_estimator=gae {ACTOR}.policy_loss.loss_mode=gspo",
        "algo.loss",
        [
            {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
            {"name": "value", "coefficient": 1.0, "clip": 0.5},
        ],
    ),
    (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", "algo.reducer", {"name": "constant", "length": 1}),
    (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "algo.reducer", {"name": "constant", "length": 512}),
    (
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}.loss_scale_factor=100",
        "algo.reducer",
        {"name": "constant", "length": 100},
    ),
    (f"{ACTOR}.policy_loss.loss_mode=sapo", "algo.reducer", "sequence_mean"),
    ("algorithm.adv_estimator=gpg", "algo.advantage", {"name": "gpg", "counts": "rewarded"}),
    ("", "trainer.schedule", "constant"),
    ("model_engine=veomni", "trainer.schedule", "cosine"),
    ("model_engine=veomni", "trainer.lr_end", None),
    (f"{ACTOR}.strategy=torchtitan", "trainer.schedule", "linear"),
    (f"{ACTOR}.strategy=torchtitan {ACTOR}.optim.min_lr_factor=1.0", "trainer.lr_end", 1.0),
    (f"{ACTOR}.strategy=automodel", "trainer.lr_end", 0.01),
    (
        f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k3+",
        "algo.loss",
        [
            {"name": "dual_clip", "dual": 3.0, "clip_low": 0.2, "clip_high": 0.2},
            {"name": "kl", "beta": 0.001, "kind": "k3", "gradient": "k2"},
        ],
    ),
    (
        f"{RATIO}_rs=geometric {RATIO}_rs_threshold=1.01 {RATIO}_rs_threshold_lower=0.99 "
        f"{RATIO}_token_veto_threshold=1e-4",
        "algo.corrections",
        [{"name": "icepop", "weighted": False, "level": "geometric", "low": 0.99, "high": 1.01, "veto": 1e-4}],
    ),
    ("actor_rollout_ref.rollout.quantization=fp8", "model.fp8", "rollout"),
    (
        f"actor_rollout_ref.rollout.quantization=fp8 {MEGATRON}.fp8=e4m3 {MEGATRON}.fp8_recipe=blockwise",
        "model.fp8",
        "both",
    ),
    (f"{MEGATRON}.moe_router_bias_update_rate=0", "trainer.balance_rate", None),
    ("trainer.use_v1=True trainer.v1.trainer_mode=sync", "launch.placement", None),
    (
        f"{DISTILLATION}.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True "
        "distillation.distillation_loss.use_task_rewards=False actor_rollout_ref.rollout.n=1 "
        "distillation.distillation_loss.distillation_loss_coef=0.5",
        "algo.loss",
        [SAMPLED],
    ),
    (
        f"{DISTILLATION}.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True "
        "distillation.distillation_loss.distillation_loss_coef=0.5 distillation.distillation_loss.loss_max_clamp=10 "
        "distillation.distillation_loss.log_prob_min_clamp=-10 distillation.distillation_loss.clip_ratio_high=0.3",
        "algo.loss",
        [CLIPPED, SAMPLED | {"clip_high": 0.3, "cap": 10.0, "weight": 0.5}],
    ),
    (
        f"{DISTILLATION}.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True",
        "algo.teacher",
        {"path": "/m/t", "engine": "own", "top_k": 0},
    ),
    (
        f"{DISTILLATION}.loss_mode=forward_kl_topk distillation.distillation_loss.log_prob_min_clamp=-10",
        "algo.teacher",
        {"path": "/m/t", "engine": "own", "top_k": 32, **TOPK, "least_logprob": -10.0},
    ),
    (
        f"{DISTILLATION}.loss_mode=forward_kl_topk distillation.distillation_loss.loss_max_clamp=10",
        "algo.loss",
        [CLIPPED, {"name": "distill", "cap": 10.0, "weight": 1.0}],
    ),
    (f"{MEGATRON}.fp8=e4m3 {MEGATRON}.fp8_recipe=blockwise", "model.fp8", "trainer"),
    (f"{MEGATRON}.fp8=hybrid {MEGATRON}.fp8_recipe=blockwise", "model.fp8_format", "hybrid"),
    (f"{ACTOR}.optim.lr=1e-6 {ACTOR}.optim.lr_warmup_init=2.5e-7", "trainer.lr_start", 0.25),
    (f"{ACTOR}.optim.lr_warmup_init=0", "trainer.lr_start", None),
    (
        "actor_rollout_ref.rollout.engine_kwargs.trtllm.kv_cache_config.dtype=fp8",
        "engine.extra_args",
        ["--kv-cache-dtype", "fp8_e4m3"],
    ),
    ("actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=auto", "engine.extra_args", None),
    ("algorithm.filter_groups.enable=True", "algo.planners", ["dapo"]),
    ("algorithm.filter_groups.enable=True trainer.use_v1=False", "algo.planners", None),
    ("actor_rollout_ref.rollout.ignore_eos=True", "rollout.ignore_eos", True),
    ("actor_rollout_ref.rollout.ignore_eos=False", "rollout.ignore_eos", None),
    ("+data.min_response_length=64", "rollout.max_response_tokens", 512),
    (f"{DISTILLATION}.loss_mode=k3", "algo.teacher", {"path": "/m/t", "engine": "own", "direction": 0.0}),
    (f"{DISTILLATION}.loss_mode=k2", "algo.teacher", {"path": "/m/t", "engine": "own", "direction": 1.0}),
    (f"{ACTOR}.megatron.expert_model_parallel_size=8", "parallel.ep", 2),
]  # fmt: skip


@pytest.mark.parametrize(("more", "place", "expected"), VERL_FIELDS)
def test_verl_defaults_are_translated(
    more: str, place: str, expected: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("verl", f"{VERL} {more}", capsys)
    assert result.code == 0, result.said
    assert field(result.config, place) == expected


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ("data.train_files=~/data/geo3k/train.parquet", "data.train_files"),
        (f"{DISTILLATION}.loss_mode=k1", "distillation.distillation_loss.loss_mode"),
        (f"{MEGATRON}.fp8=hybrid {MEGATRON}.fp8_recipe=tensorwise", f"{MEGATRON}.fp8"),
        ("actor_rollout_ref.rollout.do_sample=False", "actor_rollout_ref.rollout.do_sample"),
        (
            "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=nvfp4",
            "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype",
        ),
        (f"{ACTOR}.optim.lr=1e-6 {ACTOR}.optim.lr_warmup_init=1e-6", f"{ACTOR}.optim.lr_warmup_init"),
        (
            f"{DISTILLATION}.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True "
            f"{RATIO}_is=token {RATIO}_is_threshold=2.0",
            f"{RATIO}_is",
        ),
        (
            f"{DISTILLATION}.loss_mode=forward_kl_topk actor_rollout_ref.rollout.temperature=0.8",
            "actor_rollout_ref.rollout.temperature",
        ),
        (
            "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=response_filter",
            "algorithm.filter_groups.metric",
        ),
        ("trainer.v1.trainer_mode=separate_async", "trainer.v1.trainer_mode"),
    ],
)
def test_verl_settings_without_a_counterpart_are_listed(
    more: str, missing: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    incomplete(run("verl", f"{VERL} {more}", capsys), missing)


def test_verls_partial_rollouts_are_over_provisioned(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = VERL.replace("verl.trainer.main_ppo", "recipe.partial_rollout.main_ppo")
    result = run("verl", f"{command} +async_training.partial_rollout=True", capsys)
    assert result.code == 0, result.said
    assert field(result.config, "rollout.over_provision") == 2.0
    assert field(result.config, "rollout.max_staleness") == 4
    assert field(result.config, "engine.max_running_requests") == 16  # 8 prompts x 4 samples on 2 engines
    assert field(result.config, "algo.anchor") == "behaviour"
    assert "check: rollout.max_staleness = 4: the script has no limit" in result.said
    incomplete(run("verl", command, capsys, out="off.yaml"), "async_training.partial_rollout")
    ignored = "+async_training.partial_rollout=True +algorithm.filter_groups.enable=True"
    result = run("verl", f"{command} {ignored}", capsys, out="ignored.yaml")
    assert result.code == 0 and field(result.config, "algo.planners") is None
    assert (
        "filter_groups.enable = True: recipe.partial_rollout.main_ppo does not read this setting"
        in result.said
    )


@pytest.mark.parametrize(
    "program",
    [
        "verl.experimental.one_step_off_policy.main_ppo",
        "verl.experimental.fully_async_policy.fully_async_main",
    ],
)
def test_verls_asynchronous_trainers_take_the_engines_log_probs(
    program: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = VERL.replace("verl.trainer.main_ppo", program) + " rollout.n_gpus_per_node=2"
    result = run("verl", command, capsys)
    assert result.code == 0 and field(result.config, "algo.anchor") == "mu", result.said
    result = run("verl", f"{command} {RATIO.rpartition('.')[0]}.bypass_mode=False", capsys, out="scored.yaml")
    assert result.code == 0 and field(result.config, "algo.anchor") != "mu", result.said


def test_verls_async_flow_has_engines_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flow = VERL.replace("verl.trainer.main_ppo", "recipe.async_flow.grpo_main").replace(
        "rollout.n=4", "rollout.n=8"
    )
    resources = "async_resources.actor_train.n_gpus_per_node=4 async_resources.ref_fwd.n_gpus_per_node=2"
    result = run("verl", f"{flow} {resources} actor_rollout_ref.actor.ppo_mini_batch_size=4", capsys)
    assert result.code == 0, result.said
    launch = {"gpus_per_node": 4, "nodes": 2, "backend": "ray", "placement": "disaggregated"}
    assert field(result.config, "launch") == launch
    assert field(result.config, "parallel.dp") == 4 and field(result.config, "engine.count") == 2
    assert field(result.config, "rollout.over_provision") == 2.0
    assert field(result.config, "rollout.max_staleness") == 1
    assert field(result.config, "algo.minibatches") == 2
    assert field(result.config, "trainer.warmup_fraction") == pytest.approx(0.015)
    assert (
        field(result.config, "eval.prompts") == 0 and field(result.config, "data.params.heldout_path") is None
    )
    assert "memory or logging: async_resources.ref_fwd.n_gpus_per_node" in result.said
    result = run("verl", f"{flow} {resources} async_flow.staleness=0", capsys, out="sync.yaml")
    assert result.code == 0 and field(result.config, "rollout.over_provision") is None, result.said
    assert field(result.config, "rollout.max_staleness") == 0


def test_differences_from_verl_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampled = (
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7"
    )
    result = run("verl", f"{VERL} {sampled} trainer.test_freq=5", capsys)
    assert result.code == 0 and "check: eval.sets: top_k = 1024" in result.said
    result = run(
        "verl", f"{VERL} {ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.use_kl_loss=True", capsys, out="g.yaml"
    )
    assert result.code == 0 and "check: algo.reducer = sequence_mean: it applies to all terms" in result.said
    balanced = f"{VERL} {MEGATRON}.moe_aux_loss_coeff=0.001"
    result = run("verl", balanced, capsys, out="b.yaml")
    assert result.code == 0 and "check: trainer.balance_loss: rlsys balances each sequence" in result.said


def test_slime_defaults_are_translated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kl = "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3"
    result = run("slime", f"{SLIME} --lr 1e-6 {kl}", capsys)
    assert field(result.config, "algo.loss")[1] == {"name": "kl", "beta": 0.1, "kind": "k3", "cap": None}
    for flag, whiten in (("", False), ("--normalize-advantages", True)):
        ppo = f"--advantage-estimator ppo {flag} --value-clip 0.3"
        result = run("slime", f"{SLIME} --lr 1e-6 {ppo}", capsys, out=f"ppo{whiten}.yaml")
        assert result.code == 0, result.said
        assert field(result.config, "algo.advantage") == {**GAE, "whiten": whiten}
        assert field(result.config, "algo.loss")[1] == {"name": "value", "coefficient": 2.0, "clip": 0.3}
    mtp = "--optimizer-cpu-offload --enable-mtp-training --mtp-num-layers 1"
    result = run("slime", f"{SLIME} --lr 1e-6 {mtp}", capsys, out="mtp.yaml")
    assert "check: trainer.offload_optimizer: omitted, because trainer.mtp_loss" in result.said
    assert field(result.config, "trainer.offload_optimizer") is None
    result = run(
        "slime", f"{SLIME} --lr 1e-6 --num-steps-per-rollout 4 --lr-warmup-iters 10", capsys, out="warm.yaml"
    )
    assert (result.code, field(result.config, "trainer.warmup_steps")) == (0, 3), result.said
    discounted = "--advantage-estimator reinforce_plus_plus --normalize-advantages --gamma 0.9"
    incomplete(run("slime", f"{SLIME} --lr 1e-6 {discounted}", capsys, out="g.yaml"), "--gamma")
