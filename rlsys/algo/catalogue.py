"""What `rlsys algo list` and `rlsys algo show NAME` print. Imports the plug-ins when asked, not before."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from rlsys.algo.plugin import EVIDENCE, NEEDS, evidence_of
from rlsys.algo.registry import KINDS, SECTION_KINDS, TABLE, load
from rlsys.algo_section import AlgoSection, Spec
from rlsys.config import read_layers
from rlsys.errors import UserError
from rlsys.shipped import folder

RECIPES = folder() / "algorithms"

STAGES = {
    "prompt": "control",
    "planner": "control",
    "group_reward": "filter",
    "shaping": "filter",
    "advantage": "advantage",
    "selector": "filter",
    "correction": "correction",
    "loss": "policy loss",
    "reducer": "policy loss",
    "hook": "optimizer",
}
"""Kind -> where its plug-ins act: a stage before the trainer (generate, filter, control, replay), or within it."""
OTHER_STAGES = {
    ("prompt", "prompt_augmentation"): "generate",
    ("planner", "dapo"): "filter",
    ("planner", "mc_grpo"): "generate",
    ("planner", "grpo_roc"): "generate",
    ("planner", "ttrl"): "generate",
    ("planner", "lens"): "generate",
    ("selector", "rorecomp"): "filter, replay",
    ("advantage", "outcome_exploration"): "advantage, replay",
    ("hook", "ewma"): "correction",
    ("hook", "sync_ref"): "policy loss",
}
"""Those that act elsewhere than others of their kind."""


@dataclass(frozen=True)
class Entry:
    """One plug-in. `fields` are (name, type, default, sentence)."""

    kind: str
    name: str
    line: str
    doc: str
    paper: str
    evidence: str
    stage: str
    needs: tuple[str, ...]
    fields: tuple[tuple[str, str, str, str], ...]


def entries() -> list[Entry]:
    """Every built-in plug-in, by kind in the order in which a sample meets them."""
    return [_entry(kind, name, path) for kind in KINDS for name, path in TABLE[kind].items()]


def find(name: str) -> list[Entry]:
    """The plug-ins of this short name, one per kind that has it. Raises UserError when there is none."""
    found = [_entry(kind, name, TABLE[kind][name]) for kind in KINDS if name in TABLE[kind]]
    if not found:
        known = sorted({n for names in TABLE.values() for n in names})
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise UserError(f"no algorithm {name!r}; {hint}")
    return found


def _entry(kind: str, name: str, path: str) -> Entry:
    plugin: Any = load(kind, path)
    doc = inspect.cleandoc(plugin.__doc__ or "")
    return Entry(
        kind=kind,
        name=name,
        line=doc.splitlines()[0],
        doc=doc,
        paper=plugin.paper,
        evidence=evidence_of(plugin),
        stage=OTHER_STAGES.get((kind, name), STAGES[kind]),
        needs=tuple(sorted(plugin().needs())),
        fields=tuple(
            (field, _type_name(info.annotation), repr(info.default), info.description or "")
            for field, info in plugin.model_fields.items()
        ),
    )


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:  # its bounds are for the check
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(_type_name, get_args(annotation)))
    if annotation is NoneType:
        return "None"
    plain = isinstance(annotation, type) and not get_args(annotation)
    return annotation.__name__ if plain else str(annotation).replace("typing.", "")


def render_list() -> str:
    """All plug-ins: one line each, then its parameters."""
    lines = []
    for kind, (_, what) in KINDS.items():
        lines.append(f"{kind}: {what}")
        for entry in (e for e in entries() if e.kind == kind):
            lines.append(f"  {entry.name:22} {entry.line}")
            source = f"{entry.paper} [{entry.evidence}]" if entry.paper else f"[{entry.evidence}]"
            lines.append(f"  {'':22} {source}")
            if entry.fields:
                fields = ", ".join(f"{name}={default}" for name, _, default, _ in entry.fields)
                lines += textwrap.wrap(
                    fields, 110, initial_indent=" " * 25, subsequent_indent=" " * 27, break_long_words=False
                )
    return "\n".join(lines)


def render_show(name: str) -> str:
    """Everything about one name. Raises UserError for an unknown one."""
    blocks = []
    for e in find(name):
        lines = [f"{e.kind}: {e.name}", "", e.doc, "", f"paper:    {e.paper or '-'}"]
        lines += [f"evidence: {EVIDENCE[e.evidence]}", f"stage:    {e.stage}"]
        lines.append(
            f"needs:    {', '.join(e.needs) or 'nothing beyond rewards and log-probs of the engine'}"
        )
        lines += [f"  {field} ({kind}, default {default}): {text}" for field, kind, default, text in e.fields]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


INTRO = """# Algorithms

