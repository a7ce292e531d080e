"""`rlsys import` lists what a script leaves open and exits with 3; it fills nothing in and ends for every input."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsys import cli
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
        raise AssertionError("the import did not end within 20 s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the scripts' data is; none of the variables of the cases is set."""
    monkeypatch.chdir(tmp_path)
    for name in ("LR", "MODE", "N", "M", "RESUME"):
        monkeypatch.delenv(name, raising=False)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(400)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(
    framework: str,
    script: str,
    capsys: pytest.CaptureFixture[str],
    name: str = "run.sh",
    out: str = "out.yaml",
) -> Import:
    Path(name).write_text(script)
    try:
        code = cli.main(["import", framework, name, "--out", out])
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
    listed = [line for line in made.text.splitlines() if line.startswith(("# MISSING:", "# NOT TRANSLATED:"))]
    assert any(theirs in line for line in listed), made.text
    for place in places:
        assert field(made.config, place) is None, place


@pytest.mark.parametrize("framework", ["slime", "verl"])
def test_a_whole_script_is_translated(
    framework: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lr = {"slime": "--lr 1e-6", "verl": "actor_rollout_ref.actor.optim.lr=1e-6"}[framework]
    made = run(framework, f'{SLIME if framework == "slime" else VERL} {lr} "$@"', capsys)
    assert made.code == 0, made.said
    assert field(made.config, "trainer.lr") == 1e-6
    load_config(Path("out.yaml"), [])


HOLES = {
    "unset": ("", "$LR"),
    "argument": ("", "$1"),
    "nothing": ("", ""),
    "command": ("", "$(python lr.py)"),
    "backticks": ("LR=`python lr.py`\n", "$LR"),
    "case": ("LR=1E-6\n", "${LR,,}"),
    "branch": ("MODE=small\nif [ $MODE = small ]; then LR=1e-6; else LR=5e-5; fi\n", "$LR"),
    "choice": ("case $MODE in small) LR=1e-6;; *) LR=5e-5;; esac\n", "$LR"),
    "and": ('LR=1e-6\n[ -n "$MODE" ] && LR=5e-5\n', "$LR"),
    "loop": ("for LR in 1e-6 5e-5; do echo $LR; done\n", "$LR"),
    "function": ("LR=1e-6\nset_lr() { LR=5e-5; }\nset_lr\n", "$LR"),
    "read": ("LR=1e-6\nread LR < lr.txt\n", "$LR"),
    "quoted": ("", '"${LR}"'),
    "empty": ("", '""'),
    "declared": ("declare -i LR=1\n", "$LR"),
    "or": ("LR=1e-6\ngrep -q x y || LR=5e-5\n", "$LR"),
    "subshell": ("LR=1e-6\n(LR=5e-5)\n", "$LR"),
    "removed": ("LR=1e-6\nunset LR\n", "$LR"),
    "deep": ("A=1\nwhile [ $A ]; do if x; then LR=1e-6; fi; done\n", "$LR"),
    "element": ("LR=(1e-6 5e-5)\ni=$(id -u)\n", "${LR[$i]}"),
    "indirect": ("NAME=LR\n", "${!NAME}"),
}


@pytest.mark.parametrize("case", HOLES)
def test_world_01_a_hole_in_a_learning_rate_of_slime(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, value = HOLES[case]
    incomplete(
        run("slime", f"{before}{SLIME} --lr {value} --weight-decay 0.1\n", capsys), "--lr", "trainer.lr"
    )


@pytest.mark.parametrize("case", [name for name in HOLES if name != "nothing"])
def test_world_01_a_hole_in_a_batch_size_of_verl(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, value = HOLES[case]
    made = run("verl", f"{before}{VERL} data.train_batch_size={value}\n", capsys)
    incomplete(made, "data.train_batch_size", "rollout.groups_per_step", "algo.minibatches")


def test_world_01_what_a_hole_decides_beside_its_own_field(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = "--actor-num-gpus-per-node $N --rollout-num-gpus $N"
    made = run("slime", f"N=$(nvidia-smi -L | wc -l)\n{SLIME} --lr 1e-6 {gpus}", capsys)
    incomplete(made, "--actor-num-gpus-per-node", "launch.gpus_per_node", "engine.count", "parallel.dp")
    made = run("slime", f"{SLIME} --lr 1e-6 --save $OUT/run1", capsys, out="saved.yaml")
    incomplete(made, "--save", "run.dir")


def test_world_01_arithmetic_is_computed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run("verl", f"{VERL} data.train_batch_size=$((2**6)) trainer.nnodes=1", capsys)
    assert (made.code, field(made.config, "rollout.groups_per_step")) == (0, 64)


@pytest.mark.parametrize(
    ("before", "word"),
    [
        ("", '$(echo "64*2" | bc)'),
        ("", "$((RANDOM))"),
        ("M=Big\n", "${M:0:2}"),
        ("", "$((1 > 0 ? 64 : 2))"),
        ("", "[1,2,$N]"),
    ],
)
def test_world_01_what_is_not_computed_is_listed(
    before: str, word: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run("verl", f"{before}{VERL} data.train_batch_size={word}\n", capsys)
    incomplete(made, "data.train_batch_size", "rollout.groups_per_step")


@pytest.mark.parametrize("more", ["", "--colocate", "--lr 1e-6"])
def test_world_01_a_whole_word_that_is_not_known(
    more: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be an option that changes anything."""
    made = run("slime", f"{SLIME} --lr 1e-6 {more} $EXTRA_ARGS", capsys)
    incomplete(made, "$EXTRA_ARGS")
    assert field(made.config, "trainer.lr") == 1e-6
    incomplete(run("verl", f"{VERL} $EXTRA_ARGS", capsys, out="verl.yaml"), "$EXTRA_ARGS")


@pytest.mark.parametrize("join", ["\n", "; ", " && "])
def test_world_01_a_second_command(join: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = f"{SLIME} --lr 5e-5 --num-rollout 900"
    made = run("slime", f"{SLIME} --lr 1e-6{join}{second}", capsys)
    incomplete(made, "command")
    assert (field(made.config, "trainer.lr"), field(made.config, "trainer.steps")) == (1e-6, 4)
    twice = f"{VERL}{join}{VERL} trainer.total_training_steps=900 algorithm.adv_estimator=rloo"
    made = run("verl", twice, capsys, out="verl.yaml")
    incomplete(made, "command")
    assert (field(made.config, "algo.advantage"), field(made.config, "trainer.steps")) == ("grpo", 4)


@pytest.mark.parametrize(
    "script",
    [
        "if [ $MODE = a ]; then\n%s\nfi",
        "for seed in 1 2; do %s --seed $seed; done",
        "while true; do %s; done",
        "run() { %s; }\nrun",
        "case $MODE in a) %s;; esac",
    ],
)
def test_world_01_a_command_that_may_not_run_or_run_often(
    script: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run("slime", script % f"{SLIME} --lr 1e-6", capsys)
    assert made.code == INCOMPLETE and "# MISSING:" in made.text, made.said


def test_world_20_a_function_that_gets_the_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run("slime", 'run() { python train.py "$@"; }\nrun --hf-checkpoint m --lr 1e-6\n', capsys)
    assert made.code == INCOMPLETE and "function run" in made.said, made.said


def test_world_01_a_file_that_is_not_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = f"LR=1e-6\nsource settings.sh\n{SLIME} --lr $LR"
    incomplete(run("slime", script, capsys), "settings.sh")
    Path("settings.sh").write_text("LR=3e-6\n")
    made = run("slime", script, capsys, out="here.yaml")
    assert (made.code, field(made.config, "trainer.lr")) == (0, 3e-6), made.said


@pytest.mark.parametrize(
    "own", ['$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)', "$(dirname $0)"]
)
def test_a_file_beside_the_script_is_read(own: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "deep" / "models").mkdir(parents=True)
    (folder / "deep" / "models" / "sizes.sh").write_text("MODEL_ARGS=(\n  --num-layers 48 --lr 2e-6\n)\n")
    script = f'HERE="{own}"\nsource "${{HERE}}/models/sizes.sh"\n{SLIME} ${{MODEL_ARGS[@]}}'
    made = run("slime", script, capsys, name="deep/run.sh")
    assert (made.code, field(made.config, "trainer.lr")) == (0, 2e-6), made.said


@pytest.mark.parametrize(
    ("script", "listed"),
    [
        (f"echo --lr 1e-6 | xargs {SLIME}", "xargs"),
        (f"{SLIME} --lr 1e-6 --note 'it is", "closed"),
        (f'{SLIME} --lr 1e-6 --note "it is', "closed"),
        (f"eval export LR=1e-5\n{SLIME} --lr 1e-6", "eval"),
        (f"export $(cat .env)\n{SLIME} --lr 1e-6", ".env"),
        (f"{SLIME} --lr 1e-6 --eval-prompt-data aime a.jsonl math", "--eval-prompt-data"),
        (f"{SLIME} --lr 1e-6 --prompt-data 'train.jsonl@[0:100]'", "--prompt-data"),
        (f"{SLIME} --lr 1e-6 --colocate yes", "yes"),
    ],
)
def test_world_01_what_else_leaves_a_run_open(
    script: str, listed: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    incomplete(run("slime", script, capsys), listed)


def test_world_01_a_variable_for_one_command_is_not_expanded_in_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    incomplete(run("slime", f"LR=1e-6 {SLIME} --lr $LR", capsys), "--lr", "trainer.lr")


@pytest.mark.parametrize("value", ["", "null"])
def test_world_01_a_batch_size_that_says_nothing(
    value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run("verl", f"{VERL} data.train_batch_size={value}", capsys)
    incomplete(made, "data.train_batch_size", "rollout.groups_per_step")


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
        "data.shuffle=False",
        "data.image_key=images",
        "data.train_max_samples=100",
        "trainer.critic_warmup=10",
        "actor_rollout_ref.actor.made_up=3",
        "algorithm.adv_estimator=made_up",
        "actor_rollout_ref.actor.loss_agg_mode=made-up",
        "reward_model.reward_manager=batch",
    ],
)
def test_world_02_each_word_of_verl_is_a_row(
    setting: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run("verl", f"{VERL} {setting}", capsys)
    incomplete(made, setting.lstrip("+").partition("=")[0])


def test_world_02_the_present_names_of_rewards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    )
    made = run(
        "verl",
        f"{VERL} reward.custom_reward_function.path=my.py reward.custom_reward_function.name=f "
        "reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True "
        "+reward.reward_kwargs.overlong_buffer_cfg.len=64 +reward.reward_kwargs.max_resp_len=512",
        capsys,
    )
    assert made.code == 0, made.said
    assert field(made.config, "data.reward") == "my.py:f"
    assert field(made.config, "algo.shaping") == [
        {"name": "overlong", "cap": 512, "buffer": 64, "factor": 1.0}
    ]


def test_world_02_a_batch_size_of_zero(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run("verl", f"{VERL} data.train_batch_size=0", capsys)
    incomplete(made, "data.train_batch_size", "rollout.groups_per_step")


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
        "--rollout-stop-token-ids 7",
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
def test_field_07_an_option_that_changes_speed_alone(
    framework: str, setting: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"slime": f"{SLIME} --lr 1e-6", "verl": VERL}[framework]
    made = run(framework, f"{whole} {setting}", capsys)
    assert made.code == 0, made.said
    warnings = [line for line in made.said.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1 and setting.split()[0].lstrip("+").partition("=")[0] in warnings[0], made.said
    assert "always" not in warnings[0]


def test_field_07_options_of_sglang_are_passed_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = (
        "--sglang-mem-fraction-static 0.7 --sglang-disable-radix-cache --sglang-dp-size 2 --sglang-ep-size 2 "
        "--sglang-cuda-graph-bs 1 2 4 $(seq 8 8 24) --sglang-speculative-algorithm EAGLE"
    )
    made = run("slime", f"{SLIME} --lr 1e-6 {more}", capsys)
    assert made.code == 0, made.said
    assert field(made.config, "engine.extra_args") == [
        "--mem-fraction-static", "0.7", "--disable-radix-cache", "--dp-size", "2", "--ep-size", "2",
        "--cuda-graph-bs", "1", "2", "4", "8", "16", "24", "--speculative-algorithm", "EAGLE",
    ]  # fmt: skip


def test_field_03_the_pool_is_sized_only_by_the_script(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for framework, whole in (("slime", f"{SLIME} --lr 1e-6"), ("verl", VERL)):
        made = run(framework, whole, capsys, out=f"{framework}.yaml")
        assert made.code == 0 and field(made.config, "engine.max_total_tokens") is None, made.said
    made = run("slime", f"{SLIME} --lr 1e-6 --sglang-max-total-tokens 300000", capsys)
    assert field(made.config, "engine.max_total_tokens") == 300000


@pytest.mark.parametrize(
    ("framework", "more", "instead"),
    [
        ("slime", "--lr 1e-6 --loss-type sft_loss", "rlsys sft"),
        (
            "slime",
            "--lr 1e-6 --rollout-function-path slime.rollout.sft_rollout.generate_rollout",
            "rlsys sft",
        ),
        ("slime", "--lr 1e-6 --use-opd --opd-type sglang", "algo.teacher"),
        ("verl", "distillation.enabled=True", "algo.teacher"),
    ],
)
def test_field_06_another_kind_of_run_is_not_made_a_grpo_run(
    framework: str, more: str, instead: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(framework, f"{SLIME if framework == 'slime' else VERL} {more}", capsys)
    assert (made.code, made.text) == (INCOMPLETE, "") and instead in made.said, made.said


def test_field_06_verls_sft_trainer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=train.jsonl optim.lr=1e-5 "
        "model.path=m"
    )
    made = run("verl", script, capsys)
    assert (made.code, made.text) == (INCOMPLETE, "") and "rlsys sft" in made.said, made.said


def test_field_06_what_has_a_counterpart_is_translated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "--lr 1e-6 --min-lr 1e-7 --lr-warmup-fraction 0.5 --lr-decay-style cosine"
    made = run("slime", f"{SLIME} {more}", capsys)
    assert made.code == 0, made.said
    trainer = field(made.config, "trainer")
    assert (trainer["lr_end"], trainer["warmup_steps"], trainer["schedule"]) == (
        pytest.approx(0.1),
        2,
        "cosine",
    )


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


def test_field_08_a_quoted_empty_array_is_no_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = f'A=()\nB=(--lr 1e-6)\n{SLIME} "${{B[@]}}" "${{A[@]}}" --weight-decay 0.1'
    made = run("slime", script, capsys)
    assert made.code == 0, made.said
    assert (field(made.config, "trainer.lr"), field(made.config, "trainer.weight_decay")) == (1e-6, 0.1)


def test_redirections_and_here_documents_are_no_options(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        f"cat > other.sh <<EOF\npython train.py --lr 3 --made-up 1\nEOF\n{SLIME} --lr 1e-6 2>&1 | tee log.txt"
    )
    made = run("slime", script, capsys)
    assert (made.code, field(made.config, "trainer.lr")) == (0, 1e-6), made.said


def test_world_21_a_path_is_printed_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = "/a/very/long/folder/name/" * 6 + "dapo-math-17k.jsonl"
    made = run("slime", f"{SLIME} --lr 1e-6 --eval-prompt-data aime {path}", capsys)
    assert path in made.said


# Bounds


def test_security_a13_a_yaml_file_is_not_cut_off(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"hf_checkpoint: {MODEL}\nprompt_data: train.jsonl\n" + "# padding\n" * 500_000 + "lr: 1.0e-6\n"
    made = run("slime", text, capsys, name="run.yaml")
    assert made.code == 2 and made.said.count("\n") == 1 and made.text == "", made.said


@pytest.mark.parametrize("word", ["1; 2", "1 & 2", "1 | 2", "1 ;; 2", "(1)", "&", "|"])
def test_world_03_operators_in_an_array(word: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run("slime", f"A=({word})\n{SLIME} --lr 1e-6", capsys)
    assert made.code in (0, 2, 3)


@pytest.mark.parametrize(
    "text",
    [
        "A=xxxxxxxxxx\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 5,
        "A=" + "${A:-" * 3000,
        "A=(" * 20000,
        "$(" * 20000,
        "A=$((" + "(" * 3000 + "1" + ")" * 3000 + "))",
        "A=$((9**9**9))",
        "A=1x\necho {" + "," * 150_000,
        "A=$(cd x" + " " * 150_000 + ")",
        "((" + "a" * 150_000 + "))\nA=1x",
        "A=" + "1" * 150_000 + "x",
        "A=1x\nbash -c '" + "main_ppo train.py " * 10_000 + "'",
        "A=1x\ndeclare -" + "a" * 150_000 + "! B=1",
    ],
    ids=[
        "powers",
        "defaults",
        "arrays",
        "commands",
        "parentheses",
        "exponents",
        "braces",
        "blanks",
        "names",
        "digits",
        "words",
        "flags",
    ],
)
@pytest.mark.parametrize("framework", ["slime", "verl"])
def test_security_a13_a_script_of_a_stranger(
    framework: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"slime": f"{SLIME} --lr $A", "verl": f"{VERL} actor_rollout_ref.actor.optim.lr=$A"}[framework]
    made = run(framework, f"{text}\n{whole}", capsys)
    assert made.code in (2, 3)
    if made.code == 2:
        assert made.said.count("\n") == 1 and made.said.startswith("rlsys: error: run.sh: "), made.said
    assert field(made.config, "trainer.lr") is None


@pytest.mark.parametrize(
    "value", ["1e999", "-1e999", ".nan", "9" * 5000, "1" * 400, "[" * 3000, "fast", "[1,2]"]
)
def test_security_a13_a_number_that_is_none(
    value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run("verl", f"{VERL} data.train_batch_size={value}", capsys)
    assert made.code == 2 and made.said.count("\n") == 1, made.said
    assert "data.train_batch_size" in made.said and len(made.said) < 500


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
def test_security_a13_yaml_of_a_stranger(
    framework: str, case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(framework, YAML[case], capsys, name="run.yaml")
    assert made.code == 2 and made.said.count("\n") == 1, made.said


LATER = {
    "a function that is called later": "usage() { LR=9; }\nLR=1\nusage",
    "with the keyword": "function usage { LR=9; }\nLR=1\nusage a",
    "through another one": "inner() { LR=9; }\nusage() { inner; }\nLR=1\nusage",
    "a counter in a function": "usage() { ((LR++)); }\nLR=1\nusage",
    "a default in a function": "usage() { : ${LR:=9}; }\nLR=\nusage",
    "readonly": "readonly LR=4\nLR=5",
    "declare -r": "declare -r LR=4\nLR=5",
    "an assignment beside": "LR=1\nLR=2 &",
    "an assignment in a pipe": "LR=1\nLR=2 | cat",
    "an element with an index": "A=([3]=5)\nLR=${A[0]}",
    "a separator of its own": "IFS=,\nX=1,2\nA=($X)\nLR=${A[0]}",
}


@pytest.mark.parametrize("case", LATER)
def test_world_01_what_sets_a_variable_without_being_seen(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run("slime", f"{LATER[case]}\n{SLIME} --lr $LR\n", capsys)
    incomplete(made, "--lr", "trainer.lr")


def test_world_01_a_variable_that_is_local_to_a_function(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run("slime", f"f() {{ local LR=9; }}\nLR=1e-6\nf\n{SLIME} --lr $LR\n", capsys)
    assert (made.code, field(made.config, "trainer.lr")) == (0, 1e-6), made.said


def test_world_01_export_reads_all_its_words_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run("slime", f"A=1e-6\nexport A=2e-6 LR=$A\n{SLIME} --lr $LR\n", capsys)
    assert (made.code, field(made.config, "trainer.lr")) == (0, 1e-6), made.said


def test_world_01_an_unquoted_array_is_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run("slime", f'A=("--lr 1e-6")\n{SLIME} ${{A[@]}}\n', capsys)
    assert (made.code, field(made.config, "trainer.lr")) == (0, 1e-6), made.said


@pytest.mark.parametrize(
    "first", ["shopt -s expand_aliases\nalias python3='python3 x.py'", "trap 'LR=3' DEBUG"]
)
def test_world_01_what_changes_every_later_command(
    first: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run("slime", f"LR=1e-6\n{first}\n{SLIME} --lr $LR\n", capsys)
    assert made.code == INCOMPLETE, made.said


def test_world_01_nothing_behind_an_exit_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run("slime", f"LR=1e-6\n{SLIME} --lr $LR\nexit 0\n{SLIME} --lr 2e-6\n", capsys)
    assert (made.code, field(made.config, "trainer.lr")) == (0, 1e-6), made.said
