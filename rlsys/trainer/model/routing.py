"""Router replay and expert load: what the MoE routers of this rank are told, and what they are seen to do.

Replay makes a token take the experts that it took when it was sampled (R3, `trainer.replay = engine`; Ma et al.
2025, "Stabilizing MoE reinforcement learning by aligning training and inference routers") or when the trainer scored
it at the start of the step (R2, `trainer`; Zheng et al. 2025, GSPO, section 5.3). Only the choice is replayed: the
weights of the chosen experts come from the router's own scores, so the router still learns.

A token that several sequences share (rlsys/trainer/prefixes.py) is routed once and counts as often as they have it:
in the auxiliary loss, in what moves experts' biases and in the figures. So none of them depends on which sequences a
micro-batch brings together. It replays what the engine chose for the first of them.

Shapes: T tokens of a micro-batch, P those of this rank's routers, L layers of the whole model, k experts a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from numpy.typing import NDArray
from torch import Tensor

from rlsys.core.spans import RouteSpan
from rlsys.segments.route_records import LayerRoutes
from rlsys.trainer.model.share import Share
from rlsys.trainer.pack import MicroBatch

ABSENT = -1
"""Instead of an expert: this token has no route to replay."""

TopK = Callable[..., tuple[Tensor, Tensor]]


def decode(
    spans: Iterable[RouteSpan | LayerRoutes],
    tokens: int,
    layers: int,
    topk: int,
    own: Sequence[int] | None = None,
    experts: int | None = None,
    routed: Sequence[int] | None = None,
) -> Tensor:
    """Experts `[T, L, k]` int16 of packed positions, ABSENT where no span covers a token.

    Args:
        spans: Routes as engines gave them.
        tokens: T.
        layers: Layers of the whole model.
        topk: k.
        own: The layers that are wanted, in this order; None: all of the model's `layers`.
        experts: E. A position is ABSENT where a router of the layers `routed` cannot have chosen its row: an expert
            that is not there, or the same one twice. None: rows are not looked at.
        routed: Layers of this rank that have experts, the wanted ones among them; None: `own`.
    """
    wanted = range(layers) if own is None else own
    looked_at = wanted if routed is None else routed
    columns = [list(looked_at).index(layer) for layer in wanted]
    out = np.full((tokens, len(wanted), topk), ABSENT, dtype=np.int16)
    for span in spans:
        n = span.end - span.start
        if isinstance(span, LayerRoutes):
            of_layer = {layer: i for i, layer in enumerate(span.layers)}
            if span.experts.shape != (len(span.layers), n, topk):
                continue
            chosen = span.experts[[of_layer[layer] for layer in looked_at]].transpose(1, 0, 2)
        else:
            width, rest = divmod(len(span.experts), max(1, n * layers * topk))
            if rest or width not in (1, 2):
                continue
            rows = np.frombuffer(span.experts, dtype=f"<u{width}").reshape(n, layers, topk)
            chosen = rows[:, list(looked_at)]
        taken = chosen[:, columns].astype(np.int16)
        if experts is not None:
            taken[~_possible(chosen, experts)] = ABSENT
        out[span.start : span.end] = taken
    return torch.from_numpy(out)


class Sequences(NamedTuple):
    """ids `[P]`: the sequence of each token, any at padding; number: of sequences in the micro-batch.

    Where tokens are shared, `tokens` `[N]` names one of the P for each that a sequence has, and ids is `[N]`.
    """

    ids: Tensor
    number: int
    tokens: Tensor | None = None


def _possible(chosen: NDArray[np.unsignedinteger], experts: int) -> NDArray[np.bool_]:
    """`[n]`, of rows `[n, layers, k]`: whether routers of so many experts can have chosen them in all layers."""
    ordered = np.sort(chosen.astype(np.int32), axis=2)
    apart = np.diff(ordered, axis=2, prepend=-1) > 0
    possible: NDArray[np.bool_] = np.all((ordered < experts) & apart, axis=(1, 2))
    return possible


class LayerReplay:
    """Takes the place of megatron's RouterReplay in one router, and calls its tokens' choice.

    `target` `[P, k]` may be partly ABSENT, which upstream's class has no notion of. Under activation recompute a
    router runs twice per micro-batch, the second time in the backward pass, when a later micro-batch is current:
    targets of the first run wait in line for the second.
    """

    def __init__(self, router: TopKRouter) -> None:
        self.router = router
        self._own = router.router_replay
        """The model's own way to choose (rlsys.trainer.model.choices); None: megatron's."""
        self.layer: int = router.layer_number - 1
        self.target: Tensor | None = None
        self.counted: Tensor | None = None  # [P] int64, how often each token counts
        self.sequences: Sequences | None = None  # for the auxiliary loss
        self._of_pass: Sequences | None = None  # those of the pass that is under way
        self.chosen: Tensor | None = None  # [P, k], of the last forward pass
        self._sums: Tensor | None = None
        self._waiting: deque[tuple[Tensor | None, Sequences | None]] = deque()
        if router.get_aux_loss_coeff("aux_loss"):
            router._apply_aux_loss = self._balance
        if router.enable_expert_bias:
            self._count_for_bias, router._apply_expert_bias = (
                router._apply_expert_bias,
                self._count_all_for_bias,
            )

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Scores `[P, E]` -> (scores of the chosen, chosen) `[P, k]`. Called by topk_routing_with_score_function."""
        if self._own is not None:
            _, own = self._own.get_replay_topk(scores, topk, num_groups, group_topk, choose)
        else:
            _, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        again = self.router.training and torch.is_grad_enabled() and bool(self._waiting)
        target, self._of_pass = self._waiting.popleft() if again else (self.target, self.sequences)
        if self.router.training and not torch.is_grad_enabled():
            self._waiting.append((target, self._of_pass))
        chosen = own if target is None else torch.where(target == ABSENT, own, target)
        if not again:
            self.chosen = chosen
            if self.router.training:
                self._count(own, chosen, target)
        return scores.gather(1, chosen), chosen

    def _balance(
        self, probs: Tensor, scores: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """In the place of the router's own: the auxiliary loss of each sequence, in the mean over tokens.

        Megatron's is of a micro-batch, and so another one for each way to cut an update into micro-batches. Of
        sequence s with T_s tokens: coefficient * E * sum_e f_se P_se, f_se = the share of its choices that expert e
        has, P_se = the mean of its tokens' scores (DeepSeek-V3, eq. 17 to 20). `scores`, `routing_map` `[P, E]`, 0
        at padding.
        """
        router = self.router
        coefficient, group = router.get_aux_loss_coeff("aux_loss"), router.tp_cp_group
        assert self._of_pass is not None, "Routing.begin sets it"
        ids, number, tokens_of = self._of_pass
        if tokens_of is not None:
            scores, routing_map = scores[tokens_of], routing_map[tokens_of]
        counts = scores.new_zeros(number, scores.shape[1]).index_add_(0, ids, routing_map.to(scores))
        if group.size() > 1:
            dist.all_reduce(counts, group=group)
        choices = counts.sum(1, keepdim=True)
        shares = counts / choices.clamp(min=1)
        total = coefficient * scores.shape[1] * (scores * shares[ids]).sum()
        tokens = (choices.sum() / router.topk).clamp(min=1)
        return router.attach_and_log_load_balancing_loss(
            probs, coefficient, total / tokens, "load_balancing_loss", group, valid_token_count=tokens
        )

    def _count_all_for_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """In the place of the router's own: a shared token counts for every sequence that has it."""
        shared = None if self._of_pass is None else self._of_pass.tokens
        if shared is None:
            self._count_for_bias(routing_map, padding_mask)
            return
        times = torch.bincount(shared, minlength=len(routing_map))
        if padding_mask is not None:
            times = times * ~padding_mask
        self._count_for_bias(routing_map * times[:, None])

    def _count(self, own: Tensor, chosen: Tensor, target: Tensor | None) -> None:
        """Add to the sums, on the device: reading a number here would wait for all that is queued there."""
        counted = self.counted if self.counted is not None else chosen.new_ones(len(chosen))
        if self._sums is None:
            self._sums = chosen.new_zeros(3 + self.router.num_experts, dtype=torch.int64)
        seen, replayed, alike, load = self._sums[0], self._sums[1], self._sums[2], self._sums[3:]
        load.scatter_add_(0, chosen.flatten(), counted[:, None].expand_as(chosen).flatten())
        seen += counted.sum()
        if target is not None:
            routed = counted * (target[:, 0] != ABSENT)
            replayed += routed.sum()
            same = (own.sort(1).values == chosen.sort(1).values).all(1)
            alike += (same * routed).sum()

    def take_sums(self) -> tuple[Tensor, Tensor]:
        """Sums since the last call, on the host: `[3]` of tokens that predict another one (seen, replayed, chosen
        alike without replay), and `[E]` tokens of each expert."""
        sums, self._sums = self._sums, None
        if sums is None:
            sums = torch.zeros(3 + self.router.num_experts, dtype=torch.int64)
        sums = sums.cpu()
        return sums[:3], sums[3:]


class Routing:
    """Owns every router's replay on this rank. `begin` before a chunk's forward pass, `end` after it."""

    def __init__(self, modules: list[GPTModel], layers: int, mode: str) -> None:
        self._mode = self._asked = mode
        self._layers = layers
        self._modules = modules
        moe = modules[0].config
        self._balanced = bool(moe.moe_aux_loss_coeff or moe.moe_router_bias_update_rate)
        self._replays: list[list[LayerReplay]] = []
        for module in modules:
            # That of a layer for multi-token prediction chooses for itself: the engine has no routes of it.
            routers = [m for m in module.decoder.modules() if isinstance(m, TopKRouter)]
            self._replays.append([LayerReplay(r) for r in routers])
            for replay in self._replays[-1]:
                replay.router.router_replay = replay

    @contextmanager
    def off(self) -> Iterator[None]:
        """While it lasts, all routers choose for themselves, and their choice is not kept."""
        self._mode = "off"
        try:
            yield
        finally:
            self._mode = self._asked

    @property
    def layers(self) -> list[int]:
        """Those of the model whose routes from the engine this rank replays."""
        return sorted({replay.layer for replay in self._all}) if self._asked == "engine" else []

    @property
    def _all(self) -> list[LayerReplay]:
        return [replay for chunk in self._replays for replay in chunk]

    def begin(self, chunk: int, micro: MicroBatch, share: Share) -> None:
        """Tell this chunk's routers what to replay for the micro-batch."""
        if not self._replays[chunk]:
            return
        times = share.times() if share.prefixes else 1
        counted = _of_this_rank((share.predicts & (not micro.copy)) * times)
        sequences = self._sequences(micro, share)
        targets = self._targets(chunk, micro, share)
        for i, replay in enumerate(self._replays[chunk]):
            replay.counted, replay.sequences = counted, sequences
            replay.target = None if targets is None else targets[:, i]

    def _sequences(self, micro: MicroBatch, share: Share) -> Sequences | None:
        """None where nothing is balanced."""
        if not self._balanced:
            return None
        ids = micro.ids.to(share.source.device)
        if not share.prefixes:
            return Sequences(_of_this_rank(ids[share.source.clamp(min=0)]), micro.sequences)
        first, size = _range_of_this_rank(len(share.source))
        here = (share.place >= first) & (share.place < first + size)
        return Sequences(ids[here], micro.sequences, share.place[here] - first)

    def padding_mask(self, chunk: int, micro: MicroBatch, share: Share) -> Tensor | None:
        """`[1, tokens]` bool, so that megatron balances neither padding nor copies; None where nothing is balanced.

        Megatron cuts it over tensor-parallel ranks on the first stage only.
        """
        replays = self._replays[chunk]
        if not replays or not self._balanced:
            return None
        padding = torch.ones_like(share.source, dtype=torch.bool) if micro.copy else share.source < 0
        first = self._modules[chunk].pre_process
        return (padding if first else _of_this_rank(padding))[None]

    def _targets(self, chunk: int, micro: MicroBatch, share: Share) -> Tensor | None:
        """Experts `[P, layers of the chunk, k]` int64."""
        if self._mode == "trainer":
            return micro.own_routes.get(chunk)
        if self._mode == "off" or not micro.routes:
            return None
        replays = self._replays[chunk]
        own, router = [r.layer for r in replays], replays[0].router
        experts = decode(
            micro.routes, len(micro.tokens), self._layers, router.topk, own, router.num_experts, self.layers
        )
        mine = experts.to(share.source.device)
        there = torch.where(share.source[:, None, None] < 0, ABSENT, mine[share.source])
        return _of_this_rank(there).long()

    def end(self, chunk: int, micro: MicroBatch) -> None:
        """Keep what a scoring pass chose, if it is to be replayed: the first pass of a step decides."""
        replays = self._replays[chunk]
        if self._mode != "trainer" or not replays or replays[0].router.training or chunk in micro.own_routes:
            return
        micro.own_routes[chunk] = torch.stack([r.chosen for r in replays if r.chosen is not None], dim=1)

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Since the last call, over all ranks; empty for a dense model. Collective.

        replay_share: of the choices, how many were replayed; route_agreement: of the replayed ones, how many the
        router would have made itself; replay_missing: tokens that had no route, or one that no router chooses, though
        replay is on; expert_load_max: the busiest expert's tokens over the mean, in the worst layer;
        expert_idle_share: the share of experts without a token, in the worst layer.
        """
        figures = torch.zeros(3, dtype=torch.int64)
        experts = max((r.router.num_experts for r in self._all), default=0)
        load = torch.zeros(self._layers, experts, dtype=torch.int64)
        for replay in self._all:
            counts, loads = replay.take_sums()
            figures += counts
            load[replay.layer] += loads
        if dist.get_world_size() > 1:
            width = torch.tensor(experts, device=device)
            dist.all_reduce(width, dist.ReduceOp.MAX)
            load = torch.nn.functional.pad(load, (0, int(width) - experts))  # a stage may have no MoE layer
            both = torch.cat([figures, load.flatten()]).to(device)
            dist.all_reduce(both)
            figures, load = both[:3].cpu(), both[3:].view(load.shape).cpu()
        return self._named([int(n) for n in figures], load)

    def _named(self, figures: list[int], load: Tensor) -> dict[str, float]:
        seen, replayed, alike = figures
        busy = load[load.sum(1) > 0].double()
        if not len(busy):
            return {}
        out = {
            "expert_load_max": float((busy.max(1).values / busy.mean(1)).max()),
            "expert_idle_share": float((busy == 0).double().mean(1).max()),
        }
        if self._mode != "off":
            out["replay_share"] = replayed / max(seen, 1)
            out["replay_missing"] = (seen - replayed) / len(busy)
            out["route_agreement"] = alike / max(replayed, 1)
        return out


def _of_this_rank(values: Tensor) -> Tensor:
    """The rows of this tensor-parallel rank: sequence parallelism cuts the tokens that reach a router."""
    first, size = _range_of_this_rank(len(values))
    return values[first : first + size]


def _range_of_this_rank(tokens: int) -> tuple[int, int]:
    """Its first one of so many tokens, and how many it has."""
    group = parallel_state.get_tensor_model_parallel_group()
    size = tokens // group.size()
    return group.rank() * size, size