Made by `python -m rlsys.algo.catalogue > docs/algorithms.md` from the plug-ins themselves; `rlsys algo show NAME`
prints one of them. A recipe for each method is in `configs/algorithms/`.

A run's objective is put together from small plug-ins, one kind for each decision. In the config:

```yaml
algo:
  advantage: grpo                       # a short name, or an import path package.module:attribute
  loss: [clip, {name: kl, beta: 0.001}] # terms are added; parameters stand beside the name
  reducer: token_mean
  anchor: old                           # what ratios are taken against
  corrections: [{name: tis, cap: 2.0}]  # weights and rejections are kept apart, all apply
  selectors: []
  shaping: []
  hooks: []
  planners: [dapo]                      # rollout side, as are prompt and group_reward
```

In Python: `rlsys.algo.build("loss", "clip", clip_low=0.2)`. A plain function with the signature of the kind is a
plug-in too. Evidence says how the formula was found: {evidence}. Each built-in states its own; a
plug-in of yours that states none is `own`. A run that uses a method known only as `N` or `A` says so when it starts.

Where the twelve interfaces of the method catalogue are: PromptSource = `rlsys.data` and kind `prompt`; GroupPlanner =
`planner` (it filters too); Rewarder = `rlsys.rewards` and `group_reward`; Selector = `selector`, AdvantageEstimator =
`advantage` and `shaping`, Correction = `correction` and the field `anchor`, PolicyLoss + Reducer = `loss` and
`reducer`, OptimizerHook = `hook`; ReplayStore = `rlsys.algo.put_off` for what a selector puts off, the rollout buffer
for all else; RolloutScheduler and Generator belong to the rollout service and the router; PrecisionPlan is the field
`model.fp8` (rlsys.precision), never run on a GPU yet.

## Two rules

1. Whatever decides a bound, a mask or a scale is computed from all tokens of the update: a plug-in gets a `Reduce`
   that sums over data-parallel ranks, and whole sequences under context parallelism. Loss, gradients and metrics are
   the same for every cut and layout: within 1e-6 in float64, for every recipe and every plug-in by itself, on one
   process, two data-parallel and two context-parallel ranks (tests/unit/test_algo_parallel.py).
2. Denominators are fixed before anything is masked or dropped, so that a rejection never scales up what is left.
   They count all samples of the step, also those of advantage 0, whatever terms the loss has; with `over: active`
   they count those with another advantage. What a `before` selector drops was never there. One selector says
   otherwise: the loss of `d3s` is a mean over what it keeps (`denominator: all` puts it under the rule).

## The signals a plug-in may need

A run collects exactly those that its plug-ins ask for; one that nothing serves is refused before the start.

