"""Writes the quickstart's model with a chat template for tools: `python examples/tools/model.py FOLDER`."""

import shutil
import sys
from pathlib import Path

QUICKSTART_MODEL = Path(__file__).resolve().parents[2] / "configs/models/quickstart-moe"
TEMPLATE = """<bos>{% for t in tools or [] %}+{{ t.function.name }}{% endfor %}{% for m in messages %}\
<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}\
<tool_call>\\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\\n</tool_call>\
{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""


def write_model(folder: Path) -> None:
    """Copy the quickstart's model to `folder`, and replace its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in QUICKSTART_MODEL.iterdir():
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("\\n", "{{ '\\n' }}"))


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
