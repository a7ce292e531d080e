"""Generator of docs/algorithms.md: the general rules, and one short section for each plug-in."""

from __future__ import annotations

from rlsys.algo.catalogue import entries, recipes
from rlsys.algo.plugin import EVIDENCE, NEEDS
from rlsys.algo.registry import KINDS

INTRO = """# Algorithms

This file is made by `python -m rlsys.algo.handbook > docs/algorithms.md` from the plug-ins themselves.
`rlsys algo show NAME` prints one of them. Each method has a recipe in `configs/algorithms/`; losses on compared
answers have theirs in `configs/preferences/`, and those of fine-tuning in `configs/imitation/`; [sft.md](sft.md) says
how they are trained.

An algorithm is put together from small plug-ins, one kind for each decision. In the config:

```yaml
algo:
  advantage: grpo                       # a short name, package.module:attribute, or path/to/file.py:attribute
  loss: [clip, {name: kl, beta: 0.001}] # terms are added; parameters stand beside the name
  reducer: token_mean
  anchor: old                           # the log-probs that ratios are taken against
  corrections: [{name: tis, cap: 2.0}]  # all are applied; weights and rejections are kept apart
  selectors: []
  shaping: []
  hooks: []
  planners: [dapo]                      # this one, prompt and group_reward act in the rollout process
```

In Python: `rlsys.algo.build("loss", "clip", clip_low=0.2)`.

## A plug-in of your own

A function with the signature of its kind is a plug-in; so is a subclass of the kind's base class (the table `KINDS`
in `rlsys/algo/registry.py`). Name it in the config by its file or import path, and try it with
`rlsys algo check path/to/file.py:name --kind loss`. `examples/own_loss.py` is a loss. A plug-in for everybody needs
a line in the table of `rlsys/algo/registry.py`, a recipe in `configs/algorithms/` and a unit test with numbers
worked out by hand.

Evidence says how a formula was found: {evidence}. Every built-in plug-in states its own; yours is `own` if it
states nothing. A run that uses a method known only as `N` or `A` says so when it starts.

## Three rules

1. A bound, a mask or a scale is computed from all tokens of the update. A plug-in gets a `Reduce` that sums over
   data-parallel ranks, and whole sequences under context parallelism. So loss, gradients and metrics are the same
   for every layout: within 1e-6 in float64, for every recipe and every single plug-in, on one process, two
   data-parallel and two context-parallel ranks (tests/unit/algo/test_algo_parallel.py).
2. The denominator is fixed before anything is masked or dropped, so a rejection never gives the others more weight.
   It counts all samples of the step, also those with advantage 0; with `over: active` only those with another
   advantage, if there are any. Samples that a selector drops before the advantages do not count. `d3s`, and
   `overlong_filter` with `denominator: kept`, are the exceptions: their loss is a mean over what they keep, and of
   both together over what both keep (`denominator: all` makes them follow the rule).
3. A token counts in a statistic of the update (a pool, a budget, a mean weight, a whitening, a metric) if and only if
   its weight is not 0 (`Batch.counted_tokens`): not when a selector dropped it or its sample, whatever else made it
   necessary to pack it. Group baselines are of all samples that such selectors leave. An update without a token
   that has a gradient is not made.

Selectors act in order, each on what those before it leave. Ties, as between equal rewards, are broken by draws that
follow from a seed, the step and the sample's id, never by the order in which groups finished: that goes with their
length. Rewards of a group that differ by at most a millionth of its largest are equal.

Where a sample has several sequences, the ratio of a response (gspo, luspo, gmpo, vespo, topr) is over all of them;
corrections at the level `sequence` are of one sequence, and to `gae` each is an episode. A correction multiplies a
term with a ratio to the anchor by exp(anchor - mu), one without (reinforce, dro) by exp(logp - mu).

## The signals a plug-in may need

A run collects exactly the signals that its plug-ins ask for. One that nothing can serve is refused before the
start.

"""

