"""Planning: the algorithm's plug-ins on the rollout's side. What a group is asked, its size, what becomes of it.

    group id -> prompt chooser -> Prompt      its samples -> group reward -> planners -> Accept | Drop | More | Hold

It decides; the runner carries out. Its state is that of its plug-ins: the buffer commits it together with what
was decided, so a restart neither forgets nor repeats a decision.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from rlsys.algo.group_rewards import GroupReward, Response
from rlsys.algo.planners import Decision, Planner, decide, largest_size, start_size
from rlsys.algo.prompts import PromptChooser, Template
from rlsys.algo.registry import make_all
from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt, Sample, SampleGroup
from rlsys.data import PromptSource, Tokenizer
from rlsys.generators.censoring import prompt_name, train_prompt
from rlsys.planning.exploring import Explorer
from rlsys.planning.group_scoring import GroupScorer
from rlsys.planning.guidance import Guidance
from rlsys.planning.repairs import Repairs
from rlsys.planning.teacher import EngineTeacher
from rlsys.rewards.judges import PatientJudge

PromptScores = Callable[[list[int]], Awaitable[tuple[list[float], list[bool]]]]
"""Prompt ids -> how far policy and reference disagree on each, and which tokens must stay."""
FIELDS = ("prompt", "planners", "group_reward")
"""Of the config section `algo`: the plug-ins that act here."""


class Planning:
    """Raises UserError for a plug-in that does not exist. `judge` is what a group reward may ask, `prompt_scores`
    what a planner hears of prompts, `repairs` of failed responses, `explorer` of prompts that were tried out.
    `teacher`: asked about every response."""

    def __init__(
        self,
        config: Config,
        source: PromptSource,
        tokenizer: Tokenizer | None,
        judge: PatientJudge | None = None,
        prompt_scores: PromptScores | None = None,
        repairs: Repairs | None = None,
        explorer: Explorer | None = None,
        teacher: EngineTeacher | None = None,
    ) -> None:
        made = make_all(config.algo, FIELDS)
        self._chooser: PromptChooser = made["prompt"][0]
        self._planners: list[Planner] = made["planners"]
        self._reward: GroupReward | None = next(iter(made["group_reward"]), None)
        self._scorer: GroupScorer | None = None
        if self._reward is not None and config.algo.group_reward is not None:
            name = config.algo.group_reward.name
            self._scorer = GroupScorer(name, self._reward, config.rollout.reward_timeout)
        self._source, self._tokenizer, self._judge = source, tokenizer, judge
        self._by_source = config.algo.teacher is not None and bool(config.algo.teacher.by_source)
        self._prompt_scores, self._repairs, self._explorer = prompt_scores, repairs, explorer
        self.teacher = teacher
        """That is an engine, and asked about every response."""
        self._guidance = None if judge is None or tokenizer is None else Guidance(judge, tokenizer)
        group_size = config.rollout.group_size
        self.size = start_size(self._planners, group_size)
        """Samples that a group starts with."""
        self.largest = largest_size(self._planners, group_size)
        """Samples that it can ever have."""

    def sources(self, groups: Sequence[SampleGroup]) -> list[str]:
        """Where their prompts come from, if teachers are chosen by it."""
        if not self._by_source:
            return []
        return [str(self._source.train(g.prompt_index).entry.get("data_source", "")) for g in groups]

    def prompt(self, group_id: int) -> Prompt:
        """What a new group is asked."""
        return self._put(group_id, train_prompt(self._source, self._chooser.index(group_id)))

    def again(self, group: SampleGroup) -> Prompt:
        """What a group from before a restart was asked. Raises UserError when the source gives something else now, if
        an agent has not made prompts of its own of it."""
        prompt = self._put(group.group_id, train_prompt(self._source, group.prompt_index))
        asked = next((s.prompt_ids for s in group.samples if not s.own_prompt), prompt.ids)
        if prompt.refusal or not asked:
            again = "its row could not be read when its group began"
            return replace(prompt, ids=asked, refusal=prompt.refusal or f"{again} ({prompt_name(prompt)})")
        if prompt.ids != asked:
            raise UserError(f"data.source: prompt {prompt.index} is not what it was when its group began")
        return prompt

    def _put(self, group_id: int, prompt: Prompt) -> Prompt:
        """The prompt in the words of the group's template."""
        template = self._chooser.template(group_id)
        if template == Template() or prompt.refusal:
            return prompt
        if not prompt.question:
            raise UserError("algo.prompt: data.source gives whole chats, and only a question can be reworded")
        text = self._text.apply_chat(template.messages(prompt.question)) + template.opening
        entry = {**prompt.entry, "form": template.form, "marks": list(template.marks)}
        return replace(prompt, text=text, ids=self._text.encode(text), entry=entry)

    async def reward(
        self, prompt: Prompt, group: SampleGroup, load: Callable[[list[Sample]], list[Sample]] = list
    ) -> str | None:
        """Set the rewards that need the whole group; why the group cannot be used, None when it can. `load`: gives
        samples their tokens."""
        if self._scorer is None:
            return None
        plain = [s.reward if s.plain_reward is None else s.plain_reward for s in group.samples]
        key = prompt.entry.get("answer")
        known = None if key is None else str(key)
        responses = [
            Response(self._text.decode(s.judged_ids), s.answer, s.mu, reward, known)
            for s, reward in zip(load(group.samples), plain, strict=True)
        ]
        rewards = await self._scorer.score(prompt.question or prompt.text, responses, self._judge)
        if isinstance(rewards, str):
            return rewards
        for sample, before, reward in zip(group.samples, plain, rewards, strict=True):
            sample.plain_reward, sample.reward, sample.named_rewards = before, reward, None
        return None

    @property
    def counts(self) -> dict[str, float]:
        """Groups without a reward of the group reward, questions without a verdict, what planners count; only of
        what there is."""
        counts: dict[str, float] = {}
        if (scorer := self._scorer) is not None:
            counts |= {"group_reward_hung": scorer.hung, "group_reward_failed": scorer.failed}
        if self._repairs is not None:
            counts |= self._repairs.counts
        if self._guidance is not None and any("guidance" in p.needs() for p in self._planners):
            counts |= self._guidance.counts
        if self.teacher is not None:
            counts |= self.teacher.counts
        if (judge := self._judge) is not None:
            counts |= {"judge_hung": judge.hung, "judge_failed": judge.failed}
        for planner in self._planners:
            counts |= planner.counts
        return counts

    @property
    def hung(self) -> bool:
        """A task of a plug-in may still run, and not let itself be cancelled."""
        return any(n for name, n in self.counts.items() if name.endswith("_hung"))

    def wants_probes(self, group: SampleGroup) -> bool:
        """Whether a planner wants the group's prompt to be tried out."""
        return any(p.needs_probes(group.group_id) for p in self._planners)

    async def explore(self, prompt: Prompt, group: SampleGroup) -> int:
        """Have its prompt tried out for the planners that want it; further samples that the group gets."""
        more = 0
        for planner in self._planners:
            if count := planner.needs_probes(group.group_id):
                assert self._explorer is not None, (
                    "preflight lets no such planner in without engines that explore"
                )
                rewards = await self._explorer.rewards(prompt, group.group_id, count)
                more += planner.receive_probes(group.group_id, rewards)
        return more

    async def score_prompt(self, group: SampleGroup) -> None:
        """Tell the planners that want it how far policy and reference disagree on the group's prompt."""
        if curious := [p for p in self._planners if p.needs_scores(group)]:
            assert self._prompt_scores is not None, "preflight lets no such planner in without a reference"
            scores, protect = await self._prompt_scores(group.samples[0].prompt_ids)
            for planner in curious:
                planner.receive_scores(group.group_id, scores, protect)

    async def repair(
        self, prompt: Prompt, group: SampleGroup, load: Callable[[list[Sample]], list[Sample]] = list
    ) -> None:
        """Tell the planners that want it where responses go wrong, and what is right there."""
        for planner in self._planners:
            if places := planner.needs_repairs(group):
                assert self._repairs is not None, "preflight lets no such planner in without a process judge"
                samples = load([group.samples[place] for place in places])
                planner.receive_repairs(group.group_id, await self._repairs.of(prompt, samples))

    async def guide(
        self, prompt: Prompt, group: SampleGroup, load: Callable[[list[Sample]], list[Sample]] = list
    ) -> None:
        """Tell the planners that want it how a judge would have the prompt put, after what failed."""
        for planner in self._planners:
            if places := planner.needs_guidance(group):
                assert self._guidance is not None, "preflight lets no such planner in without a judge"
                ids = await self._guidance.of(prompt, load([group.samples[place] for place in places]))
                if ids is not None:
                    planner.receive_guidance(group.group_id, ids)

    def decide(self, group: SampleGroup) -> Decision:
        """What becomes of a group whose samples all have their rewards."""
        return decide(self._planners, group)

    def waiting(self) -> set[int]:
        """Ids of groups that wait for others, to be decided with them."""
        return {i for p in self._planners for i in p.waiting()}

    def released(self) -> list[int]:
        """Ids of groups that waited, and can be decided now."""
        return sorted({i for p in self._planners for i in p.released()})

    def close_round(self) -> None:
        """Nothing else runs or may start: what waits is to be decided without more."""
        for planner in self._planners:
            planner.close_round()

    def restart(self) -> None:
        """All groups that are not decided will be let in again."""
        for planner in self._planners:
            planner.restart()

    def close(self, group: SampleGroup, *, rewarded: bool, kept: bool = False) -> None:
        """The group is decided, or was dropped without rewards. `kept`: it goes to the trainer."""
        if rewarded:
            self._chooser.on_rewards(group)
        else:
            self._chooser.forget(group.group_id)
        for planner in self._planners:
            if rewarded:
                planner.on_decided(group, accepted=kept)
            else:
                planner.forget(group.group_id)

    @property
    def _text(self) -> Tokenizer:
        assert self._tokenizer is not None, "these plug-ins need a tokenizer"
        return self._tokenizer

    def state(self) -> str:
        """JSON; empty when no plug-in has a state."""
        states = {str(i): state for i, p in enumerate(self._plugins()) if (state := p.state_dict())}
        return json.dumps(states) if states else ""

    def restore(self, state: str) -> None:
        """Go on from `state()` of an earlier process."""
        plugins = self._plugins()
        for place, found in (json.loads(state) if state else {}).items():
            plugins[int(place)].load_state_dict(found)

    def _plugins(self) -> list[Any]:
        return [self._chooser, *self._planners, *([self._reward] if self._reward else [])]
