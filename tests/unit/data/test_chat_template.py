"""Chat templates as transformers renders them, with tools and other arguments; stop texts; what sampling refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.types import Status
from rlsys.data import Tokenizer, build_source
from rlsys.data.quickstart_model import write_model
from rlsys.rewards import Rewards
from rlsys.router.turn_ends import turn_ends
from rlsys.worker.assembly import build_scorer
from tests.helpers.responses import sample_of

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"b": 1, "a": "ä<'"}}}]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+2=  "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n3", "tool_calls": [{"arguments": {"a": 1}}]},
    {"role": "tool", "content": "3"},
    {"role": "user", "content": "and 4?"},
]  # fmt: skip
TEMPLATES = {
    "thinking": (
        "{%- for m in messages %}\n"
        "    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
        "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
        "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}"
    ),
    "tools": (
        "{{ bos_token }}{% if tools %}{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}"
        "{{ t | tojson(sort_keys=True, separators=(',', ':')) }}{% endfor %}{% else %}none{% endif %}"
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.arguments | tojson }}"
        "{% endfor %}{% endif %}{% if loop.index > 4 %}{% break %}{% endif %}{{ m.content | trim }}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}\n{{ m.content }}{% endgeneration %}"
        "{% else %}[{{ m.role }}]{{ m.content }}\n{% endif %}{% endfor %}"
        "{% set ns = namespace(last=messages[-1]) %}{{ ns.last.content.split('?')[0] }}{{ custom | default('x') }}"
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


def with_template(model: Path, folder: Path, template: str) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize(
    ("template", "tools", "args"),
    [
        ("thinking", None, {}),
        ("thinking", None, {"enable_thinking": False}),
        ("thinking", None, {"enable_thinking": True}),
        ("tools", None, {}),
        ("tools", TOOLS, {}),
        ("generation", TOOLS, {"custom": "y"}),
    ],
)
@pytest.mark.parametrize("generate", [True, False])
def test_a_template_renders_as_in_transformers(
    model: Path, tmp_path: Path, template: str, tools: Any, args: dict[str, Any], generate: bool
) -> None:
    folder = with_template(model, tmp_path, TEMPLATES[template])
    rlsys_prompt = Tokenizer(folder, args).apply_chat(CHAT, generate=generate, tools=tools)
    hf_prompts, _ = render_jinja_template(
        [CHAT],
        tools,
        chat_template=TEMPLATES[template],
        add_generation_prompt=generate,
        bos_token="<bos>",
        **args,
    )
    assert rlsys_prompt == hf_prompts[0]


def test_tools_of_a_row_take_precedence_over_those_of_the_config(model: Path, tmp_path: Path) -> None:
    folder = with_template(
        model, tmp_path, "{% for t in tools or [] %}{{ t.name }},{% endfor %}{{ messages[0].content }}"
    )
    rows = [{"prompt": f"{i}", "tools": json.dumps([{"name": "own"}]) if i % 2 else None} for i in range(24)]
    (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "source": "jsonl",
        "params": {"path": str(tmp_path / "rows")},
        "chat_template_args": {"tools": [{"name": "all"}]},
    }
    config = Config.model_validate({"model": {"path": folder}, "data": data})
    source = build_source(config, Tokenizer(folder, config.data.chat_template_args))
    texts = {source.train(i).text for i in range(12)}
    assert all(t == f"{'own' if int(t.split(',')[1]) % 2 else 'all'},{t.split(',')[1]}" for t in texts)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"enable_thinkin": False}, "does not use it; did you mean enable_thinking?"),
        ({"budget": 3}, "does not use it; it uses enable_thinking"),
    ],
)
def test_an_argument_unused_by_the_template_is_rejected(
    model: Path, tmp_path: Path, args: dict[str, Any], message: str
) -> None:
    folder = with_template(model, tmp_path, TEMPLATES["thinking"])
    with pytest.raises(UserError, match=rf"data\.chat_template_args\.{next(iter(args))}: .*{message}"):
        Tokenizer(folder, args).apply_chat(CHAT)


def test_a_template_that_cannot_take_a_message_is_one_line(model: Path, tmp_path: Path) -> None:
    folder = with_template(model, tmp_path, "{{ messages[0].content + 3 }}")
    with pytest.raises(UserError, match="the chat template refuses the messages"):
        Tokenizer(folder).apply_chat(CHAT)


async def test_a_stop_text_ends_a_response_and_leaves_its_answer(model: Path) -> None:
    config = Config.model_validate(
        {"model": {"path": model}, "rollout": {"stop": ["</answer>"]}, "data": {"reward": "exact_answer"}}
    )
    tokenizer = Tokenizer(model)
    ends = turn_ends(config, tokenizer)
    assert (ends.ids, ends.texts) == ({tokenizer.eos_id}, ("</answer>",))
    rewards = Rewards(config)
    try:
        scorer = build_scorer(config, rewards, tokenizer)
        prompt = build_prompt(tokenizer)
        for text, reward in (("<answer>3</answer>", 1), ("<answer>3</answer><eos>", 1), ("<answer>3", 0)):
            ids = tokenizer.encode(text)
            status = Status.FINISHED if ends.is_ended(ids) else Status.TRUNCATED
            assert (await scorer.score(prompt, sample_of(ids, status))).reward == reward
    finally:
        await rewards.close()


def build_prompt(tokenizer: Tokenizer) -> Any:
    from rlsys.core.types import Prompt

    return Prompt(0, "", tokenizer.encode("1+2="), {"answer": "3"})
