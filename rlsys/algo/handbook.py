"""Generator of docs/algorithms.md: rules for all algorithms, signals, measurements, a section for each plug-in."""

from __future__ import annotations

from rlsys.algo.catalogue import entries, recipes
from rlsys.algo.plugin import EVIDENCE, NEEDS
from rlsys.algo.registry import KINDS

INTRO = """# Algorithms

`python -m rlsys.algo.handbook > docs/algorithms.md` generates this file from the plug-ins. `rlsys algo show NAME`
prints the section of one plug-in. Each method has a recipe in `configs/algorithms/`. For `rlsys sft`
([sft.md](sft.md)), recipes of losses on pairs of answers are in `configs/preferences/`, and recipes of other losses
are in `configs/imitation/`.

An algorithm consists of plug-ins, one kind for each decision. In the config:

```yaml
algo:
  advantage: grpo                       # a short name, package.module:attribute, or path/to/file.py:attribute
  loss: [clip, {name: kl, beta: 0.001}] # terms are added; parameters follow the name
  reducer: token_mean
  anchor: old                           # log-probs in the denominator of ratios
  corrections: [{name: tis, cap: 2.0}]  # all apply; weights and rejections are separate
  selectors: []
  shaping: []
  hooks: []
  planners: [dapo]                      # planners, prompt and group_reward run in the rollout process
```

In Python: `rlsys.algo.build("loss", "clip", clip_low=0.2)`.

## Custom plug-ins

A plug-in is a function with the signature of its kind, or a subclass of the kind's base class (the table `KINDS` in
`rlsys/algo/registry.py`). Name it in the config by its file or import path, and test it with
`rlsys algo check path/to/file.py:name --kind loss`. `examples/own_loss.py` is an example of a loss. A built-in
plug-in needs a line in the table of `rlsys/algo/registry.py`, a recipe in `configs/algorithms/` and a unit test with
numbers computed by hand.

`evidence` is the source of a formula: {evidence}. Every built-in plug-in has one; for custom plug-ins the default is
`own`. A run that uses a method with evidence `N` or `A` reports this at its start.

## Three rules

1. A bound, a mask or a scale is a function of all tokens of the update. A plug-in receives a `Reduce`, which sums
   over data-parallel ranks, and receives whole sequences even with context parallelism. Loss, gradients and metrics
   are therefore the same for every layout: within 1e-6 in float64, for every recipe and every single plug-in, on one
   process, two data-parallel and two context-parallel ranks (tests/unit/algo/test_algo_parallel.py).
2. The denominator is fixed before any token is masked or dropped, so a rejection never increases the weight of other
   tokens. It counts all samples of the step, including those with advantage 0. With `over: active` it counts only
   samples with a nonzero advantage, if any exist. Samples that a selector drops before the advantages do not count.
   The exceptions are `d3s`, and `overlong_filter` with `denominator: kept`: the loss is then a mean over the tokens
   that all such selectors keep. With `denominator: all` they follow the rule.
3. A token counts in a statistic of the update (a pool, a budget, a mean weight, a whitening, a metric) if and only if
   its weight is not 0 (`Batch.counted_tokens`). The weight is 0 if a selector drops the token or its sample. Such a
   token does not count even if it is packed for another reason. Selectors that act before the advantages also exclude
   samples from group baselines. An update in which no token has a gradient is skipped.

Selectors act in order, each on the samples that its predecessors keep. Ties, for example between equal rewards, are
resolved by random numbers that depend on a seed, the step and the sample's id. They do not depend on the order in
which groups finish, because that order depends on response lengths. Rewards of a group are equal if they differ by at
most a millionth of the group's largest reward.

If a sample has several sequences, losses with one ratio per response (gspo, luspo, gmpo, vespo, topr) compute it over
all sequences. Corrections at the level `sequence` use the token's own sequence, and `gae` treats each sequence as an
episode. A correction multiplies a loss term with a ratio to the anchor by exp(anchor - mu), and a term without such a
ratio (reinforce, dro) by exp(logp - mu).

## Signals

A run collects exactly the signals that its plug-ins require. If a required signal is not available, the run reports
an error before its start.

"""

