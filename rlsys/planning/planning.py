"""Planning: the algorithm's plug-ins in the rollout process, which decide about prompt, size and training of a group.

    group id -> prompt chooser -> Prompt
    rewarded samples of a group -> group reward -> planners -> Accept | Drop | AddSamples | Hold

The runner executes the decisions. The only state of Planning is that of the plug-ins; the buffer commits it together
with the decisions, so that a restart neither loses nor repeats a decision.

The effect of an exception in a plug-in depends on the method:
- one group (index, template, needs_*, receive_*, decide, on_decided, forget, on_rewards, a group reward): the group
  is censored;
- all groups (waiting, released, close_round, restart, counts, state_dict, load_state_dict): the run ends with a
  RunError that names the plug-in and the method.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rlsys.algo.group_rewards import GroupReward, Response
from rlsys.algo.planners import AddSamples, Decision, Planner, decide, largest_size, start_size
from rlsys.algo.prompts import PromptChooser, Template
from rlsys.algo.registry import make_all
from rlsys.config import Config
from rlsys.config.plugins import one_line_errors
from rlsys.core.errors import RunError, UserError
from rlsys.core.types import Prompt, Sample, SampleGroup
from rlsys.data import PromptSource, Tokenizer
from rlsys.generators.censoring import boundary, prompt_name, refused_prompt, train_prompt
from rlsys.planning.exploring import Explorer
from rlsys.planning.group_scoring import GroupScorer
from rlsys.planning.guidance import Guidance
from rlsys.planning.repairs import Repairs
from rlsys.planning.teacher import EngineTeacher
from rlsys.rewards.judges import JudgeWithTimeout

PromptScores = Callable[[list[int]], Awaitable[tuple[list[float], list[bool]]]]
"""Function: token ids of a prompt -> for each token, the disagreement of policy and reference, and whether it must
not be removed."""
FIELDS = ("prompt", "planners", "group_reward")
"""Fields of the config section `algo` whose plug-ins run in the rollout process."""
PROMPTS = range(2**63)
"""Prompt indices that the ledger can store."""

log = logging.getLogger("rlsys.rollout.exceptions")


class Planning:
    """Plug-ins that decide about groups, and the services that the plug-ins use.

    Attributes:
        teacher: Engine that scores every response; None without `algo.teacher.engine`.
        size: Number of samples that a group starts with.
        largest: Largest possible number of samples of a group.
    """

    def __init__(
        self,
        config: Config,
        source: PromptSource,
        tokenizer: Tokenizer | None,
        judge: JudgeWithTimeout | None = None,
        prompt_scores: PromptScores | None = None,
        repairs: Repairs | None = None,
        explorer: Explorer | None = None,
        teacher: EngineTeacher | None = None,
    ) -> None:
        """Build the plug-ins. A service is None if the config does not need it.

        Args:
            config: config of the run.
            source: prompts.
            tokenizer: the tokenizer; None for plug-ins that need no text.
            judge: model that answers questions of group rewards and writes guidance.
            prompt_scores: function that scores the tokens of a prompt.
            repairs: service that repairs failed responses.
            explorer: service that runs probes.
            teacher: teacher engine.

        Raises:
            UserError: a plug-in is unknown or has invalid parameters.
        """
        plugins = make_all(config.algo, FIELDS)
        self._chooser: PromptChooser = plugins["prompt"][0]
        self._planners: list[Planner] = plugins["planners"]
        self._reward: GroupReward | None = next(iter(plugins["group_reward"]), None)
        self._scorer: GroupScorer | None = None
        if self._reward is not None and config.algo.group_reward is not None:
            name = config.algo.group_reward.name
            self._scorer = GroupScorer(name, self._reward, config.rollout.reward_timeout)
        self._names = [
            f"algo.prompt = {config.algo.prompt.name!r}",
            *(f"algo.planners[{i}] = {spec.name!r}" for i, spec in enumerate(config.algo.planners)),
            *([f"algo.group_reward = {spec.name!r}"] if (spec := config.algo.group_reward) else []),
        ]
        self._source, self._tokenizer, self._judge = source, tokenizer, judge
        self._by_source = config.algo.teacher is not None and bool(config.algo.teacher.by_source)
        self._prompt_scores, self._repairs, self._explorer = prompt_scores, repairs, explorer
        self.teacher = teacher
        self._guidance = None if judge is None or tokenizer is None else Guidance(judge, tokenizer)
        group_size = config.rollout.group_size
        self.size = start_size(self._planners, group_size)
        self.largest = largest_size(self._planners, group_size)

    def sources(self, groups: Sequence[SampleGroup]) -> list[str]:
        """Return the data source of each group's prompt; empty if `algo.teacher.by_source` is not set."""
        if not self._by_source:
            return []
        return [str(self._source.train(g.prompt_index).entry.get("data_source", "")) for g in groups]

    def prompt(self, group_id: int) -> Prompt:
        """Return the prompt of a new group; a refused prompt if the prompt chooser raises an exception."""
        with boundary(f"{self._names[0]}, group {group_id}") as item:
            index = operator.index(self._chooser.index(group_id))
            if index not in PROMPTS:
                raise ValueError(f"index returned {index}; expected 0 to 2^63 - 1")
        if item.censored is not None:
            return refused_prompt(Prompt(group_id, "", [], {}), item.censored)
        return self._apply_template(group_id, train_prompt(self._source, index))

    def restored_prompt(self, group: SampleGroup) -> Prompt:
        """Return the prompt of a group that started before a restart.

        Raises:
            UserError: the prompt source returns another prompt than before. Groups are not checked if an agent wrote
                the prompts of all their samples.
        """
        prompt = self._apply_template(group.group_id, train_prompt(self._source, group.prompt_index))
        original_ids = next((s.prompt_ids for s in group.samples if not s.own_prompt), prompt.ids)
        if prompt.refusal or not original_ids:
            reason = "its row could not be read when its group started"
            return replace(
                prompt, ids=original_ids, refusal=prompt.refusal or f"{reason} ({prompt_name(prompt)})"
            )
        if prompt.ids != original_ids:
            raise UserError(
                f"data.source: the token ids of prompt {prompt.index} differ from those in the ledger; expected the "
                "same data as before the restart"
            )
        return prompt

    def _apply_template(self, group_id: int, prompt: Prompt) -> Prompt:
        """Return the prompt in the wording of the group's template; a refused prompt if the chooser raises."""
        with boundary(f"{self._names[0]}, group {group_id}, {prompt_name(prompt)}") as item:
            return self._reworded(self._chooser.template(group_id), prompt)
        assert item.censored is not None
        return refused_prompt(prompt, item.censored)

    def _reworded(self, template: object, prompt: Prompt) -> Prompt:
        """Return the prompt in the wording of a template, which is the result of a plug-in.

        Raises:
            TypeError: `template` is no Template.
            UserError: the prompt is a chat, which cannot be reworded.
        """
        if not isinstance(template, Template):
            raise TypeError(f"template returned {template!r:.80}; expected a Template")
        if template == Template() or prompt.refusal:
            return prompt
        if not prompt.question:
            raise UserError(
                "algo.prompt: data.source returns whole chats; expected questions, which can be reworded"
            )
        text = self._text.apply_chat(template.messages(prompt.question)) + template.opening
        entry = {**prompt.entry, "form": template.form, "marks": list(template.marks)}
        return replace(prompt, text=text, ids=self._text.encode(text), entry=entry)

    async def reward(
        self, prompt: Prompt, group: SampleGroup, load: Callable[[list[Sample]], list[Sample]] = list
    ) -> str | None:
        """Set the rewards of a group's samples from `algo.group_reward`, if it is set.

        Args:
            prompt: the group's prompt.
            group: the group.
            load: returns samples with their tokens in memory.

        Returns:
            The reason if the group has no rewards, else None.
        """
        if self._scorer is None:
            return None
        plain = [s.reward if s.plain_reward is None else s.plain_reward for s in group.samples]
        key = prompt.entry.get("answer")
        answer = None if key is None else str(key)
        responses = [
            Response(self._text.decode(s.judged_ids), s.answer, s.mu, reward, answer)
            for s, reward in zip(load(group.samples), plain, strict=True)
        ]
        rewards = await self._scorer.score(prompt.question or prompt.text, responses, self._judge)
        if isinstance(rewards, str):
            return rewards
        for sample, plain_reward, reward in zip(group.samples, plain, rewards, strict=True):
            sample.plain_reward, sample.reward, sample.named_rewards = plain_reward, reward, None
        return None

    @property
    def counts(self) -> dict[str, float]:
        """Counts of the existing services and planners by metric, since the start of the process."""
        counts: dict[str, float] = {}
        if (scorer := self._scorer) is not None:
            counts |= {"group_reward_hung": scorer.timeouts, "group_reward_failed": scorer.failures}
        if self._repairs is not None:
            counts |= self._repairs.counts
        if self._guidance is not None and any("guidance" in p.needs() for p in self._planners):
            counts |= self._guidance.counts
        if self.teacher is not None:
            counts |= self.teacher.counts
        if (judge := self._judge) is not None:
            counts |= {"judge_hung": judge.timeouts, "judge_failed": judge.failures}
        for planner, name in self._named_planners():
            with _all_groups(name, "counts"):
                counts |= planner.counts
        return counts

    @property
    def has_timeouts(self) -> bool:
        """Return whether a task of a plug-in has timed out. It may still run in spite of its cancellation."""
        return any(n for name, n in self.counts.items() if name.endswith("_hung"))

    def needs_probes(self, group: SampleGroup) -> bool:
        """Return whether a planner needs probes of the group's prompt."""
        return any(p.needs_probes(group.group_id) for p in self._planners)

    async def explore(self, prompt: Prompt, group: SampleGroup) -> int:
        """Run the probes that planners need, give them the rewards, and return the number of samples to add."""
        extra = 0
        for planner in self._planners:
            if count := planner.needs_probes(group.group_id):
                assert self._explorer is not None, "preflight requires engines with role = explore"
                rewards = await self._explorer.rewards(prompt, group.group_id, count)
                extra += planner.receive_probes(group.group_id, rewards)
        return extra

    async def score_prompt(self, group: SampleGroup) -> None:
        """Score the tokens of the group's prompt, and give the scores to the planners that need them."""
        if requesting := [p for p in self._planners if p.needs_scores(group)]:
            assert self._prompt_scores is not None, "preflight requires engine.reference"
            scores, protect = await self._prompt_scores(group.samples[0].prompt_ids)
            for planner in requesting:
                planner.receive_scores(group.group_id, scores, protect)

    async def repair(
        self, prompt: Prompt, group: SampleGroup, load: Callable[[list[Sample]], list[Sample]] = list
    ) -> None:
        """Repair the failed responses that planners need, and give them the repaired prefixes.

        `load` returns samples with their tokens in memory.
        """
        for planner in self._planners:
            if indices := planner.needs_repairs(group):
                assert self._repairs is not None, "preflight requires data.process_judge"
                samples = load([group.samples[index] for index in indices])
                planner.receive_repairs(group.group_id, await self._repairs.of(prompt, samples))

    async def guide(
        self, prompt: Prompt, group: SampleGroup, load: Callable[[list[Sample]], list[Sample]] = list
    ) -> None:
        """Request guidance from the judge for the planners that need it, and give them the prompt with guidance.

        `load` returns samples with their tokens in memory.
        """
        for planner in self._planners:
            if indices := planner.needs_guidance(group):
                assert self._guidance is not None, "preflight requires data.judge"
                ids = await self._guidance.guided_prompt_ids(
                    prompt, load([group.samples[index] for index in indices])
                )
                if ids is not None:
                    planner.receive_guidance(group.group_id, ids)

    def decide(self, group: SampleGroup) -> Decision:
        """Return the decision about a group whose samples all have rewards.

        Raises:
            TypeError: a planner returned no Decision.
            ValueError: a planner adds more samples than a group may have.
        """
        decision: object = decide(self._planners, group)
        if not isinstance(decision, Decision):
            raise TypeError(f"decide returned {decision!r:.80}; expected Accept, Drop, AddSamples or Hold")
        capacity = self.largest - len(group.samples)
        if isinstance(decision, AddSamples) and decision.samples > capacity:
            raise ValueError(
                f"AddSamples.samples = {decision.samples}: the group has {len(group.samples)} samples; expected at "
                f"most {self.largest} in total (Planner.limit)"
            )
        return decision

    def waiting(self) -> set[int]:
        """Return the ids of held groups (Planner.waiting)."""
        return {i for p, name in self._named_planners() for i in _ids(name, "waiting", p.waiting)}

    def released(self) -> list[int]:
        """Return the ids of held groups that can be decided now, in ascending order (Planner.released)."""
        return sorted({i for p, name in self._named_planners() for i in _ids(name, "released", p.released)})

    def released_error(self, group_id: int) -> RunError:
        """Return the error for a group that a planner releases, but does not hold."""
        names = (n for p, n in self._named_planners() if group_id in _ids(n, "released", p.released))
        return RunError(
            f"{next(names)}: released() contains group {group_id}; expected ids of held groups only"
        )

    def close_round(self) -> None:
        """Make the planners release the held groups (Planner.close_round)."""
        for planner, name in self._named_planners():
            with _all_groups(name, "close_round"):
                planner.close_round()

    def restart(self) -> None:
        """Make the planners forget the held groups (Planner.restart). `decide` is called again for each."""
        for planner, name in self._named_planners():
            with _all_groups(name, "restart"):
                planner.restart()

    def close(self, group: SampleGroup, *, rewarded: bool, accepted: bool = False) -> None:
        """Report the end of a group to the plug-ins.

        Args:
            group: the group.
            rewarded: whether the planners decided about the group. If not, the group was dropped before.
            accepted: whether the group is trained.
        """
        if rewarded:
            self._chooser.on_rewards(group)
        else:
            self._chooser.forget(group.group_id)
        for planner in self._planners:
            if rewarded:
                planner.on_decided(group, accepted=accepted)
            else:
                planner.forget(group.group_id)

    @property
    def _text(self) -> Tokenizer:
        """The tokenizer, for plug-ins that need text."""
        assert self._tokenizer is not None, "these plug-ins need a tokenizer"
        return self._tokenizer

    def state(self) -> str:
        """Return the states of the plug-ins as a JSON object by plug-in number; empty if no plug-in has a state."""
        states = []
        for number, (plugin, name) in enumerate(self._named_plugins()):
            with _all_groups(name, "state_dict"):
                if state := plugin.state_dict():
                    states.append(f'"{number}": {json.dumps(state)}')
        return f"{{{', '.join(states)}}}" if states else ""

    def restore(self, state: str) -> None:
        """Restore the result of `state` of an earlier process."""
        plugins = self._named_plugins()
        for number, plugin_state in (json.loads(state) if state else {}).items():
            plugin, name = plugins[int(number)]
            with _all_groups(name, "load_state_dict"):
                plugin.load_state_dict(plugin_state)

    def _named_plugins(self) -> list[tuple[Any, str]]:
        """Return the plug-ins, and their names for messages."""
        plugins = [self._chooser, *self._planners, *([self._reward] if self._reward else [])]
        return list(zip(plugins, self._names, strict=True))

    def _named_planners(self) -> list[tuple[Planner, str]]:
        """Return the planners, and their names for messages."""
        return list(zip(self._planners, self._names[1:], strict=False))


@contextmanager
def _all_groups(plugin: str, method: str) -> Iterator[None]:
    """Convert an exception in the context into a RunError that names the plug-in and its method."""
    with one_line_errors(f"{plugin}: {method}", RunError):
        try:
            yield
        except Exception:
            log.exception("%s: %s", plugin, method)
            raise


def _ids(plugin: str, method: str, groups: Callable[[], Iterable[int]]) -> list[int]:
    """Return the group ids from a plug-in's method. See _all_groups for exceptions."""
    with _all_groups(plugin, method):
        return [operator.index(i) for i in groups()]
