"""A teacher that SGLang serves: it says what a teacher in the trainer says, a policy learns from it, and a run
outlives it."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from rlsys.config import load_config
from rlsys.data import Tokenizer, build_source
from rlsys.engine.client import EngineClient
from rlsys.engine.cpu.platform import declare_torchvision_ops
from rlsys.engine.wire import make_session
from rlsys.ledger.reader import RunReader
from rlsys.obs.metrics import read_metrics
from rlsys.planning.teacher import UNAVAILABLE
from rlsys.trainer.pack import TrainSample
from rlsys.trainer.teacher import Teachers, add_teacher
from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases
from tests.helpers.servers import ROOT
from tests.helpers.sessions import RLSYS, Session, check_ledger

pytestmark = pytest.mark.integration

TOP_K = 16
STEPS = 16
GROUPS, SIZE = 8, 8
HELD_OUT = 32
LONGEST = 64


def made_up(vocabulary: int) -> list[TrainSample]:
    rng = random.Random(1)
    sizes = [(1, 1), (9, 30), (40, 100), (3, 64), (200, 200)]
    texts = [([rng.randrange(3, vocabulary) for _ in range(n)] for n in size) for size in sizes]
    return [
        TrainSample(prompt, response, [0.0] * len(response), [0] * len(response), row)
        for row, (prompt, response) in enumerate(texts)
    ]


@pytest.mark.gate
async def test_engine_and_trainer_teachers_return_the_same_logprobs(
    engine: str, tiny_moe: Path, tmp_path: Path
) -> None:
    """The same weights: log-probs to 1e-4, ids but for near ties."""
    samples = made_up(128)
    async with make_session() as session:
        client = EngineClient(engine, session)
        await client.begin_weight_update()
        await client.end_weight_update()
        await client.update_weights_from_disk(str(tiny_moe), 1)
        await client.flush()
        top_tokens = [await client.most_probable(s.prompt_ids, list(s.response_ids), TOP_K) for s in samples]
        sampled = [await client.most_probable(s.prompt_ids, list(s.response_ids), 0) for s in samples]
    for sample, (ids, logp), (best_ids, best) in zip(samples, sampled, top_tokens, strict=True):
        assert ids[:, 0].tolist() == list(sample.response_ids) and logp.shape == (len(ids), 1)
        is_best = ids == best_ids
        assert np.abs(np.broadcast_to(logp, best.shape)[is_best] - best[is_best]).max(initial=0.0) <= 1e-5
    algo = {"loss": ["distill"], "teacher": {"path": tiny_moe, "top_k": TOP_K}}
    config = cases.config_of(tiny_moe, tmp_path, algo=algo, trainer={"token_budget": 1024})
    trainer = Trainer(config)
    try:
        add_teacher(trainer)
        batch = trainer.passes.pack(samples)
        assert isinstance(trainer.teacher, Teachers)
        trainer.teacher.score([batch])
        worst = 0.0
        for micro in batch:
            assert micro.teacher_ids is not None and micro.teacher_logp is not None
            starts = micro.cu_seqlens.tolist()
            for position, row in enumerate(micro.rows.tolist()):
                response = slice(starts[position] + len(samples[row].prompt_ids), starts[position + 1])
                ids, logp = (x[response].cpu().numpy() for x in (micro.teacher_ids, micro.teacher_logp))
                worst = max(worst, float(np.abs(logp - top_tokens[row][1]).max()))
                mismatch = ids != top_tokens[row][0]
                assert np.abs(logp - top_tokens[row][1])[mismatch].max(initial=0.0) <= 1e-4
                assert mismatch.mean() < 0.01
        assert worst <= 1e-4
        print(f"largest difference of log-probs: {worst:.2g}")
    finally:
        trainer.close()


def divergence(student: Path, teacher: Path) -> float:
    """KL(student || teacher) over the whole vocabulary, by transformers: the mean over the tokens that the student
    samples for held-out prompts."""
    declare_torchvision_ops()
    import transformers

    config = load_config(ROOT / "configs" / "algorithms" / "distill.yaml")
    heldout = build_source(config, Tokenizer(config.model.path)).heldout(HELD_OUT)
    p, q = (
        transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (student, teacher)
    )
    torch.manual_seed(0)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for prompt in heldout:
            ids = torch.tensor([prompt.ids])
            sequences = p.generate(ids, do_sample=True, top_k=0, temperature=1.0, max_new_tokens=LONGEST)
            student_logp, teacher_logp = (
                m(sequences).logits[0, len(prompt.ids) - 1 : -1].log_softmax(-1) for m in (p, q)
            )
            total += float((student_logp.exp() * (student_logp - teacher_logp)).sum())
            tokens += len(student_logp)
    return total / tokens


def kept(run: Path, steps: int) -> dict[int, bytes]:
    """What the teacher said of each sample that these steps took."""
    teacher_logprobs: dict[int, bytes] = {}
    for step in range(1, steps + 1):
        groups = RunReader(run).groups("train_step = ?", step)
        teacher_logprobs |= {s.sample_id: bytes(s.teacher_logprobs) for g in groups for s in g.samples}
    return teacher_logprobs


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_distillation_reduces_the_divergence_tenfold_across_a_teacher_failure(tmp_path: Path) -> None:
    """The teacher dies (kill -9): samples are censored, the run goes on, and it is asked again once it is back. The
    coordinator dies: what the teacher has said is kept."""
    dpo, run = tmp_path / "dpo", tmp_path / "run"
    command = [*RLSYS, "sft", "configs/preferences/dpo.yaml", f"run.dir={dpo}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    teacher = dpo / "model"
    session = Session(
        run,
        "algo.loss=[distill]",
        f"algo.teacher={{path: {teacher}, top_k: {TOP_K}, engine: own}}",
        "trainer.lr=3.0e-4",
        f"trainer.steps={STEPS}",
        f"trainer.export_every={STEPS}",
        "trainer.keep_checkpoints=100",
        f"rollout.groups_per_step={GROUPS}",
        f"rollout.group_size={SIZE}",
        f"rollout.max_response_tokens={LONGEST}",
        "rollout.stall_timeout=16",
    )
    try:
        session.wait_for_steps(2)
        kill(session.find("rlsys.engine.server", str(teacher)))
        session.wait_for(lambda: UNAVAILABLE in (run / "logs" / "rollout.log").read_text())
        session.wait_for_steps(9)
        logprobs_before = kept(run, 8)
        kill(session.find("rlsys.rollout.service"))
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    ledger = check_ledger(run)
    steps = read_metrics(run).steps
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert max(s["censored"] for s in steps) > 0 and all(s["lost"] == 0 for s in steps)
    logprobs_after = kept(run, 8)
    assert (
        len(logprobs_before) == 8 * GROUPS * SIZE
        and all(logprobs_before.values())
        and logprobs_after == logprobs_before
    )
    first, last = (
        divergence(s, teacher)
        for s in (ROOT / "configs/models/quickstart-moe", run / "exports" / f"step-{STEPS:06d}")
    )
    print(f"KL(student || teacher) on held-out prompts: {first:.3g} to {last:.3g} nats; censored {ledger}")
    assert last < first / 10
