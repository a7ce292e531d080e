"""Every published family, as its makers publish it (tests/helpers/published_families.py): from its folder to a folder
that transformers loads. A new family of the trainer is one entry there, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.families import FAMILIES as CONVERTED
from rlsys.core.types import Status
from rlsys.data import Tokenizer
from rlsys.trainer.trainer import Trainer
from tests.helpers import tiny
from tests.helpers import trainer_cases as cases
from tests.helpers.published_families import FAMILIES, TOOLS, Published, write
from tests.helpers.published_tokenizers import CODE_FORMS
from tests.helpers.verdicts import REWARDS, score_response

pytestmark = pytest.mark.integration

SEQUENCES = [[(7 * i * j + 3 * i) % 96 for j in range(1, 60)] for i in range(1, 4)]
LOGPS = 5e-5
TEXTS = ["It's 3+4=7 <answer>42</answer>", "naïve café 世界 мир", " \n\n\tdef f(x):", "\U0001f600"]
NOT_WEIGHTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of converted tokenizers: one for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, cache: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Published, Path]:
    published = FAMILIES[request.param]
    return published, write(tmp_path_factory.mktemp(request.param) / "model", published)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    with cases.trainer_factory(tmp_path / "run") as make:
        yield make


def tokenizer_of(one: Published, folder: Path) -> Tokenizer:
    model = {"path": folder, "trust_remote_code": one.form in CODE_FORMS}
    return Tokenizer.of(Config.model_validate({"model": model}))


def log_probs(folder: Path) -> Tensor:
    """Of SEQUENCES, by transformers."""
    model, logprobs = tiny.load(folder), []
    with torch.no_grad():
        for ids in SEQUENCES:
            logp = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            logprobs.append(logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(logprobs)


def gap(trainer: Trainer, folder: Path) -> float:
    trainer_logprobs = torch.tensor([logp for canary in trainer.canaries(SEQUENCES) for logp in canary.logp])
    return float((trainer_logprobs - log_probs(folder)).abs().max())


def test_every_family_of_the_trainer_is_in_the_table() -> None:
    assert set(FAMILIES) == set(tiny.TINY)
    assert {tiny.TINY[name].architecture for name in FAMILIES} == set(CONVERTED)


def test_its_tokenizer_is_autotokenizers(family: tuple[Published, Path]) -> None:
    """Ids, a rendered conversation with a call of a tool, and where responses end."""
    from transformers import AutoTokenizer

    published, folder = family
    tokenizer, hf_tokenizer = (
        tokenizer_of(published, folder),
        AutoTokenizer.from_pretrained(folder, trust_remote_code=True),
    )
    for text in (*TEXTS, *published.stops):
        assert tokenizer.encode(text) == hf_tokenizer.encode(text, add_special_tokens=False), text
    for generate in (False, True):
        rendered = hf_tokenizer.apply_chat_template(
            published.chat, tools=TOOLS, tokenize=False, add_generation_prompt=generate
        )
        assert tokenizer.apply_chat(published.chat, tools=TOOLS, generate=generate) == rendered
    vocabulary = HFConfig.read(folder).vocab_size
    assert tokenizer.stop_ids == {tokenizer.encode(text)[0] for text in published.stops}
    assert (
        all(len(tokenizer.encode(text)) == 1 for text in published.stops)
        and max(tokenizer.stop_ids) < vocabulary
    )
    assert tokenizer.turn_end_id == tokenizer.encode(published.turn_end or published.eos)[0]


def test_a_right_answer_has_its_reward(family: tuple[Published, Path]) -> None:
    """Each built-in reward's, by whatever token the answer ends."""
    published, folder = family
    tokenizer = tokenizer_of(published, folder)
    missed = []
    for reward, text in REWARDS:
        full = 2.0 if reward == "answer_and_format" else 1.0
        for end in published.stops:
            ids = [*tokenizer.encode(text), *tokenizer.encode(end)]
            trusted = published.form in CODE_FORMS
            if score_response(folder, reward, ids, Status.FINISHED, tokenizer, trusted).reward != full:
                missed.append((reward, end))
    assert not missed


def test_a_step_and_its_export(
    family: tuple[Published, Path], tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """The trainer computes what transformers does, also of what it exports after a step, and all that is no weight
    goes along."""
    from transformers import AutoConfig, AutoTokenizer

    published, folder = family
    trainer, exported = start(folder), tmp_path / "exported"
    assert gap(trainer, folder) < LOGPS
    result = trainer.update(trainer.passes.pack(cases.samples()), cases.policy_loss, 1e-3)
    assert result.grad_norm > 0
    trainer.export_hf(exported)
    assert gap(trainer, exported) < LOGPS
    source_files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    weights = {n for n in source_files if n.endswith(".safetensors") or n in published.unindexed}
    exported_files = {str(p.relative_to(exported)) for p in exported.rglob("*") if p.is_file()}
    assert source_files - weights == exported_files - {
        n for n in exported_files if n.endswith(".safetensors")
    }
    old, new = (AutoTokenizer.from_pretrained(f, trust_remote_code=True) for f in (folder, exported))
    assert [old.encode(t) for t in TEXTS] == [new.encode(t) for t in TEXTS]
    if published.code:
        assert (
            type(AutoConfig.from_pretrained(exported, trust_remote_code=True)).__name__ == "PublishedConfig"
        )
    original_config, exported_config = (
        json.loads((f / "config.json").read_text()) for f in (folder, exported)
    )
    assert {**original_config, "torch_dtype": "", "dtype": ""} == {
        **exported_config,
        "torch_dtype": "",
        "dtype": "",
    }
