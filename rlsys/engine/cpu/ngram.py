"""SGLang's NGRAM speculation on a host without CUDA: its operators in plain torch.

A draft is a tree of n tokens that followed earlier occurrences of the request's last n-gram. Its root, node 0, is the
last verified token. The model verifies all nodes in one pass, in which a node attends only to its ancestors. The tree
is then walked from the root as long as tokens are accepted. hooks.py registers these operators only for an engine
with --speculative-algorithm.

Shapes: b requests, n nodes of each request's tree, T tokens, V vocabulary.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Step = Callable[[int, int, Sequence[int]], tuple[int | None, int]]
"""(request, node, children of the node) -> (the accepted child or None, the token after the node)."""


def tree_links(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
    b: int,
    n: int,
) -> None:
    """Compute the links of each tree from the mask of ancestors.

    Args:
        mask: Whether a node attends to another node of its tree, `[b n n]`.
        lengths: Number of cached tokens of each request, `[b]`.
        positions: Position of each node in its sequence, `[b n]`, written in place.
        index: Index of each node among all nodes, `[b, n]`, written in place.
        child: First child of each node, or -1, `[b, n]`, written in place.
        sibling: Next sibling of each node, or -1, `[b, n]`, written in place.
    """
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    trees = mask[: b * n * n].view(b, n, n)
    first, siblings = _derive_tree_links(trees.numpy().reshape(-1), b, n)
    child.copy_(first)
    sibling.copy_(siblings)
    index.copy_(torch.arange(b * n).view(b, n))
    ancestors = torch.ones(n, n, dtype=torch.bool).tril(-1)
    positions.copy_(((trees & ancestors).sum(-1) + lengths[:, None]).flatten())


def cache_locations(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, **_: Any
) -> Tensor:
    """Return the cache locations of each request's tokens from start to end, concatenated."""
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=False)
    return torch.cat([req_to_token[row, start:end] for row, start, end in rows]).long()


def assign_locations(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, locations: Tensor, _: int
) -> None:
    """Write cache locations to the rows of the table. This is the inverse of cache_locations."""
    first = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=False):
        table[row, start:end] = locations[first : first + end - start].to(table.dtype)
        first += end - start


def _walk(
    predicted: Tensor,
    accepted: Tensor,
    counts: Tensor,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
    step: Step,
) -> None:
    """Walk each tree from its root, as long as `step` accepts a child.

    Args:
        predicted: Token after each visited node, `[b n]`, written in place.
        accepted: Indices of the accepted nodes, root first, `[b, depth]`, written in place.
        counts: Number of accepted nodes without the root, `[b]`, written in place.
        index, child, sibling: See tree_links.
        step: Accepts a child of a node, or samples the token after the node.
    """
    for request in range(len(index)):
        node = depth = 0
        accepted[request, 0] = index[request, 0]
        while True:
            children, next_child = [], int(child[request, node])
            while next_child != -1 and depth + 1 < accepted.shape[1]:
                children.append(next_child)
                next_child = int(sibling[request, next_child])
            next_node, token = step(request, node, children)
            predicted[int(index[request, node])] = token
            if next_node is None:
                break
            node, depth = next_node, depth + 1
            accepted[request, depth] = index[request, node]
        counts[request] = depth


