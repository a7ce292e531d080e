"""Prompt sources and the tokenizer: the same prompt for the same index, held-out apart from training."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from rlsys.config import Config, load_config
from rlsys.core.errors import UserError
from rlsys.core.imports import resolve
from rlsys.core.seeds import stable_hash
from rlsys.core.types import Prompt
from rlsys.data import PromptSource, Tokenizer, build_source
from rlsys.data.quickstart_model import write_model
from rlsys.data.row_check import row_counts
from rlsys.data.row_source import RowSource, heldout_count
from rlsys.data.source import draw_heldout, is_heldout
from rlsys.data.trace import Trace
from rlsys.data.traces import terms, trace_batches, working
from rlsys.engine_requests import ANY_ENGINE
from rlsys.evaluation.evaluation import eval_items
from rlsys.rewards import make_score
from rlsys.rollout.dry_run import build_inputs
from tests.helpers.responses import response_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, seed=0)
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


def config_for(model: Path, run_seed: int = 0, eval_seed: int = 999, **data: Any) -> Config:
    return Config.model_validate(
        {"model": {"path": model}, "data": data, "run": {"seed": run_seed}, "eval": {"seed": eval_seed}}
    )


def chain(
    model: Path, tokenizer: Tokenizer, run_seed: int = 0, eval_seed: int = 999, **params: Any
) -> PromptSource:
    return build_source(
        config_for(model, run_seed, eval_seed, source="chain_sum_tail", params=params), tokenizer
    )


def questions(source: PromptSource, n: int) -> list[str]:
    return [source.train(i).entry["question"] for i in range(n)]


# --- tokenizer ---


def test_tags_and_eos_survive_decoding(tokenizer: Tokenizer) -> None:
    text = "<bos><user>4-1=<assistant><think>\n?</think><answer>3</answer><eos>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_id == 2
    assert tokenizer.eos_token == "<eos>"
    assert tokenizer.vocab_size == 106


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=40))
def test_every_printable_text_survives_the_round_trip(model: Path, text: str) -> None:
    tokenizer = Tokenizer(model)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_of_the_padded_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([120, 10]) == "0"


def test_chat_template_opens_the_thought(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "1+2="}]
    assert tokenizer.apply_chat(messages) == "<bos><user>1+2=<assistant><think>"
    assert tokenizer.apply_chat(messages, generate=False) == "<bos><user>1+2="


def test_template_inside_tokenizer_config(model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    settings_file = tmp_path / "tokenizer_config.json"
    data = json.loads(settings_file.read_text())
    data["eos_token"] = {"content": "<eos>", "special": True}
    data["chat_template"] = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": "{{ eos_token }}!"},
    ]
    settings_file.write_text(json.dumps(data))
    assert Tokenizer(tmp_path).apply_chat([]) == "<eos>!"


def test_template_that_refuses_is_a_user_error(model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('system role is not supported') }}")
    with pytest.raises(UserError, match="refuses the messages: system role is not supported"):
        Tokenizer(tmp_path).apply_chat([])


def test_missing_tokenizer_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path = '.*': contains no tokenizer\.json"):
        Tokenizer(tmp_path)


def test_no_torch_is_imported(model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rlsys.config import Config\n"
        "from rlsys.data import Tokenizer, build_source; from rlsys.rewards import make_score\n"
        f"config = Config.model_validate({{'model': {{'path': {str(model)!r}}}}})\n"
        "build_source(config, Tokenizer(config.model.path)).train(0); make_score(config)\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


# --- chain_sum_tail ---


def test_prompt_is_the_bare_sum_in_the_chat_template(model: Path, tokenizer: Tokenizer) -> None:
    prompt = chain(model, tokenizer).train(7)
    sum_text = prompt.entry["metadata"]["expression"].replace(" ", "")
    assert prompt.text == f"<bos><user>{sum_text}=<assistant><think>"
    assert prompt.ids == tokenizer.encode(prompt.text)
    assert prompt.index == 7


@settings(max_examples=30)
@given(index=st.integers(0, 10**9), seed=st.integers(0, 2**31 - 1))
def test_a_prompt_depends_only_on_seed_and_index(model: Path, index: int, seed: int) -> None:
    tokenizer = Tokenizer(model)
    first = chain(model, tokenizer, run_seed=seed)
    first.train(index + 1)
    assert first.train(index) == chain(model, tokenizer, run_seed=seed).train(index)


def test_seeds_give_different_streams_not_shifted_ones(model: Path, tokenizer: Tokenizer) -> None:
    first_stream = questions(chain(model, tokenizer, run_seed=0, short=[12, 20]), 50)
    second_stream = questions(chain(model, tokenizer, run_seed=1, short=[12, 20]), 50)
    assert not set(first_stream) & set(second_stream)


def test_data_seed_and_run_seed_add_up(model: Path, tokenizer: Tokenizer) -> None:
    a = build_source(config_for(model, run_seed=3, source="chain_sum_tail", seed=2), tokenizer)
    assert questions(a, 5) == questions(chain(model, tokenizer, run_seed=5), 5)


@pytest.mark.parametrize(("run_seed", "eval_seed"), [(0, 999), (1, 999), (999, 999), (0, 0)])
def test_heldout_is_never_trained_on(
    model: Path, tokenizer: Tokenizer, run_seed: int, eval_seed: int
) -> None:
    source = chain(model, tokenizer, run_seed, eval_seed)
    heldout_questions = {p.entry["question"] for p in source.heldout(256)}
    assert len(heldout_questions) == 256
    assert all(is_heldout(q) for q in heldout_questions)
    assert not heldout_questions & set(questions(source, 3000))


def test_heldout_is_the_same_in_every_run_and_grows_at_its_end(model: Path, tokenizer: Tokenizer) -> None:
    few = chain(model, tokenizer, run_seed=0).heldout(16)
    assert chain(model, tokenizer, run_seed=5).heldout(64)[:16] == few
    assert chain(model, tokenizer, eval_seed=1000).heldout(16) != few


def test_chain_sum_tail_has_the_configured_share_and_lengths(model: Path, tokenizer: Tokenizer) -> None:
    source = chain(model, tokenizer, short=[3, 4], long=[9, 10], long_share=0.25)
    terms = [source.train(i).entry["metadata"]["num_terms"] for i in range(2000)]
    assert set(terms) == {3, 4, 9, 10}
    assert 0.22 < sum(t >= 9 for t in terms) / len(terms) < 0.28


def test_a_task_with_too_few_held_out_problems_is_rejected(model: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="different held-out problems"):
        chain(model, tokenizer, short=[2, 2], long_share=0).heldout(500)
    few = chain(model, tokenizer, short=[2, 2], long_share=0)
    assert 0 < len(draw_heldout(few, None)) < 128


def test_stable_hash_is_the_same_in_every_process() -> None:
    assert stable_hash("split", "1+2") == 1833956227
    assert 0 <= stable_hash("x", bits=4) < 16


# --- configuration mistakes ---


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"source": "chain_sum_tial"},
            "data.source = 'chain_sum_tial': unknown name; did you mean chain_sum_tail?",
        ),
        (
            {"source": "zzz"},
            "unknown name; known: chain_sum_faults, chain_sum_tail, dataset, environment, jsonl, mixture",
        ),
        ({"source": "no_such_package.x:f"}, "cannot import no_such_package.x"),
        ({"source": "rlsys.data.source:nothing"}, "rlsys.data.source has no function 'nothing'"),
        ({"params": {"shrt": [3, 6]}}, "data.params.shrt: unknown key; did you mean short?"),
        (
            {"params": {"long_share": 2}},
            "data.params.long_share = 2: expected at most 1",
        ),
        ({"params": {"long": [20, 12]}}, "long = [20, 12]: expected the smaller number first"),
        ({"source": "reasoning_gym"}, "data.params.task: missing"),
        ({"source": "reasoning_gym", "params": {"task": "chain_some"}}, "reasoning-gym task 'chain_some'"),
        (
            {"source": "reasoning_gym", "params": {"task": "chain_sum", "args": {"min_terms": -1}}},
            "reasoning-gym task 'chain_sum' with {\"min_terms\": -1}",
        ),
        ({"source": "jsonl", "params": {"path": "/no/such/file"}}, "/no/such/file: cannot read"),
        (
            {"source": f"{__name__}:plain_source", "params": {"siez": 3}},
            "got an unexpected keyword argument 'siez'",
        ),
    ],
)
def test_mistakes_are_one_clear_line(
    model: Path, tokenizer: Tokenizer, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        build_source(config_for(model, **data), tokenizer)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- other sources ---


def plain_source(config: Config, tokenizer: Tokenizer, size: int = 1) -> str:
    return f"{size} prompts for {config.model.path.name}"


@pytest.mark.parametrize("path", [":foo", ".a:x", "..x:foo", "no_such_module:x"])
def test_an_invalid_import_path_is_rejected(path: str) -> None:
    with pytest.raises(UserError, match=r"data\.source = .*cannot import"):
        resolve("data.source", path, {})


def test_a_source_by_import_path(model: Path, tokenizer: Tokenizer) -> None:
    config = config_for(model, source=f"{__name__}:plain_source", params={"size": 4})
    assert build_source(config, tokenizer) == f"4 prompts for {model.name}"


def test_any_reasoning_gym_task(model: Path, tokenizer: Tokenizer) -> None:
    params = {"task": "simple_equations", "size": 100, "instruction": "Say x."}
    source = build_source(config_for(model, source="reasoning_gym", params=params), tokenizer)
    prompt = source.train(250)
    assert prompt.entry["metadata"]["source_dataset"] == "simple_equations"
    assert prompt.text == f"<bos><user>{prompt.entry['question']}\nSay x.<assistant><think>"
    assert not {p.text for p in source.heldout(32)} & {source.train(i).text for i in range(200)}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    return path


def test_jsonl_splits_shuffles_and_starts_over(model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(80)]
    path = str(write_rows(tmp_path / "sums.jsonl", rows))
    source = build_source(config_for(model, source="jsonl", params={"path": path}), tokenizer)
    heldout_prompts = source.heldout(3)
    with pytest.raises(
        UserError,
        match=r"eval\.prompts = 81: of 80 rows \(.*sums\.jsonl:1 on\) \d+ different prompts are held out",
    ):
        source.heldout(81)
    size = 80 - sum(is_heldout(json.dumps(r["prompt"])) for r in rows)
    epochs = [[source.train(e * size + i).entry["answer"] for i in range(size)] for e in range(2)]
    assert len(set(epochs[0])) == size and sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert not {p.entry["answer"] for p in heldout_prompts} & set(epochs[0])


def test_jsonl_held_out_rows_are_excluded_from_training(
    model: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    chats = [{"messages": [{"role": "user", "content": f"{i}="}], "answer": i} for i in range(6)]
    params = {
        "path": str(write_rows(tmp_path / "a.jsonl", chats)),
        "heldout_path": str(write_rows(tmp_path / "b.jsonl", chats[:2])),
    }
    source = build_source(config_for(model, source="jsonl", params=params), tokenizer)
    assert [p.text for p in source.heldout(2)] == [
        "<bos><user>0=<assistant><think>",
        "<bos><user>1=<assistant><think>",
    ]
    assert sorted(source.train(i).entry["answer"] for i in range(4)) == [2, 3, 4, 5]


def test_heldout_rows_may_have_keys_and_a_format_of_their_own(
    model: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    heldout = tmp_path / "held.parquet"
    pq.write_table(
        pa.Table.from_pylist([{"text": "3=", "right": "3"}, {"text": "9=", "right": "9"}]), heldout
    )
    rows = [{"prompt": f"{i}=", "answer": i} for i in range(6)]
    params = {
        "path": str(write_rows(tmp_path / "a.jsonl", rows)), "heldout_path": str(heldout),
        "heldout_keys": {"prompt": "text", "answer": "right"},
    }  # fmt: skip
    source = build_source(config_for(model, source="jsonl", params=params), tokenizer)
    assert [p.entry["answer"] for p in source.heldout(2)] == ["3", "9"]
    assert sorted(source.train(i).entry["answer"] for i in range(5)) == [0, 1, 2, 4, 5]
    assert isinstance(source, RowSource)
    counts = row_counts(source, ANY_ENGINE)
    assert counts is not None and counts.rows == 8 and not any(counts.counts.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows; expected at least one"),
        ('{"prompt": "a"}\n{', "bad.jsonl:2: not JSON"),
        ('{"question": "a"}', "bad.jsonl:1: expected"),
    ],
)
def test_jsonl_mistakes_name_the_line(
    model: Path, tokenizer: Tokenizer, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        build_source(config_for(model, source="jsonl", params={"path": str(path)}), tokenizer)


# --- traces ---


def sft_config(model: Path, steps: int = 100, **params: Any) -> Config:
    sections = {"model": {"path": model}, "trainer": {"steps": steps}, "sft": {"params": params}}
    return Config.model_validate(sections)


def texts(tokenizer: Tokenizer, batch: list[Trace]) -> list[tuple[str, str]]:
    return [(tokenizer.decode(t.prompt_ids), tokenizer.decode(t.response_ids)) for t in batch]


def test_working_is_line_by_line() -> None:
    assert working("4-1-7+2") == "4-1=3\n3-7=-4\n-4+2=-2"
    assert working("0-9+0") == "0-9=-9\n-9+0=-9"


def test_traces_have_full_reward_and_are_not_held_out(model: Path, tokenizer: Tokenizer) -> None:
    config = sft_config(model)
    verifier = make_score(config)
    batches = list(trace_batches(config, tokenizer))
    assert len(batches) == 100
    for prompt, text in texts(tokenizer, batches[0] + batches[99]):
        sum_text = prompt.removeprefix("<bos><user>").removesuffix("=<assistant><think>")
        spaced = sum_text.replace("+", " + ").replace("-", " - ")
        question = f"State the final answer to the following arithmetic problem: {spaced} ="
        entry = {"answer": str(sum(terms(sum_text))), "metadata": {"source_dataset": "chain_sum"}}
        assert verifier(Prompt(0, prompt, [], entry), response_of(text)) == 1
        assert not is_heldout(question)


def test_trace_batches_increase_terms_then_add_direct_guesses(model: Path, tokenizer: Tokenizer) -> None:
    batches = [texts(tokenizer, b) for b in trace_batches(sft_config(model, worked=32), tokenizer)]

    def most_terms(batch: list[tuple[str, str]]) -> int:
        return max(len(re.findall(r"\d", prompt)) for prompt, _ in batch)

    assert most_terms(batches[0]) == 7
    assert all(most_terms(b) <= 14 for b in batches[:20])
    assert max(most_terms(b) for b in batches[40:]) == 20
    guesses = [sum(text.startswith("</think>") for _, text in b) for b in batches]
    assert guesses[:90] == [0] * 90
    assert guesses[90:] == [96] * 10
    assert [len(b) for b in batches[88:92]] == [32, 32, 128, 128]


def test_trace_batches_start_in_the_middle(model: Path, tokenizer: Tokenizer) -> None:
    config = sft_config(model, steps=10, worked=4)
    assert list(trace_batches(config, tokenizer, start=7)) == list(trace_batches(config, tokenizer))[7:]


@pytest.mark.parametrize(
    ("sft", "message"),
    [
        ({"traces": "chain_some"}, "sft.traces = 'chain_some': unknown name; did you mean chain_sum?"),
        ({"params": {"work": 3}}, "sft.params.work: unknown key; did you mean worked?"),
        ({"params": {"guess_share": 1}}, "sft.params.guess_share = 1: expected less than 1"),
    ],
)
def test_trace_mistakes(model: Path, tokenizer: Tokenizer, sft: dict[str, Any], message: str) -> None:
    config = Config.model_validate({"model": {"path": model}, "sft": sft})
    with pytest.raises(UserError) as caught:
        trace_batches(config, tokenizer)
    assert message in str(caught.value)


# --- the shipped model ---


def test_the_shipped_model_matches_the_output_of_the_command(model: Path) -> None:
    shipped = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"
    assert sum(f.stat().st_size for f in shipped.iterdir()) < 4_000_000
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (shipped / name).read_text() == (model / name).read_text()
    model_tensors, shipped_tensors = (load_file(folder / "model.safetensors") for folder in (model, shipped))
    assert {k: (v.shape, v.dtype) for k, v in shipped_tensors.items()} == {
        k: (v.shape, v.dtype) for k, v in model_tensors.items()
    }
    assert sum(v.size for v in shipped_tensors.values()) == 774_208


QUICKSTART = Path(__file__).resolve().parents[3] / "configs/quickstart.yaml"


def test_every_held_out_prompt_of_an_evaluation_is_checked_before_a_run(tmp_path: Path) -> None:
    """A run ends at its first evaluation if the data hold out fewer, however many that are."""
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(3000)]
    path = write_rows(tmp_path / "sums.jsonl", rows)
    data = f"data={{source: jsonl, params: {{path: {path}}}, reward: exact_answer}}"
    many = load_config(QUICKSTART, [data, "eval.prompts=600"])
    count = heldout_count(many)
    assert count is not None and 256 < count < 600
    with pytest.raises(UserError, match=rf"eval\.prompts = 600: .*expected at most {count}, more rows, or"):
        build_inputs(many)
    assert build_inputs(load_config(QUICKSTART, [data, f"eval.prompts={count}"])) is not None


def test_default_evaluation_uses_all_held_out_prompts_of_a_small_file(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "sums.jsonl", [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(3000)])
    few = write_rows(tmp_path / "few.jsonl", [{"prompt": f"{i}+2=", "answer": i + 2} for i in range(58)])
    for params, count in ((f"path: {rows}, heldout_path: {few}", 58), (f"path: {rows}", 128)):
        config = load_config(
            QUICKSTART, [f"data={{source: jsonl, params: {{{params}}}, reward: exact_answer}}"]
        )
        assert config.eval.prompts is None
        inputs = build_inputs(config)
        assert inputs is not None
        assert len(draw_heldout(inputs[1], None)) == len(eval_items(inputs[1], config.eval.prompts)) == count


def test_default_evaluation_of_a_mixture_is_limited_by_its_smallest_source(tmp_path: Path) -> None:
    """An explicit number beyond that is refused; without one, the largest number that each part has its share of."""
    few = write_rows(tmp_path / "few.jsonl", [{"prompt": f"{i}+2=", "answer": i + 2} for i in range(80)])
    sources = f"[{{source: jsonl, params: {{path: {few}}}}}, {{source: chain_sum_tail}}]"
    data = f"data={{source: mixture, params: {{sources: {sources}}}, reward: exact_answer}}"
    config = load_config(QUICKSTART, [data])
    inputs = build_inputs(config)
    assert inputs is not None
    prompts = draw_heldout(inputs[1], None)
    assert 8 <= len(prompts) < 128 and prompts == inputs[1].heldout(len(prompts))
    with pytest.raises(
        UserError, match=r"eval\.prompts = 128: \d+ of them are of data\.params\.sources\[0\]"
    ):
        draw_heldout(inputs[1], 128)