SIGNALS_TEXT = """
### Sources of the signals

**`old`, `current`, `entropy`, `values`** come from one forward pass of the trainer before the first update of a step.
The trainer omits this pass for the first update of a step if no plug-in needs log-probs before the update's backward
pass; the training pass then provides the same values ([trainer.md](trainer.md), "Log-prob passes"). `rlsys explain`
prints the passes.

**`ref` and `ewma`** need a pass with other weights. Each needs one more copy of a rank's weights in memory, and a
second one during the pass. With router replay, the pass of `ewma` uses the policy's experts, and the pass of `ref`
chooses its own.

**`behaviour`** is the exact `old` of interrupted samples. Before each update the trainer scores the tokens of
unfinished samples that its current weights sampled, and the rollout process stores the scores with the tokens. This
needs colocated engines; the metric `time_score` is its duration. [Which anchor?](rollout.md#which-anchor) lists the
choice for each kind of run.

**`values`** come from a linear head on the policy's trunk; its loss also changes the trunk. With `algo.critic`, they
come from a second model of the policy's architecture and layout, with its own optimizer and learning rate. This model
needs as much memory as the policy, and its own forward and backward passes. In the first `warmup_steps` steps only
the critic is trained.

**`answers`** are the texts of the last `<answer>`. **`tool_penalty`** counts a tool call as failed if a line of its
result begins with `error`, as in the calculator's results, and counts the `<answer>` elements of the response.

**`verdicts`** come from `data.judge`: a generative reward model behind an OpenAI-compatible URL (for example
`rlsys router`), the run's own engines, or a rule. The judge receives the problem's `answer` if there is one. The
metrics `judge_hung` and `judge_failed` count questions without a verdict.

**Several named rewards** come from a `data.reward` that returns a dictionary; `gdpo` uses each of them.

**`prompt_scores`** come from the group's engine and the engine `engine.reference`, which score the prompt when the
group is finished. Special tokens are never removed.

**`transferred`** samples were generated from a rewritten prompt, which the sample records, and are trained on their
group's prompt. The metric `mismatch_mean` excludes such samples, and they have no experts to replay.

## Several passes, early passes, and ReMax

With `algo.epochs` above 1, a step trains on its mini-batches several times, in the same order. All epochs use the
packing, scores and advantages of the first one; only `current` is computed again before each further update, if a
plug-in needs it. Ratios are relative to the start of the step, so in later epochs they differ more from 1 and are
clipped more often. Staleness does not increase, because there is one push per step. Checkpoints are written between
steps, and the order is a function of (run.seed, step), so a resumed run is the same. The extra update on samples that
a selector deferred happens once.

With `trainer.early_backward` (FlexMARL's micro-batch pipeline; its code was not read), the backward pass of finished
groups starts when they fill a micro-batch of every rank, while the engines generate the rest of the step. The weights
do not change, gradients accumulate, and one update divides them by the whole step's denominator, so the step differs
only in the order of its sums. Early backward passes need disaggregated engines and an algorithm that does not need a
whole step (`Requirements.needs_whole_step`): no selector, no hook, no bound over the mini-batch, and advantages that
depend only on their own group. The metrics `early_share` and `time_early` measure the overlap. A repeated step has
the same early groups.

ReMax is not included. Its baseline is the reward of an additional greedy response per prompt, which is not trained.
`rloo` computes its baseline from trained samples, with less variance for the same number of tokens. A greedy sample
in a group would also need its own temperature in every request, resume and repeat.
"""

MEASURED = """
## Learning curves

![Held-out accuracy by train step](figures/algorithms_curves.png)

`python bench/algorithms.py --part curves` on the quickstart task with a quarter of its batch and learning rate, 24
steps, one real engine, two seeds. N'/N = 5 and 9 increase staleness: a group's oldest token is then 4.2 and 6.0 train
steps old on average (2.6 at N'/N = 2). The table has the mean accuracy over all nine evaluations for each seed;
faster learning gives a higher mean:

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

Rows with two values at N'/N = 5 and 9 were measured on 2026-11-22, the others on 2026-11-21.

- Every method learns the task; all end between 0.95 and 1.0. The task is easy, so the figure compares only the speed
  of learning.
- At N'/N = 9 the two seeds of a recipe differ by 0.01 to 0.05. dppo and sapo are ahead of grpo by 0.05 to 0.08 with
  the first seed and by 0.05 with the second; vcpo is ahead by less; exact_old does not differ measurably from grpo.
- decoupled_ppo's recipe has four optimizer updates per step, the others one, at the same learning rate. Its lead is
  due to the updates, not to its correction: with one update per step it had 0.67 and 0.65 (one seed).
- At N'/N = 2, cispo, tis and m2po are ahead of grpo by about 0.03, more than the seeds differ; bapo, gspo and dapo do
  not differ measurably from it. Recipes also differ in the average, over sequences or over tokens; this effect was
  not separated from that of the method.
- All runs had the same small model, task and learning rate, so the results do not extend to other scales.
"""


def render_docs() -> str:
    """Return docs/algorithms.md as text."""
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