def verify_greedy(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrieve_index: Tensor,
    retrieve_next_token: Tensor, retrieve_next_sibling: Tensor, target_predict: Tensor, topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Accept the child whose token is the model's most probable one.

    candidates (tokens of the nodes) and target_predict (most probable token after each node): `[b, n]`.
    """

    def step(request: int, node: int, children: Sequence[int]) -> tuple[int | None, int]:
        token = int(target_predict[request, node])
        return next((c for c in children if int(candidates[request, c]) == token), None), token

    _walk(
        predicts,
        accept_index,
        accept_token_num,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        step,
    )
    return predicts, accept_index, accept_token_num


def verify_sampled(
    *, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor, target_probs: Tensor, **_: Any,
) -> None:  # fmt: skip
    """Accept a child with its probability under the model; otherwise sample from the model without rejected tokens.

    The distribution and the log-probs of tokens are the same as without drafts. target_probs: `[b, n, V]`.
    """

    def step(request: int, node: int, children: Sequence[int]) -> tuple[int | None, int]:
        probs = target_probs[request, node].double().clone()
        mass = 0.0
        coin = float(uniform_samples[request, node])
        for c in children:
            token = int(candidates[request, c])
            mass += float(probs[token])
            if coin <= mass:
                return c, token
            probs[token] = 0.0
        sums = probs.cumsum(0)
        sample = torch.searchsorted(sums, float(uniform_samples_for_final_sampling[request]) * sums[-1])
        return None, int(sample.clamp(max=len(sums) - 1))

    _walk(
        predicts,
        accept_index,
        accept_token_num,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        step,
    )


def first_locations(counts: Tensor, locations: Tensor, out: Tensor) -> None:
    """Write the first `counts` of each request's locations `[b n]` to `out`, concatenated."""
    first = 0
    for row, count in zip(locations.view(len(counts), -1), counts.tolist(), strict=True):
        out[first : first + count] = row[:count]
        first += count


def accepted_locations(index: Tensor, locations: Tensor, out: Tensor, _: int) -> None:
    """Write the locations of the accepted nodes to `out`; -1 in `index` is padding."""
    nodes = index.flatten()
    nodes = nodes[nodes >= 0].long()
    out[: len(nodes)] = locations[nodes]


def tree_attention(
    upstream: Callable[..., Tensor], backend: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any,
    save_kv_cache: bool = True, **options: Any,
) -> Tensor:  # fmt: skip
    """Compute the attention of a verification pass, in which a node attends to cached tokens and its ancestors.

    All other passes use SGLang's function. q: `[b n, heads d]`.
    """
    if not batch.forward_mode.is_target_verify():
        return upstream(backend, q, k, v, layer, batch, save_kv_cache, **options)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool, n = backend.token_to_kv_pool, batch.spec_info.draft_token_num
    pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    queries, out, first = q.view(-1, n, layer.tp_q_head_num, layer.qk_head_dim), [], 0
    for query, row, length in zip(
        queries, batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True
    ):
        size = n * (length + n)
        mask = batch.spec_info.custom_mask[first : first + size].view(n, length + n)
        first += size
        locations = backend.req_to_token_pool.req_to_token[row, : length + n].long()
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[locations].transpose(0, 1)[None],
            values[locations].transpose(0, 1)[None],
            attn_mask=mask, scale=layer.scaling, enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )  # fmt: skip
        out.append(attended[0].transpose(0, 1).reshape(n, -1))
    return torch.cat(out)


def worker(algorithm: str) -> Any:
    """Set the operators of this module in SGLang's modules, and return SGLang's worker class.

    Returns:
        None for an algorithm other than NGRAM.
    """
    if algorithm != "NGRAM":
        return None
    kernels = types.ModuleType("sgl_kernel.speculative")
    kernels.reconstruct_indices_from_tree_mask = tree_links  # type: ignore[attr-defined]
    names = {"sgl_kernel": types.ModuleType("sgl_kernel"), "sgl_kernel.speculative": kernels}
    stand_ins = {name: module for name, module in names.items() if "sgl_kernel" not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        from sglang.srt.mem_cache import memory_pool
        from sglang.srt.speculative import eagle_utils, ngram_worker, spec_utils
    finally:
        for name in stand_ins:
            del sys.modules[name]
    modules: Any = ngram_worker, eagle_utils, spec_utils, memory_pool
    worker_module, verify_module, location_module, pool_module = modules
    worker_module.reconstruct_indices_from_tree_mask_func = tree_links
    verify_module.verify_tree_greedy_func = verify_greedy
    verify_module.tree_speculative_sampling_target_only = verify_sampled
    verify_module.sampling_softmax = lambda logits, temperatures: torch.softmax(logits / temperatures, -1)
    # The config refuses truncation (top_k, top_p) together with drafts.
    verify_module.top_k_renorm_prob = verify_module.top_p_renorm_prob = lambda probs, _: probs
    location_module.fill_front_out_cache_loc_func = first_locations
    location_module.fill_accept_out_cache_loc_func = accepted_locations

    def move(pool: Any, target: Tensor, source: Tensor) -> None:
        pool_module.move_kv_cache_native(pool.k_buffer, pool.v_buffer, target, source)

    pool_module.MHATokenToKVPool._move_kv_cache_impl = move
    return ngram_worker.NGRAMWorker


def no_op(*_: Any, **__: Any) -> None: ...


REPLACED: dict[str, Callable[..., Any]] = {
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup": no_op,
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": assign_locations,
}
AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend": tree_attention,
}
"""SGLang's operator -> its wrapper, which gets SGLang's function as first argument."""
