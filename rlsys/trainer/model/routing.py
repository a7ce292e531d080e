"""Router replay and expert load of this rank's MoE routers.

Replay makes a token use the experts that the engine selected when it sampled the token (R3, `trainer.replay =
engine`; Ma et al. 2025, "Stabilizing MoE reinforcement learning by aligning training and inference routers"), or
those that the trainer selected in its scoring pass at the start of the step (R2, `trainer.replay = trainer`; Zheng et
al. 2025, GSPO, section 5.3). Only the selection is replayed. The weights of the selected experts are the router's own
scores, so that the router still learns.

A token that several sequences share (rlsys/trainer/prefixes.py) is routed once, but counts once for each of these
sequences in the auxiliary loss, the update of the experts' biases and the metrics. These therefore do not depend on
the assignment of sequences to micro-batches. The token replays the engine's selection for the first sequence.

Shapes: T tokens of a micro-batch, P tokens of this rank's routers, L layers of the whole model, E experts of a layer,
k experts per token.
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
from rlsys.trainer.model.context_parallel import Share
from rlsys.trainer.pack import MicroBatch

ABSENT = -1
"""Value in place of an expert id for a token without a route to replay."""

TopK = Callable[..., tuple[Tensor, Tensor]]
"""Megatron's selection: (scores `[P, E]`, k, num_groups, group_topk) -> (scores, ids) of the selected experts."""


def decode(
    spans: Iterable[RouteSpan | LayerRoutes],
    tokens: int,
    layers: int,
    topk: int,
    layer_ids: Sequence[int] | None = None,
    experts: int | None = None,
    routed: Sequence[int] | None = None,
) -> Tensor:
    """Decode the experts that engines selected at packed positions.

    Args:
        spans: Routes from engines, at packed positions.
        tokens: T.
        layers: L.
        topk: k.
        layer_ids: Indices of the requested layers; None: all layers of the model.
        experts: E. A token is ABSENT if a router cannot have selected its experts in one of the layers `routed`,
            because an expert does not exist or occurs twice. None: routes are not checked.
        routed: Indices of this rank's layers with experts, which include the requested ones; None: `layer_ids`.

    Returns:
        `[T, requested layers, k]` int16; ABSENT if no span covers the token.
    """
    selected_layers = range(layers) if layer_ids is None else layer_ids
    checked_layers = selected_layers if routed is None else routed
    columns = [list(checked_layers).index(layer) for layer in selected_layers]
    out = np.full((tokens, len(selected_layers), topk), ABSENT, dtype=np.int16)
    for span in spans:
        n = span.end - span.start
        if isinstance(span, LayerRoutes):
            index_of_layer = {layer: i for i, layer in enumerate(span.layers)}
            if span.experts.shape != (len(span.layers), n, topk):
                continue
            routes = span.experts[[index_of_layer[layer] for layer in checked_layers]].transpose(1, 0, 2)
        else:
            width, remainder = divmod(len(span.experts), max(1, n * layers * topk))
            if remainder or width not in (1, 2):
                continue
            rows = np.frombuffer(span.experts, dtype=f"<u{width}").reshape(n, layers, topk)
            routes = rows[:, list(checked_layers)]
        selected = routes[:, columns].astype(np.int16)
        if experts is not None:
            selected[~_valid_routes(routes, experts)] = ABSENT
        out[span.start : span.end] = selected
    return torch.from_numpy(out)


class Sequences(NamedTuple):
    """Sequence of each token, for the auxiliary loss.

    Attributes:
        ids: `[P]`, index of each token's sequence, arbitrary at padding. With shared tokens `[N]`, index of the
            sequence of each pair (sequence, token).
        number: Number of sequences in the micro-batch.
        tokens: `[N]`, token of each pair, an index into P; None: no tokens are shared.
    """

    ids: Tensor
    number: int
    tokens: Tensor | None = None


def _valid_routes(routes: NDArray[np.unsignedinteger], experts: int) -> NDArray[np.bool_]:
    """Return, for each token, whether its expert ids are distinct and below `experts` in every layer, `[n]`.

    `routes`: `[n, layers, k]`.
    """
    sorted_ids = np.sort(routes.astype(np.int32), axis=2)
    distinct = np.diff(sorted_ids, axis=2, prepend=-1) > 0
    possible: NDArray[np.bool_] = np.all((sorted_ids < experts) & distinct, axis=(1, 2))
    return possible