SIGNALS_TEXT = """
### How they are served

**`old`, `current`, `entropy`, `values`** come from one forward pass of the trainer before the first update of a step.
There is no such pass where the training pass computes the same: for the first update of a step, if no plug-in needs
log-probs before its backward pass ([trainer.md](trainer.md), "Log-prob passes"; `rlsys explain` prints the passes).

**`ref` and `ewma`** need a pass with other weights. Each keeps one more copy of a rank's weights in memory, and a
second one during the pass. With router replay `ewma` takes the policy's experts, `ref` its own.

**`behaviour`** is exact `old` for interrupted samples. Between a take and the update, the trainer scores what its
current weights sampled of the unfinished samples, and the rollout process stores that beside their tokens. It needs
colocated engines; `time_score` in metrics.jsonl is its cost. A run with interrupted samples should take its ratios
against it, and `configs/experiments/` do (the disaggregated ones use `interpolated`). The quickstart keeps
`anchor: mu`: in float32 every push is checked to a mean difference of at most 1e-6 between the engine's and the
trainer's log-probs, so mu is exact.

**`values`** come from a linear head on the policy's trunk, whose loss changes the trunk too; or, with
`algo.critic`, from a second model of the policy's architecture and layout, with its own optimizer and learning
rate. That takes as much memory as the policy, and its own forward and backward passes. In its first `warmup_steps`
steps it learns alone.

**`answers`** are the texts of the last `<answer>`. **`tool_penalty`**: a tool's answer is an error when one of its
lines begins with `error`, as the calculator's do; answers are those of `<answer>`.

**`verdicts`** come from `data.judge`: a generative reward model behind an OpenAI-compatible URL (for example
`rlsys router`), the run's own engines, or a rule. It sees the problem's `answer` if there is one. `judge_hung` and
`judge_failed` count questions without a verdict.

**Several named rewards**: `data.reward` returns a dictionary; `gdpo` sees each of them.

**`prompt_scores`**: when a group is done, the engine that serves it and the one that `engine.reference` names score
its prompt. Special tokens are never removed. **`transferred`**: a sample keeps the prompt that it was drawn from
and is trained on its group's. It is left out of `mismatch_mean` and has no experts to replay.

## Several passes, early passes, and ReMax

With `algo.epochs` above 1 a step goes over its mini-batches several times, in the same order. Packing, scores and
advantages are those of the first time; only `current` is scored again before each further update, where it is needed.
Ratios are still taken against the start of the step, so they move further from 1 and the clip acts more often. No
token becomes older: there is one push a step. Checkpoints lie between steps, and the order follows from (run.seed,
step), so a resumed run is the same. The extra update of samples that a selector deferred is made once.

With `trainer.early_backward` (FlexMARL's micro-batch pipeline; its code was not read) finished groups go backward
as soon as they fill a micro-batch of every rank, while the rest of the step is still generated. The weights stay,
gradients add up, and one update divides them by the whole step's denominator, so the step is the same but for the
order of its sums. It needs disaggregated engines and an algorithm that does not look at a whole step
(`Requirements.needs_whole_step`): no selector, no hook, no bound over the mini-batch, and advantages of each group by
itself. `early_share` and `time_early` say how much was hidden; a repeated step gets the same early groups again.

ReMax is not here. Its baseline is the reward of a greedy response, one more per prompt, which is never trained.
`rloo` makes its baseline from samples that are trained, with less variance for the same tokens. And a greedy sample
in a group would need a temperature of its own in every request, resume and repeat.
"""

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
    """Render the whole page: the rules, one table, the sections."""
    evidence = ", ".join(f"{key} = {text}" for key, text in EVIDENCE.items())
    lines = [INTRO.replace("{evidence}", evidence).rstrip("\n"), ""]
    lines += [f"- `{name}`: {text}" for name, text in NEEDS.items()]
    lines += [SIGNALS_TEXT.rstrip("\n"), MEASURED.rstrip("\n")]
    lines += [
        "",
        "## All plug-ins",
        "",
        "| kind | name | stage | needs | paper | evidence | config |",
        "|---|---|---|---|---|---|---|",
    ]
    recipe_of = recipes()
    for e in entries():
        needs = ", ".join(f"`{n}`" for n in e.needs)
        recipe = recipe_of.get((e.kind, e.name))
        config = f"[{recipe.partition('/')[2]}](../configs/{recipe}.yaml)" if recipe else ""
        name = f"[`{e.name}`](#{e.kind}-{e.name})"
        lines.append(f"| {e.kind} | {name} | {e.stage} | {needs} | {e.paper} | {e.evidence} | {config} |")
    for kind, (_, purpose) in KINDS.items():
        lines += ["", f"## Kind {kind}: {purpose}"]
        for e in (e for e in entries() if e.kind == kind):
            lines += ["", f"### {e.kind} {e.name}", "", e.doc]
            lines += [""] if e.fields else []
            lines += [
                f"- `{field}` ({values}, default `{default}`): {text}"
                for field, values, default, text in e.fields
            ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_docs(), end="")