"""

SERVED = """
How they are served: `old`, `now`, `entropy` and `values` come out of one forward pass of the trainer before the
first update of a step (`values` from a linear head on the policy's own trunk; the value loss moves the trunk, too).
There is no such pass where the training pass computes the same: for the first update of a step, if nobody wants
log-probs before its backward pass ([trainer.md](trainer.md), "Log-prob passes"; `rlsys explain` tells). `ref` and
`ewma` swap the weights for a pass: each keeps one more copy of a rank's weights in memory, and a second one while
the pass lasts. With router replay `ewma` takes the policy's experts, `ref` its own. `behaviour`: between a take and
the update, the trainer scores what its resident weights sampled of the samples that are not done; the rollout
process keeps that beside their tokens (colocated engines only; `time_score` in metrics.jsonl is what it costs).
That is exact `old` by interruption, what a run with interrupted samples should take its ratios against, and what
`configs/experiments/` do (disaggregated ones: `interpolated`). The quickstart keeps `anchor: mu`: in float32 each
push is attested to a mean difference of at most 1e-6 between the engine's log-probs and the trainer's, so mu is the
exact `old` already. `answers`: the text of the last `<answer>`.
`verdicts`: `data.judge`, a generative reward model behind an OpenAI-compatible URL (`rlsys router` before its own
engines, say), the run's own engines, or a rule; it is shown the problem's `answer`, where there is one. `judge_hung`
and `judge_failed` count questions without a verdict.
Several named rewards: `data.reward` gives an object, `gdpo` sees each.
`tool_penalty`: a tool's answer is an error when one of its lines begins with `error`, as the calculator's do; answers
are those of `<answer>`.
`values`: from the head just named, or with `algo.critic` from a critic of its own: a second model of the policy's
architecture and first weights, laid out over the ranks as the policy is, with its own optimizer and rate. It learns
alone in its first `warmup_steps`. It takes as much memory as the policy, and its own forward and backward passes.
`prompt_scores`: the engine that serves and the one that `engine.reference` names score a prompt when its group is
done; special tokens stay. `transferred`: a sample keeps the prompt that it was drawn from, and is trained on its
group's; it is left out of mismatch_mean, and has no routes to replay.

With `algo.epochs` above 1 a step goes over its mini-batches several times, in the same order. Packing, passes and
advantages are those of the first; `now` is scored again before each further update, where somebody needs it. What
ratios are taken against stays that of the start of the step, so they move further from 1, and the clip acts more. No
token becomes older by it: age is counted in weight versions, and there is one push a step. Checkpoints lie between
steps, and the order follows from (run.seed, step), so a resumed run is the same. The extra update of a selector that
puts samples off is made once.

ReMax is not here, for a reason: its baseline is the reward of a greedy response, one more per prompt, which is never
trained. `rloo` makes its baseline from samples that are trained as well, with less variance for the same tokens. And
a greedy sample among a group's others would need a temperature of its own in every request, resume and repeat.

With `trainer.early_backward` (FlexMARL's micro-batch pipeline; its code was not read) finished groups go backward as
soon as they fill a micro-batch of every rank, while the rest of the step is being made: weights stay, gradients add
up, and one update divides them by the whole step's denominator, so that a step is the same but for the order of its
sums. It needs disaggregated engines and an algorithm that looks at no whole step (`Asks.needs_whole_step`): no
selector, no hook, no bound over the mini-batch, advantages of a group by itself. `early_share` and `time_early` say
how much was hidden behind the tail; a repeated step gets the same portions again.
"""


def recipes() -> dict[tuple[str, str], str]:
    """(kind, name) -> the recipe that shows it: of its own name, else the first that names it."""
    out: dict[tuple[str, str], str] = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        section = AlgoSection.model_validate(read_layers(path)["algo"])
        for field in section.model_fields_set & set(SECTION_KINDS):
            value = getattr(section, field)
            specs = value if isinstance(value, list) else [value]
            for spec in (s for s in specs if isinstance(s, Spec)):
                key = SECTION_KINDS[field], spec.name
                if spec.name == path.stem or key not in out:
                    out[key] = path.stem
    return out


MEASURED = """
## How they learn

![Held-out accuracy by train step](figures/algorithms_curves.png)

`python bench/algorithms.py --part curves` on the quickstart task with a fourth of its batch and learning rate, 24
steps, one real engine, two seeds. Staleness is forced by N'/N = 5 and 9: a group's oldest token is then 4.2 and 6.0
train steps old in the mean (2.6 at N'/N = 2). Mean accuracy over all nine evaluations, so that earlier is better:

| recipe | N'/N = 2 | N'/N = 5 | N'/N = 9 |
|---|---|---|---|
| grpo | 0.63, 0.65 | 0.62, 0.62 | 0.57, 0.62 |
| exact_old, with router replay | | 0.59, 0.65 | 0.58, 0.62 |
| vcpo | | 0.63, 0.66 | 0.62, 0.66 |
| dppo | | 0.65, 0.67 | 0.64, 0.67 |
| sapo | 0.65, 0.68 | 0.66, 0.68 | 0.65, 0.67 |
| decoupled_ppo, four updates a step | 0.84, 0.83 | 0.80, 0.84 | 0.81, 0.80 |
| bapo | 0.64, 0.65 | | |
| gspo | 0.64, 0.66 | | |
| dapo | 0.66, 0.64 | | |
| cispo | 0.67, 0.68 | | |
| tis | 0.68, 0.67 | | |
| m2po | 0.68, 0.68 | 0.65 | 0.64 |

The rows with two figures at N'/N = 5 and 9 are of 2026-11-22, the others of the day before.

- Every method learns the task; all end between 0.95 and 1.0. It is an easy one: the figure compares speed, no skill.
- At N'/N = 9 the two seeds of a recipe differ by 0.01 to 0.05. dppo and sapo are ahead of grpo by 0.05 to 0.08 with
  the first seed and by 0.05 with the second; vcpo is ahead by less; exact_old is not told apart from grpo.
- decoupled_ppo's recipe takes four optimizer updates a step, where the others take one, at the same learning rate:
  that is why it is so far ahead, and no merit of its correction. With one update it had 0.67 and 0.65 (one seed).
- At N'/N = 2, cispo, tis and m2po are ahead of grpo by some 0.03, more than the seeds differ; bapo, gspo and dapo are
  not told apart from it. Recipes differ in more than their name: some take the mean over sequences, others over
  tokens, and which of the two matters was not separated.
- One small model, one task, one learning rate for all: nothing here says what a method does at another scale.
"""


def render_docs() -> str:
    """docs/algorithms.md: the rules, one table, one short section for each plug-in."""
    evidence = ", ".join(f"{key} = {text}" for key, text in EVIDENCE.items())
    lines = [INTRO.replace("{evidence}", evidence).rstrip("\n"), ""]
    lines += [f"- `{name}`: {text}" for name, text in NEEDS.items()]
    lines += [SERVED.rstrip("\n"), MEASURED.rstrip("\n")]
    lines += [
        "",
        "## All plug-ins",
        "",
        "| kind | name | stage | needs | paper | evidence | config |",
        "|---|---|---|---|---|---|---|",
    ]
    found = recipes()
    for e in entries():
        needs = ", ".join(f"`{n}`" for n in e.needs)
        recipe = found.get((e.kind, e.name))
        config = f"[{recipe}](../configs/algorithms/{recipe}.yaml)" if recipe else ""
        name = f"[`{e.name}`](#{e.kind}-{e.name})"
        lines.append(f"| {e.kind} | {name} | {e.stage} | {needs} | {e.paper} | {e.evidence} | {config} |")
    for kind, (_, what) in KINDS.items():
        lines += ["", f"## Kind {kind}: {what}"]
        for e in (e for e in entries() if e.kind == kind):
            lines += ["", f"### {e.kind} {e.name}", "", e.doc]
            lines += [""] if e.fields else []
            lines += [f"- `{field}` (default `{default}`): {text}" for field, _, default, text in e.fields]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_docs(), end="")
