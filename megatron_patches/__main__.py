"""Print all patches with their reasons, and apply those that this host needs to the installed megatron-core."""

import importlib
import importlib.metadata
import sys
import textwrap

import megatron_patches
from megatron_patches import cpu_import


def main() -> None:
    megatron_patches.apply()
    core = importlib.import_module("megatron.core")
    print(f"megatron-core {core.__version__}")
    for patch in megatron_patches.PATCHES:
        state = "not needed here"
        if patch in megatron_patches.active():
            importlib.import_module(patch.module)
            state = "applied"
        print(f"\n{patch.name}: {state}\n  target  {patch.module}\n  when    {patch.when}")
        print(textwrap.indent((sys.modules[patch.edit.__module__].__doc__ or "").strip(), "  | "))
    importlib.import_module("megatron.core.models.gpt")
    importlib.import_module("megatron.core.optimizer")
    totals: dict[str, int] = {}
    for counts in cpu_import.CpuLoader.rewritten.values():
        for kind, count in counts.items():
            totals[kind] = totals.get(kind, 0) + count
    print(f"\ncpu_import: {len(cpu_import.CpuLoader.rewritten)} modules rewritten")
    for kind, count in sorted(totals.items()):
        print(f"  {count:4} x {kind}")


if __name__ == "__main__":
    main()