class LayerReplay:
    """Object in place of Megatron's RouterReplay in one router, which records the selected experts.

    Megatron's class does not support tokens without a route (ABSENT). With activation recomputation, a router runs
    twice per micro-batch. The second run is in the backward pass, after `Routing.begin` of a later micro-batch, so
    that the first run queues its target for the second.
    """

    def __init__(self, router: TopKRouter) -> None:
        self.router = router
        self._custom = router.router_replay
        """The model's own selection method (rlsys.trainer.model.topk_routing); None: Megatron's."""
        self.layer: int = router.layer_number - 1
        """Index of the router's layer in the model."""
        self.target: Tensor | None = None
        """[P, k], experts to use, partly ABSENT; None: no replay."""
        self.token_counts: Tensor | None = None
        """[P] int64, number of sequences for which each token counts in the metrics."""
        self.sequences: Sequences | None = None
        """Sequences of the tokens, for the auxiliary loss."""
        self.expert_ids: Tensor | None = None
        """[P, k], experts that the last forward pass used."""
        self._pass_sequences: Sequences | None = None
        """`sequences` of the running pass."""
        self._sums: Tensor | None = None
        self._pending: deque[tuple[Tensor | None, Sequences | None]] = deque()
        if router.get_aux_loss_coeff("aux_loss"):
            router._apply_aux_loss = self._balance_loss
        if router.enable_expert_bias:
            self._count_for_bias = router._apply_expert_bias
            router._apply_expert_bias = self._count_all_for_bias

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return (scores of the selected experts, their ids), `[P, k]` each.

        Megatron's topk_routing_with_score_function calls it in place of `choose`.
        """
        if self._custom is not None:
            _, router_ids = self._custom.get_replay_topk(scores, topk, num_groups, group_topk, choose)
        else:
            _, router_ids = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recompute = self.router.training and torch.is_grad_enabled() and bool(self._pending)
        target, self._pass_sequences = self._pending.popleft() if recompute else (self.target, self.sequences)
        if self.router.training and not torch.is_grad_enabled():
            self._pending.append((target, self._pass_sequences))
        expert_ids = router_ids if target is None else torch.where(target == ABSENT, router_ids, target)
        if not recompute:
            self.expert_ids = expert_ids
            if self.router.training:
                self._count(router_ids, expert_ids, target)
        return scores.gather(1, expert_ids), expert_ids

    def _balance_loss(
        self, probs: Tensor, scores: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Add the auxiliary loss to the graph of `probs`; replaces the router's method.

        Megatron computes the loss of a whole micro-batch, which depends on the assignment of sequences to
        micro-batches. This method computes the loss of each sequence s and averages it over tokens (DeepSeek-V3, eq.
        17 to 20): coefficient * E * sum_e f_se P_se, where f_se is the share of the sequence's selections that expert
        e has, and P_se is the mean score of expert e over the sequence's tokens.

        Args:
            probs: Weights of the selected experts, to whose graph the loss is attached.
            scores: `[P, E]`, 0 at padding.
            routing_map: `[P, E]`, whether an expert is selected; 0 at padding.
            with_padding_mask: Part of the replaced signature; not used.
        """
        router = self.router
        coefficient, group = router.get_aux_loss_coeff("aux_loss"), router.tp_cp_group
        assert self._pass_sequences is not None, "Routing.begin sets it"
        ids, number, shared_tokens = self._pass_sequences
        if shared_tokens is not None:
            scores, routing_map = scores[shared_tokens], routing_map[shared_tokens]
        counts = scores.new_zeros(number, scores.shape[1]).index_add_(0, ids, routing_map.to(scores))
        if group.size() > 1:
            dist.all_reduce(counts, group=group)
        selections = counts.sum(1, keepdim=True)
        shares = counts / selections.clamp(min=1)
        total = coefficient * scores.shape[1] * (scores * shares[ids]).sum()
        tokens = (selections.sum() / router.topk).clamp(min=1)
        return router.attach_and_log_load_balancing_loss(
            probs, coefficient, total / tokens, "load_balancing_loss", group, valid_token_count=tokens
        )

    def _count_all_for_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the selections for the update of the experts' biases; replaces the router's method.

        A shared token counts once for every sequence that has it.
        """
        shared = None if self._pass_sequences is None else self._pass_sequences.tokens
        if shared is None:
            self._count_for_bias(routing_map, padding_mask)
            return
        times = torch.bincount(shared, minlength=len(routing_map))
        if padding_mask is not None:
            times = times * ~padding_mask
        self._count_for_bias(routing_map * times[:, None])

    def _count(self, router_ids: Tensor, expert_ids: Tensor, target: Tensor | None) -> None:
        """Add the selection to the sums for metrics, on the device to avoid a synchronisation with the host.

        Args:
            router_ids: `[P, k]`, experts that the router would select.
            expert_ids: `[P, k]`, experts that are used.
            target: `[P, k]`, experts to replay; None: no replay.
        """
        counts = self.token_counts if self.token_counts is not None else expert_ids.new_ones(len(expert_ids))
        if self._sums is None:
            self._sums = expert_ids.new_zeros(3 + self.router.num_experts, dtype=torch.int64)
        total, replayed, agreeing, load = self._sums[0], self._sums[1], self._sums[2], self._sums[3:]
        load.scatter_add_(0, expert_ids.flatten(), counts[:, None].expand_as(expert_ids).flatten())
        total += counts.sum()
        if target is not None:
            routed = counts * (target[:, 0] != ABSENT)
            replayed += routed.sum()
            equal = (router_ids.sort(1).values == expert_ids.sort(1).values).all(1)
            agreeing += (equal * routed).sum()

    def take_sums(self) -> tuple[Tensor, Tensor]:
        """Return the sums since the last call, on the host, and reset them.

        Returns:
            `[3]`, numbers of tokens that predict another token: all, those with replay, and those with replay for
            which the router would have selected the same experts. `[E]`, number of tokens of each expert.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            sums = torch.zeros(3 + self.router.num_experts, dtype=torch.int64)
        sums = sums.cpu()
        return sums[:3], sums[3:]


