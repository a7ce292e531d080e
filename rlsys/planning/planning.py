"""Planning: the algorithm's plug-ins in the rollout process. They determine prompt, size and acceptance of each
group.

    group id -> prompt chooser -> Prompt
    its samples -> group reward -> planners -> Accept | Drop | AddSamples | Hold

Planning decides; the runner executes. Its state is that of its plug-ins: the buffer commits it together with the
decisions, so that a restart neither loses nor repeats a decision.

An exception in a plug-in's method for one group (index, template, needs_*, receive_*, decide, on_decided, forget,
on_rewards, a group reward) censors that group. An exception in a method for all groups (waiting, released,
close_round, restart, counts, state_dict, load_state_dict) ends the run with a RunError that names the plug-in and
the method.
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
"""Prompt ids -> disagreement of policy and reference on each, and which tokens are protected."""
FIELDS = ("prompt", "planners", "group_reward")
"""Fields of the config section `algo`: the plug-ins that act here."""
PROMPTS = range(2**63)
"""Indices of prompts that the ledger can store."""

log = logging.getLogger("rlsys.rollout.exceptions")


class Planning:
    """Plug-ins and services of group decisions.

    `judge` serves group rewards, `prompt_scores` provides scores of prompts, `repairs` repairs of failed responses,
    `explorer` probes of prompts. `teacher` scores every response.

    Raises:
        UserError: a plug-in does not exist.
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
        """Teacher engine, which scores every response."""
        self._guidance = None if judge is None or tokenizer is None else Guidance(judge, tokenizer)
        group_size = config.rollout.group_size
        self.size = start_size(self._planners, group_size)
        """Number of samples that a group starts with."""
        self.largest = largest_size(self._planners, group_size)
        """Largest possible number of samples of a group."""

    def sources(self, groups: Sequence[SampleGroup]) -> list[str]:
        """Return the data sources of the groups' prompts, if teachers are chosen by source."""
        if not self._by_source:
            return []
        return [str(self._source.train(g.prompt_index).entry.get("data_source", "")) for g in groups]

    def prompt(self, group_id: int) -> Prompt:
        """Return the prompt of a new group; a refused one if the chooser raises."""
        with boundary(f"{self._names[0]}, group {group_id}") as item:
            index = operator.index(self._chooser.index(group_id))
            if index not in PROMPTS:
                raise ValueError(f"index returned {index}, expected 0 to 2^63 - 1")
        if item.censored is not None:
            return refused_prompt(Prompt(group_id, "", [], {}), item.censored)
        return self._apply_template(group_id, train_prompt(self._source, index))

    def restored_prompt(self, group: SampleGroup) -> Prompt:
        """Return the prompt of a group that started before a restart.

        Raises:
            UserError: the source returns another prompt, and no agent has derived its own prompts from it.
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
                f"data.source: prompt {prompt.index} differs from that of its group in the ledger; expected "
                "unchanged data"
            )
        return prompt

    def _apply_template(self, group_id: int, prompt: Prompt) -> Prompt:
        """Return the prompt in the wording of the group's template; a refused one if the chooser raises."""
        with boundary(f"{self._names[0]}, group {group_id}, {prompt_name(prompt)}") as item:
            return self._reworded(self._chooser.template(group_id), prompt)
        assert item.censored is not None
        return refused_prompt(prompt, item.censored)

    def _reworded(self, template: object, prompt: Prompt) -> Prompt:
        if not isinstance(template, Template):
            raise TypeError(f"template returned {template!r:.80}, expected a Template")
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
        """Set the rewards that need the whole group.

        Args:
            prompt: the group's prompt.
            group: the group.
            load: loads the tokens of samples into memory.

        Returns:
            The reason if the group cannot be used, else None.
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
        """Return the counts for metrics of each existing service and planner.

        They include groups for which the group reward failed, and requests without a verdict.
        """
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
        """Return whether a task of a plug-in has timed out and may still run in spite of its cancellation."""
        return any(n for name, n in self.counts.items() if name.endswith("_hung"))

    def needs_probes(self, group: SampleGroup) -> bool:
        """Return whether a planner needs probes of the group's prompt."""
        return any(p.needs_probes(group.group_id) for p in self._planners)

    async def explore(self, prompt: Prompt, group: SampleGroup) -> int:
        """Run probes of the prompt for the planners that need them, and return the number of samples to add."""
        extra = 0
        for planner in self._planners:
            if count := planner.needs_probes(group.group_id):
                assert self._explorer is not None, "preflight requires engines with role = explore"
                rewards = await self._explorer.rewards(prompt, group.group_id, count)
                extra += planner.receive_probes(group.group_id, rewards)
        return extra

    async def score_prompt(self, group: SampleGroup) -> None:
        """Give the planners that need it the disagreement of policy and reference on the group's prompt."""
        if requesting := [p for p in self._planners if p.needs_scores(group)]:
            assert self._prompt_scores is not None, "preflight requires engine.reference"
            scores, protect = await self._prompt_scores(group.samples[0].prompt_ids)
            for planner in requesting:
                planner.receive_scores(group.group_id, scores, protect)

    async def repair(
        self, prompt: Prompt, group: SampleGroup, load: Callable[[list[Sample]], list[Sample]] = list
    ) -> None:
        """Give the planners that need them the first wrong steps of responses and their corrections."""
        for planner in self._planners:
            if indices := planner.needs_repairs(group):
                assert self._repairs is not None, "preflight requires data.process_judge"
                samples = load([group.samples[index] for index in indices])
                planner.receive_repairs(group.group_id, await self._repairs.of(prompt, samples))

    async def guide(
        self, prompt: Prompt, group: SampleGroup, load: Callable[[list[Sample]], list[Sample]] = list
    ) -> None:
        """Give the planners that need it the prompt with a judge's guidance from failed responses."""
        for planner in self._planners:
            if indices := planner.needs_guidance(group):
                assert self._guidance is not None, "preflight requires data.judge"
                ids = await self._guidance.of(prompt, load([group.samples[index] for index in indices]))
                if ids is not None:
                    planner.receive_guidance(group.group_id, ids)

    def decide(self, group: SampleGroup) -> Decision:
        """Return the decision about a group whose samples all have rewards.

        Raises:
            TypeError, ValueError: a planner returned an invalid decision.
        """
        decision: object = decide(self._planners, group)
        if not isinstance(decision, Decision):
            raise TypeError(f"decide returned {decision!r}, expected Accept, Drop, AddSamples or Hold")
        capacity = self.largest - len(group.samples)
        if isinstance(decision, AddSamples) and decision.samples > capacity:
            raise ValueError(
                f"AddSamples.samples = {decision.samples}: the group has {len(group.samples)} samples; expected at "
                f"most {self.largest} in total (Planner.limit)"
            )
        return decision

    def waiting(self) -> set[int]:
        """Return the ids of groups that wait to be decided together with others."""
        return {i for p, name in self._named_planners() for i in _ids(name, "waiting", p.waiting)}

    def released(self) -> list[int]:
        """Return the ids of waiting groups that can be decided now."""
        return sorted({i for p, name in self._named_planners() for i in _ids(name, "released", p.released)})

    def released_error(self, group_id: int) -> RunError:
        """Return the error of a planner that releases a group which does not wait."""
        names = (n for p, n in self._named_planners() if group_id in _ids(n, "released", p.released))
        return RunError(f"{next(names)}: released: group {group_id} does not wait")

    def close_round(self) -> None:
        """Let planners decide the waiting groups, because no other group runs or may start."""
        for planner, name in self._named_planners():
            with _all_groups(name, "close_round"):
                planner.close_round()

    def restart(self) -> None:
        """Reset the planners. All undecided groups will be added again."""
        for planner, name in self._named_planners():
            with _all_groups(name, "restart"):
                planner.restart()

    def close(self, group: SampleGroup, *, rewarded: bool, accepted: bool = False) -> None:
        """Report a final decision, or a drop without rewards, to the plug-ins. `accepted`: the group is trained."""
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
        assert self._tokenizer is not None, "these plug-ins need a tokenizer"
        return self._tokenizer

    def state(self) -> str:
        """Return the state as JSON; empty if no plug-in has a state."""
        states = []
        for number, (plugin, name) in enumerate(self._named_plugins()):
            with _all_groups(name, "state_dict"):
                if state := plugin.state_dict():
                    states.append(f'"{number}": {json.dumps(state)}')
        return f"{{{', '.join(states)}}}" if states else ""

    def restore(self, state: str) -> None:
        """Restore `state()` of an earlier process."""
        plugins = self._named_plugins()
        for number, plugin_state in (json.loads(state) if state else {}).items():
            plugin, name = plugins[int(number)]
            with _all_groups(name, "load_state_dict"):
                plugin.load_state_dict(plugin_state)

    def _named_plugins(self) -> list[tuple[Any, str]]:
        """Return the plug-ins with their names in messages."""
        plugins = [self._chooser, *self._planners, *([self._reward] if self._reward else [])]
        return list(zip(plugins, self._names, strict=True))

    def _named_planners(self) -> list[tuple[Planner, str]]:
        return list(zip(self._planners, self._names[1:], strict=False))


@contextmanager
def _all_groups(plugin: str, method: str) -> Iterator[None]:
    """Convert an exception of a plug-in's method for all groups, within the context, into a RunError."""
    with one_line_errors(f"{plugin}: {method}", RunError):
        try:
            yield
        except Exception:
            log.exception("%s: %s", plugin, method)
            raise


def _ids(plugin: str, method: str, groups: Callable[[], Iterable[int]]) -> list[int]:
    with _all_groups(plugin, method):
        return [operator.index(i) for i in groups()]