class Routing:
    """Owner of every router's replay on this rank. Call `begin` before a chunk's forward pass, `end` after it."""

    def __init__(self, modules: list[GPTModel], layers: int, mode: str) -> None:
        """Take over the routers of the chunks.

        Args:
            modules: This rank's model chunks.
            layers: L.
            mode: The value of trainer.replay.
        """
        self._mode = self._configured_mode = mode
        self._layers = layers
        self._modules = modules
        moe = modules[0].config
        self._balanced = bool(moe.moe_aux_loss_coeff or moe.moe_router_bias_update_rate)
        self._replays: list[list[LayerReplay]] = []
        for module in modules:
            # The router of an MTP layer is excluded: engines return no routes of it.
            routers = [m for m in module.decoder.modules() if isinstance(m, TopKRouter)]
            self._replays.append([LayerReplay(r) for r in routers])
            for replay in self._replays[-1]:
                replay.router.router_replay = replay

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable replay within the context: routers select experts themselves, and `end` stores no selection."""
        self._mode = "off"
        try:
            yield
        finally:
            self._mode = self._configured_mode

    @property
    def layers(self) -> list[int]:
        """Indices of the layers whose engine routes this rank replays; empty unless trainer.replay = engine."""
        if self._configured_mode != "engine":
            return []
        return sorted({replay.layer for replay in self._layer_replays})

    @property
    def _layer_replays(self) -> list[LayerReplay]:
        return [replay for chunk in self._replays for replay in chunk]

    def begin(self, chunk: int, micro: MicroBatch, share: Share) -> None:
        """Set targets, token counts and sequences of this chunk's routers for a forward pass of the micro-batch."""
        if not self._replays[chunk]:
            return
        multiplicity = share.multiplicity() if share.prefixes else 1
        token_counts = _local_rows((share.predicts & (not micro.copy)) * multiplicity)
        sequences = self._sequences(micro, share)
        targets = self._targets(chunk, micro, share)
        for i, replay in enumerate(self._replays[chunk]):
            replay.token_counts, replay.sequences = token_counts, sequences
            replay.target = None if targets is None else targets[:, i]

    def _sequences(self, micro: MicroBatch, share: Share) -> Sequences | None:
        """Return the sequences of the micro-batch's tokens; None without load balancing."""
        if not self._balanced:
            return None
        ids = micro.ids.to(share.source.device)
        if not share.prefixes:
            return Sequences(_local_rows(ids[share.source.clamp(min=0)]), micro.sequences)
        first, size = _local_range(len(share.source))
        is_local = (share.padded_index >= first) & (share.padded_index < first + size)
        return Sequences(ids[is_local], micro.sequences, share.padded_index[is_local] - first)

    def padding_mask(self, chunk: int, micro: MicroBatch, share: Share) -> Tensor | None:
        """Return which tokens load balancing must ignore, `[1, tokens]` bool: padding and masked copies.

        The mask of the first pipeline stage covers the tokens of all tensor-parallel ranks, because Megatron shards
        it; that of other stages covers this rank's tokens.

        Returns:
            The mask; None without load balancing.
        """
        replays = self._replays[chunk]
        if not replays or not self._balanced:
            return None
        padding = torch.ones_like(share.source, dtype=torch.bool) if micro.copy else share.source < 0
        first = self._modules[chunk].pre_process
        return (padding if first else _local_rows(padding))[None]

    def _targets(self, chunk: int, micro: MicroBatch, share: Share) -> Tensor | None:
        """Return the experts to replay, `[P, layers of the chunk, k]` int64; None: no replay."""
        if self._mode == "trainer":
            return micro.own_routes.get(chunk)
        if self._mode == "off" or not micro.routes:
            return None
        replays = self._replays[chunk]
        layer_ids, router = [r.layer for r in replays], replays[0].router
        experts = decode(
            micro.routes,
            len(micro.tokens),
            self._layers,
            router.topk,
            layer_ids,
            router.num_experts,
            self.layers,
        )
        token_experts = experts.to(share.source.device)
        targets = torch.where(share.source[:, None, None] < 0, ABSENT, token_experts[share.source])
        return _local_rows(targets).long()

    def end(self, chunk: int, micro: MicroBatch) -> None:
        """Store the selection of the micro-batch's first scoring pass for replay (trainer.replay = trainer)."""
        replays = self._replays[chunk]
        if self._mode != "trainer" or not replays or replays[0].router.training or chunk in micro.own_routes:
            return
        micro.own_routes[chunk] = torch.stack(
            [r.expert_ids for r in replays if r.expert_ids is not None], dim=1
        )

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Return the metrics of all ranks since the last call; empty for a dense model. Collective.

        expert_load_max     tokens of the busiest expert divided by the mean per expert, in the worst layer
        expert_idle_share   share of experts without a token, in the worst layer
        replay_share        share of selections that are replayed, if replay is on
        replay_missing      number of tokens without a valid route, if replay is on
        route_agreement     share of replayed selections that the router would have made itself, if replay is on
        """
        sums = torch.zeros(3, dtype=torch.int64)
        experts = max((r.router.num_experts for r in self._layer_replays), default=0)
        load = torch.zeros(self._layers, experts, dtype=torch.int64)
        for replay in self._layer_replays:
            counts, loads = replay.take_sums()
            sums += counts
            load[replay.layer] += loads
        if dist.get_world_size() > 1:
            width = torch.tensor(experts, device=device)
            dist.all_reduce(width, dist.ReduceOp.MAX)
            load = torch.nn.functional.pad(load, (0, int(width) - experts))  # a stage may have no MoE layer
            packed = torch.cat([sums, load.flatten()]).to(device)
            dist.all_reduce(packed)
            sums, load = packed[:3].cpu(), packed[3:].view(load.shape).cpu()
        return self._metric_values([int(n) for n in sums], load)

    def _metric_values(self, sums: list[int], load: Tensor) -> dict[str, float]:
        """Compute the metrics from `take_sums` over all routers, and the load `[L, E]`."""
        total, replayed, agreeing = sums
        layer_loads = load[load.sum(1) > 0].double()
        if not len(layer_loads):
            return {}
        metrics = {
            "expert_load_max": float((layer_loads.max(1).values / layer_loads.mean(1)).max()),
            "expert_idle_share": float((layer_loads == 0).double().mean(1).max()),
        }
        if self._mode != "off":
            metrics["replay_share"] = replayed / max(total, 1)
            metrics["replay_missing"] = (total - replayed) / len(layer_loads)
            metrics["route_agreement"] = agreeing / max(replayed, 1)
        return metrics


def _local_rows(values: Tensor) -> Tensor:
    """Return this tensor-parallel rank's part `[T / t, ...]` of `values` `[T, ...]`.

    Sequence parallelism shards the tokens before a router.
    """
    first, size = _local_range(len(values))
    return values[first : first + size]


def _local_range(tokens: int) -> tuple[int, int]:
    """Return the first token of this tensor-parallel rank, and its number of tokens."""
    group = parallel_state.get_tensor_model_parallel_group()
    size = tokens // group.size()
    return group.rank() * size, size
